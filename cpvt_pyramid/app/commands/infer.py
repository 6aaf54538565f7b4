"""Run a detector or a segmentor on images and videos.

    cpvt infer trees.onnx photos
    cpvt infer retinanet_pvt_v2_b2_coco photo.jpg street.mp4 --out-dir results
    cpvt infer my.py work_dirs/my/best_*.pth photos --score-thr 0.5
    cpvt infer trees.onnx aerial.tif --tile 1024

The model comes first, then the images and videos. The model is one of

- a config and its checkpoint, of OpenMMLab
- a checkpoint of a training, which has its config inside
- a .onnx file of cpvt export, or an OpenVINO model (.xml) made from one, which need neither torch
  nor OpenMMLab
- the name of a trained model, see cpvt models

For each image NAME it writes a picture, NAME.overlay.jpg, and the predictions:

- detector: NAME.detections.json, boxes as x1, y1, x2, y2 in pixels and, if the model predicts
  instance masks, each as COCO run-length encoding
- semantic segmentor: NAME.labels.png, class indices as pixel values

With --format, the predictions are also written as

- coco: coco.json, one data set of all images
- geojson: NAME.geojson, in world coordinates if the image is georeferenced, else in pixels

For a video it writes NAME.overlay.mp4 and NAME.detections.jsonl, one line per frame. NAME keeps the
subfolders of a folder or a pattern, and gets a number where two inputs would have the same;
inputs.json tells which input has which.

A model that does not resize images takes large ones in tiles, and a line says so. With --tile,
every model takes all images in tiles at their own resolution. It is needed for images that are
larger than memory, and where objects would be too small once an image is resized, as in aerial
photographs. Segmentation masks are GeoTIFFs then, NAME.labels.tif, and detections are
boxes without masks.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
from collections.abc import Sequence
from typing import Optional

from ..predict.options import InferOptions
from ..tooling.command import run_command

GROUP = 'evaluation and prediction'
WHEN_STOPPED = 'finished results are in {out_dir}; --skip-existing keeps them'


def infer(model: str, inputs: Sequence[str], *, options: InferOptions) -> int:
    """Run a model on images and videos.

    Args:
        model: config, exported model, checkpoint with its config inside, or name of a trained
            model; after a config comes its checkpoint, a path or an address.
        inputs: images, videos, folders with their subfolders, quoted patterns such as
            'photos/**/*.jpg', or - for a list of paths on stdin.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from ..predict.infer import run_infer

    return run_infer(model, inputs, options)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(infer, argv, WHEN_STOPPED)
