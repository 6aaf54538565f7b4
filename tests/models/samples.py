"""Images with annotations, as the pipelines of MMDetection and MMSegmentation give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import InstanceData, PixelData
from mmseg.structures import SegDataSample

BOXES = ((8, 10, 50, 60), (30, 5, 100, 70), (60, 40, 128, 75))  # left, top, right, bottom


def annotated(
    segmentor: bool,
    size: Sequence[int],
    boxes: Sequence[Sequence[float]] = BOXES,
    labels: Sequence[int] | None = None,
    classes: int = 19,
    masks: bool = False,
) -> DetDataSample | SegDataSample:
    """The data sample of an image of this height and width: a label map, or boxes, by default of
    label 0, and if asked for instance masks, which fill them."""
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), size)
    meta = dict(**shapes, scale_factor=(1.0, 1.0), flip=False)
    label_map = (torch.arange(size[0] * size[1]) % classes).view(1, *size)
    if segmentor:
        return SegDataSample(metainfo=meta, gt_sem_seg=PixelData(data=label_map))
    labels = torch.tensor(labels or [0] * len(boxes))
    instances = InstanceData(bboxes=torch.tensor(boxes).float(), labels=labels)
    if masks:
        filled = np.zeros((len(boxes), *size), np.uint8)
        for mask, (left, top, right, bottom) in zip(filled, np.round(boxes).astype(int)):
            mask[top:bottom, left:right] = 1
        instances.masks = BitmapMasks(filled, *size)
    nothing = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    return DetDataSample(
        metainfo=meta,
        gt_instances=instances,
        ignored_instances=nothing,
        gt_sem_seg=PixelData(sem_seg=label_map),
    )


def random_images(sizes: Sequence[Sequence[int]], seed: int = 0) -> list[torch.Tensor]:
    """Images (3, H, W) of uint8."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (3, *s), generator=generator, dtype=torch.uint8) for s in sizes]


def random_data(
    segmentor: bool, sizes: Sequence[Sequence[int]], seed: int = 0, **options: Any
) -> dict:
    """What a data loader gives to a model; `options` are those of `annotated`."""
    samples = [annotated(segmentor, size, **options) for size in sizes]
    return {'inputs': random_images(sizes, seed), 'data_samples': samples}
