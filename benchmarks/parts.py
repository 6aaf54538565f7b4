"""Our accelerated models without a part of acceleration, for speed.py.

A part is left out by what is changed for a whole process: such a model needs a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from torch import nn

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import kernels
from cpvt_pyramid.acceleration.accelerate import restore
from cpvt_pyramid.acceleration.attention import AttentionInParts
from cpvt_pyramid.acceleration.conv_mlp import FusedConvMLP
from cpvt_pyramid.acceleration.patches import PatchConv
from cpvt_pyramid.acceleration.products import FusedMLP, OneDNNLinear

PRODUCTS = (OneDNNLinear, FusedMLP, FusedConvMLP, PatchConv)


def without_products(model: nn.Module) -> None:
    """Accelerate a model, but for its linear layers, MLPs and patches."""
    accelerate(model)
    for module in model.modules():
        if isinstance(module, PRODUCTS):
            restore(module)


def without_kernels(model: nn.Module) -> None:
    """Accelerate a model as on a machine that has no functions of kernels.cpp."""
    mock.patch.object(kernels, 'library', return_value=None).start()
    accelerate(model)


def without_attention(model: nn.Module) -> None:
    """Accelerate a model, but for its attention; the products before and after it stay."""
    accelerate(model)
    for module in model.modules():
        if isinstance(module, AttentionInParts):
            restore(module)


# The functions that accelerate a model without a part.
PARTS: dict[str, Callable[[nn.Module], None]] = {
    'products': without_products,
    'kernels': without_kernels,
    'attention': without_attention,
}
