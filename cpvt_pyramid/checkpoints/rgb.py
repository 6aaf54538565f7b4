"""Converting the first convolution of a checkpoint for RGB to other channels."""

from collections.abc import Sequence
from typing import Any, Union

import torch
from torch import Tensor

RGB = ('red', 'green', 'blue')


def check_rgb_weights(rgb_weights: Union[str, Sequence[str], None], in_channels: int) -> None:
    """Raise a ValueError unless `rgb_weights` can convert a checkpoint to `in_channels`."""
    if rgb_weights is None:
        return
    if isinstance(rgb_weights, str):
        is_known = rgb_weights in ('mean', 'repeat')
    else:
        names = set(rgb_weights)
        names_each_band = len(names) == len(rgb_weights) == in_channels
        is_known = names_each_band and not names.isdisjoint(RGB)
    if in_channels == 3 or not is_known:
        raise ValueError(
            f"rgb_weights needs in_channels other than 3, and must be 'mean', 'repeat' or the "
            f'different names of the bands, some of them {", ".join(RGB)}; got {rgb_weights!r} for '
            f'{in_channels} channels'
        )


def inflated(theirs: dict[str, Tensor], model: Any) -> tuple[dict[str, Tensor], str]:
    """Fit the first convolution of a checkpoint for RGB to a model's channels.

    Filters are scaled by 3 / channels, which keeps the scale of the features: with 'mean', an image
    with equal bands has the features that the RGB model computes for a gray image.

    Args:
        theirs: the checkpoint, under the names of the model.
        model: which has the attributes `first_conv`, the name of the weight that reads the image;
            `in_channels`; and `rgb_weights`, the filter of each channel. 'mean': the mean of red's,
            green's and blue's. 'repeat': red's, green's, blue's, red's and so on. Names of the
            bands, such as ('blue', 'green', 'red', 'nir'): their own for red, green and blue, the
            mean for others. None: the checkpoint is not changed.

    Returns:
        The checkpoint, and a line that says what was done, or ''.
    """
    name = model.first_conv
    rgb_weights = model.rgb_weights
    if rgb_weights is None or name not in theirs:
        return theirs, ''
    weight = theirs[name]
    if weight.dim() != 4 or weight.shape[1] != 3:
        return theirs, ''
    channels = model.in_channels
    bands = list(rgb_weights)
    if rgb_weights == 'mean':
        bands = ['mean'] * channels
    elif rgb_weights == 'repeat':
        bands = [RGB[i % 3] for i in range(channels)]
    filters = dict(zip(RGB, weight.unbind(1)))
    mean = weight.mean(1)
    made = torch.stack([filters.get(band, mean) for band in bands], dim=1) * (3 / channels)
    how = ', '.join(band if band in RGB else 'their mean' for band in bands)
    return theirs | {name: made}, f'{name} made for {channels} channels from RGB: {how}'
