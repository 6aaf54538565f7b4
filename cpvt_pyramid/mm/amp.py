"""bfloat16 for detectors and segmentors, on any device: for training and for predictions.

bfloat16 has 8 bits of precision: box coordinates would move in steps of 8 pixels at 1333. Most of
mmcv's operations, such as RoIAlign, focal loss and deformable convolution, do not take it at all.
Plain `torch.autocast(dtype=torch.bfloat16)`, and with it mmengine's `AmpOptimWrapper`, therefore
fails in many detectors. `bfloat16` limits autocast to the parts that gain most from it.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Optional

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..bfloat16 import corrected_bfloat16

# Names of the modules, or of lists of them, that compute in bfloat16. In the heads of MMDetection's
# detectors these are the layers before the last, which compute scores, boxes and masks.
PARTS = re.compile(
    r'(.*\.)?'
    r'(backbone|neck|decode_head|auxiliary_head'
    r'|rpn_conv|(shared|cls|reg)_(convs|fcs)|mask_head(\.\d+)?\.convs)'
    r'(\.\d+)*'
)


@contextmanager
def bfloat16(model: nn.Module) -> Iterator[None]:
    """Inside this context a model computes in bfloat16, except for boxes, RoIs and losses.

    Backbones, necks, the heads of segmentors, and the layers of detectors' heads before the last
    run in autocast and return float32. Everything else runs in float32: scores, boxes, masks,
    losses, and parts that contain mmcv's operations. A model without such parts runs in autocast
    as a whole.

    Args:
        model: a detector, a segmentor or a classifier, also inside DDP.

    Examples:
        >>> model = CPVTPyramid('pcpvt_nano').eval()
        >>> with bfloat16(model):
        ...     maps = model(torch.rand(1, 3, 64, 64))
    """
    # In a compiled train_step dynamo would delete what it never set. Not decorators: they import
    # dynamo, which sets environment variables, when this file is imported.
    replaced = torch.compiler.disable(replace_forward)(model)
    try:
        yield
    finally:
        torch.compiler.disable(restore_forward)(replaced)


def replace_forward(model: nn.Module) -> list[tuple[nn.Module, Optional[Callable]]]:
    """Run the parts of a model in bfloat16, until `restore_forward`.

    Returns:
        Each part with its own `forward`, or None if it has that of its class.
    """
    parts = [part for name, part in model.named_modules() if PARTS.fullmatch(name)]
    replaced = []
    for part in parts or [model]:
        if not has_mmcv_operations(part):
            replaced.append((part, vars(part).get('forward')))
    device = next(model.parameters()).device.type
    for part, own in replaced:
        if own is None and getattr(part, '_compiled_call_impl', None):
            # The same function every time: torch 2.1 to 2.4 would compile another one again.
            part.forward = MethodType(class_in_bfloat16(type(part).forward, device), part)
        else:
            part.forward = in_bfloat16(part.forward, device)
    return replaced


def has_mmcv_operations(model: nn.Module) -> bool:
    """True if a part of a model is one of mmcv's operations, most of which take no bfloat16."""
    return any(type(part).__module__.startswith('mmcv.ops.') for part in model.modules())


def restore_forward(replaced: list[tuple[nn.Module, Optional[Callable]]]) -> None:
    """Undo `replace_forward`."""
    for part, forward in replaced:
        if forward is None:
            del part.forward
        else:
            part.forward = forward


def in_bfloat16(function: Callable, device: str) -> Callable:
    """The function in autocast, with results in float32."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, torch.bfloat16), corrected_bfloat16(device):
            result = function(*args, **kwargs)
        return tree_map_only(
            Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, result
        )

    return run


class_in_bfloat16 = functools.cache(in_bfloat16)


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Train a model in `bfloat16`, on a CPU or a GPU.

    bfloat16 has the range of float32, so gradients do not vanish and losses need no scaling.
    Arguments are those of mmengine's `OptimWrapper`.

    Examples:
        >>> optim_wrapper = dict(
        ...     type='BFloat16OptimWrapper', optimizer=dict(type='AdamW', lr=1e-4)
        ... )
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), bfloat16(model):
            yield
