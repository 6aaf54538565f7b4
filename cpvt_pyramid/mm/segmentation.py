"""The data preprocessor for MMSegmentation."""

from mmengine.registry import MODELS
from mmseg.models.data_preprocessor import SegDataPreProcessor

from . import bands  # noqa: F401 (it registers transforms)
from .valid_region import AppendsValidity


@MODELS.register_module()
class ValidRegionSegDataPreProcessor(AppendsValidity, SegDataPreProcessor):
    """mmseg's SegDataPreProcessor, which appends the validity channel to padded batches."""
