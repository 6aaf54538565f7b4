"""What the exportable models of MMDetection and MMSegmentation share.

Shapes: B batch, H x W image in pixels.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ...padding.batching import padded_size
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
        self.canvas: Optional[tuple[int, int]] = None  # to which `test` pads images

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
        segments = self.task == 'segmentation'
        blue_first = image[0].flip(0)  # as OpenCV reads images
        sample = data_sample(segments, tuple(image.shape[2:]))
        if original is not None:
            sample.set_metainfo({'ori_shape': tuple(original[0].tolist())})
        images, samples = [blue_first], [sample]
        if self.canvas is not None and not segments:  # MMSegmentation pads to a size by itself
            images.append(torch.zeros(3, *self.canvas))
            samples.append(data_sample(segments, self.canvas))
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'images of different sizes')  # which is meant here
            return self.model.test_step({'inputs': images, 'data_samples': samples})[0]

    @contextmanager
    def on_canvas(self, size: tuple[int, int]) -> Iterator[None]:
        """See the base class."""
        own = self.model.data_preprocessor
        padding = getattr(own, 'test_cfg', None)  # of MMSegmentation
        try:
            self.canvas = size
            if self.task == 'segmentation':
                own.test_cfg = {'size': padded_size(size, self.preprocessing.divisor)}
            yield
        finally:
            self.canvas = None
            if self.task == 'segmentation':
                own.test_cfg = padding
