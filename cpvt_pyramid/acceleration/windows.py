"""Windows at the border of a map that are smaller instead of filled up and masked.

Shapes: B batch, H x W map, C channels, T tokens of a window, d channels of a head.
"""

from typing import Optional

import torch
from torch import Tensor

from ..bfloat16 import is_captured
from ..grid import Grid, from_windows, to_windows
from ..model import WindowAttention
from ..plain_layers import is_plain_linear
from .attention import AttentionInParts, is_simple
from .kernels import fast_attention, has_products
from .products import concatenated, fast_dtype

# Values of queries, keys and values that are computed at a time, which stay in the cache.
BAND = 2**20

# The backward pass of windows of at least this many tokens is computed by products, where PyTorch's
# is slow. The number of windows does not count: an image's gradients would depend on the size of
# its batch.
FEWEST_TOKENS = 32


class BorderWindowAttention(AttentionInParts, WindowAttention):
    """A `WindowAttention` with smaller windows at the border of a map.

    Inference computes some rows of windows at a time, with their linear layers, so that the maps
    between the layers stay in the cache.
    """

    stands_for = WindowAttention

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) is not BorderWindowAttention:  # see `FAST`
            return WindowAttention.forward(self, x, grid)
        if self.fills_windows(x, grid):
            return super().forward(x, grid)
        bias = None if grid.padding is None else grid.padding.score_bias()  # (B, H, W, 1)
        if not torch.is_grad_enabled() and is_plain_linear(self.proj):
            x = self.attend_in_bands(x, bias)
        else:
            x = self.proj(self.attend_in_parts(self.qkv(x), bias))
        return x if self.drop is None else self.drop(x)

    def fills_windows(self, x: Tensor, grid: Grid) -> bool:
        """True if windows of one size are needed, or are as good."""
        if self.window_padding != 'mask' or grid.windows is None:
            return True
        if is_captured() or not is_simple(self, grid.windows) or fast_dtype(x) is None:
            return True
        if not is_plain_linear(self.qkv):  # hooks and other layers are called with windows
            return True
        fit = not (x.shape[1] % self.window or x.shape[2] % self.window)
        return fit and torch.is_grad_enabled()

    def is_large(self, q: Tensor, k: Tensor) -> bool:
        return k.shape[2] >= FEWEST_TOKENS

    def attend_in_bands(self, x: Tensor, bias: Optional[Tensor]) -> Tensor:
        """The attention of a map (B, H, W, C) and its linear layers, without gradient."""
        bands = []
        windows = max(BAND // (x.shape[0] * x.shape[2] * 3 * x.shape[3] * self.window), 1)
        for start in range(0, x.shape[1], windows * self.window):
            rows = slice(start, start + windows * self.window)
            qkv = self.qkv(x[:, rows])
            band_bias = None if bias is None else bias[:, rows]
            bands.append(self.proj(self.attend_in_band(qkv, band_bias)))
        return concatenated(bands, 1)

    def attend_in_band(self, qkv: Tensor, bias: Optional[Tensor]) -> Tensor:
        """Attention of rows (B, h, W, 3 C) of a map, (B, h, W, C), without gradient."""
        q, k, v = qkv.unflatten(3, (3, self.heads, self.head_dim)).permute(3, 0, 4, 1, 2, 5)
        if not has_products(q.dtype, q.shape[-1]):
            return self.attend_in_parts(qkv, bias)
        if bias is not None:
            bias = bias[..., 0]
        return fast_attention(q, k, v, bias, self.window).flatten(3)

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
