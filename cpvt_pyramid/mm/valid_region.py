"""How the backbone learns which part of a padded batch is image.

A data preprocessor appends a channel to the images, 1 inside an image and 0 in the padding, and the
backbone splits it off. The channel survives sliding windows, wrappers and DDP. A batch without
padding has no such channel and runs at full speed. After the backbone, `MaskedMap` takes over.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class AppendsValidity:
    """Mixin for a data preprocessor, before the class whose `forward` pads and stacks.

    Args:
        *args: see that class.
        valid_region: append the validity channel to padded batches. False: act as that class.
        **options: see that class.
    """

    def __init__(self, *args: Any, valid_region: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.valid_region = valid_region

    def forward(self, data: dict, training: bool = False) -> dict:
        sizes = [image.shape[-2:] for image in data['inputs']]
        data = super().forward(data, training)
        if training and self.batch_augments is not None:  # these may resize or pad
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
        (B, C + 1, H, W), or `images` if nothing is padding.
    """
    if all(tuple(size) == tuple(images.shape[-2:]) for size in sizes):
        return images
    channel = images.new_zeros(len(images), 1, *images.shape[-2:])
    for cell, (height, width) in zip(channel, sizes):
        cell[:, :height, :width] = 1
    return torch.cat([images, channel], dim=1)


def split_validity(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images without their validity channel, and their true heights and widths (B, 2).

    Both are 0 where a sliding window lies wholly in the padding.
    """
    inside = images[:, -1] > 0.5
    valid = torch.stack([inside[:, :, 0].sum(1), inside[:, 0].sum(1)], dim=1)
    return images[:, :-1], valid
