"""Draws the boxes of one photograph alone and next to larger images: a moving picture.

    python -m benchmarks.batch_boxes CONFIG CHECKPOINT PHOTOGRAPH NEIGHBOR [NEIGHBOR ...]

Both halves have the same weights. On the right the detector is ours, and runs as in cpvt test and
cpvt infer, where no image is padded by another. On the left its data preprocessor is MMDetection's
own, and so the padding of a batch reaches the features, as in other ports of the backbone. A box is
orange if it is not there when the photograph is alone, at the same place (to half a pixel) and with
the same score (to 0.005). In each frame another larger image is in the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from cpvt_pyramid.tooling.command import UserError, imports_of, prepare_for_torch, run_command
from cpvt_pyramid.tooling.files import check_file

prepare_for_torch()  # before torch is imported

with imports_of('batch_boxes', 'mm'):
    import numpy as np
    from mmengine.config import Config
    from PIL import Image, ImageDraw

    from benchmarks.models.detections import detect, found_alone
    from cpvt_pyramid.predict.drawing import font
    from cpvt_pyramid.predict.openmmlab.grouping import divide_batches

SAME = (80, 220, 255)
CHANGED = (255, 140, 0)
INK = (33, 37, 41)
PANEL = 400  # pixels, width of a half
TITLES = ('padding reaches the features', 'cpvt_pyramid')
MILLISECONDS = 1500  # of a frame


def batch_boxes(
    config: str,
    checkpoint: str,
    photograph: str,
    neighbors: Sequence[str],
    *,
    score_thr: float = 0.4,
    out: str = 'batch_boxes.gif',
) -> None:
    """Write the moving picture.

    Args:
        config: of the detector
        checkpoint: its weights
        photograph: the image whose boxes are drawn
        neighbors: larger images, one in each frame
        score_thr: minimum score of a box
        out: file to write, .gif
    """
    check_file(out)
    image = load(photograph)
    others = [load(path) for path in neighbors]
    for path, other in zip(neighbors, others):
        if other.shape[0] < image.shape[0] or other.shape[1] < image.shape[1]:
            raise UserError(f'{path} must be at least as large as {photograph}')
    frames = []
    panels = [boxes_in_batches(config, checkpoint, image, others, ours) for ours in (False, True)]
    changed = [0, 0]
    for number in range(len(others) + 1):
        halves = []
        for half, batches in enumerate(panels):
            boxes, scores = batches[number]
            shown = scores >= score_thr
            same = found_alone(boxes, scores, *batches[0])
            changed[half] += int((shown & ~same).sum())
            halves.append(half_of(image, boxes[shown], same[shown]))
        caption = 'alone'
        if number:
            height, width = others[number - 1].shape[:2]
            caption = f'in a batch with an image of {width} x {height}'
        frames.append(frame_of(halves, caption))
    first, *rest = [f.quantize(256, dither=Image.Dither.FLOYDSTEINBERG) for f in frames]
    first.save(out, save_all=True, append_images=rest, duration=MILLISECONDS, loop=0)
    print(f'{out}: boxes that change: {changed[0]} on the left, {changed[1]} on the right')


def load(path: str) -> np.ndarray:
    """(H, W, 3) uint8, RGB."""
    if not Path(path).is_file():
        raise UserError(f'no image at {path}')
    return np.array(Image.open(path).convert('RGB'))


def boxes_in_batches(
    config: str, checkpoint: str, image: np.ndarray, others: list[np.ndarray], ours: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Boxes (N, 4) and scores (N,) of the image alone, and then in a batch with each other one."""
    from mmdet.apis import init_detector

    cfg = Config.fromfile(config)
    if not ours:
        cfg.model.data_preprocessor.type = 'DetDataPreprocessor'
    model = init_detector(cfg, checkpoint, device='cpu')
    if ours:
        divide_batches(model)
    return [detect(model, image), *(detect(model, image, other) for other in others)]


def half_of(image: np.ndarray, boxes: np.ndarray, same: np.ndarray) -> Image.Image:
    """The photograph with its boxes, `PANEL` pixels wide."""
    factor = PANEL / image.shape[1]
    picture = Image.fromarray(image)
    size = (PANEL, round(image.shape[0] * factor))
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    draw = ImageDraw.Draw(picture)
    for chosen, color in ((same, SAME), (~same, CHANGED)):
        for box in boxes[chosen] * factor:
            draw.rectangle(box.tolist(), None, color, 2)
    return picture


def frame_of(halves: list[Image.Image], caption: str) -> Image.Image:
    """Both halves, their titles and the caption."""
    gap, head = 8, 56
    width = 2 * PANEL + gap
    frame = Image.new('RGB', (width, halves[0].height + head), (255, 255, 255))
    draw = ImageDraw.Draw(frame)
    draw.text((width / 2, 14), f'The same photograph, {caption}', INK, font(18), anchor='mm')
    for i, (half, title) in enumerate(zip(halves, TITLES)):
        left = i * (PANEL + gap)
        frame.paste(half, (left, head))
        draw.text((left + PANEL / 2, 42), title, INK, font(16), anchor='mm')
    return frame


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(batch_boxes, argv)


if __name__ == '__main__':
    sys.exit(main())
