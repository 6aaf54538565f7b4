"""The data samples of OpenMMLab: those that accompany images, and those with what is predicted."""

from typing import Any, Optional

import numpy as np
from mmengine.structures import BaseDataElement
from torch import Tensor

from ...predictions.kinds import Detections, LabelMap, Prediction


def data_sample(segmentation: bool, size: tuple[int, int], **data: Any) -> BaseDataElement:
    """The data sample of an image that was neither resized nor padded.

    Args:
        segmentation: build one of mmseg instead of mmdet.
        size: height and width of the image.
        **data: data fields, such as `gt_instances`.
    """
    if segmentation:
        from mmseg.structures import SegDataSample as Sample
    else:
        from mmdet.structures import DetDataSample as Sample
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), size)
    return Sample(metainfo={**shapes, 'scale_factor': (1.0, 1.0)}, **data)


def to_prediction(
    sample: BaseDataElement,
    image: np.ndarray,
    meta: dict,
    score_thr: float,
    limit: Optional[int] = None,
) -> Prediction:
    """A data sample of mm, of an image (H, W, 3) RGB, as a prediction that can be drawn and
    written. Boxes with a score below `score_thr` are left out; `limit` is that of `Detections`."""
    common = {'image': image, **meta}
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
        boxes=found.bboxes,
        scores=found.scores,
        labels=found.labels,
        masks=masks,
        limit=limit,
        **common,
    )


def as_map(data: Tensor) -> np.ndarray:
    """(1, H, W), or (H, W) after augmentation, as (H, W)."""
    values = data.cpu().numpy()
    return values.reshape(values.shape[-2:])
