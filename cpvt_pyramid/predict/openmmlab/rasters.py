"""Whole images and label maps, also of any bands, as the data pipelines read them."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

import cv2
import numpy as np
from PIL import Image

from ...mm.bands import opened, read_bands
from ...tooling.command import UserError
from ...tooling.rasters import ReadError
from ..images import load_image

OVERVIEW = 2048  # pixels, longer side of a picture that is only looked at
SAMPLE = 1024  # pixels of the longer side, to which images are reduced for statistics


def read_image(path: Union[str, Path], bands: Optional[Sequence[int]] = None) -> np.ndarray:
    """The image at `path`, see `load_image`, in OpenCV's order: (H, W, 3) BGR; or bands of it,
    (H, W, N) in float32, as the test pipeline reads them.

    Raises:
        ReadError: not a complete image.
    """
    try:
        if bands:
            return read_bands(path, bands)
        return cv2.cvtColor(load_image(path), cv2.COLOR_RGB2BGR)
    except OSError as error:
        if isinstance(error.__cause__, Image.DecompressionBombError):
            raise ReadError('too many pixels to be read at once; use --tile') from error
        raise ReadError(str(error).removesuffix(f': {path}')) from error


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
    if bands is None or not found:
        raise ValueError('statistics need at least one image, got none')
    count = np.sum([each.pixels for each in found], axis=0)
    if empty := [str(band) for band, pixels in zip(bands, count) if not pixels]:
        raise ValueError(f'no image has data in band {", ".join(empty)}')
    mean = np.sum([each.total for each in found], axis=0) / count
    squares = np.sum([each.squares for each in found], axis=0) / count
    return {
        'bands': list(bands),
        'mean': six_digits(mean),
        'std': six_digits(np.sqrt(np.maximum(squares - mean**2, 0))),
        'minimum': six_digits(np.min([each.lowest for each in found], axis=0)),
        'maximum': six_digits(np.max([each.highest for each in found], axis=0)),
    }


class Statistics(NamedTuple):
    """Of the finite values of each band of an image."""

    pixels: np.ndarray
    total: np.ndarray
    squares: np.ndarray  # their sum
    lowest: np.ndarray
    highest: np.ndarray


def statistics_of(values: np.ndarray) -> Statistics:
    """The statistics of pixels (N, bands)."""
    known = np.isfinite(values)
    return Statistics(
        pixels=known.sum(axis=0),
        total=values.sum(axis=0, where=known),
        squares=(values**2).sum(axis=0, where=known),
        lowest=values.min(axis=0, where=known, initial=np.inf),
        highest=values.max(axis=0, where=known, initial=-np.inf),
    )


def six_digits(values: np.ndarray) -> list[float]:
    """To six digits."""
    return [float(f'{value:.6g}') for value in values]
