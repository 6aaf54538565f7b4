"""The map that tokens form, and what attention over it is told.

Shapes: B batch, H x W map, C channels, k side of a window, n windows of a map, M keys. Tokens are
(B, H, W, C).
"""

from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .padding.batching import ceil_div
from .padding.mask import MASKED, Padding
from .versions import autocast_dtype, is_compiling, statically_known_true

POOLED = 7  # sides of the map of keys of linear attention (PVTv2, section 3.1)

# Sines and cosines of the angles of queries or keys, (B or 1, 1, T, d) each.
Rotation = tuple[Tensor, Tensor]


class Grid:
    """The map that the tokens of a stage form, and what attention over it is told.

    It is made once for a stage. Blocks, PEGs and encodings read it. The windows of a map form a
    grid of their own, in which a window is the map.

    Attributes:
        height: rows of the map.
        width: columns of the map.
        padding: of the batch at this resolution. None: there is none.
        class_tokens: 0 or 1, before the tokens of the map, among queries and keys.
        step: side of the cell, in tokens, at whose center a key is.
        key_bias: (B, 1, 1, M), added to the scores: `MASKED` for keys in the padding and 0 for
            others. None: all keys are attended to.
        rotations: of RoPE, for the queries and for the keys. None: neither are rotated.
        windows: the grid of the windows, of which there are B * n. None: there are none.
        means: weights of the means that linear attention has as keys, (B or 1, 7, H) and
            (B or 1, 7, W). None: the attention is not linear.

    Raises:
        ValueError: `key_bias` depends on the head or the query. Such a bias is that of a `position`
            inside the attention.
    """

    def __init__(
        self,
        height: int,
        width: int,
        *,
        padding: Optional[Padding] = None,
        class_tokens: int = 0,
        step: int = 1,
        key_bias: Optional[Tensor] = None,
        rotations: Optional[tuple[Rotation, Rotation]] = None,
        windows: Optional['Grid'] = None,
        means: Optional[tuple[Tensor, Tensor]] = None,
    ) -> None:
        if key_bias is not None and (key_bias.dim() != 4 or key_bias.shape[1:3] != (1, 1)):
            raise ValueError(
                f'key_bias must be (B, 1, 1, M), got {tuple(key_bias.shape)}; add a bias by head '
                'or by query in a position inside the attention'
            )
        self.height = height
        self.width = width
        self.padding = padding
        self.class_tokens = class_tokens
        self.step = step
        self.key_bias = key_bias
        self.rotations = rotations
        self.windows = windows
        self.means = means


def bias_of_keys(keys: Padding, x: Tensor, class_tokens: int = 0) -> Tensor:
    """`Grid.key_bias` of the keys of a map, after those of class tokens, for tokens x."""
    bias = keys.score_bias(dtype_of_scores(x)).flatten(1)[:, None, None]  # (B, 1, 1, M)
    return F.pad(bias, (class_tokens, 0)) if class_tokens else bias


def dtype_of_scores(x: Tensor) -> torch.dtype:
    """The dtype of queries and keys: that of autocast where it is on, else that of the tokens. Each
    attention would cast a bias in another one."""
    return autocast_dtype(x.device.type) or x.dtype


def grid_of_windows(
    x: Tensor, padding: Optional[Padding], k: int, window_padding: str = 'mask'
) -> Grid:
    """The grid of the windows of k x k tokens of a map (B, H, W, C).

    Args:
        x: the tokens.
        padding: of the batch, whose tokens are not attended to.
        k: side of a window.
        window_padding: see `WindowAttention`.
    """
    if window_padding == 'zero':
        return Grid(k, k)
    if padding is not None:
        bias = pad_to_multiple(padding.score_bias(dtype_of_scores(x)), k, MASKED)
        if window_padding == 'mmseg':
            height, width = padding.sizes()
            needs_both = (height % k > 0) & (width % k > 0)  # of each image
            bias = bias * needs_both[:, None, None, None]
    else:
        border = bias_of_border(x, k, window_padding)
        if border is None:
            return Grid(k, k)
        bias = border.expand(x.shape[0], -1, -1, -1)  # all images have the same border
    bias = to_windows(bias, k, k)[:, None, None, :, 0]
    return Grid(k, k, key_bias=bias)  # (B * n, 1, 1, k * k)


def bias_of_border(x: Tensor, k: int, window_padding: str) -> Optional[Tensor]:
    """(1, H', W', 1), `MASKED` for the tokens that fill up the windows of a map (B, H, W, C). None:
    nothing is to be masked."""
    rows_fit = divides(k, x.shape[1])
    columns_fit = divides(k, x.shape[2])
    if rows_fit and columns_fit:
        return None
    if window_padding == 'mmseg' and (rows_fit or columns_fit):
        return None
    bias = x.new_zeros(1, *x.shape[1:3], 1, dtype=dtype_of_scores(x))
    bias = pad_to_multiple(bias, k, MASKED)
    if window_padding == 'mmseg' and is_compiling():
        # A graph serves sizes that k divides and others: it finds out from the values.
        has_rows = bias[:, -1:, :1] < 0
        has_columns = bias[:, :1, -1:] < 0
        bias = bias * (has_rows & has_columns)
    return bias


def weights_of_means(x: Tensor, padding: Optional[Padding]) -> tuple[Tensor, Tensor]:
    """`Grid.means`: the weights of `F.adaptive_avg_pool2d` of each image, an axis each."""
    if padding is None:
        heights = torch.full((1,), x.shape[1], device=x.device)
        widths = torch.full((1,), x.shape[2], device=x.device)
    else:
        heights, widths = padding.sizes()
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = means_along_axis(heights, x.shape[1], dtype)
    columns = means_along_axis(widths, x.shape[2], dtype)
    return rows.to(x.dtype), columns.to(x.dtype)


def means_along_axis(sides: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """(B, POOLED, length), the weight of each of `length` tokens in each mean of sides (B,)."""
    index = torch.arange(POOLED, device=sides.device)
    start = index * sides[:, None] // POOLED  # (B, POOLED)
    stop = ceil_div((index + 1) * sides[:, None], POOLED)
    at = torch.arange(length, device=sides.device)
    inside = (at >= start[..., None]) & (at < stop[..., None])
    return inside.to(dtype) / (stop - start).clamp(min=1)[..., None]


# --- maps of any size --------------------------------------------------------------------------


def divides(k: int, side: int) -> bool:
    """True if k divides a side: in a captured graph, at all sizes that it serves."""
    return statically_known_true(side % k == 0) if is_compiling() else side % k == 0


def pad_to_multiple(x: Tensor, k: int, value: float = 0) -> Tensor:
    """Pad tokens (B, H, W, C) at the right and bottom until k divides both sides."""
    height, width = x.shape[1:3]
    if not (divides(k, height) and divides(k, width)):
        down = ceil_div(height, k) * k - height
        right = ceil_div(width, k) * k - width
        x = F.pad(x, (0, 0, 0, right, 0, down), value=value)
    return x


def crop_to_multiple(x: Tensor, k: int) -> Tensor:
    """Tokens (B, H, W, C) without the rows and columns after the last multiple of k. A side of
    less than k stays."""
    height, width = (last_multiple(side, k) for side in x.shape[1:3])
    return crop(x, height, width)


def last_multiple(side: int, k: int) -> int:
    """The largest multiple of k up to a side, or the side if it is less than k. Without a branch,
    so that a graph also serves sides on the other side of k."""
    count = side // k
    is_less = 2 // (count + 2)  # exported as 1 // (count + 1), onnxruntime's result is wrong
    return count * k + is_less * side


def crop(x: Tensor, height: int, width: int) -> Tensor:
    """The top left (B, height, width, C) of a map."""
    if not is_compiling():
        return x[:, :height, :width]
    if all(map(statically_known_true, (x.shape[1] == height, x.shape[2] == width))):
        return x
    # A graph would be specialized on whether a slice leaves out something.
    rows = torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device)
    return x.index_select(1, rows).index_select(2, columns)


def to_windows(x: Tensor, height: int, width: int) -> Tensor:
    """Split tokens (B, H, W, C) into n windows of height x width tokens, (B * n, height * width,
    C). These must divide H and W."""
    b, all_rows, all_columns, c = x.shape
    rows = all_rows // height
    columns = all_columns // width
    x = x.reshape(b, rows, height, columns, width, c).transpose(2, 3)
    return x.reshape(b * rows * columns, height * width, c)


def from_windows(x: Tensor, height: int, width: int, shape: Sequence[int]) -> Tensor:
    """The inverse of `to_windows`, cropped to `shape`, (B, H, W, C)."""
    b, all_rows, all_columns, c = shape
    rows = ceil_div(all_rows, height)
    columns = ceil_div(all_columns, width)
    x = x.reshape(b, rows, columns, height, width, c).transpose(2, 3)
    return crop(x.reshape(b, rows * height, columns * width, c), all_rows, all_columns)
