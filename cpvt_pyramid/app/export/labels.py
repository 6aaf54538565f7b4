"""The class of each pixel from scores at the size of a map, as one operator of a graph.

Shapes: B batch, K classes, h x w map, H x W image in pixels.
"""

from typing import Optional

import torch
from torch import Tensor

from ..predict.pytorch.possible_classes import possible_classes
from .resizing import resample

UINT8, INT32 = 2, 6  # ONNX's numbers
DTYPES = {UINT8: torch.uint8, INT32: torch.int32}


def resized_labels(scores: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The class of each pixel (B, H, W) after scores (B, K, h, w) are resized by weights (B, H, h)
    and (B, W, w), those of one or two bilinear resizings."""
    possible = possible_classes(scores).any(0)
    dtype = UINT8 if scores.shape[1] <= 256 else INT32
    return best_of_classes(scores, rows, columns, possible, dtype)


@torch.library.custom_op('cpvt_pyramid::best_of_classes', mutates_args=())
def best_of_classes(
    scores: Tensor, rows: Tensor, columns: Tensor, possible: Tensor, dtype: int
) -> Tensor:
    """`resized_labels`, of some classes.

    An operator, because their number is not known to a graph. In ONNX it becomes a loop, see
    `onnx_file`, which needs memory for the pixels of one class at a time: all 150 of ADE20K would
    take 600 bytes a pixel. `possible` are (K,) booleans, and `dtype` is a number of `DTYPES`.
    """
    best: Optional[Tensor] = None
    for label in possible.nonzero()[:, 0].tolist():
        x = resample(rows, scores[:, label : label + 1], columns)[:, 0]
        if best is None:
            best, labels = x, torch.full_like(x, label, dtype=DTYPES[dtype])
        else:
            labels.masked_fill_(x > best, label)
            best = best.maximum(x)
    return labels


@best_of_classes.register_fake
def _(scores: Tensor, rows: Tensor, columns: Tensor, possible: Tensor, dtype: int) -> Tensor:
    size = scores.shape[0], rows.shape[1], columns.shape[1]
    return scores.new_empty(size, dtype=DTYPES[dtype])
