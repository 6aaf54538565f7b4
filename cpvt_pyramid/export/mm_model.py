"""What the exportable models of MMDetection and MMSegmentation share.

Shapes: B batch, H x W image in pixels.
"""

from typing import Any, Optional

from torch import Tensor, nn

from ..runner.inference.samples import data_sample
from .base import Batch, Exportable, Preprocessing
from .extent import EachImage


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """What the data preprocessor of a detector or a segmentor does with the pixels of one image."""
    own, marks = model.data_preprocessor, getattr(model.data_preprocessor, 'valid_region', False)
    padding = getattr(own, 'test_cfg', None) or {}  # of MMSegmentation
    divisor = padding.get('size_divisor') or getattr(own, 'pad_size_divisor', 1)
    bgr = not own._channel_conversion  # which turns OpenCV's blue first into red first
    mean, std = [0.0] * 3, [1.0] * 3
    if own._enable_normalize:
        mean, std = (x.flatten().tolist()[:: -1 if bgr else 1] for x in (own.mean, own.std))
    return Preprocessing(mean, std, divisor, bgr, marks)


class MMModel(Exportable):
    """A model of MMDetection or MMSegmentation, with a backbone and perhaps a neck."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(preprocessing_of(model))
        self.model = model

    def maps(self, batch: Batch) -> tuple[tuple[Tensor, ...], EachImage, dict[str, Tensor]]:
        """The maps of the neck, or else of the backbone, with their extents; the context in which a
        head gives each image its own result (`with context: head(maps)`); and the first stages."""
        x, valid = self.preprocess(batch)
        backbone = self.model.backbone
        maps = backbone(x, valid)
        stages = {f'map_{i}': x for i, x in enumerate(maps)}
        context = EachImage([batch.images, *maps], valid, [1, *backbone.strides])
        if self.model.with_neck:
            with context:
                maps = self.model.neck(maps)
        return maps, context, stages

    def test(self, image: Tensor, original: Optional[Tensor] = None) -> Any:
        """The data sample that the original model returns for an image; see `reference`."""
        blue_first = image[0].flip(0)  # as OpenCV reads images
        sample = data_sample(self.task == 'segmentation', tuple(image.shape[2:]))
        if original is not None:
            sample.set_metainfo({'ori_shape': tuple(original[0].tolist())})
        return self.model.test_step({'inputs': [blue_first], 'data_samples': [sample]})[0]
