"""The one way to data of all commands: a folder or a `data.yaml` is described, which is printed;
then what the description declares is read and checked."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from .check import checked_data
from .data import DataSet
from .defects import Defects
from .description import Description, write_description
from .images import Reading
from .layouts import layout_named
from .recognize import Described, describe


class Checked(NamedTuple):
    """A source, and its data without what has errors."""

    described: Described
    data: DataSet


def read_data(description: Description, found: Defects) -> DataSet:
    """Read the data set that a description declares; pixels are not decoded.

    Args:
        description: what there is.
        found: gets what is wrong with single files and lines.

    Raises:
        UserError: a file that the description names is missing, or broken as a whole.
    """
    layout = layout_named(description.format, description.source)
    return layout.read(description, found)


def checked_source(
    source: Path,
    formats: Optional[Sequence[str]],
    how: Reading,
    found: Defects,
) -> Checked:
    """Describe, read and check a data.yaml or a folder; prints the description and all problems,
    also where reading ends with an error, which they may be the cause of.

    Args:
        source: the folder or file.
        formats: that are asked for; None: all.
        how: how far images are read.
        found: gets what is wrong.

    Raises:
        UserError: the source has no such data, or they are broken as a whole.
    """
    described = describe(source, formats)
    described.print()
    try:
        data = checked_data(read_data(described.description, found), how, found)
    finally:
        for problem in found.problems():
            print(problem)
    return Checked(described, data)


def write_described(checked: Checked, path: Path) -> None:
    """Write the `data.yaml` of a source, with the names of the classes that were read."""
    settings = dict(checked.described.settings)
    if 'colors' not in settings:
        settings['names'] = checked.data.description.names or dict(enumerate(checked.data.classes))
    comments = ['Written by cpvt check-data; see docs/own_data.md.']
    write_description(settings, checked.described.root, path, comments)
