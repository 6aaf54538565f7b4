"""Images larger than memory: read in parts, predicted in tiles, and written as they come.

An image is read from top to bottom, one row of tiles at a time, and each line once. Tiles keep the
resolution of the image. Memory is that of a row of tiles and of the scores of one tile; the scores
that the next row needs are in a temporary file.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np

from ..images.rasters import ReadError, check_bands, open_raster, read_image_bands
from ..images.reading import (
    OVERVIEW,
    TOO_DEEP,
    check_readable,
    is_upright,
    picture,
    pixel_limit,
    read_image,
)
from ..predictions.drawing import Color, draw_frames, draw_segmentation
from ..predictions.kinds import save_overlay
from ..tooling.command import UserError
from ..tooling.files import atomic_write
from .model import Model
from .tiles import Boxes, Span, TileGrid, blended, merged, ramps

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

CACHE = 64 * 2**20  # bytes of GDAL's block cache
BLOCK = 512  # height and width of the blocks of a label map in pixels

ReadLines = Callable[[int, int], np.ndarray]  # start, stop -> (stop - start, W, N); in rising order


# Reading


@contextmanager
def open_large(path: Path) -> Iterator['DatasetReader']:
    """Open an image to read it in parts; see `open_raster`."""
    try:
        check_readable(path)
    except OSError as error:
        raise ReadError(str(error)) from error
    with open_raster(path, '--tile', GDAL_CACHEMAX=CACHE) as image:
        yield image


def line_reader(image: 'DatasetReader', bands: Optional[Sequence[int]] = None) -> ReadLines:
    """A function that reads lines of an image as `read_image` does: (h, W, 3) RGB uint8, or the
    bands (h, W, N) float32.

    Raises:
        ReadError: unsupported kind of image.
    """
    if bands is not None:
        check_bands(image, bands)
    else:
        check_picture(image)
        if image.driver == 'JPEG' and image.width * image.height <= pixel_limit():
            # GDAL enlarges the colours of a JPEG by copying, Pillow and OpenCV do not.
            whole = read_image(image.name)
            return lambda start, stop: whole[start:stop]

    def read(start: int, stop: int) -> np.ndarray:
        window = (start, stop), (0, image.width)
        if bands is None:
            return rgb(image, window=window)
        return read_image_bands(image, bands, window=window)

    return read


def check_picture(image: 'DatasetReader') -> None:
    """Raise a ReadError unless `rgb` reads an image as `load_image` does."""
    if not set(image.dtypes) <= {'uint8', 'uint16'}:
        raise ReadError(TOO_DEEP)
    is_cmyk = image.photometric is not None and image.photometric.name == 'cmyk'
    if image.count > 4 or is_cmyk:
        colors = 'CMYK' if is_cmyk else str(image.count)
        raise ReadError(
            f'must have up to 4 bands, grey, RGB or with a palette, got {colors}; convert it, for '
            'example with gdal_translate -b, or train with LoadBands (docs/bands.md)'
        )
    if not is_upright(Path(image.name)):
        raise ReadError('rotated by an EXIF tag; save it upright first')


def rgb(image: 'DatasetReader', **options: Any) -> np.ndarray:
    """An array (h, w, 3) uint8 from an image of up to 4 bands; `options` are those of rasterio's
    `read`, without `indexes`."""
    if image.count >= 3:
        values = image.read((1, 2, 3), **options)
    else:
        values = image.read((1,), **options)
    if image.colorinterp[0].name == 'palette':
        table = np.zeros((256, 3), np.uint8)
        for index, color in image.colormap(1).items():
            table[index] = color[:3]
        return table[values[0]]
    if values.dtype == np.uint16:
        values = (values >> 8).astype(np.uint8)
    bits = int(image.tags(1, ns='IMAGE_STRUCTURE').get('NBITS', 8))
    if bits < 8:
        values = values * np.uint8(255 // (2**bits - 1))
    lines = np.moveaxis(values, 0, -1)
    return np.ascontiguousarray(np.broadcast_to(lines, (*lines.shape[:2], 3)))


def overview_step(image: 'DatasetReader') -> int:
    """The factor by which an overview is reduced."""
    return math.ceil(max(image.shape) / OVERVIEW)


def overview(
    image: 'DatasetReader', bands: Optional[Sequence[int]] = None
) -> tuple[np.ndarray, int]:
    """A reduced image (h, w, 3) RGB, and its reduction factor; of bands their `picture`."""
    from rasterio.enums import Resampling

    step = overview_step(image)
    shape = tuple(math.ceil(length / step) for length in image.shape)
    if bands is not None:
        return picture(read_image_bands(image, bands, out_shape=(len(bands), *shape))), step
    is_palette = image.colorinterp[0].name == 'palette'
    resampling = Resampling.nearest if is_palette else Resampling.average
    count = 3 if image.count >= 3 else 1
    return rgb(image, out_shape=(count, *shape), resampling=resampling), step


def strips(read: ReadLines, rows: Sequence[Span]) -> Iterator[np.ndarray]:
    """The image under each row of tiles, (h, W, N). Each line is read once."""
    strip: Optional[np.ndarray] = None
    bottom = 0
    for start, stop in rows:
        fresh = read(max(start, bottom), stop)
        shared = bottom - start
        if strip is None or shared <= 0:
            strip = fresh
        else:
            strip = np.concatenate([strip[-shared:], fresh])
        bottom = stop
        yield strip


# Predicting


def outputs_of_rows(
    model: Model,
    read: ReadLines,
    grid: TileGrid,
    batch_size: int,
    done: Callable[[int], object],
) -> Iterator[Iterator[Union[np.ndarray, Boxes]]]:
    """For each row of tiles, what a model predicts for its tiles, from left to right; `done` is
    called with the number of tiles that are finished since the last call."""

    def outputs(strip: np.ndarray) -> Iterator[Union[np.ndarray, Boxes]]:
        tiles = (np.ascontiguousarray(strip[:, slice(*span)]) for span in grid.columns)
        while batch := list(itertools.islice(tiles, batch_size)):
            for output in model.predict_tiles(batch):
                yield output
                done(1)

    for strip in strips(read, grid.rows):
        yield outputs(strip)


def boxes_in_tiles(
    model: Model,
    image: 'DatasetReader',
    grid: TileGrid,
    batch_size: int,
    done: Callable[[int], object],
) -> Boxes:
    """The detections in an image, best first."""
    read = line_reader(image, model.bands)
    found: list[Any] = []
    for outputs in outputs_of_rows(model, read, grid, batch_size, done):
        found += outputs
    boxes = merged(found, grid, model.suppression)
    keep = boxes.scores >= model.score_thr
    return Boxes(*(part[keep] for part in boxes))


def label_lines(
    model: Model,
    image: 'DatasetReader',
    grid: TileGrid,
    batch_size: int,
    folder: Path,
    done: Callable[[int], object],
) -> Iterator[np.ndarray]:
    """The label map of an image, some lines (h, W) at a time, from top to bottom; temporary files
    are in `folder`."""
    weights = ramps(grid.rows), ramps(grid.columns)
    read = line_reader(image, model.bands)
    dtype = label_type(model)
    rows: Any = outputs_of_rows(model, read, grid, batch_size, done)
    with TemporaryDirectory(prefix='.sums-', dir=folder) as sums:
        above: Optional[Path] = None  # partial sums of the row before
        for row, scores in enumerate(rows):
            below = Path(sums, str(row))
            labels: list[np.ndarray] = []
            with below.open('wb') as file:
                for block in blended(scores, grid, row, weights, above, file):
                    labels.append(model.to_labels(block).astype(dtype))
            if above is not None:
                above.unlink()
            above = below
            yield np.concatenate(labels, axis=1)


def label_type(model: Model) -> type:
    return np.uint8 if len(model.classes) <= 256 else np.uint16


# Writing


@contextmanager
def label_map_writer(
    path: Path, image: 'DatasetReader', model: Model
) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that writes the next lines (h, W) of a label map: a tiled and compressed GeoTIFF
    with the georeference of its image, and the classes as a tag.

    Raises:
        UserError: GDAL cannot write it, for example on a full disk.
    """
    import rasterio

    gcps, crs = image.gcps
    options = {'gcps': gcps, 'crs': crs} if gcps else {'crs': image.crs}
    if not image.transform.is_identity:
        options['transform'] = image.transform
    height, width = image.shape
    dtype = label_type(model)
    options |= {'driver': 'GTiff', 'width': width, 'height': height, 'count': 1, 'dtype': dtype}
    options |= {'compress': 'deflate', 'bigtiff': 'if_safer'}
    options |= {'tiled': True, 'blockxsize': BLOCK, 'blockysize': BLOCK}
    waiting = np.empty((0, width), dtype)  # lines, less than a row of blocks
    top = 0

    def write(lines: np.ndarray) -> None:
        nonlocal waiting, top
        waiting = np.concatenate([waiting, lines])
        whole = len(waiting) // BLOCK * BLOCK
        if top + len(waiting) == height:
            whole = len(waiting)
        if whole:
            with errors_of_writing(path):
                tif.write(waiting[:whole], 1, window=((top, top + whole), (0, width)))
            waiting = waiting[whole:]
            top += whole

    with atomic_write(path) as draft, ExitStack() as stack:
        with errors_of_writing(path):
            tif = stack.enter_context(rasterio.open(draft, 'w', **options))
            tif.update_tags(classes=json.dumps(list(model.classes)))
            if dtype == np.uint8:
                colors = enumerate(model.palette)
                tif.write_colormap(1, {i: (*color, 255) for i, color in colors})
        yield write
        with errors_of_writing(path):
            stack.close()


@contextmanager
def errors_of_writing(path: Path) -> Iterator[None]:
    """Inside this context, in which GDAL writes a file, its error is a UserError."""
    from rasterio.errors import RasterioError

    try:
        yield
    except RasterioError as error:
        raise UserError(f'cannot write {path}: {error.__cause__ or error}') from error


class Reduced:
    """A label map that is reduced, by leaving out pixels, while its lines come."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.top = 0
        self.parts: list[np.ndarray] = []

    def add(self, lines: np.ndarray) -> None:
        first = -self.top % self.step
        self.parts.append(lines[first :: self.step, :: self.step].copy())
        self.top += len(lines)

    def labels(self) -> np.ndarray:
        return np.concatenate(self.parts)


def draw_large_boxes(image: 'DatasetReader', model: Model, boxes: Boxes, path: Path) -> None:
    """Write an overlay of boxes on a reduced image."""
    small, step = overview(image, model.bands)
    save_overlay(
        draw_frames(small, boxes.boxes / step, boxes.labels, model.classes, model.palette), path
    )


def draw_large_labels(image: 'DatasetReader', model: Model, labels: Reduced, path: Path) -> None:
    """Write an overlay of a reduced label map on the reduced image."""
    small, _ = overview(image, model.bands)
    palette: Sequence[Color] = model.palette
    save_overlay(draw_segmentation(small, labels.labels(), model.classes, palette), path)
