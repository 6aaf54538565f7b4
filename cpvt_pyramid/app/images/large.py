"""Images to be read some lines at a time, so that those larger than memory can be read, too.

Most are read whole by `load_image`, so that they are checked, turned and converted as everywhere.
GDAL (rasterio) reads bands and what is too large for that.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Protocol

import numpy as np
from PIL import Image

from .gate import TooManyPixels, read_header
from .rasters import (
    ReadError,
    check_bands,
    check_picture,
    open_raster,
    read_image_bands,
    read_rgb,
)
from .reading import (
    OVERVIEW,
    check_readable,
    picture,
    pixel_limit,
    read_image,
)

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

CACHE = 64 * 2**20  # bytes of GDAL's block cache
WHOLE_PIXELS = 2**25  # of a TIFF that is read whole; a larger one may consist of tiles
IN_PARTS = ('TIFF', 'JPEG2000')  # formats that may, by Pillow's names


class LargeImage(Protocol):
    """An open image."""

    path: Path
    shape: tuple[int, int]  # height and width in pixels

    def read(self, start: int, stop: int) -> np.ndarray:
        """Lines (stop - start, W, 3) RGB uint8, or bands (stop - start, W, N) float32.

        Raises:
            ReadError: not a complete image.
        """

    def overview(self) -> np.ndarray:
        """The image (h, w, 3) RGB uint8, reduced by `overview_step`; of bands their `picture`."""


class WholeImage:
    """An image in memory; see `LargeImage`."""

    def __init__(self, path: Path, pixels: np.ndarray) -> None:
        self.path = path
        self.pixels = pixels
        height, width = pixels.shape[:2]
        self.shape = height, width

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.pixels[start:stop]

    def overview(self) -> np.ndarray:
        step = overview_step(self.shape)
        if step == 1:
            return self.pixels
        return np.asarray(Image.fromarray(self.pixels).reduce(step))


class RasterImage:
    """An image in a file that GDAL reads in parts; see `LargeImage`."""

    def __init__(
        self, path: Path, raster: 'DatasetReader', bands: Optional[Sequence[int]] = None
    ) -> None:
        if bands is None:
            check_picture(raster)
        else:
            check_bands(raster, bands)
        self.path = path
        self.raster = raster
        self.bands = bands
        self.shape: tuple[int, int] = raster.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        window = (start, stop), (0, self.shape[1])
        if self.bands is not None:
            return read_image_bands(self.raster, self.bands, window=window)
        return read_rgb(self.raster, window=window)

    def overview(self) -> np.ndarray:
        from rasterio.enums import Resampling

        step = overview_step(self.shape)
        shape = tuple(math.ceil(length / step) for length in self.shape)
        if self.bands is not None:
            every = len(self.bands), *shape
            return picture(read_image_bands(self.raster, self.bands, out_shape=every))
        count = 3 if self.raster.count >= 3 else 1
        return read_rgb(self.raster, out_shape=(count, *shape), resampling=Resampling.average)


def overview_step(shape: tuple[int, int]) -> int:
    """The factor by which an overview of an image of this height and width is reduced."""
    return math.ceil(max(shape) / OVERVIEW)


@contextmanager
def open_large(path: Path, bands: Optional[Sequence[int]] = None) -> Iterator[LargeImage]:
    """Open an image, or bands of it by their numbers from 1, to read it in parts.

    Raises:
        ReadError: not a complete image, or of an unsupported kind.
    """
    try:
        check_readable(path)
    except OSError as error:
        raise ReadError(str(error)) from error
    if bands is None and not needs_parts(path):
        yield WholeImage(path, read_image(path))
        return
    with open_raster(path, '--tile', GDAL_CACHEMAX=CACHE) as raster:
        yield RasterImage(path, raster, bands)


def needs_parts(path: Path) -> bool:
    """Whether an image is too large for `read_image`, or large and may be stored in tiles.

    Raises:
        ReadError: the gate refuses it.
    """
    try:
        header = read_header(path)
    except TooManyPixels:
        return True
    pixels = math.prod(header.size)
    return pixels > pixel_limit() or (header.format in IN_PARTS and pixels > WHOLE_PIXELS)


def georeference_of(image: LargeImage) -> dict[str, Any]:
    """Where an image lies in the world, as options with which rasterio writes a file of its size;
    empty if that is unknown."""
    try:
        with open_raster(image.path, '--tile') as raster:
            if raster.shape != image.shape:  # turned by its EXIF data
                return {}
            gcps, crs = raster.gcps
            options = {'gcps': gcps, 'crs': crs} if gcps else {'crs': raster.crs}
            if not raster.transform.is_identity:
                options['transform'] = raster.transform
            return options
    except ReadError:  # a format, or a name, that GDAL does not take
        return {}
