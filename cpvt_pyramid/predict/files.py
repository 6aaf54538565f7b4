"""From image files to files of results."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Callable, Optional

import numpy as np

from ..tooling.command import one_line
from ..tooling.inputs import Named, is_video
from ..tooling.threads import map_in_threads
from .images import load_image
from .predictor import Predictor


def write_predictions(
    predictor: Predictor,
    named: Sequence[Named],
    folder: Path,
    pictures: bool,
    report: Callable[[Named, Optional[str]], object],
) -> None:
    """Write the results of images into a folder.

    The threads of the predictor take a batch each, which they read, predict and write. While one of
    them waits for a file or for the model, the others go on. Few images are in memory at a time.

    Args:
        pictures: also write an overlay for each image.
        report: called for each image, in order, when its results are complete, with the reason if
            it could not be read and has none.

    Raises:
        Exception: the model fails, or results cannot be written. Other batches that are under way
            are finished first.
    """
    write = partial(write_batch, predictor, folder, pictures)

    def key(entry: Named) -> Optional[tuple[int, int]]:
        path, _ = entry
        return predictor.batch_key(path)

    outcomes = map_in_threads(write, named, key, predictor.batch_size, predictor.threads)
    with closing(outcomes):  # an error or an interrupt here ends the threads
        for entry, reason in zip(named, outcomes):
            report(entry, reason)


def write_batch(
    predictor: Predictor, folder: Path, pictures: bool, batch: Sequence[Named]
) -> list[Optional[str]]:
    """Write the results of images that pass the model together; returns, for each, why it could not
    be read, or None."""
    reasons: list[Optional[str]] = []
    images: list[np.ndarray] = []
    readable: list[Named] = []
    for path, name in batch:
        try:
            images.append(load_still(path))
        except OSError as error:
            reasons.append(one_line(error))
        else:
            readable.append((path, name))
            reasons.append(None)
    for (path, name), found in zip(readable, predictor.predict_together(images)):
        found.write(folder, name, path, pictures)
    return reasons


def load_still(path: Path) -> np.ndarray:
    """An image as (H, W, 3) RGB uint8; an OSError that says why if it cannot be read."""
    if is_video(path):
        raise OSError('videos need OpenCV; give the model to cpvt infer')
    return load_image(path)
