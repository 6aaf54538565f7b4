"""Which tokens of a padded batch belong to their image.

`valid` is (B, 2): the true height and width of each image in pixels. `mask` is a boolean
(B, H, W, 1): True where a token belongs to its image, False in the padding of the batch; None where
nothing is padding. Images start at the top left corner, so the mask of a coarser map is every k-th
row and column of the finer one.
"""

from typing import Optional

import torch
from torch import Tensor


def pixel_mask(valid: Optional[Tensor], image: Tensor) -> Optional[Tensor]:
    """Pixel mask (B, H, W, 1) of a batch (B, C, H, W), from each image's `valid` size."""
    if valid is None:
        return None
    check_valid(valid, image.shape[0])
    rows = torch.arange(image.shape[2], device=image.device)
    columns = torch.arange(image.shape[3], device=image.device)
    height, width = valid.to(image.device).unsqueeze(-1).unbind(1)  # (B, 1) each
    return ((rows < height)[:, :, None] & (columns < width)[:, None])[..., None]


def split_validity(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Images, their validity channel (B, 1, H, W), and their true heights and widths (B, 2).

    Height and width are 0 if a sliding window lies entirely in the padding.
    """
    images, channel = images[:, :-1], images[:, -1:]
    inside = channel[:, 0] > 0.5
    valid = torch.stack([inside[:, :, 0].sum(1), inside[:, 0].sum(1)], dim=1)
    return images, channel, valid


def check_valid(valid: Tensor, images: int) -> None:
    """Raise a ValueError unless `valid` has a height and a width for each of the images."""
    if not isinstance(valid, Tensor) or tuple(valid.shape) != (images, 2):
        got = tuple(valid.shape) if isinstance(valid, Tensor) else type(valid).__name__
        if got == 'Proxy':
            raise ValueError("torch.fx cannot trace valid; set concrete_args={'valid': None}")
        raise ValueError(
            f'valid must be a tensor of shape ({images}, 2), the height and width of each image, '
            f'got {got}'
        )


def subsample(mask: Optional[Tensor], k: int) -> Optional[Tensor]:
    """Mask of the map that has one token for each k x k tokens of this one."""
    if mask is None or k == 1:
        return mask
    # Not a slice: torch.export would compare its strides, and refuse sizes by named dimensions.
    rows, columns = (torch.arange(0, side, k, device=mask.device) for side in mask.shape[1:3])
    return mask.index_select(1, rows).index_select(2, columns)


def valid_sizes(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Height and width, (B,) each, of the images in tokens."""
    return mask[:, :, 0, 0].sum(1), mask[:, 0, :, 0].sum(1)


def fill_outside(x: Tensor, mask: Optional[Tensor], value: float = 0) -> Tensor:
    """Tokens (B, H, W, C) with this value in the padding."""
    return x if mask is None else x.masked_fill(~mask, value)


def mean_inside(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """(B, C), the mean of a map (B, H, W, C) over the tokens of each image."""
    if mask is None:
        return x.mean((1, 2))
    return fill_outside(x, mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)


def key_mask(mask: Optional[Tensor]) -> Optional[Tensor]:
    """A mask of keys (B, M) as `ops.attend` takes it, (B, 1, 1, M).

    Where no key is left, all are: what is wholly padding attends to itself. Attending to nothing
    would give NaN.
    """
    return None if mask is None else (mask | ~mask.any(dim=1, keepdim=True))[:, None, None]
