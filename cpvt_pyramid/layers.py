"""The parts of a stage: patch embedding, the two attentions, MLP and block.

Shapes: B batch, H x W map, C channels, N = H * W tokens. Tokens are (B, H, W, C) throughout,
but for the columnar model, where they are (B, T, C): a class token, if it has one, then the map's.
`inside` says which of them are not padding of the batch, see `inside.py`.
"""

from contextlib import nullcontext
from typing import NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from .mask import coarser, fill_outside
from .ops.attention import attend, some_key
from .ops.captured import graph_is_captured, opaque
from .ops.linear import Linear, as_autocast, differentiable, gradients, mlp, not_read, product
from .position import RelativePosition


class PatchConv(nn.Conv2d):
    """A convolution whose kernel equals its stride, as a reshape and one matrix product.

    The map is padded with zeros at the right and bottom to a multiple of the kernel, so that
    the result has ceil(H / k) x ceil(W / k) cells.

    Args:
        in_channels: channels of the input tokens.
        out_channels: channels of the output tokens.
        size: k, side of the patch.
    """

    def __init__(self, in_channels: int, out_channels: int, size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=size, stride=size)

    def forward(self, x: Tensor, inside: Optional[Tensor] = None) -> Tensor:
        return patch_conv(fill_outside(x, inside), self.weight, self.bias)


def patches_like(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    (b, h, w, _), (out_channels, _, k, _) = x.shape, weight.shape
    return x.new_empty(b, ceil_div(h, k), ceil_div(w, k), out_channels)


@opaque(patches_like)
def patch_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(B, H, W, C) to (B, ceil(H / k), ceil(W / k), out_channels); weight is as in nn.Conv2d."""
    x = pad_to_multiple(x, weight.shape[-1])
    if graph_is_captured():
        return plain_patch_conv(x, weight, bias)
    return _PatchConv.apply(*as_autocast(x, weight, bias))


def plain_patch_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(patches(x, weight.shape[-1]), as_rows(weight), bias)


class _PatchConv(torch.autograd.Function):
    """`patch_conv` of a map that is a multiple of the patch, with its gradient, for which the
    patches, a copy of the map, are made again."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return product(patches(x, weight.shape[-1]), as_rows(weight), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight, _ = inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable(plain_patch_conv, inputs, ctx.needs_input_grad, grad)
        k = weight.shape[-1]
        grad_x, grad_weight, grad_bias = gradients(
            grad, patches(x, k), as_rows(weight), ctx.needs_input_grad
        )
        if grad_x is not None:
            grad_x = from_windows(grad_x, k, x.shape)
        if grad_weight is not None:
            grad_weight = grad_weight.unflatten(1, (k, k, -1)).permute(0, 3, 1, 2)
        return grad_x, grad_weight, grad_bias


def patches(x: Tensor, size: int) -> Tensor:
    """(B, H, W, C), both sides multiples of `size`, to (B, H / size, W / size, size^2 C)."""
    b, h, w, _ = x.shape
    return to_windows(x, size).reshape(b, h // size, w // size, -1)


def as_rows(weight: Tensor) -> Tensor:
    """The weight of a convolution, (out, in, k, k), as that of a linear layer of `patches`."""
    return weight.permute(0, 2, 3, 1).flatten(1)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, by way of `layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


@opaque(lambda x, *others: x.new_empty(x.shape))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class PatchEmbed(nn.Module):
    """Patches of the image, or of the previous stage's tokens, to this stage's tokens.

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

    def forward(
        self, x: Tensor, inside: Optional[Tensor] = None
    ) -> tuple[Tensor, Optional[Tensor]]:
        """The tokens, and which of them are `inside`."""
        x = self.drop(self.norm(self.proj(x, inside)))
        return x, coarser(inside, self.size)


class GlobalAttention(nn.Module):
    """Every token attends to the whole map, sub-sampled (PVT, section 3.3; Twins' GSA).

    Args:
        dim: channels of the tokens.
        heads: attention heads.
        sr_ratio: the keys and values are one token for each patch of this side.
        attn_drop: dropout on the attention weights.
        drop: dropout on the output.
    """

    def __init__(
        self, dim: int, heads: int, sr_ratio: int, attn_drop: float = 0.0, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.sr_ratio = sr_ratio
        self.attn_drop = attn_drop
        self.q = Linear(dim, dim)
        self.kv = Linear(dim, 2 * dim)
        if sr_ratio > 1:
            self.sr = PatchConv(dim, dim, sr_ratio)
            self.norm = LayerNorm(dim)
        self.proj = Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, inside: Optional[Tensor] = None) -> Tensor:
        b, h, w, c = x.shape
        (x,) = as_autocast(x)  # once for all that follows
        coarse = self.norm(self.sr(x, inside)) if self.sr_ratio > 1 else x
        q = self.q(x).view(b, h * w, self.heads, -1).transpose(1, 2)  # (B, heads, N, d)
        k, v = self.kv(coarse).view(b, -1, 2, self.heads, c // self.heads).unbind(2)
        if inside is not None:
            inside = some_key(coarser(inside, self.sr_ratio).reshape(b, -1))
        x = attend(q, k.transpose(1, 2), v.transpose(1, 2), inside, self.attn_drop * self.training)
        return self.drop(self.proj(x.view(b, h, w, c)))


class WindowAttention(nn.Module):
    """Tokens attend to their own window (Twins' LSA, section 3.2).

    Maps that the window does not divide are padded at the right and bottom.

    Args:
        dim: channels of the tokens.
        heads: attention heads.
        window: side of a window, in tokens.
        padding: 'mask': padded tokens are not attended to. 'zero': they are, with the keys and
            values of a zero token, as in timm and in Twins' detection code.
        attn_drop: dropout on the attention weights.
        drop: dropout on the output.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int,
        padding: str = 'mask',
        attn_drop: float = 0.0,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.padding = padding
        self.attn_drop = attn_drop
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, inside: Optional[Tensor] = None) -> Tensor:
        b, h, w, c = x.shape
        x = fill_outside(x, inside)
        padded = graph_is_captured() or h % self.window or w % self.window
        if self.padding == 'zero':
            inside = None
        elif inside is None and padded:
            inside = x.new_ones((1, h, w, 1), dtype=torch.bool)

        x = pad_to_multiple(x, self.window)
        grid = x.shape
        x = to_windows(x, self.window)  # (B * windows, window^2, C)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if inside is None else self.key_mask(inside, b)
        x = attend(q, k, v, mask, self.attn_drop * self.training)
        x = from_windows(self.proj(x), self.window, grid)[:, :h, :w]
        return self.drop(x)

    def key_mask(self, inside: Tensor, batch: int) -> Tensor:
        """(B * windows, 1, 1, window^2), True where a token may be attended to."""
        mask = to_windows(pad_to_multiple(inside, self.window), self.window)[..., 0]
        return some_key(mask).repeat(batch // inside.shape[0], 1, 1, 1)


class Grid(NamedTuple):
    """The map that the tokens (B, T, C) of the columnar model come from."""

    height: int
    width: int
    class_tokens: int  # 0 or 1, in front of the map's
    inside: Optional[Tensor] = None  # (B, H, W, 1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The class token (B, 0 or 1, C), and the map (B, H, W, C)."""
        first, x = x.split([self.class_tokens, self.height * self.width], dim=1)
        return first, x.unflatten(1, (self.height, self.width))

    def encode(self, position: nn.Module, x: Tensor) -> Tensor:
        """The tokens with their position added; the class token passes through untouched."""
        first, x = self.split(x)
        x = position(x, self.inside).flatten(1, 2)
        return torch.cat([first, x], dim=1) if self.class_tokens else x

    def keys(self) -> Optional[Tensor]:
        """(B, 1, 1, T), True where a token may be attended to; None: everywhere."""
        if self.inside is None:
            return None
        return some_key(F.pad(self.inside.flatten(1), (self.class_tokens, 0), value=True))


class SelfAttention(nn.Module):
    """Every token attends to every token, the class token included (ViT, DeiT).

    Args:
        dim: channels of the tokens.
        heads: attention heads.
        relative: whether scores depend on where the key is, seen from the query.
        peg: a PEG for queries and keys alone; the values are those of the tokens without it.
        attn_drop: dropout on the attention weights.
        drop: dropout on the output.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        relative: bool = False,
        peg: Optional[nn.Module] = None,
        attn_drop: float = 0.0,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.attn_drop = attn_drop
        self.qkv = Linear(dim, 3 * dim)
        self.relative = RelativePosition(dim // heads) if relative else None
        self.peg = peg
        self.proj = Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        q, k, v = self.heads_of(x)  # (B, heads, T, d) each
        if self.peg is not None:
            q, k, _ = self.heads_of(grid.encode(self.peg, x))
        mask = grid.keys()
        if self.relative is not None:
            scores = self.relative(q[:, :, grid.class_tokens :], grid.height, grid.width)
            scores = F.pad(scores, (grid.class_tokens, 0, grid.class_tokens, 0))
            mask = scores if mask is None else scores.masked_fill(~mask, float('-inf'))
        x = attend(q, k, v, mask, self.attn_drop * self.training)
        return self.drop(self.proj(x))

    def heads_of(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()


class MLP(nn.Module):
    """Two linear layers with a GELU (erf) between them.

    Args:
        dim: channels of the tokens.
        hidden: channels between the layers.
        drop: dropout after each layer.
    """

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.fc2 = Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        if self.drop.p and self.training:
            return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))
        return mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): drops a branch for a sample, in training only.

    Args:
        rate: probability that the branch is dropped; what is kept is scaled by 1 / (1 - rate).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        return x * x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(keep).div_(keep)

    def extra_repr(self) -> str:
        return f'rate={self.rate:.3f}'


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to what came in.

    Args:
        dim: channels of the tokens.
        attn: the attention, called with the tokens and `inside`, or the columnar model's `Grid`.
        mlp_ratio: hidden channels of the MLP / dim.
        drop: dropout in the MLP.
        drop_path: probability of dropping each of the two branches.
    """

    def __init__(
        self, dim: int, attn: nn.Module, mlp_ratio: float, drop: float = 0.0, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.norm2 = LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, int(dim * mlp_ratio), drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, inside: Union[Tensor, Grid, None] = None) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), inside))
        return x + self.drop_path(self.mlp(self.norm2(x)))


def run_block(
    model: nn.Module, block: Block, x: Tensor, inside: Union[Tensor, Grid, None] = None
) -> Tensor:
    """A block of a model; where that has `with_cp`, its maps are made again for the gradient.

    All but the last: nobody reads then what the MLP, at the end of the block, makes.
    """
    if not (model.with_cp and model.training and torch.is_grad_enabled()):
        return block(x, inside)
    if graph_is_captured():
        return checkpoint(block, x, inside, use_reentrant=False)
    return checkpoint(
        block, x, inside, use_reentrant=False, context_fn=lambda: (nullcontext(), not_read())
    )


def pad_to_multiple(x: Tensor, size: int) -> Tensor:
    """Zeros at the right and bottom of (B, H, W, C) until `size` divides both sides.

    A captured graph always pads: that this size needs none must not be built into it.
    """
    h, w = x.shape[1:3]
    right, bottom = ceil_div(w, size) * size - w, ceil_div(h, size) * size - h
    if graph_is_captured() or right or bottom:
        return F.pad(x, (0, 0, 0, right, 0, bottom))
    return x


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def to_windows(x: Tensor, size: int) -> Tensor:
    """(B, H, W, C), both sides multiples of `size`, to (B * windows, size^2, C)."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // size, size, w // size, size, c).transpose(2, 3)
    return x.reshape(-1, size * size, c)


def from_windows(x: Tensor, size: int, shape: tuple[int, ...]) -> Tensor:
    """The reverse of `to_windows`; `shape` is (B, H, W, C)."""
    b, h, w, c = shape
    return x.reshape(b, h // size, w // size, size, size, c).transpose(2, 3).reshape(shape)
