"""Detectors of MMDetection.

Shapes: B batch, N candidates, K results.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Optional

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..tooling.command import UserError
from .base import Batch
from .mm_model import MMModel
from .nms import batched_nms, best, take, top


class Detector(MMModel):
    """What the detectors share: the boxes from anchors, and MMDetection's own result."""

    task = 'detection'
    output_names: tuple[str, ...] = ('boxes', 'scores', 'labels')

    def anchor_boxes(
        self, head: nn.Module, predictions: Sequence[Sequence[Tensor]], batch: Batch
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Boxes (B, N, 4), scores (B, N) and labels (B, N) of the best anchors of each level.

        As in MMDetection, cells in the padding have boxes, too. The predictions are, for each
        level, logits (B, anchors * classes, h, w) and deltas (B, anchors * 4, h, w).
        """
        settings = head.test_cfg
        for i, (logits, deltas) in enumerate(zip(*predictions)):
            classes = head.cls_out_channels
            scores = logits.permute(0, 2, 3, 1).unflatten(-1, (-1, classes))
            scores = scores.sigmoid() if head.use_sigmoid_cls else scores.softmax(-1)[..., :-1]
            scores = scores.flatten(1, 3)  # (B, N, classes)
            deltas = deltas.permute(0, 2, 3, 1).reshape(logits.shape[0], -1, 4)
            anchors = head.prior_generator.single_level_grid_priors(
                logits.shape[2:], i, dtype=torch.float32, device=logits.device
            ).expand(logits.shape[0], -1, -1)
            classes = scores.shape[2]
            scores = scores * (scores > settings.get('score_thr', 0))
            scores, index = top(scores.flatten(1), settings['nms_pre'])
            labels, index = index % classes, index // classes
            deltas, anchors = take(deltas, index), take(anchors, index)
            boxes = head.bbox_coder.decode(anchors.flatten(0, 1), deltas.flatten(0, 1))
            boxes = clip(boxes.view_as(deltas), batch)
            smallest = settings.get('min_bbox_size', -1)
            if smallest >= 0:
                scores = scores * (boxes[..., 2:] - boxes[..., :2] > smallest).all(-1)
            yield boxes, scores, labels

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        """MMDetection's result without masks, in no more rows than there are boxes."""
        found = self.test(image).pred_instances
        found = found[found.scores.argsort(descending=True)]
        result = {'boxes': found.bboxes, 'scores': found.scores, 'labels': found.labels}
        return {name: x[None] for name, x in result.items()}

    @contextmanager
    def with_noise(self, share: float, random: torch.Generator) -> Iterator[None]:
        """See the base class. The maps are constant in the padding, where all cells have equal
        scores: noise in what the dense heads predict puts them in another order."""

        def disturb(x: Tensor) -> Tensor:
            return x + share * x.abs().max() * torch.randn(x.shape, generator=random)

        parts = dict(self.model.named_children())
        head = parts.get('rpn_head') or parts.get('bbox_head') or nn.Identity()  # of a Mask2Former
        with head.register_forward_hook(lambda *call: tree_map_only(Tensor, disturb, call[2])):
            yield


class RetinaNet(Detector):
    """Boxes from anchors on every cell, best first on each level, then non-maximum suppression."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.details['nms'] = nms_settings(model.test_cfg)

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        maps, stages = self.maps(*self.preprocess(batch))
        head = self.model.bbox_head
        predictions = head(maps)
        stages |= by_level(predictions)
        boxes, scores, labels = zip(*self.anchor_boxes(head, predictions, batch))
        boxes = torch.cat(boxes, 1)
        scores = torch.cat(scores, 1)
        labels = torch.cat(labels, 1)
        nms = self.details['nms']
        scores = batched_nms(boxes, scores, labels, nms['iou_threshold'], nms['class_agnostic'])
        boxes, scores, labels, _ = best(scores, boxes, labels, nms['max_per_img'])
        return stages | {'boxes': boxes, 'scores': scores, 'labels': labels}


def by_level(predictions: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """The stages 'logits_0', 'deltas_0', 'logits_1', ... of a dense head."""
    stages = {}
    for i, (logits, deltas) in enumerate(zip(*predictions)):
        stages[f'logits_{i}'] = logits
        stages[f'deltas_{i}'] = deltas
    return stages


def nms_settings(settings: dict, of_anchors: bool = True) -> dict:
    """The settings of non-maximum suppression in a `test_cfg`, for the graph and the metadata."""
    if of_anchors and settings.get('nms_pre', -1) < 1:
        raise UserError('nms_pre in test_cfg must be at least 1 to be exported')
    nms = settings['nms']
    known = {'type', 'iou_threshold', 'class_agnostic', 'split_thr'}  # the last bounds memory
    if nms.get('type', 'nms') != 'nms' or nms.keys() - known:
        raise UserError(f'only plain NMS can be exported, not test_cfg.nms={dict(nms)}; change it')
    return {
        'score_thr': settings.get('score_thr', 0),
        'iou_threshold': nms['iou_threshold'],
        'class_agnostic': nms.get('class_agnostic', False),
        'max_per_img': settings['max_per_img'],
    }


def clip(boxes: Tensor, batch: Batch) -> Tensor:
    """Boxes (B, N, 4), x1 y1 x2 y2 in pixels, within the true extent of each image."""
    limits = batch.sizes.to(boxes.dtype)[:, None].flip(2).repeat(1, 1, 2)
    return boxes.clamp(min=0).minimum(limits)
