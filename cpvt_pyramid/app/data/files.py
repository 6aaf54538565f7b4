"""Names of files, compared in one way by all layouts, and the files below a folder.

A name means the file that has exactly this name. Where there is none, it means the file whose name
is the same text in NFC (macOS writes accents as characters of their own), and with its ending in
small letters. Where several files are that, the name means none of them, which is an error.
"""

import os
import posixpath
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Optional

from ..images.formats import IMAGE_ENDINGS
from ..tooling.command import UserError, one_line
from ..tooling.files import files_below
from . import defects
from .defects import Defects


def as_path(name: str) -> str:
    """A name or path with `/` between its parts, and without parts that say nothing."""
    return posixpath.normpath(name.replace('\\', '/'))


def comparable(name: str) -> str:
    """A name or path in the form in which names are compared."""
    path = unicodedata.normalize('NFC', as_path(name))
    stem, ending = posixpath.splitext(path)
    return stem + ending.lower()


def comparable_stem(name: str) -> str:
    """A name or path without ending in the form in which names are compared; dots are kept."""
    return comparable(f'{name}.').removesuffix('.')


def stem_of(name: str) -> str:
    """The comparable name of a file without folders and ending."""
    return posixpath.splitext(posixpath.basename(comparable(name)))[0]


def without_ending(path: str) -> str:
    return posixpath.splitext(path)[0]


def join(folder: str, name: str) -> str:
    """A path in a folder; `.` is the folder of the data itself."""
    return posixpath.normpath(posixpath.join(folder, name))


def is_image(name: str) -> bool:
    return posixpath.splitext(name)[1].lower() in IMAGE_ENDINGS


def names_below(root: Path, folder: str = '.') -> Iterator[str]:
    """The files in a folder and its subfolders, relative to `root`; no pipes, no broken links.

    Raises:
        UserError: a name is not text, so that no annotation or config can have it.
    """
    for path in files_below(root / folder):
        name = Path(os.path.relpath(path, root)).as_posix()
        try:
            name.encode()
        except UnicodeEncodeError as error:  # Python reads other bytes as surrogates
            shown = name.encode('utf-8', 'backslashreplace').decode()
            raise UserError(f'the name of {shown} in {root} is not UTF-8; rename it') from error
        if path.is_file():
            yield name


class Folder:
    """A folder with data, in which files are found by their names, as described at the top of this
    file.

    Names are relative to the folder, may lead out of it with `../`, or be absolute.

    Attributes:
        ambiguous: by name, the files between which it does not decide.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ambiguous: dict[str, list[str]] = {}
        self._listed: dict[str, list[str]] = {}  # by folder
        self._alike: dict[tuple[str, bool], dict[str, list[str]]] = {}  # by folder

    def find(self, name: str) -> Optional[str]:
        """The file of a name as the file system writes it, or None."""
        return self._found(name, with_ending=True)

    def find_image(self, stem: str) -> Optional[str]:
        """The image whose path without ending is `stem`, or None."""
        return self._found(stem, with_ending=False)

    def _found(self, name: str, with_ending: bool) -> Optional[str]:
        folder, base = posixpath.split(as_path(name))
        compared_as = comparable if with_ending else comparable_stem
        asked_as = str if with_ending else without_ending
        key = folder, with_ending
        if key not in self._alike:
            alike: dict[str, list[str]] = {}
            for file in self.files_in(folder):
                if with_ending or is_image(file):
                    alike.setdefault(compared_as(asked_as(file)), []).append(file)
            self._alike[key] = alike
        matching = self._alike[key].get(compared_as(base), [])
        found = [file for file in matching if asked_as(file) == base] or matching
        paths = [posixpath.join(folder, file) for file in found]
        if len(paths) > 1:
            self.ambiguous[name] = paths
        return paths[0] if len(paths) == 1 else None

    def files_in(self, folder: str) -> list[str]:
        """The names in a folder itself; none if it does not exist."""
        if folder not in self._listed:
            place = self.root / folder
            self._listed[folder] = sorted(os.listdir(place)) if place.is_dir() else []
        return self._listed[folder]

    def images_below(self, folder: str) -> list[str]:
        """The images in a folder and its subfolders."""
        return [name for name in names_below(self.root, folder) if is_image(name)]

    def report(self, found: Defects) -> None:
        """Report names that mean several files."""
        for name, files in self.ambiguous.items():
            found.add(defects.AMBIGUOUS_NAME, f'{name} ({", ".join(files)})')


def by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    """Files by their folder; that of the data is `.`."""
    found = defaultdict(list)
    for name in names:
        found[posixpath.dirname(name) or '.'].append(name)
    return dict(found)


# Text


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding='utf-8-sig')
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from error
    except UnicodeDecodeError as error:
        raise UserError(f'{path} must be text in UTF-8: {one_line(error, 100)}') from error


def lines_of(path: Path) -> list[str]:
    """The lines of a text file that are not empty, without space around them."""
    lines = [line.strip() for line in text_of(path).splitlines()]
    return [line for line in lines if line]


def names_in(path: Path) -> list[str]:
    """The names of the classes in a file with one in each line, whose number is the label."""
    lines = [line.strip() for line in text_of(path).rstrip().splitlines()]
    if '' in lines:
        raise UserError(
            f'{path}: line {lines.index("") + 1} is empty; each line must name a class, because '
            'its number is the label'
        )
    return lines
