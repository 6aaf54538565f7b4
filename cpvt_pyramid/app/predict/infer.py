"""`cpvt infer`: open a model, name the results of the inputs, and write them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

from ..images.inputs import is_video
from ..predictions.kinds import line_about_limit
from ..tooling.files import check_folder
from ..tooling.report import amount
from .automatic_tiles import tiling_for
from .cluster import predict_on_ray
from .opening import ModelFiles
from .options import ALIGN, InferOptions
from .protocol import Model
from .results import Results
from .run_record import claimed, record_of
from .running import Skipped, find_files, open_to_run, predict_files, with_workers
from .tiles import TILE


def run_infer(model: str, inputs: Sequence[str], options: InferOptions) -> int:
    """Run a model on images and videos; returns the exit status, see `cpvt infer`."""
    check_folder(options.out_dir)
    given = find_files(model, inputs, options, takes_videos=True)
    if options.ray:  # this process only looks at the model
        options = replace(options, workers=0)
        opened = open_to_run(given.model, replace(options, device='cpu'))
    else:
        options = with_workers(options, given.inputs)
        opened = open_to_run(given.model, options)
    results = Results(options, opened.kind, opened.classes)
    results.check([*given.inputs])
    tiling = tiling_for(opened, options.tile, options.overlap)
    if options.ray and tiling is not None and tiling.above:  # warnings of its workers are not shown
        print(f'{tiling.line()}; --tile 0 takes them as a whole')
    record = record_of(options, given.model, given.words, tiling)
    with claimed(options.out_dir, record, options.overwrite):
        named = results.name(given.inputs)
        todo = named
        if options.skip_existing:
            todo = [entry for entry in named if not results.exist(entry)]
            print(f'{len(named) - len(todo)} of {len(named)} are already done')
        skipped = Skipped('cpvt infer')
        start = time.monotonic()
        if not options.ray:
            predict_files(opened, todo, results, options, skipped)
        elif todo:
            predict_on_ray(given.model, todo, results, options, skipped)
        seconds = time.monotonic() - start
        done = [entry for entry in named if entry[0] not in skipped.paths]
        results.finish(done)
    print(f'{len(done)} of {len(named)} done: results in {results.folder}')
    count = len(todo) - len(skipped.paths)
    if count:
        print(f'found in images: {results.summary()}')
    if results.full:
        print(note_about_limit(results, given.model, opened, options.tile))
    if count and not options.tile and not options.ray:
        print(f'{count / seconds:.3g} images per second, reading and writing included')
    return int(bool(skipped.paths))


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
    line = line_about_limit(count, model.most_boxes or 0)
    return f'note: {line}; use {", or ".join(advice)}'
