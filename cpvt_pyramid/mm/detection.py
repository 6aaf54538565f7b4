"""What is registered for MMDetection alone."""

from typing import Any

from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmengine.registry import MODELS

from .valid_region import AppendsValidity


@MODELS.register_module()
class ValidRegionDetDataPreprocessor(AppendsValidity, DetDataPreprocessor):
    """mmdet's DetDataPreprocessor, with the validity channel that `CPVTPyramid` reads.

    Args:
        *args: as of `DetDataPreprocessor`.
        valid_region: append the channel where a batch is padded. False: as mmdet's own.
        **options: as of `DetDataPreprocessor`.
    """

    def __init__(self, *args: Any, valid_region: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.valid_region = valid_region
