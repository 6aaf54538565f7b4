"""Image files larger than memory, read and written in parts with rasterio (GDAL)."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, filterwarnings

import numpy as np
import torch
from torch import Tensor

from .command import UserError

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

DRIVERS = ('GTiff', 'PNG', 'JPEG', 'BMP', 'JP2OpenJPEG', 'WEBP')  # GDAL's format names
CACHE = 64 * 2**20  # bytes of GDAL's block cache
OVERVIEW = 2048  # pixels, longer side of the overlay picture
LINES = 512  # lines of a label map written at a time


class ReadError(OSError):
    """A file that is not a complete image, or of an unsupported kind."""


@contextmanager
def open_image(path: Path) -> Iterator['DatasetReader']:
    """Open an image to read window by window.

    Raises:
        ReadError: not a complete image.
    """
    try:
        import rasterio
        from rasterio.errors import NotGeoreferencedWarning, RasterioError
    except ImportError as error:
        raise UserError(f'--tile needs rasterio; pip install rasterio ({error})') from error
    with catch_warnings(), rasterio.Env(GDAL_CACHEMAX=CACHE):
        filterwarnings('ignore', category=NotGeoreferencedWarning)
        try:
            with rasterio.open(path) as image:
                yield image
        except RasterioError as error:
            raise ReadError(f'not a complete image: {error}') from error


def check_kind(image: 'DatasetReader') -> None:
    if image.driver not in DRIVERS:
        raise ReadError(f'format must be one of {", ".join(DRIVERS)}, got {image.driver}')
    if set(image.dtypes) != {'uint8'}:
        raise ReadError(
            f'samples must have 8 bits, got {image.dtypes[0]}; convert them, for example with '
            'gdal_translate -ot Byte -scale'
        )
    if image.count > 4:
        raise ReadError(
            f'at most 4 bands are supported, got {image.count}; choose 3, for example with '
            'gdal_translate -b'
        )
    if image.tags().get('EXIF_Orientation', '1') != '1':
        raise ReadError('rotated by an EXIF tag; save it upright first')


def rgb(image: 'DatasetReader', **options: Any) -> np.ndarray:
    """An RGB array (3, h, w) from a grey, palette or RGB image, with or without alpha."""
    from rasterio.enums import ColorInterp

    if image.count >= 3:
        return image.read((1, 2, 3), **options)
    values = image.read(1, **options)
    if image.colorinterp[0] == ColorInterp.palette:
        table = np.zeros((256, 3), np.uint8)
        for index, color in image.colormap(1).items():
            table[index] = color[:3]
        return np.moveaxis(table[values], -1, 0)
    return np.repeat(values[None], 3, 0)


def row_reader(image: 'DatasetReader') -> Callable[[int, int], Tensor]:
    """A function that reads lines of an image in BGR, like the data pipelines.

    Raises:
        ReadError: unsupported kind of image; while reading, not a complete image.
    """
    from rasterio.errors import RasterioError

    check_kind(image)

    def read(start: int, stop: int) -> Tensor:
        try:
            lines = rgb(image, window=((start, stop), (0, image.width)))
        except RasterioError as error:
            raise ReadError(f'not a complete image: {error}') from error
        return torch.from_numpy(np.ascontiguousarray(lines[::-1]))

    return read


def overview(image: 'DatasetReader') -> tuple[np.ndarray, int]:
    """A reduced image (h, w, 3) RGB, and its reduction factor."""
    from rasterio.enums import Resampling

    step = math.ceil(max(image.shape) / OVERVIEW)
    shape = tuple(math.ceil(length / step) for length in image.shape)
    palette = image.count < 3 and image.colorinterp[0].name == 'palette'
    resampling = Resampling.nearest if palette else Resampling.average
    out_shape = shape if image.count < 3 else (3, *shape)
    small = rgb(image, out_shape=out_shape, resampling=resampling)
    return np.ascontiguousarray(np.moveaxis(small, 0, -1)), step


def write_label_map(
    file: Path, labels: np.memmap, image: 'DatasetReader', meta: dict, key: str
) -> None:
    """A tiled and compressed GeoTIFF of a label map.

    Args:
        file: path to write to.
        labels: (H, W).
        image: source of the georeference.
        meta: `classes` and `palette`.
        key: key of the run, stored as a tag.
    """
    import rasterio

    gcps, crs = image.gcps
    place = {'gcps': gcps, 'crs': crs} if gcps else {'crs': image.crs}
    if not image.transform.is_identity:
        place['transform'] = image.transform
    height, width = labels.shape
    size = {'height': height, 'width': width, 'count': 1, 'dtype': labels.dtype}
    layout = {'tiled': True, 'blockxsize': 512, 'blockysize': 512, 'bigtiff': 'if_safer'}
    with rasterio.open(file, 'w', 'GTiff', compress='deflate', **size, **layout, **place) as tif:
        tif.update_tags(run=key, classes=json.dumps(list(meta['classes'])))
        if labels.dtype == np.uint8:
            colors = enumerate(meta['palette'])
            tif.write_colormap(1, {i: (*color, 255) for i, color in colors})
        for top in range(0, height, LINES):
            bottom = min(top + LINES, height)
            # Mapped for each part only: pages that stay mapped count as resident memory.
            lines = np.memmap(labels.filename, labels.dtype, 'r', shape=labels.shape)[top:bottom]
            tif.write(lines, 1, window=((top, bottom), (0, width)))
