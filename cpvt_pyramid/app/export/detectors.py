"""Detectors of MMDetection.

Shapes: B batch, N anchors of a level, H x W image in pixels.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..tooling.command import UserError
from .anchors import Candidates, best_anchors, by_level, suppressed
from .base import Batch
from .mm_model import original_result, preprocessing_of
from .whole_model import WholeModel


class Detector(WholeModel):
    """What the detectors share: the boxes from anchors, and MMDetection's own result."""

    task = 'detection'
    output_names: tuple[str, ...] = ('boxes', 'scores', 'labels')

    def __init__(self, model: Any) -> None:
        super().__init__(model, preprocessing_of(model))

    def anchor_boxes(
        self, head: Any, predictions: Sequence[Sequence[Tensor]], batch: Batch
    ) -> Iterator[Candidates]:
        """The best anchors of each level.

        The predictions are, for each level, logits (B, anchors * classes, h, w) and deltas
        (B, anchors * 4, h, w).
        """
        settings = head.test_cfg
        for i, (logits, deltas) in enumerate(zip(*predictions)):
            classes = head.cls_out_channels
            scores = logits.permute(0, 2, 3, 1).unflatten(-1, (-1, classes))
            scores = scores.sigmoid() if head.use_sigmoid_cls else scores.softmax(-1)[..., :-1]
            anchors = head.prior_generator.single_level_grid_priors(
                logits.shape[2:], i, dtype=torch.float32, device=logits.device
            )
            yield best_anchors(
                scores.flatten(1, 3),  # (B, N, classes)
                deltas.permute(0, 2, 3, 1).reshape(logits.shape[0], -1, 4),
                anchors,
                head.bbox_coder.decode,
                batch,
                score_thr=settings.get('score_thr', 0),
                count=settings['nms_pre'],
                smallest=settings.get('min_bbox_size', -1),
            )

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        """MMDetection's result without masks, in no more rows than there are boxes."""
        found = original_result(self, image).pred_instances
        found = found[found.scores.argsort(descending=True)]
        result = {'boxes': found.bboxes, 'scores': found.scores, 'labels': found.labels}
        return {name: x[None] for name, x in result.items()}


class RetinaNet(Detector):
    """Boxes from anchors on every cell, best first on each level, then non-maximum suppression."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.details['nms'] = nms_settings(model.test_cfg)

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        maps, stages = self.maps(*self.preprocess(batch))
        head = self.model.bbox_head
        predictions = head(maps)
        stages |= by_level(*predictions)
        levels = self.anchor_boxes(head, predictions, batch)
        return stages | suppressed(levels, self.details['nms'])


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
