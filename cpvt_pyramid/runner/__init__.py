"""Training, testing and inference with mm, as the tools do it."""
