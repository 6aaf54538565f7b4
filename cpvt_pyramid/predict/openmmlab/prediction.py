"""Data samples of mm as predictions, which are drawn and written."""

import numpy as np
from mmengine.config import Config
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from ..predictions import Detections, Kind, LabelMap, Prediction, Segments

INSTANCE_OFFSET = 1000  # mmdet: the id of a panoptic segment is its class + 1000 * its instance


def to_prediction(
    sample: BaseDataElement, image: np.ndarray, meta: dict, score_thr: float
) -> Prediction:
    """A data sample of mm, of an image (H, W, 3) RGB, as a prediction that can be drawn and
    written. Boxes with a score below `score_thr` are left out."""
    common = {'image': image, **meta}
    if 'pred_panoptic_seg' in sample:
        ids = as_map(sample.pred_panoptic_seg.sem_seg)
        present = [i for i in np.unique(ids) if i % INSTANCE_OFFSET < len(meta['classes'])]
        numbers = np.zeros(ids.shape, np.int32)
        for number, mmdet_id in enumerate(present, 1):
            numbers[ids == mmdet_id] = number
        labels = np.array(present, int) % INSTANCE_OFFSET
        return Segments(numbers=numbers, labels=labels, **common)
    if 'pred_sem_seg' in sample:
        labels = as_map(sample.pred_sem_seg.data)
        dtype = np.uint8 if labels.max() < 256 else np.int32  # an eighth or half of the memory
        return LabelMap(labels=labels.astype(dtype), **common)
    found = sample.pred_instances
    found = found[found.scores >= score_thr].cpu().numpy()
    found = found[np.argsort(-found.scores, kind='stable')]
    # Mask2Former's masks are floats
    masks = found.masks.astype(bool) if 'masks' in found else None
    return Detections(
        boxes=found.bboxes, scores=found.scores, labels=found.labels, masks=masks, **common
    )


def as_map(data: Tensor) -> np.ndarray:
    """(1, H, W), or (H, W) after augmentation, as (H, W)."""
    values = data.cpu().numpy()
    return values.reshape(values.shape[-2:])


def is_panoptic(model: nn.Module) -> bool:
    """Whether a detector predicts panoptic segments. Mask2Former can be one and still not do so."""
    settings = getattr(model, 'test_cfg', None) or {}
    return hasattr(model, 'panoptic_fusion_head') and settings.get('panoptic_on', True)


def kind_of_results(model: nn.Module, cfg: Config) -> Kind:
    """What a model's results are, as in the names of their files."""
    if cfg.default_scope == 'mmseg':
        return 'labels'
    return 'segments' if is_panoptic(model) else 'detections'
