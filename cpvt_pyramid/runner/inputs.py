"""The images and videos that a command line names, and names for their results."""

import glob
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Optional

from .launch import UserError
from .prediction import distinct_name

# Looked for in a folder.
IMAGES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')
VIDEOS = ('.avi', '.m4v', '.mkv', '.mov', '.mp4', '.mpeg', '.mpg', '.webm')
RESULTS = (
    '.overlay.png', '.overlay.mp4', '.detections.json', '.detections.jsonl', '.labels.png',
    '.labels.tif',
)  # fmt: skip


def find_inputs(inputs: Sequence[str], lines: Optional[Iterable[str]] = None) -> list[Path]:
    """The files that the inputs stand for, each once.

    Args:
        inputs: files; folders, for the images and videos in them, not below them; patterns such
            as `photos/**/*.jpg`; `-`, for the files that `lines` names.
        lines: a path each, by default the standard input's. One that does not exist is in the
            result too, to be reported with those that are torn.
    """
    found = {}
    for text in inputs:
        path = Path(text)
        if text == '-':
            inside = [Path(line.rstrip('\r\n')) for line in lines or sys.stdin if line.strip()]
        elif path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGES + VIDEOS)
            if not inside:
                kinds = ', '.join(IMAGES + VIDEOS)
                raise UserError(f'no images in the folder {path}; looked for {kinds}')
        elif path.exists():
            inside = [path]
        elif glob.has_magic(text):
            inside = sorted(p for p in map(Path, glob.glob(text, recursive=True)) if p.is_file())
            if not inside:
                raise UserError(f'no files match {text}')
        else:
            raise UserError(f'no image or folder at {path}')
        found |= {p.resolve(): p for p in inside}
    if not found:
        raise UserError('no paths on the standard input')
    return list(found.values())


def is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEOS


def result_names(paths: Sequence[Path], folder: Path) -> Iterator[str]:
    """A name for each image's results: its own, numbered where that would hit a file in use.

    In use are the inputs, if they lie in the folder, and the results of the images before.
    """
    inputs = {path.resolve() for path in paths}

    def hits_an_input(name: str) -> bool:
        return any((folder / f'{name}{result}').resolve() in inputs for result in RESULTS)

    taken = set()
    for path in paths:
        yield distinct_name(path.stem, taken, hits_an_input)
