"""Images that rasterio (GDAL) reads: in parts, and of any bands."""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np

from ..tooling.command import UserError, optional_package
from .formats import FORMATS

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

# GDAL knows more formats. Files of some, such as VRT and WMS, name other files and addresses, which
# it would read.
DRIVERS = [driver for driver, _ in FORMATS.values()]
LONGEST = 10**6  # pixels of a side; a header can claim more, in a file of a few bytes
OPAQUE = 255  # of an alpha channel
PNG_START = b'\x89PNG\r\n\x1a\n'
SAMPLE = 1024  # pixels of the longer side, to which a raster is reduced where it is only checked


class ReadError(OSError):
    """A file that is not a complete image, or of an unsupported kind."""


def import_rasterio(user: str) -> ModuleType:
    """The module rasterio; a UserError that names its user if it is not installed."""
    optional_package('rasterio', user)
    import rasterio.features
    import rasterio.transform

    return rasterio


@contextmanager
def open_raster(
    path: Union[str, Path], user: str = 'LoadBands', **options: Any
) -> Iterator['DatasetReader']:
    """Open an image on this machine, in one of `FORMATS`, to read it in parts; `user` is for the
    error if rasterio is missing, and `options` are settings of GDAL.

    Raises:
        ReadError: not a complete image, also inside the context.
    """
    if not Path(path).is_file():  # GDAL takes more for a path, such as addresses
        raise ReadError('no such file')
    rasterio = import_rasterio(user)
    from rasterio.errors import RasterioError
    from rasterio.io import DatasetReader

    with rasterio.Env(**options):
        try:
            with DatasetReader(os.fspath(path), driver=DRIVERS) as image:
                if max(image.shape) > LONGEST:
                    raise ReadError(f'{image.width} x {image.height} pixels, which is too large')
                if image.driver == 'PNG':
                    check_png(Path(path))
                yield image
        except RasterioError as error:
            raise ReadError(f'not a complete image: {error.__cause__ or error}') from error
        except UnicodeEncodeError as error:  # of the name of a file
            raise ReadError('GDAL needs a name in UTF-8; rename the file') from error


def check_png(path: Path) -> None:
    """Raise a ReadError unless a PNG file is complete: GDAL fills what is missing with zeros."""
    with path.open('rb') as file:
        is_whole = file.read(len(PNG_START)) == PNG_START
        kind = b''
        while is_whole and kind != b'IEND':
            length = int.from_bytes(file.read(4), 'big')
            kind = file.read(4)
            checksum = zlib.crc32(kind)
            while length and (part := file.read(min(length, 2**20))):
                checksum = zlib.crc32(part, checksum)
                length -= len(part)
            is_whole = file.read(4) == checksum.to_bytes(4, 'big')
    if not is_whole:
        raise ReadError('not a complete image: the PNG file is cut or damaged')


# Pictures


def check_picture(image: 'DatasetReader') -> None:
    """Raise a ReadError unless `read_rgb` can read an open image: of 8 bits, grey or RGB."""
    names = [color.name for color in image.colorinterp]
    colors = names[:-1] if names[-1] == 'alpha' else names
    is_cmyk = image.photometric is not None and image.photometric.name == 'cmyk'
    has_other_depth = {*image.dtypes} != {'uint8'} or any(
        int(image.tags(band, ns='IMAGE_STRUCTURE').get('NBITS', 8)) != 8 for band in image.indexes
    )
    if len(colors) not in (1, 3) or names[0] == 'palette' or is_cmyk or has_other_depth:
        got = 'CMYK' if is_cmyk else f'{len(names)} of {image.dtypes[0]} ({", ".join(names)})'
        raise ReadError(
            f'must have bands of 8 bits, grey or RGB, got {got}; convert it, for example with '
            'gdal_translate -b 1 -b 2 -b 3, or declare its bands (docs/bands.md)'
        )


def read_rgb(image: 'DatasetReader', **options: Any) -> np.ndarray:
    """An array (h, w, 3) uint8 from an open image, see `check_picture`; `options` are those of
    rasterio's `read`, without `indexes`.

    Raises:
        ReadError: an alpha channel hides pixels.
    """
    bands = (1, 2, 3) if image.count >= 3 else (1,)
    values = image.read(bands, **options)
    if image.count > len(bands):
        shape = options.pop('out_shape', None)
        if shape is not None:
            options['out_shape'] = shape[1:]
        if image.read(image.count, **options).min() < OPAQUE:
            raise ReadError(
                'its alpha channel hides pixels; convert it with gdal_translate -b 1 -b 2 -b 3'
            )
    lines = np.moveaxis(values, 0, -1)
    return np.ascontiguousarray(np.broadcast_to(lines, (*lines.shape[:2], 3)))


# Bands


def read_bands(
    path: Union[str, Path],
    bands: Sequence[int],
    longest: Optional[int] = None,
    missing: float = 0,
) -> np.ndarray:
    """Bands of an image file, (h, w, N) float32.

    Args:
        path: the file.
        bands: numbers of the bands, from 1.
        longest: pixels of the longer side, to which a larger image is reduced by leaving out
            pixels. None: it is not.
        missing: value that replaces the file's nodata value, NaN and infinity.

    Raises:
        ReadError: the file is not a complete image, or has not all of these bands.
    """
    with open_raster(path) as image:
        shape = image.shape
        if longest and max(shape) > longest:
            shape = tuple(max(side * longest // max(shape), 1) for side in shape)
        return read_image_bands(image, bands, missing, out_shape=(len(bands), *shape))


def read_image_bands(
    image: 'DatasetReader', bands: Sequence[int], missing: float = 0, **options: Any
) -> np.ndarray:
    """Bands of an open image, see `read_bands`; `options` are those of rasterio's `read`."""
    check_bands(image, bands)
    values = image.read(list(bands), **options)
    out = np.moveaxis(values, 0, -1).astype(np.float32)
    for i, band in enumerate(bands):
        nodata = image.nodatavals[band - 1]
        if nodata is not None:
            out[..., i][values[i] == nodata] = missing
    out[~np.isfinite(out)] = missing
    return np.ascontiguousarray(out)


def check_bands(image: 'DatasetReader', bands: Sequence[int]) -> None:
    """Raise a ReadError unless an open image has these bands, and real numbers in them."""
    if not bands or min(bands) < 1 or max(bands) > image.count:
        raise ReadError(f'bands must be from 1 to {image.count}, got {tuple(bands)}')
    if any(dtype.startswith('complex') for dtype in image.dtypes):
        raise ReadError(f'samples must be real numbers, got {image.dtypes[0]}')


def first_band(path: Path) -> np.ndarray:
    """The values (H, W) of the first band, as the file has them.

    Raises:
        ReadError: not a complete image.
    """
    with open_raster(path) as image:
        return image.read(1)


def size_of_raster(path: Path) -> Optional[tuple[int, int]]:
    """Height and width of a TIFF, of any bands, that GDAL reads to its end; None of others."""
    if path.suffix.lower() not in ('.tif', '.tiff'):
        return None
    try:
        with open_raster(path) as image:
            bands, size = image.indexes, image.shape
        read_bands(path, bands, longest=SAMPLE)
        return size
    except (OSError, UserError):
        return None
