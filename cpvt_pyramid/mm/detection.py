"""What is registered for MMDetection alone."""

from typing import Any

from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmengine.model import ImgDataPreprocessor
from mmengine.registry import MODELS

from .valid_region import with_validity


class _StackWithValidity(ImgDataPreprocessor):
    """Comes after DetDataPreprocessor in the order of bases, and so before its augmentations."""

    valid_region = True

    def forward(self, data: dict, training: bool = False) -> dict:
        sizes = [image.shape[-2:] for image in data['inputs']]
        data = super().forward(data, training)
        if self.valid_region:
            data['inputs'] = with_validity(data['inputs'], sizes)
        return data


@MODELS.register_module()
class ValidRegionDetDataPreprocessor(DetDataPreprocessor, _StackWithValidity):
    """mmdet's DetDataPreprocessor, with the validity channel that `CPVTPyramid` reads.

    Args:
        *args: as of `DetDataPreprocessor`.
        valid_region: append the channel where a batch is padded. False: as mmdet's own.
        **options: as of `DetDataPreprocessor`.
    """

    def __init__(self, *args: Any, valid_region: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.valid_region = valid_region
