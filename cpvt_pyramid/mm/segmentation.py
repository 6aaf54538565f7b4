"""What is registered for MMSegmentation alone."""

from typing import Any

from mmengine.registry import MODELS
from mmseg.models.data_preprocessor import SegDataPreProcessor

from .valid_region import AppendsValidity


@MODELS.register_module()
class ValidRegionSegDataPreProcessor(AppendsValidity, SegDataPreProcessor):
    """mmseg's SegDataPreProcessor, with the validity channel that `CPVTPyramid` reads.

    Args:
        *args: as of `SegDataPreProcessor`.
        valid_region: append the channel where a batch is padded. False: as mmseg's own.
        **options: as of `SegDataPreProcessor`.
    """

    def __init__(self, *args: Any, valid_region: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.valid_region = valid_region
