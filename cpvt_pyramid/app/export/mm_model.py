"""What the exportable models of MMDetection and MMSegmentation share.

Shapes: B batch, H x W image in pixels.
"""

from collections.abc import Sequence
from typing import Any, Optional

from torch import Tensor, nn

from ..predict.openmmlab.samples import data_sample
from .base import Exportable, Preprocessing

Stages = dict[str, Tensor]  # by name, see `Exportable.stages`


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """What the data preprocessor of a detector or a segmentor does with the pixels of one image."""
    own = model.data_preprocessor
    marks = getattr(own, 'valid_region', False)
    padding = getattr(own, 'test_cfg', None) or {}  # of MMSegmentation
    divisor = padding.get('size_divisor') or getattr(own, 'pad_size_divisor', 1)
    bgr = not own._channel_conversion  # which turns OpenCV's blue first into red first
    mean, std = [0.0] * 3, [1.0] * 3
    if own._enable_normalize:
        mean, std = (x.flatten().tolist()[:: -1 if bgr else 1] for x in (own.mean, own.std))
    return Preprocessing(mean, std, divisor, bgr, marks)


class MMModel(Exportable):
    """A model of MMDetection or MMSegmentation, with a backbone and perhaps a neck.

    As in mm, the neck and the head take padding for image.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(preprocessing_of(model))
        self.model = model
        self.neck = model.neck if model.with_neck else None

    def maps(self, x: Tensor, valid: Optional[Tensor]) -> tuple[Sequence[Tensor], Stages]:
        """The maps of the neck, or else of the backbone, and the first stages, of what `preprocess`
        returns."""
        maps = self.model.backbone(x, valid)
        stages = {f'map_{i}': x for i, x in enumerate(maps)}
        if self.neck is not None:
            maps = self.neck(maps)
        return maps, stages

    def test(self, image: Tensor, original: Optional[Tensor] = None) -> Any:
        """The data sample that the original model returns for an image; see `reference`."""
        blue_first = image[0].flip(0)  # as OpenCV reads images
        sample = data_sample(self.task == 'segmentation', tuple(image.shape[2:]))
        if original is not None:
            sample.set_metainfo({'ori_shape': tuple(original[0].tolist())})
        return self.model.test_step({'inputs': [blue_first], 'data_samples': [sample]})[0]
