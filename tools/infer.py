#!/usr/bin/env python
"""Show what a detector or a segmentor finds in images and videos.

For each image NAME it writes NAME.overlay.png, a picture to look at, and NAME.detections.json
(boxes as x1, y1, x2, y2 in pixels of the image) or NAME.labels.png (its size; a pixel's value is
the index of its class). For a video it writes NAME.overlay.mp4 and, of a detector,
NAME.detections.jsonl, a line for each frame.

With --tile, images of any size are read strip by strip, at their own pixels, and label maps are
NAME.labels.tif, a GeoTIFF. The same command goes on with a run that was killed.
"""

# Imports wait until the arguments are read: --help is quick, and mm's take seconds.
import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed


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
    inexact: bool = False,
    cfg_options: Sequence[str] = (),
) -> int:
    """Run a model on images and videos; returns 1 if some were not whole, else 0.

    Args:
        config: the config file.
        checkpoint: path or address of the model's weights.
        inputs: images, videos, folders, patterns, or '-', see `find_inputs`.
        out_dir: folder for the results.
        device: torch device; by default a GPU if there is one.
        batch_size: images, frames or tiles at a time.
        score_thr: boxes of a lower score are left out.
        tile: size of the tiles in which an image is taken apart, in pixels; by default it is not.
        overlap: of neighbouring tiles; by default a quarter of the tile.
        memory: what the process may take with `tile`, such as '2GiB'; by default what it takes.
        inexact: tiles of a batch pass the model together, see `tiling.segment`.
        cfg_options: `key=value` settings that override the config's.
    """
    from tqdm import tqdm

    from cpvt_pyramid.runner import inference, launch, prediction
    from cpvt_pyramid.runner.inputs import find_inputs, is_video, result_names
    from cpvt_pyramid.runner.large_images import LargeImages, ReadError, tile_options

    tiling = tile_options(batch_size, tile, overlap, memory, inexact)
    cfg = launch.load_config(config, cfg_options)
    paths = find_inputs(inputs)
    folder = launch.make_folder(out_dir)
    weights = launch.read_checkpoint(checkpoint)
    model = launch.build_model(cfg, device)
    launch.load_weights(model, weights, checkpoint)
    meta = prediction.dataset_meta(cfg, weights)
    named = list(zip(paths, result_names(paths, folder)))
    skipped = []

    def skip(path: Path, error: Exception) -> None:
        tqdm.write(f'infer: skipped {path}: {launch.one_line(error)}', file=sys.stderr)
        skipped.append(path)

    if tiling:
        large = LargeImages(model, cfg, weights, meta, tiling, folder, score_thr)
        for path, name in named:
            try:
                if not large.write(path, name):
                    print(f'{path}: done before')
            except ReadError as error:
                skip(path, error)
    else:
        predictor = inference.Predictor(model, cfg, meta, batch_size, score_thr)
        images = [(path, name) for path, name in named if not is_video(path)]
        if images:
            inference.infer_images(predictor, images, folder, skip)
        for path, name in named:
            if is_video(path):
                try:
                    inference.infer_video(predictor, path, name, folder)
                except OSError as error:
                    skip(path, error)
    print(f'{len(paths) - len(skipped)} of {len(paths)} done: results in {folder}')
    return min(len(skipped), 1)


def main(argv: Optional[Sequence[str]] = None) -> int:
    from cpvt_pyramid.runner.options import add_cfg_options

    parser = argparse.ArgumentParser(
        prog='infer', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add('config', metavar='CONFIG', help='config file, for example configs/retinanet_cpvt_s.py')
    add('checkpoint', metavar='CHECKPOINT', help='weights of the model, a path or an address')
    add(
        'inputs',
        metavar='INPUT',
        nargs='+',
        help="an image, a video, a folder of them, a quoted pattern such as 'photos/**/*.jpg', or "
        '- for a list of paths on the standard input',
    )
    add('--out-dir', metavar='DIR', default='predictions', help='where to write (%(default)s)')
    add('--device', help='torch device, for example cpu or cuda:1 (a GPU if there is one)')
    add(
        '--batch-size',
        type=int,
        default=1,
        metavar='N',
        help='images, frames or tiles at a time (%(default)s)',
    )
    add(
        '--score-thr',
        type=float,
        default=0.3,
        metavar='SCORE',
        help='leave out boxes of a lower score (%(default)s)',
    )
    add('--tile', type=int, metavar='PIXELS', help='take images apart in tiles, for example 1024')
    add('--overlap', type=int, metavar='PIXELS', help='of neighbouring tiles (a quarter of a tile)')
    add('--memory', metavar='SIZE', help='what the process may take with --tile, for example 2GiB')
    add(
        '--inexact',
        action='store_true',
        help='let the tiles of a batch pass the model together: faster on a GPU, and the same up '
        'to rounding; without it a result is the same for all batch sizes to the last bit',
    )
    add_cfg_options(parser, 'model.test_cfg.score_thr=0.1')
    arguments = vars(parser.parse_args(argv))

    from cpvt_pyramid.runner.launch import run_tool

    return run_tool('infer', infer, arguments, f'what is done is in {arguments["out_dir"]}')


if __name__ == '__main__':
    sys.exit(main())
