"""Windows at the border of a map that are smaller instead of filled up and masked, and attention
inside of windows by batched products.

Shapes: B batch, H x W map, C channels, T tokens of a window, d channels of a head.
"""

from typing import Optional

import torch
from torch import Tensor

from ..grid import Grid, from_windows, to_windows
from ..model import WindowAttention
from .attention import is_simple, scaled
from .processor import mkl_is_slow
from .products import cast, common_dtype, fast_dtype

# Scores of windows that are computed at a time.
SCORES_AT_A_TIME = 2**18


class BorderWindowAttention(WindowAttention):
    """A `WindowAttention` with smaller windows at the border of a map.

    Where MKL is slow, inference takes batched products instead of PyTorch's fused kernel: in
    bfloat16 they are oneDNN's, and in float32 all threads share them.
    """

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if self.fills_windows(x, grid):
            return super().forward(x, grid)
        bias = None if grid.padding is None else grid.padding.score_bias()  # (B, H, W, 1)
        x = self.attend_in_parts(self.qkv(x), bias)
        x = self.proj(x)
        return x if self.drop is None else self.drop(x)

    def fills_windows(self, x: Tensor, grid: Grid) -> bool:
        """True if windows of one size are needed, or are as good."""
        k = self.window
        if self.window_padding != 'mask' or not (grid.height % k or grid.width % k):
            return True
        if grid.windows is None or not is_simple(self, grid.windows):
            return True
        return fast_dtype(x) is None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        dtype = common_dtype(q, k, v)
        if dtype is None or torch.is_grad_enabled() or not is_simple(self, grid):
            return super().attend(q, k, v, grid)
        if not mkl_is_slow() or (dtype == torch.float32 and torch.get_num_threads() == 1):
            return super().attend(q, k, v, grid)
        q, k, v = cast(dtype, q, k, v)
        return attention_of_windows(q, k, v, grid.key_bias)

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
            results.append(torch.cat(row, 2))
        return torch.cat(results, 1)

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


def attention_of_windows(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Attention inside of windows, of (B, heads, T, d) each to (B, T, heads, d), without gradient.

    `bias`, (B, 1, 1, T), is added to the scores; None: nothing is.
    """
    windows, heads, tokens, _ = q.shape
    out = q.new_empty(q.transpose(1, 2).shape)
    count = max(SCORES_AT_A_TIME // (heads * tokens**2), 1)
    for start in range(0, windows, count):
        part = slice(start, start + count)
        of_queries, of_keys, values = [x[part].flatten(0, 1) for x in (q, k, v)]
        scores = torch.bmm(of_queries, scaled(of_keys).transpose(1, 2)).float()
        if bias is not None:
            scores.view(-1, heads, tokens, tokens).add_(bias[part])
        # PyTorch's softmax of short rows takes twice as long in bfloat16.
        weights = scores.softmax(-1).to(q.dtype)
        result = torch.bmm(weights, values)
        out[part] = result.view(-1, heads, tokens, result.shape[-1]).transpose(1, 2)
    return out


def whole_and_rest(side: int, k: int) -> list[int]:
    """Lengths of the part of a side that whole windows fill, and of the rest, if there are any."""
    rest = side % k
    return [length for length in (side - rest, rest) if length]
