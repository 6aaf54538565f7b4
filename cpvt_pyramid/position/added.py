"""Position encodings that are added to tokens before the first block."""

from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..versions import without_autocast
from .site import Site


class LearnedPosition(nn.Module):
    """A learned position embedding, interpolated to the size of the map (ViT, DeiT, PVT).

    In a padded batch the table is interpolated to the size of each image.

    Args:
        dim: channels of the tokens.
        size: height and width of the table.
        mode: of the interpolation: 'bilinear' as in PVT, or 'bicubic' as in DeiT.
    """

    def __init__(self, dim: int, size: tuple[int, int], mode: str = 'bilinear') -> None:
        super().__init__()
        self.mode = mode
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, *size, dim), std=0.02))

    @classmethod
    def at(cls, site: Site) -> 'LearnedPosition':
        """The embedding of a stage."""
        return cls(site.dim, site.map_size, site.mode)

    def forward(self, x: Tensor, grid: Optional[Grid] = None) -> Tensor:
        """Tokens (B, H, W, C) with their position added, in the same shape."""
        size = (x.shape[1], x.shape[2])
        if grid is None or grid.padding is None:
            return x + resize_table(self.table, size, self.mode)
        heights, widths = grid.padding.sizes()
        return x + resize_table_each(self.table, heights, widths, size, self.mode)


class SinCosPosition(nn.Module):
    """Sinusoidal embedding: sines and cosines of row and column, computed at the size of the map.

    A quarter of the channels each for sine and cosine of the row, then of the column, at
    wavelengths from 2 pi to 10,000 * 2 pi ("Attention is all you need", section 3.5, in 2-D).

    Args:
        dim: channels of the tokens, a multiple of 4.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim % 4:
            raise ValueError(
                f'dim of a 2-D sinusoidal embedding must be a multiple of 4, got {dim}'
            )
        self.dim = dim

    @classmethod
    def at(cls, site: Site) -> 'SinCosPosition':
        """The embedding of a stage."""
        return cls(site.dim)

    def forward(self, x: Tensor, grid: Optional[Grid] = None) -> Tensor:
        """Tokens (B, H, W, C) with their position added, in the same shape."""
        height, width = x.shape[1:3]
        rows = self.waves(height, x)[:, None].expand(-1, width, -1)
        columns = self.waves(width, x)[None].expand(height, -1, -1)
        return x + torch.cat([rows, columns], dim=2).to(x.dtype)

    def waves(self, side: int, like: Tensor) -> Tensor:
        """(side, C / 2), the sines and cosines of the rows or columns, in float32 at least."""
        quarter = self.dim // 4
        dtype = torch.promote_types(like.dtype, torch.float32)
        frequency = 10_000 ** (-torch.arange(quarter, device=like.device, dtype=dtype) / quarter)
        angles = torch.arange(side, device=like.device, dtype=dtype)[:, None] * frequency
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class NoPosition(nn.Module):
    """The identity, for an encoding that is not used."""

    def forward(self, x: Tensor, grid: Optional[Grid] = None) -> Tensor:
        """Tokens (B, H, W, C), unchanged."""
        return x


def resize_table(table: Tensor, size: Sequence[int], mode: str) -> Tensor:
    """A table (1, h, w, C) interpolated to the size of a map, (1, H, W, C); `mode` is 'bilinear' or
    'bicubic', as in `F.interpolate` with `align_corners=False`. At its own size it is the same."""
    height, width = size
    table = F.interpolate(table.permute(0, 3, 1, 2), (height, width), mode=mode)
    return table.permute(0, 2, 3, 1)


def resize_table_each(
    table: Tensor, heights: Tensor, widths: Tensor, size: tuple[int, int], mode: str
) -> Tensor:
    """A table (1, h, w, C) interpolated to the size of each image of a padded batch, (B, H, W, C),
    and zero outside. The sizes (B,) may be on a GPU: they are not read on the host.

    It is computed in float32 at least, and without autocast, as `F.interpolate` does.
    """
    dtype = torch.promote_types(table.dtype, torch.float32)
    rows = interpolation_weights(heights.to(dtype), size[0], table.shape[1], mode)
    columns = interpolation_weights(widths.to(dtype), size[1], table.shape[2], mode)
    with without_autocast(table.device.type):
        tall = torch.einsum('bHh,hwc->bHwc', rows, table[0].to(dtype))
        wide = torch.einsum('bWw,bHwc->bHWc', columns, tall)
    return wide.to(table.dtype)


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
