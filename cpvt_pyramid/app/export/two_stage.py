"""Faster R-CNN and Mask R-CNN of MMDetection.

Shapes: B batch, R proposals, K results.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, nn

from ..tooling.command import UserError
from .anchors import by_level, clip
from .base import Batch
from .detectors import Detector, nms_settings
from .nms import best, survives


class TwoStage(Detector):
    """Proposals of the RPN, then boxes and masks of what RoIAlign reads at the proposals.

    There are no candidates to return, because each class has its own boxes.
    """

    def __init__(self, model: nn.Module) -> None:
        head = model.roi_head
        names = 'bbox_roi_extractor', 'mask_roi_extractor'  # the latter only with masks
        extractors = [getattr(head, name) for name in names if hasattr(head, name)]
        layers = [layer for part in extractors for layer in getattr(part, 'roi_layers', ())]
        parts = getattr(model, 'rpn_head', None), head, *extractors, *layers
        kinds = sorted({type(part).__name__ for part in parts})
        known = ['RPNHead', 'RoIAlign', 'SingleRoIExtractor', 'StandardRoIHead']
        if kinds != known:
            raise UserError(
                f'only a detector with {", ".join(known)} can be exported in two stages, '
                f'got {", ".join(kinds)}'
            )
        super().__init__(model)
        self.of_proposals = nms_settings(model.rpn_head.test_cfg)
        self.details['nms'] = nms_settings(head.test_cfg, of_anchors=False)
        self.details['masks'] = 'box' if head.with_mask else None
        if head.with_mask:
            self.task = 'instance'
            self.output_names += ('masks',)

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        levels, stages = self.maps(*self.preprocess(batch))
        predictions = self.model.rpn_head(levels)
        stages |= by_level(*predictions)
        found = self.anchor_boxes(self.model.rpn_head, predictions, batch)
        boxes, scores, _ = (torch.stack(parts, dim=1) for parts in zip(*found))
        proposals, scores, _ = self.survivors(boxes, scores, self.of_proposals)

        boxes, scores, labels = self.results(levels, proposals, scores, batch)
        stages |= {'boxes': boxes, 'scores': scores, 'labels': labels}
        if self.model.roi_head.with_mask:
            stages['masks'] = self.masks(levels, boxes, labels)
        return stages

    def survivors(self, boxes: Tensor, scores: Tensor, nms: dict) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes, scores and labels after non-maximum suppression in each group of boxes
        (B, groups, N, 4) with scores (B, groups, N). The labels are the groups."""
        start = int(nms['class_agnostic'])
        together = boxes.flatten(start, start + 1), scores.flatten(start, start + 1)
        scores = scores * survives(*together, nms['iou_threshold']).view_as(scores)
        labels = torch.arange(scores.shape[1], device=scores.device)[:, None].expand_as(scores)
        count = min(nms['max_per_img'], scores[0].numel())
        return best(scores.flatten(1), boxes.flatten(1, 2), labels.flatten(1), count)[:3]

    def results(
        self, levels: Sequence[Tensor], proposals: Tensor, scores: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes, scores and labels from the maps of the neck and proposals (B, R, 4), with scores
        (B, R) of 0 for those that are unused."""
        head, nms = self.model.roi_head.bbox_head, self.details['nms']
        rois = with_index(proposals)
        features = pool(self.model.roi_head.bbox_roi_extractor, levels, rois)
        logits, deltas = head(features)
        classes = logits.softmax(-1)[:, : head.num_classes].view(*scores.shape, -1)
        classes = classes * ((classes > nms['score_thr']) & (scores > 0)[..., None])

        per_class = deltas.shape[1] // 4
        boxes = rois[:, None, 1:].expand(-1, per_class, -1).flatten(0, 1)
        boxes = head.bbox_coder.decode(boxes, deltas.view(-1, 4))
        boxes = boxes.view(scores.shape[0], -1, 4)  # (B, R * per_class, 4)
        boxes = clip(boxes, batch).view(*scores.shape, per_class, 4)
        boxes = boxes.expand(-1, -1, head.num_classes, -1)
        return self.survivors(boxes.transpose(1, 2), classes.transpose(1, 2), nms)

    def masks(self, levels: Sequence[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        """Probabilities (B, K, h, w) inside the boxes (B, K, 4)."""
        head = self.model.roi_head
        x = pool(head.mask_roi_extractor, levels, with_index(boxes))
        x = head.mask_head(x)  # (B * K, classes, h, w)
        if not head.mask_head.class_agnostic:
            index = labels.flatten().clamp(min=0)[:, None, None, None]
            x = x.gather(1, index.expand(-1, -1, *x.shape[2:]))
        return x[:, 0].sigmoid().unflatten(0, labels.shape)

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        """Masks are those before MMDetection pastes them into the image."""
        if not self.model.roi_head.with_mask:
            return super().reference(image)
        head, logits = self.model.roi_head.mask_head, []
        with head.register_forward_hook(lambda *call: logits.append(call[2])):
            result = super().reference(image)
        if logits:  # there are none without boxes
            labels = result['labels'][0]
            index = 0 if head.class_agnostic else labels
            result['masks'] = logits[0][range(len(labels)), index].sigmoid()[None]
        return result


def pool(extractor: nn.Module, levels: Sequence[Tensor], rois: Tensor) -> Tensor:
    """What RoIAlign reads at each RoI, on the level for its size: (R, C, h, w).

    The number of RoIs of a level is unknown to a graph. So each level reads all of them, but those
    of other levels shrunk to nothing, which takes no time. What it then gives is not used: zeros in
    PyTorch, NaN in OpenVINO. The RoIs (R, 5) are the index of the image and x1 y1 x2 y2.
    """
    from torchvision.ops import roi_align

    chosen = extractor.map_roi_levels(rois, extractor.num_inputs)[:, None]
    index, boxes = rois.split([1, 4], dim=1)
    filled = (boxes[:, 2:] > boxes[:, :2]).all(1, keepdim=True)
    result = torch.zeros((), device=rois.device)
    for i, (layer, x) in enumerate(zip(extractor.roi_layers, levels)):
        here = filled & (chosen == i)
        found = roi_align(
            x,
            torch.cat([index, boxes * here], dim=1),
            layer.output_size,
            layer.spatial_scale,
            layer.sampling_ratio,
            layer.aligned,
        )
        result = torch.where(here[..., None, None], found, result)
    return result


def with_index(boxes: Tensor) -> Tensor:
    """RoIs (B * K, 5), index of the image and x1 y1 x2 y2, from boxes (B, K, 4)."""
    index = torch.arange(boxes.shape[0], device=boxes.device, dtype=boxes.dtype)
    index = index[:, None, None].expand(-1, boxes.shape[1], 1)
    return torch.cat([index, boxes], dim=-1).flatten(0, 1)
