"""Images of any number of bands in the tools: what a config reads, and statistics."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

import numpy as np
from mmengine.config import Config

from ...mm.bands import opened, read_bands
from ..configs import kind_of, leaves

SAMPLE = 1024  # pixels of the longer side, to which images are reduced for statistics


class BandStatistics(NamedTuple):
    """Of each band of a set of images, without pixels that have no data."""

    bands: tuple[int, ...]  # their numbers, from 1
    mean: list[float]
    std: list[float]
    minimum: list[float]
    maximum: list[float]


def loaded_bands(cfg: Config) -> Optional[tuple[int, ...]]:
    """The bands that the test pipeline of a config loads; None if it loads RGB."""
    for step in next(leaves(cfg.test_dataloader.dataset)).pipeline:
        if kind_of(step).endswith('LoadBands'):
            return tuple(step['bands'])
    return None


def size_of_raster(path: Path) -> Optional[tuple[int, int]]:
    """Height and width of a TIFF, of any bands, that GDAL reads to its end; None of others."""
    if path.suffix.lower() not in ('.tif', '.tiff'):
        return None
    try:
        with opened(path) as image:
            bands = image.indexes
        return read_bands(path, bands, longest=SAMPLE)[1].size
    except (OSError, ImportError):
        return None


def labels_of_raster(path: Path) -> Optional[np.ndarray]:
    """A label map of any size, (H, W), in a TIFF that GDAL reads to its end; None of others."""
    if size_of_raster(path) is None:
        return None
    with opened(path) as labels:
        return labels.read(1)


def band_statistics(
    paths: Iterable[Union[str, Path]], bands: Optional[Sequence[int]] = None
) -> BandStatistics:
    """Mean and standard deviation of the bands of images, for the normalization of a model.

    Of images with a longer side than `SAMPLE`, pixels in even distances are read.

    Args:
        paths: the images.
        bands: numbers of the bands, from 1. None: all of the first image.

    Raises:
        OSError: not a complete image, or one without these bands.
        ValueError: no image, or a band without data.
    """
    sums = None
    for path in paths:
        if bands is None:
            with opened(path) as image:
                bands = image.indexes
        sums = sums or BandSums(len(bands))
        sums.add(read_bands(path, bands, longest=SAMPLE, missing=np.nan)[0])
    if not sums:
        raise ValueError('statistics need at least one image, got none')
    if not sums.count.all():
        empty = [str(band) for band, pixels in zip(bands, sums.count) if not pixels]
        raise ValueError(f'no image has data in band {", ".join(empty)}')
    return sums.statistics(bands)


class BandSums:
    """BandSums over the pixels of images with data, for each of some bands."""

    def __init__(self, bands: int) -> None:
        self.count, self.total, self.squares = np.zeros((3, bands))
        self.low, self.high = np.full(bands, np.inf), np.full(bands, -np.inf)

    def add(self, image: np.ndarray) -> None:
        """Add an image (h, w, N), NaN where it has no data."""
        image = image.astype(np.float64)
        known = np.isfinite(image)
        self.count += known.sum((0, 1))
        self.total += image.sum((0, 1), where=known)
        self.squares += np.square(image).sum((0, 1), where=known)
        self.low = np.minimum(self.low, image.min((0, 1), where=known, initial=np.inf))
        self.high = np.maximum(self.high, image.max((0, 1), where=known, initial=-np.inf))

    def statistics(self, bands: Sequence[int]) -> BandStatistics:
        mean = self.total / self.count
        std = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0))
        found = (mean, std, self.low, self.high)
        rounded = ([float(f'{value:.6g}') for value in values] for values in found)
        return BandStatistics(tuple(bands), *rounded)
