"""Names of files, compared in one way by all formats, and the files below a folder.

Two names are the same file if they are the same text in NFC (macOS writes accents as characters of
their own), with `/` for the backslashes of Windows, and with their endings in small letters.
"""

import os
import posixpath
import unicodedata
from pathlib import Path
from typing import Optional

from ..images.formats import IMAGE_ENDINGS
from ..tooling.command import UserError, one_line
from ..tooling.files import files_below


def comparable(name: str) -> str:
    """A name or path in the form in which names are compared."""
    path = posixpath.normpath(unicodedata.normalize('NFC', name.replace('\\', '/')))
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


def is_utf8(name: str) -> bool:
    """Whether the name of a file is text; Python reads other bytes as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Folder:
    """A folder with data, in which files are found by comparable names.

    Names are relative to the folder, may lead out of it with `../`, or be absolute.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._entries: dict[str, dict[str, str]] = {}  # by folder: names by comparable names
        self._stems: dict[str, dict[str, str]] = {}  # by folder: images by their stems
        self._folders: dict[str, Optional[str]] = {'': '', '.': '', '..': '..', '/': '/'}
        self.undecodable: set[str] = set()

    def find(self, name: str) -> Optional[str]:
        """The file of a name as the file system writes it, or None."""
        above, base = posixpath.split(comparable(name))
        folder = self.find_folder(above)
        if folder is None:
            return None
        found = self._listed(folder).get(base)
        return None if found is None else posixpath.join(folder, found)

    def find_image(self, name: str) -> Optional[str]:
        """The image whose name without ending is this one."""
        above, base = posixpath.split(comparable_stem(name))
        folder = self.find_folder(above)
        if folder is None:
            return None
        if folder not in self._stems:
            names = sorted(self._listed(folder).values())
            self._stems[folder] = {stem_of(name): name for name in names if is_image(name)}
        found = self._stems[folder].get(base)
        return None if found is None else posixpath.join(folder, found)

    def find_folder(self, name: str) -> Optional[str]:
        """The folder of a comparable name as the file system writes it, or None."""
        if name not in self._folders:
            self._folders[name] = self._found_folder(name)
        return self._folders[name]

    def _found_folder(self, name: str) -> Optional[str]:
        parent, base = posixpath.split(name)
        above = self.find_folder(parent)
        if above is None:
            return None
        found = '..' if base == '..' else self._listed(above).get(comparable(base))
        if found is None:
            return None
        path = posixpath.join(above, found)
        return path if (self.root / path).is_dir() else None

    def _listed(self, folder: str) -> dict[str, str]:
        if folder not in self._entries:
            names = sorted(os.listdir(self.root / folder))
            self._entries[folder] = {comparable(name): name for name in names if is_utf8(name)}
        return self._entries[folder]

    def images_below(self, folder: str) -> list[str]:
        """The images in a folder and its subfolders."""
        found = []
        for path in files_below(self.root / folder):
            name = Path(os.path.relpath(path, self.root)).as_posix()
            if not is_utf8(name):
                self.undecodable.add(name)
            elif is_image(name) and path.is_file():  # no pipes, no broken links
                found.append(name)
        return found


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
