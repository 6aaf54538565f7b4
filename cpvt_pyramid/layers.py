"""The parts of a stage: patch embedding, attention, MLP and block.

Shapes: B batch, H x W map, C channels, N = H * W tokens. Tokens are (B, H, W, C) throughout, except
in the columnar model, where they are (B, T, C): a class token, if it has one, then the map's.
A `Grid` is their map: its size, and the mask of the tokens that belong to their image
(`padding/mask.py`).
"""

from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn

from . import ops
from .ops import LayerNorm
from .ops.dispatch import graph_is_captured
from .padding.mask import fill_outside, key_mask, subsample
from .position import AttentionPosition, Grid


class PatchConv(nn.Conv2d):
    """A convolution of tokens whose stride equals its kernel, `size`.

    The map is padded with zeros at the right and bottom to a multiple of the kernel, so that
    the result has ceil(H / size) x ceil(W / size) tokens.
    """

    def __init__(self, in_channels: int, out_channels: int, size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=size, stride=size)

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        return ops.patch_conv(fill_outside(x, mask), self.weight, self.bias)


class PatchEmbed(nn.Module):
    """Patch embedding: one token for each patch of the image or of the previous stage's tokens.

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
        self.proj = PatchConv(in_channels, dim, size)
        # eps 1e-5 here and in GlobalAttention, as published
        self.norm = LayerNorm(dim) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> tuple[Tensor, Optional[Tensor]]:
        """The tokens and their mask."""
        if isinstance(x, Tensor) and x.shape[-1] != self.proj.in_channels:  # no proxy of torch.fx
            raise ValueError(
                f'the image must have in_channels={self.proj.in_channels} channels, '
                f'got {x.shape[-1]}'
            )
        if not graph_is_captured() and 0 in x.shape[1:3]:
            height, width = x.shape[1:3]
            raise ValueError(
                f'the image must have a height and a width of at least 1, got {height} x {width}'
            )
        x = self.drop(self.norm(self.proj(x, mask)))
        return x, subsample(mask, self.size)


class Attention(nn.Module):
    """Multi-head attention with a position encoding inside. Derived classes choose the keys.

    Their arguments:
        dim: channels of the tokens.
        heads: attention heads.
        attn_drop: dropout on the attention weights.
        drop: dropout on the output.
        position: position encoding inside the attention; None: there is none.
    """

    position: AttentionPosition

    def __init__(self, heads: int, attn_drop: float) -> None:
        super().__init__()
        self.heads = heads
        self.attn_drop = attn_drop

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, keys: Optional[Tensor], step: int = 1
    ) -> Tensor:
        """Attend from the queries of a map to its keys.

        Args:
            q: queries (B, T, C).
            k: keys (B, M, C), each of `step` x `step` cells of the map.
            v: values (B, M, C).
            grid: the map of the queries.
            keys: which keys are attended to, see `Grid.keys`.
            step: side of the cells of a key.

        Returns:
            (B, T, C).
        """
        q, k, v = [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v)]
        q, k, bias = self.position(q, k, grid, step)  # (B, heads, T or M, d)
        if keys is not None and bias is not None:
            bias = bias.masked_fill(~keys, float('-inf'))
        mask = keys if bias is None else bias
        return ops.attend(q, k, v, mask, self.attn_drop * self.training)


class GlobalAttention(Attention):
    """Every token attends to the whole map, sub-sampled (PVT, section 3.3; Twins' GSA).

    Args:
        sr_ratio: side of the patches that have one key and one value each.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        sr_ratio: int,
        attn_drop: float = 0.0,
        drop: float = 0.0,
        position: Optional[AttentionPosition] = None,
    ) -> None:
        super().__init__(heads, attn_drop)
        self.sr_ratio = sr_ratio
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.position = position or AttentionPosition()
        if sr_ratio > 1:
            self.sr = PatchConv(dim, dim, sr_ratio)
            self.norm = LayerNorm(dim)
        self.proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        (x,) = ops.autocast(x)  # cast once, for queries and keys
        q = ops.apply_linear(self.q, x).flatten(1, 2)
        coarse = self.norm(self.sr(x, grid.mask)) if self.sr_ratio > 1 else x
        k, v = ops.apply_linear(self.kv, coarse).flatten(1, 2).chunk(2, -1)
        out = self.attend(q, k, v, grid, grid.keys(self.sr_ratio), self.sr_ratio)
        return self.drop(ops.apply_linear(self.proj, out.view(x.shape)))


class WindowAttention(Attention):
    """Tokens attend to their own window (Twins' LSA, section 3.2).

    A map whose sides are not multiples of the window is padded at the right and bottom. Where
    smaller windows at the border give the same result, they are used instead
    (`ops.map_windows`).

    Args:
        window: side of a window, in tokens.
        padding: 'mask': padded tokens are not attended to. 'zero': they are, with the keys and
            values of a zero token, as in timm and in Twins' detection code.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int,
        padding: str = 'mask',
        attn_drop: float = 0.0,
        drop: float = 0.0,
        position: Optional[AttentionPosition] = None,
    ) -> None:
        super().__init__(heads, attn_drop)
        self.window = window
        self.padding = padding
        self.qkv = nn.Linear(dim, 3 * dim)
        self.position = position or AttentionPosition()
        self.proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        mask = grid.mask
        if self.padding == 'zero':  # pad the tokens, so that keys and values are those of zeros
            x = ops.pad_to_multiple(fill_outside(x, mask), self.window)
            mask = None
        project = partial(ops.apply_linear, self.qkv)
        x = ops.map_windows(self.attend_inside, project, x, mask, self.window)
        x = x[:, : grid.height, : grid.width]
        return self.drop(ops.apply_linear(self.proj, x))

    def attend_inside(
        self, qkv: Tensor, height: int, width: int, mask: Optional[Tensor] = None
    ) -> Tensor:
        """Attention inside windows of this height and width, (B * n, height * width, C)."""
        q, k, v = qkv.chunk(3, -1)
        return self.attend(q, k, v, Grid(height, width), key_mask(mask))


class SelfAttention(Attention):
    """Every token attends to every token, the class token included (ViT, DeiT).

    Args:
        peg: a PEG for queries and keys alone; the values are those of the tokens without it.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        position: Optional[AttentionPosition] = None,
        peg: Optional[nn.Module] = None,
        attn_drop: float = 0.0,
        drop: float = 0.0,
    ) -> None:
        super().__init__(heads, attn_drop)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.position = position or AttentionPosition()
        self.peg = peg
        self.proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        q, k, v = ops.apply_linear(self.qkv, x).chunk(3, -1)
        if self.peg is not None:
            q, k, _ = ops.apply_linear(self.qkv, grid.encode(self.peg, x)).chunk(3, -1)
        x = self.attend(q, k, v, grid, grid.keys())
        return self.drop(ops.apply_linear(self.proj, x))


class MLP(nn.Module):
    """Two linear layers with a GELU (erf) between them and dropout after each."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return ops.mlp(x, self.fc1, self.drop, self.fc2)


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): in training, zeros each sample with a probability of
    `rate`, and scales the others by 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        scale = x.new_empty(x.shape[:1]).bernoulli_(keep).div_(keep)  # (B,)
        return (x.transpose(0, -1) * scale).transpose(0, -1)

    def extra_repr(self) -> str:
        return f'rate={self.rate:.3f}'


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to its input.

    Args:
        dim: channels of the tokens.
        attn: the attention, called with the tokens and their `Grid`.
        mlp_ratio: hidden channels of the MLP / dim.
        drop: dropout in the MLP.
        drop_path: probability of dropping each of the two branches.
        with_cp: activation checkpointing: less memory in training, more time.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp_ratio: float,
        drop: float = 0.0,
        drop_path: float = 0.0,
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.norm2 = LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, int(dim * mlp_ratio), drop)
        self.drop_path = DropPath(drop_path)
        self.with_cp = with_cp

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """The tokens after both branches, in the same shape."""
        if self.with_cp and self.training and torch.is_grad_enabled():
            return ops.checkpoint(self.branches, x, grid)
        return self.branches(x, grid)

    def branches(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))


def set_checkpointing(model: nn.Module, enable: bool) -> None:
    """Switch activation checkpointing of all blocks of a model."""
    for module in model.modules():
        if isinstance(module, Block):
            module.with_cp = enable
