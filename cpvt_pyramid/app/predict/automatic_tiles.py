"""Images that are much larger than what a model has seen: in tiles, without being asked.

Attention to a whole image takes time and memory that grow with the square of its pixels, those of
tiles grow in proportion to them. A model that resizes its images needs no tiles. This module alone
decides which images are divided, for `cpvt infer`, `cpvt test`, `cpvt app` and `Predictor`.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from ..images.large import WholeImage
from ..images.reading import picture
from ..predictions.kinds import Detections, LabelMap, Prediction
from ..tooling import memory
from .large_images import TiledImage, boxes_in_tiles, label_lines
from .protocol import Model, Prepared, TooLarge
from .sessions import OutOfMemory
from .tiles import TileGrid, overlap_for

# How many times as many pixels as a tile an image may have to be taken as a whole. With four, the
# whole image takes about as long as its tiles.
MUCH_LARGER = 4

Progress = Callable[[int, str, str], AbstractContextManager[Callable[[int], object]]]


class Tiling(NamedTuple):
    """Which images are divided, and into which tiles."""

    side: int  # of tiles, in pixels
    overlap: int  # of neighbouring tiles, in pixels
    above: int = 0  # pixels; images that have more are divided

    def line(self) -> str:
        """What is done with which images."""
        return (
            f'images of more than {self.above / 1e6:.1f} megapixels are taken in tiles of '
            f'{self.side} pixels, because the model does not resize them'
        )


def tiling_for(
    model: Model, tile: Optional[int] = None, overlap: Optional[int] = None
) -> Optional[Tiling]:
    """How a model takes images; None: always as a whole.

    Args:
        model: whose `own_tile` counts.
        tile: what the user asks for: None for tiles where the image is much larger than they are,
            0 for none, or the side of tiles, into which each image is divided.
        overlap: of the tiles that the user asks for; by default that of `overlap_for`.
    """
    if tile is None:
        if model.own_tile is None:
            return None
        side = model.own_tile
        return Tiling(side, overlap_for(side), MUCH_LARGER * side**2)
    if tile == 0:
        return None
    return Tiling(tile, overlap_for(tile) if overlap is None else overlap)


@contextmanager
def no_progress(total: int, unit: str, name: str) -> Iterator[Callable[[int], object]]:
    """Shows nothing; see `tooling.progress`."""
    yield lambda count: None


def with_tiles(
    model: Model,
    tile: Optional[int] = None,
    overlap: Optional[int] = None,
    progress: Progress = no_progress,
    advice: str = '--tile 0 takes them as a whole',
) -> Model:
    """The model, which divides images as `tiling_for` says.

    Args:
        model, tile, overlap: see `tiling_for`.
        progress: shows how many tiles of an image are done.
        advice: how the user avoids tiles.
    """
    tiling = tiling_for(model, tile, overlap)
    return model if tiling is None else TilingModel(model, tiling, progress, advice)


class InTiles(NamedTuple):
    """An image that is divided."""

    pixels: np.ndarray  # (H, W, N), as `Model.read` returns them
    grid: TileGrid


class TilingModel:
    """A model that divides large images into tiles; see `protocol.Model`.

    A warning tells of the first image that is much larger than a tile, and one of each image that
    is smaller, but does not fit into memory as a whole.
    """

    def __init__(self, model: Model, tiling: Tiling, progress: Progress, advice: str) -> None:
        self.model = model
        self.tiling = tiling
        self.progress = progress
        self.advice = advice
        self.untold = threading.Lock()  # which the thread that tells keeps

    def __getattr__(self, name: str) -> Any:
        """What is not defined here is that of the model."""
        return getattr(self.model, name)

    def prepare(self, image: np.ndarray) -> Prepared:
        height, width, channels = image.shape
        has_wrong_bands = self.bands is not None and channels != len(self.bands)
        if height * width <= self.tiling.above or has_wrong_bands:
            return self.model.prepare(image)
        if self.tiling.above and self.untold.acquire(blocking=False):
            warnings.warn(f'{self.tiling.line()}; {self.advice}', stacklevel=2)
        return self.divided(image)

    def divided(self, image: np.ndarray) -> Prepared:
        height, width = image.shape[:2]
        grid = TileGrid((height, width), self.tiling.side, self.tiling.overlap)
        return Prepared(picture(image), InTiles(image, grid), None)

    def predict(self, batch: Sequence[Prepared]) -> list[Prediction]:
        if isinstance(batch[0].data, InTiles):
            return [self.predict_divided(image) for image in batch]
        try:
            return self.model.predict(batch)
        except TooLarge:
            image = batch[0].image
            has_large_tiles = math.prod(image.shape[:2]) <= self.tiling.side**2
            if len(batch) > 1 or has_large_tiles or self.bands is not None:
                raise
        height, width = image.shape[:2]
        warnings.warn(
            f'{width} x {height} pixels do not fit into memory as a whole; they are taken in tiles '
            f'of {self.tiling.side} pixels',
            stacklevel=2,
        )
        return [self.predict_divided(self.divided(image))]

    def predict_divided(self, prepared: Prepared) -> Prediction:
        """The prediction for an image, from its tiles."""
        pixels, grid = prepared.data
        height, width = grid.size
        count = len(grid.rows) * len(grid.columns)
        common = prepared.image, self.classes, self.palette
        try:
            with self.progress(count, 'tiles', f'{width} x {height} pixels') as done:
                tiled = TiledImage(self.model, WholeImage(Path(), pixels), grid, 1, done)
                if self.kind == 'detections':
                    boxes, fullest = boxes_in_tiles(tiled)
                    return Detections(*common, *boxes, limit=self.most_boxes, fullest=fullest)
                return LabelMap(*common, np.concatenate([*label_lines(tiled)]))
        except (MemoryError, OutOfMemory) as error:
            raise TooLarge(tiles_too_large(self.tiling.side)) from error


def tiles_too_large(side: int) -> str:
    """That tiles do not fit into memory, and what to do about it."""
    free = memory.free_text()
    return f'tiles of {side} pixels do not fit into memory ({free}); use smaller tiles'
