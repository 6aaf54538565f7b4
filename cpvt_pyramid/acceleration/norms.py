"""Layer norms by a function of our own, in inference."""

from typing import Any

import torch
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..layers import LayerNorm
from .kernels import Norm, fast_layer_norm, has_kernels
from .ordinary import NotPlain, check_plain, fast_dtype, own_parameter

FEW_VALUES = 2**14  # up to these PyTorch's takes as long


class FastLayerNorm(LayerNorm):
    """A `LayerNorm` that takes a third of the time."""

    stands_for = LayerNorm

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if type(self) is not FastLayerNorm:  # see `FAST`
            return LayerNorm.forward(self, x)
        if torch.is_grad_enabled() or is_captured() or x.numel() <= FEW_VALUES:
            return super().forward(x)
        if fast_dtype(x) is None or not has_kernels(x.dtype):
            return super().forward(x)
        try:
            return fast_layer_norm(x, own_norm(self, x.shape[-1], x.dtype))
        except NotPlain:
            return super().forward(x)


def norm_of(layer: Any, channels: int, dtype: torch.dtype) -> Norm:
    """The parameters of a layer norm whose call does nothing but apply them to tokens in a dtype.

    Raises:
        NotPlain: it is another layer.
    """
    check_plain(layer, FastLayerNorm)
    return own_norm(layer, channels, dtype)


def own_norm(layer: nn.LayerNorm, channels: int, dtype: torch.dtype) -> Norm:
    """The parameters of a layer norm of tokens in a dtype.

    Raises:
        NotPlain: they are not its own, or do not fit these tokens.
    """
    weight = own_parameter(layer, 'weight', (channels,), dtype)
    bias = own_parameter(layer, 'bias', (channels,), dtype)
    if layer.normalized_shape != (channels,):
        raise NotPlain
    return Norm(weight, bias, float(layer.eps))
