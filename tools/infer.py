#!/usr/bin/env python
"""Run a detector or a segmentor on images and videos.

    python tools/infer.py CONFIG CHECKPOINT INPUT...
    python tools/infer.py MODEL.onnx INPUT...            a model written by tools/export.py

For each image NAME it writes a picture, NAME.overlay.png, and the predictions:
  detector              NAME.detections.json, boxes as x1, y1, x2, y2 in pixels and, if the model
                        predicts instance masks, each as COCO run-length encoding
  semantic segmentor    NAME.labels.png, class indices as pixel values
  panoptic segmentor    NAME.segments.png, segment ids as pixel values, and NAME.segments.json
With --format, the predictions are also written for other tools:
  coco      coco.json, one data set of all images
  yolo      yolo/labels/NAME.txt and yolo/classes.txt
  labelme   labelme/NAME.json
  csv       predictions.csv, one table of all images
  geojson   NAME.geojson, in world coordinates if the image is georeferenced, else in pixels
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
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
try:
    from cpvt_pyramid.tooling.command import UserError, one_line, run_command
    from cpvt_pyramid.tooling.files import Format
except KeyboardInterrupt:  # before run_command can handle it
    sys.exit(130)

if TYPE_CHECKING:
    from cpvt_pyramid.results.predictions import Kind
    from cpvt_pyramid.runner.inference.batched import ModelPredictor, Named, Skipped
    from cpvt_pyramid.runner.inference.exported import ExportedPredictor
    from cpvt_pyramid.runner.inference.large_images import TileModel
    from cpvt_pyramid.runner.inference.workers import Cores


def infer(
    model: str,
    inputs: Sequence[str],
    out_dir: str = 'predictions',
    backend: Optional[Literal['onnxruntime', 'openvino']] = None,
    device: Optional[str] = None,
    dtype: Optional[Literal['float32', 'bfloat16']] = None,
    batch_size: int = 1,
    score_thr: Optional[float] = None,
    format: Optional[Format] = None,
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
        model (MODEL): CONFIG CHECKPOINT, of which the second may be an address; or a .onnx file of
            tools/export.py, or an OpenVINO model (.xml) made from one.
        inputs (INPUT): images, videos, folders with their subfolders, quoted patterns such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir (DIR): folder for the results.
        backend: what runs an exported model; by default onnxruntime.
        device: torch device, for example cpu or cuda:1; by default a GPU if there is one.
        dtype: of the backbone, the neck and the heads of segmentors, by default float32; boxes are
            float32.
        batch_size (N): images or frames at a time; tiles that are queued on a GPU.
        score_thr (SCORE): leave out boxes with a lower score; by default that of an exported model,
            else 0.3.
        format: write the predictions in this format, too.
        processes (N): on a CPU, processes that each take an image at a time, with as many threads
            as leave each a share of the cores; by default as many as there are cores, images and
            memory for. Results do not depend on it, but for rounding by the number of threads.
        workers (N): threads that read images ahead of the model, and as many that write results.
        tile (PIXELS): split images into tiles of this size, for example 1024.
        overlap (PIXELS): overlap of neighbouring tiles; by default a quarter of a tile.
        memory (SIZE): memory limit, for example 2GiB: with --tile of the process, else what
            --processes may take by default. With a GPU this is the host's memory, which includes
            CUDA's libraries.
        gpu_memory (SIZE): limit with --tile of the GPU memory that PyTorch allocates. CUDA itself
            needs some hundred MiB more.
        cfg_options (KEY=VALUE): override settings of the config, for example
            model.test_cfg.score_thr=0.1.
        launcher: what started the processes.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    import torch

    from cpvt_pyramid.results.formats import Output
    from cpvt_pyramid.runner.inference import large_images, sharing
    from cpvt_pyramid.runner.inference.tiling import spans
    from cpvt_pyramid.runner.inference.workers import Cores
    from cpvt_pyramid.runtime.predictor import EXPORTED, check_score_thr
    from cpvt_pyramid.tooling.inputs import find_inputs, name_results

    check_score_thr(score_thr)
    counts = ('workers', workers, 0), ('processes', processes, 1), ('batch-size', batch_size, 1)
    for name, value, least in counts:
        if value is not None and value < least:
            raise UserError(f'--{name} must be at least {least}, got {value}')
    limit = large_images.parse_bytes(memory, '--memory')
    gpu_limit = large_images.parse_bytes(gpu_memory, '--gpu-memory')
    if tile is None and (overlap or gpu_memory):
        raise UserError('--overlap and --gpu-memory need --tile')
    if tile is not None:
        overlap = tile // 4 // 32 * 32 if overlap is None else overlap
        spans(1, tile, overlap)  # fails if they do not fit the strides
    exported = Path(model).suffix in EXPORTED
    checkpoint, inputs = ('', inputs) if exported else (inputs[0], inputs[1:])
    if not inputs:
        raise UserError('give CONFIG CHECKPOINT INPUT... or MODEL.onnx INPUT...')
    if processes and (tile or launcher != 'none'):
        raise UserError('--processes is not for --tile and --launcher; see dist_infer.sh')
    others = {'device': device, 'dtype': dtype, 'gpu-memory': gpu_memory, 'processes': processes}
    others |= {'cfg-options': cfg_options}
    for name, value in (others if exported else {'backend': backend}).items():
        if value:
            kind = 'exported models' if exported else 'checkpoints'
            raise UserError(f'--{name} is not for {kind}; leave it out')
    found = find_inputs(inputs, out_dir=out_dir)
    launched = sharing.Sharing.among(launcher)
    with ExitStack() as stack:
        if exported:
            loaded = load_exported(model, backend or 'onnxruntime', batch_size, score_thr, tile)
        else:
            device, dtype = device or (launched and launched.device), dtype or 'float32'
            files = model, checkpoint, cfg_options, device, dtype, out_dir
            loaded = load_trained(stack, *files, batch_size, score_thr, tile)
        check_score_thr(score_thr, loaded.kind)
        named, folder = name_results(found, out_dir)
        output = Output(folder, format, loaded.kind, loaded.model.meta['classes'])
        output.check(named, tiled=bool(tile))

        def conclude(skipped: 'Skipped') -> None:
            for path, reason in skipped.items():
                print(f'infer: skipped {path}: {reason}', file=sys.stderr)
            done = [(path, name) for path, name in named if str(path) not in skipped]
            output.write(done)
            output.report(done, len(named))

        if tile:
            if gpu_limit:
                large_images.limit_gpu_memory(gpu_limit, loaded.model.device)
            tiles = large_images.Tiling(tile, overlap, batch_size, limit)
            settings = loaded.model, tiles, folder, loaded.score_thr
            count, tasks = launched.processes if launched else 1, []
            for path, name in named:
                image = large_images.LargeImage(path, name, *settings)
                tasks += sharing.tasks_of_tiles(image, count)
        else:
            cores = None
            if not exported and not launched:
                device = next(loaded.model.model.parameters()).device
                cores = Cores.for_model(device, processes, limit)
            write = partial(write_whole, loaded, folder, workers, cores)
            about = [loaded.about, batch_size, loaded.score_thr]
            tasks = [sharing.Task('all', about, partial(write, named))]
            if launched:
                tasks = sharing.tasks_of_images(write, named, folder, about, batch_size)
        try:
            if launched:
                return min(len(sharing.conclude_once(tasks, folder, conclude)), 1)
            # The results that the records of a shared run stand for are about to be overwritten.
            shutil.rmtree(folder / sharing.FOLDER, ignore_errors=True)
            skipped = sharing.in_order(tasks)
        except torch.cuda.OutOfMemoryError as error:
            advice = 'use a smaller --batch-size or --tile'
            raise UserError(f'too little GPU memory; {advice}') from error
        conclude(skipped)
        return min(len(skipped), 1)


class Loaded(NamedTuple):
    """A model that is ready to run."""

    model: 'ModelPredictor | ExportedPredictor | TileModel'  # the last with --tile
    kind: 'Kind'
    score_thr: float
    about: dict  # identifies the model


def load_exported(
    path: str, backend: str, batch_size: int, score_thr: Optional[float], tile: Optional[int]
) -> Loaded:
    """Open an exported model; for the arguments, see `infer`."""
    from cpvt_pyramid.runner.inference.exported import ExportedPredictor, exported_tiles
    from cpvt_pyramid.runtime.predictor import ExportedModel
    from cpvt_pyramid.tooling.inputs import local_path

    exported = ExportedModel(local_path(path), backend)
    score_thr = exported.about['score_thr'] if score_thr is None else score_thr
    tiles = exported_tiles(exported, backend)
    model = tiles if tile else ExportedPredictor(exported, batch_size, score_thr)
    return Loaded(model, exported.kind_of_results, score_thr, tiles.about)


def load_trained(
    stack: ExitStack,
    config: str,
    checkpoint: str,
    cfg_options: Sequence[str],
    device: Optional[str],
    dtype: str,
    out_dir: str,
    batch_size: int,
    score_thr: Optional[float],
    tile: Optional[int],
) -> Loaded:
    """Build a model of mm; for the arguments, see `infer`. In the `stack`, what is wrong with its
    config becomes the user's error."""
    from cpvt_pyramid.mm.amp import replace_forward
    from cpvt_pyramid.ops.winograd import use_winograd
    from cpvt_pyramid.runner.config.check import check_settings
    from cpvt_pyramid.runner.config.explain import explained
    from cpvt_pyramid.runner.config.load import load_config
    from cpvt_pyramid.runner.config.unread import check_unread
    from cpvt_pyramid.runner.inference.batched import ModelPredictor
    from cpvt_pyramid.runner.inference.large_images import fingerprint, tile_model
    from cpvt_pyramid.runner.inference.prediction import dataset_meta, kind_of_results
    from cpvt_pyramid.runner.inference.trained import SCORE_THR
    from cpvt_pyramid.runner.models import build_model, fetch_checkpoint, load_whole_model
    from cpvt_pyramid.tooling.files import make_folder

    cfg = load_config(config, cfg_options)
    check_settings(cfg, 'test_dataloader')
    check_unread(cfg, 'test')
    weights = fetch_checkpoint(checkpoint)
    model = build_model(cfg, device)
    load_whole_model(model, weights, checkpoint)
    use_winograd(model)
    if dtype == 'bfloat16':
        replace_forward(model)
    cfg.work_dir = str(make_folder(out_dir))  # for the traceback of a mistake in the config
    stack.enter_context(explained(cfg, ('test',)))
    meta, kind = dataset_meta(cfg, weights), kind_of_results(model, cfg)
    score_thr = SCORE_THR if score_thr is None else score_thr
    about = {**fingerprint(cfg, weights, next(model.parameters()).device), 'dtype': dtype}
    if tile:
        ready = tile_model(model, cfg, about, meta)
    else:
        ready = ModelPredictor(model, cfg, meta, batch_size, score_thr)
    return Loaded(ready, kind, score_thr, about)


def write_whole(
    loaded: Loaded,
    folder: Path,
    workers: int,
    cores: Optional['Cores'],
    named: Sequence['Named'],
) -> 'Skipped':
    """Write the results of images and videos; returns those that cannot be read."""
    from cpvt_pyramid.runner.inference.batched import infer_images, infer_video
    from cpvt_pyramid.runner.inference.raster import ReadError
    from cpvt_pyramid.tooling.inputs import is_video

    images = [(path, name) for path, name in named if not is_video(path)]
    skipped = infer_images(loaded.model, images, folder, workers, cores) if images else {}
    for path, name in named:
        if is_video(path):
            try:
                infer_video(loaded.model, path, name, folder, loaded.kind, cores)
            except ReadError as error:
                skipped[str(path)] = one_line(error)
    return skipped


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(infer, argv, 'finished results are in {out_dir}')


if __name__ == '__main__':
    sys.exit(main())
