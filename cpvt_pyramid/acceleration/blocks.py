"""The branches of a block as functions of our own in inference: attention with the layer norm
before it, and the MLP with its layer norm and both sums."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..bfloat16 import is_captured
from ..grid import Grid
from ..model import Block
from ..plain_layers import replaces_methods
from ..recompute import drops_nothing
from .attention import AttentionInParts
from .conv_mlp import FEWEST_ROWS, FusedConvMLP, depthwise_of
from .kernels import (
    Call,
    Depthwise,
    NormAndMLP,
    has_products,
    prepare_conv_mlp,
    prepare_mlp,
)
from .normed import trained_norm_of
from .norms import norm_of
from .ordinary import NotPlain, check_plain, fast_dtype, is_ordinary, takes_plain
from .processor import has_avx512
from .products import LEAST_RATIO, FusedMLP, OneDNNLinear, linear_of

# For fewer tokens, to pack the weights takes longer than is gained (512 channels, Intel with AMX;
# Zen 3 with AVX2, which takes longer for each token).
FEWEST_TOKENS = 512 if has_avx512() else 256


class FusedBlock(Block):
    """A `Block` whose branches are functions of our own, if all their parts are accelerated.

    The second one is one function: each core computes some tokens at a time, from the first sum to
    the last, whose values stay in its cache. It does not wait for the other cores in between.
    """

    stands_for = Block

    def branches(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) is not FusedBlock:  # see `FAST`
            return Block.branches(self, x, grid)
        if torch.is_grad_enabled() or is_captured() or fast_dtype(x) != x.dtype:
            return super().branches(x, grid)
        if replaces_methods(self) or not drops_nothing(self.drop_path):
            return super().branches(x, grid)
        calls = self.first_branch(x, grid)
        attended = calls[-1].out if calls else self.attended(x, grid)
        last = self.second_branch(x, attended, grid)
        for call in calls:
            call.run()
        return self.add(x, attended, grid) if last is None else last.run()

    def normed_mlp(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) is not FusedBlock:  # see `FAST`
            return Block.normed_mlp(self, x, grid)
        if not torch.is_grad_enabled() or is_captured():
            return super().normed_mlp(x, grid)
        mlp: Any = self.mlp
        try:
            check_plain(mlp, FusedMLP, FusedConvMLP)
            norm = trained_norm_of(self.norm2)
            layers = mlp.fast_layers(x, grid, norm)
        except NotPlain:
            return super().normed_mlp(x, grid)
        return mlp.compute(x, grid, norm, layers)

    def first_branch(self, x: Tensor, grid: Grid) -> Sequence[Call]:
        """The calls of our own functions that compute the first branch, of which the last one has
        its result. There is none if they cannot, or not faster, or if calls of its parts do more
        than to apply their parameters."""
        if not isinstance(self.attn, AttentionInParts):
            return ()
        try:
            return self.attn.calls_after_norm(self.norm1, x, grid)
        except NotPlain:
            return ()

    def second_branch(self, x: Tensor, attended: Tensor, grid: Grid) -> Optional[Call]:
        """The call that adds both branches to the tokens. The first one is given; it may not be
        computed yet. None: as for the first branch."""
        if not takes_kernels(x, attended):
            return None
        try:
            layers, conv = self.parameters_of_mlp(x)
        except NotPlain:
            return None
        if conv is None:
            return prepare_mlp(x, attended, layers)
        outside = None if grid.padding is None else grid.padding.outside
        return prepare_conv_mlp(x, attended, layers, conv, bool(self.mlp.relu), outside)

    def parameters_of_mlp(self, x: Tensor) -> tuple[NormAndMLP, Optional[Depthwise]]:
        """The parameters of the second branch for tokens (B, H, W, C), and those of its convolution
        if there is one.

        Raises:
            NotPlain: calls of its parts do more than to apply them, or our own functions cannot, or
                not faster.
        """
        mlp: Any = self.mlp
        check_plain(mlp, FusedMLP, FusedConvMLP)
        if not drops_nothing(mlp.drop):
            raise NotPlain
        fc1, fc2 = mlp.fc1, mlp.fc2
        if not isinstance(fc1, OneDNNLinear):
            raise NotPlain
        dtype = x.dtype
        channels = x.shape[-1]
        width = fc1.out_features
        if not has_products(dtype, width, channels):
            raise NotPlain
        layers = NormAndMLP(
            norm_of(self.norm2, channels, dtype),
            linear_of(fc1, channels, width, dtype),
            linear_of(fc2, width, channels, dtype),
        )
        if type(mlp) is FusedMLP:
            return layers, None
        # Without a map it is an error of PyTorch's; our function checks nothing. Each core computes
        # two more rows of the wide map.
        if x.dim() != 4 or len(x) * x.shape[1] < FEWEST_ROWS * torch.get_num_threads():
            raise NotPlain
        return layers, depthwise_of(mlp.dwconv, width, dtype)


def takes_kernels(x: Tensor, attended: Tensor) -> bool:
    """True if our own functions can add a branch to tokens (B, ..., C), and do so faster."""
    if takes_plain(x, LEAST_RATIO * x.shape[-1]) or x.numel() < FEWEST_TOKENS * x.shape[-1]:
        return False
    return attended.shape == x.shape and attended.dtype == x.dtype and is_ordinary(attended)
