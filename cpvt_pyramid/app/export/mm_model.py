"""What MMDetection's and MMSegmentation's own models do with an image.

Shapes: H x W image in pixels.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor

from ...padding.batching import padded_size
from ..predict.openmmlab.samples import data_sample
from .base import Preprocessing
from .whole_model import WholeModel


def preprocessing_of(model: Any) -> Preprocessing:
    """What the data preprocessor of a detector or a segmentor does with the pixels of one image."""
    own = model.data_preprocessor
    marks = getattr(own, 'valid_region', False)
    divisor = getattr(own, 'pad_size_divisor', 1)  # of MMDetection
    padding = getattr(own, 'test_cfg', None) or {}  # of MMSegmentation
    if padding.get('size_divisor'):
        divisor = padding['size_divisor']
    bgr = not own._channel_conversion  # which turns OpenCV's blue first into red first
    mean, std = [0.0] * 3, [1.0] * 3
    if own._enable_normalize:
        mean, std = (x.flatten().tolist()[:: -1 if bgr else 1] for x in (own.mean, own.std))
    return Preprocessing(mean, std, divisor, bgr, marks)


def original_result(graph: WholeModel, image: Tensor, original: Optional[Tensor] = None) -> Any:
    """The data sample that the original model returns for an image; see `Exportable.reference`."""
    segments = graph.task == 'segmentation'
    blue_first = image[0].flip(0)  # as OpenCV reads images
    height, width = image.shape[2:]
    sample = data_sample(segments, (height, width))
    if original is not None:
        sample.set_metainfo({'ori_shape': tuple(original[0].tolist())})
    images, samples = [blue_first], [sample]
    if graph.canvas is not None and not segments:
        images.append(torch.zeros(3, *graph.canvas))
        samples.append(data_sample(segments, graph.canvas))
    with warnings.catch_warnings(), padded_to_canvas(graph):
        warnings.filterwarnings('ignore', 'images of different sizes')  # which is meant here
        return graph.model.test_step({'inputs': images, 'data_samples': samples})[0]


@contextmanager
def padded_to_canvas(graph: WholeModel) -> Iterator[None]:
    """Inside, a segmentor pads images to the canvas, if there is one."""
    if graph.canvas is None or graph.task != 'segmentation':
        yield
        return
    own = graph.model.data_preprocessor
    padding = own.test_cfg
    try:
        own.test_cfg = {'size': padded_size(graph.canvas, graph.preprocessing.divisor)}
        yield
    finally:
        own.test_cfg = padding
