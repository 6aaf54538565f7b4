"""Which tokens of a padded batch belong to their image.

`valid` is (B, 2): the true height and width of each image in pixels. `mask` is a boolean
(B, H, W, 1): True where a token belongs to its image, False in the padding of the batch. Both are
None if nothing is padding. Images start at the top left corner, so the mask of a coarser map is
every k-th row and column of the finer one.
"""

from typing import Optional

import torch
from torch import Tensor


def pixel_mask(valid: Optional[Tensor], image: Tensor) -> Optional[Tensor]:
    """Pixel mask (B, H, W, 1) of a batch (B, C, H, W), from each image's `valid` size."""
    return None if valid is None else region_mask(valid, image)


def region_mask(valid: Tensor, image: Tensor) -> Tensor:
    """Pixel mask (B, H, W, 1) of a padded batch (B, C, H, W)."""
    check_valid(valid, image.shape[0])
    rows = torch.arange(image.shape[2], device=image.device)
    columns = torch.arange(image.shape[3], device=image.device)
    height, width = valid.to(image.device).unsqueeze(-1).unbind(1)  # (B, 1) each
    return ((rows < height)[:, :, None] & (columns < width)[:, None])[..., None]


def split_validity(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the validity channel off images (B, C + 1, H, W).

    Returns:
        The images (B, C, H, W); the channel (B, 1, H, W); and the true height and width (B, 2) that
        it shows, which are 0 if a sliding window lies entirely in the padding.
    """
    channel = images[:, -1:]
    inside = channel[:, 0] > 0.5
    heights = inside[:, :, 0].sum(1)
    widths = inside[:, 0].sum(1)
    return images[:, :-1], channel, torch.stack([heights, widths], dim=1)


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
    rows = torch.arange(0, mask.shape[1], k, device=mask.device)
    columns = torch.arange(0, mask.shape[2], k, device=mask.device)
    return mask.index_select(1, rows).index_select(2, columns)


def valid_sizes(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Height and width, (B,) each, of the images in tokens."""
    return mask[:, :, 0, 0].sum(1), mask[:, 0, :, 0].sum(1)


def fill_outside(x: Tensor, mask: Optional[Tensor], value: float = 0) -> Tensor:
    """Set tokens (B, H, W, C) in the padding to a value."""
    return x if mask is None else x.masked_fill(~mask, value)


def mean_inside(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """The mean (B, C) of a map (B, H, W, C) over the tokens that belong to each image."""
    if mask is None:
        return x.mean((1, 2))
    return fill_outside(x, mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)


def key_mask(mask: Optional[Tensor]) -> Optional[Tensor]:
    """A mask of keys (B, M) in the shape that `ops.attend` takes, (B, 1, 1, M).

    Where all keys are padding, all are attended to: attention to no key would give NaN.
    """
    if mask is None:
        return None
    is_empty = ~mask.any(dim=1, keepdim=True)
    return (mask | is_empty)[:, None, None]
