"""Layer norms by a function of our own, in inference."""

import torch
from torch import Tensor

from ..bfloat16 import is_captured
from ..layers import LayerNorm
from .kernels import fast_layer_norm, has_kernels
from .products import fast_dtype

FEW_VALUES = 2**14  # up to these PyTorch's takes as long


class FastLayerNorm(LayerNorm):
    """A `LayerNorm` that takes a third of the time."""

    stands_for = LayerNorm

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if type(self) is not FastLayerNorm:  # see `FAST`
            return LayerNorm.forward(self, x)
        if torch.is_grad_enabled() or is_captured() or x.numel() <= FEW_VALUES:
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if weight is None or bias is None:
            return super().forward(x)
        if not x.shape[-1:] == weight.shape == bias.shape == self.normalized_shape:
            return super().forward(x)  # an error of PyTorch's; our function checks nothing
        if fast_dtype(x, weight, bias) is None or not has_kernels(x.dtype):
            return super().forward(x)
        return fast_layer_norm(x, weight, bias, self.eps)
