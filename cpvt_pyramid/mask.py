"""Which tokens of a padded batch belong to their image.

`inside` is a boolean (B, H, W, 1): True where a token belongs to its image, False in the padding
of the batch; None where nothing is padding. It is anchored at the top left corner, so a coarser
map's `inside` is the finer one's at every k-th row and column.
"""

from typing import Optional

import torch
from torch import Tensor


def inside_of(valid: Optional[Tensor], image: Tensor) -> Optional[Tensor]:
    """`inside` of the pixels of a batch (B, C, H, W), by the images' true sizes (B, 2) or None."""
    if valid is None:
        return None
    rows = torch.arange(image.shape[2], device=image.device)
    columns = torch.arange(image.shape[3], device=image.device)
    height, width = valid.to(image.device).unsqueeze(-1).unbind(1)  # (B, 1) each
    return ((rows < height)[:, :, None] & (columns < width)[:, None])[..., None]


def coarser(inside: Optional[Tensor], k: int) -> Optional[Tensor]:
    """`inside` of the map with one token for each k x k of these."""
    return None if inside is None else inside[:, ::k, ::k]


def sides(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Height and width, (B,) each, of the images."""
    return inside[:, :, 0, 0].sum(1), inside[:, 0, :, 0].sum(1)


def fill_outside(x: Tensor, inside: Optional[Tensor], value: float = 0) -> Tensor:
    """The tokens (B, H, W, C) with this value where there is padding."""
    return x if inside is None else x.masked_fill(~inside, value)


def mean_inside(x: Tensor, inside: Optional[Tensor]) -> Tensor:
    """(B, C), the mean of a map (B, H, W, C) over the tokens of each image."""
    if inside is None:
        return x.mean((1, 2))
    return fill_outside(x, inside).sum((1, 2)) / inside.sum((1, 2)).clamp(min=1)
