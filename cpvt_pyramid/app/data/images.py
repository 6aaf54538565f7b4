"""Images as training reads them: complete, upright, of the recorded size, and not too flat.

OpenMMLab decodes images with OpenCV, so these checks do, too. Pillow only reads headers: the format
and the EXIF orientation.
"""

import io
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import numpy as np
from PIL import Image
from tqdm.contrib.concurrent import thread_map

from ..images.formats import open_image
from ..images.rasters import ReadError, open_raster, read_bands, size_of_raster
from ..images.reading import (
    ORIENTATION,
    orientation_of,
    picture,
    pixel_limit,
    read_image,
    upright_size,
)
from ..tooling.threads import usable_cores
from . import defects
from .defects import Kind

CHECKERS = min(usable_cores(), 16)  # threads that read images
NOMINAL_SCALE = (1333, 800)  # of most detectors, where no pipeline is known
TAIL = 64  # bytes at the end of a PNG, in which its last chunk begins
Size = tuple[int, int]  # height and width of an upright image
Finding = tuple[Kind, str]  # a kind of defect, and what to add to the name of the image


class Reading(NamedTuple):
    """How far images are read for a check, and how training reads them.

    Attributes:
        files: whether files are opened at all; otherwise they only have to exist.
        pixels: whether pixels are decoded; otherwise only headers are read.
        by_opencv: training decodes them with OpenCV. Otherwise it reads bands with GDAL.
        scales: to which training and tests resize, with their aspect ratio, as (long, short). None:
            that is not known.
    """

    files: bool = True
    pixels: bool = True
    by_opencv: bool = True
    scales: Optional[Sequence[tuple[float, float]]] = None


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
        with open_image(path) as image:
            kind = image.format or ''
            size = upright_size(image)
            orientation = orientation_of(image)
    except Image.DecompressionBombError:
        return inspect_large(path)
    except Exception:  # Pillow raises many kinds on a damaged file
        return inspect_raster(path)
    if not can_decode(kind):
        return None, [(defects.UNREAD_IMAGE, f' ({kind})')]
    if how.pixels:
        decoded = decode(path, kind)
        if decoded is None:
            is_torn = not is_complete(path)
            return None, [(defects.TORN_IMAGE if is_torn else defects.UNREAD_IMAGE, '')]
        size = decoded
    found: list[Finding] = []
    if orientation != 1:
        turned = is_turned_by_opencv(kind)
        found.append((defects.TURNED_IMAGE if turned else defects.UNTURNED_IMAGE, ''))
    found += flat_findings(size, how.scales)
    return size, found


def inspect_raster(path: Path) -> tuple[Optional[Size], list[Finding]]:
    """As `inspect`, of a file that only GDAL reads: of many bands, or of other types."""
    size = size_of_raster(path)
    return size, [] if size else [(defects.TORN_IMAGE, '')]


def inspect_large(path: Path) -> tuple[Optional[Size], list[Finding]]:
    """As `inspect`, of a file above Pillow's limit: OpenCV's is higher, and decides."""
    size = decode(path)
    if size is None:
        if size_of_raster(path):
            return inspect_raster(path)
        return None, [(defects.LARGE_IMAGE, '')]
    return size, [(defects.LARGE_FOR_INFER, f' (above {pixel_limit() // 10**6} million pixels)')]


def decode(path: Path, kind: str = '') -> Optional[Size]:
    """The size of an image of a format as OpenCV reads it, the way mmcv calls it; None if it does
    not."""
    try:
        content = np.fromfile(path, np.uint8)
        if kind == 'PNG' and b'IEND' not in content[-TAIL:].tobytes():  # libpng would print it
            return None
        image = cv2.imdecode(content, cv2.IMREAD_COLOR) if content.size else None
    except (cv2.error, OSError, MemoryError):
        return None
    return None if image is None else image.shape[:2]


def is_complete(path: Path) -> bool:
    """Whether Pillow reads an image to its end."""
    try:
        with open_image(path) as image:
            image.load()
    except Exception:  # Pillow raises many kinds on a truncated file
        return False
    return True


@cache
def can_decode(kind: str) -> bool:
    """Whether this build of OpenCV reads a format of Pillow, tried with a small image."""
    return decoded_sample(kind) is not None


@cache
def is_turned_by_opencv(kind: str) -> bool:
    """Whether OpenCV follows the EXIF orientation of a format, tried with a small image."""
    sample = decoded_sample(kind, orientation=6)
    return sample is not None and sample.shape[0] > sample.shape[1]


def decoded_sample(kind: str, orientation: int = 1) -> Optional[np.ndarray]:
    """An image of 16 x 8 pixels (width, height) of a format, as OpenCV reads it."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    kind = {'MPO': 'JPEG'}.get(kind, kind)
    file = io.BytesIO()
    try:
        Image.new('RGB', (16, 8)).save(file, kind, exif=exif)
        return cv2.imdecode(np.frombuffer(file.getvalue(), np.uint8), cv2.IMREAD_COLOR)
    except (OSError, KeyError, cv2.error):
        return None


def flat_findings(size: Size, scales: Optional[Sequence[tuple[float, float]]]) -> list[Finding]:
    """Whether an image loses a side when it is resized to one of some scales."""
    kind = defects.FLAT_IMAGE
    if scales is None:
        scales = [NOMINAL_SCALE]
        kind = defects.NARROW_IMAGE
    for long, short in scales:
        scale = min(long / max(size), short / min(size))
        if int(min(size) * scale + 0.5) < 1:  # as mmcv's `rescale_size` computes it
            return [(kind, f' ({size[1]} x {size[0]})')]
    return []


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
    """The results of a function for each item, with a progress bar, and without what OpenCV prints
    about damaged images."""
    level = cv2.setLogLevel(0)
    try:
        return thread_map(function, items, desc=title, max_workers=CHECKERS, leave=False, delay=3)
    finally:
        cv2.setLogLevel(level)


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
