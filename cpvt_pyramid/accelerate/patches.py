"""Patches and windows: a map taken apart into squares.

Shapes: B batch, H x W map, C channels, k side of a square. Maps are padded with zeros at the right
and bottom to a multiple of k, so that there are ceil(H / k) x ceil(W / k) squares.
"""

import itertools
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import graph_is_captured, opaque_when_compiled, use_plain
from .products import autocast, gradients, linear, refuse_create_graph

# A function of windows (B * n, h * w, D), of their height h and width w, and of a mask
# (B * n, h * w) of the tokens that belong to the image (None: all do). It returns
# (B * n, h * w, E).
InWindows = Callable[[Tensor, int, int, Optional[Tensor]], Tensor]


def plain_patch_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(patches(x, weight.shape[-1]), linear_weight(weight), bias)


def patches_like(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    b, h, w, _ = x.shape
    out_channels, _, k, _ = weight.shape
    return x.new_empty(b, ceil_div(h, k), ceil_div(w, k), out_channels)


@opaque_when_compiled(patches_like)
def patch_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution whose stride equals its kernel, as a reshape and one matrix product.

    Maps (B, H, W, C) by a weight (out, C, k, k) to (B, ceil(H / k), ceil(W / k), out).
    """
    x = pad_to_multiple(x, weight.shape[-1])
    if torch.is_grad_enabled() and not use_plain():
        return _PatchConv.apply(*autocast(x, weight, bias))
    return plain_patch_conv(x, weight, bias)


class _PatchConv(torch.autograd.Function):
    """`patch_conv` with its gradient, for which the patches, a copy of the map, are recomputed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return plain_patch_conv(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        refuse_create_graph()
        x, weight = ctx.saved_tensors
        k = weight.shape[-1]
        grad_x, grad_weight, grad_bias = gradients(
            grad, patches(x, k), linear_weight(weight), ctx.needs_input_grad
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


def linear_weight(weight: Tensor) -> Tensor:
    """The weight (out, in, k, k) of a convolution, as that of a linear layer on `patches`."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def map_windows(
    function: InWindows,
    project: Callable[[Tensor], Tensor],
    x: Tensor,
    mask: Optional[Tensor],
    k: int,
) -> Tensor:
    """function(project(x)) of the windows of a map.

    A map (B, H, W, C) whose sides are not multiples of k is padded at the right and bottom. On a
    CPU the windows at its border are smaller instead.

    Args:
        function: its result must not depend on tokens outside the image.
        project: (..., C) to (..., D), called once, before or after the map is split.
        x: the map.
        mask: (B, H, W, 1), True for the tokens of the image; None: all.
        k: side of a window.

    Returns:
        (B, H, W, E).
    """
    b, h, w, _ = x.shape
    whole = not graph_is_captured() and h % k == 0 and w % k == 0
    # On GPUs it has not been measured whether less work outweighs more kernels.
    if not whole and not use_plain() and x.is_cpu:
        return map_border_windows(function, project(x), mask, k)
    # A captured graph serves other sizes, too, so that it always has a mask.
    if mask is None and not whole:
        mask = x.new_ones((b, h, w, 1), dtype=torch.bool)
    x = pad_to_multiple(x, k)
    keys = None if mask is None else to_windows(pad_to_multiple(mask, k), k, k)[..., 0]
    out = function(project(to_windows(x, k, k)), k, k, keys)
    b, padded_h, padded_w, _ = x.shape
    return from_windows(out, k, k, (b, padded_h, padded_w, out.shape[-1]))[:, :h, :w]


def map_border_windows(
    function: InWindows, x: Tensor, mask: Optional[Tensor], k: int, dim: int = 1
) -> Tensor:
    """A function of the windows of a map, which are smaller at the right and bottom border.

    The map is split where its last whole window ends, first along its height (`dim` 1), then along
    its width. In each part all windows have one size.
    """
    if dim == 3:
        height = min(x.shape[1], k)
        width = min(x.shape[2], k)
        keys = None if mask is None else to_windows(mask, height, width)[..., 0]
        out = function(to_windows(x, height, width), height, width, keys)
        return from_windows(out, height, width, (*x.shape[:3], out.shape[-1]))
    side = x.shape[dim]
    rest = side % k
    sizes = [side - rest, rest] if side > rest > 0 else [side]
    masks = itertools.repeat(None) if mask is None else mask.split(sizes, dim)
    results = []
    for part, part_mask in zip(x.split(sizes, dim), masks):
        results.append(map_border_windows(function, part, part_mask, k, dim + 1))
    return torch.cat(results, dim)


def to_windows(x: Tensor, height: int, width: int) -> Tensor:
    """Split maps (B, H, W, C) into n windows each, (B * n, height * width, C).

    H and W must be multiples of the window's height and width.
    """
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
    # A captured graph serves other sizes, too, so that it always pads.
    if graph_is_captured() or h % k or w % k:
        x = F.pad(x, (0, 0, 0, ceil_div(w, k) * k - w, 0, ceil_div(h, k) * k - h))
    return x


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b
