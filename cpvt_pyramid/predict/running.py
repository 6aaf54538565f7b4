"""From files of images and videos to files of results: the loop of `cpvt infer`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

from ..tooling.command import one_line
from ..tooling.inputs import Named, is_video
from ..tooling.progress import progress
from ..tooling.rasters import ReadError
from ..tooling.threads import ahead, map_in_threads
from .images import size_of
from .large_images import Tiling, open_large
from .model import Model, Prepared
from .predictions import Prediction
from .results import Results
from .sessions import SessionError
from .tiles import TileGrid
from .videos import write_video


class Work(NamedTuple):
    """How results are made."""

    batch_size: int = 1  # images, frames or tiles that a model gets at a time
    threads: int = 0  # that read images ahead of the model, and as many that write; 0: none
    tile: Optional[int] = None  # height and width of tiles in pixels; None: whole images
    overlap: int = 0  # of neighbouring tiles in pixels


Outcome = Union[Prediction, SessionError]
Skip = Callable[[Path, str], object]  # called with an input that cannot be read, and why


def write_results(
    model: Model, named: Sequence[Named], results: Results, work: Work, skip: Skip
) -> None:
    """Write the results of images and videos."""
    images = [entry for entry in named if not is_video(entry[0])]
    if work.tile is not None:
        write_large_images(model, images, results, work, skip)
    elif images:
        if work.batch_size > 1:  # those of one size in turn
            images.sort(key=lambda entry: size_of(entry[0]) or (0, 0))
        write_images(model, images, results, work, skip)
    for entry in named:
        if is_video(entry[0]):
            try:
                write_video(model, entry, results, work.batch_size)
            except ReadError as error:
                skip(entry[0], one_line(error))


def write_images(
    model: Model, named: Sequence[Named], results: Results, work: Work, skip: Skip
) -> None:
    """Write the results of images. Threads read the next images and write the last results while
    the model is at others. Images with one padded size pass the model together. Images on which an
    exported model fails, for example because they are too large, are skipped, unless it fails on
    the first."""

    has_succeeded = False

    def load(entry: Named) -> tuple[Named, Prepared]:
        return entry, model.prepare(model.read(entry[0]))

    def loaded() -> Iterator[tuple[Named, Prepared]]:
        for (path, _), result in zip(named, ahead(load, named, work.threads)):
            try:
                yield result()
            except ReadError as error:
                skip(path, one_line(error))
                update(1)

    def predict(batch: Sequence[tuple[Named, Prepared]]) -> list[tuple[Named, Outcome]]:
        nonlocal has_succeeded
        try:
            found: Sequence[Outcome] = model.predict([prepared for _, prepared in batch])
            has_succeeded = True
        except SessionError as error:
            if not has_succeeded:  # it may fail on all
                raise
            found = [error] * len(batch)
        return [(entry, outcome) for (entry, _), outcome in zip(batch, found)]

    def padded_size(item: tuple[Named, Prepared]) -> Optional[tuple[int, int]]:
        return item[1].padded_size

    def write(item: tuple[Named, Outcome]) -> None:
        entry, outcome = item
        if isinstance(outcome, SessionError):
            skip(entry[0], one_line(outcome))
        else:
            results.write(entry, outcome)

    threads = model.threads if model.threads > 1 else 0
    with progress(len(named), 'images') as update:
        found = map_in_threads(predict, loaded(), padded_size, work.batch_size, threads)
        for written in ahead(write, found, work.threads):
            written()
            update(1)


def write_large_images(
    model: Model, named: Sequence[Named], results: Results, work: Work, skip: Skip
) -> None:
    """Write the results of images, one after the other, in tiles."""
    assert work.tile is not None
    tiling = Tiling(work.tile, work.overlap, work.batch_size)
    for entry in named:
        path, name = entry
        try:
            with open_large(path) as image:
                grid = TileGrid(image.shape, tiling.tile, tiling.overlap)
            with progress(len(grid.rows) * len(grid.columns), 'tiles', name) as update:
                results.write_in_tiles(entry, model, tiling, update)
        except ReadError as error:
            skip(path, one_line(error))
