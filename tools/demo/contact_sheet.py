#!/usr/bin/env python
"""Draws validation images with the ground truth next to a model's predictions.

    python tools/demo/contact_sheet.py configs/retinanet_cpvt_s.py work_dirs/r/epoch_12.pth

For detection and segmentation. The images are taken at even distances from the validation set and
pass through the config's test pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

CELL = 380  # the longer side of a picture on the sheet, in pixels
GAP = 8  # pixels


def contact_sheet(
    config: str,
    checkpoint: str,
    *,
    out: str | None = None,
    images: int = 12,
    score_thr: float = 0.3,
    device: str | None = None,
) -> None:
    """Draw the sheet.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py
        checkpoint: weights of the model, a path or an address
        out (FILE): the picture; by default contact_sheet.png next to the checkpoint
        images (N): draw at most N images
        score_thr: do not draw boxes with a lower score
        device: torch device, for example cpu or cuda:1; by default a GPU if there is one
    """
    from cpvt_pyramid.runner.config.check import check_data
    from cpvt_pyramid.runner.config.load import load_config
    from cpvt_pyramid.runner.inference import prediction
    from cpvt_pyramid.runner.models import build_model, fetch_checkpoint, load_whole_model
    from cpvt_pyramid.tooling.command import UserError

    cfg = load_config(config)
    if not cfg.get('val_dataloader'):
        raise UserError(f'{config} must have a val_dataloader to take images from')
    weights = fetch_checkpoint(checkpoint)
    path = Path(out) if out else Path(checkpoint).with_name('contact_sheet.png')
    check_arguments(path, images)
    check_data(cfg, 'val')
    model, dataset = build_model(cfg, device), build_dataset(cfg)
    load_whole_model(model, weights, checkpoint)

    total = len(dataset)
    count = min(images, total)
    chosen = [(2 * i + 1) * total // (2 * count) for i in range(count)]  # middles of equal parts
    title = f'{Path(config).stem} on {count} of {total} validation images'
    meta = prediction.dataset_meta(cfg, weights, 'val')
    colors = dict(zip(meta['classes'], meta['palette']))
    if cfg.default_scope == 'mmdet':
        title += f', boxes with a score of at least {score_thr:g}'
        pairs, legend = draw_detection(dataset, model, colors, chosen, score_thr)
    else:
        pairs, legend = draw_segments(dataset, model, colors, chosen)
    save(lay_out(pairs, title, legend), path)
    print(path)


def check_arguments(out: Path, images: int) -> None:
    from PIL import Image

    from cpvt_pyramid.tooling.command import UserError

    if images < 1:
        raise UserError(f'--images must be at least 1, got {images}')
    if out.is_dir():
        raise UserError(f'cannot write {out}: it is a folder')
    if not out.parent.is_dir():
        raise UserError(f'cannot write {out}: no such folder')
    if out.suffix.lower() not in Image.registered_extensions():
        raise UserError(f'cannot write {out}: unknown picture format {out.suffix!r}')


def build_dataset(cfg: Any) -> Any:
    """The validation set."""
    from mmengine.registry import DATASETS

    from cpvt_pyramid.tooling.command import UserError

    dataset = DATASETS.build(cfg.val_dataloader.dataset)
    if not len(dataset):
        raise UserError('the validation set is empty')
    return dataset


def draw_detection(
    dataset: Any, model: Any, colors: dict[str, tuple], chosen: Sequence[int], score_thr: float
) -> tuple[list[tuple], dict]:
    """Pairs of pictures, ground truth and prediction, and an empty legend: boxes have labels."""
    from cpvt_pyramid.results.drawing import draw_boxes

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
    """Pairs of pictures, ground truth and prediction, and the legend of the classes in them."""
    import numpy as np
    from mmengine.registry import TRANSFORMS
    from PIL import Image

    from cpvt_pyramid.results.drawing import draw_segmentation, painted_classes

    classes, palette = list(colors), list(colors.values())
    read_map = TRANSFORMS.build({'type': 'LoadAnnotations'})
    pairs, present = [], set()
    for index in progress(chosen):
        info, found = dataset.get_data_info(index), predicted(dataset, model, index)
        image, _ = fitted(info['img_path'])
        maps = (
            read_map(info)['gt_seg_map'],  # (H, W), at the size of the image file
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
    """The model's prediction for one image, in the coordinates of the image file."""
    import torch
    from mmengine.dataset import pseudo_collate

    with torch.no_grad():
        return model.test_step(pseudo_collate([dataset[index]]))[0].cpu()


def fitted(path: str) -> tuple[Any, float]:
    """The image at its size on the sheet, and the scale factor."""
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

    return tqdm(items, desc='contact sheet', unit='image', disable=None)  # None: only on a terminal


def lay_out(pairs: Sequence[tuple], title: str, legend: dict[str, tuple]) -> Any:
    """A white sheet: the title, the pairs in rows, the legend."""
    from PIL import Image, ImageDraw

    from cpvt_pyramid.results.drawing import INK, WHITE, draw_legend, font

    across = 1 if len(pairs) < 4 else 2 if len(pairs) <= 12 else 3
    rows = [pairs[i : i + across] for i in range(0, len(pairs), across)]
    heights = [max(picture.height for pair in row for picture in pair) for row in rows]
    margin = 3 * GAP  # around the sheet and between pairs
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

    from cpvt_pyramid.tooling.command import UserError
    from cpvt_pyramid.tooling.files import atomic_write

    try:
        with atomic_write(out) as draft:  # whose suffix does not tell the format
            sheet.save(draft, Image.registered_extensions()[out.suffix.lower()])
    except OSError as error:
        raise UserError(f'cannot write {out}: {error}') from error


def main(argv: Sequence[str] | None = None) -> int:
    from cpvt_pyramid.tooling.command import run_command

    return run_command(contact_sheet, argv)


if __name__ == '__main__':
    sys.exit(main())
