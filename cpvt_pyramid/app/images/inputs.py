"""The images and videos named on a command line."""

import glob
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import UserError, rank
from ..tooling.files import files_below
from .formats import IMAGE_ENDINGS

NamedInput = tuple[Path, str]  # an input, and the name of its results

# How the names of videos end that are looked for in a folder.
VIDEOS = ('.avi', '.m4v', '.mkv', '.mov', '.mp4', '.mpeg', '.mpg', '.webm')
LISTED = 10  # files in a warning


def nothing(path: Path) -> bool:
    """Leaves out no file; see `find_inputs`."""
    return False


def find_inputs(
    inputs: Sequence[str],
    lines: Optional[Iterable[str]] = None,
    leave_out: Callable[[Path], bool] = nothing,
) -> dict[Path, str]:
    """The files that the inputs name, without duplicates, each with a name for its results: its
    path inside the folder or the fixed part of the pattern, or its own name, without the ending.

    Args:
        inputs: files; folders, for the images and videos in them and in their subfolders; patterns
            such as `photos/**/*.jpg`; `-`, for the files listed in `lines`. Hidden files in folders
            are left out, and other files with a warning.
        lines: one path each, by default from stdin. Paths that do not exist are kept; reading them
            reports the error later.
        leave_out: which files in folders and of patterns are left out, too; see
            `predict.result_files.is_result`.
    """
    found: dict[str, tuple[Path, str]] = {}  # by absolute path; a link is an input of its own
    for text in inputs:
        path = local_path(text)
        if text == '-':
            named = (line.rstrip('\r\n') for line in lines or sys.stdin if line.strip())
            inside = [(path, path.stem) for path in map(local_path, named)]
        elif os.path.isdir(path):
            inside = named_within(path, media_in(path, leave_out))
        elif os.path.lexists(path):  # also a link that leads nowhere: reading it reports the error
            inside = [(path, path.stem)]
        elif glob.has_magic(text):
            root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
            matches = sorted(map(Path, glob.glob(text, recursive=True)))
            files = [p for p in matches if p.is_file() and not leave_out(p)]
            if '**' in path.parts:
                files += unread_below(root)
            if not files:
                raise UserError(f'no files match {text}')
            inside = named_within(root, files)
        else:
            raise UserError(f'no image or folder at {path}')
        for path, name in inside:
            found.setdefault(os.path.abspath(path), (path, name))
    if not found:
        raise UserError('no paths on stdin')
    return dict(found.values())


def local_path(text: str) -> Path:
    """The path of a file.

    Raises:
        UserError: it is an address, or several paths of `find -print0`.
    """
    if '\0' in text:
        raise UserError('a path must not have zero bytes; list one path a line')
    if is_address(text):
        raise UserError(f'a file on this machine is needed, got the address {text}; download it')
    return Path(text)


def is_address(text: str) -> bool:
    """Whether a text is an address such as https://..., and no path."""
    return re.match('[A-Za-z][A-Za-z0-9+.-]+://', text) is not None


def named_within(folder: Path, files: Iterable[Path]) -> list[tuple[Path, str]]:
    return [(path, path.relative_to(folder).with_suffix('').as_posix()) for path in files]


def unread_below(folder: Path) -> list[Path]:
    """The subfolders of a folder that cannot be read. As inputs, they end in errors that say so."""
    unread: list[Path] = []
    for _ in files_below(folder, unread):
        pass
    return unread


def media_in(folder: Path, leave_out: Callable[[Path], bool]) -> list[Path]:
    """The images and videos in a folder and its subfolders, links to folders included, and the
    subfolders that cannot be read."""
    found: list[Path] = []
    others: list[Path] = []
    unread: list[Path] = []
    for path in files_below(folder, unread):
        if path.suffix.lower() in IMAGE_ENDINGS + VIDEOS and not leave_out(path):
            found.append(path)
        else:
            others.append(path)
    found += unread
    if not found:
        kinds = ', '.join(IMAGE_ENDINGS + VIDEOS)
        raise UserError(f'no images or videos in the folder {folder}; looked for {kinds}')
    if others and rank() == 0:
        listed = ', '.join(str(path.relative_to(folder)) for path in others[:LISTED])
        if len(others) > LISTED:
            listed += f' and {len(others) - LISTED} more'
        warnings.warn(
            f'{folder}: left out what is no image or video, or written by an earlier run: {listed}',
            stacklevel=2,
        )
    return found


def find_images(
    inputs: Sequence[str], option: str, leave_out: Callable[[Path], bool] = nothing
) -> list[Path]:
    """As `find_inputs`, for an option that takes no videos; those in folders are left out.

    Raises:
        UserError: an input is a video, or there are no images.
    """
    for text in inputs:
        if is_video(Path(text)) and not Path(text).is_dir():
            raise UserError(f'{option} takes images, got the video {text}')
    images = [path for path in find_inputs(inputs, leave_out=leave_out) if not is_video(path)]
    if not images:
        raise UserError(f'no images in {" ".join(inputs)}')
    return images


def is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEOS
