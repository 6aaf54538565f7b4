"""Patches and windows: a map taken apart into squares.

Shapes: B batch, H x W map, C channels, k side of a square. Maps are padded with zeros at the right
and bottom to a multiple of k, so that there are ceil(H / k) x ceil(W / k) squares.
"""

from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .dispatch import graph_is_captured, stays_whole, use_plain
from .products import affine, autocast, differentiable, gradients


def plain_patch_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(patches(x, weight.shape[-1]), as_rows(weight), bias)


def patches_like(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    (b, h, w, _), (out_channels, _, k, _) = x.shape, weight.shape
    return x.new_empty(b, ceil_div(h, k), ceil_div(w, k), out_channels)


@stays_whole(patches_like)
def patch_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution whose stride equals its kernel, as a reshape and one matrix product.

    Args:
        x: map (B, H, W, C).
        weight: (out, C, k, k), as in `nn.Conv2d`.
        bias: (out,).

    Returns:
        (B, ceil(H / k), ceil(W / k), out).
    """
    x = pad_to_multiple(x, weight.shape[-1])
    if use_plain():
        return plain_patch_conv(x, weight, bias)
    return _PatchConv.apply(*autocast(x, weight, bias))


class _PatchConv(torch.autograd.Function):
    """`patch_conv` with its gradient, for which the patches, a copy of the map, are recomputed."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return affine(patches(x, weight.shape[-1]), as_rows(weight), bias)

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
            grad_x = from_windows(grad_x, k, k, x.shape)
        if grad_weight is not None:
            grad_weight = grad_weight.unflatten(1, (k, k, -1)).permute(0, 3, 1, 2)
        return grad_x, grad_weight, grad_bias


def patches(x: Tensor, k: int) -> Tensor:
    """(B, H, W, C), both sides multiples of k, to (B, H / k, W / k, k^2 C)."""
    b, h, w, c = x.shape
    return to_windows(x, k, k).reshape(b, h // k, w // k, k * k * c)


def as_rows(weight: Tensor) -> Tensor:
    """The weight of a convolution, (out, in, k, k), as that of a linear layer of `patches`."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def split_windows(x: Tensor, mask: Optional[Tensor], k: int) -> tuple[Tensor, Optional[Tensor]]:
    """Split a map into windows.

    Args:
        x: map (B, H, W, C).
        mask: (B, H, W, 1), True for the tokens of the image; None: all.
        k: side of a window.

    Returns:
        Windows (B * n, k^2, C), and which of their tokens are the image's, (B * n, k^2), or None
        where all are.
    """
    b, h, w, _ = x.shape
    # A captured graph serves other sizes, too, so that it always has a mask.
    if mask is None and (graph_is_captured() or h % k or w % k):
        mask = x.new_ones((b, h, w, 1), dtype=torch.bool)
    if mask is not None:
        mask = to_windows(pad_to_multiple(mask, k), k, k)[..., 0]
    return to_windows(pad_to_multiple(x, k), k, k), mask


def merge_windows(x: Tensor, k: int, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `split_windows`: windows to a map of this shape, (B, H, W, C)."""
    b, h, w, c = shape
    padded = b, ceil_div(h, k) * k, ceil_div(w, k) * k, c
    return from_windows(x, k, k, padded)[:, :h, :w]


def cuts_border_windows(x: Tensor, k: int) -> bool:
    """Whether to use `map_windows` instead of padding (B, H, W, C) to whole windows and masking.

    Only on a CPU: on GPUs it has not been measured whether less work outweighs more kernels.
    """
    return x.is_cpu and not use_plain() and bool(x.shape[1] % k or x.shape[2] % k)


def map_windows(function: Callable[[Tensor, int, int], Tensor], x: Tensor, k: int) -> Tensor:
    """A function of the windows of a map. Those at the right and bottom border may be smaller.

    Args:
        function: called with windows (B * n, h * w, C) and their sides, h and w, once for each
            size of windows; returns (B * n, h * w, D).
        x: map (B, H, W, C).
        k: largest side of a window.

    Returns:
        (B, H, W, D).
    """
    rows = []
    for strip in whole_and_rest(x, k, 1):
        parts = []
        for part in whole_and_rest(strip, k, 2):
            b, height, width, _ = part.shape
            sides = min(height, k), min(width, k)
            out = function(to_windows(part, *sides), *sides)
            parts.append(from_windows(out, *sides, (b, height, width, out.shape[-1])))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows, dim=1)


def whole_and_rest(x: Tensor, k: int, dim: int) -> list[Tensor]:
    """A map split where its last whole window ends; without empty parts."""
    rest = x.shape[dim] % k
    return [part for part in x.split([x.shape[dim] - rest, rest], dim) if part.shape[dim]]


def to_windows(x: Tensor, height: int, width: int) -> Tensor:
    """(B, H, W, C), whose sides are multiples of a window's, to (B * n, height * width, C)."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // height, height, w // width, width, c).transpose(2, 3)
    return x.reshape(-1, height * width, c)


def from_windows(x: Tensor, height: int, width: int, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_windows`; `shape` is (B, H, W, C)."""
    b, h, w, c = shape
    x = x.reshape(b, h // height, w // width, height, width, c)
    return x.transpose(2, 3).reshape(shape)


def pad_to_multiple(x: Tensor, k: int) -> Tensor:
    """Zeros at the right and bottom of (B, H, W, C) until k divides both sides."""
    h, w = x.shape[1:3]
    right, bottom = ceil_div(w, k) * k - w, ceil_div(h, k) * k - h
    # A captured graph serves other sizes, too, so that it always pads.
    if graph_is_captured() or right or bottom:
        return F.pad(x, (0, 0, 0, right, 0, bottom))
    return x


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b
