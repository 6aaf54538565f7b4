"""Trained models by name, in PyTorch, without OpenMMLab.

Shapes: B batch, N anchors of a level, H x W image in pixels.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Optional

import torch.nn.functional as F
from torch import Tensor

from ...padding.batching import padded_size
from ...tasks.segmentors import SemanticSegmentor, resize
from ..predict.pytorch.model import STRIDE
from ..tooling.command import UserError
from .anchors import best_anchors, by_level, suppressed
from .base import Batch, Preprocessing, Settings
from .segmentors import Segmentor
from .whole_model import Stages, WholeModel


class TrainedDetector(WholeModel):
    """An `MMDetectionRetinaNet` of `tasks.detectors`."""

    task = 'detection'
    output_names = ('boxes', 'scores', 'labels')

    def __init__(self, model: Any) -> None:
        super().__init__(model, Preprocessing(divisor=STRIDE, marks_padding=False))
        self.details['nms'] = {
            'score_thr': model.score_thresh,
            'iou_threshold': model.nms_thresh,
            'class_agnostic': False,
            'max_per_img': model.detections_per_img,
        }

    def maps(self, x: Tensor, valid: Optional[Tensor]) -> tuple[Sequence[Tensor], Stages]:
        pyramid = self.model.backbone
        maps = pyramid.body(x, valid)
        stages = {f'map_{i}': x for i, x in enumerate(maps)}
        return list(pyramid.fpn(OrderedDict(stages)).values()), stages

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        levels, stages = self.maps(*self.preprocess(batch))
        outputs = [self.model.head([x]) for x in levels]
        logits = [output['cls_logits'] for output in outputs]  # (B, N, classes)
        deltas = [output['bbox_regression'] for output in outputs]  # (B, N, 4)
        stages |= by_level(logits, deltas)
        generator = self.model.anchor_generator
        anchors = generator.grid_anchors(
            [x.shape[2:] for x in levels], [[stride, stride] for stride in generator.strides]
        )
        found = [
            best_anchors(
                own_logits.sigmoid(),
                own_deltas,
                own_anchors,
                self.decode,
                batch,
                score_thr=self.model.score_thresh,
                count=self.model.topk_candidates,
            )
            for own_logits, own_deltas, own_anchors in zip(logits, deltas, anchors)
        ]
        return stages | suppressed(found, self.details['nms'])

    def decode(self, anchors: Tensor, deltas: Tensor) -> Tensor:
        return self.model.box_coder.decode_single(deltas, anchors)

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        height, width = image.shape[2:]
        bottom, right = padded_size(self.canvas or (height, width), STRIDE)
        normalized = self.model.transform.normalize(image / 255)
        batch = F.pad(normalized, (0, right - width, 0, bottom - height))
        [found] = self.model.detect(batch, [(height, width)])
        return {name: found[name][None] for name in self.output_names}


class TrainedSegmentor(Segmentor):
    """A `SemanticSegmentor`. Its images are not padded."""

    def __init__(self, model: SemanticSegmentor, probabilities: bool) -> None:
        super().__init__(model, Preprocessing(marks_padding=False), probabilities)

    def check(self, settings: Settings) -> None:
        if self.model.window is None:
            return
        side, _ = self.model.window
        if settings.size is None or max(settings.size) > side:
            raise UserError(
                f'this model predicts in windows of {side} x {side} pixels, and is exported for '
                f'one of them; add --size {side}x{side} --probabilities, and run the file with '
                f'--tile {side}'
            )

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        height, width = image.shape[2:]
        x = image / 255
        if self.canvas is not None:
            mean = x.new_tensor(self.model.image_mean)[None, :, None, None]
            padded = mean.repeat(1, 1, *self.canvas)  # zeros for the backbone
            padded[..., :height, :width] = x
            x = padded
        scores = self.model(x)[..., :height, :width]
        if original is not None:
            scores = resize(scores, original[0].tolist())
        if 'labels' in self.output_names:
            return {'labels': scores.argmax(1)}
        return {'probabilities': self.probabilities(scores)}
