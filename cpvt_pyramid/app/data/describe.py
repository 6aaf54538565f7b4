"""The one way to data of all commands: a folder or a `data.yaml` is described, which is printed;
then what the description declares is read and checked."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..config.shipped import is_config_name, shipped_configs, where_configs_are
from ..tooling.command import UserError
from ..tooling.files import full_if_current
from ..tooling.names import did_you_mean
from .check import Checked, checked_data
from .data import Data
from .defects import Defects
from .description import SPLITS, Description, description_of, write_description
from .images import Reading
from .layouts import every_layout
from .read import read_data
from .recognize import found_in_file, found_in_folder

ENDINGS = '.yaml', '.yml'


class Described(NamedTuple):
    """What a source declares, or is recognized as.

    Attributes:
        settings: those of its `data.yaml`, without `path`.
        root: the folder that paths are relative to.
        notes: what a person should know, one line each.
        source: the folder or file.
    """

    settings: dict[str, Any]
    root: Path
    notes: list[str]
    source: str

    @property
    def description(self) -> Description:
        return description_of(self.settings, self.root, self.source)

    def print(self) -> None:
        """Print what was taken for what."""
        print(f'{self.source}: {self.settings["format"]}')
        for split in SPLITS:
            if split not in self.settings:
                continue
            line = f'{split}: images in {shown_paths(self.settings[split])}'
            for key, what in (('annotations', 'annotations in'), ('lists', 'listed in')):
                value = self.settings.get(key)
                of_split = value.get(split) if isinstance(value, dict) else value
                if of_split:
                    line += f', {what} {shown_paths(of_split)}'
            print(line)
        for note in self.notes:
            print(f'note: {note}')


def shown_paths(value: object) -> str:
    """The first paths of a setting, which are relative to the folder."""
    values = list(map(str, value)) if isinstance(value, list) else [str(value)]
    values = ['the folder itself' if path == os.curdir else path for path in values]
    more = f' and {len(values) - 4} more' if len(values) > 4 else ''
    return ', '.join(values[:4]) + more


def describe(source: Path, formats: Optional[Sequence[str]] = None) -> Described:
    """Describe a data.yaml or a folder; `formats` are those that are asked for, by default all."""
    asked = formats or list(every_layout())
    if source.is_dir():
        found = found_in_folder(source, asked)
    elif not source.exists():
        raise UserError(f'no folder or file {source}{hint_about(source)}')
    elif source.suffix.lower() not in ENDINGS:
        raise UserError(f'the data must be a folder or a data.yaml, got the file {source}')
    else:
        found = found_in_file(source, asked)
    return Described(found.settings, found.root, found.notes, full_if_current(source))


def hint_about(source: Path) -> str:
    """What may be meant by a path at which there is nothing."""
    is_config = is_config_name(source) and source.suffix.lower() not in ENDINGS
    if is_config or source.name in shipped_configs():
        return f'; {where_configs_are(source)}'
    neighbours = [
        p.name for p in source.parent.glob('*') if p.is_dir() or p.suffix.lower() in ENDINGS
    ]
    return did_you_mean(source.name, neighbours)


def checked_source(
    source: Path,
    formats: Optional[Sequence[str]],
    how: Reading,
    found: Defects,
    fits: Optional[Callable[[Data], None]] = None,
) -> tuple[Described, Checked]:
    """Describe, read and check a data.yaml or a folder; prints the description and all problems,
    also where reading ends with an error, which they may be the cause of.

    Args:
        source: the folder or file.
        formats: that are asked for; None: all.
        how: how far images are read.
        found: gets what is wrong.
        fits: raises a UserError if the data are of no use.

    Raises:
        UserError: the source has no such data, or they are broken as a whole.
    """
    described = describe(source, formats)
    described.print()
    try:
        data = read_data(described.description, found)
        if fits:
            fits(data)
        checked = checked_data(data, how, found)
    finally:
        for problem in found.problems():
            print(problem)
    return described, checked


def write_described(described: Described, data: Data, path: Path) -> None:
    """Write a `data.yaml`, with the names of the classes that were read."""
    settings = dict(described.settings)
    if 'colors' not in settings:
        settings['names'] = data.description.names or dict(enumerate(data.classes))
    comments = ['Written by cpvt check-data; see docs/own_data.md.']
    write_description(settings, described.root, path, comments)
