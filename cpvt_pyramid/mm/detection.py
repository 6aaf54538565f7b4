"""The data preprocessor for MMDetection."""

from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmengine.registry import MODELS

from . import bands  # noqa: F401 (it registers transforms)
from .valid_region import AppendsValidity


@MODELS.register_module()
class ValidRegionDetDataPreprocessor(AppendsValidity, DetDataPreprocessor):
    """mmdet's DetDataPreprocessor, which appends the validity channel to padded batches."""
