#!/usr/bin/env python
"""Run a detector or a segmentor on images and videos.

For each image NAME it writes a picture, NAME.overlay.png, and the predictions:
  detector              NAME.detections.json, boxes as x1, y1, x2, y2 in pixels and, if the model
                        predicts instance masks, each as COCO run-length encoding
  semantic segmentor    NAME.labels.png, class indices as pixel values
  panoptic segmentor    NAME.segments.png, segment ids as pixel values, and NAME.segments.json
For a video it writes NAME.overlay.mp4 and NAME.detections.jsonl or NAME.segments.jsonl, one line
per frame.

With --tile, images of any size are processed in tiles at their own resolution; label maps are
GeoTIFFs, NAME.labels.tif, and detections are boxes without masks. The same command resumes a run
that was killed.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
from cpvt_pyramid.runner.command import UserError, one_line, run_command


def infer(
    config: str,
    checkpoint: str,
    inputs: Sequence[str],
    out_dir: str = 'predictions',
    device: Optional[str] = None,
    batch_size: int = 1,
    score_thr: float = 0.3,
    tile: Optional[int] = None,
    overlap: Optional[int] = None,
    memory: Optional[str] = None,
    gpu_memory: Optional[str] = None,
    inexact: bool = False,
    cfg_options: Sequence[str] = (),
) -> int:
    """Run a model on images and videos.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py.
        checkpoint: weights of the model, a path or an address.
        inputs (INPUT): an image, a video, a folder of them, a quoted pattern such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir (DIR): folder for the results.
        device: torch device, for example cpu or cuda:1; by default a GPU if there is one.
        batch_size (N): images, frames or tiles at a time.
        score_thr (SCORE): leave out boxes with a lower score.
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

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from tqdm import tqdm

    from cpvt_pyramid.runner import inference
    from cpvt_pyramid.runner.configs import load_config
    from cpvt_pyramid.runner.files import make_folder
    from cpvt_pyramid.runner.inputs import find_inputs, is_video, result_names
    from cpvt_pyramid.runner.large_images import LargeImages, tile_options
    from cpvt_pyramid.runner.models import build_model, fetch_checkpoint, load_whole_model
    from cpvt_pyramid.runner.prediction import dataset_meta
    from cpvt_pyramid.runner.raster import ReadError

    if not 0 <= score_thr <= 1:  # refuses nan too
        raise UserError(f'--score-thr must be in [0, 1], got {score_thr}')
    tiling = tile_options(batch_size, tile, overlap, memory, gpu_memory, inexact)
    cfg = load_config(config, cfg_options)
    paths = find_inputs(inputs)
    folder = make_folder(out_dir)
    weights = fetch_checkpoint(checkpoint)
    model = build_model(cfg, device)
    load_whole_model(model, weights, checkpoint)
    meta = dataset_meta(cfg, weights)
    named = list(zip(paths, result_names(paths, folder)))
    skipped = []

    def skip(path: Path, error: Exception) -> None:
        tqdm.write(f'infer: skipped {path}: {one_line(error)}', file=sys.stderr)
        skipped.append(path)

    if tiling:
        large = LargeImages(model, cfg, weights, meta, tiling, folder, score_thr)
        for path, name in named:
            try:
                with inference.gpu_memory_errors('reduce --tile or --batch-size'):
                    if not large.write(path, name):
                        print(f'{path}: already done')
            except ReadError as error:
                skip(path, error)
    else:
        predictor = inference.ModelPredictor(model, cfg, meta, batch_size, score_thr)
        images = [(path, name) for path, name in named if not is_video(path)]
        if images:
            inference.infer_images(predictor, images, folder, skip)
        for path, name in named:
            if is_video(path):
                try:
                    inference.infer_video(predictor, path, name, folder)
                except ReadError as error:
                    skip(path, error)
    print(f'{len(paths) - len(skipped)} of {len(paths)} done: results in {folder}')
    return min(len(skipped), 1)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(infer, argv, 'finished results are in {out_dir}')


if __name__ == '__main__':
    sys.exit(main())
