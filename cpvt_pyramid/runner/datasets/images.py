"""Checks of images: complete, of the size that is recorded, in a format that training reads."""

import io
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import numpy as np
from PIL import Image
from tqdm.contrib.concurrent import thread_map

from ...mm.bands import opened, read_bands
from ..inference.prediction import read_image
from ..inference.raster import ReadError, picture, size_of_raster
from .defects import Defects
from .duplicates import ImagePrint, image_print

CHECKERS = min(os.cpu_count() or 1, 16)  # threads that read images
TRANSPOSED = (5, 6, 7, 8)  # values of the EXIF tag for the orientation
ORIENTATION = 0x0112
# Formats of Pillow that every OpenCV reads; others depend on its build, which 4.5.4 or newer tells.
COMMON = ('JPEG', 'MPO', 'PNG', 'BMP', 'TIFF', 'WEBP', 'PPM')
TURNED = 'images that an EXIF tag turns; their annotations must be upright, too'
SIZE_BEFORE_TURN = 'an EXIF tag turns, but their records have the size before'
OTHER_SIZE = 'have another size than the width and height of its record'
Prints = dict[Path, ImagePrint]  # of the images that were read
Finding = tuple[str, bool]  # a kind of problem, and whether it is an error


class Reading(NamedTuple):
    """What was found in an image file."""

    size: Optional[tuple[int, int]]  # height and width, upright
    problem: str = ''  # 'are missing', for example
    orientation: int = 1  # in its EXIF data

    @property
    def findings(self) -> list[Finding]:
        found = [(TURNED, False)] if self.orientation > 1 else []
        return [*found, (f'images that {self.problem}', True)] if self.problem else found


def inspect(
    path: Path, whole: bool = True, prints: Optional[Prints] = None, by_opencv: bool = True
) -> Reading:
    """Read an image, or only its header if not `whole`; fills `prints`."""
    if not path.is_file():
        return Reading(None, 'are missing')
    if not path.stat().st_size:
        return Reading(None, 'are empty files')
    try:
        data = path.read_bytes() if whole else b''
        with Image.open(io.BytesIO(data) if whole else path) as image:
            orientation = image.getexif().get(ORIENTATION, 1)
            if whole:
                image.load()
            height, width = image.size[::-1]
            if prints is not None:
                with suppress(ValueError):  # a mode that Pillow cannot convert to gray
                    prints[path] = image_print(data, image)
            kind = image.format
    except Exception:  # Pillow raises many kinds on a truncated file, or on many bands
        size = size_of_raster(path)
        return Reading(size, '' if size else 'are not complete images')
    # Pillow turns a TIFF when it loads it.
    if orientation in TRANSPOSED and not (whole and kind == 'TIFF'):
        height, width = width, height
    if by_opencv and kind not in COMMON and not getattr(cv2, 'haveImageReader', bool)(str(path)):
        return Reading(None, f'OpenCV cannot read ({kind}); convert them, for example to PNG')
    return Reading((height, width), '', orientation)


def image_size(path: Path) -> Optional[tuple[int, int]]:
    """The (height, width) of an image, upright, from its header."""
    return inspect(path, whole=False, by_opencv=False).size


def sizes_of(root: Path, names: Iterable[str], defects: Defects) -> dict[str, tuple[int, int]]:
    """The (height, width) of images, upright, from their headers."""
    names = list(dict.fromkeys(names))
    readings = in_threads(lambda name: inspect(root / name, whole=False), names, 'reading sizes')
    for name, reading in zip(names, readings):
        if reading.problem:
            defects.error(f'images that {reading.problem}', name)
    return {name: r.size for name, r in zip(names, readings) if not r.problem}


def in_threads(function: Callable[[Any], Any], items: Sequence[Any], title: str) -> list:
    """The results of a function for each item, with a progress bar."""
    return thread_map(function, items, desc=title, max_workers=CHECKERS, leave=False, delay=3)


class Effort(NamedTuple):
    """How the images of a data set are checked."""

    seconds: float = math.inf  # then only the files' existence is checked; 0: only headers are read
    prints: Optional[Prints] = None  # to fill
    by_opencv: bool = True  # training reads them with OpenCV


ALL_IMAGES = Effort()


def check_images(
    sizes: dict[Path, tuple[int, int]], defects: Defects, effort: Effort
) -> tuple[set[Path], int]:
    """Check that images are complete and have the (height, width) of their record.

    Returns:
        The bad files, and how many were read completely.
    """

    def findings(path: Path, in_time: bool) -> list[Finding]:
        if not in_time:
            return [] if path.is_file() else [('images that are missing', True)]
        reading = inspect(path, effort.seconds > 0, effort.prints, effort.by_opencv)
        declared = tuple(sizes[path])
        if reading.size and reading.size != declared:
            is_turned = reading.orientation in TRANSPOSED and reading.size[::-1] == declared
            reading = reading._replace(problem=SIZE_BEFORE_TURN if is_turned else OTHER_SIZE)
        return reading.findings

    paths = list(sizes)
    names, seconds = [path.name for path in paths], effort.seconds or math.inf
    is_good, decoded = check_each(paths, findings, names, seconds, defects)
    return {path for path, good in zip(paths, is_good) if not good}, decoded


def check_each(
    items: Sequence[Any],
    findings: Callable[[Any, bool], list[Finding]],
    names: Sequence[str],
    seconds: float,
    defects: Defects,
) -> tuple[list[bool], int]:
    """Check items, in an order that spreads those in time over all of them.

    Args:
        items: what to check.
        findings: called with an item, and whether there is time for more than a glance.
        names: of the items, for messages.
        seconds: after which the time is over.
        defects: collects the findings, by name.

    Returns:
        Whether each item is without errors, and how many were checked in time.
    """
    deadline = time.monotonic() + seconds

    def check(index: int) -> tuple[list[Finding], bool]:
        in_time = time.monotonic() < deadline
        return findings(items[index], in_time), in_time

    order = np.random.default_rng(0).permutation(len(items)).tolist()
    checked = dict(zip(order, in_threads(check, order, 'checking images')))
    found = [checked[index][0] for index in range(len(items))]
    for name, kinds in zip(names, found):
        for kind, is_error in kinds:
            defects.add(kind, name, is_error)
    is_good = [not any(is_error for _, is_error in kinds) for kinds in found]
    return is_good, sum(in_time for _, in_time in checked.values())


def shown_image(path: Path) -> np.ndarray:
    """An image (H, W, 3) RGB uint8 to draw on; of another TIFF, its first bands.

    Raises:
        ReadError: not a complete image.
    """
    try:
        image = read_image(path)
    except ReadError:
        if size_of_raster(path) is None:
            raise
        with opened(path) as file:
            bands = file.indexes[:3]
        image = picture(read_bands(path, bands))
    return np.ascontiguousarray(image[..., ::-1])
