"""Detectors of MMDetection.

Shapes: B batch, H x W image in pixels, N candidates, K results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..ops import ceil_div
from ..regions import Region
from ..runner.inference.samples import data_sample
from ..tooling.command import UserError
from .base import Exportable, Preprocessing
from .extent import EachImage
from .nms import batched_nms, best, take, top

DENSE_HEADS = ('rpn_head', 'bbox_head')


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """What the data preprocessor of a detector or a segmentor does with the pixels of one image."""
    own = model.data_preprocessor
    divisor, marks = getattr(own, 'pad_size_divisor', 1), getattr(own, 'valid_region', False)
    bgr = not own._channel_conversion  # which turns OpenCV's blue first into red first
    if not own._enable_normalize:
        return Preprocessing((0.0,) * 3, (1.0,) * 3, divisor, bgr, marks)
    mean, std = (
        [float(v) for v in values.flatten()][:: -1 if bgr else 1] for values in (own.mean, own.std)
    )
    return Preprocessing(mean, std, divisor, bgr, marks)


class Detector(Exportable):
    """What the detectors share: the backbone, the neck, and MMDetection's own result.

    A subclass defines `stages`, whose outputs are 'boxes', 'scores' and 'labels' (see `results`),
    with `raw` 'boxes' and 'scores' alone; an instance segmentor has 'masks' besides.

    Args:
        model: of MMDetection.
        raw: return the candidates before non-maximum suppression.
    """

    task = 'detection'

    def __init__(self, model: nn.Module, raw: bool = False) -> None:
        super().__init__(preprocessing_of(model))
        self.model = model
        self.raw = raw
        self.output_names = ('boxes', 'scores') if raw else ('boxes', 'scores', 'labels')

    def maps(
        self, images: Tensor, valid: Optional[Tensor]
    ) -> tuple[tuple[Tensor, ...], EachImage, dict[str, Tensor]]:
        """The maps of the backbone.

        Returns:
            The maps, with their extents; the context in which the neck and the head give each
            image its own result (`with context: model.neck(maps)`); and the first stages.
        """
        x, valid = self.preprocess(images, valid)
        backbone = self.model.backbone
        maps = backbone(x, valid)
        context = EachImage(maps, valid, backbone.strides)
        return maps, context, {f'map_{i}': x for i, x in enumerate(maps)}

    def reference(self, image: Tensor) -> dict[str, Tensor]:
        """MMDetection's result for one image alone, in no more rows than there are boxes; none if
        `raw`, so that the verification compares the candidates with those of `stages`."""
        if self.raw:  # MMDetection does not return its candidates
            return {}
        blue_first = image[0].flip(0)  # as OpenCV reads images
        data = {
            'inputs': [blue_first],
            'data_samples': [data_sample(False, tuple(image.shape[2:]))],
        }
        found = self.model.test_step(data)[0].pred_instances
        found = found[found.scores.argsort(descending=True)]
        result = {'boxes': found.bboxes, 'scores': found.scores, 'labels': found.labels}
        if 'masks' in found:
            result['masks'] = found.masks
        return {name: x[None] for name, x in result.items()}

    @contextmanager
    def with_noise(self, share: float, random: torch.Generator) -> Iterator[None]:
        """See the base class. The maps are constant in the padding, where all cells have equal
        scores: noise in what the dense heads predict puts them in another order."""

        def disturb(x: Tensor) -> Tensor:
            return x + share * x.abs().max() * torch.randn(x.shape, generator=random)

        def hook(module: nn.Module, args: tuple, predictions: tuple) -> tuple:
            return tree_map_only(Tensor, disturb, predictions)

        parts = self.model.named_children()
        hooks = [x.register_forward_hook(hook) for name, x in parts if name in DENSE_HEADS]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()


class RetinaNet(Detector):
    """Boxes from anchors on every cell, best first on each level, then non-maximum suppression.

    Cells in the padding have no boxes, but for those that an image alone has in the padding to a
    multiple of the divisor: MMDetection keeps these.
    """

    def __init__(self, model: nn.Module, raw: bool = False) -> None:
        super().__init__(model, raw)
        self.settings = settings = model.test_cfg
        self.details['nms'] = None if raw else nms_settings(settings)
        if not raw and settings.get('nms_pre', -1) < 1:
            raise UserError('test_cfg.nms_pre must be at least 1; set it, or export with --raw')

    def stages(self, images: Tensor, valid: Optional[Tensor]) -> dict[str, Tensor]:
        maps, context, stages = self.maps(images, valid)
        head = self.model.bbox_head
        with context:
            logits, deltas = head(self.model.neck(maps))
        for i, levels in enumerate(zip(logits, deltas)):
            stages[f'logits_{i}'], stages[f'deltas_{i}'] = levels
        anchors = head.prior_generator.grid_priors(
            [x.shape[2:] for x in logits], dtype=torch.float32, device=images.device
        )
        strides = [stride for stride, _ in head.prior_generator.strides]
        scores = [
            self.level_scores(x, valid, stride) for x, stride in zip(logits, strides)
        ]  # (B, N, classes)
        deltas = [x.float().permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4) for x in deltas]
        anchors = [x.expand(images.shape[0], -1, -1) for x in anchors]
        if self.raw:
            boxes = self.decode(torch.cat(anchors, 1), torch.cat(deltas, 1))
            return stages | {'boxes': clip(boxes, images, valid), 'scores': torch.cat(scores, 1)}

        chosen = [self.candidates(*level) for level in zip(scores, deltas, anchors)]
        scores, labels, deltas, anchors = (torch.cat(parts, dim=1) for parts in zip(*chosen))
        boxes = clip(self.decode(anchors, deltas), images, valid)
        smallest = self.settings.get('min_bbox_size', -1)
        if smallest >= 0:
            sides = boxes[..., 2:] - boxes[..., :2]
            scores = scores * (sides > smallest).all(-1)
        nms = self.details['nms']
        scores = batched_nms(boxes, scores, labels, nms['iou_threshold'], nms['class_agnostic'])
        boxes, scores, labels, _ = best(scores, boxes, labels, self.settings['max_per_img'])
        return stages | {'boxes': boxes, 'scores': scores, 'labels': labels}

    def level_scores(self, logits: Tensor, valid: Optional[Tensor], stride: int) -> Tensor:
        """(B, N, classes) of one level, from (B, anchors * classes, h, w)."""
        head = self.model.bbox_head
        x = logits.float().permute(0, 2, 3, 1)
        x = x.reshape(*x.shape[:3], -1, head.cls_out_channels)  # (B, h, w, anchors, classes)
        x = x.sigmoid() if head.use_sigmoid_cls else x.softmax(-1)[..., :-1]
        if valid is not None:
            divisor = self.preprocessing.divisor
            alone = ceil_div(ceil_div(valid, divisor) * divisor, stride)
            outside = Region(alone).at_stride(1).outside(logits.shape[2:])
            x = x * ~outside.permute(0, 2, 3, 1)[..., None]
        return x.flatten(1, 3)

    def candidates(
        self, scores: Tensor, deltas: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores, labels, deltas and anchors of the best of a level."""
        classes = scores.shape[2]
        scores = scores * (scores > self.settings.get('score_thr', 0))
        scores, index = top(scores.flatten(1), self.settings['nms_pre'])
        labels, index = index % classes, index // classes
        return scores, labels, take(deltas, index), take(anchors, index)

    def decode(self, anchors: Tensor, deltas: Tensor) -> Tensor:
        """Boxes (B, N, 4) in pixels."""
        coder = self.model.bbox_head.bbox_coder
        return coder.decode(anchors.flatten(0, 1), deltas.flatten(0, 1)).view_as(anchors)


def nms_settings(settings: dict) -> dict:
    """The settings of non-maximum suppression, for the graph and the metadata.

    Args:
        settings: `test_cfg` of a detector.
    """
    nms = dict(settings['nms'])
    kind = nms.pop('type', 'nms')
    result = {
        'score_thr': settings.get('score_thr', 0),
        'iou_threshold': nms.pop('iou_threshold'),
        'class_agnostic': nms.pop('class_agnostic', False),
        'max_per_img': settings['max_per_img'],
    }
    nms.pop('split_thr', None)  # only bounds memory
    if kind != 'nms' or nms:
        raise UserError(
            f'only plain NMS can be exported, not test_cfg.nms={dict(settings["nms"])}; change it, '
            'or export with --raw'
        )
    return result


def clip(boxes: Tensor, images: Tensor, valid: Optional[Tensor]) -> Tensor:
    """Boxes (B, N, 4) within the true extent of each image.

    Args:
        boxes: x1 y1 x2 y2 in pixels.
        images: (B, 3, H, W).
        valid: (B, 2), true height and width of each image; None: H and W.
    """
    x, y = boxes[..., 0::2].clamp(min=0), boxes[..., 1::2].clamp(min=0)
    if valid is None:
        x, y = x.clamp(max=images.shape[3]), y.clamp(max=images.shape[2])
    else:
        limits = valid.to(boxes.dtype)[:, None, None]  # (B, 1, 1, 2)
        x, y = x.minimum(limits[..., 1]), y.minimum(limits[..., 0])
    return torch.stack([x, y], dim=-1).flatten(2)
