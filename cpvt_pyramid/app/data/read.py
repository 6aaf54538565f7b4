"""Reads the data set that a description declares: explicit paths in, one form in memory out."""

from .data import Data
from .defects import Defects
from .description import Description
from .layouts import layout_named


def read_data(description: Description, found: Defects) -> Data:
    """Read a data set; pixels are not decoded.

    Args:
        description: what there is.
        found: gets what is wrong with single files and lines.

    Raises:
        UserError: a file that the description names is missing, or broken as a whole.
    """
    layout = layout_named(description.format, description.source)
    return layout.read(description, found)
