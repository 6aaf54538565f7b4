"""`cpvt infer`: open a model, name the results of the inputs, and write them."""

import math
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Optional

from tqdm import tqdm

from ..images.inputs import find_inputs, is_video, name_results
from ..tooling.command import UserError, check_at_least
from ..tooling.files import Format
from ..tooling.threads import usable_cores
from .cluster import write_on_ray
from .opening import open_model, resolve_model
from .results import Results
from .running import RunOptions, write_results
from .tiles import spans


def run_infer(
    model: str,
    inputs: Sequence[str],
    *,
    out_dir: str,
    device: Optional[str] = None,
    backend: Optional[str] = None,
    dtype: str = 'float32',
    batch_size: int = 1,
    score_thr: Optional[float] = None,
    size: Optional[int] = None,
    format: Optional[Format] = None,
    no_pictures: bool = False,
    skip_existing: bool = False,
    workers: Optional[int] = None,
    tile: Optional[int] = None,
    overlap: Optional[int] = None,
    ray: Optional[str] = None,
    ray_workers: Optional[int] = None,
    cfg_options: Sequence[str] = (),
) -> int:
    """Run a model on images and videos; see `cpvt infer` for the arguments and the exit status."""
    check_at_least('--workers', workers, 0)
    check_at_least('--batch-size', batch_size, 1)
    check_at_least('--size', size, 1)
    check_at_least('--ray-workers', ray_workers, 1)
    files, words = resolve_model(model, inputs)
    if not words:
        raise UserError('no inputs; they come after the model')
    found = find_inputs(words, out_dir=out_dir)
    if tile is not None:
        if overlap is None:
            overlap = tile // 4 // 32 * 32
        check_tiles(found, tile, overlap, size, workers)
    elif overlap is not None:
        raise UserError('--overlap needs --tile')
    if ray is None and ray_workers is not None:
        raise UserError('--ray-workers needs --ray')
    if ray is not None and workers is not None:
        raise UserError(
            '--workers has no effect with --ray, whose workers have one core each; leave it out'
        )

    model_options: dict[str, Any] = {
        'files': files,
        'device': device,
        'score_thr': score_thr,
        'size': size,
        'backend': backend,
        'dtype': dtype,
        'cfg_options': cfg_options,
    }
    if ray:
        workers = 0  # a worker of Ray has one core
        ready = open_model(**{**model_options, 'device': 'cpu'})  # this process only looks at it
    else:
        if workers is None:
            workers = default_workers(found, batch_size)
        ready = open_model(**model_options, threads=1 if tile else max(workers, 1))
    named, folder = name_results(found, out_dir)
    results_options: dict[str, Any] = {
        'folder': folder,
        'kind': ready.kind,
        'classes': ready.classes,
        'pictures': not no_pictures,
        'format': format,
        'is_tiled': tile is not None,
    }
    results = Results(**results_options)
    results.check(named)
    todo = list(named)
    if skip_existing:
        todo = [entry for entry in named if not results.exist(entry)]
        print(f'{len(named) - len(todo)} of {len(named)} are already done')
    skipped: set[Path] = set()

    def skip(path: Path, reason: str) -> None:
        skipped.add(path)
        tqdm.write(f'cpvt infer: skipped {path}: {reason}', file=sys.stderr)

    options = RunOptions(batch_size, workers, tile, overlap or 0)
    start = time.monotonic()
    if ray and todo:
        write_on_ray(
            todo,
            results,
            skip,
            model_options=model_options,
            results_options=results_options,
            options=options,
            address=ray,
            workers=ray_workers,
        )
    else:
        write_results(ready, todo, results, options, skip)
    seconds = time.monotonic() - start
    done = [entry for entry in named if entry[0] not in skipped]
    results.finish(done)
    print(f'{len(done)} of {len(named)} done: results in {folder}')
    if todo:
        print(f'found in images: {results.summary()}')
    count = len(todo) - len(skipped)
    if count and not tile and not ray:
        print(f'{count / seconds:.3g} images per second, reading and writing included')
    return int(bool(skipped))


def check_tiles(
    inputs: Iterable[Path], tile: int, overlap: int, size: Optional[int], workers: Optional[int]
) -> None:
    """Raise a UserError unless tiles fit, and --tile and the options beside it have an effect."""
    spans(1, tile, overlap)  # raises one
    for path in inputs:
        if is_video(path):
            raise UserError(f'--tile is for images, but {path} is a video; run it without')
    if size is not None:
        raise UserError('--size has no effect with --tile, which does not resize images; drop one')
    if workers is not None:
        raise UserError('--workers has no effect with --tile, on which one thread works; drop it')


def default_workers(inputs: Collection[Path], batch_size: int) -> int:
    """One worker for each core, but no more than there are batches."""
    if any(is_video(path) for path in inputs):  # of many frames
        return usable_cores()
    return min(usable_cores(), math.ceil(len(inputs) / batch_size))
