"""Run a detector or a segmentor on images and videos.

    cpvt infer MODEL INPUT...

MODEL is one of

- CONFIG CHECKPOINT, of OpenMMLab
- a checkpoint of a training, which has its config inside
- a .onnx file of cpvt export, or an OpenVINO model (.xml) made from one, which need neither torch
  nor OpenMMLab
- the name of a trained model, see cpvt models

For each image NAME it writes a picture, NAME.overlay.jpg, and the predictions:

- detector: NAME.detections.json, boxes as x1, y1, x2, y2 in pixels and, if the model predicts
  instance masks, each as COCO run-length encoding
- semantic segmentor: NAME.labels.png, class indices as pixel values
- panoptic segmentor: NAME.segments.png, segment ids as pixel values, and NAME.segments.json

With --format, the predictions are also written as

- coco: coco.json, one data set of all images
- geojson: NAME.geojson, in world coordinates if the image is georeferenced, else in pixels

For a video it writes NAME.overlay.mp4 and NAME.detections.jsonl or NAME.segments.jsonl, one line
per frame. NAME keeps the subfolders of a folder or a pattern, and gets a number where two inputs
would have the same; inputs.json tells which input has which.

With --tile, images of any size are processed in tiles at their own resolution; segmentation masks
are GeoTIFFs, NAME.labels.tif, and detections are boxes without masks.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Optional

from ..tooling.command import UserError, check_at_least, program_name, run_command
from ..tooling.files import Format
from ..tooling.threads import usable_cores

WHEN_STOPPED = 'finished results are in {out_dir}; --skip-existing keeps them'


def infer(
    model: str,
    inputs: Sequence[str],
    *,
    out_dir: str = 'predictions',
    device: Optional[str] = None,
    backend: Optional[Literal['onnxruntime', 'openvino']] = None,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
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
    """Run a model on images and videos.

    Args:
        model: config, exported model, checkpoint with its config inside, or name of a trained
            model; after a config comes its checkpoint, a path or an address.
        inputs: images, videos, folders with their subfolders, quoted patterns such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir: folder for the results.
        device: cpu, cuda:1 or another device of torch, or, for an exported model, an execution
            provider of onnxruntime or a device of OpenVINO; by default a GPU if there is one.
        backend: of an exported model; by default onnxruntime, and openvino for .xml.
        dtype: of the backbone, the neck and the heads of segmentors of OpenMMLab; boxes are
            float32.
        batch_size: images or frames at a time, of which none is padded by another, so that
            results do not depend on it, but for rounding; tiles that are queued on a GPU.
        score_thr: leave out boxes with a lower score; by default the threshold of an exported
            model, else 0.3.
        size: shorter side of the input of an exported model; by default that of the training.
        format: write the predictions in this format, too.
        no_pictures: write no NAME.overlay.jpg or .mp4, to be faster with a small model.
        skip_existing: leave out images and videos that have results of an earlier run.
        workers: threads that read images ahead of the model, as many that write results, and as
            many that run an exported model on a CPU; by default one for each core.
        tile: split images into tiles of this size, for example 1024.
        overlap: overlap of neighbouring tiles; by default a quarter of a tile.
        ray: give images to the workers of a Ray cluster: local, one that is started on this
            machine; auto, one that this machine is part of; or HOST:PORT.
        ray_workers: most workers of --ray; by default as many as there are GPUs or, without GPUs,
            cores and memory for.
        cfg_options: override settings of a config, for example model.test_cfg.score_thr=0.1.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from tqdm import tqdm

    from ..predict.cluster import write_on_ray
    from ..predict.opening import open_model, resolve_model
    from ..predict.results import Results
    from ..predict.running import Work, write_results
    from ..predict.tiles import spans
    from ..tooling.inputs import find_inputs, name_results

    check_at_least('--workers', workers, 0)
    check_at_least('--batch-size', batch_size, 1)
    check_at_least('--size', size, 1)
    check_at_least('--ray-workers', ray_workers, 1)
    if tile is None and overlap is not None:
        raise UserError('--overlap needs --tile')
    if tile is not None and overlap is None:
        overlap = tile // 4 // 32 * 32
    if tile is not None:
        spans(1, tile, overlap or 0)  # a UserError if they do not fit
    files, words = resolve_model(model, inputs)
    if not words:
        raise UserError('no inputs; they come after the model')
    found = find_inputs(words, out_dir=out_dir)
    if workers is None:
        workers = min(usable_cores(), math.ceil(len(found) / batch_size))
    options: dict[str, Any] = {
        'files': files,
        'device': device,
        'score_thr': score_thr,
        'size': size,
        'backend': backend,
        'dtype': dtype,
        'cfg_options': cfg_options,
    }
    if ray:
        threads = 0  # a worker has one core
        ready = open_model(**{**options, 'device': 'cpu'})  # this process only looks at it
    else:
        threads = workers
        ready = open_model(**options, threads=1 if tile else max(workers, 1))
    named, folder = name_results(found, out_dir)
    results = Results(
        folder, ready.kind, ready.classes, not no_pictures, format, is_tiled=tile is not None
    )
    results.check(named)
    todo = list(named)
    if skip_existing:
        todo = [entry for entry in named if not results.exist(entry)]
        print(f'{len(named) - len(todo)} of {len(named)} are already done')
    skipped: set[Path] = set()

    def skip(path: Path, reason: str) -> None:
        skipped.add(path)
        tqdm.write(f'{program_name(infer)}: skipped {path}: {reason}', file=sys.stderr)

    work = Work(batch_size, threads, tile, overlap or 0)
    start = time.monotonic()
    if ray and todo:
        write_on_ray(
            todo, results, skip, model=options, work=work, address=ray, workers=ray_workers
        )
    else:
        write_results(ready, todo, results, work, skip)
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


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(infer, argv, WHEN_STOPPED)
