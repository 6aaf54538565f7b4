"""How the backbone learns what of a padded batch is image and what is padding.

A data preprocessor appends a channel to the images, 1 inside and 0 in the padding, and the
backbone splits it off. It goes wherever the images go: through batch augmentations, sliding
windows, wrappers and processes. A batch without padding has no such channel and takes the
unmasked path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class AppendsValidity:
    """Mixed into a data preprocessor, before the class whose `forward` pads and stacks."""

    valid_region = True

    def forward(self, data: dict, training: bool = False) -> dict:
        sizes = [image.shape[-2:] for image in data['inputs']]
        data = super().forward(data, training)
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


def split_validity(images: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Images of so many channels, and (B, H, W, 1) booleans: True inside of each image."""
    images, validity = images.split([channels, 1], dim=1)
    return images, validity.permute(0, 2, 3, 1) > 0.5  # batch augmentations may have resized it
