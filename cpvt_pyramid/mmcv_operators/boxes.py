"""Overlaps of boxes, and what suppresses boxes that overlap.

Boxes are (x1, y1, x2, y2); `offset` 1 takes x2 and y2 as the last pixels of a box, whose width is
x2 - x1 + 1.
"""

from __future__ import annotations

import torch
import torchvision  # noqa: F401 (registers its operators)
from torch import Tensor

NAIVE, LINEAR, GAUSSIAN = 0, 1, 2  # methods of soft NMS
IOU = 0  # mode: intersection over union; 1 is intersection over the first box


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Indices of the boxes that stay, by descending score."""
    far = boxes.new_tensor([0, 0, offset, offset])
    return torch.ops.torchvision.nms((boxes + far).float(), scores.float(), iou_threshold)


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Soft-NMS ([1704.04503](https://arxiv.org/abs/1704.04503)): boxes that overlap one of a higher
    score lose score.

    Args:
        dets: (N, 5), whose first rows are filled with the boxes that stay, and their scores.

    Returns:
        The indices of these boxes.
    """
    boxes = boxes.float()
    left = torch.arange(len(boxes))
    scores = scores.float().clone()
    kept: list[Tensor] = []
    while len(left):
        best = scores.argmax()
        index, score = left[best], scores[best]
        dets[len(kept), :4] = boxes[index]
        dets[len(kept), 4] = score
        kept.append(index)
        others = torch.arange(len(left)) != best
        left, scores = left[others], scores[others]
        overlap = pairwise_overlaps(boxes[index][None], boxes[left], offset)[0]
        scores = scores * decay(overlap, iou_threshold, sigma, method)
        is_left = scores >= min_score
        left, scores = left[is_left], scores[is_left]
    return torch.stack(kept) if kept else left


def decay(overlap: Tensor, iou_threshold: float, sigma: float, method: int) -> Tensor:
    """The factor of a box's score."""
    if method == GAUSSIAN:
        return torch.exp(-(overlap**2) / sigma)
    factor = 1 - overlap if method == LINEAR else torch.zeros_like(overlap)
    return torch.where(overlap >= iou_threshold, factor, 1)


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """NMS that keeps what it suppresses.

    Args:
        dets: boxes and scores, (N, 5).

    Returns:
        For each box that stays, by descending score, its index, then those that it suppressed.
    """
    boxes = dets[:, :4].float()
    left = dets[:, 4].argsort(descending=True)
    groups = []
    while len(left):
        best, left = left[0], left[1:]
        overlap = pairwise_overlaps(boxes[best][None], boxes[left], offset=0)[0]
        is_suppressed = overlap >= iou_threshold
        groups.append([int(best), *left[is_suppressed].tolist()])
        left = left[~is_suppressed]
    return groups


def bbox_overlaps(
    bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode: int, aligned: bool, offset: int
) -> None:
    """`ious` is filled with the overlap of each pair, or if `aligned` of the boxes of one index."""
    if aligned:
        ious.copy_(aligned_overlaps(bboxes1, bboxes2, offset, mode).view_as(ious))
    else:
        ious.copy_(pairwise_overlaps(bboxes1, bboxes2, offset, mode))


def pairwise_overlaps(boxes1: Tensor, boxes2: Tensor, offset: int, mode: int = IOU) -> Tensor:
    """(N, 4) and (M, 4) to (N, M)."""
    return aligned_overlaps(boxes1[:, None], boxes2[None], offset, mode)


def aligned_overlaps(boxes1: Tensor, boxes2: Tensor, offset: int, mode: int = IOU) -> Tensor:
    sides = torch.minimum(boxes1[..., 2:], boxes2[..., 2:])
    sides = (sides - torch.maximum(boxes1[..., :2], boxes2[..., :2]) + offset).clamp(min=0)
    intersection = sides.prod(-1)
    area1 = (boxes1[..., 2:] - boxes1[..., :2] + offset).prod(-1)
    area2 = (boxes2[..., 2:] - boxes2[..., :2] + offset).prod(-1)
    return intersection / (area1 + area2 - intersection if mode == IOU else area1)
