#!/usr/bin/env python
"""Show what a detector or a segmentor finds in images.

For each image NAME it writes NAME.overlay.png, a picture to look at, and NAME.detections.json
(boxes as x1, y1, x2, y2 in pixels of the image) or NAME.labels.png (its size; a pixel's value is
the index of its class).
"""

# Imports wait until the arguments are read: --help is quick, and mm's take seconds.
import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from mmengine.config import Config
    from mmengine.dataset import Compose
    from mmengine.structures import BaseDataElement
    from PIL import Image
    from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

IMAGES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')  # looked for in a folder
RESULTS = ('.overlay.png', '.detections.json', '.labels.png')


def infer(
    config: str,
    checkpoint: str,
    inputs: Sequence[str],
    out_dir: str = 'predictions',
    device: Optional[str] = None,
    score_thr: float = 0.3,
    cfg_options: Sequence[str] = (),
) -> int:
    """Run a model on images; returns 1 if some were no whole images, else 0.

    Args:
        config: the config file.
        checkpoint: path or address of the model's weights.
        inputs: images, and folders of images.
        out_dir: folder for the results.
        device: torch device; by default a GPU if there is one.
        score_thr: boxes of a lower score are left out.
        cfg_options: `key=value` settings that override the config's.
    """
    import cv2
    from tqdm import tqdm

    from cpvt_pyramid.mm import launch, prediction

    cfg = launch.load_config(config, cfg_options)
    paths = find_images(inputs)
    folder = launch.make_folder(out_dir)
    weights = launch.read_checkpoint(checkpoint)
    model = launch.build_model(cfg, device)
    launch.load_weights(model, weights, checkpoint)
    meta = prediction.dataset_meta(cfg, weights)
    pipeline = image_pipeline(cfg)

    skipped = 0
    names = result_names(paths, folder)
    for path, name in zip(tqdm(paths, unit='image', disable=None), names):
        try:
            image = prediction.read_image(path)
            data = pipeline({'img': image, 'img_id': 0})
        except (OSError, cv2.error) as error:  # torn, no image, or too thin to be resized
            tqdm.write(f'infer: skipped {path}: {launch.one_line(error)}', file=sys.stderr)
            skipped += 1
            continue
        sample = predict(model, data)
        overlay = prediction.draw_prediction(image, sample, meta, score_thr)
        write_results(folder, name, path, overlay, sample, meta, score_thr)
    print(f'{len(paths) - skipped} of {len(paths)} images: results in {folder}')
    return min(skipped, 1)


def find_images(inputs: Sequence[str]) -> list[Path]:
    """The images among the inputs and in the folders among them, each once."""
    from cpvt_pyramid.mm.launch import UserError

    found = {}
    for path in map(Path, inputs):
        if not path.exists():
            raise UserError(f'no image or folder at {path}')
        inside = [path]
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGES)
            if not inside:
                raise UserError(f'no images in the folder {path}; looked for {", ".join(IMAGES)}')
        found |= {p.resolve(): p for p in inside}
    return list(found.values())


def result_names(paths: Sequence[Path], folder: Path) -> Iterator[str]:
    """A name for each image's results: its own, numbered where that would hit a file in use.

    In use are the inputs, if they lie in the folder, and the results of the images before.
    """
    inputs = {path.resolve() for path in paths}
    taken = set()
    for path in paths:
        numbered = (f'{path.stem}-{n}' for n in itertools.count(2))
        for name in itertools.chain([path.stem], numbered):
            files = {(folder / f'{name}{result}').resolve() for result in RESULTS}
            if name not in taken and not files & inputs:
                break
        taken.add(name)
        yield name


def image_pipeline(cfg: 'Config') -> 'Compose':
    """The config's test pipeline, for images that are in memory and have no annotations."""
    from mmengine.dataset import Compose

    from cpvt_pyramid.mm.launch import leaves

    steps = []
    for step in next(leaves(cfg.test_dataloader.dataset)).pipeline:
        if step.type.endswith('LoadImageFromFile'):
            steps.append(
                {'type': 'LoadImageFromNDArray', 'to_float32': step.get('to_float32', False)}
            )
        elif not step.type.endswith('LoadAnnotations'):
            steps.append(step)
    return Compose(steps)


def predict(model: 'nn.Module', data: dict) -> 'BaseDataElement':
    import torch
    from mmengine.dataset import pseudo_collate

    with torch.no_grad():
        return model.test_step(pseudo_collate([data]))[0]


def write_results(
    folder: Path,
    name: str,
    path: Path,
    overlay: 'Image.Image',
    sample: 'BaseDataElement',
    meta: dict,
    score_thr: float,
) -> None:
    """Write an image's picture, and its detections or its label map."""
    from cpvt_pyramid.mm.prediction import detections, labels_image
    from cpvt_pyramid.mm.resume import appearing_whole

    with appearing_whole(folder / f'{name}.overlay.png') as file:
        overlay.save(file, 'PNG')
    if 'pred_sem_seg' in sample:
        with appearing_whole(folder / f'{name}.labels.png') as file:
            labels_image(sample, meta).save(file, 'PNG')
    else:
        found = ',\n  '.join(map(json.dumps, detections(sample, meta, score_thr)))
        text = f'{{"image": {json.dumps(str(path))},\n "detections": [\n  {found}]}}\n'
        with appearing_whole(folder / f'{name}.detections.json') as file:
            file.write_text(text)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog='infer', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add('config', metavar='CONFIG', help='config file, for example configs/retinanet_cpvt_s.py')
    add('checkpoint', metavar='CHECKPOINT', help='weights of the model, a path or an address')
    add('inputs', metavar='INPUT', nargs='+', help='an image or a folder of images')
    add('--out-dir', metavar='DIR', default='predictions', help='where to write (%(default)s)')
    add('--device', help='torch device, for example cpu or cuda:1 (a GPU if there is one)')
    add(
        '--score-thr',
        type=float,
        default=0.3,
        metavar='SCORE',
        help='leave out boxes of a lower score (%(default)s)',
    )
    add(
        '--cfg-options',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='override settings of the config, for example model.test_cfg.score_thr=0.1',
    )
    arguments = vars(parser.parse_args(argv))

    from cpvt_pyramid.mm.launch import run_tool

    return run_tool('infer', infer, arguments, f'what is done is in {arguments["out_dir"]}')


if __name__ == '__main__':
    sys.exit(main())
