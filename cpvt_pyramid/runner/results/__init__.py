"""What the results of a test say."""
