"""Resizing of a position table, and to a size of each image.

Shapes: B batch, H x W map, h x w table, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import graph_is_captured


def resize_table(table: Tensor, height: int, width: int, mode: str) -> Tensor:
    """A table (1, h, w, C) interpolated to the size of a map, (1, H, W, C); `mode` is 'bilinear' or
    'bicubic', as in `F.interpolate` with `align_corners=False`."""
    # A captured graph serves other sizes, too, so that it always interpolates.
    if not graph_is_captured() and (height, width) == table.shape[1:3]:
        return table
    table = F.interpolate(table.permute(0, 3, 1, 2), (height, width), mode=mode)
    return table.permute(0, 2, 3, 1)


def resize_table_each(
    table: Tensor, heights: Tensor, widths: Tensor, size: tuple[int, int], mode: str
) -> Tensor:
    """A table (1, h, w, C) interpolated to the size of each image of a padded batch, (B, H, W, C),
    and zero outside. The sizes (B,) may be on a GPU: they are not read on the host."""
    dtype = torch.promote_types(table.dtype, torch.float32)
    rows = interpolation_weights(heights.to(dtype), size[0], table.shape[1], mode)
    columns = interpolation_weights(widths.to(dtype), size[1], table.shape[2], mode)
    tall = torch.einsum('bHh,hwc->bHwc', rows.to(table.dtype), table[0])
    return torch.einsum('bWw,bHwc->bHWc', columns.to(table.dtype), tall)


CUBIC = -0.75  # the parameter a of Keys' cubic convolution that PyTorch has chosen


def cubic_near(u: Tensor) -> Tensor:
    """Keys' cubic convolution at distances from 0 to 1."""
    return ((CUBIC + 2) * u - (CUBIC + 3)) * u * u + 1


def cubic_far(u: Tensor) -> Tensor:
    """Keys' cubic convolution at distances from 1 to 2."""
    return ((CUBIC * u - 5 * CUBIC) * u + 8 * CUBIC) * u - 4 * CUBIC


def interpolation_weights(sides: Tensor, length: int, entries: int, mode: str) -> Tensor:
    """Weights (B, length, entries) of `F.interpolate` from `entries` values to `sides` (B,) values.

    Rows from `sides` on are zero. The dtype is that of `sides`.
    """
    at = torch.arange(length, device=sides.device, dtype=sides.dtype)
    source = (at + 0.5) * (entries / sides.clamp(min=1)[:, None]) - 0.5  # (B, length)
    if mode == 'bilinear':
        source = source.clamp(min=0)
    first = source.floor()
    t = (source - first)[..., None]
    # The taps around a source position, clamped to the table's border.
    if mode == 'bilinear':
        offsets = [0, 1]
        taps = [1 - t, t]
    else:
        offsets = [-1, 0, 1, 2]
        taps = [cubic_far(t + 1), cubic_near(t), cubic_near(1 - t), cubic_far(2 - t)]
    index = torch.stack([first + offset for offset in offsets], dim=-1).long().clamp(0, entries - 1)
    weights = torch.zeros(*source.shape, entries, device=sides.device, dtype=sides.dtype)
    weights = weights.scatter_add(2, index, torch.cat(taps, dim=-1))
    return weights * (at < sides[:, None])[..., None]
