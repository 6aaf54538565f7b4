"""The data samples that accompany images in mm."""

from typing import Any

from mmengine.structures import BaseDataElement


def data_sample(segmentation: bool, size: tuple[int, int], **data: Any) -> BaseDataElement:
    """A data sample of mmseg (`segmentation`) or mmdet for an image of a (height, width) that was
    neither resized nor padded, with data fields such as `gt_instances`."""
    if segmentation:
        from mmseg.structures import SegDataSample as Sample
    else:
        from mmdet.structures import DetDataSample as Sample
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), size)
    return Sample(metainfo={**shapes, 'scale_factor': (1.0, 1.0)}, **data)
