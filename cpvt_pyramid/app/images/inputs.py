"""The images and videos named on a command line, and names for their results."""

import glob
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Optional

from ..tooling.command import UserError, rank
from ..tooling.files import distinct_name, files_below, make_folder, path_from, write_text
from .formats import IMAGE_ENDINGS

NamedInput = tuple[Path, str]  # an input, and the name of its results

# How the names of videos end that are looked for in a folder.
VIDEOS = ('.avi', '.m4v', '.mkv', '.mov', '.mp4', '.mpeg', '.mpg', '.webm')
# How the names of results end, by the kind of predictions.
RESULTS_OF_IMAGES = {
    'detections': ['.detections.json'],
    'labels': ['.labels.png'],
}
RESULTS_OF_VIDEOS: dict[str, list[str]] = {
    'detections': ['.detections.jsonl'],
    'labels': [],  # a picture only
}
TILED_LABELS = '.labels.tif'
OVERLAY, VIDEO_OVERLAY = '.overlay.jpg', '.overlay.mp4'
GEOJSON = '.geojson'
RESULTS = (
    *itertools.chain(*RESULTS_OF_IMAGES.values(), *RESULTS_OF_VIDEOS.values()),
    TILED_LABELS,
    OVERLAY,
    VIDEO_OVERLAY,
    GEOJSON,
)
COCO = 'coco.json'  # in the folder of results: all objects of a run
OWNERS = 'inputs.json'  # in the folder of results: the input of each name, relative to the folder
LISTED = 10  # files in a warning
LONGEST = 220  # bytes of a name; file systems allow 255 for a file


def find_inputs(
    inputs: Sequence[str], lines: Optional[Iterable[str]] = None, out_dir: Optional[str] = None
) -> dict[Path, str]:
    """The files that the inputs name, without duplicates, each with a name for its results: its
    path inside the folder or the fixed part of the pattern, or its own name, without the ending.

    Args:
        inputs: files; folders, for the images and videos in them and in their subfolders; patterns
            such as `photos/**/*.jpg`; `-`, for the files listed in `lines`. Hidden files in folders
            are left out, and other files with a warning.
        lines: one path each, by default from stdin. Paths that do not exist are kept; reading them
            reports the error later.
        out_dir: folder for the results, of which earlier ones are left out.
    """
    found: dict[str, tuple[Path, str]] = {}  # by absolute path; a link is an input of its own
    for text in inputs:
        path = local_path(text)
        if text == '-':
            named = (line.rstrip('\r\n') for line in lines or sys.stdin if line.strip())
            inside = [(path, path.stem) for path in map(local_path, named)]
        elif os.path.isdir(path):
            inside = named_within(path, media_in(path, out_dir))
        elif os.path.lexists(path):  # also a link that leads nowhere: reading it reports the error
            inside = [(path, path.stem)]
        elif glob.has_magic(text):
            root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
            matches = sorted(map(Path, glob.glob(text, recursive=True)))
            files = [p for p in matches if p.is_file() and not is_result(p, out_dir)]
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


def media_in(folder: Path, out_dir: Optional[str]) -> list[Path]:
    """The images and videos in a folder and its subfolders, links to folders included."""
    found: list[Path] = []
    others: list[Path] = []
    for path in files_below(folder):
        if path.suffix.lower() in IMAGE_ENDINGS + VIDEOS and not is_result(path, out_dir):
            found.append(path)
        else:
            others.append(path)
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


def is_result(path: Path, out_dir: Optional[str]) -> bool:
    """Whether a file is one that an earlier run has written to the folder of results."""
    return (
        out_dir is not None
        and path.name.endswith(RESULTS)
        and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(out_dir))
    )


def find_images(inputs: Sequence[str], option: str) -> list[Path]:
    """As `find_inputs`, for an option that takes no videos; those in folders are left out.

    Raises:
        UserError: an input is a video, or there are no images.
    """
    for text in inputs:
        if is_video(Path(text)) and not Path(text).is_dir():
            raise UserError(f'{option} takes images, got the video {text}')
    images = [path for path in find_inputs(inputs) if not is_video(path)]
    if not images:
        raise UserError(f'no images in {" ".join(inputs)}')
    return images


def is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEOS


def name_results(found: Mapping[Path, str], out_dir: str) -> tuple[list[NamedInput], Path]:
    """Name the results of inputs, see `find_inputs`, and create the folders for them.

    A name gets a number if its files would overwrite an input, or results of another input, also of
    an earlier run. `inputs.json` in the folder tells which name is whose.

    Returns:
        The inputs with their names, and the folder.
    """
    folder = make_folder(out_dir)
    owners: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):
        owners = dict(json.loads((folder / OWNERS).read_text(encoding='utf-8')))
    owner_of = {name.casefold(): source for name, source in owners.items()}
    inputs = {os.path.realpath(path) for path in found}
    sources = {path: path_from(folder, path) for path in found}
    all_sources = set(sources.values())
    there = {path.relative_to(folder).as_posix() for path in files_below(folder)}

    def conflicts(name: str, source: str) -> bool:
        files = [f'{name}{ending}' for ending in RESULTS]
        files = [file for file in files if file in there]
        owner = owner_of.get(name.casefold(), source)
        if owner != source and (owner in all_sources or files):
            return True
        return any(os.path.realpath(folder / file) in inputs for file in files)

    named: list[NamedInput] = []
    taken: set[str] = set()
    for path, wanted in found.items():
        wanted = shortened(wanted)
        name = distinct_name(wanted, taken, partial(conflicts, source=sources[path]))
        named.append((path, name))
    for subfolder in {(folder / name).parent for _, name in named}:
        make_folder(subfolder)
    if rank() == 0:
        owners |= {name: sources[path] for path, name in named}
        write_text(folder / OWNERS, json.dumps(owners, indent=1))
    return named, folder


def shortened(name: str) -> str:
    """A name of results whose last part leaves room for their endings and a number."""
    folder, slash, last = name.rpartition('/')
    while len(os.fsencode(last)) > LONGEST:
        last = last[:-1]
    return f'{folder}{slash}{last}'
