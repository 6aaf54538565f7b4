"""The data preprocessor for MMSegmentation."""

from mmengine.registry import MODELS
from mmseg.models.data_preprocessor import SegDataPreProcessor

from .backbone import CPVTPyramid, DenseCPVT
from .valid_region import AppendsValidity

__all__ = ['CPVTPyramid', 'DenseCPVT', 'ValidRegionSegDataPreProcessor']


@MODELS.register_module()
class ValidRegionSegDataPreProcessor(AppendsValidity, SegDataPreProcessor):
    """mmseg's SegDataPreProcessor, which marks the padding of a batch for the backbone.

    Arguments are those of `ValidRegionDetDataPreprocessor`, and `**options` those of mmseg's.

    Examples:
        >>> data_preprocessor = dict(
        ...     type='ValidRegionSegDataPreProcessor',
        ...     mean=[123.675, 116.28, 103.53],
        ...     std=[58.395, 57.12, 57.375],
        ...     bgr_to_rgb=True,
        ...     size_divisor=32,
        ... )
    """
