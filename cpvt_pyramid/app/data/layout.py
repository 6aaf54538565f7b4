"""A layout of data sets: how it is recognized from the names in a folder, and how it is read.

Each file in `layouts` declares one as `LAYOUT`. The name of the file is the `format` of a
`data.yaml`, and stands nowhere else.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Optional

from .data import DataSet
from .defects import Defects
from .description import Description
from .listing import Listing

Holds = Literal['objects', 'masks']


class Recognized(NamedTuple):
    """What a folder has.

    Attributes:
        settings: of a `data.yaml`, without `path` and `format`.
        notes: what a person should know, one line each.
    """

    settings: dict[str, Any]
    notes: list[str]


class Undecided(Exception):
    """A folder has files of a layout, but names do not say how they belong together.

    Args:
        reason: a part of a sentence.
        known: settings of a `data.yaml` that are certain.
    """

    def __init__(self, reason: str, known: Optional[Mapping[str, Any]] = None) -> None:
        super().__init__(reason)
        self.known = known or {}


EXAMPLE_OF_FILES: dict[str, Any] = {  # of layouts with a file for each image
    'train': 'FOLDER',
    'val': 'FOLDER',
    'annotations': {'train': 'FOLDER', 'val': 'FOLDER'},
}


class Layout(NamedTuple):
    """A row of the table.

    Attributes:
        what: the files that it consists of, for messages.
        holds: objects in images, or a segmentation mask for each image.
        recognize: from the files below a folder; None: they are of other layouts. May raise
            `Undecided`.
        read: what a `data.yaml` of this format declares; it guesses nothing.
        example: settings of a `data.yaml`, with words in capitals for what a person fills in.
        is_declared: whether a YAML file of Ultralytics, or Darknet's obj.data, with some settings
            declares data of this layout.
    """

    what: str
    holds: Holds
    recognize: Callable[[Listing], Optional[Recognized]]
    read: Callable[[Description, Defects], DataSet]
    example: dict[str, Any]
    is_declared: Callable[[Mapping[str, Any]], bool] = lambda settings: False
