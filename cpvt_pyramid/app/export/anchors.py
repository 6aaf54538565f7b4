"""Boxes from anchors, as dense detectors predict them.

Shapes: B batch, N anchors of a level, K the best of them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Batch
from .nms import batched_nms, best, take, top


class Candidates(NamedTuple):
    """The best anchors of a level."""

    boxes: Tensor  # (B, K, 4)
    scores: Tensor  # (B, K)
    labels: Tensor  # (B, K)


def best_anchors(
    scores: Tensor,
    deltas: Tensor,
    anchors: Tensor,
    decode: Callable[[Tensor, Tensor], Tensor],
    batch: Batch,
    *,
    score_thr: float,
    count: int,
    smallest: float = 0,
) -> Candidates:
    """The `count` best anchors of a level. Cells in the padding have boxes, too.

    Args:
        scores: (B, N, classes).
        deltas: (B, N, 4), what is predicted for each anchor.
        anchors: (N, 4).
        decode: boxes (M, 4) from anchors and deltas (M, 4).
        batch: whose images limit the boxes.
        score_thr: lower scores do not count.
        count: K.
        smallest: boxes with a side of at most this many pixels do not count; -1: all do.
    """
    classes = scores.shape[2]
    scores = scores * (scores > score_thr)
    scores, index = top(scores.flatten(1), count)
    labels, index = index % classes, index // classes
    deltas = take(deltas, index)
    anchors = take(anchors.expand(scores.shape[0], -1, -1), index)
    boxes = decode(anchors.flatten(0, 1), deltas.flatten(0, 1))
    boxes = clip(boxes.view_as(deltas), batch)
    if smallest >= 0:
        scores = scores * (boxes[..., 2:] - boxes[..., :2] > smallest).all(-1)
    return Candidates(boxes, scores, labels)


def suppressed(levels: Iterable[Candidates], nms: dict[str, Any]) -> dict[str, Tensor]:
    """The results of all levels: boxes, scores and labels after non-maximum suppression. `nms` is
    that of the metadata."""
    boxes, scores, labels = (torch.cat(parts, 1) for parts in zip(*levels))
    scores = batched_nms(boxes, scores, labels, nms['iou_threshold'], nms['class_agnostic'])
    boxes, scores, labels, _ = best(scores, boxes, labels, nms['max_per_img'])
    return {'boxes': boxes, 'scores': scores, 'labels': labels}


def by_level(logits: Sequence[Tensor], deltas: Sequence[Tensor]) -> dict[str, Tensor]:
    """The stages 'logits_0', 'deltas_0', 'logits_1', ... of a dense head."""
    stages = {}
    for i, (own_logits, own_deltas) in enumerate(zip(logits, deltas)):
        stages[f'logits_{i}'] = own_logits
        stages[f'deltas_{i}'] = own_deltas
    return stages


def clip(boxes: Tensor, batch: Batch) -> Tensor:
    """Boxes (B, N, 4), x1 y1 x2 y2 in pixels, within the true extent of each image."""
    limits = batch.sizes.to(boxes.dtype)[:, None].flip(2).repeat(1, 1, 2)
    return boxes.clamp(min=0).minimum(limits)
