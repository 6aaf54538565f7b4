"""The positional encoding generator, its convolution and the sum as one function, in inference."""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..grid import Grid
from ..model import PosCNN
from ..padding.mask import fill_outside
from ..plain_layers import has_hooks
from .conv_mlp import is_plain_depthwise
from .kernels import fast_convolve_add, has_kernels
from .products import cast, fast_dtype


class FusedPosCNN(PosCNN):
    """A `PosCNN` that is one function in inference, if it is the paper's: one depthwise convolution
    with a 3 x 3 kernel."""

    stands_for = PosCNN

    def forward(self, x: Tensor, grid: Optional[Grid] = None) -> Tensor:
        if type(self) is not FusedPosCNN:  # see `FAST`
            return PosCNN.forward(self, x, grid)
        if torch.is_grad_enabled() or is_captured() or x.is_nested or x.dim() != 4:
            return super().forward(x, grid)
        parameters = self.plain_parameters()
        if parameters is None or any([len(p) != x.shape[-1] for p in parameters]):
            return super().forward(x, grid)
        if fast_dtype(x, *parameters) != x.dtype or not has_kernels(x.dtype):
            return super().forward(x, grid)
        near = fill_outside(x, None if grid is None else grid.padding)
        kernel, bias = cast(x.dtype, *parameters)
        return fast_convolve_add(near, x, kernel, bias)

    def plain_parameters(self) -> Optional[tuple[Tensor, Tensor]]:
        """Kernel and bias, if all that a call does is to apply them and to add. Else None."""
        proj = self.proj
        if self.layers != 1 or self.border or type(proj) is not nn.Sequential or len(proj) != 1:
            return None
        conv: Any = proj[0]
        if (
            has_hooks(proj)
            or 'forward' in vars(proj)
            or not is_plain_depthwise(conv)
            or conv.bias is None
        ):
            return None
        return conv.weight, conv.bias
