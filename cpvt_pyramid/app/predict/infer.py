"""`cpvt infer`: open a model, name the results of the inputs, and write them."""

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Optional

from tqdm import tqdm

from ..images.inputs import NamedInput, find_inputs, is_video, name_results
from ..predictions.kinds import line_about_limit
from ..tooling.command import UserError, escaped
from ..tooling.files import check_folder
from ..tooling.report import amount
from ..tooling.threads import usable_cores
from .automatic_tiles import tiling_for
from .cluster import write_on_ray
from .opening import ModelFiles, open_model, resolve_model
from .options import InferOptions
from .protocol import Model, line_about_threshold
from .results import Results
from .run_record import claimed, record_of
from .running import write_results
from .tiles import ALIGN, TILE
from .videos import import_av


def run_infer(model: str, inputs: Sequence[str], options: InferOptions) -> int:
    """Run a model on images and videos; returns the exit status, see `cpvt infer`."""
    files, words = resolve_model(model, inputs)
    if not words:
        raise UserError(
            f'{inputs[0]} was taken as the checkpoint of {model}, so that no image is left; give '
            'CONFIG CHECKPOINT IMAGES'
        )
    check_folder(options.out_dir)
    found = find_inputs(words, out_dir=options.out_dir)
    if any(map(is_video, found)):
        import_av()
    if options.tile:
        check_no_videos(found)
    if options.ray:  # this process only looks at the model
        options = replace(options, workers=0)
        opened = open_model(files, replace(options, device='cpu'))
    else:
        options = with_workers(options, found)
        opened = open_model(files, options, threads=max(options.workers or 0, 1))
    tiling = tiling_for(opened, options.tile, options.overlap)
    if line := line_about_threshold(options.score_thr, opened):
        print(line)
    results = Results(options, opened.kind, opened.classes, opened.most_boxes)
    results.check([*found.items()])

    def write(todo: list[NamedInput], skip: Callable[[Path, str], None]) -> None:
        if options.ray:
            write_on_ray(todo, files, results, options, skip)
        else:
            write_results(opened, todo, results, options, skip)

    if options.ray and tiling is not None and tiling.above:  # warnings of its workers are not shown
        print(f'{tiling.line()}; --tile 0 takes them as a whole')
    with claimed(options.out_dir, record_of(options, files, words, tiling), options.overwrite):
        return write_named(options, files, found, results, opened, write)


def write_named(
    options: InferOptions,
    files: ModelFiles,
    found: Mapping[Path, str],
    results: Results,
    model: Model,
    write: Callable[[list[NamedInput], Callable[[Path, str], None]], None],
) -> int:
    """Name the results of inputs, write them, and say what was written.

    Args:
        found: see `find_inputs`.
        model: opened.
        write: writes the results of inputs, and calls a function with those that it skips and why.

    Returns:
        The exit status.
    """
    named, folder = name_results(found, options.out_dir)
    todo = list(named)
    if options.skip_existing:
        todo = [entry for entry in named if not results.exist(entry)]
        print(f'{len(named) - len(todo)} of {len(named)} are already done')
    skipped: set[Path] = set()

    def skip(path: Path, reason: str) -> None:
        skipped.add(path)
        # One call with its end of line: a warning of another thread would mix with it.
        line = escaped(f'cpvt infer: skipped {path}: {reason}')
        tqdm.write(f'{line}\n', file=sys.stderr, end='')

    start = time.monotonic()
    if todo or not options.ray:
        write(todo, skip)
    seconds = time.monotonic() - start
    done = [entry for entry in named if entry[0] not in skipped]
    results.finish(done)
    print(f'{len(done)} of {len(named)} done: results in {folder}')
    count = len(todo) - len(skipped)
    if count:
        print(f'found in images: {results.summary()}')
    if results.full:
        print(note_about_limit(results, files, model, options.tile))
    if count and not options.tile and not options.ray:
        print(f'{count / seconds:.3g} images per second, reading and writing included')
    return int(bool(skipped))


def note_about_limit(results: Results, files: ModelFiles, model: Model, tile: Optional[int]) -> str:
    """That a model returned as many boxes as it can, and what to do about it."""
    count = amount(len(results.full), 'image')
    has_video = any(is_video(path) for path in results.full)
    if has_video:
        count = amount(len(results.full), 'image or video', 'images or videos')
    advice = []
    if model.takes_tiles and not has_video:
        side = TILE if model.own_tile is None else model.own_tile // 2
        advice.append(f'tiles, such as --tile {side}')
    if tile:
        count = f'in {count} a tile'
        advice = [f'tiles smaller than --tile {tile}'] if tile > ALIGN else []
    if files.trained is None:
        larger = "a larger max_per_img in the config's model.test_cfg"
        if files.exported is not None:  # perhaps from the name of a trained model
            larger += ', if it was exported from a config, and export it again'
        advice.append(larger)
    advice.append('a higher --score-thr')
    line = line_about_limit(count, results.most_boxes or 0)
    return f'note: {line}; use {", or ".join(advice)}'


def check_no_videos(inputs: Iterable[Path]) -> None:
    """Raise a UserError if an input is a video."""
    for path in inputs:
        if is_video(path):
            raise UserError(f'--tile is for images, but {path} is a video; run it without')


def with_workers(options: InferOptions, inputs: Collection[Path]) -> InferOptions:
    """The options with a number of workers: by default one for each core, but no more than there
    are batches, and none for tiles."""
    if options.workers is not None:
        return options
    workers = usable_cores()
    if options.tile:
        workers = 0
    elif not any(map(is_video, inputs)):  # which have many frames
        workers = min(workers, math.ceil(len(inputs) / options.batch_size))
    return replace(options, workers=workers)
