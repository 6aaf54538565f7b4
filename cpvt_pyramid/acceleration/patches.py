"""Convolutions whose stride equals their kernel, as one matrix product.

Shapes: B batch, H x W map, C channels, k side of a patch.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from .products import affine, cast, fast_dtype, gradients


class PatchConv(nn.Conv2d):
    """A convolution of patches, computed by one product. It returns a channels-last map."""

    stands_for = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        if type(self) is not PatchConv:  # see `FAST`
            return nn.Conv2d.forward(self, input)
        dtype = fast_dtype(input, self.weight, self.bias)
        if dtype is None or not takes_patches(self):
            return super().forward(input)
        if input.dim() != 4 or input.shape[1] != self.weight.shape[1]:
            return super().forward(input)
        k = self.weight.shape[-1]
        if input.shape[2] % k or input.shape[3] % k:
            return super().forward(input)
        x, weight, bias = cast(dtype, input.permute(0, 2, 3, 1), self.weight, self.bias)
        b, height, width, _ = x.shape
        if torch.is_grad_enabled():
            rows = PatchProduct.apply(x, weight, bias)
        else:
            rows = affine(split_patches(x, k), linear_weight(weight), bias)
        return rows.view(b, height // k, width // k, -1).permute(0, 3, 1, 2)


def takes_patches(conv: nn.Conv2d) -> bool:
    """True if the stride of a convolution equals its kernel. Each pass asks, since attributes and
    weights can be changed at any time."""
    kernel = tuple(conv.weight.shape[2:])
    k = kernel[0]
    settings = (kernel, conv.stride, conv.padding, conv.dilation, conv.groups)
    return settings == ((k, k), (k, k), (0, 0), (1, 1), 1) and conv.padding_mode == 'zeros'


class PatchProduct(torch.autograd.Function):
    """The product of `PatchConv` with its gradient, for which the patches, a copy of the map, are
    recomputed. Maps are (B, H, W, C), and results are rows, as those of `OneDNNProduct`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        return affine(split_patches(x, weight.shape[-1]), linear_weight(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        k = weight.shape[-1]
        patches = split_patches(x, k)
        grad_x, grad_weight, grad_bias = gradients(
            grad, patches, linear_weight(weight), ctx.needs_input_grad
        )
        if grad_x is not None:
            b, height, width, c = x.shape
            grad_x = grad_x.reshape(b, height // k, width // k, k, k, c).transpose(2, 3)
            grad_x = grad_x.reshape(x.shape)
        if grad_weight is not None:
            grad_weight = grad_weight.reshape(-1, k, k, x.shape[-1]).permute(0, 3, 1, 2)
        return grad_x, grad_weight, grad_bias


def split_patches(x: Tensor, k: int) -> Tensor:
    """(B, H, W, C), both sides multiples of k, to rows (B * H / k * W / k, k^2 C)."""
    b, height, width, c = x.shape
    x = x.reshape(b, height // k, k, width // k, k, c).transpose(2, 3)
    return x.reshape(-1, k * k * c)


def linear_weight(weight: Tensor) -> Tensor:
    """The weight (out, in, k, k) of a convolution, as that of a linear layer on patches.

    It is permuted each time, which takes a thousandth of the time of a product with a map.
    """
    return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
