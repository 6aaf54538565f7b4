"""Which part of a padded batch is padding.

A batch of images of different sizes is padded at the right and bottom. `valid`, (B, 2), holds the
true height and width of each image in pixels.

`BatchPadding` is made once for a batch, and has a `Padding` for each of its maps.
"""

from typing import Optional

import torch
from torch import Tensor

from ..versions import is_compiling, is_exporting
from .batching import ceil_div

# Added to the scores of keys in the padding. exp(MASKED) is 0 in any precision, and unlike minus
# infinity it gives no NaN where all keys are padding.
MASKED = -30_000.0


class Padding:
    """The padding of a batch at the resolution of one map.

    An image begins at the top left corner, so that its first row and column show its size. The
    padding of a coarser map is every k-th row and column of that of a finer one.

    Attributes:
        outside: (B, H, W, 1), True for the tokens outside of each image.
    """

    def __init__(self, outside: Tensor) -> None:
        self.outside = outside
        self._score_bias: dict[torch.dtype, Tensor] = {}

    @classmethod
    def of_batch(cls, image: Tensor, valid: Tensor) -> 'Padding':
        """The padding of a batch (B, C, H, W), in pixels.

        An image whose size is 0 is all padding, as a sliding window may be.

        Raises:
            ValueError: `valid` has no size for each image, or one that is not in the batch.
        """
        check_valid(valid, image)
        height, width = image.shape[2:]
        return cls.of_sizes(valid.to(image.device), height, width)

    @classmethod
    def of_sizes(cls, sizes: Tensor, height: int, width: int) -> 'Padding':
        """The padding of maps of height x width tokens, of which images fill `sizes`, (B, 2)."""
        positions = torch.arange(height + width, device=sizes.device)  # enough for both axes
        outside = positions >= sizes[:, :, None]  # (B, 2, height + width)
        rows = outside[:, 0, :height, None]
        columns = outside[:, 1, None, :width]
        return cls((rows | columns)[..., None])

    def coarser(self, k: int) -> 'Padding':
        """The padding of the map that has one token for each k x k tokens of this one."""
        return Padding(self.outside[:, ::k, ::k])

    def whole_patches(self, k: int) -> 'Padding':
        """The padding of the map that has one token for each patch of k x k tokens that an image
        fills. A side of less than k tokens is one patch."""
        sides = torch.stack(self.sizes(), dim=1)
        patches = torch.where(sides < k, sides.clamp(max=1), sides // k)
        height, width = self.outside.shape[1:3]
        return Padding.of_sizes(patches, ceil_div(height, k), ceil_div(width, k))

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Height and width, (B,) each, of the images in tokens."""
        first_column = self.outside[:, :, 0, 0]
        first_row = self.outside[:, 0, :, 0]
        return (~first_column).sum(1), (~first_row).sum(1)

    def score_bias(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(B, H, W, 1), `MASKED` outside of each image and 0 inside; made once in each dtype."""
        if dtype not in self._score_bias:
            self._score_bias[dtype] = (self.outside * MASKED).to(dtype)
        return self._score_bias[dtype]

    def fill(self, x: Tensor, value: float = 0) -> Tensor:
        """Set tokens (B, H, W, C) outside of their image to a value."""
        return x.masked_fill(self.outside, value)


class BatchPadding:
    """The padding of a batch at the resolution of each of its maps, where there is any.

    Args:
        image: the batch, (B, C, H, W).
        valid: (B, 2), the true height and width of each image. None: nothing is padding.
    """

    def __init__(self, image: Tensor, valid: Optional[Tensor]) -> None:
        self.maps: dict[int, Padding] = {}  # by stride, in pixels
        if valid is not None:
            self.maps[1] = Padding.of_batch(image, valid)

    def at(self, stride: int, finer: int = 1) -> Optional[Padding]:
        """The padding of the map whose tokens are `stride` pixels apart; None: there is none.

        It is made once, from that of a map of the stride `finer`, which has been made before.
        """
        if not self.maps or stride == finer:
            return self.maps.get(stride)
        # An exported graph makes each one: it cannot tell that sizes are equal which were
        # computed in other ways.
        if stride not in self.maps or is_exporting():
            self.maps[stride] = self.maps[finer].coarser(stride // finer)
        return self.maps[stride]


def fill_outside(x: Tensor, padding: Optional[Padding], value: float = 0) -> Tensor:
    """Set tokens (B, H, W, C) in the padding, if there is any, to a value."""
    return x if padding is None else padding.fill(x, value)


def mean_inside(x: Tensor, padding: Optional[Padding]) -> Tensor:
    """The mean (B, C) of a map (B, H, W, C) over the tokens of each image."""
    if padding is None:
        return x.mean((1, 2))
    height, width = padding.sizes()
    # The sum of a large map overflows in half precision.
    total = padding.fill(x).sum((1, 2), dtype=torch.promote_types(x.dtype, torch.float32))
    return (total / (height * width).clamp(min=1)[:, None]).to(x.dtype)


def check_image(image: Tensor, in_channels: int) -> None:
    """Raise a ValueError unless an image is a batch with these channels and at least one pixel."""
    check_batch(image, in_channels)
    if image.shape[1] != in_channels:
        raise ValueError(
            f'the image must have in_channels={in_channels} channels, got {image.shape[1]}'
        )
    if 0 in image.shape[2:]:
        height, width = image.shape[2:]
        raise ValueError(
            f'the image must have a height and a width of at least 1, got {height} x {width}'
        )


def check_batch(image: Tensor, in_channels: int) -> None:
    """Raise a ValueError unless an image has the four dimensions of a batch."""
    if image.dim() != 4:
        raise ValueError(
            f'the image must be a batch (B, {in_channels}, H, W), got a tensor of shape '
            f'{tuple(image.shape)}'
        )


def check_valid(valid: Tensor, image: Tensor) -> None:
    """Raise a ValueError unless `valid` has a height and a width for each image (B, C, H, W).

    Their values are checked where that does not wait for a device: on the CPU, and not in graphs.
    """
    images, _, height, width = image.shape
    if not isinstance(valid, Tensor) or tuple(valid.shape) != (images, 2):
        got = tuple(valid.shape) if isinstance(valid, Tensor) else type(valid).__name__
        raise ValueError(
            f'valid must be a tensor of shape ({images}, 2), the height and width of each image, '
            f'got {got}'
        )
    if valid.dtype == torch.bool or valid.dtype.is_complex:
        raise ValueError(f'valid must hold numbers of pixels, got values of {valid.dtype}')
    for i, (image_height, image_width) in enumerate(readable_sizes(valid)):
        is_inside = 0 <= image_height <= height and 0 <= image_width <= width  # False for NaN
        if not is_inside:
            raise ValueError(
                f'valid must hold the height and width of each image, from 0 to those of the '
                f'batch, ({height}, {width}), got ({image_height}, {image_width}) for image {i}'
            )


def readable_sizes(valid: Tensor) -> list[list[float]]:
    """The sizes in a tensor (B, 2), or nothing where reading them would wait for a device or become
    part of a graph."""
    if type(valid) is not Tensor or not valid.is_cpu or is_compiling() or torch.jit.is_tracing():
        return []
    try:
        return valid.tolist()
    except RuntimeError:  # inside torch.func.vmap, where a tensor has no values
        return []


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
