"""The data preprocessor for MMDetection."""

from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmengine.registry import MODELS

from .backbone import CPVTPyramid, DenseCPVT
from .valid_region import AppendsValidity

__all__ = ['CPVTPyramid', 'DenseCPVT', 'ValidRegionDetDataPreprocessor']


@MODELS.register_module()
class ValidRegionDetDataPreprocessor(AppendsValidity, DetDataPreprocessor):
    """mmdet's DetDataPreprocessor, which marks the padding of a batch for the backbone.

    Padded batches get a further channel, 1 inside an image and 0 in the padding.

    Args:
        mean: one value for each channel of the images; OpenMMLab's own
            takes 1 or 3.
        std: one value for each channel.
        valid_region: append the validity channel to padded batches. False: act as the data
            preprocessor of mmdet.
        **options: see `DetDataPreprocessor`.

    Examples:
        >>> preprocessor = ValidRegionDetDataPreprocessor(mean=[0, 0, 0], std=[255, 255, 255])
        >>> images = [torch.rand(3, 64, 96), torch.rand(3, 50, 70)]
        >>> preprocessor({'inputs': images, 'data_samples': None})['inputs'].shape
        torch.Size([2, 4, 64, 96])
    """
