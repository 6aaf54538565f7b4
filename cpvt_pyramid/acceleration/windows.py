"""Windows at the border of a map that are smaller instead of filled up and masked.

Shapes: B batch, H x W map, C channels, T tokens of a window, d channels of a head.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..grid import Grid, from_windows, to_windows
from ..model import WindowAttention
from ..plain_layers import is_plain_linear, replaces_methods
from ..recompute import drops_nothing
from .attention import AttentionInParts, is_simple, outer_layers
from .kernels import Call, Linear, Norm, prepare_window_attention
from .norms import norm_of
from .ordinary import NotPlain, check_plain, fast_dtype
from .products import concatenated

# The backward pass of windows of at least this many tokens is computed by products, where PyTorch's
# is slow. The number of windows does not count: an image's gradients would depend on the size of
# its batch.
FEWEST_IN_WINDOW = 32


class BorderWindowAttention(AttentionInParts, WindowAttention):
    """A `WindowAttention` with smaller windows at the border of a map.

    In inference it is one function with its linear layers.
    """

    stands_for = WindowAttention

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) is not BorderWindowAttention:  # see `FAST`
            return WindowAttention.forward(self, x, grid)
        if self.fills_windows(x, grid):
            return super().forward(x, grid)
        if torch.is_grad_enabled():
            x = self.call_layers(x, grid)
        else:
            x = self.infer(x, grid)
        return x if self.drop is None else self.drop(x)

    def call_layers(self, x: Tensor, grid: Grid) -> Tensor:
        """The attention of tokens, by calls of its layers."""
        bias = None if grid.padding is None else grid.padding.score_bias()  # (B, H, W, 1)
        return self.proj(self.attend_in_parts(self.qkv(x), bias))

    def infer(self, x: Tensor, grid: Grid) -> Tensor:
        """The attention of tokens, by our own function if it can compute it."""
        try:
            qkv, proj = outer_layers(x, self.qkv, 3, self.proj, self.heads)
        except NotPlain:
            return self.call_layers(x, grid)
        return self.call_of_windows(x.to(qkv.weight.dtype), None, qkv, proj, grid).run()

    def calls_after_norm(self, layer: nn.Module, x: Tensor, grid: Grid) -> Sequence[Call]:
        check_plain(self, BorderWindowAttention)
        if self.fills_windows(x, grid) or not drops_nothing(self.drop):
            raise NotPlain
        qkv, proj = outer_layers(x, self.qkv, 3, self.proj, self.heads)
        norm = norm_of(layer, x.shape[-1], x.dtype)
        return (self.call_of_windows(x, norm, qkv, proj, grid),)

    def call_of_windows(
        self, x: Tensor, norm: Optional[Norm], qkv: Linear, proj: Linear, grid: Grid
    ) -> Call:
        """The call of our own function for the attention of tokens, after a layer norm if there is
        one."""
        bias = None if grid.padding is None else grid.padding.score_bias()[..., 0]
        return prepare_window_attention(x, norm, qkv, proj, self.heads, self.window, bias)

    def fills_windows(self, x: Tensor, grid: Grid) -> bool:
        """True if windows of one size are needed, or are as good."""
        if is_captured() or self.window_padding != 'mask' or grid.windows is None:
            return True
        if replaces_methods(self) or not is_simple(self, grid.windows) or fast_dtype(x) is None:
            return True
        if not is_plain_linear(self.qkv):  # hooks and other layers are called with windows
            return True
        fit = not (x.shape[1] % self.window or x.shape[2] % self.window)
        return fit and torch.is_grad_enabled()

    def is_large(self, q: Tensor, k: Tensor) -> bool:
        return k.shape[2] >= FEWEST_IN_WINDOW

    def attend_in_parts(self, qkv: Tensor, bias: Optional[Tensor]) -> Tensor:
        """Attention of a map (B, H, W, 3 C), in up to four parts with windows of one size each.

        The map is split where its last whole window ends. The gradient of `split` is one
        concatenation, where that of slices is a map of zeros for each.
        """
        heights = whole_and_rest(qkv.shape[1], self.window)
        widths = whole_and_rest(qkv.shape[2], self.window)
        results = []
        for i, band in enumerate(qkv.split(heights, 1)):
            row = []
            for j, part in enumerate(band.split(widths, 2)):
                part_bias = None
                if bias is not None:
                    part_bias = bias.split(heights, 1)[i].split(widths, 2)[j]
                row.append(self.attend_in_part(part, part_bias))
            results.append(concatenated(row, 2))
        return concatenated(results, 1)

    def attend_in_part(self, qkv: Tensor, bias: Optional[Tensor]) -> Tensor:
        """Attention of a part (B, h, w, 3 C) whose windows have one size, (B, h, w, C)."""
        b, rows, columns, _ = qkv.shape
        height = min(rows, self.window)
        width = min(columns, self.window)
        windows = to_windows(qkv, height, width)  # (B * n, height * width, 3 C)
        q, k, v = [
            x.unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
            for x in windows.chunk(3, 2)  # its gradient is one concatenation, too
        ]
        key_bias = None
        if bias is not None:
            key_bias = to_windows(bias, height, width)[:, None, None, :, 0]
        x = self.attend(q, k, v, Grid(height, width, key_bias=key_bias)).flatten(2)
        return from_windows(x, height, width, (b, rows, columns, x.shape[-1]))


def whole_and_rest(side: int, k: int) -> list[int]:
    """Lengths of the part of a side that whole windows fill, and of the rest, if there are any."""
    rest = side % k
    return [length for length in (side - rest, rest) if length]
