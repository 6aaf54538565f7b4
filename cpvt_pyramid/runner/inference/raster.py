"""Images that GDAL reads: in parts where they are larger than memory, and of any bands."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import Tensor

from ...mm.bands import check_bands, opened, read_bands, read_image_bands
from ...runtime.images import is_upright
from ...tooling.command import UserError
from ...tooling.rasters import ReadError, open_raster

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

# GDAL's format names of images that are read as RGB.
DRIVERS = ('GTiff', 'PNG', 'JPEG', 'BMP', 'JP2OpenJPEG', 'WEBP')
CACHE = 64 * 2**20  # bytes of GDAL's block cache
OVERVIEW = 2048  # pixels, longer side of the overlay picture
LINES = 512  # lines of a label map written at a time
SAMPLE = 1024  # pixels of the longer side, to which images are reduced for statistics


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


def picture(image: np.ndarray) -> np.ndarray:
    """An image (H, W, C) as an 8-bit picture (H, W, 3) in OpenCV's order (BGR), to draw on.

    Bands: the first three as red, green and blue, or else the first in grey, each stretched from
    its 2nd to its 98th percentile.
    """
    if image.dtype == np.uint8:
        return image
    shown = image[..., [2, 1, 0] if image.shape[2] >= 3 else [0, 0, 0]]
    some = shown[:: math.ceil(len(shown) / OVERVIEW)]
    low, high = np.percentile(some, (2, 98), axis=(0, 1))
    return (255 * ((shown - low) / np.maximum(high - low, 1e-12)).clip(0, 1)).astype(np.uint8)


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
    with rasterio.open(
        file, 'w', 'GTiff', width, height, 1, dtype=labels.dtype, compress='deflate', tiled=True,
        blockxsize=512, blockysize=512, bigtiff='if_safer', **place,
    ) as tif:  # fmt: skip
        tif.update_tags(run=key, classes=json.dumps(list(meta['classes'])))
        if labels.dtype == np.uint8:
            colors = enumerate(meta['palette'])
            tif.write_colormap(1, {i: (*color, 255) for i, color in colors})
        for top in range(0, height, LINES):
            bottom = min(top + LINES, height)
            # Mapped for each part only: pages that stay mapped count as resident memory.
            lines = np.memmap(labels.filename, labels.dtype, 'r', shape=labels.shape)[top:bottom]
            tif.write(lines, 1, window=((top, bottom), (0, width)))


# Bands


def size_of_raster(path: Path) -> Optional[tuple[int, int]]:
    """Height and width of a TIFF, of any bands, that GDAL reads to its end; None of others."""
    if path.suffix.lower() not in ('.tif', '.tiff'):
        return None
    try:
        with opened(path) as image:
            bands, size = image.indexes, image.shape
        read_bands(path, bands, longest=SAMPLE)
        return size
    except (OSError, UserError):
        return None


def labels_of_raster(path: Path) -> Optional[np.ndarray]:
    """A label map of any size, (H, W), in a TIFF that GDAL reads to its end; None of others."""
    if size_of_raster(path) is None:
        return None
    with opened(path) as labels:
        return labels.read(1)


def band_statistics(
    paths: Iterable[Union[str, Path]], bands: Optional[Sequence[int]] = None
) -> dict[str, Sequence[float]]:
    """By name, the numbers of the bands of images and their mean, std, minimum and maximum, without
    pixels that have no data, for the normalization of a model.

    Of images with a longer side than `SAMPLE`, pixels in even distances are read. By default the
    bands are all of the first image.

    Raises:
        OSError: not a complete image, or one without these bands.
        ValueError: no image, or a band without data.
    """
    found: list[Statistics] = []
    for path in paths:
        if bands is None:
            with opened(path) as image:
                bands = image.indexes
        values = read_bands(path, bands, longest=SAMPLE, missing=np.nan).astype(np.float64)
        found.append(statistics_of(values.reshape(-1, len(bands))))
    if not found:
        raise ValueError('statistics need at least one image, got none')
    count = np.sum([each.count for each in found], axis=0)
    if empty := [str(band) for band, pixels in zip(bands, count) if not pixels]:
        raise ValueError(f'no image has data in band {", ".join(empty)}')
    mean = np.sum([each.total for each in found], axis=0) / count
    squares = np.sum([each.squares for each in found], axis=0) / count
    return {
        'bands': bands,
        'mean': six_digits(mean),
        'std': six_digits(np.sqrt(np.maximum(squares - mean**2, 0))),
        'minimum': six_digits(np.min([each.lowest for each in found], axis=0)),
        'maximum': six_digits(np.max([each.highest for each in found], axis=0)),
    }


class Statistics(NamedTuple):
    """Of the finite values of each band of an image."""

    count: np.ndarray
    total: np.ndarray
    squares: np.ndarray  # their sum
    lowest: np.ndarray
    highest: np.ndarray


def statistics_of(values: np.ndarray) -> Statistics:
    """The statistics of pixels (N, bands)."""
    known = np.isfinite(values)
    return Statistics(
        count=known.sum(axis=0),
        total=values.sum(axis=0, where=known),
        squares=(values**2).sum(axis=0, where=known),
        lowest=values.min(axis=0, where=known, initial=np.inf),
        highest=values.max(axis=0, where=known, initial=-np.inf),
    )


def six_digits(values: np.ndarray) -> list[float]:
    """To six digits."""
    return [float(f'{value:.6g}') for value in values]
