"""Batches of mm's models in which no image is padded by another; see `padding/batching.py`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mmengine.model import BaseTTAModel, ImgDataPreprocessor, is_model_wrapper
from torch import Tensor, nn

from ....padding.batching import map_in_batches, padded_size


def size_in_batch(model: Any, image: Tensor) -> tuple[int, int]:
    """Height and width to which a model's data preprocessor pads an image (C, H, W) that is alone.

    In a test, segmentors take no batch of images of different sizes, although they may pad them:
    of these it is the size of the image. So it is for data preprocessors of other classes than
    mmengine's and mmdet's, of which it is not known what they pad.
    """
    pads_to_multiples = isinstance(model.data_preprocessor, ImgDataPreprocessor)
    if not pads_to_multiples or hasattr(model, 'decode_head'):
        return padded_size(image.shape[-2:], 1)
    return padded_size(image.shape[-2:], model.data_preprocessor.pad_size_divisor)


def divide_batches(model: Any) -> None:
    """Let `test_step` and `val_step` of a model divide each batch by the sizes of its images, in
    place. Results are in the order of the batch."""
    # A model for augmentation passes on a batch for each of them; others wrap it for several
    # processes.
    while isinstance(model, BaseTTAModel) or is_model_wrapper(model):
        model = model.module
    model.test_step = partial(step_by_size, model, model.test_step)
    model.val_step = partial(step_by_size, model, model.val_step)


def step_by_size(model: nn.Module, step: Callable[[Any], list], data: Any) -> list:
    """What `divide_batches` replaces a model's steps with."""
    if not isinstance(data, dict) or not isinstance(data.get('inputs'), (list, tuple)):
        return step(data)  # one tensor, whose images have one size
    sizes = [size_in_batch(model, image) for image in data['inputs']]
    count = len(sizes)

    def results(indices: list[int]) -> list:
        return step(data if len(indices) == count else part_of_batch(data, indices))

    return list(map_in_batches(results, range(count), sizes.__getitem__, batch_size=count))


def part_of_batch(data: dict[str, Any], indices: Sequence[int]) -> dict[str, list]:
    """Some images of a batch, with what else the data loader gives of each."""
    count = len(data['inputs'])
    for name, values in data.items():
        if not isinstance(values, (list, tuple)) or len(values) != count:
            raise ValueError(
                f'a batch of images of several sizes needs a list of {count} values as its '
                f'{name}, one for each image, got {values!r:.80}; set the batch_size of the '
                'dataloader to 1'
            )
    return {name: [values[i] for i in indices] for name, values in data.items()}
