"""Batches of mm's models in which no image is padded by another; see `batching.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mmengine.dataset import pseudo_collate
from mmengine.model import BaseTTAModel, is_model_wrapper
from torch import Tensor, nn

from ...batching import map_in_batches, padded_size


def size_in_batch(model: nn.Module, image: Tensor) -> tuple[int, int]:
    """Height and width to which a model's data preprocessor pads an image (C, H, W) that is alone.

    In a test, segmentors take no batch of images of different sizes, although they may pad them:
    of these it is the size of the image.
    """
    if hasattr(model, 'decode_head'):
        return padded_size(image.shape[-2:], 1)
    return padded_size(image.shape[-2:], getattr(model.data_preprocessor, 'pad_size_divisor', 1))


def divide_batches(model: nn.Module) -> None:
    """Let `test_step` and `val_step` of a model divide each batch by the sizes of its images, in
    place. Results are in the order of the batch."""
    while isinstance(model, BaseTTAModel):  # which passes on a batch for each augmentation
        model = model.module
    if is_model_wrapper(model):  # of several processes
        model = model.module
    model.test_step = partial(step_by_size, model, model.test_step)
    model.val_step = partial(step_by_size, model, model.val_step)


def step_by_size(model: nn.Module, step: Callable[[Any], list], data: Any) -> list:
    """What `divide_batches` replaces a model's steps with."""
    if not isinstance(data, dict) or not isinstance(data.get('inputs'), (list, tuple)):
        return step(data)  # one tensor, whose images have one size
    images = [dict(zip(data, values)) for values in zip(*data.values())]
    results = map_in_batches(
        lambda group: step(pseudo_collate(group)),
        images,
        key=lambda image: size_in_batch(model, image['inputs']),
        batch_size=len(images),
    )
    return list(results)
