"""Non-maximum suppression with a fixed number of outputs, in batches, as one operator of a graph.

Shapes: B batch, N candidates, K results.
"""

import torch
from torch import Tensor

from ...versions import is_exporting

UNUSED = -1  # the label of rows after the last result


@torch.library.custom_op('cpvt_pyramid::nms', mutates_args=())
def survives(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Which boxes no better box overlaps by more than a threshold.

    An operator, because the number of survivors is not known to a graph. In ONNX it becomes
    NonMaxSuppression, see `onnx_file`. Candidates (B, N) with scores of 0 or less neither survive
    nor suppress others.
    """
    from torchvision.ops import nms

    kept = torch.zeros_like(scores, dtype=torch.bool)
    for box, score, keep in zip(boxes, scores, kept):
        (used,) = torch.nonzero(score > 0, as_tuple=True)
        keep[used[nms(box[used], score[used], iou_threshold)]] = True
    return kept


@survives.register_fake
def _(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return torch.empty_like(scores, dtype=torch.bool)


def batched_nms(
    boxes: Tensor, scores: Tensor, groups: Tensor, iou_threshold: float, agnostic: bool = False
) -> Tensor:
    """The scores (B, N), 0 for the boxes that non-maximum suppression removes.

    As mmcv's `batched_nms`: boxes of different groups (B, N), such as labels, do not suppress each
    other, because each group is moved to a place of its own; agnostic of them, they do.
    """
    if not agnostic:
        place = boxes.amax((1, 2), keepdim=True) + 1  # (B, 1, 1)
        boxes = boxes + groups[..., None].to(boxes.dtype) * place
    return scores * survives(boxes, scores, iou_threshold)


def best(
    scores: Tensor, boxes: Tensor, labels: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Boxes, scores, labels and indices of the best `count` candidates (B, N), best first; those
    with a score of 0 or less are unused rows."""
    scores, index = largest(scores, count)
    used = scores > 0
    boxes = take(boxes, index) * used[..., None]
    labels = labels.gather(1, index).masked_fill(~used, UNUSED)
    return boxes, scores * used, labels, index


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows (B, K, ...) of x (B, N, ...) by index (B, K)."""
    for _ in x.shape[2:]:
        index = index.unsqueeze(-1)
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def top(scores: Tensor, count: int, rest: float = 0) -> tuple[Tensor, Tensor]:
    """The `count` best scores (B, count) of (B, N), and their indices, whatever N is: where it is
    smaller, scores of `rest` follow, with the last index."""
    padded = torch.cat([scores, scores.new_full((scores.shape[0], count), rest)], dim=1)
    found, index = largest(padded, count)
    return found, index.clamp(max=scores.shape[1] - 1)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of (B, N), descending, and their indices; of equal ones, such as
    those of cells in the padding, the first, as ONNX and MMDetection do. `topk` leaves it open."""
    if is_exporting():
        return scores.topk(count)
    scores, index = scores.sort(dim=1, descending=True, stable=True)
    return scores[:, :count], index[:, :count]
