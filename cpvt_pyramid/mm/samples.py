"""The data samples that accompany images in OpenMMLab."""

from typing import Any

from mmengine.structures import BaseDataElement


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
