"""Pipeline transforms for images of any number of bands and sample type, such as GeoTIFFs.

They load whole images or random tiles, and the segmentation masks of these. rasterio (GDAL) reads
the files; install the extra `large`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Optional

import numpy as np
from mmcv.transforms import BaseTransform
from mmengine.registry import TRANSFORMS

from ..images.label_maps import IGNORED
from ..images.rasters import ReadError, open_raster, read_image_bands

if TYPE_CHECKING:
    from rasterio.io import DatasetReader


class Part(NamedTuple):
    """The part of an image that `LoadBands` has read."""

    size: tuple[int, int]  # of the whole image
    window: tuple  # rows and columns, half-open


@contextmanager
def open_bands(path: str) -> Iterator['DatasetReader']:
    """`open_raster` with errors that end with the path, which mm does not tell."""
    try:
        with open_raster(path) as image:
            yield image
    except ReadError as error:
        raise ReadError(f'{error}: {path}') from error


@TRANSFORMS.register_module()
class LoadBands(BaseTransform):
    """Load bands of the image at `img_path` as float32, instead of `LoadImageFromFile`.

    The channels of the model are these bands, in this order: set `bgr_to_rgb=False` in the data
    preprocessor, and its `mean` and `std` to those of the bands.

    Args:
        bands: numbers of the bands in the file, from 1.
        tile: height and width of a random part that is read instead of the whole image, for
            training on scenes larger than memory; `LoadTileAnnotations` loads its mask.

    Examples:
        >>> train_pipeline = [
        ...     dict(type='LoadBands', bands=(4, 3, 2), tile=(512, 512)),
        ...     dict(type='LoadTileAnnotations'),
        ...     dict(type='PackSegInputs'),
        ... ]
    """

    def __init__(self, bands: Sequence[int], tile: Optional[tuple[int, int]] = None) -> None:
        self.bands = tuple(bands)
        self.tile = None if tile is None else tuple(tile)
        if not self.bands or min(self.bands) < 1:
            raise ValueError(f'bands must be numbers from 1, got {self.bands}')
        if self.tile and (len(self.tile) != 2 or min(self.tile) < 1):
            raise ValueError(f'tile must be a height and a width in pixels, got {self.tile}')

    def transform(self, results: dict) -> dict:
        with open_bands(results['img_path']) as file:
            size = file.shape
            lengths = np.minimum(size, self.tile or size)
            starts = np.random.randint(size - lengths + 1)
            window = tuple(zip(starts, starts + lengths))  # rows and columns, half-open
            image = read_image_bands(file, self.bands, window=window)
        shape = image.shape[:2]
        return results | {
            'img': image,
            'img_shape': shape,
            'ori_shape': shape,
            'part': Part(size, window),
        }


@TRANSFORMS.register_module()
class LoadTileAnnotations(BaseTransform):
    """Load the segmentation mask at `seg_map_path`, of the part that `LoadBands` has read.

    Labels are the first band of the file; its pixels without data are ignored. Without `tile` of
    `LoadBands`, or without `LoadBands`, it is the whole mask.

    Args:
        reduce_zero_label: whether 0 is ignored and the other labels are reduced by 1. None: as the
            data set says.

    Examples:
        >>> transform = dict(type='LoadTileAnnotations', reduce_zero_label=True)
    """

    def __init__(self, reduce_zero_label: Optional[bool] = None) -> None:
        self.reduce_zero_label = reduce_zero_label

    def transform(self, results: dict) -> dict:
        path = results['seg_map_path']
        part = results.get('part')
        with open_bands(path) as file:
            if part and file.shape != part.size:
                raise OSError(
                    f'a segmentation mask must have the size of its image, {part.size}, got '
                    f'{file.shape}: {path}'
                )
            labels = file.read(1, window=part.window if part else None)
            nodata = file.nodatavals[0]
        if nodata is not None:
            labels = np.where(labels == nodata, IGNORED, labels)
        if labels.dtype.kind == 'f' or labels.min() < 0 or labels.max() > IGNORED:
            raise OSError(f'labels must be whole numbers from 0 to 255, got {labels.dtype}: {path}')
        labels = labels.astype(np.uint8)
        reduces = self.reduce_zero_label
        if reduces is None:
            reduces = results['reduce_zero_label']
        if reduces:
            labels = np.where((labels == 0) | (labels == IGNORED), IGNORED, labels - 1)
        mapped = labels.copy()
        for old, new in (results.get('label_map') or {}).items():
            mapped[labels == old] = new
        results['gt_seg_map'] = mapped
        results['seg_fields'].append('gt_seg_map')
        return results
