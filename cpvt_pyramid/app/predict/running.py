"""From files of images and videos to a sink: the loop of all commands that predict from files.

    def run_on_files(tool, model, inputs, options, sink):

is all that a new command calls; see `sinks.Sink`.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Optional, TypeVar, Union

from tqdm import tqdm

from ..images.inputs import NamedInput, find_inputs, is_video
from ..images.large import open_large
from ..images.rasters import ReadError
from ..images.reading import size_of
from ..predictions.kinds import Prediction
from ..tooling.command import UserError, escaped, one_line
from ..tooling.progress import progress
from ..tooling.threads import prefetch, usable_cores
from .automatic_tiles import tiles_too_large, tiling_for, with_tiles
from .contents import contents_in_tiles
from .large_images import TiledImage
from .opening import ModelFiles, open_model, resolve_model
from .options import RunOptions
from .protocol import Model, Prepared, TooLarge, line_about_threshold, predict_all
from .result_files import is_result
from .sessions import OutOfMemory, SessionError
from .sinks import Frame, Sink
from .tiles import TILE, TileGrid
from .videos import check_all_frames, import_av, measure_video, open_video

NO_MEMORY = 'its results do not fit into memory; add --workers 0'
MOST_FAILURES = 10  # a model that fails on as many images, and on no other before, fails on all
Outcome = Union[Prediction, TooLarge, SessionError]  # of an image
Skip = Callable[[Path, str], object]  # called with an input that cannot be read, and why
Options = TypeVar('Options', bound=RunOptions)


class NamedFiles(NamedTuple):
    """The files that a command line names."""

    model: ModelFiles
    words: list[str]  # that name the inputs
    inputs: dict[Path, str]  # each with a name for its results; see `find_inputs`


def run_on_files(
    tool: str, model: str, inputs: Sequence[str], options: RunOptions, sink: Sink
) -> int:
    """Open a model, and give a sink what it predicts for files.

    Args:
        tool: begins the lines about inputs that are skipped, such as `cpvt infer`.
        model, inputs: words of the command line; see `cpvt infer`.
        options: how the model is opened and run.
        sink: takes the predictions.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    given = find_files(model, inputs, options, sink.takes_videos)
    options = with_workers(options, given.inputs)
    opened = open_to_run(given.model, options)
    named = sink.name(given.inputs)
    skipped = Skipped(tool)
    predict_files(opened, named, sink, options, skipped)
    sink.finish([entry for entry in named if entry[0] not in skipped.paths])
    return int(bool(skipped.paths))


def find_files(
    model: str,
    inputs: Sequence[str],
    options: RunOptions,
    takes_videos: bool,
) -> NamedFiles:
    """The files that the words of a command line name. Of folders and patterns, results of earlier
    runs are left out, and videos that are not taken.

    Args:
        model: the first word.
        inputs: the words after it, of which the first may be a checkpoint.
        options: of the command.
        takes_videos: whether inputs may be videos.

    Raises:
        UserError: there is no such file, or it is not of a kind that can be taken.
    """
    files, words = resolve_model(model, inputs)
    if not words:
        raise UserError(
            f'{inputs[0]} was taken as the checkpoint of {model}, so that no image is left; give '
            'CONFIG CHECKPOINT IMAGES'
        )

    def leave_out(path: Path) -> bool:
        return is_result(path) or (is_video(path) and not takes_videos)

    found = find_inputs(words, leave_out=leave_out)
    for path in filter(is_video, found):
        if not takes_videos:
            raise UserError(f'images are wanted, but {path} is a video; leave it out')
        if options.tile:
            raise UserError(f'--tile is for images, but {path} is a video; run it without')
        import_av()
    return NamedFiles(files, words, found)


def with_workers(options: Options, inputs: Optional[Collection[Path]] = None) -> Options:
    """The options with a number of workers: by default one for each core, but no more than there
    are batches, if the inputs are known, and none for tiles."""
    if options.workers is not None:
        return options
    workers = usable_cores()
    if options.tile:
        workers = 0
    elif inputs is not None and not any(map(is_video, inputs)):  # which have many frames
        workers = min(workers, math.ceil(len(inputs) / options.batch_size))
    return replace(options, workers=workers)


def open_to_run(files: ModelFiles, options: RunOptions) -> Model:
    """Open a model for a number of workers; prints what is to be said about its options."""
    opened = open_model(files, options, threads=max(options.workers or 0, 1))
    if line := line_about_threshold(options.score_thr, opened):
        print(line)
    return opened


class Skipped:
    """A function that is called with inputs that cannot be read. It says them, and keeps their
    `paths`."""

    def __init__(self, tool: str) -> None:
        self.tool = tool
        self.paths: set[Path] = set()

    def __call__(self, path: Path, reason: str) -> None:
        self.paths.add(path)
        # One call with its end of line: a warning of another thread would mix with it.
        line = escaped(f'{self.tool}: skipped {path}: {reason}')
        tqdm.write(f'{line}\n', file=sys.stderr, end='')


def predict_files(
    model: Model, named: Sequence[NamedInput], sink: Sink, options: RunOptions, skip: Skip
) -> None:
    """Give a sink what a model predicts for images and videos.

    Args:
        model: opened.
        named: the inputs, with their names.
        sink: takes the predictions.
        options: with a number of workers.
        skip: called with an input that cannot be read, and why.
    """
    images = [entry for entry in named if not is_video(entry[0])]
    in_parts = bool(options.tile) and sink.takes_large
    if not in_parts:
        model = with_tiles(model, options.tile, options.overlap, progress)
    if in_parts:
        predict_large_images(model, images, sink, options, skip)
    elif images:
        predict_images(model, images, sink, options, skip)
    for entry in named:
        if is_video(entry[0]):
            predict_video(model, entry, sink, options, skip)


def predict_images(
    model: Model, named: Sequence[NamedInput], sink: Sink, options: RunOptions, skip: Skip
) -> None:
    """Give a sink what a model predicts for images, in threads; see `predict_files`."""

    def write(item: tuple[NamedInput, Prediction]) -> None:
        entry, found = item
        try:
            sink.write(entry, found)
        except MemoryError:
            skip(entry[0], NO_MEMORY + or_tiles(model))

    with progress(len(named), 'images') as update:

        def skip_one(path: Path, reason: str) -> None:
            skip(path, reason)
            update(1)

        found = predicted_images(model, named, options, skip_one)
        for written in prefetch(write, found, options.workers or 0):
            written()
            update(1)


def or_tiles(model: Model) -> str:
    """Advice for an image that does not fit into memory."""
    return f', or divide the image with --tile {TILE}' if model.takes_tiles else ''


def predicted_images(
    model: Model, named: Sequence[NamedInput], options: RunOptions, skip: Skip
) -> Iterator[tuple[NamedInput, Prediction]]:
    """The predictions for images. Threads read the next images while the model is at others. Images
    that cannot be read, or do not fit into memory, are skipped, as are those on which an exported
    model fails otherwise; if it fails on the first `MOST_FAILURES`, that is an error."""
    if options.batch_size > 1:  # those of one size in turn
        named = sorted(named, key=lambda entry: size_of(entry[0]) or (0, 0))
    # In order, those that the model has not finished, and their padded sizes
    loaded: deque[tuple[NamedInput, Optional[tuple[int, int]]]] = deque()

    def load(entry: NamedInput) -> Prepared:
        return model.prepare(model.read(entry[0]))

    def images() -> Iterator[Prepared]:
        for entry, result in zip(named, prefetch(load, named, options.workers or 0)):
            try:
                image = result()
            except TooLarge as error:
                skip(entry[0], one_line(error) + or_tiles(model))
            except ReadError as error:
                skip(entry[0], one_line(error))
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

    has_succeeded = False
    failures = 0
    for found in predict_all(predict, images(), options.batch_size, model.threads):
        entry, size = loaded.popleft()
        if isinstance(found, TooLarge):
            is_smaller_in_tiles = size is not None and math.prod(size) > TILE**2
            skip(entry[0], one_line(found) + (or_tiles(model) if is_smaller_in_tiles else ''))
        elif isinstance(found, SessionError):
            failures += 1
            if failures == MOST_FAILURES and not has_succeeded:
                raise found
            skip(entry[0], one_line(found))
        else:
            has_succeeded = True
            yield entry, found


def predict_large_images(
    model: Model, named: Sequence[NamedInput], sink: Sink, options: RunOptions, skip: Skip
) -> None:
    """Give a sink what a model predicts for images in tiles, one after the other."""
    tiling = tiling_for(model, options.tile, options.overlap)
    assert tiling is not None
    for entry in named:
        path, name = entry
        try:
            with open_large(path, model.bands) as image:
                grid = TileGrid(image.shape, tiling.side, tiling.overlap)
                with progress(len(grid.rows) * len(grid.columns), 'tiles', name) as done:
                    tiled = TiledImage(model, image, grid, options.batch_size, done)
                    sink.write_large(entry, contents_in_tiles(tiled))
        except (MemoryError, OutOfMemory):
            skip(path, tiles_too_large(tiling.side))
        except (ReadError, SessionError, TooLarge) as error:
            skip(path, one_line(error))


def predict_video(
    model: Model, entry: NamedInput, sink: Sink, options: RunOptions, skip: Skip
) -> None:
    """Give a sink what a model predicts for the frames of a video. Each batch of frames, or one for
    each thread, is predicted before the next frames are read."""
    path, name = entry

    def frames() -> Iterator[Frame]:
        prepared = (model.prepare(frame) for frame in video)
        predictions = predict_all(model.predict, prepared, options.batch_size, model.threads)
        for number, found in enumerate(predictions):
            tick = video.ticks[number]
            seconds = float((tick - video.ticks[0]) * video.tick)
            yield Frame(number, tick, seconds, found)
            update(1)
        check_all_frames(video, length)

    try:
        length = measure_video(path)
        with open_video(path) as video, progress(length.frames, 'frames', name) as update:
            sink.write_video(entry, video, frames())
    except (ReadError, SessionError, TooLarge) as error:
        skip(path, one_line(error))
    except MemoryError:
        skip(path, NO_MEMORY)
