"""Checks of images: complete, of the size that is recorded, and in a format that training reads."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import numpy as np
from tqdm.contrib.concurrent import thread_map

from ..images.formats import open_image
from ..images.rasters import ReadError, open_raster, read_bands, size_of_raster
from ..images.reading import orientation_of, picture, read_image, upright_size
from ..tooling.threads import usable_cores
from .defects import Defects

CHECKERS = min(usable_cores(), 16)  # threads that read images
# Formats of Pillow that every OpenCV reads; others depend on its build, which 4.5.4 or newer tells.
COMMON = ('JPEG', 'MPO', 'PNG', 'BMP', 'TIFF', 'WEBP', 'PPM')
TURNED = 'images that an EXIF tag turns; their annotations must be upright, too'
Size = tuple[int, int]  # height and width of an upright image
Finding = tuple[str, bool]  # a kind of problem, and whether it is an error


class Effort(NamedTuple):
    """How the images of a data set are checked."""

    headers_only: bool = False
    seconds: float = math.inf  # after which only the files' existence is checked
    by_opencv: bool = True  # training reads them with OpenCV


ALL_IMAGES, HEADERS = Effort(), Effort(headers_only=True)


def inspect(
    path: Path, effort: Effort = ALL_IMAGES, in_time: bool = True
) -> tuple[Optional[Size], list[Finding]]:
    """The size of an image, and what is wrong with it; if not `in_time`, only whether it exists."""
    if not path.is_file():
        return None, [('images that are missing', True)]
    if not in_time:
        return None, []
    try:
        with open_image(path) as image:
            kind = image.format
            size = upright_size(image)
            is_turned = orientation_of(image) != 1
            if not effort.headers_only:
                image.load()
    except Exception:  # Pillow raises many kinds on a truncated file, or on many bands
        raster_size = size_of_raster(path)
        return raster_size, [] if raster_size else [('images that are not complete images', True)]
    can_read = kind in COMMON or getattr(cv2, 'haveImageReader', bool)(str(path))
    if effort.by_opencv and not can_read:
        problem = f'images that OpenCV cannot read ({kind}); convert them, for example to PNG'
        return None, [(problem, True)]
    return size, [(TURNED, False)] if is_turned else []


def sizes_of(root: Path, names: Iterable[str], defects: Defects) -> dict[str, Size]:
    """The sizes of images, from their headers; reports those without."""
    names = list(dict.fromkeys(names))
    readings = in_threads(lambda name: inspect(root / name, HEADERS), names, 'reading sizes')
    for name, (_, findings) in zip(names, readings):
        for kind in (kind for kind, is_error in findings if is_error):
            defects.add(kind, name)
    return {name: size for name, (size, _) in zip(names, readings) if size}


def in_threads(function: Callable[[Any], Any], items: Sequence[Any], title: str) -> list:
    """The results of a function for each item, with a progress bar."""
    return thread_map(function, items, desc=title, max_workers=CHECKERS, leave=False, delay=3)


def check_each(
    items: Sequence[Any],
    findings: Callable[[Any, bool], list[Finding]],
    names: Sequence[str],
    effort: Effort,
    defects: Defects,
) -> tuple[list[bool], int]:
    """Check items with `findings`, which is told whether there is time for more than a glance, in
    an order that spreads those in time over all of them. `names` are those of the items, for
    messages. Returns whether each item is without errors, and how many were checked in time."""
    deadline = time.monotonic() + effort.seconds

    def check(item: Any) -> tuple[list[Finding], bool]:
        in_time = time.monotonic() < deadline
        return findings(item, in_time), in_time

    order = np.random.default_rng(0).permutation(len(items))
    shuffled = in_threads(check, [items[index] for index in order], 'checking images')
    checked = [shuffled[place] for place in order.argsort()]
    for name, (found, _) in zip(names, checked):
        for kind, is_error in found:
            defects.add(kind, name, is_error)
    is_good = [not any(is_error for _, is_error in found) for found, _ in checked]
    return is_good, sum(in_time for _, in_time in checked)


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
        with open_raster(path) as file:
            bands = file.indexes[:3]
        image = picture(read_bands(path, bands))
    return image
