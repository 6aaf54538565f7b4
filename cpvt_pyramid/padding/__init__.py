"""The padding of batches.

- `batching` forms batches in which no image is padded by another;
- `mask` tells the backbone which tokens of a padded batch belong to their image;
- `invariance` tests whether the results of an image depend on its batch.

This file imports nothing: `batching` and `invariance` run without torch.
"""
