"""Reading images, and resizing them as the data pipelines of mm do, with Pillow and numpy."""

import itertools
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from ..tooling import memory
from ..tooling.command import UserError
from .formats import kind_of_content, open_image, readable_formats
from .rasters import (
    TOO_DEEP,
    ReadError,
    check_picture,
    is_sixteen_bit,
    open_raster,
    read_bands,
    read_rgb,
)

Source = Union[str, Path, Image.Image, np.ndarray]  # an array is (H, W, 3) RGB uint8

OVERVIEW = 2048  # pixels, longer side of a picture that is only looked at
DEEP = ('I', 'F')  # Pillow's modes of 32 bits, which it would clip at 255
ROWS = 32  # that are resized at a time
DARK = 16  # of 256: values below fill at most 12 of 16 bits
ORIENTATION = 0x0112  # EXIF tag
ON_THEIR_SIDE = range(5, 9)  # orientations that turn rows into columns
DARK_TEXT = 'its values fill at most 12 of 16 bits, and it is nearly black; scale them first'
FRAMES_TEXT = 'only the first of its frames is read'
TIFF_STARTS = b'II*\0', b'MM\0*', b'II+\0', b'MM\0+'
SUBFILE_TYPE, PART = 254, 0b101  # TIFF tag, and its bits of overviews and masks
PAGES = 32  # of a TIFF that are looked at


def load_image(source: Source) -> np.ndarray:
    """An image as (H, W, 3) RGB uint8. All commands read images with this function.

    - The image is upright, whatever the format. OpenCV, with which OpenMMLab reads images,
      ignores the orientation of WebP files.
    - Transparency is left out, as in OpenCV: hidden colours show.
    - Values of 16 bits are divided by 256, as in OpenCV, and never stretched. A warning tells of
      those that fill at most 12 bits, which are nearly black.
    - Of several frames or pages the first is read, with a warning.

    Raises:
        OSError: not a complete image, one of 32 bits a channel, or one that does not fit into
            memory.
        ValueError: an array of another shape or dtype, or a Pillow image of 32 bits.
        TypeError: neither a path nor a Pillow image nor an array.
    """
    if isinstance(source, np.ndarray):
        if source.ndim != 3 or source.shape[2] != 3 or source.dtype != np.uint8 or not source.size:
            raise ValueError(
                'an image array must be (height, width, 3) RGB uint8, '
                f'got {source.shape} {source.dtype}'
            )
        return source
    if isinstance(source, Image.Image):
        if source.mode in DEEP:
            raise ValueError(TOO_DEEP)
        return _to_rgb(source, 'the image')
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            'an image must be a path, a Pillow image or an array (height, width, 3) RGB uint8, got '
            f'{type(source).__name__}; PIL.Image.open reads bytes in io.BytesIO and open files'
        )
    path = Path(source)
    check_readable(path)
    try:
        with open_image(path) as image:
            if image.mode not in DEEP:
                rgb = _to_rgb(image, path)
                if _has_more_frames(image):
                    warnings.warn(f'{path}: {FRAMES_TEXT}', stacklevel=2)
                return rgb
    except PermissionError as error:
        raise OSError('permission denied') from error
    except Image.DecompressionBombError as error:
        raise OSError(too_large_text()) from error
    except MemoryError as error:
        raise OSError(no_memory_text(path)) from error
    except UnidentifiedImageError as error:
        if is_tiff(path):
            return _load_other_tiff(path)
        kinds = ', '.join(readable_formats())
        kind = kind_of_content(path)
        found = f'; it is {kind}' if kind else ''
        raise OSError(f'not an image in one of the formats {kinds}{found}') from error
    except Exception as error:  # Pillow raises many kinds on a truncated file
        raise OSError(f'not a complete image: {error}') from error
    raise OSError(TOO_DEEP)


def _load_other_tiff(path: Path) -> np.ndarray:
    """A TIFF that Pillow does not read, such as one of three bands of 16 bits, by GDAL."""
    try:
        with open_raster(path, 'a TIFF of this kind') as image:
            check_picture(image)
            if math.prod(image.shape) > pixel_limit():
                raise ReadError(too_large_text())
            rgb = read_rgb(image)
            warn_of_raster(path, image, int(rgb.max()))
            return rgb
    except MemoryError as error:
        raise OSError(no_memory_text(path)) from error
    except UserError as error:  # rasterio is not installed
        raise OSError(str(error)) from error


def warn_of_raster(path: Path, image: Any, brightest: int) -> None:
    """Warn of what `load_image` warns of, after an image was read by GDAL as 8 bits."""
    if is_sixteen_bit(image) and brightest < DARK:
        warnings.warn(f'{path}: {DARK_TEXT}', stacklevel=3)
    if len(image.subdatasets) > 1:
        warnings.warn(f'{path}: {FRAMES_TEXT}', stacklevel=3)


def is_tiff(path: Path) -> bool:
    with path.open('rb') as file:
        return file.read(4) in TIFF_STARTS


def too_large_text() -> str:
    return (
        f'more than {pixel_limit() // 10**6} million pixels; cut or reduce it, or use cpvt infer '
        '--tile'
    )


def no_memory_text(path: Path) -> str:
    size = size_of(path)
    pixels = 'its pixels' if size is None else f'{size[1]} x {size[0]} pixels'
    return f'{pixels} do not fit into memory ({memory.free_text()}); reduce the image'


def pixel_limit() -> int:
    """The pixels of the largest image that Pillow reads."""
    return 2 * (Image.MAX_IMAGE_PIXELS or 2**40)


def check_readable(path: Path) -> None:
    """Raise an OSError unless there is a file that can be read to its end."""
    if path.is_symlink() and not path.exists():
        raise OSError(f'a link to {path.readlink()}, which does not exist')
    if not path.exists():
        raise OSError('no such file')
    if path.is_dir():
        raise OSError('a folder, not a file')
    if not path.is_file():
        raise OSError('a pipe or device, not a file')
    if not path.stat().st_size:
        raise OSError('the file is empty')


def read_image(path: Union[str, Path], bands: Optional[Sequence[int]] = None) -> np.ndarray:
    """The image at `path`, see `load_image`, or, with their numbers, bands of it, (H, W, N) in
    float32.

    Raises:
        ReadError: not a complete image.
    """
    try:
        if bands:
            check_readable(Path(path))
            return read_bands(path, bands)
        return load_image(path)
    except MemoryError as error:  # of bands
        raise ReadError(no_memory_text(Path(path))) from error
    except OSError as error:
        raise ReadError(str(error)) from error


def picture(image: np.ndarray) -> np.ndarray:
    """An image, see `read_image`, as (H, W, 3) RGB uint8 to draw on.

    Of bands, the first three are red, green and blue, or else the first is grey, each stretched
    from its 2nd to its 98th percentile.
    """
    if image.dtype == np.uint8:
        return image
    shown = image[..., [0, 1, 2] if image.shape[2] >= 3 else [0, 0, 0]]
    some = shown[:: math.ceil(len(shown) / OVERVIEW)]
    low, high = np.percentile(some, (2, 98), axis=(0, 1))
    return (255 * ((shown - low) / np.maximum(high - low, 1e-12)).clip(0, 1)).astype(np.uint8)


def size_of(source: Source) -> Optional[tuple[int, int]]:
    """Height and width of an image, of a file those in its header; None if it cannot be read."""
    if isinstance(source, np.ndarray):
        return source.shape[:2]
    if isinstance(source, Image.Image):
        return upright_size(source)
    try:
        check_readable(Path(source))
        with open_image(source) as image:
            return upright_size(image)
    except Exception:  # Pillow raises many kinds; `load_image` tells what is wrong
        return None


def upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    if orientation_of(image) not in ON_THEIR_SIDE:
        return height, width
    if isinstance(image, TiffImageFile):  # whose `size` is upright in new versions of Pillow
        width, height = image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
    return width, height


def orientation_of(image: Image.Image) -> int:
    """The orientation in EXIF data, from 1 (upright) to 8, before Pillow has loaded the pixels."""
    if image.format == 'PNG' and 'exif' not in image.info:
        return 1  # Pillow would decode the image to look for EXIF data after its pixels
    orientation = image.getexif().get(ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def _to_rgb(image: Image.Image, name: object) -> np.ndarray:
    is_deep = '16' in image.mode or any(';16' in str(tile) for tile in getattr(image, 'tile', ()))
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith('I;16'):  # Pillow would clip it
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    rgb = np.array(image.convert('RGB'))
    if is_deep and rgb.max() < DARK:
        warnings.warn(f'{name}: {DARK_TEXT}', stacklevel=3)
    return rgb


def _has_more_frames(image: Image.Image) -> bool:
    """Whether an image has further frames or pages, besides a TIFF's overviews and masks, and the
    previews that cameras append to a JPEG. They are not counted: a small file can have a million.
    """
    if isinstance(image, TiffImageFile):
        pages = itertools.islice(ImageSequence.Iterator(image), PAGES)
        return sum(not image.tag_v2.get(SUBFILE_TYPE, 0) & PART for _ in pages) > 1
    return image.format != 'MPO' and getattr(image, 'is_animated', False)


def rescaled_size(size: tuple[int, int], short: float, long: float) -> tuple[int, int]:
    """The largest (height, width) of the same aspect ratio with sides up to `short` and `long`, as
    mmcv's `rescale_size` computes it."""
    scale = min(long / max(size), short / min(size))
    return max(int(size[0] * scale + 0.5), 1), max(int(size[1] * scale + 0.5), 1)


def neighbours(new: int, old: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of `new` samples along an axis of `old`, its two neighbours and the second's weight.

    The first of the two is -1, and the second `old`, where there is no neighbour.
    """
    position = ((np.arange(new) + 0.5) * (old / new) - 0.5).astype(np.float32)
    first = np.floor(position)
    return first.astype(int), first.astype(int) + 1, position - first


def resize_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear resizing of an image (H, W, C) uint8 to (height, width), bit-identical to OpenCV.

    OpenCV rounds the weights to 11 bits, sums along rows exactly, and drops 4 bits of each sum and
    16 of its product before it sums along columns.
    """
    if image.shape[:2] == tuple(size):
        return image
    height, width = image.shape[:2]
    top, bottom, v = neighbours(size[0], height)
    left, right, u = neighbours(size[1], width)
    u = np.where((left < 0) | (right >= width), 0, u)  # along columns OpenCV keeps both weights
    left, right = left.clip(0), right.clip(max=width - 1)

    def fixed(weight: np.ndarray) -> np.ndarray:
        return np.rint(weight * np.float32(2048)).astype(np.int32)[:, None]

    # Every row that is needed is resized once.
    rows, place = np.unique(np.stack([top, bottom]).clip(0, height - 1), return_inverse=True)
    place = place.reshape(2, -1)  # of each neighbour among the rows
    across = image[rows].take(left, 1) * fixed(1 - u)
    across += image[rows].take(right, 1) * fixed(u)
    across >>= 4
    result = np.empty((*size, image.shape[2]), np.uint8)
    for start in range(0, size[0], ROWS):  # which stay in the cache
        part = slice(start, start + ROWS)
        above = (across[place[0, part]] * fixed(1 - v[part])[..., None]) >> 16
        below = (across[place[1, part]] * fixed(v[part])[..., None]) >> 16
        result[part] = (above + below + 2) >> 2
    return result


def resize_scores(scores: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear resizing of a map (H, W) float32 to (height, width)."""
    for axis in (0, 1):
        first, second, weight = neighbours(size[axis], scores.shape[axis])
        if axis == 0:
            weight = weight[:, None]
        before = scores.take(first.clip(0), axis)
        after = scores.take(second.clip(max=scores.shape[axis] - 1), axis)
        scores = before * (1 - weight) + after * weight
    return scores
