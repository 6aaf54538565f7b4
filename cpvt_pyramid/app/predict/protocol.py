"""What a model is to the parts that read images and write predictions.

There are three: `exported.ExportedModel` and `pytorch.model.TrainedModel`, which share their code,
and `openmmlab.model.OpenMMLabModel`. `automatic_tiles.TilingModel` wraps one of them.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Protocol, TypeVar, Union

import numpy as np

from ...padding.batching import map_in_batches
from ..predictions.drawing import Color
from ..predictions.kinds import Kind, Prediction
from ..tooling.command import OptionError, UserError
from ..tooling.threads import prefetch
from .tiles import Boxes, Suppression

Result = TypeVar('Result')


class TooLarge(UserError):
    """Images that do not fit into memory together."""


class Prepared(NamedTuple):
    """An image as a model takes it."""

    image: np.ndarray  # (H, W, 3) RGB uint8, to draw on
    data: Any  # of the model
    # After padding. Images for which it is equal may pass the model together.
    padded_size: Optional[tuple[int, int]]


class Model(Protocol):
    """A detector or a segmentor that predicts from images of any size."""

    kind: Kind
    classes: Sequence[str]
    palette: Sequence[Color]
    score_thr: float  # boxes of a lower score are left out
    least_score: float  # of what the model itself returns, whatever `score_thr` is
    bands: Optional[tuple[int, ...]]  # numbers of the bands in the files; None: RGB
    threads: int  # that may call `predict` at the same time
    suppression: Suppression  # of detectors
    most_boxes: Optional[int]  # of an image or a tile; None: no limit is known
    takes_tiles: bool  # without losing results: tiles have no masks of objects

    @property
    def own_tile(self) -> Optional[int]:
        """Side in pixels of the tiles that show what a whole image shows, because the model does
        not resize images; None: no tiles do."""

    def read(self, path: Path) -> np.ndarray:
        """The image that `prepare` takes: (H, W, 3) RGB uint8, or bands (H, W, N) float32.

        Raises:
            ReadError: not a complete image.
        """

    def prepare(self, image: np.ndarray) -> Prepared:
        """An image in the form that `predict` takes.

        Raises:
            ReadError: the model cannot take it.
        """

    def predict(self, batch: Sequence[Prepared]) -> list[Prediction]:
        """The predictions for images with one padded size, in one batch.

        Raises:
            TooLarge: they do not fit into memory.
        """

    def predict_tiles(self, tiles: Sequence[np.ndarray]) -> list[Union[np.ndarray, Boxes]]:
        """The boxes in each tile (h, w, N), see `read`, or the scores (K, h, w) float32 of its
        pixels. Each tile passes the model alone: the rounding of a product depends on its shape.

        Raises:
            UserError: the model does not predict in tiles.
        """

    def to_labels(self, scores: np.ndarray) -> np.ndarray:
        """The labels (h, w) for scores (K, h, w) that were blended."""


def predict_all(
    predict: Callable[[Sequence[Prepared]], Sequence[Result]],
    images: Iterable[Prepared],
    batch_size: int,
    threads: int,
) -> Iterator[Result]:
    """The results of a model's `predict` for images, in order, in batches of one padded size.

    Several threads each call it for a batch of images that follow each other. One thread also
    collects the images of a batch from among others.
    """
    if threads == 1:
        yield from map_in_batches(predict, images, padded_size_of, batch_size, weight=megapixels)
        return
    for results in prefetch(predict, batches_in_turn(images, batch_size), threads):
        yield from results()


def batches_in_turn(images: Iterable[Prepared], batch_size: int) -> Iterator[list[Prepared]]:
    """Up to `batch_size` images that follow each other and have one padded size."""
    for _, group in itertools.groupby(images, padded_size_of):
        while batch := list(itertools.islice(group, batch_size)):
            yield batch


def padded_size_of(image: Prepared) -> Optional[tuple[int, int]]:
    return image.padded_size


def megapixels(image: Prepared) -> float:
    """Of an image, or 1 if it has less."""
    return max(math.prod(image.image.shape[:2]) / 2**20, 1)


def check_has_scores(score_thr: Optional[float], kind: Kind) -> None:
    """Raise an OptionError if there is a threshold for scores, but results of a kind have none."""
    if score_thr is not None and kind != 'detections':
        raise OptionError(
            f'{{score_thr}} is for scores of boxes, but the model predicts {kind}; leave it out'
        )


def line_about_threshold(score_thr: Optional[float], model: Model) -> str:
    """That a threshold for scores has no effect, because a model itself leaves out more; empty if
    it has one.

    Raises:
        OptionError: the results of the model have no scores.
    """
    check_has_scores(score_thr, model.kind)
    if score_thr is None or score_thr >= model.least_score:
        return ''
    return (
        f'a score threshold of {score_thr:g} has the effect of {model.least_score:g}, '
        'below which the model itself leaves out boxes: that is model.test_cfg.score_thr (of two '
        'stages, model.test_cfg.rcnn.score_thr) of its config, with which it can be exported again'
    )
