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
from collections.abc import Sequence
from typing import Literal, Optional

from ..tooling.command import run_command
from ..tooling.files import Format

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
    from ..predict.infer import run_infer

    return run_infer(
        model,
        inputs,
        out_dir=out_dir,
        device=device,
        backend=backend,
        dtype=dtype,
        batch_size=batch_size,
        score_thr=score_thr,
        size=size,
        format=format,
        no_pictures=no_pictures,
        skip_existing=skip_existing,
        workers=workers,
        tile=tile,
        overlap=overlap,
        ray=ray,
        ray_workers=ray_workers,
        cfg_options=cfg_options,
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(infer, argv, WHEN_STOPPED)
