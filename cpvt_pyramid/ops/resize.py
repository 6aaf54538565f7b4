"""Resizing of a position table."""

import torch.nn.functional as F
from torch import Tensor

from .dispatch import graph_is_captured


def resize_table(table: Tensor, height: int, width: int, mode: str) -> Tensor:
    """A table (1, h, w, C) interpolated to (1, height, width, C).

    Args:
        table: the table.
        height: of the result.
        width: of the result.
        mode: 'bilinear' or 'bicubic', as in `F.interpolate` with `align_corners=False`.
    """
    # A captured graph serves other sizes, too, so that it always interpolates.
    if not graph_is_captured() and (height, width) == table.shape[1:3]:
        return table
    table = F.interpolate(table.permute(0, 3, 1, 2), (height, width), mode=mode)
    return table.permute(0, 2, 3, 1)
