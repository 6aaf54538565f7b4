"""The second branch of a block, its layer norm and MLP, as one function in inference, with both
sums."""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..bfloat16 import is_captured
from ..grid import Grid
from ..model import Block
from ..plain_layers import acts_alone, has_hooks
from ..recompute import drops_nothing
from .conv_mlp import FEWEST_ROWS, FusedConvMLP, is_plain_depthwise
from .kernels import Linear, NormAndMLP, fast_conv_mlp, fast_mlp, has_products
from .normed import plain_norm
from .norms import FastLayerNorm
from .processor import has_avx512
from .products import (
    LEAST_RATIO,
    FusedMLP,
    OneDNNLinear,
    cast,
    fast_dtype,
    is_ordinary,
    takes_plain,
)

# For fewer tokens, to pack the weights takes longer than is gained (512 channels, Intel with AMX;
# Zen 3 with AVX2, which takes longer for each token).
FEWEST_TOKENS = 512 if has_avx512() else 256


class FusedBlock(Block):
    """A `Block` whose second branch is one function of our own, if all its parts are accelerated.

    Each core computes some tokens at a time, from the first sum to the last, whose values stay in
    its cache. It does not wait for the other cores in between.
    """

    stands_for = Block

    def add(self, x: Tensor, attended: Tensor, grid: Grid) -> Tensor:
        if type(self) is not FusedBlock:  # see `FAST`
            return Block.add(self, x, attended, grid)
        if torch.is_grad_enabled() or is_captured():
            return super().add(x, attended, grid)
        if takes_plain(x, LEAST_RATIO * x.shape[-1]):
            return super().add(x, attended, grid)
        found = self.plain_parameters()
        if found is None or not takes_kernels(x, attended, found):
            return super().add(x, attended, grid)
        weight1, bias1, weight2, bias2, kernel, kernel_bias = cast(x.dtype, *found[2:])
        eps = float(self.norm2.eps)
        fc1, fc2 = Linear(weight1, bias1), Linear(weight2, bias2)
        layers = NormAndMLP(found.norm_weight, found.norm_bias, eps, fc1, fc2)
        if kernel is None:
            return fast_mlp(x, attended, layers)
        outside = None if grid.padding is None else grid.padding.outside
        relu = bool(self.mlp.relu)
        return fast_conv_mlp(x, attended, layers, kernel, kernel_bias, relu, outside)

    def normed_mlp(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) is not FusedBlock:  # see `FAST`
            return Block.normed_mlp(self, x, grid)
        if not torch.is_grad_enabled() or is_captured():
            return super().normed_mlp(x, grid)
        norm = plain_norm(self.norm2)
        mlp: Any = self.mlp
        if type(mlp) in (FusedMLP, FusedConvMLP) and 'forward' not in vars(mlp):
            if norm is not None and not has_hooks(mlp):
                layers = mlp.fast_layers(x, grid, norm)
                if layers is not None:
                    return mlp.compute(x, grid, norm, layers)
        return super().normed_mlp(x, grid)

    def plain_parameters(self) -> Optional['Parameters']:
        """The parameters of the second branch, if calls of all its parts do nothing but apply them.
        Else None."""
        norm: Any = self.norm2
        mlp: Any = self.mlp
        if type(mlp) not in (FusedMLP, FusedConvMLP) or 'forward' in vars(mlp) or has_hooks(mlp):
            return None
        if not (drops_nothing(mlp.drop) and drops_nothing(self.drop_path)):
            return None
        found: list[Any] = []
        for layer, kind in (norm, FastLayerNorm), (mlp.fc1, OneDNNLinear), (mlp.fc2, OneDNNLinear):
            if type(layer) is not kind or not acts_alone(layer) or layer.bias is None:
                return None
            found += [layer.weight, layer.bias]
        if norm.normalized_shape != norm.weight.shape:
            return None
        if type(mlp) is FusedConvMLP:
            conv = mlp.dwconv
            if not is_plain_depthwise(conv) or conv.bias is None:
                return None
            found += [conv.weight, conv.bias]
        return Parameters(*found)


class Parameters(NamedTuple):
    """Weights and biases of the norm, both linear layers and, if there is one, the convolution."""

    norm_weight: Tensor
    norm_bias: Tensor
    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor
    kernel: Optional[Tensor] = None
    kernel_bias: Optional[Tensor] = None


def takes_kernels(x: Tensor, attended: Tensor, parameters: Parameters) -> bool:
    """True if our own functions compute a branch, and do so faster, of tokens (B, ..., C), with
    parameters of any dtypes and shapes."""
    channels = x.shape[-1]
    if x.numel() < FEWEST_TOKENS * channels:
        return False
    has_conv = parameters.kernel is not None
    if has_conv and x.dim() != 4:
        return False  # an error of PyTorch's; our function checks nothing
    if has_conv and len(x) * x.shape[1] < FEWEST_ROWS * torch.get_num_threads():
        return False  # each core computes two more rows of the wide map
    if attended.shape != x.shape or attended.dtype != x.dtype or not is_ordinary(attended):
        return False
    if fast_dtype(x, *parameters) != x.dtype:
        return False
    if not has_products(x.dtype, *parameters.weight1.shape):
        return False
    return fit(parameters, channels)


def fit(parameters: Parameters, channels: int) -> bool:
    """True if parameters have the shapes of a branch of tokens with these channels."""
    width = len(parameters.weight1)
    shapes = (
        (channels,),
        (channels,),
        (width, channels),
        (width,),
        (channels, width),
        (channels,),
        (width, 1, 3, 3),
        (width,),
    )
    return all([p is None or tuple(p.shape) == shape for p, shape in zip(parameters, shapes)])
