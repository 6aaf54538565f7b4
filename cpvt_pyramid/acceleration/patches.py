"""Convolutions whose stride equals their kernel, as one matrix product.

A function of our own copies the map to rows whose values are in the order of the weight's: a weight
that is permuted in each call takes longer than a small map. Without it PyTorch convolves.

Shapes: B batch, H x W map, C channels, k side of a patch.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..plain_layers import has_usual_bias
from .kernels import Linear, fast_join_patches, fast_split_patches, has_kernels
from .ordinary import NotPlain, cast, check_plain, fast_dtype, values
from .products import affine, gradients, in_dtypes_of_forward, is_differentiated


class PatchConv(nn.Conv2d):
    """A convolution of patches, computed by one product. It returns a channels-last map."""

    stands_for = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        if type(self) is not PatchConv:  # see `FAST`
            return nn.Conv2d.forward(self, input)
        if is_captured() or '_conv_forward' in vars(self):
            return super().forward(input)
        dtype = fast_dtype(input, self.weight, self.bias)
        if dtype is None or not has_kernels(dtype) or not takes_patches(self):
            return super().forward(input)
        if input.dim() != 4 or input.shape[1] != self.weight.shape[1] or not has_usual_bias(self):
            return super().forward(input)
        k = self.weight.shape[-1]
        if input.shape[2] % k or input.shape[3] % k:
            return super().forward(input)
        x, weight, bias = cast(dtype, input.permute(0, 2, 3, 1), self.weight, self.bias)
        b, height, width, _ = x.shape
        if torch.is_grad_enabled():
            rows = PatchProduct.apply(x, weight, bias)
        else:
            rows = affine(fast_split_patches(x, k), weight.flatten(1), bias)
        return rows.view(b, height // k, width // k, -1).permute(0, 3, 1, 2)


def takes_patches(conv: nn.Conv2d) -> bool:
    """True if the stride of a convolution equals its kernel. Each pass asks, since attributes and
    weights can be changed at any time."""
    k = conv.weight.shape[-1]
    return settings_of(conv) == ((k, k), (k, k), (0, 0), (1, 1), 1, 'zeros')


def settings_of(conv: nn.Conv2d) -> tuple:
    """Kernel, stride, padding, dilation, groups and how a convolution pads, as they are now."""
    kernel = tuple(conv.weight.shape[2:])
    return kernel, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode


def patches_of(
    conv: Any, side: int, in_channels: int, out_channels: int, dtype: torch.dtype
) -> Linear:
    """The linear layer of patches (C * k * k), in a dtype, that a convolution of patches with a
    side is, whose call does nothing but apply it.

    Raises:
        NotPlain: it is another layer.
    """
    check_plain(conv, PatchConv)
    weight = values(conv, 'weight', (out_channels, in_channels, side, side), dtype)
    if not takes_patches(conv):
        raise NotPlain
    return Linear(weight.flatten(1), values(conv, 'bias', (out_channels,), dtype))


class PatchProduct(torch.autograd.Function):
    """The product of `PatchConv` with its gradient, for which the patches, a copy of the map, are
    recomputed. Maps are (B, H, W, C), and results are rows, as those of `OneDNNProduct`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        return affine(fast_split_patches(x, weight.shape[-1]), weight.flatten(1), bias)

    @staticmethod
    @in_dtypes_of_forward
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        k = weight.shape[-1]
        by_torch = is_differentiated(grad)
        patches = split_patches(x, k) if by_torch else fast_split_patches(x, k)
        grad_x, grad_weight, grad_bias = gradients(
            grad, patches, weight.flatten(1), ctx.needs_input_grad
        )
        if grad_x is not None:
            join = join_patches if by_torch else fast_join_patches
            grad_x = join(grad_x, x.shape, k)
        if grad_weight is not None:
            grad_weight = grad_weight.reshape(weight.shape)
        return grad_x, grad_weight, grad_bias


def split_patches(x: Tensor, k: int) -> Tensor:
    """`fast_split_patches` by functions that can be differentiated."""
    b, height, width, c = x.shape
    x = x.reshape(b, height // k, k, width // k, k, c).permute(0, 1, 3, 5, 2, 4)
    return x.reshape(-1, c * k * k)


def join_patches(rows: Tensor, shape: Sequence[int], k: int) -> Tensor:
    """`fast_join_patches` by functions that can be differentiated."""
    b, height, width, c = shape
    rows = rows.reshape(b, height // k, width // k, c, k, k).permute(0, 1, 4, 2, 5, 3)
    return rows.reshape(shape)
