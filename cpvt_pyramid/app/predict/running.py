"""From files of images and videos to files of results: the loop of `cpvt infer`."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Optional, Union

from ..images.inputs import NamedInput, is_video
from ..images.large import open_large
from ..images.rasters import ReadError
from ..images.reading import size_of
from ..predictions.kinds import Prediction
from ..tooling.command import one_line
from ..tooling.progress import progress
from ..tooling.threads import prefetch
from .automatic_tiles import tiles_too_large, tiling_for, with_tiles
from .options import RunOptions
from .protocol import Model, Prepared, TooLarge, predict_all
from .results import Results
from .sessions import OutOfMemory, SessionError
from .tiles import TILE, TileGrid
from .videos import write_video

NO_MEMORY = 'its results do not fit into memory; add --workers 0'
MOST_FAILURES = 10  # a model that fails on as many images, and on no other before, fails on all
Outcome = Union[Prediction, TooLarge, SessionError]  # of an image
Skip = Callable[[Path, str], object]  # called with an input that cannot be read, and why


def write_results(
    model: Model, named: Sequence[NamedInput], results: Results, options: RunOptions, skip: Skip
) -> None:
    """Write the results of images and videos."""
    images = [entry for entry in named if not is_video(entry[0])]
    if not options.tile:
        model = with_tiles(model, options.tile, progress=progress)
    if options.tile:
        write_large_images(model, images, results, options, skip)
    elif images:
        if options.batch_size > 1:  # those of one size in turn
            images.sort(key=lambda entry: size_of(entry[0]) or (0, 0))
        write_images(model, images, results, options, skip)
    for entry in named:
        if is_video(entry[0]):
            try:
                write_video(model, entry, results, options.batch_size)
            except (ReadError, SessionError, TooLarge) as error:
                skip(entry[0], one_line(error))
            except MemoryError:
                skip(entry[0], NO_MEMORY)


def write_images(
    model: Model, named: Sequence[NamedInput], results: Results, options: RunOptions, skip: Skip
) -> None:
    """Write the results of images. Threads read the next images and write the last results while
    the model is at others. Images that do not fit into memory are skipped. Images on which an
    exported model fails otherwise are skipped; if it fails on the first `MOST_FAILURES`, that is an
    error."""
    or_tiles = f', or divide the image with --tile {TILE}' if model.takes_tiles else ''
    # In order, those that the model has not finished, and their padded sizes
    loaded: deque[tuple[NamedInput, Optional[tuple[int, int]]]] = deque()

    def load(entry: NamedInput) -> Prepared:
        return model.prepare(model.read(entry[0]))

    def images() -> Iterator[Prepared]:
        for entry, result in zip(named, prefetch(load, named, options.workers or 0)):
            try:
                image = result()
            except TooLarge as error:
                skip(entry[0], one_line(error) + or_tiles)
                update(1)
            except ReadError as error:
                skip(entry[0], one_line(error))
                update(1)
            else:
                loaded.append((entry, image.padded_size))
                yield image

    def predict(batch: Sequence[Prepared]) -> Sequence[Outcome]:
        try:
            return model.predict(batch)
        except TooLarge as error:
            if len(batch) == 1:
                return [error]
            return [predict([image])[0] for image in batch]
        except SessionError as error:
            return [error] * len(batch)

    def predicted() -> Iterator[tuple[NamedInput, Prediction]]:
        has_succeeded = False
        failures = 0
        most, threads = options.batch_size, model.threads
        for found in predict_all(predict, images(), most, threads):
            entry, size = loaded.popleft()
            if isinstance(found, TooLarge):
                is_smaller_in_tiles = size is not None and math.prod(size) > TILE**2
                advice = or_tiles if is_smaller_in_tiles else ''
                skip(entry[0], one_line(found) + advice)
                update(1)
                continue
            if not isinstance(found, SessionError):
                has_succeeded = True
                yield entry, found
                continue
            failures += 1
            if failures == MOST_FAILURES and not has_succeeded:
                raise found
            skip(entry[0], one_line(found))
            update(1)

    def write(item: tuple[NamedInput, Prediction]) -> None:
        entry, found = item
        try:
            results.write(entry, found)
        except MemoryError:
            skip(entry[0], NO_MEMORY + or_tiles)

    with progress(len(named), 'images') as update:
        for written in prefetch(write, predicted(), options.workers or 0):
            written()
            update(1)


def write_large_images(
    model: Model, named: Sequence[NamedInput], results: Results, options: RunOptions, skip: Skip
) -> None:
    """Write the results of images, one after the other, in tiles."""
    tiling = tiling_for(model, options.tile, options.overlap)
    assert tiling is not None
    for entry in named:
        path, name = entry
        try:
            with open_large(path, model.bands) as image:
                grid = TileGrid(image.shape, tiling.side, tiling.overlap)
                with progress(len(grid.rows) * len(grid.columns), 'tiles', name) as update:
                    results.write_in_tiles(entry, model, image, grid, options.batch_size, update)
        except (MemoryError, OutOfMemory):
            skip(path, tiles_too_large(tiling.side))
        except (ReadError, SessionError, TooLarge) as error:
            skip(path, one_line(error))
