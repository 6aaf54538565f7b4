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
per frame.

With --tile, images of any size are processed in tiles at their own resolution; label maps are
GeoTIFFs, NAME.labels.tif, and detections are boxes without masks. The same command resumes a run
that was killed.

For several GPUs, processes or machines, see dist_infer.sh.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
try:
    from cpvt_pyramid.tooling.command import UserError, one_line, run_command
    from cpvt_pyramid.tooling.files import Format
except KeyboardInterrupt:  # before run_command can handle it
    sys.exit(130)

if TYPE_CHECKING:
    from cpvt_pyramid.runner.inference.batched import ModelPredictor
    from cpvt_pyramid.runner.inference.large_images import LargeImages
    from cpvt_pyramid.runner.inference.sharing import Share
    from cpvt_pyramid.tooling.formats import Output

Skip = Callable[[Path, Exception], None]  # called with an input that has no results, and why


def infer(
    config: str,
    checkpoint: str,
    inputs: Sequence[str],
    out_dir: str = 'predictions',
    device: Optional[str] = None,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
    batch_size: int = 1,
    score_thr: float = 0.3,
    format: Optional[Format] = None,
    workers: int = 2,
    tile: Optional[int] = None,
    overlap: Optional[int] = None,
    memory: Optional[str] = None,
    gpu_memory: Optional[str] = None,
    inexact: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
) -> int:
    """Run a model on images and videos.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py.
        checkpoint: weights of the model, a path or an address.
        inputs (INPUT): an image, a video, a folder of them, a quoted pattern such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir (DIR): folder for the results.
        device: torch device, for example cpu or cuda:1; by default a GPU if there is one.
        dtype: of the backbone, the neck and the heads of segmentors; boxes are float32.
        batch_size (N): images, frames or tiles at a time.
        score_thr (SCORE): leave out boxes with a lower score.
        format: write the predictions in this format, too.
        workers (N): threads that read images ahead of the model.
        tile (PIXELS): split images into tiles of this size, for example 1024.
        overlap (PIXELS): overlap of neighbouring tiles; by default a quarter of a tile.
        memory (SIZE): memory limit of the process with --tile, for example 2GiB. With a GPU this is
            the host's memory, which includes CUDA's libraries.
        gpu_memory (SIZE): limit with --tile of the GPU memory that PyTorch allocates. CUDA itself
            needs some hundred MiB more.
        inexact: let the tiles of a batch pass the model together. Faster on a GPU, but rounding
            then depends on the batch size; without it, results are bit-identical for all.
        cfg_options (KEY=VALUE): override settings of the config, for example
            model.test_cfg.score_thr=0.1.
        launcher: what started the processes.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from cpvt_pyramid.mm.amp import replace_forward
    from cpvt_pyramid.runner.checks import check_settings
    from cpvt_pyramid.runner.configs import load_config
    from cpvt_pyramid.runner.ignored import check_ignored
    from cpvt_pyramid.runner.inference import large_images
    from cpvt_pyramid.runner.inference.batched import ModelPredictor
    from cpvt_pyramid.runner.inference.prediction import dataset_meta, kind_of_results
    from cpvt_pyramid.runner.inference.sharing import Sharing
    from cpvt_pyramid.runner.mistakes import config_mistakes
    from cpvt_pyramid.runner.models import build_model, fetch_checkpoint, load_whole_model
    from cpvt_pyramid.tooling.formats import Output

    check_numbers(score_thr, workers)
    tiling = large_images.tile_options(batch_size, tile, overlap, memory, gpu_memory, inexact)
    cfg = load_config(config, cfg_options)
    check_settings(cfg, 'test_dataloader')
    check_ignored(cfg, 'test')
    named, folder = names_of_results(inputs, out_dir)
    weights = fetch_checkpoint(checkpoint)
    sharing = Sharing.among(launcher)
    model = build_model(cfg, device or sharing and sharing.device)
    load_whole_model(model, weights, checkpoint)
    if dtype == 'bfloat16':
        replace_forward(model)
    cfg.work_dir = str(folder)  # for the traceback of a mistake in the config
    with config_mistakes(cfg, ('test',)):
        meta = dataset_meta(cfg, weights)
        output = Output(folder, format, kind_of_results(model, cfg), meta['classes'])
        output.check(named, tiled=tiling is not None)
        if tiling:
            tiles = large_images.tile_model(model, cfg, weights, meta)
            tiles.about['dtype'] = dtype
            large = large_images.LargeImages(tiles, tiling, folder, score_thr)
            share = sharing and sharing.of_tiles(large)
            return write_all(partial(write_tiles, large), named, output, share)
        predictor = ModelPredictor(model, cfg, meta, batch_size, score_thr)
        about = large_images.fingerprint(cfg, weights, next(model.parameters()).device)
        about = [about, dtype, batch_size, score_thr]
        share = sharing and sharing.of_images(folder, about, batch_size)
        return write_all(partial(write_whole, predictor, folder, workers), named, output, share)


def infer_exported(
    model: str,
    inputs: Sequence[str],
    out_dir: str = 'predictions',
    backend: Literal['onnxruntime', 'openvino'] = 'onnxruntime',
    batch_size: int = 1,
    score_thr: float = 0.3,
    format: Optional[Format] = None,
    workers: int = 2,
    tile: Optional[int] = None,
    overlap: Optional[int] = None,
    memory: Optional[str] = None,
    inexact: bool = False,
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
) -> int:
    """Run an exported model on images and videos.

    Args:
        model (MODEL): a .onnx file of tools/export.py, or an OpenVINO model (.xml) made from one.
        inputs (INPUT): an image, a video, a folder of them, a quoted pattern such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir (DIR): folder for the results.
        backend: what runs the model.
        batch_size (N): images, frames or tiles at a time.
        score_thr (SCORE): leave out boxes with a lower score.
        format: write the predictions in this format, too.
        workers (N): threads that read images ahead of the model.
        tile (PIXELS): split images into tiles of this size, for example 1024.
        overlap (PIXELS): overlap of neighbouring tiles; by default a quarter of a tile.
        memory (SIZE): memory limit of the process with --tile, for example 2GiB.
        inexact: let the tiles of a batch pass the model together; rounding then depends on the
            batch size.
        launcher: what started the processes.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from cpvt_pyramid.runner.inference.large_images import LargeImages, tile_options
    from cpvt_pyramid.runner.inference.sharing import Sharing
    from cpvt_pyramid.runtime.in_mm import ExportedPredictor, exported_tiles
    from cpvt_pyramid.runtime.predictor import ExportedModel
    from cpvt_pyramid.tooling.formats import Output

    check_numbers(score_thr, workers)
    tiling = tile_options(batch_size, tile, overlap, memory, None, inexact)
    exported = ExportedModel(Path(model), backend)
    named, folder = names_of_results(inputs, out_dir)
    output = Output(folder, format, exported.kind_of_results, exported.classes)
    output.check(named, tiled=tiling is not None)
    sharing = Sharing.among(launcher)
    tiles = exported_tiles(exported, backend)
    if tiling:
        large = LargeImages(tiles, tiling, folder, score_thr)
        share = sharing and sharing.of_tiles(large)
        return write_all(partial(write_tiles, large), named, output, share)
    predictor = ExportedPredictor(exported, batch_size, score_thr)
    share = sharing and sharing.of_images(folder, [tiles.about, batch_size, score_thr], batch_size)
    return write_all(partial(write_whole, predictor, folder, workers), named, output, share)


def check_numbers(score_thr: float, workers: int) -> None:
    if not 0 <= score_thr <= 1:  # refuses nan too
        raise UserError(f'--score-thr must be in [0, 1], got {score_thr}')
    if workers < 0:
        raise UserError(f'--workers must be at least 0, got {workers}')


def names_of_results(inputs: Sequence[str], out_dir: str) -> tuple[list[tuple[Path, str]], Path]:
    """The input files, each with a name for its results, and the folder for these."""
    from cpvt_pyramid.tooling.files import make_folder
    from cpvt_pyramid.tooling.inputs import find_inputs, result_names

    paths = find_inputs(inputs)
    folder = make_folder(out_dir)
    return list(zip(paths, result_names(paths, folder))), folder


def write_tiles(large: 'LargeImages', named: Sequence[tuple[Path, str]], skip: Skip) -> None:
    """Write the results of images in tiles; call `skip` for those that cannot be read."""
    from cpvt_pyramid.runner.inference.batched import gpu_memory_errors
    from cpvt_pyramid.runner.inference.raster import ReadError

    for path, name in named:
        try:
            with gpu_memory_errors('reduce --tile or --batch-size'):
                if not large.write(path, name):
                    print(f'{path}: already done')
        except ReadError as error:
            skip(path, error)


def write_whole(
    predictor: 'ModelPredictor',
    folder: Path,
    workers: int,
    named: Sequence[tuple[Path, str]],
    skip: Skip,
) -> None:
    """Write the results of images and videos; call `skip` for those that cannot be read."""
    from cpvt_pyramid.runner.inference.batched import infer_images, infer_video
    from cpvt_pyramid.runner.inference.raster import ReadError
    from cpvt_pyramid.tooling.inputs import is_video

    images = [(path, name) for path, name in named if not is_video(path)]
    if images:
        infer_images(predictor, images, folder, skip, workers)
    for path, name in named:
        if is_video(path):
            try:
                infer_video(predictor, path, name, folder)
            except ReadError as error:
                skip(path, error)


def write_all(
    write: Callable[[Sequence[tuple[Path, str]], Skip], None],
    named: Sequence[tuple[Path, str]],
    output: 'Output',
    share: Optional['Share'] = None,
) -> int:
    """Call `write` with the inputs, then write the format that was asked for, and say which inputs
    were skipped; returns the exit status. `share` divides this among processes."""
    from tqdm import tqdm

    from cpvt_pyramid.runner.inference.sharing import forget

    skipped = []

    def skip(path: Path, error: Exception) -> None:
        tqdm.write(f'infer: skipped {path}: {one_line(error)}', file=sys.stderr)
        skipped.append(path)

    def conclude(skipped: Sequence[Path]) -> None:
        output.write([(path, name) for path, name in named if path not in skipped])
        print(f'{len(named) - len(skipped)} of {len(named)} done: results in {output.folder}')

    if share:
        skipped = share(write, named, conclude)
    else:
        forget(output.folder)
        write(named, skip)
        conclude(skipped)
    return min(len(skipped), 1)


def main(argv: Optional[Sequence[str]] = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    exported = any(Path(argument).suffix in ('.onnx', '.xml') for argument in argv)
    command = infer_exported if exported else infer
    return run_command(command, argv, 'finished results are in {out_dir}')


if __name__ == '__main__':
    sys.exit(main())
