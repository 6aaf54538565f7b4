"""Position encodings that are added to tokens before the first block."""

from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor, nn

from .. import ops
from ..padding.mask import valid_sizes


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

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        _, height, width, _ = x.shape
        if mask is None:
            return x + ops.resize_table(self.table, height, width, self.mode)
        sizes = valid_sizes(mask)
        return x + ops.resize_table_each(self.table, *sizes, (height, width), self.mode)


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

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
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

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        return x


def position_table(
    kind: str, dim: int, image_size: Union[int, Sequence[int]], stride: int, mode: str = 'bilinear'
) -> nn.Module:
    """Build the encoding that is added before the first block of a stage.

    Args:
        kind: a key of `POSITIONS`. Kinds that are not added there give the identity.
        dim: channels of the tokens.
        image_size: side, or height and width, in pixels, of the images that a table is for.
        stride: pixels from one token to the next.
        mode: of the interpolation of a table.
    """
    sides = image_size if isinstance(image_size, (list, tuple)) else (image_size, image_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(
            f'pretrain_img_size (img_size in timm) must be a side in pixels, or a height and a '
            f'width, got {image_size!r}'
        )
    if kind == 'learned':
        height = ops.ceil_div(sides[0], stride)
        width = ops.ceil_div(sides[1], stride)
        return LearnedPosition(dim, (height, width), mode)
    if kind == 'sincos':
        return SinCosPosition(dim)
    return NoPosition()
