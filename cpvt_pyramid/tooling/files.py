"""Output files and folders."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Union

from .command import UserError

# See formats.py; here, because the options of tools name it before they import anything slow.
Format = Literal['coco', 'yolo', 'labelme', 'csv', 'geojson']


def check_file(path: Union[str, Path]) -> None:
    """Check that a file can be written to `path`, and create its folder."""
    if Path(path).is_dir():
        raise UserError(f'{path} must be a file to write, but it is a folder')
    make_folder(Path(path).parent)


def make_folder(path: Union[str, Path]) -> Path:
    """Create a folder, unless it exists, and check that it is writable."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot create the folder {path}: {error.strerror}') from error
    if not os.access(path, os.W_OK):
        raise UserError(f'cannot write to the folder {path}')
    return Path(path)


@contextmanager
def atomic_write(path: Union[str, Path]) -> Iterator[Path]:
    """A hidden path next to `path` to write to; it is renamed to `path` on success.

    On any failure `path` keeps its previous content. An OSError names it.
    """
    path = Path(path)
    partial = path.with_name(f'.{path.name}.partial')
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.errno and error.filename in (None, str(partial)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def distinct_name(
    wanted: str, taken: set[str], conflicts: Callable[[str], bool] = lambda name: False
) -> str:
    """`wanted`, with a number appended if it is taken or conflicts; added to `taken`."""
    numbered = (f'{wanted}-{number}' for number in itertools.count(2))
    names = itertools.chain([wanted], numbered)
    name = next(name for name in names if name not in taken and not conflicts(name))
    taken.add(name)
    return name
