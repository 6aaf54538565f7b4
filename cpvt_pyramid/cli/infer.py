"""Run a detector or a segmentor on images and videos.

    cpvt infer CONFIG CHECKPOINT INPUT...
    cpvt infer MODEL.onnx INPUT...            a model written by cpvt export

For each image NAME it writes a picture, NAME.overlay.jpg, and the predictions:

- detector: NAME.detections.json, boxes as x1, y1, x2, y2 in pixels and, if the model predicts
  instance masks, each as COCO run-length encoding
- semantic segmentor: NAME.labels.png, class indices as pixel values
- panoptic segmentor: NAME.segments.png, segment ids as pixel values, and NAME.segments.json

With --format, the predictions are also written for other tools:

- coco: coco.json, one data set of all images
- yolo: yolo/labels/NAME.txt and yolo/classes.txt
- labelme: labelme/NAME.json
- csv: predictions.csv, one table of all images
- geojson: NAME.geojson, in world coordinates if the image is georeferenced, else in pixels

For a video it writes NAME.overlay.mp4 and NAME.detections.jsonl or NAME.segments.jsonl, one line
per frame. NAME keeps the subfolders of a folder or a pattern, and gets a number where two inputs
would have the same; inputs.json tells which input has which.

With --tile, images of any size are processed in tiles at their own resolution; label maps are
GeoTIFFs, NAME.labels.tif, and detections are boxes without masks. The same command resumes a run
that was killed.

For several GPUs, processes or machines, see dist_infer.sh.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional

from ..tooling.command import UserError, one_line, run_command
from ..tooling.files import Format

if TYPE_CHECKING:
    from ..results.predictions import Kind
    from ..runner.inference.batched import ModelPredictor, Named, Skipped
    from ..runner.inference.exported import ExportedPredictor
    from ..runner.inference.large_images import TileModel, Tiling
    from ..runner.inference.sharing import Sharing, Task
    from ..runner.inference.workers import Cores


def infer(
    model: str,
    inputs: Sequence[str],
    *,
    out_dir: str = 'predictions',
    backend: Optional[Literal['onnxruntime', 'openvino']] = None,
    device: Optional[str] = None,
    dtype: Optional[Literal['float32', 'bfloat16']] = None,
    batch_size: int = 1,
    score_thr: Optional[float] = None,
    format: Optional[Format] = None,
    no_pictures: bool = False,
    processes: Optional[int] = None,
    workers: int = 2,
    tile: Optional[int] = None,
    overlap: Optional[int] = None,
    memory: Optional[str] = None,
    gpu_memory: Optional[str] = None,
    cfg_options: Sequence[str] = (),
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
) -> int:
    """Run a model on images and videos.

    Args:
        model: CONFIG CHECKPOINT, of which the second may be an address; or a .onnx file of
            cpvt export, or an OpenVINO model (.xml) made from one.
        inputs: images, videos, folders with their subfolders, quoted patterns such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir: folder for the results.
        backend: what runs an exported model; by default onnxruntime.
        device: torch device, for example cpu or cuda:1; by default a GPU if there is one.
        dtype: of the backbone, the neck and the heads of segmentors, by default float32; boxes are
            float32.
        batch_size: images or frames at a time, of which none is padded by another, so that
            results do not depend on it, but for rounding; tiles that are queued on a GPU.
        score_thr: leave out boxes with a lower score; by default that of an exported model,
            else 0.3.
        format: write the predictions in this format, too.
        no_pictures: write no NAME.overlay.jpg or .mp4, to be faster with a small model.
        processes: on a CPU, processes that each take an image at a time, with as many threads
            as leave each a share of the cores; by default as many as there are cores, images and
            memory for. Results do not depend on it, but for rounding by the number of threads.
        workers: threads that read images ahead of the model, and as many that write results.
        tile: split images into tiles of this size, for example 1024.
        overlap: overlap of neighbouring tiles; by default a quarter of a tile.
        memory: memory limit, for example 2GiB: with --tile of the process, else what
            --processes may take by default. With a GPU this is the host's memory, which includes
            CUDA's libraries.
        gpu_memory: limit with --tile of the GPU memory that PyTorch allocates. CUDA itself
            needs some hundred MiB more.
        cfg_options: override settings of the config, for example
            model.test_cfg.score_thr=0.1.
        launcher: what started the processes.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from ..results.formats import Output
    from ..runner.inference.large_images import parse_bytes
    from ..runner.inference.sharing import Sharing
    from ..runtime.predictor import EXPORTED, check_score_thr
    from ..tooling.inputs import find_inputs, is_video, name_results

    exported = Path(model).suffix in EXPORTED
    check_score_thr(score_thr)
    check_at_least('workers', workers, 0)
    check_at_least('processes', processes, 1)
    check_at_least('batch-size', batch_size, 1)
    memory_limit = parse_bytes(memory, '--memory')
    gpu_limit = parse_bytes(gpu_memory, '--gpu-memory')
    if tile is None and (overlap or gpu_memory):
        raise UserError('--overlap and --gpu-memory need --tile')
    tiles = tiling_of(tile, overlap, batch_size, memory_limit) if tile is not None else None
    if exported:
        refuse('exported models', device=device, dtype=dtype, processes=processes)
        refuse('exported models', gpu_memory=gpu_memory, cfg_options=cfg_options)
    else:
        refuse('checkpoints', backend=backend)
        checkpoint, *inputs = inputs
    if not inputs:
        raise UserError('give CONFIG CHECKPOINT INPUT... or MODEL.onnx INPUT...')
    if processes and (tiles or launcher != 'none'):
        raise UserError('--processes is not for --tile and --launcher; see dist_infer.sh')
    found = find_inputs(inputs, out_dir=out_dir)
    launched = Sharing.among(launcher)
    if exported:
        loaded = load_exported(model, backend or 'onnxruntime', batch_size, score_thr, tiles)
    else:
        loaded = load_trained(
            model,
            checkpoint,
            cfg_options=cfg_options,
            device=device or (launched.device if launched else None),
            dtype=dtype or 'float32',
            out_dir=out_dir,
            batch_size=batch_size,
            score_thr=score_thr,
            tiles=tiles,
        )
    with loaded.errors:
        check_score_thr(score_thr, loaded.kind)
        if no_pictures and loaded.kind == 'labels' and any(map(is_video, found)):
            raise UserError('of a video, a segmentor writes a picture only; drop --no-pictures')
        named, folder = name_results(found, out_dir)
        output = Output(folder, format, loaded.kind, loaded.model.meta['classes'])
        output.check(named, tiled=tiles is not None)

        def conclude(skipped: 'Skipped') -> None:
            for path, reason in skipped.items():
                print(f'cpvt infer: skipped {path}: {reason}', file=sys.stderr)
            done = [(path, name) for path, name in named if str(path) not in skipped]
            output.write(done)
            output.report(done, len(named))

        pictures = not no_pictures
        if tiles:
            tasks = tasks_for_tiles(loaded, tiles, named, folder, gpu_limit, launched, pictures)
        else:
            cores = None
            if not exported and not launched:
                cores = cores_for(loaded, processes, memory_limit)
            write = partial(write_whole, loaded, folder, workers, cores, pictures)
            about = [loaded.about, batch_size, loaded.score_thr, pictures]
            tasks = tasks_for_images(write, about, named, folder, batch_size, launched)
        return finish(tasks, folder, launched, conclude)


# Options


def check_at_least(name: str, value: Optional[int], least: int) -> None:
    if value is not None and value < least:
        raise UserError(f'--{name} must be at least {least}, got {value}')


def refuse(kind: str, **options: Any) -> None:
    """Raise a UserError if one of the options, which a kind of models does not have, is given."""
    for name, value in options.items():
        if value:
            raise UserError(f'--{name.replace("_", "-")} is not for {kind}; leave it out')


def tiling_of(
    tile: int, overlap: Optional[int], batch_size: int, memory: Optional[int]
) -> 'Tiling':
    """How images are split into tiles; for the arguments, see `infer`."""
    from ..runner.inference.large_images import Tiling
    from ..runner.inference.tiling import spans

    if overlap is None:
        overlap = tile // 4 // 32 * 32
    spans(1, tile, overlap)  # fails if they do not fit the strides
    return Tiling(tile, overlap, batch_size, memory)


# Models


class Loaded(NamedTuple):
    """A model that is ready to run."""

    model: 'ModelPredictor | ExportedPredictor | TileModel'  # the last with --tile
    kind: 'Kind'
    score_thr: float
    about: dict  # identifies the model
    errors: AbstractContextManager  # in it, what is wrong with a config becomes the user's error


def load_exported(
    path: str,
    backend: str,
    batch_size: int,
    score_thr: Optional[float],
    tiles: Optional['Tiling'],
) -> Loaded:
    """Open an exported model; for the arguments, see `infer`."""
    from ..runner.inference.exported import ExportedPredictor, exported_tiles
    from ..runtime.predictor import ExportedModel
    from ..tooling.inputs import local_path

    exported = ExportedModel(local_path(path), backend)
    if score_thr is None:
        score_thr = exported.about['score_thr']
    in_tiles = exported_tiles(exported, backend)
    model = in_tiles if tiles else ExportedPredictor(exported, batch_size, score_thr)
    return Loaded(model, exported.kind_of_results, score_thr, in_tiles.about, nullcontext())


def load_trained(
    config: str,
    checkpoint: str,
    cfg_options: Sequence[str],
    device: Optional[str],
    dtype: str,
    out_dir: str,
    batch_size: int,
    score_thr: Optional[float],
    tiles: Optional['Tiling'],
) -> Loaded:
    """Build a model of mm; for the arguments, see `infer`."""
    from ..mm.amp import replace_forward
    from ..ops import use_winograd
    from ..runner.config.check import check_settings
    from ..runner.config.explain import explained
    from ..runner.config.hints import warn_of_settings
    from ..runner.config.load import load_config
    from ..runner.config.parts import dataset_meta
    from ..runner.inference.batched import ModelPredictor
    from ..runner.inference.large_images import fingerprint, tile_model
    from ..runner.inference.prediction import kind_of_results
    from ..runner.inference.trained import SCORE_THR
    from ..runner.models import build_model, fetch_checkpoint, load_whole_model
    from ..tooling.files import make_folder

    if score_thr is None:
        score_thr = SCORE_THR
    cfg = load_config(config, cfg_options)
    check_settings(cfg, 'test_dataloader')
    warn_of_settings(cfg, 'test')
    weights = fetch_checkpoint(checkpoint)
    model = build_model(cfg, device)
    load_whole_model(model, weights, checkpoint)
    use_winograd(model)
    if dtype == 'bfloat16':
        replace_forward(model)
    folder = make_folder(out_dir)
    about = {**fingerprint(cfg, weights, next(model.parameters()).device), 'dtype': dtype}
    with explained(folder):
        meta = dataset_meta(cfg, weights)
        if tiles:
            ready = tile_model(model, cfg, about, meta)
        else:
            ready = ModelPredictor(model, cfg, meta, batch_size, score_thr)
        kind = kind_of_results(model, cfg)
    return Loaded(ready, kind, score_thr, about, explained(folder))


# Work


def cores_for(loaded: Loaded, processes: Optional[int], memory: Optional[int]) -> 'Cores':
    """The cores that processes divide; for the arguments, see `infer`."""
    from ..runner.inference.workers import Cores

    device = next(loaded.model.model.parameters()).device
    return Cores.for_model(device, processes, memory)


def tasks_for_tiles(
    loaded: Loaded,
    tiles: 'Tiling',
    named: Sequence['Named'],
    folder: Path,
    gpu_memory: Optional[int],
    launched: Optional['Sharing'],
    pictures: bool,
) -> list['Task']:
    """Tasks that write the results of images in tiles."""
    from ..runner.inference.large_images import LargeImage, limit_gpu_memory
    from ..runner.inference.sharing import tasks_of_tiles

    if gpu_memory:
        limit_gpu_memory(gpu_memory, loaded.model.device)
    processes = launched.processes if launched else 1
    tasks = []
    for path, name in named:
        image = LargeImage(
            path, name, loaded.model, tiles, folder, loaded.score_thr, pictures=pictures
        )
        tasks += tasks_of_tiles(image, processes)
    return tasks


def tasks_for_images(
    write: Callable[[Sequence['Named']], 'Skipped'],
    about: Any,
    named: Sequence['Named'],
    folder: Path,
    batch_size: int,
    launched: Optional['Sharing'],
) -> list['Task']:
    """Tasks that write the results of whole images and videos: one, or several to be shared."""
    from ..runner.inference.sharing import Task, tasks_of_images

    if launched:
        return tasks_of_images(write, named, folder, about, batch_size)
    return [Task('all', about, partial(write, named))]


def write_whole(
    loaded: Loaded,
    folder: Path,
    workers: int,
    cores: Optional['Cores'],
    pictures: bool,
    named: Sequence['Named'],
) -> 'Skipped':
    """Write the results of images and videos; returns those that cannot be read."""
    from ..runner.inference.batched import infer_images, infer_video
    from ..tooling.inputs import is_video
    from ..tooling.rasters import ReadError

    images = [(path, name) for path, name in named if not is_video(path)]
    videos = [(path, name) for path, name in named if is_video(path)]
    skipped: Skipped = {}
    if images:
        skipped = infer_images(loaded.model, images, folder, workers, cores, pictures)
    for path, name in videos:
        try:
            infer_video(loaded.model, path, name, folder, loaded.kind, cores, pictures)
        except ReadError as error:
            skipped[str(path)] = one_line(error)
    return skipped


def finish(
    tasks: Sequence['Task'],
    folder: Path,
    launched: Optional['Sharing'],
    conclude: Callable[['Skipped'], None],
) -> int:
    """Do the tasks, in this process or in several, and conclude once; returns the exit status."""
    import torch

    from ..runner.inference import sharing

    try:
        if launched:
            skipped = sharing.conclude_once(tasks, folder, conclude)
        else:
            # The results that the records of a shared run stand for are about to be overwritten.
            shutil.rmtree(folder / sharing.FOLDER, ignore_errors=True)
            skipped = sharing.in_order(tasks)
            conclude(skipped)
    except torch.cuda.OutOfMemoryError as error:
        advice = 'use a smaller --batch-size or --tile'
        raise UserError(f'too little GPU memory; {advice}') from error
    return min(len(skipped), 1)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(infer, argv, 'finished results are in {out_dir}')
