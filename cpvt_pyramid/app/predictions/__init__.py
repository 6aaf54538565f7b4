"""What models predict for an image, and how it is drawn and written."""
