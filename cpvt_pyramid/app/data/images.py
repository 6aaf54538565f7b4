"""Images as training reads them: complete, upright, and of the recorded size.

The gate of `..images.gate` says which are taken, as for predictions.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from tqdm.contrib.concurrent import thread_map

from ..images.gate import OtherImage, TooManyPixels, check_for_training, conversion_of, read_header
from ..images.rasters import ReadError, open_raster, read_bands, size_of_raster
from ..images.reading import check_whole_file, decode, picture, pixel_limit, read_image
from ..tooling.command import one_line
from ..tooling.threads import usable_cores
from . import defects
from .defects import Kind

CHECKERS = min(usable_cores(), 16)  # threads that read images
Size = tuple[int, int]  # height and width of an upright image
Finding = tuple[Kind, str]  # a kind of defect, and what to add to the name of the image


class Reading(NamedTuple):
    """How far images are read for a check, and how training reads them.

    Attributes:
        files: whether files are opened at all; otherwise they only have to exist.
        pixels: whether pixels are decoded; otherwise only headers are read.
        by_opencv: training decodes them with OpenCV. Otherwise it reads bands with GDAL.
        masks_by_pillow: training reads segmentation masks with Pillow. Otherwise it reads the first
            band with GDAL.
    """

    files: bool = True
    pixels: bool = True
    by_opencv: bool = True
    masks_by_pillow: bool = True


ALL, HEADERS, NAMES = Reading(), Reading(pixels=False), Reading(files=False, pixels=False)


def inspect(path: Path, how: Reading = ALL) -> tuple[Optional[Size], list[Finding]]:
    """The size of an image as training sees it, and what is wrong with it."""
    if not path.is_file():
        return None, [(defects.MISSING_IMAGE, '')]
    if not how.files:
        return None, []
    if not how.by_opencv:
        return inspect_raster(path)
    try:
        header = read_header(path)
        check_for_training(path, header)
        if math.prod(header.size) > pixel_limit():
            raise TooManyPixels()
        if how.pixels:
            check_whole_file(path, header)
            decode(path, header)
    except TooManyPixels:
        return None, [(defects.LARGE_IMAGE, f' (above {pixel_limit() // 10**6} million pixels)')]
    except OtherImage as error:
        return None, [(defects.OTHER_IMAGE, f': {error.what}; {conversion_of(path)}')]
    except (OSError, MemoryError) as error:
        return None, [(defects.TORN_IMAGE, f': {one_line(error)}')]
    return header.size, [(defects.TURNED_IMAGE, '')] if header.is_turned else []


def inspect_raster(path: Path) -> tuple[Optional[Size], list[Finding]]:
    """As `inspect`, of a file whose bands training reads with GDAL."""
    size = size_of_raster(path)
    return size, [] if size else [(defects.TORN_IMAGE, '')]


def sizes_of(root: Path, names: Sequence[str], found: defects.Defects) -> dict[str, Size]:
    """The sizes of images, from their headers; reports those without."""
    names = list(dict.fromkeys(names))
    sizes = {}
    readings = in_threads(lambda name: inspect(root / name, HEADERS), names, 'reading sizes')
    for name, (size, findings) in zip(names, readings):
        if size:
            sizes[name] = size
            continue
        for kind, more in findings:
            found.add(kind, f'{name}{more}')
    return sizes


def in_threads(function: Callable[[Any], Any], items: Sequence[Any], title: str) -> list:
    """The results of a function for each item, with a progress bar."""
    return thread_map(function, items, desc=title, max_workers=CHECKERS, leave=False, delay=3)


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
