"""Images in batches and in tiles, work that processes share, and what is written for an image."""
