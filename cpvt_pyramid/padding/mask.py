"""Which part of a padded batch is padding.

A batch of images of different sizes is padded at the right and bottom. `valid`, (B, 2), holds the
true height and width of each image in pixels.
"""

from typing import Optional

import torch
from torch import Tensor

from ..versions import is_exporting

# Added to the scores of keys in the padding. exp(HIDDEN) is 0 in any precision, and unlike minus
# infinity it gives no NaN where all keys are padding.
HIDDEN = -30_000.0


class Padding:
    """The padding of a batch at the resolution of one map.

    An image begins at the top left corner, so that the rows and columns that lie outside of it
    describe its padding. Those of a coarser map are every k-th of these.

    Attributes:
        rows: (B, H), True for the rows outside of each image.
        columns: (B, W), True for the columns outside of each image.
        outside: (B, H, W, 1), True for the tokens outside of each image.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        stride: int = 1,
        levels: Optional[dict[int, 'Padding']] = None,
    ) -> None:
        self.rows = rows
        self.columns = columns
        self.outside = (rows[:, :, None] | columns[:, None])[..., None]
        self.stride = stride  # from one token to the next, in pixels
        self.levels = {} if levels is None else levels  # by stride; those of a batch share them
        self.levels[stride] = self
        self._hidden: Optional[Tensor] = None

    @classmethod
    def of_batch(cls, image: Tensor, valid: Tensor) -> 'Padding':
        """The padding of a batch (B, C, H, W), in pixels.

        An image whose size is 0 is all padding, as a sliding window may be.
        """
        check_valid(valid, image.shape[0])
        sizes = valid.to(image.device)
        rows = torch.arange(image.shape[2], device=image.device)
        columns = torch.arange(image.shape[3], device=image.device)
        return cls(rows >= sizes[:, :1], columns >= sizes[:, 1:])

    def coarser(self, k: int) -> 'Padding':
        """The padding of the map that has one token for each k x k tokens of this one."""
        stride = self.stride * k
        # An exported graph makes each one: it cannot tell that sizes are equal which were
        # computed in other ways.
        if stride not in self.levels or is_exporting():
            return Padding(self.rows[:, ::k], self.columns[:, ::k], stride, self.levels)
        return self.levels[stride]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Height and width, (B,) each, of the images in tokens."""
        return (~self.rows).sum(1), (~self.columns).sum(1)

    def hidden(self) -> Tensor:
        """(B, H, W, 1), `HIDDEN` outside of each image and 0 inside; made once."""
        if self._hidden is None:
            self._hidden = self.outside * HIDDEN
        return self._hidden

    def fill(self, x: Tensor, value: float = 0) -> Tensor:
        """Set tokens (B, H, W, C) outside of their image to a value."""
        return x.masked_fill(self.outside, value)


def fill_outside(x: Tensor, padding: Optional[Padding], value: float = 0) -> Tensor:
    """Set tokens (B, H, W, C) in the padding, if there is any, to a value."""
    return x if padding is None else padding.fill(x, value)


def mean_inside(x: Tensor, padding: Optional[Padding]) -> Tensor:
    """The mean (B, C) of a map (B, H, W, C) over the tokens of each image."""
    if padding is None:
        return x.mean((1, 2))
    height, width = padding.sizes()
    return padding.fill(x).sum((1, 2)) / (height * width).clamp(min=1)[:, None]


def check_valid(valid: Tensor, images: int) -> None:
    """Raise a ValueError unless `valid` has a height and a width for each of the images."""
    if not isinstance(valid, Tensor) or tuple(valid.shape) != (images, 2):
        got = tuple(valid.shape) if isinstance(valid, Tensor) else type(valid).__name__
        raise ValueError(
            f'valid must be a tensor of shape ({images}, 2), the height and width of each image, '
            f'got {got}'
        )


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
