"""bfloat16 for detectors and segmentors, on any device: for training and for predictions.

bfloat16 has 8 bits of precision: box coordinates would move in steps of 8 pixels at 1333. Most of
mmcv's operations, such as RoIAlign, focal loss and deformable convolution, do not take it at all.
Plain `torch.autocast(dtype=torch.bfloat16)`, and with it mmengine's `AmpOptimWrapper`, therefore
fails in many detectors. `bfloat16` limits autocast to the parts that gain most from it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import Tensor, nn

# Names of the modules, or of lists of them, that compute in bfloat16.
PARTS = re.compile(r'(.*\.)?(backbone|neck|decode_head|auxiliary_head)(\.\d+)?')


@contextmanager
def bfloat16(model: nn.Module) -> Iterator[None]:
    """Inside this context a model computes in bfloat16, except for boxes, RoIs and losses.

    Backbones, necks and the heads of segmentors run in autocast and return float32. Everything
    else runs in float32: the heads of detectors, losses, and parts that contain mmcv's operations.
    A model without such parts runs in autocast as a whole.

    Args:
        model: a detector, a segmentor or a classifier, also inside DDP.
    """
    parts = [part for name, part in model.named_modules() if PARTS.fullmatch(name)] or [model]
    replaced = [(part, dict(vars(part))) for part in parts if not uses_mmcv_operations(part)]
    device = next(model.parameters()).device.type
    for part, _ in replaced:
        part.forward = in_bfloat16(part.forward, device)
    try:
        yield
    finally:
        for part, attributes in replaced:
            if 'forward' in attributes:  # a compiled or checkpointed one
                part.forward = attributes['forward']
            else:
                del part.forward


def uses_mmcv_operations(part: nn.Module) -> bool:
    return any(type(module).__module__.startswith('mmcv.ops.') for module in part.modules())


def in_bfloat16(function: Callable, device: str) -> Callable:
    """The function in autocast, with results in float32."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            result = function(*args, **kwargs)
        return as_float32(result)

    return run


def as_float32(value: Any) -> Any:
    """Tensors of bfloat16, also inside tuples, lists and dicts, as float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if isinstance(value, dict):
        return {key: as_float32(x) for key, x in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(as_float32(x) for x in value)
    return value


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Train a model in `bfloat16`, on a CPU or a GPU.

    bfloat16 has the range of float32, so gradients do not vanish and losses need no scaling.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), bfloat16(model):
            yield
