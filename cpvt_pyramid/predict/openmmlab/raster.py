"""Images that GDAL reads: in parts where they are larger than memory, and of any bands."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
from torch import Tensor

from ...mm.bands import check_bands, read_image_bands
from ...tooling.rasters import ReadError, open_raster
from ..images import is_upright
from .rasters import OVERVIEW, picture

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

# GDAL's format names of images that are read as RGB.
DRIVERS = ('GTiff', 'PNG', 'JPEG', 'BMP', 'JP2OpenJPEG', 'WEBP')
CACHE = 64 * 2**20  # bytes of GDAL's block cache
LINES = 512  # lines of a label map written at a time


# Opens an image to read it window by window, see `open_raster`.
open_image = partial(open_raster, user='--tile', GDAL_CACHEMAX=CACHE)


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


def row_reader(
    image: 'DatasetReader', bands: Optional[Sequence[int]] = None
) -> Callable[[int, int], Tensor]:
    """A function that reads lines of an image like the data pipelines: (3, h, W) BGR, or the bands
    (N, h, W) in float32.

    Raises:
        ReadError: unsupported kind of image.
    """
    if bands is not None:
        try:
            check_bands(image, bands)
        except OSError as error:
            raise ReadError(str(error)) from error
    elif image.driver not in DRIVERS or set(image.dtypes) != {'uint8'} or image.count > 4:
        raise ReadError(
            f'must have up to 4 bands of 8 bits in one of {", ".join(DRIVERS)}, got {image.count} '
            f'of {image.dtypes[0]} in {image.driver}; convert it, for example with gdal_translate '
            '-ot Byte -scale -b, or train with LoadBands (docs/bands.md)'
        )
    elif not is_upright(Path(image.name)):
        raise ReadError('rotated by an EXIF tag; save it upright first')

    def read(start: int, stop: int) -> Tensor:
        window = (start, stop), (0, image.width)
        if bands is None:
            lines = rgb(image, window=window)[::-1]
        else:
            lines = np.moveaxis(read_image_bands(image, bands, window=window), -1, 0)
        return torch.from_numpy(np.ascontiguousarray(lines))

    return read


def overview(
    image: 'DatasetReader', bands: Optional[Sequence[int]] = None
) -> tuple[np.ndarray, int]:
    """A reduced image (h, w, 3) RGB, and its reduction factor; of bands their `picture`."""
    from rasterio.enums import Resampling

    step = math.ceil(max(image.shape) / OVERVIEW)
    shape = tuple(math.ceil(length / step) for length in image.shape)
    if bands is not None:
        small = read_image_bands(image, bands, out_shape=(len(bands), *shape))
        return np.ascontiguousarray(picture(small)[..., ::-1]), step
    palette = image.count < 3 and image.colorinterp[0].name == 'palette'
    resampling = Resampling.nearest if palette else Resampling.average
    out_shape = shape if image.count < 3 else (3, *shape)
    small = rgb(image, out_shape=out_shape, resampling=resampling)
    return np.ascontiguousarray(np.moveaxis(small, 0, -1)), step


def write_label_map(
    file: Path, labels: np.memmap, image: 'DatasetReader', meta: dict, key: str
) -> None:
    """Write a tiled and compressed GeoTIFF of a label map (H, W), with the georeference of its
    image, the `classes` and `palette` of `meta`, and the key of the run as a tag."""
    import rasterio

    gcps, crs = image.gcps
    place = {'gcps': gcps, 'crs': crs} if gcps else {'crs': image.crs}
    if not image.transform.is_identity:
        place['transform'] = image.transform
    height, width = labels.shape
    file_of_labels = str(labels.filename)
    with rasterio.open(
        file,
        'w',
        'GTiff',
        width,
        height,
        1,
        dtype=labels.dtype,
        compress='deflate',
        tiled=True,
        blockxsize=512,
        blockysize=512,
        bigtiff='if_safer',
        **place,
    ) as tif:
        tif.update_tags(run=key, classes=json.dumps(list(meta['classes'])))
        if labels.dtype == np.uint8:
            colors = enumerate(meta['palette'])
            tif.write_colormap(1, {i: (*color, 255) for i, color in colors})
        for top in range(0, height, LINES):
            bottom = min(top + LINES, height)
            # Mapped for each part only: pages that stay mapped count as resident memory.
            lines = np.memmap(file_of_labels, labels.dtype, 'r', shape=labels.shape)[top:bottom]
            tif.write(lines, 1, window=((top, bottom), (0, width)))
