"""What the predictions of a test say, as an HTML page: of detectors, and of semantic segmentors."""
