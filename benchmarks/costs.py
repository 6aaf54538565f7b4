"""What models cost: parameters and operations, counted on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cpvt_pyramid.meta import without_values


def meta_model(build: Any, *args: Any, **options: Any) -> nn.Module:
    """What a class or a function builds, in evaluation mode and without values."""
    with without_values():
        return build(*args, **options).eval()


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def count_operations(model: nn.Module, height: int, width: int) -> int:
    """Floating-point operations of a forward pass of one image.

    Those of matrix products and convolutions are counted: a multiplication and an addition are two.
    On the meta device fused attention counts as its two products.

    Args:
        model: a `meta_model`.
        height: of the image, in pixels.
        width: of the image, in pixels.
    """
    image = torch.empty(1, 3, height, width, device='meta')
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return counter.get_total_flops()
