"""The second branch of a block, its layer norm, MLP and sum, as one function in inference."""

from typing import Optional

import torch
from torch import Tensor, nn

from ..grid import Grid
from ..layers import DropPath
from ..model import Block
from ..plain_layers import acts_alone, has_hooks
from ..recompute import drops_nothing
from .kernels import fast_norm_mlp, has_kernels, multiplies_tiles
from .norms import FastLayerNorm
from .products import LEAST_RATIO, FusedMLP, OneDNNLinear, fast_dtype, takes_plain


class FusedBlock(Block):
    """A `Block` whose second branch is one function of our own, if all its parts are accelerated.

    Each core computes some tokens at a time, from the layer norm to the sum, whose values stay in
    its cache. It does not wait for the other cores in between.
    """

    stands_for = Block

    def add_mlp(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) is not FusedBlock:  # see `FAST`
            return Block.add_mlp(self, x, grid)
        if torch.is_grad_enabled() or takes_plain(x, LEAST_RATIO * x.shape[-1]):
            return super().add_mlp(x, grid)
        norm, mlp = self.norm2, self.mlp
        if not (has_kernels(x.dtype) and is_plain_norm(norm) and is_plain_mlp(mlp)):
            return super().add_mlp(x, grid)
        if not passes_all(self.drop_path):
            return super().add_mlp(x, grid)
        fc1, fc2 = mlp.fc1, mlp.fc2
        layers = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        if not fit(x, norm, *layers) or fast_dtype(x, norm.weight, norm.bias, *layers) != x.dtype:
            return super().add_mlp(x, grid)
        return fast_norm_mlp(x, norm.weight, norm.bias, norm.eps, *layers)


def is_plain_norm(norm: nn.Module) -> bool:
    """True if a call of an accelerated layer norm does nothing but apply its own parameters."""
    return type(norm) is FastLayerNorm and norm.bias is not None and acts_alone(norm)


def is_plain_mlp(mlp: nn.Module) -> bool:
    """True if a call of an accelerated MLP does nothing but apply its two linear layers."""
    if type(mlp) is not FusedMLP or 'forward' in vars(mlp) or has_hooks(mlp):
        return False
    layers = (mlp.fc1, mlp.fc2)
    return drops_nothing(mlp.drop) and all(
        type(fc) is OneDNNLinear and fc.bias is not None and acts_alone(fc) for fc in layers
    )


def passes_all(drop_path: Optional[nn.Module]) -> bool:
    """True if stochastic depth does nothing."""
    if drop_path is None:
        return True
    if type(drop_path) is not DropPath or 'forward' in vars(drop_path):
        return False
    return not drop_path.training and not has_hooks(drop_path)


def fit(
    x: Tensor, norm: nn.LayerNorm, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> bool:
    """True if the shapes of parameters, which can be changed at any time, fit each other. In
    bfloat16, pairs of values are multiplied, or rows of tiles."""
    channels = x.shape[-1]
    width = len(weight1)
    if x.dtype == torch.bfloat16:
        together = 32 if multiplies_tiles() else 2
        if channels % together or width % together:
            return False
    of_channels = (norm.weight, norm.bias, bias2)
    return (
        norm.normalized_shape == (channels,)
        and all(parameter.shape == (channels,) for parameter in of_channels)
        and weight1.shape == (width, channels)
        and bias1.shape == (width,)
        and weight2.shape == (channels, width)
    )
