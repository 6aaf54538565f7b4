"""The images and videos named on a command line, and names for their results."""

import glob
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Optional

from .command import UserError
from .files import distinct_name

# The file types looked for in a folder.
IMAGES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')
VIDEOS = ('.avi', '.m4v', '.mkv', '.mov', '.mp4', '.mpeg', '.mpg', '.webm')
RESULTS = (
    '.overlay.png', '.overlay.mp4', '.detections.json', '.detections.jsonl', '.labels.png',
    '.labels.tif', '.segments.png', '.segments.json', '.segments.jsonl',
)  # fmt: skip


def find_inputs(inputs: Sequence[str], lines: Optional[Iterable[str]] = None) -> list[Path]:
    """The files that the inputs name, without duplicates.

    Args:
        inputs: files; folders, for the images and videos directly in them; patterns such as
            `photos/**/*.jpg`; `-`, for the files listed in `lines`.
        lines: one path each, by default from stdin. Paths that do not exist are kept; reading them
            reports the error later.
    """
    found = {}
    for text in inputs:
        path = Path(text)
        if text == '-':
            inside = [Path(line.rstrip('\r\n')) for line in lines or sys.stdin if line.strip()]
        elif path.is_dir():
            kinds = IMAGES + VIDEOS
            inside = sorted(
                p for p in path.iterdir() if p.suffix.lower() in kinds and not p.is_dir()
            )
            if not inside:
                raise UserError(
                    f'no images or videos in the folder {path}; looked for {", ".join(kinds)}'
                )
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
        raise UserError('no paths on stdin')
    return list(found.values())


def is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEOS


def result_names(paths: Sequence[Path], folder: Path) -> Iterator[str]:
    """A name for the results of each image: its own, numbered to avoid overwriting a file.

    No result takes the name of an input in the folder, or of a result of an earlier image.
    """
    inputs = {path.resolve() for path in paths}

    def overwrites_an_input(name: str) -> bool:
        return any((folder / f'{name}{result}').resolve() in inputs for result in RESULTS)

    taken = set()
    for path in paths:
        yield distinct_name(path.stem, taken, overwrites_an_input)
