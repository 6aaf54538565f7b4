"""The files below a folder, and what is recognized in them."""

import posixpath
import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..tooling.command import UserError
from .description import load_yaml, with_names_of_splits
from .files import by_folder, comparable, is_image, lines_of, names_below, stem_of

RESULTS = re.compile(r'(^|/)runs/(detect|segment|pose|obb|classify|train|val)/')  # of Ultralytics
GENERATED = '_data'  # end of the name of the folder that is written next to a config
WRITTEN = 'Written by cpvt new-config.'  # at the beginning of such a config
HEAD = 4096  # bytes at the beginning of a file that tell its format


class DeclaredLists(NamedTuple):
    """A YAML file of Ultralytics that names images, or Darknet's obj.data, and its settings."""

    path: Path
    settings: dict[str, Any]


class Listing:
    """The files below a folder, without hidden ones, results, and what new-config wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        names = [*names_below(root)]
        generated = tuple(
            f'{name.removesuffix(".py")}{GENERATED}/'
            for name in names
            if name.endswith('.py') and WRITTEN.encode() in self.head(name)
        )
        if generated:
            names = [name for name in names if not name.startswith(generated)]
        names = [name for name in names if not RESULTS.search(name)]
        self.names = sorted(names, key=lambda name: (name.count('/'), name))  # the root's first
        self.images = [name for name in self.names if is_image(name)]
        self._by_last_parts: dict[int, dict[str, list[str]]] = {}
        self.image_folders = by_folder(self.images)
        self._settings: dict[str, dict[str, Any]] = {}  # of YAML files

    @cached_property
    def declared(self) -> Optional[DeclaredLists]:
        """The first file that names images."""
        for name in self.ending('.yaml', '.yml'):
            is_expected = stem_of(name) in ('data', 'dataset')
            try:
                settings = self.settings(name)
            except UserError:
                if is_expected:
                    raise
                continue
            is_own = 'format' in settings  # written by cpvt check-data
            if not is_own and any(is_path(settings.get(split)) for split in ('train', 'val')):
                return DeclaredLists(self.root / name, settings)
        for name in self.ending('.data'):
            pairs = [line.partition('=') for line in lines_of(self.root / name)]
            settings = with_names_of_splits(
                {key.strip().lower(): value.strip() for key, _, value in pairs}, name
            )
            if settings.get('train'):
                return DeclaredLists(self.root / name, settings)
        return None

    def ending(self, *endings: str) -> list[str]:
        return [n for n in self.names if posixpath.splitext(n)[1].lower() in endings]

    def named(self, *names: str) -> list[str]:
        """The files with some names, whatever their case."""
        return [n for n in self.names if posixpath.basename(n).lower() in names]

    def head(self, name: str) -> bytes:
        with (self.root / name).open('rb') as file:
            return file.read(HEAD)

    def settings(self, name: str) -> dict[str, Any]:
        """The settings in a YAML file."""
        if name not in self._settings:
            self._settings[name] = load_yaml(self.root / name)
        return self._settings[name]

    def with_last_parts(self, count: int) -> dict[str, list[str]]:
        """The images by their comparable names and the folders above, `count` parts in all."""
        if count not in self._by_last_parts:
            found = defaultdict(list)
            for name in self.images:
                parts = comparable(name).split('/')
                if len(parts) >= count:
                    found['/'.join(parts[-count:])].append(name)
            self._by_last_parts[count] = found
        return self._by_last_parts[count]


def is_path(value: Any) -> bool:
    """Whether a setting is a path or a list of paths."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(item, str) and item for item in values)
