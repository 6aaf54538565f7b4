"""The images of a padded batch one by one, for RoI heads.

RoIAlign reads beyond the image where a box touches its right or bottom edge, is narrower than a
cell, or is enlarged first. On a map of the image alone it repeats the last cell up to one cell
outside, and further out it reads zeros. Nothing that the padding of a batch could be filled with
gives both, so the boxes of each image read the image's own part of the maps.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from .masked_map import cells_of


def split_images(maps: Sequence[Tensor]) -> Optional[list[list[Tensor]]]:
    """The maps of each image, without its padding.

    Args:
        maps: levels (B, C, h, w) of a batch. A level that is not a `MaskedMap` keeps its padding.

    Returns:
        For each image, its levels (1, C, h, w). None if no level is a `MaskedMap`.
    """
    cells = [cells_of(x) for x in maps]
    if not any(cells):
        return None
    levels = []
    for x, its_cells in zip(maps, cells):
        images = x.as_subclass(Tensor).split(1)
        if its_cells is not None:
            sides = torch.stack(its_cells.sides, 1).tolist()
            images = [image[..., :rows, :columns] for image, (rows, columns) in zip(images, sides)]
        # mmcv's RoIAlign reads raw NCHW memory, whatever the strides.
        levels.append([image.contiguous() for image in images])
    return [list(image) for image in zip(*levels)]
