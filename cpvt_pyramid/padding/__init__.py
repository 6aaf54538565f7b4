"""What is image and what is padding in a batch.

- `batching`: batches in which no image is padded by another;
- `mask`: which tokens of a padded batch belong to their image;
- `invariance`: do the results of an image depend on its batch?

This file imports nothing: `batching` and `invariance` run without torch.
"""
