"""Images in batches and in tiles, on one machine or on many."""

from .batch_predictor import BatchPredictor as BatchPredictor
