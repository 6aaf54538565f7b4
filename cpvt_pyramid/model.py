"""The pyramid of CPVTv2, Twins, PVT, PVTv2 and SegFormer's MiT, from its parts to its forward pass.

Four stages, each a map of half the resolution: patch embedding, blocks of attention and MLP, and
what gives them position. In CPVT that is a PEG after the first block (`PosCNN`), in PVT a table
before it, in PVTv2 and MiT zero-padded convolutions in the patch embedding and in every MLP.

Shapes: B batch, H x W map, C channels, N = H * W tokens, M keys, d = C / heads. Tokens are
(B, H, W, C) throughout; convolutions read them as (B, C, H, W) in channels-last memory. The maps
that leave are such views: call `.contiguous()` before code that reads raw NCHW memory.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .archs import Arch, check_rates, check_stages, find_arch
from .checkpoints.hook import convert_on_load
from .checkpoints.rgb import check_rgb_weights
from .names import STAGE_PARTS
from .padding.mask import MASKED, BatchPadding, Padding, fill_outside
from .position import NoPosition, PEGConfig, RoPE, Rotation, parse_position, position_table, rotate
from .recompute import gelu_linear, is_plain_linear
from .versions import is_compiling, is_exporting, statically_known_true

# CUDA's fused attention kernels refuse a larger batch (of windows, here).
MAX_BATCH = 65_535

POOLED = 7  # sides of the map of keys of linear attention (PVTv2, section 3.1)


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def divides(k: int, height: int, width: int) -> bool:
    """True if k divides both sides: in a captured graph, at all sizes that it serves."""
    if is_compiling():
        return statically_known_true(height % k == 0) and statically_known_true(width % k == 0)
    return height % k == 0 and width % k == 0


def pad_to_multiple(x: Tensor, k: int, value: float = 0) -> Tensor:
    """Pad tokens (B, H, W, C) at the right and bottom until k divides both sides."""
    height, width = x.shape[1:3]
    if not divides(k, height, width):
        down = ceil_div(height, k) * k - height
        right = ceil_div(width, k) * k - width
        x = F.pad(x, (0, 0, 0, right, 0, down), value=value)
    return x


def without_rest(x: Tensor, k: int) -> Tensor:
    """Tokens (B, H, W, C) without the rows and columns after the last multiple of k. A side of
    less than k stays."""
    height, width = (side // k * k if side >= k else side for side in x.shape[1:3])
    return crop(x, height, width)


def to_windows(x: Tensor, k: int) -> Tensor:
    """Split tokens (B, H, W, C) into n windows of k x k tokens, (B * n, k * k, C)."""
    b, height, width, c = x.shape
    rows = height // k
    columns = width // k
    x = x.reshape(b, rows, k, columns, k, c).transpose(2, 3)
    return x.reshape(b * rows * columns, k * k, c)


def from_windows(x: Tensor, k: int, shape: Sequence[int]) -> Tensor:
    """The inverse of `to_windows`, cropped to `shape`, (B, H, W, C)."""
    b, height, width, c = shape
    rows = ceil_div(height, k)
    columns = ceil_div(width, k)
    x = x.reshape(b, rows, columns, k, k, c).transpose(2, 3)
    return crop(x.reshape(b, rows * k, columns * k, c), height, width)


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


class Scope(NamedTuple):
    """What an attention is told about its queries and keys.

    Attributes:
        height: rows of the map of the queries: of the whole map, or of a window.
        width: its columns.
        step: side of the cell, in tokens, at whose center a key is.
        class_tokens: 0 or 1, before the tokens of the map, among queries and keys.
        hidden: (B, 1, 1, M), `MASKED` for keys in the padding and 0 for others. None: no padding.
        rotations: sines and cosines of RoPE for the queries, and those for the keys. None: neither
            are rotated.
        sizes: height and width, (B,) each, of each image of a padded batch in tokens.
    """

    height: int
    width: int
    step: int = 1
    class_tokens: int = 0
    hidden: Optional[Tensor] = None
    rotations: Optional[tuple[Rotation, Rotation]] = None
    sizes: Optional[tuple[Tensor, Tensor]] = None


class Grid:
    """The map that the tokens of a stage form, and all that is the same for its blocks.

    It is made once for a stage. Blocks, PEGs and encodings read it.

    Args:
        x: the tokens (B, H, W, C).
        padding: of the batch at this resolution; None: there is none.
        keys: of the batch at the resolution of the keys of global attention.
        step: side of the cells that have one key each in global attention.
        linear: attention is linear: its keys are `POOLED` x `POOLED` means.
        window: side of the windows of window attention; None: there are none.
        mask_windows: hide the tokens that fill up windows; False: they are attended to.
        drop_border: sub-sampling leaves out what does not fill a patch, see `CPVTPyramid`.
        class_tokens: 0 or 1, before the map's tokens.
        rope: rotary encoding inside the attentions.
        head_dim: d, the channels of a head, for `rope`.

    Attributes:
        height: rows of the map.
        width: columns of the map.
        padding: of the batch at this resolution, or None.
        whole: what an attention over the whole map is told.
        windows: what an attention inside windows is told, if there are windows.
        pooling: weights of the means of linear attention, if that is what attends: (B or 1, 7, H)
            and (B or 1, 7, W).
    """

    windows: Scope
    pooling: tuple[Tensor, Tensor]

    def __init__(
        self,
        x: Tensor,
        padding: Optional[Padding] = None,
        *,
        keys: Optional[Padding] = None,
        step: int = 1,
        linear: bool = False,
        window: Optional[int] = None,
        mask_windows: bool = True,
        drop_border: bool = False,
        class_tokens: int = 0,
        rope: Optional[RoPE] = None,
        head_dim: int = 0,
    ) -> None:
        self.height, self.width = x.shape[1:3]
        self.padding = padding
        self.class_tokens = class_tokens
        self.drop_border = drop_border and padding is None
        if linear:
            self.pooling = pooling_weights(x, padding)
            self.whole = Scope(self.height, self.width)
            return
        self.whole = Scope(
            self.height,
            self.width,
            step,
            class_tokens,
            hidden=None if keys is None else hidden_keys(x, keys, class_tokens),
            sizes=None if padding is None or rope is None else padding.sizes(),
        )
        if window:
            hidden = hidden_in_windows(x, padding, window) if mask_windows else None
            self.windows = Scope(window, window, hidden=hidden)
        if rope is not None:
            self.whole = rope.with_rotations(self.whole, head_dim, x)
            if window:
                self.windows = rope.with_rotations(self.windows, head_dim, x)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split tokens (B, T, C) into the class token (B, 0 or 1, C) and the map (B, H, W, C)."""
        first = x[:, : self.class_tokens]
        return first, x[:, self.class_tokens :].unflatten(1, (self.height, self.width))


def hidden_keys(x: Tensor, keys: Padding, class_tokens: int = 0) -> Tensor:
    """`Scope.hidden` of the keys on a map, and of a class token."""
    hidden = keys.score_bias().flatten(1)[:, None, None].to(x.dtype)  # (B, 1, 1, M)
    return F.pad(hidden, (class_tokens, 0)) if class_tokens else hidden


def hidden_in_windows(x: Tensor, padding: Optional[Padding], k: int) -> Optional[Tensor]:
    """`Scope.hidden` of windows of k x k tokens: those in the padding of the batch, and those that
    fill up the windows at the border."""
    if padding is not None:
        hidden = padding.score_bias().to(x.dtype)
    elif not divides(k, x.shape[1], x.shape[2]):
        hidden = x.new_zeros(1, *x.shape[1:3], 1)
    else:
        return None
    hidden = to_windows(pad_to_multiple(hidden, k, MASKED), k)[:, None, None, :, 0]
    if padding is None:  # all images have the same border
        hidden = hidden.repeat(x.shape[0], 1, 1, 1)
    return hidden  # (B * n, 1, 1, k * k)


def pooling_weights(x: Tensor, padding: Optional[Padding]) -> tuple[Tensor, Tensor]:
    """Weights of `F.adaptive_avg_pool2d` of each image to `POOLED` x `POOLED`, an axis each."""
    if padding is None:
        heights = torch.full((1,), x.shape[1], device=x.device)
        widths = torch.full((1,), x.shape[2], device=x.device)
    else:
        heights, widths = padding.sizes()
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = pooling_of_axis(heights, x.shape[1], dtype)
    columns = pooling_of_axis(widths, x.shape[2], dtype)
    return rows.to(x.dtype), columns.to(x.dtype)


def pooling_of_axis(sides: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """(B, POOLED, length), the weight of each of `length` tokens in each mean of sides (B,)."""
    index = torch.arange(POOLED, device=sides.device)
    start = index * sides[:, None] // POOLED  # (B, POOLED)
    stop = ((index + 1) * sides[:, None] + POOLED - 1) // POOLED
    at = torch.arange(length, device=sides.device)
    inside = (at >= start[..., None]) & (at < stop[..., None])
    return inside.to(dtype) / (stop - start).clamp(min=1)[..., None]


class PatchEmbed(nn.Module):
    """One token for each patch of the image, or of the tokens of the stage before.

    A map whose sides are not multiples of the patch is padded with zeros at the right and bottom.

    Args:
        in_channels: channels of the input.
        dim: channels of the tokens.
        size: side of a patch.
        drop: dropout on the tokens.
        norm: a LayerNorm on the tokens; the columnar model has none.
    """

    def __init__(
        self, in_channels: int, dim: int, size: int, drop: float = 0.0, norm: bool = True
    ) -> None:
        super().__init__()
        self.size = size
        self.proj = nn.Conv2d(in_channels, dim, size, stride=size)
        # eps 1e-5 here and in the sub-sampling of keys, as published
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C), which must be zero in the padding, to (B, H', W', dim)."""
        x = pad_to_multiple(x, self.size)
        return dropout(self.norm(convolve(self.proj, x)), self.drop, self.training)


class OverlapPatchEmbed(nn.Module):
    """Patches that overlap: a zero-padded convolution, from which position comes, too (PVTv2,
    section 3.2; SegFormer, section 3.1).

    Arguments are those of `PatchEmbed`; `size` is the stride, and the kernel is `2 * size - 1`.
    """

    def __init__(self, in_channels: int, dim: int, size: int, drop: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.proj = nn.Conv2d(in_channels, dim, 2 * size - 1, stride=size, padding=size - 1)
        self.norm = nn.LayerNorm(dim)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return dropout(self.norm(convolve(self.proj, x)), self.drop, self.training)


def depthwise(channels: int, kernel_size: int, padding: int) -> nn.Conv2d:
    """A depthwise convolution of tokens. Its weight has the strides of channels-last memory."""
    conv = nn.Conv2d(channels, channels, kernel_size, padding=padding, groups=channels)
    conv.register_load_state_dict_post_hook(set_strides)
    set_strides(conv)
    return conv


def set_strides(conv: nn.Module, _: object = None) -> None:
    """Give the weight (C, 1, k, k) of a depthwise convolution the strides of channels-last memory.

    Its values lie in the same order. But its gradient has these strides, and DDP compares them. A
    weight that `load_state_dict(assign=True)` puts in its place has others.
    """
    weight = dict(conv.named_parameters(recurse=False)).get('weight')
    if type(weight) is nn.Parameter and weight.is_contiguous():
        strides = (weight[0].numel(), 1, weight.shape[3], 1)
        if weight.stride() != strides:
            weight.data = weight.data.as_strided(weight.shape, strides)


def convolve(convolution: nn.Module, x: Tensor) -> Tensor:
    """Apply a convolution of maps (B, C, H, W) to tokens (B, H, W, C)."""
    return convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Attention(nn.Module):
    """Multi-head attention. Derived classes choose the keys.

    Their arguments:
        dim: channels of the tokens.
        heads: attention heads.
        attn_drop: dropout on the attention weights.
        drop: dropout on the output.

    Attributes:
        position: a module that is called with queries (B, heads, N, d), keys (B, heads, M, d) and
            their `Scope`, and returns queries, keys, and a bias of their scores, (B or 1, heads,
            N, M) or None. It can be set to one of your own. None: there is none.
    """

    position: Optional[nn.Module]

    def __init__(self, dim: int, heads: int, attn_drop: float = 0.0, drop: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.attn_drop = attn_drop
        self.drop = drop
        self.position = None

    def by_head(self, x: Tensor) -> Tensor:
        """Queries, keys or values (B, ..., C), as (B, heads, N, d)."""
        b, *sides, _ = x.shape
        return x.reshape(b, math.prod(sides), self.heads, self.head_dim).transpose(1, 2)

    def split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, heads, N, d) each, out of (B, ..., parts * C)."""
        b, *sides, _ = x.shape
        x = x.reshape(b, math.prod(sides), parts, self.heads, self.head_dim)
        return x.permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        """softmax(q k^T / sqrt(d)) v, (B, N, heads, d), of queries, keys and values by head."""
        bias = scope.hidden
        if scope.rotations is not None:
            q = rotate(q, scope.rotations[0])
            k = rotate(k, scope.rotations[1])
        if self.position is not None:
            q, k, bias = self.position(q, k, scope)
            if bias is not None and scope.hidden is not None:
                bias = bias + scope.hidden
        if bias is not None:
            bias = bias.to(q.dtype)
        dropout = self.attn_drop if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, bias, dropout).transpose(1, 2)


class GlobalAttention(Attention):
    """Every token attends to the whole map, sub-sampled (PVT, section 3.3; Twins' GSA).

    Args:
        sr_ratio: side of the patches that have one key and one value each.
    """

    def __init__(self, dim: int, heads: int, sr_ratio: int, **drops: float) -> None:
        super().__init__(dim, heads, **drops)
        self.sr_ratio = sr_ratio
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        if sr_ratio > 1:
            self.sr = nn.Conv2d(dim, dim, sr_ratio, stride=sr_ratio)
            self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        q = self.by_head(self.q(x))  # (B, heads, N, d)
        k, v = self.split(self.kv(self.subsample(x, grid)), 2)  # (B, heads, M, d)
        x = self.attend(q, k, v, grid.whole).reshape(x.shape)
        return dropout(self.proj(x), self.drop, self.training)

    def subsample(self, x: Tensor, grid: Grid) -> Tensor:
        """One token for each patch, (B, H', W', C). The padding must look like zeros."""
        if self.sr_ratio == 1:
            return x
        x = fill_outside(x, grid.padding)
        if grid.drop_border:
            x = without_rest(x, self.sr_ratio)
        x = pad_to_multiple(x, self.sr_ratio)
        return self.norm(convolve(self.sr, x))


class LinearAttention(GlobalAttention):
    """Every token attends to 7 x 7 means of the map (PVTv2, section 3.1)."""

    def __init__(self, dim: int, heads: int, **drops: float) -> None:
        super().__init__(dim, heads, sr_ratio=1, **drops)
        self.sr = nn.Conv2d(dim, dim, 1)
        self.norm = nn.LayerNorm(dim)

    def subsample(self, x: Tensor, grid: Grid) -> Tensor:
        """Means of each image, (B, 7, 7, C), as `F.adaptive_avg_pool2d` computes them."""
        rows, columns = grid.pooling
        rows = rows.to(x.dtype)
        columns = columns.to(x.dtype)
        b, height, width, c = x.shape
        x = rows @ x.reshape(b, height, width * c)  # (B, 7, W * C)
        x = columns[:, None] @ x.view(b, POOLED, width, c)  # (B, 7, 7, C)
        return F.gelu(self.norm(convolve(self.sr, x)))


class WindowAttention(Attention):
    """Tokens attend to their own window (Twins' LSA, section 3.2).

    A map whose sides are not multiples of the window is padded at the right and bottom.

    Args:
        window: side of a window, in tokens.
        window_padding: 'mask': tokens in the padding are not attended to. 'zero': they are, with
            the keys and values of a zero token, as in timm and in Twins' detection code. 'mmseg':
            they are unless the map has padding at the right and at the bottom, as in
            MMSegmentation and Twins' segmentation code.
    """

    def __init__(
        self, dim: int, heads: int, window: int, window_padding: str = 'mask', **drops: float
    ) -> None:
        super().__init__(dim, heads, **drops)
        self.window = window
        self.window_padding = window_padding
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if self.window_padding != 'mask':
            x = fill_outside(x, grid.padding)
        shape = x.shape
        x = to_windows(pad_to_multiple(x, self.window), self.window)  # (B * n, window^2, C)
        q, k, v = self.split(self.qkv(x), 3)  # (B * n, heads, window^2, d)
        x = from_windows(self.attend_inside(q, k, v, grid.windows), self.window, shape)
        return dropout(self.proj(x), self.drop, self.training)

    def attend_inside(self, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        """`attend`, some windows at a time where there are more than a kernel takes."""
        if is_exporting() or q.shape[0] <= MAX_BATCH:
            return self.attend(q, k, v, scope)
        parts = []
        for start in range(0, q.shape[0], MAX_BATCH):
            part = slice(start, start + MAX_BATCH)
            hidden = None if scope.hidden is None else scope.hidden[part]
            parts.append(self.attend(q[part], k[part], v[part], scope._replace(hidden=hidden)))
        return torch.cat(parts)


class MLP(nn.Module):
    """Two linear layers with a GELU (erf) between them and dropout after each.

    Args:
        dim: channels of the tokens.
        hidden: channels between the two layers.
        drop: the rate of dropout.
        recompute_gelu: training saves one of the two wide maps, that before the GELU, and
            recomputes the other. A second layer that does more than to apply its own weight, an
            adapter or one with hooks for example, is called, and both maps are saved.
    """

    def __init__(
        self, dim: int, hidden: int, drop: float = 0.0, recompute_gelu: bool = False
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = drop
        self.recompute_gelu = recompute_gelu

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return self.contract(self.expand(x, grid))

    def expand(self, x: Tensor, grid: Grid) -> Tensor:
        """The map before the GELU, the widest of a block."""
        return self.fc1(x)

    def contract(self, x: Tensor) -> Tensor:
        """The second layer on the GELU of the wide map."""
        if self.recomputes() and is_plain_linear(self.fc2):
            return gelu_linear(x, self.fc2.weight, self.fc2.bias)
        x = dropout(F.gelu(x), self.drop, self.training)
        return dropout(self.fc2(x), self.drop, self.training)

    def recomputes(self) -> bool:
        """True if the GELU is to be recomputed: compilers choose themselves what they recompute."""
        drops = self.drop and self.training
        return self.recompute_gelu and torch.is_grad_enabled() and not drops and not is_compiling()


class ConvMLP(MLP):
    """An MLP with a zero-padded depthwise convolution before the GELU, from which position comes
    (PVTv2, section 3.2; SegFormer's Mix-FFN, section 3.1).

    Args:
        relu: a ReLU before the convolution, as in PVTv2's model with linear attention.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        drop: float = 0.0,
        recompute_gelu: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__(dim, hidden, drop, recompute_gelu)
        self.dwconv = depthwise(hidden, 3, padding=1)
        self.relu = relu

    def expand(self, x: Tensor, grid: Grid) -> Tensor:
        x = self.fc1(x)
        if self.relu:
            x = F.relu(x)
        return convolve(self.dwconv, fill_outside(x, grid.padding))


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """`F.dropout`, which is not called where the rate is 0."""
    return F.dropout(x, rate, training) if rate else x


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Stochastic depth (arXiv 1603.09382): in training, zero each sample with a probability of
    `rate`, and scale the others by 1 / (1 - rate)."""
    if rate == 0 or not training:
        return x
    keep = 1 - rate
    scale = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep).div_(keep)
    return x * scale


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to its input.

    Args:
        dim: channels of the tokens.
        attn: the attention. Like the MLP, it is called with the tokens and their `Grid`.
        mlp: the MLP.
        drop_path: probability of dropping each of the two branches.
        with_cp: activation checkpointing: less memory in training, more time.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        drop_path: float = 0.0,
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = mlp
        self.drop_path = drop_path
        self.with_cp = with_cp

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """The tokens after both branches, in the same shape."""
        if self.with_cp and self.training:
            return checkpoint(self.branches, x, grid, use_reentrant=False)
        return self.branches(x, grid)

    def branches(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + drop_path(self.attn(self.norm1(x), grid), self.drop_path, self.training)
        return x + drop_path(self.mlp(self.norm2(x), grid), self.drop_path, self.training)

    def extra_repr(self) -> str:
        return f'drop_path={self.drop_path:.3f}, with_cp={self.with_cp}'


class PosCNN(nn.Module):
    """Positional Encoding Generator, PEG (CPVT, section 3.2): a zero-padded depthwise convolution,
    added to the tokens.

    The zeros beyond the border are the source of absolute position. The padding of a batch must
    look like them.

    Args:
        dim: channels of the tokens.
        kernel_size: side of the kernel, odd; the paper's is 3.
        conv: 'depthwise', 'separable' or 'dense', see `PEGConfig`.
        layers: number of convolutions in a row, each added to its input.
        zero_padding: False replicates the border of each image instead (CPVT, table 3).

    Examples:
        >>> peg = PosCNN(64)
        >>> peg(torch.rand(2, 14, 20, 64)).shape
        torch.Size([2, 14, 20, 64])
    """

    def __init__(
        self,
        dim: int,
        kernel_size: int = 3,
        conv: str = 'depthwise',
        layers: int = 1,
        zero_padding: bool = True,
    ) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f'kernel_size of a PEG must be odd, got {kernel_size}')
        if conv not in ('depthwise', 'separable', 'dense'):
            raise ValueError(f'conv of a PEG must be depthwise, separable or dense, got {conv!r}')
        if layers < 1:
            raise ValueError(f'layers of a PEG must be at least 1, got {layers}')
        self.layers = layers
        self.border = 0 if zero_padding else kernel_size // 2
        padding = kernel_size // 2 - self.border

        def convolution() -> nn.Module:
            if conv == 'dense':
                return nn.Conv2d(dim, dim, kernel_size, padding=padding)
            spatial = depthwise(dim, kernel_size, padding)
            return (
                spatial if conv == 'depthwise' else nn.Sequential(spatial, nn.Conv2d(dim, dim, 1))
            )

        self.proj = nn.Sequential(*(convolution() for _ in range(layers)))  # proj.0, as published

    def forward(self, x: Tensor, grid: Optional[Grid] = None) -> Tensor:
        """Tokens (B, H, W, C) with their position added, in the same shape."""
        padding = None if grid is None else grid.padding
        convolutions: Iterable[nn.Module] = self.proj
        if self.layers == 1:
            convolutions = [self.proj]  # called as a module, so that hooks on it are called
        for convolution in convolutions:
            if self.border:
                near = repeat_border(x, padding, self.border)
            else:
                near = fill_outside(x, padding)
            x = x + convolve(convolution, near)
        return x


def repeat_border(x: Tensor, padding: Optional[Padding], border: int) -> Tensor:
    """Extend each image by its nearest tokens, to (B, H + 2 border, W + 2 border, C)."""
    b, h, w, _ = x.shape
    # The row and the column that each token of the result comes from.
    rows = torch.arange(-border, h + border, device=x.device).clamp(0, h - 1).expand(b, -1)
    columns = torch.arange(-border, w + border, device=x.device).clamp(0, w - 1).expand(b, -1)
    if padding is not None:
        height, width = padding.sizes()
        rows = rows.minimum(height[:, None] - 1).clamp(min=0)
        columns = columns.minimum(width[:, None] - 1).clamp(min=0)
    batch = torch.arange(b, device=x.device)[:, None, None]
    return x[batch, rows[:, :, None], columns[:, None]]


class CPVTPyramid(nn.Module):
    """Pyramid vision transformer with a PEG after the first block of each stage.

    Parameter names are those of the published checkpoints of Twins. `load_state_dict` reads these
    and, at the root, files in the names of others, too (see `cpvt_pyramid.checkpoints.hook`).

    Args:
        arch: a name from `ARCHS`, or an `Arch` (or a dict of its fields) of your own.
        position: where position comes from: 'peg' (CPVT), 'learned' (an embedding for each
            stage, interpolated to the map; PVT), 'sincos' (2-D sinusoidal), 'rope' (rotary, inside
            every attention) or 'none'; or one of them and a PEG, as in 'learned+peg'. A
            sub-sampled key is at the center of its patch. None: as published.
        position_options: a dict, of 'rope': `base`, nearly the ratio of largest to smallest
            frequency, and `normalized`, coordinates across the image instead of counts of tokens.
        peg: placement and structure of PEGs, a `PEGConfig` or a dict of its fields. None: as
            published. Indices of blocks that a stage does not have are ignored in that stage.
        pretrain_img_size: side of the image in pixels, or height and width, for which a learned
            position embedding has one entry for each token.
        in_channels: channels of the image.
        rgb_weights: how the first convolution is made from a checkpoint for RGB where `in_channels`
            is not 3. 'mean': for each band the mean of the filters of red, green and blue;
            'repeat': these filters in turn; or the names of the bands, such as ('red', 'green',
            'blue', 'nir'), of which others than these three get the mean. Filters are scaled by
            3 / `in_channels`. None: such a checkpoint is an error.
        out_indices: the stages, 0 to 3, whose maps are returned. Stages after the last of them
            are not built.
        drop_rate: dropout after the patch embeddings, the attentions and in the MLPs.
        attn_drop_rate: dropout on the attention weights.
        drop_path_rate: rate of stochastic depth at the last block; it grows linearly, from 0 at the
            first.
        stage_norm: a LayerNorm on each stage's output. None: as published.
        window_padding: how windows that the map does not fill are treated (SVT): 'mask': padded
            tokens are not attended to; 'zero': they are, as in timm; 'mmseg': they are unless the
            map has padding at the right and at the bottom, as in MMSegmentation.
        drop_border: the sub-sampling of keys leaves out rows and columns that do not fill a patch,
            as in timm, the authors' code and OpenMMLab, unless `valid` is given. By default they
            are filled up with zeros. Where 32 divides the sides of the image, both are the same.
        frozen_stages: number of stages, from the first, that do not train (patch embedding,
            blocks, PEG and norm). 0 or -1: none. In OpenMMLab's ResNet and Swin 0 freezes the
            stem; here the stem is part of the first stage. What is added to them later, such as
            the adapters of LoRA, trains.
        with_cp: activation checkpointing: less memory in training, more time.
        recompute_gelu: training saves one of the two wide maps of each MLP and recomputes the
            other: less memory at the cost of one pass over it. MLPs with dropout, with hooks on
            their second layers (`mlp.fc2`) or with adapters in their place save both.

    Attributes:
        channels: channels of each returned map.
        strides: stride of each returned map, in pixels.

    Raises:
        ValueError: an unknown arch or position, an option that does not fit them or that nothing
            reads, or a number out of its range; the message says what to give instead.

    Examples:
        >>> model = CPVTPyramid('pcpvt_nano').eval()
        >>> [tuple(y.shape) for y in model(torch.rand(1, 3, 97, 130))]
        [(1, 32, 25, 33), (1, 64, 13, 17), (1, 128, 7, 9), (1, 192, 4, 5)]
        >>> valid = torch.tensor([[64, 96], [97, 130]])  # true sizes of padded images
        >>> maps = model(torch.rand(2, 3, 97, 130), valid=valid)
    """

    def __init__(
        self,
        arch: Union[str, Arch, dict] = 'pcpvt_small',
        *,
        position: Optional[str] = None,
        position_options: Optional[dict] = None,
        peg: Union[PEGConfig, dict, None] = None,
        pretrain_img_size: Union[int, Sequence[int]] = 224,
        in_channels: int = 3,
        rgb_weights: Union[str, Sequence[str], None] = None,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        stage_norm: Optional[bool] = None,
        window_padding: str = 'mask',
        drop_border: bool = False,
        frozen_stages: int = 0,
        with_cp: bool = False,
        recompute_gelu: bool = False,
    ) -> None:
        super().__init__()
        check_rgb_weights(rgb_weights, in_channels)
        self.in_channels = in_channels
        self.rgb_weights = rgb_weights
        convert_on_load(self)
        self.arch = arch = find_arch(arch, Arch)
        check_stages(arch, out_indices, frozen_stages, window_padding)
        check_rates(drop_rate, attn_drop_rate, drop_path_rate)
        if position is None:
            position = arch.position
        encoding = parse_position(position, peg, position_options, columnar=False)
        self.rope = encoding.rope
        check_rope(self.rope, arch)
        self.out_indices = tuple(out_indices)
        self.frozen_stages = frozen_stages
        self.window_padding = window_padding
        self.drop_border = drop_border
        if stage_norm is None:
            stage_norm = arch.stage_norm

        dims = arch.dims[: max(self.out_indices) + 1]  # of the stages that are built
        strides = arch.strides
        self.channels = tuple(dims[i] for i in self.out_indices)
        self.strides = tuple(strides[i] for i in self.out_indices)

        drops = dict(attn_drop=attn_drop_rate, drop=drop_rate)
        last = max(sum(arch.depths) - 1, 1)  # index of the last block of the whole pyramid
        self.patch_embeds = nn.ModuleList()
        self.pos_embeds = nn.ModuleList()
        self.blocks = nn.ModuleList()
        self.norm_list = nn.ModuleList()
        for i, dim in enumerate(dims):
            embed = OverlapPatchEmbed if arch.overlap else PatchEmbed
            inputs = dims[i - 1] if i else in_channels
            self.patch_embeds.append(embed(inputs, dim, arch.patch_sizes[i], drop_rate))
            self.pos_embeds.append(
                position_table(encoding.kind, dim, pretrain_img_size, strides[i])
            )
            blocks = nn.ModuleList()
            for j in range(arch.depths[i]):
                depth = (sum(arch.depths[:i]) + j) / last  # 0 at the first block, 1 at the last
                attn = build_attention(arch, i, j, window_padding, **drops)
                mlp = build_mlp(arch, i, drop_rate, recompute_gelu)
                blocks.append(Block(dim, attn, mlp, drop_path_rate * depth, with_cp))
            self.blocks.append(blocks)
            self.norm_list.append(nn.LayerNorm(dim, eps=1e-6) if stage_norm else nn.Identity())

        self.add_pegs(encoding.peg, dims)
        self.apply(init_weights)
        if encoding.peg:
            start_pegs(self, encoding.peg)
        self.frozen = self.names_in_stages(frozen_stages)
        self.freeze()

    def add_pegs(self, peg: Optional[PEGConfig], dims: Sequence[int]) -> None:
        """Build the PEGs of the stages, whose tokens have these channels."""
        # The published checkpoints name the PEG after the first block of each stage `pos_block.i`.
        self.pos_block = nn.ModuleList()
        self.more_pos_block = nn.ModuleList()
        self.peg_after = []  # for each stage, the blocks that a PEG follows; -1: before the first
        for dim, depth in zip(dims, self.arch.depths):
            pegs: dict[int, nn.Module] = {}
            if peg:
                for j in peg.indices(depth, max(self.arch.depths)):
                    pegs[j] = build_peg(peg, dim)
            self.peg_after.append(tuple(pegs))
            self.pos_block.append(pegs.pop(0, NoPosition()))
            self.more_pos_block.append(nn.ModuleDict({str(j): pegs[j] for j in pegs}))
        self.peg_starts_at_zero = peg is not None and peg.zero_init

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """The maps of an image.

        Args:
            image: (B, in_channels, H, W), of any size from 1 x 1.
            valid: (B, 2), the true height and width of each image in pixels, if the batch is
                padded at the right and bottom. Features inside an image then equal those of the
                image alone, and are zero outside. None: nothing is padding.

        Returns:
            For each of `out_indices` a map (B, C, ceil(H / stride), ceil(W / stride)).
        """
        maps = self.stage_maps(image, valid, self.out_indices)
        return tuple(maps[i].permute(0, 3, 1, 2) for i in self.out_indices)

    def stage_maps(
        self, image: Tensor, valid: Optional[Tensor], stages: Collection[int]
    ) -> dict[int, Tensor]:
        """The maps (B, H, W, C) of some stages; those after the last of them do not run."""
        check_image(image, self.in_channels)
        batch = BatchPadding(image, valid)
        x = fill_outside(image.permute(0, 2, 3, 1), batch.at(1))  # (B, H, W, in_channels)
        finer = 1
        maps = {}
        for i in range(max(stages) + 1):
            stride = self.arch.strides[i]
            padding = batch.at(stride, finer)
            keys = batch.at(stride * self.arch.sr_ratios[i], finer=stride)
            finer = stride
            x = self.forward_stage(i, x, padding, keys)
            if i in stages:
                maps[i] = x
        return maps

    def forward_stage(
        self,
        i: int,
        x: Tensor,
        padding: Optional[Padding] = None,
        keys: Optional[Padding] = None,
    ) -> Tensor:
        """Stage i: from the tokens of the stage before, or the image, to its own tokens.

        Both are zero outside of each image. `padding` is that of the stage's own tokens, and `keys`
        that of their keys in global attention.
        """
        x = self.patch_embeds[i](x)
        grid = self.grid(i, x, padding, keys)
        x = self.pos_embeds[i](x, grid)  # PVT: a table
        if -1 in self.peg_after[i]:
            x = self.peg(i, -1)(x, grid)
        blocks: Any = self.blocks[i]  # a ModuleList, whose type names no items
        for j, block in enumerate(blocks):
            x = block(x, grid)
            if j in self.peg_after[i]:  # CPVT: after block 0
                x = self.peg(i, j)(x, grid)
        return fill_outside(self.norm_list[i](x), padding)

    def grid(self, i: int, x: Tensor, padding: Optional[Padding], keys: Optional[Padding]) -> Grid:
        """What is the same for all blocks of stage i."""
        arch = self.arch
        mask_windows = self.window_padding == 'mask'
        if self.window_padding == 'mmseg' and arch.window:
            fills_both = all(side % arch.window for side in x.shape[1:3])
            mask_windows = fills_both or padding is not None
        return Grid(
            x,
            padding,
            keys=keys,
            step=arch.sr_ratios[i],
            linear=arch.linear,
            window=arch.window,
            mask_windows=mask_windows,
            drop_border=self.drop_border,
            rope=self.rope,
            head_dim=arch.dims[i] // arch.heads[i],
        )

    def peg(self, stage: int, block: int) -> nn.Module:
        """The PEG after a block of a stage, or before the first (-1)."""
        if block == 0:
            return self.pos_block[stage]
        others: Any = self.more_pos_block[stage]  # a ModuleDict
        return others[str(block)]

    def train(self, mode: bool = True) -> 'CPVTPyramid':
        super().train(mode)
        self.freeze()
        return self

    def names_in_stages(self, stages: int) -> frozenset[str]:
        """The names of the modules and parameters in the first stages."""
        names = set()
        for name, module in self.named_modules():
            part, *rest = name.split('.')
            if part in STAGE_PARTS and rest and int(rest[0]) < stages:
                names.add(name)
                for parameter, _ in module.named_parameters(recurse=False):
                    names.add(f'{name}.{parameter}')
        return frozenset(names)

    def freeze(self) -> None:
        """Freeze the stages that do not train: what they were built of, and nothing added later."""
        if not self.frozen:
            return
        for name, module in self.named_modules():
            if name in self.frozen:
                module.training = False
        for name, parameter in self.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)


def build_attention(
    arch: Arch, stage: int, block: int, window_padding: str, **drops: float
) -> Attention:
    """The attention of a block. In SVT, blocks 0, 2, 4, ... of a stage attend inside windows."""
    dim = arch.dims[stage]
    heads = arch.heads[stage]
    if arch.linear:
        return LinearAttention(dim, heads, **drops)
    if arch.window and block % 2 == 0:
        return WindowAttention(dim, heads, arch.window, window_padding, **drops)
    return GlobalAttention(dim, heads, arch.sr_ratios[stage], **drops)


def build_mlp(arch: Arch, stage: int, drop: float, recompute_gelu: bool) -> MLP:
    """The MLP of the blocks of a stage."""
    dim = arch.dims[stage]
    hidden = int(dim * arch.mlp_ratios[stage])
    if arch.mlp_conv:
        return ConvMLP(dim, hidden, drop, recompute_gelu, relu=arch.linear)
    return MLP(dim, hidden, drop, recompute_gelu)


def check_batch(image: Tensor, in_channels: int) -> None:
    """Raise a ValueError unless an image has the four dimensions of a batch."""
    if image.dim() != 4:
        raise ValueError(
            f'the image must be a batch (B, {in_channels}, H, W), got a tensor of shape '
            f'{tuple(image.shape)}'
        )


def check_image(image: Tensor, in_channels: int) -> None:
    """Raise a ValueError unless an image has these channels and at least one pixel."""
    check_batch(image, in_channels)
    if image.shape[1] != in_channels:
        raise ValueError(
            f'the image must have in_channels={in_channels} channels, got {image.shape[1]}'
        )
    if 0 in image.shape[2:]:
        height, width = image.shape[2:]
        raise ValueError(
            f'the image must have a height and a width of at least 1, got {height} x {width}'
        )


def init_weights(module: nn.Module) -> None:
    """Initial weights of the papers' code (Twins, PVT, DeiT)."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.out_channels * math.prod(module.kernel_size) // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def check_rope(rope: Optional[RoPE], arch: Arch) -> None:
    """Raise a ValueError if the attentions of an architecture cannot have this encoding."""
    if rope is None:
        return
    if arch.linear:
        raise ValueError('rope needs keys at places, which linear attention does not have')
    if arch.window and rope.normalized:
        raise ValueError(
            f'normalized coordinates need attention over the whole map, got an arch with '
            f'window={arch.window}'
        )
    for dim, heads in zip(arch.dims, arch.heads):
        rope.check(dim // heads)


def build_peg(peg: PEGConfig, dim: int) -> PosCNN:
    """A PEG for tokens with `dim` channels."""
    return PosCNN(dim, peg.kernel_size, peg.conv, peg.layers, peg.zero_padding)


def start_pegs(model: nn.Module, peg: PEGConfig) -> None:
    """Zero and freeze the PEGs of a model, according to `zero_init` and `frozen`."""
    for part in model.modules():
        if isinstance(part, PosCNN):
            part.requires_grad_(not peg.frozen)
            if peg.zero_init:
                for parameter in part.parameters():
                    nn.init.zeros_(parameter)


def set_checkpointing(model: nn.Module, enable: bool) -> None:
    """Switch activation checkpointing of all blocks of a model."""
    for module in model.modules():
        if isinstance(module, Block):
            module.with_cp = enable
