"""Tells the backbone which part of a padded batch is image.

A data preprocessor appends a channel to the images, 1 inside an image and 0 in the padding, and the
backbone splits it off. The channel survives sliding windows, wrappers and DDP. A batch without
padding has no such channel.

Most padded batches of inference are of one image, which `pad_size_divisor` pads. Where all images
of a batch have one size, `with_validity` notes it at the tensor, as its attribute `image_size`: the
backbone then crops the batch and runs without masks (`crop_and_run`). A tensor made from this one
has no such attribute, and one that was changed in place since has a newer version than the note
(`noted_size`): both run with masks.

Necks and heads read the padding. In inference, an image that is padded by another one would get
other results than alone: the data preprocessor warns about such batches, and the programs of this
package form none (`cpvt_pyramid.padding.batching`).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..padding.batching import ceil_div, padded_size
from ..padding.mask import Padding


class AppendsValidity(nn.Module):
    """Mixin, listed before the data preprocessor class that pads and stacks.

    Args:
        mean: one value for each channel of the images; OpenMMLab's own
            takes 1 or 3.
        std: one value for each channel.
        valid_region: append the validity channel to padded batches. False: act as the data
            preprocessor does without this mixin.
        **options: see the data preprocessor.
    """

    batch_augments: Any  # of OpenMMLab's data preprocessors

    def __init__(
        self,
        mean: Optional[Sequence[float]] = None,
        std: Optional[Sequence[float]] = None,
        valid_region: bool = True,
        **options: Any,
    ) -> None:
        if mean is None or len(mean) in (1, 3):
            super().__init__(mean, std, **options)
        else:
            super().__init__(**options)
            if std is None or len(std) != len(mean):
                raise ValueError(f'std must have {len(mean)} values like mean, got {std}')
            self._enable_normalize = True
            for name, values in (('mean', mean), ('std', std)):
                self.register_buffer(name, torch.tensor(values).float()[:, None, None], False)
        self.valid_region = valid_region
        self.normalization = None
        if mean is not None and std is not None:
            self.normalization = Normalization(tuple(mean), tuple(std))

    def forward(self, data: dict, training: bool = False) -> dict:
        sizes = [image.shape[-2:] for image in data['inputs']]
        data = super().forward(data, training)
        if training and self.batch_augments is not None:  # which may resize or pad
            samples = zip(data['data_samples'], sizes)
            sizes = [sample.get('img_shape', size) for sample, size in samples]
        if not training and self.mixes_sizes(sizes):
            warnings.warn(
                'images of different sizes are in one batch: the backbone ignores the padding, but '
                'necks and heads read it, so that the results for an image depend on the others. '
                'Use batches of one image, or of one padded size, as cpvt test and '
                'cpvt infer do',
                stacklevel=2,
            )
        if self.valid_region:
            data['inputs'] = with_validity(data['inputs'], sizes)
        data['inputs'].normalization = self.normalization  # see `warn_of_normalization`
        return data

    def mixes_sizes(self, sizes: Sequence[tuple[int, int]]) -> bool:
        """True if images of these heights and widths have several padded sizes."""
        divisor = getattr(self, 'pad_size_divisor', 1)  # mmseg itself refuses mixed sizes
        return len({padded_size(size, divisor) for size in sizes}) > 1


class Normalization(NamedTuple):
    """What a data preprocessor subtracts from each channel, and what it divides by then."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def is_of_imagenet(self) -> bool:
        """True if it is that of ImageNet's weights, for RGB, at any scale of the pixels."""
        scale = self.std[0] / IMAGENET.std[0]
        pairs = zip((*self.mean, *self.std), (*IMAGENET.mean, *IMAGENET.std))
        return all(math.isclose(mine, scale * theirs, rel_tol=0.01) for mine, theirs in pairs)


IMAGENET = Normalization((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


def warn_of_normalization(images: Tensor) -> None:
    """Warn if the data preprocessor of a batch normalizes images in another way than that which
    weights from ImageNet expect. Batches that are made elsewhere do not say."""
    noted: Optional[Normalization] = getattr(images, 'normalization', None)
    if noted is None or len(noted.mean) != 3 or noted.is_of_imagenet():
        return
    warnings.warn(
        'the backbone has weights from ImageNet, which expect RGB normalized with '
        f'mean={list(IMAGENET.mean)}, std={list(IMAGENET.std)} and bgr_to_rgb=True, but the data '
        f'preprocessor has mean={list(noted.mean)}, std={list(noted.std)}',
        stacklevel=2,
    )


def with_validity(images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """The images with their validity channel, if any of them is padded.

    Args:
        images: (B, C, H, W), padded at the right and bottom.
        sizes: true height and width of each image.

    Returns:
        (B, C + 1, H, W), or `images` if nothing is padding. Where all images have one size, it has
        the attribute `image_size`, see `noted_size`.
    """
    distinct = {tuple(size) for size in sizes}
    if distinct == {tuple(images.shape[-2:])}:
        return images
    channel = images.new_zeros(len(images), 1, *images.shape[-2:])
    for cell, (height, width) in zip(channel, sizes):
        cell[:, :height, :width] = 1
    images = torch.cat([images, channel], dim=1)
    if len(distinct) == 1 and not images.is_inference():  # which has no version
        height, width = distinct.pop()
        noted = ImageSize(height, width, images._version)
        images.image_size = noted  # type: ignore[attr-defined]
    return images


class ImageSize(NamedTuple):
    """The one size of the images of a padded batch, and the version of the batch that has it.

    PyTorch counts the changes in place of a tensor as its version.
    """

    height: int
    width: int
    version: int


def noted_size(images: Tensor) -> Optional[tuple[int, int]]:
    """The height and width that `with_validity` noted at a batch, if it is unchanged since."""
    noted = getattr(images, 'image_size', None)
    if noted is None or noted.version != images._version:
        return None
    if noted.height > images.shape[2] or noted.width > images.shape[3]:  # resized
        return None
    return noted.height, noted.width


def crop_and_run(
    forward: Callable[[Tensor], tuple[Tensor, ...]],
    image: Tensor,
    size: tuple[int, int],
    strides: Sequence[int],
) -> list[Tensor]:
    """The maps of padded images of one size, zero in the padding, from the images alone.

    Args:
        forward: from images to their maps.
        image: (B, C, H, W), padded at the right and bottom.
        size: height and width of each image.
        strides: of the maps.
    """
    maps = []
    for x, stride in zip(forward(image[:, :, : size[0], : size[1]]), strides):
        down = ceil_div(image.shape[2], stride) - x.shape[2]
        right = ceil_div(image.shape[3], stride) - x.shape[3]
        maps.append(F.pad(x, (0, right, 0, down)))
    return maps


def check_validity(channel: Tensor, valid: Tensor, in_channels: int) -> None:
    """Raise a ValueError unless the channel is one that `with_validity` appends.

    An image of four channels without `in_channels=4` would be taken for a padded RGB image.
    """
    inside = ~Padding.of_batch(channel, valid).outside.permute(0, 3, 1, 2)
    if not torch.equal(channel, inside.to(channel.dtype)):
        raise ValueError(
            f'got an image of {in_channels + 1} channels, but in_channels={in_channels} and the '
            f'last channel is not a validity channel. For images of {in_channels + 1} channels set '
            f'in_channels={in_channels + 1} in the backbone'
        )
