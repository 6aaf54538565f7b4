"""Reads the data set that a description declares: explicit paths in, one form in memory out."""

from collections.abc import Callable

from .coco import read_coco_data
from .data import Data
from .defects import Defects
from .description import Description
from .masks import read_masks
from .voc import read_voc
from .yolo import read_yolo

READERS: dict[str, Callable[[Description, Defects], Data]] = {
    'coco': read_coco_data,
    'yolo': read_yolo,
    'voc': read_voc,
    'masks': read_masks,
}


def read_data(description: Description, found: Defects) -> Data:
    """Read a data set; pixels are not decoded.

    Args:
        description: what there is.
        found: gets what is wrong with single files and lines.

    Raises:
        UserError: a file that the description names is missing, or broken as a whole.
    """
    return READERS[description.format](description, found)
