#!/usr/bin/env python
"""Lays out validation images with the ground truth beside what a trained model predicts.

    python tools/demo/contact_sheet.py configs/retinanet_cpvt_s.py work_dirs/r/epoch_12.pth

For detection and segmentation alike, as the config's default_scope says. The images are taken
evenly from the validation set and pass through the config's own test pipeline.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, uninstalled

CELL = 380  # the longer side of a picture on the sheet, in pixels
GAP = 8


def contact_sheet(
    config: Path,
    checkpoint: str,
    out: Path | None = None,
    images: int = 12,
    score_thr: float = 0.3,
    device: str | None = None,
) -> Path:
    """Writes the sheet to `out`, by default contact_sheet.png beside the checkpoint.

    images: how many, at most. score_thr: boxes that score less are not drawn.
    device: such as 'cuda:0'; None takes the GPU if there is one.
    """
    from cpvt_pyramid.runner import launch, prediction

    cfg = launch.load_config(config)
    if not cfg.get('val_dataloader'):
        raise launch.UserError(f'{config} has no val_dataloader to take images from')
    weights = launch.read_checkpoint(checkpoint)
    out = out or Path(checkpoint).with_name('contact_sheet.png')
    check_arguments(out, images)
    launch.check_data(cfg, 'val')
    model, dataset = launch.build_model(cfg, device), build_dataset(cfg)
    launch.load_weights(model, weights, checkpoint)

    total = len(dataset)
    count = min(images, total)
    chosen = [(2 * i + 1) * total // (2 * count) for i in range(count)]  # evenly, not the ends
    title = f'{config.stem} on {count} of {total} validation images'
    meta = prediction.dataset_meta(cfg, weights, 'val')
    colors = dict(zip(meta['classes'], meta['palette']))
    if cfg.default_scope == 'mmdet':
        title += f', boxes that score {score_thr:g} or more'
        pairs, legend = draw_detection(dataset, model, colors, chosen, score_thr)
    else:
        pairs, legend = draw_segments(dataset, model, colors, chosen)
    save(lay_out(pairs, title, legend), out)
    return out


def check_arguments(out: Path, images: int) -> None:
    from PIL import Image

    from cpvt_pyramid.runner.launch import UserError

    if images < 1:
        raise UserError(f'--images {images}: at least 1')
    if out.is_dir():
        raise UserError(f'cannot write {out}: it is a folder')
    if not out.parent.is_dir():
        raise UserError(f'cannot write {out}: {out.parent} is no folder')
    if out.suffix.lower() not in Image.registered_extensions():
        raise UserError(f'cannot write {out}: no picture format ends in {out.suffix!r}')


def build_dataset(cfg: Any) -> Any:
    """The validation set."""
    from mmengine.registry import DATASETS

    from cpvt_pyramid.runner.launch import UserError

    dataset = DATASETS.build(cfg.val_dataloader.dataset)
    if not len(dataset):
        raise UserError('the validation set is empty')
    return dataset


def draw_detection(
    dataset: Any, model: Any, colors: dict[str, tuple], chosen: Sequence[int], score_thr: float
) -> tuple[list[tuple], dict]:
    """Pairs of pictures, truth and prediction, and no legend: the boxes bear their names."""
    from cpvt_pyramid.runner.drawing import draw_boxes

    classes, palette = list(colors), list(colors.values())
    pairs = []
    for index in progress(chosen):
        info, found = dataset.get_data_info(index), predicted(dataset, model, index)
        image, factor = fitted(info['img_path'])
        truth = [x for x in info['instances'] if not x.get('ignore_flag')]
        boxes, labels = [x['bbox'] for x in truth], [x['bbox_label'] for x in truth]
        instances = found.pred_instances
        instances = instances[instances.scores >= score_thr].numpy()
        pairs.append((
            draw_boxes(image, scaled(boxes, factor), labels, None, classes, palette, 1),
            draw_boxes(
                image, scaled(instances.bboxes, factor), instances.labels, instances.scores,
                classes, palette, 1,
            ),
        ))  # fmt: skip
    return pairs, {}


def draw_segments(
    dataset: Any, model: Any, colors: dict[str, tuple], chosen: Sequence[int]
) -> tuple[list[tuple], dict]:
    """Pairs of pictures, truth and prediction, and a legend of the classes in them."""
    import numpy as np
    from mmengine.registry import TRANSFORMS
    from PIL import Image

    from cpvt_pyramid.runner.drawing import draw_segmentation, painted_classes

    classes, palette = list(colors), list(colors.values())
    read_map = TRANSFORMS.build({'type': 'LoadAnnotations'})
    pairs, present = [], set()
    for index in progress(chosen):
        info, found = dataset.get_data_info(index), predicted(dataset, model, index)
        image, _ = fitted(info['img_path'])
        maps = (
            read_map(info)['gt_seg_map'],  # as the image was stored; (H, W)
            found.pred_sem_seg.data[0].numpy(),
        )
        pair = []
        for label_map in maps:
            label_map = Image.fromarray(label_map.astype(np.int32))
            size = image.shape[1::-1]
            label_map = np.asarray(label_map.resize(size, Image.Resampling.NEAREST))
            present.update(painted_classes(label_map, classes))
            pair.append(draw_segmentation(image, label_map, classes, palette, False, 1))
        pairs.append(tuple(pair))
    return pairs, {name: colors[name] for i, name in enumerate(classes) if i in present}


def predicted(dataset: Any, model: Any, index: int) -> Any:
    """The model's answer on one image, in the coordinates of the image as it was stored."""
    import torch
    from mmengine.dataset import pseudo_collate

    with torch.no_grad():
        return model.test_step(pseudo_collate([dataset[index]]))[0].cpu()


def fitted(path: str) -> tuple[Any, float]:
    """The image at the size that it has on the sheet, and by what factor that differs."""
    import mmcv
    import numpy as np
    from PIL import Image

    image = Image.fromarray(mmcv.imread(path, channel_order='rgb'))
    factor = CELL / max(image.size)
    size = [max(1, round(side * factor)) for side in image.size]
    return np.array(image.resize(size, Image.Resampling.LANCZOS)), factor


def scaled(boxes: Any, factor: float) -> Any:
    import numpy as np

    return np.asarray(boxes, dtype=float).reshape(-1, 4) * factor


def progress(items: Sequence) -> Any:
    from tqdm import tqdm

    return tqdm(items, desc='contact sheet', unit='image', disable=None)  # None: on a terminal only


def lay_out(pairs: Sequence[tuple], title: str, legend: dict[str, tuple]) -> Any:
    """A white sheet: the title, the pairs in rows, the legend."""
    from PIL import Image, ImageDraw

    from cpvt_pyramid.runner.drawing import INK, WHITE, draw_legend, font

    across = 1 if len(pairs) < 4 else 2 if len(pairs) <= 12 else 3
    rows = [pairs[i : i + across] for i in range(0, len(pairs), across)]
    heights = [max(picture.height for pair in row for picture in pair) for row in rows]
    margin = 3 * GAP  # around the sheet and between pairs, wider than within one
    pair_width = 2 * CELL + GAP
    width = across * (pair_width + margin) + margin
    y = margin + 68
    sheet = Image.new('RGB', (width, y + sum(heights) + (len(rows) - 1) * GAP + margin), WHITE)
    draw = ImageDraw.Draw(sheet)
    draw.text((margin, margin), title, INK, font(22, bold=True))
    for row, height in zip(rows, heights):
        for i, pair in enumerate(row):
            for j, (name, picture) in enumerate(zip(('ground truth', 'prediction'), pair)):
                x = margin + i * (pair_width + margin) + j * (CELL + GAP)
                if row is rows[0]:
                    draw.text((x + CELL / 2, y - 8), name, INK, font(19), anchor='mb')
                draw.rectangle([x, y, x + CELL - 1, y + height - 1], (241, 243, 245))
                middle = (x + (CELL - picture.width) // 2, y + (height - picture.height) // 2)
                sheet.paste(picture, middle)
        y += height + GAP
    if legend:
        strip = draw_legend(list(legend), list(legend.values()), width - 2 * margin, 19)
        body, sheet = sheet, Image.new('RGB', (width, sheet.height + strip.height), WHITE)
        sheet.paste(body, (0, 0))
        sheet.paste(strip, (margin, body.height - GAP))
    return sheet


def save(sheet: Any, out: Path) -> None:
    from PIL import Image

    from cpvt_pyramid.runner.launch import UserError
    from cpvt_pyramid.runner.resume import appearing_whole

    try:
        with appearing_whole(out) as draft:  # whose name does not tell the format
            sheet.save(draft, Image.registered_extensions()[out.suffix.lower()])
    except OSError as error:
        raise UserError(f'cannot write {out}: {error}') from error


def main(argv: list[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser('contact_sheet', description=__doc__, formatter_class=plain)
    parser.add_argument('config', type=Path)
    parser.add_argument('checkpoint')
    parser.add_argument('--out', type=Path, help='default: contact_sheet.png beside the checkpoint')
    parser.add_argument('--images', type=int, default=12, help='how many (default 12)')
    parser.add_argument('--score-thr', type=float, default=0.3, help='least score (default 0.3)')
    parser.add_argument('--device', help='such as cuda:1; default: the GPU if there is one')
    arguments = vars(parser.parse_args(argv))

    from cpvt_pyramid.runner.launch import run_tool

    return run_tool('contact_sheet', lambda **a: print(contact_sheet(**a)), arguments, 'no sheet')


if __name__ == '__main__':
    sys.exit(main())
