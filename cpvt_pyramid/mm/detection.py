"""What is registered for MMDetection alone."""

from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmengine.registry import MODELS

from .valid_region import AppendsValidity


@MODELS.register_module()
class ValidRegionDetDataPreprocessor(AppendsValidity, DetDataPreprocessor):
    """mmdet's DetDataPreprocessor, with the validity channel that `CPVTPyramid` reads."""
