"""The data of the demo."""
