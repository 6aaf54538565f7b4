"""Images larger than memory: read in parts, predicted in tiles, and written as they come.

An image is read from top to bottom, one row of tiles at a time, and each line once. Tiles keep the
resolution of the image. Memory is that of a row of tiles and of the scores of one tile; the scores
that the next row needs are in a temporary file.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple, Optional, Union

import numpy as np

from ..images.large import LargeImage, georeference_of
from ..images.rasters import import_rasterio
from ..tooling.command import UserError
from ..tooling.files import atomic_write
from .protocol import Model
from .tiles import Boxes, Span, TileGrid, blended, merged, ramps

BLOCK = 512  # height and width of the blocks of a label map in pixels


class TiledImage(NamedTuple):
    """An open image that a model gets in tiles.

    Attributes:
        model: predicts from the tiles.
        image: the image.
        grid: its tiles.
        batch_size: tiles that the model gets at a time.
        done: called with the number of tiles that are finished since the last call.
    """

    model: Model
    image: LargeImage
    grid: TileGrid
    batch_size: int
    done: Callable[[int], object]


# Reading


def strips(image: LargeImage, rows: Sequence[Span]) -> Iterator[np.ndarray]:
    """The image under each row of tiles, (h, W, N). Each line is read once."""
    strip: Optional[np.ndarray] = None
    bottom = 0
    for start, stop in rows:
        fresh = image.read(max(start, bottom), stop)
        shared = bottom - start
        if strip is None or shared <= 0:
            strip = fresh
        else:
            strip = np.concatenate([strip[-shared:], fresh])
        bottom = stop
        yield strip


# Predicting


def outputs_of_rows(tiled: TiledImage) -> Iterator[Iterator[Union[np.ndarray, Boxes]]]:
    """For each row of tiles, what the model predicts for its tiles, from left to right."""

    def outputs(strip: np.ndarray) -> Iterator[Union[np.ndarray, Boxes]]:
        tiles = (np.ascontiguousarray(strip[:, slice(*span)]) for span in tiled.grid.columns)
        while batch := list(itertools.islice(tiles, tiled.batch_size)):
            for output in tiled.model.predict_tiles(batch):
                yield output
                tiled.done(1)

    for strip in strips(tiled.image, tiled.grid.rows):
        yield outputs(strip)


def boxes_in_tiles(tiled: TiledImage) -> tuple[Boxes, int]:
    """The detections in an image, best first, and the number of those in the tile that has most."""
    model = tiled.model
    found: list[Any] = []
    for outputs in outputs_of_rows(tiled):
        found += outputs
    fullest = max(int((part.scores >= model.score_thr).sum()) for part in found)
    boxes = merged(found, tiled.grid, model.suppression)
    keep = boxes.scores >= model.score_thr
    return Boxes(*(part[keep] for part in boxes)), fullest


def label_lines(tiled: TiledImage, folder: Optional[Path] = None) -> Iterator[np.ndarray]:
    """The label map of an image, some lines (h, W) at a time, from top to bottom; temporary files
    are in `folder`, by default that of the system."""
    model, grid = tiled.model, tiled.grid
    weights = ramps(grid.rows), ramps(grid.columns)
    dtype = label_type(model)
    rows: Any = outputs_of_rows(tiled)
    with ExitStack() as stack:
        above: Optional[BinaryIO] = None  # partial sums of the row before
        for row, scores in enumerate(rows):
            # It has no name on Linux, so that nothing is left of a process that is killed.
            below: BinaryIO = stack.enter_context(TemporaryFile(prefix='.sums-', dir=folder))
            labels: list[np.ndarray] = []
            for block in blended(scores, grid, row, weights, above, below):
                labels.append(model.to_labels(block).astype(dtype))
            if above is not None:
                above.close()
            above = below
            yield np.concatenate(labels, axis=1)


def label_type(model: Model) -> type:
    return np.uint8 if len(model.classes) <= 256 else np.uint16


# Writing


@contextmanager
def label_map_writer(path: Path, tiled: TiledImage) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that writes the next lines (h, W) of a label map: a tiled and compressed GeoTIFF
    with the georeference of its image, and the classes as a tag.

    Raises:
        UserError: GDAL cannot write it, for example on a full disk.
    """
    rasterio = import_rasterio('--tile')
    model, image = tiled.model, tiled.image
    options = georeference_of(image)
    height, width = image.shape
    dtype = label_type(model)
    options |= {'driver': 'GTiff', 'width': width, 'height': height, 'count': 1, 'dtype': dtype}
    options |= {'compress': 'deflate', 'bigtiff': 'if_safer'}
    options |= {'tiled': True, 'blockxsize': BLOCK, 'blockysize': BLOCK}
    waiting: np.ndarray = np.empty((0, width), dtype)  # lines, less than a row of blocks
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
