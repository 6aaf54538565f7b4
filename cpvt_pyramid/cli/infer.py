"""Run a detector or a segmentor on images and videos.

    cpvt infer CONFIG CHECKPOINT INPUT...
    cpvt infer MODEL.onnx INPUT...            a model written by cpvt export; see
                                              cpvt infer MODEL.onnx --help

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

With --tile, images of any size are processed in tiles at their own resolution; segmentation masks
are GeoTIFFs, NAME.labels.tif, and detections are boxes without masks. The same command resumes a
run that was killed; one without --tile does so with --skip-existing.

One process runs the model. Of many images, all cores of a machine without a GPU do more per second
with --ray, a process for each core, or with the exported model and `cpvt run`. Several GPUs and
machines need --ray, too.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional, Union

from ..tooling.command import UserError, check_at_least, one_line, run_command
from ..tooling.files import Format

if TYPE_CHECKING:
    from ..predict.openmmlab.batch_predictor import BatchPredictor
    from ..predict.openmmlab.large_images import LargeImage, Tiling
    from ..predict.openmmlab.writing import Skipped
    from ..tooling.inputs import Named

EXPORTED = ('.onnx', '.xml')  # .xml: OpenVINO's own format
MANY = 100  # images, for which other commands are worth their start
WHEN_STOPPED = 'finished results are in {out_dir}; --skip-existing keeps them'


def infer(
    config: str,
    checkpoint: str,
    inputs: Sequence[str],
    *,
    out_dir: str = 'predictions',
    device: Optional[str] = None,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
    batch_size: int = 1,
    score_thr: Optional[float] = None,
    format: Optional[Format] = None,
    no_pictures: bool = False,
    skip_existing: bool = False,
    workers: int = 2,
    tile: Optional[int] = None,
    overlap: Optional[int] = None,
    memory: Optional[str] = None,
    gpu_memory: Optional[str] = None,
    ray: Union[bool, str] = False,
    ray_workers: Optional[int] = None,
    cfg_options: Sequence[str] = (),
) -> int:
    """Run a model of OpenMMLab on images and videos.

    Args:
        config: config file of the model.
        checkpoint: its weights, a path or an address.
        inputs: images, videos, folders with their subfolders, quoted patterns such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir: folder for the results.
        device: torch device, for example cpu or cuda:1; by default a GPU if there is one.
        dtype: of the backbone, the neck and the heads of segmentors; boxes are float32.
        batch_size: images or frames at a time, of which none is padded by another, so that
            results do not depend on it, but for rounding; tiles that are queued on a GPU.
        score_thr: leave out boxes with a lower score; by default 0.3.
        format: write the predictions in this format, too.
        no_pictures: write no NAME.overlay.jpg or .mp4, to be faster with a small model.
        skip_existing: leave out images and videos that have results of an earlier run.
        workers: threads that read images ahead of the model, and as many that write results.
        tile: split images into tiles of this size, for example 1024.
        overlap: overlap of neighbouring tiles; by default a quarter of a tile.
        memory: with --tile, memory limit of a process, for example 2GiB. With a GPU this is the
            host's memory, which includes CUDA's libraries.
        gpu_memory: limit with --tile of the GPU memory that PyTorch allocates. CUDA itself
            needs some hundred MiB more.
        ray: give images, or rows of tiles, to the workers of a Ray cluster: without a value, one
            that is started on this machine; auto, one that this machine is part of; HOST:PORT.
            It comes after the inputs.
        ray_workers: most workers of --ray; by default as many as there are GPUs or, without GPUs,
            cores and memory for.
        cfg_options: override settings of the config, for example
            model.test_cfg.score_thr=0.1.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from ..predict.openmmlab.batch_predictor import BatchPredictor
    from ..predict.openmmlab.large_images import limited_gpu_memory, parse_bytes
    from ..predict.predictor import check_score_thr
    from ..tooling.inputs import find_inputs

    check_score_thr(score_thr)
    check_options(workers=workers, batch_size=batch_size, ray_workers=ray_workers)
    gpu_limit = parse_bytes(gpu_memory, '--gpu-memory')
    if gpu_limit and not tile:
        raise UserError('--gpu-memory needs --tile')
    if gpu_limit and ray:
        raise UserError('--gpu-memory is not for --ray')
    tiling = tiling_of_options(tile, overlap, memory, batch_size)
    found = find_inputs(inputs, out_dir=out_dir)
    predictor = BatchPredictor(
        config,
        checkpoint,
        batch_size=batch_size,
        score_thr=score_thr,
        device='cpu' if ray else device,  # with Ray, this process only looks at the model
        dtype=dtype,
        cfg_options=cfg_options,
    )
    predictor.arguments['device'] = device
    with limited_gpu_memory(gpu_limit, predictor.model.device):
        return write_all(
            predictor,
            found,
            out_dir=out_dir,
            format=format,
            pictures=not no_pictures,
            skip_existing=skip_existing,
            threads=workers,
            tiling=tiling,
            ray=ray,
            ray_workers=ray_workers,
        )


def infer_exported(
    model: str,
    inputs: Sequence[str],
    *,
    out_dir: str = 'predictions',
    backend: Literal['onnxruntime', 'openvino'] = 'onnxruntime',
    batch_size: int = 1,
    score_thr: Optional[float] = None,
    format: Optional[Format] = None,
    no_pictures: bool = False,
    skip_existing: bool = False,
    workers: int = 2,
    tile: Optional[int] = None,
    overlap: Optional[int] = None,
    memory: Optional[str] = None,
    ray: Union[bool, str] = False,
    ray_workers: Optional[int] = None,
) -> int:
    """Run an exported model on images and videos. Of images, `cpvt run` keeps all cores busy, and
    needs neither torch nor OpenMMLab.

    Args:
        model: a .onnx file of cpvt export, or an OpenVINO model (.xml) made from one.
        inputs: images, videos, folders with their subfolders, quoted patterns such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir: folder for the results.
        backend: what runs the model.
        batch_size: images or frames that pass the model together, if their padded sizes are equal.
        score_thr: leave out boxes with a lower score; by default the model's threshold.
        format: write the predictions in this format, too.
        no_pictures: write no NAME.overlay.jpg or .mp4, to be faster with a small model.
        skip_existing: leave out images and videos that have results of an earlier run.
        workers: threads that read images ahead of the model, and as many that write results.
        tile: split images into tiles of this size, for example 1024.
        overlap: overlap of neighbouring tiles; by default a quarter of a tile.
        memory: with --tile, memory limit of a process, for example 2GiB.
        ray: as for a model of OpenMMLab: without a value, auto, or HOST:PORT, after the inputs.
        ray_workers: most workers of --ray; by default as many as there are cores and memory for.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from ..predict.openmmlab.batch_predictor import BatchPredictor
    from ..predict.predictor import check_score_thr
    from ..tooling.inputs import find_inputs

    check_score_thr(score_thr)
    check_options(workers=workers, batch_size=batch_size, ray_workers=ray_workers)
    tiling = tiling_of_options(tile, overlap, memory, batch_size)
    found = find_inputs(inputs, out_dir=out_dir)
    predictor = BatchPredictor(model, backend=backend, batch_size=batch_size, score_thr=score_thr)
    predictor.arguments['device'] = 'cpu'
    return write_all(
        predictor,
        found,
        out_dir=out_dir,
        format=format,
        pictures=not no_pictures,
        skip_existing=skip_existing,
        threads=workers,
        tiling=tiling,
        ray=ray,
        ray_workers=ray_workers,
    )


# Options


def check_options(workers: int, batch_size: int, ray_workers: Optional[int]) -> None:
    check_at_least('--workers', workers, 0)
    check_at_least('--batch-size', batch_size, 1)
    check_at_least('--ray-workers', ray_workers, 1)


def tiling_of_options(
    tile: Optional[int], overlap: Optional[int], memory: Optional[str], batch_size: int
) -> Optional['Tiling']:
    """How images are split into tiles; None without --tile."""
    from ..predict.openmmlab.large_images import parse_bytes, tiling_of

    limit = parse_bytes(memory, '--memory')
    if tile is not None:
        return tiling_of(tile, overlap, batch_size, limit)
    if overlap is not None or memory is not None:
        raise UserError('--overlap and --memory need --tile')
    return None


# Work


def write_all(
    predictor: 'BatchPredictor',
    found: Mapping[Path, str],
    *,
    out_dir: str,
    format: Optional[Format],
    pictures: bool,
    skip_existing: bool,
    threads: int,
    tiling: Optional['Tiling'],
    ray: Union[bool, str],
    ray_workers: Optional[int],
) -> int:
    """Write the results of inputs, see `find_inputs`, and report them; returns the exit status. For
    the other arguments, see `infer`."""
    from ..predict.formats import Output
    from ..predict.openmmlab.large_images import LargeImage
    from ..predict.openmmlab.writing import has_results, write_results
    from ..predict.predictor import check_score_thr
    from ..tooling.inputs import is_video, name_results

    model = predictor.model
    check_score_thr(predictor.arguments['score_thr'], model.kind)
    if not pictures and model.kind == 'labels' and any(map(is_video, found)):
        raise UserError('of a video, a segmentor writes a picture only; drop --no-pictures')
    named, folder = name_results(found, out_dir)
    output = Output(folder, format, model.kind, model.meta['classes'])
    output.check(named, tiled=tiling is not None)
    start = time.monotonic()
    todo = list(named)
    images: list[LargeImage] = []
    if tiling:
        tiles = model.in_tiles()
        for path, name in named:
            image = LargeImage(path, name, tiles, tiling, folder, pictures)
            if image.is_done():
                print(f'{path}: already done')
            else:
                images.append(image)
    elif skip_existing:
        todo = [entry for entry in named if not has_results(entry, folder, model.kind, pictures)]
        print(f'{len(named) - len(todo)} of {len(named)} are already done')
    if not ray and not tiling and model.device.type == 'cpu' and len(todo) >= MANY:
        print('more images per second on all cores: --ray, or cpvt export and cpvt run')
    if ray:
        skipped = write_on_ray(
            predictor.arguments, todo, images, folder, pictures, tiling, ray, ray_workers
        )
    elif tiling:
        skipped = write_in_tiles(images)
    else:
        skipped = write_results(model, todo, folder, threads, pictures)
    seconds = time.monotonic() - start
    for source, reason in skipped.items():
        print(f'cpvt infer: skipped {source}: {reason}', file=sys.stderr)
    done = [(path, name) for path, name in named if str(path) not in skipped]
    output.write(done)
    output.report(done, len(named))
    is_plain = not tiling and not ray and not any(is_video(path) for path, _ in todo)
    if is_plain and len(todo) > len(skipped):
        speed = (len(todo) - len(skipped)) / seconds
        print(f'{speed:.3g} images per second, reading and writing included')
    return int(bool(skipped))


def write_in_tiles(images: Sequence['LargeImage']) -> 'Skipped':
    """Write the results of large images; returns those that cannot be read."""
    from ..tooling.rasters import ReadError

    skipped = {}
    for image in images:
        try:
            image.write_rows((0, image.rows()))
        except ReadError as error:
            skipped[str(image.path)] = one_line(error)
            image.give_up()
        else:
            image.join()
    return skipped


def write_on_ray(
    model: dict,
    named: Sequence['Named'],
    images: Sequence['LargeImage'],
    folder: Path,
    pictures: bool,
    tiling: Optional['Tiling'],
    address: Union[bool, str],
    workers: Optional[int],
) -> 'Skipped':
    """Write results by the workers of a Ray cluster; see `cluster.py`."""
    from ..predict.openmmlab.cluster import connected, write_images_on, write_tiles_on

    work = images if tiling else named
    if not work:
        return {}
    with connected(address, workers, model['device']) as cluster:
        if tiling:
            return write_tiles_on(cluster, model, images, folder, pictures, tiling)
        return write_images_on(cluster, model, named, folder, pictures)


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    is_exported = any(Path(argument).suffix in EXPORTED for argument in arguments)
    return run_command(infer_exported if is_exported else infer, argv, WHEN_STOPPED)
