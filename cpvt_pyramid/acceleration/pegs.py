"""The positional encoding generator, its convolution and the sum as one function, in inference."""

from typing import Optional

import torch
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..grid import Grid
from ..model import PosCNN
from ..padding.mask import fill_outside
from .conv_mlp import depthwise_of
from .kernels import Depthwise, fast_convolve_add, has_kernels
from .ordinary import NotPlain, check_plain, fast_dtype


class FusedPosCNN(PosCNN):
    """A `PosCNN` that is one function in inference, if it is the paper's: one depthwise convolution
    with a 3 x 3 kernel."""

    stands_for = PosCNN

    def forward(self, x: Tensor, grid: Optional[Grid] = None) -> Tensor:
        if type(self) is not FusedPosCNN:  # see `FAST`
            return PosCNN.forward(self, x, grid)
        if torch.is_grad_enabled() or is_captured() or x.is_nested or x.dim() != 4:
            return super().forward(x, grid)
        if fast_dtype(x) != x.dtype or not has_kernels(x.dtype):
            return super().forward(x, grid)
        try:
            conv = self.plain_convolution(x.shape[-1], x.dtype)
        except NotPlain:
            return super().forward(x, grid)
        near = fill_outside(x, None if grid is None else grid.padding)
        return fast_convolve_add(near, x, conv)

    def plain_convolution(self, channels: int, dtype: torch.dtype) -> Depthwise:
        """Its convolution, in a dtype, if all that a call does is to apply it and to add.

        Raises:
            NotPlain: it does more.
        """
        check_plain(self.proj, nn.Sequential)
        if self.layers != 1 or self.border or len(self.proj) != 1:
            raise NotPlain
        return depthwise_of(self.proj[0], channels, dtype)
