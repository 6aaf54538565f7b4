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
from .products import LEAST_RATIO, FusedMLP, OneDNNLinear, fast_dtype, takes_plain

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
        if torch.is_grad_enabled() or not self.takes_kernels(x, attended):
            return super().add(x, attended, grid)
        norm: Any = self.norm2
        mlp: Any = self.mlp
        layers = NormAndMLP(
            norm.weight,
            norm.bias,
            norm.eps,
            mlp.fc1.weight,
            mlp.fc1.bias,
            mlp.fc2.weight,
            mlp.fc2.bias,
        )
        if type(mlp) is FusedMLP:
            return fast_mlp(x, attended, layers)
        conv = mlp.dwconv
        outside = None if grid.padding is None else grid.padding.outside
        return fast_conv_mlp(x, attended, layers, conv.weight, conv.bias, mlp.relu, outside)

    def takes_kernels(self, x: Tensor, attended: Tensor) -> bool:
        """True if our own functions compute what the parts of this block would compute."""
        if takes_plain(x, LEAST_RATIO * x.shape[-1]) or x.numel() < FEWEST_TOKENS * x.shape[-1]:
            return False
        norm: Any = self.norm2
        mlp: Any = self.mlp
        if not (is_plain_norm(norm) and is_plain_mlp(mlp)):
            return False
        if not has_products(x.dtype, *mlp.fc1.weight.shape):
            return False
        if type(mlp) is FusedConvMLP and not has_rows(x):
            return False
        if not passes_all(self.drop_path) or attended.shape != x.shape:
            return False
        layers = [norm, mlp.fc1, mlp.fc2]
        if type(mlp) is FusedConvMLP:
            layers.append(mlp.dwconv)
        parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
        if not fast_dtype(x, *parameters) == fast_dtype(attended) == x.dtype:
            return False
        return fit(x, norm, mlp)


def is_plain_norm(norm: Any) -> bool:
    """True if a call of an accelerated layer norm does nothing but apply its own parameters."""
    return type(norm) is FastLayerNorm and norm.bias is not None and acts_alone(norm)


def is_plain_mlp(mlp: Any) -> bool:
    """True if a call of an accelerated MLP does nothing but apply its own layers."""
    if type(mlp) not in (FusedMLP, FusedConvMLP) or 'forward' in vars(mlp) or has_hooks(mlp):
        return False
    if type(mlp) is FusedConvMLP:
        if not is_plain_depthwise(mlp.dwconv) or mlp.dwconv.bias is None:
            return False
        if len(mlp.dwconv.weight) != mlp.fc1.out_features:
            return False
    return drops_nothing(mlp.drop) and all(
        type(fc) is OneDNNLinear and fc.bias is not None and acts_alone(fc)
        for fc in (mlp.fc1, mlp.fc2)
    )


def passes_all(drop_path: Optional[nn.Module]) -> bool:
    """True if stochastic depth does nothing."""
    if drop_path is None:
        return True
    if type(drop_path) is not DropPath or 'forward' in vars(drop_path):
        return False
    return not drop_path.training and not has_hooks(drop_path)


def has_rows(x: Tensor) -> bool:
    """True if maps (B, H, W, C) have enough rows: each core computes two more of the wide map."""
    return len(x) * x.shape[1] >= FEWEST_ROWS * torch.get_num_threads()


def fit(x: Tensor, norm: Any, mlp: Any) -> bool:
    """True if the shapes of parameters, which can be changed at any time, fit each other."""
    fc1, fc2 = mlp.fc1, mlp.fc2
    channels = x.shape[-1]
    width = len(fc1.weight)
    of_channels = (norm.weight, norm.bias, fc2.bias)
    return (
        norm.normalized_shape == (channels,)
        and all(parameter.shape == (channels,) for parameter in of_channels)
        and fc1.weight.shape == (width, channels)
        and fc1.bias.shape == (width,)
        and fc2.weight.shape == (channels, width)
    )
