"""What is registered for MMSegmentation alone."""

from mmengine.registry import MODELS
from mmseg.models.data_preprocessor import SegDataPreProcessor

from .valid_region import AppendsValidity


@MODELS.register_module()
class ValidRegionSegDataPreProcessor(AppendsValidity, SegDataPreProcessor):
    """mmseg's SegDataPreProcessor, with the validity channel that `CPVTPyramid` reads."""
