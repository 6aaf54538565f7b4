"""How the backbone learns what of a padded batch is image and what is padding.

A data preprocessor appends a channel to the images, 1 inside and 0 in the padding, and the
backbone splits it off. It goes wherever the images go: through sliding windows, wrappers and
processes. A batch without padding has no such channel and takes the unmasked path.

Maps leave the backbone with zeros in the padding. A neck's biases make something else of them,
which its next convolution draws over the border; `ValidRegionConv` keeps them zero there, in
necks and heads that take a `conv_cfg`.
"""

import threading
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..ops import ceil_div


class AppendsValidity:
    """Mixed into a data preprocessor, before the class whose `forward` pads and stacks.

    Args:
        *args: as of that class.
        valid_region: append the channel where a batch is padded. False: as mm's own.
        **options: as of that class.
    """

    def __init__(self, *args: Any, valid_region: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.valid_region = valid_region

    def forward(self, data: dict, training: bool = False) -> dict:
        sizes = [image.shape[-2:] for image in data['inputs']]
        data = super().forward(data, training)
        if training and self.batch_augments is not None:  # which may resize, or pad once more
            samples = zip(data['data_samples'], sizes)
            sizes = [sample.get('img_shape', size) for sample, size in samples]
        if self.valid_region:
            data['inputs'] = with_validity(data['inputs'], sizes)
        return data


def with_validity(images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """The images with their validity channel, if any of them is padded.

    Args:
        images: (B, C, H, W), padded at the right and bottom.
        sizes: true height and width of each image.

    Returns:
        (B, C + 1, H, W), or the images as they are where nothing is padding.
    """
    if all(tuple(size) == tuple(images.shape[-2:]) for size in sizes):
        return images
    channel = images.new_zeros(len(images), 1, *images.shape[-2:])
    for cell, (height, width) in zip(channel, sizes):
        cell[:, :height, :width] = 1
    return torch.cat([images, channel], dim=1)


def valid_of(validity: Tensor) -> Tensor:
    """(B, 2), the sizes of the images that a validity channel (B, 1, H, W) marks."""
    inside = validity[:, 0] > 0.5
    return torch.stack([inside[:, :, 0].sum(1), inside[:, 0].sum(1)], dim=1)


class Region(threading.local):
    """Where the images are in the batch that a model works on; each backbone that reads the
    validity channel says so anew, before neck and head run."""

    inside: Optional[Tensor] = None  # (B, 1, H, W) booleans at the images' size; None: everywhere
    outside: dict[tuple[int, int], Tensor]  # the reverse, at the sizes of maps, as they are met

    def announce(self, inside: Optional[Tensor]) -> None:
        """Take (B, H, W, 1) booleans, True inside of each image; None: nothing is padding."""
        self.inside = None if inside is None else inside.permute(0, 3, 1, 2)
        self.outside = {}

    def clear(self, x: Tensor) -> Tensor:
        """Maps (B, C, h, w) with zeros in the padding."""
        if self.inside is None:
            return x
        if len(x) != len(self.inside):
            raise ValueError(
                f'ValidRegionConv got {len(x)} maps of a batch of {len(self.inside)} images; it is '
                f'for convolutions over whole images, not over regions of interest'
            )
        size = tuple(x.shape[-2:])
        if size not in self.outside:
            self.outside[size] = ~at_size(self.inside, size)
        return x.masked_fill(self.outside[size], 0)


REGION = Region()


def at_size(inside: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, 1, H, W) booleans at the size (h, w) of a map: those where its cells begin.

    Strides that are powers of 2 are exact, also where the last cell is cut short.
    """
    height, width = inside.shape[-2:]
    stride = 1
    while ceil_div(height, stride) > size[0]:
        stride *= 2
    if (ceil_div(height, stride), ceil_div(width, stride)) == size:
        return inside[..., ::stride, ::stride]
    return F.interpolate(inside.float(), size) > 0.5


@MODELS.register_module()
class ValidRegionConv(nn.Conv2d):
    """A convolution for necks and heads to which padding looks like the zeros beyond the border,
    as `conv_cfg=dict(type='ValidRegionConv')`. Its parameters are those of a `Conv2d`.

    What is padding is zero in what it reads, and again in what it gives. Convolutions,
    nearest-neighbour upsampling by 2 and ReLU are then the same for an image alone and in any
    batch; bilinear upsampling, pooling over the map and norms that mix positions are not.
    """

    def forward(self, x: Tensor) -> Tensor:
        return REGION.clear(super().forward(REGION.clear(x)))
