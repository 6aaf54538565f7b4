"""The second branch of a block, its layer norm and MLP, as one function in inference, with both
sums."""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..grid import Grid
from ..layers import DropPath
from ..model import Block
from ..plain_layers import acts_alone, has_hooks
from ..recompute import drops_nothing
from .conv_mlp import FEWEST_ROWS, FusedConvMLP, is_plain_depthwise
from .kernels import NormAndMLP, fast_conv_mlp, fast_mlp, has_products
from .norms import FastLayerNorm
from .products import (
    LEAST_RATIO,
    FusedMLP,
    OneDNNLinear,
    cast,
    fast_dtype,
    is_ordinary,
    takes_plain,
)

# For fewer tokens, to pack the weights takes longer than is gained (512 channels, Intel with AMX).
FEWEST_TOKENS = 512


class FusedBlock(Block):
    """A `Block` whose second branch is one function of our own, if all its parts are accelerated.

    Each core computes some tokens at a time, from the first sum to the last, whose values stay in
    its cache. It does not wait for the other cores in between.
    """

    stands_for = Block

    def add(self, x: Tensor, attended: Tensor, grid: Grid) -> Tensor:
        if type(self) is not FusedBlock:  # see `FAST`
            return Block.add(self, x, attended, grid)
        if torch.is_grad_enabled() or takes_plain(x, LEAST_RATIO * x.shape[-1]):
            return super().add(x, attended, grid)
        parameters = self.plain_parameters()
        if parameters is None or not takes_kernels(x, attended, parameters):
            return super().add(x, attended, grid)
        norm_weight, norm_bias, *others = parameters
        *linear, kernel, kernel_bias = cast(x.dtype, *others)
        layers = NormAndMLP(norm_weight, norm_bias, float(self.norm2.eps), *linear)
        if kernel is None:
            return fast_mlp(x, attended, layers)
        outside = None if grid.padding is None else grid.padding.outside
        relu = bool(self.mlp.relu)
        return fast_conv_mlp(x, attended, layers, kernel, kernel_bias, relu, outside)

    def plain_parameters(self) -> Optional[list[Any]]:
        """Weights and biases of the norm, the first, the second linear layer and the convolution,
        or None for the last two, if calls of all parts do nothing but apply them. Else None."""
        norm: Any = self.norm2
        mlp: Any = self.mlp
        if type(mlp) not in (FusedMLP, FusedConvMLP) or 'forward' in vars(mlp) or has_hooks(mlp):
            return None
        if not drops_nothing(mlp.drop) or not passes_all(self.drop_path):
            return None
        layers: list[Any] = [
            (norm, FastLayerNorm),
            (mlp.fc1, OneDNNLinear),
            (mlp.fc2, OneDNNLinear),
        ]
        if type(mlp) is FusedConvMLP:
            if not is_plain_depthwise(mlp.dwconv):
                return None
            layers.append((mlp.dwconv, nn.Conv2d))
        parameters = []
        for layer, kind in layers:
            if type(layer) is not kind or not acts_alone(layer) or layer.bias is None:
                return None
            parameters += [layer.weight, layer.bias]
        if norm.normalized_shape != norm.weight.shape:
            return None
        return parameters if len(parameters) == 8 else [*parameters, None, None]


def takes_kernels(x: Tensor, attended: Tensor, parameters: list[Any]) -> bool:
    """True if our own functions compute a branch, and do so faster, of tokens (B, ..., C), with
    `plain_parameters` of any dtypes and shapes."""
    channels = x.shape[-1]
    if x.numel() < FEWEST_TOKENS * channels:
        return False
    weight1, kernel = parameters[2], parameters[6]
    if kernel is not None:
        if x.dim() != 4:
            return False  # an error of PyTorch's; our function checks nothing
        if len(x) * x.shape[1] < FEWEST_ROWS * torch.get_num_threads():
            return False  # each core computes two more rows of the wide map
    if attended.shape != x.shape or attended.dtype != x.dtype or not is_ordinary(attended):
        return False
    if fast_dtype(x, *parameters) != x.dtype or not has_products(x.dtype, *weight1.shape):
        return False
    width = len(weight1)
    of_wide = (width,)
    of_narrow = (channels,)
    shapes = [of_narrow, of_narrow, (width, channels), of_wide, (channels, width), of_narrow]
    if kernel is not None:
        shapes += [(width, 1, 3, 3), of_wide]
    return all([tuple(each.shape) == shape for each, shape in zip(parameters, shapes)])


def passes_all(drop_path: Optional[nn.Module]) -> bool:
    """True if stochastic depth does nothing."""
    if drop_path is None:
        return True
    if type(drop_path) is not DropPath or 'forward' in vars(drop_path):
        return False
    return not drop_path.training and not has_hooks(drop_path)
