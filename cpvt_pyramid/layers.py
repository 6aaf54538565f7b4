"""Layers of tokens: PyTorch's, where those are wrong or slow.

Tokens are (B, H, W, C). Convolutions read them as maps (B, C, H, W) in channels-last memory.
"""

from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn

from .bfloat16 import (
    HALF,
    CorrectedBFloat16,
    layer_norm,
    needs_correction,
)


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


class PointwiseConv2d(nn.Conv2d):
    """A convolution with a 1x1 kernel, computed as a product of matrices.

    The gradient of its weight then has the strides of the weight, which DDP compares. That of a
    convolution has other strides for some sizes and numbers of threads.
    """

    stands_for = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        x = F.linear(input.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias)
        return x.permute(0, 3, 1, 2)


def convolve(convolution: nn.Module, x: Tensor) -> Tensor:
    """Apply a convolution of maps (B, C, H, W) to tokens (B, H, W, C)."""
    if x.is_cpu:
        x = x.contiguous()  # the image is not; its map would be in its order, and copied later
    x = x.permute(0, 3, 1, 2)
    if needs_correction(convolution, x):
        with CorrectedBFloat16():
            x = convolution(x)
    else:
        x = convolution(x)
    return x.permute(0, 2, 3, 1)


class LayerNorm(nn.LayerNorm):
    """PyTorch's, whose parameters get right gradients in bfloat16 on a CPU."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        norm = layer_norm if x.dtype in HALF else F.layer_norm
        return norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): in training, zero each sample of a branch with a
    probability of `rate`, and scale the others by 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...), in the same shape."""
        if not self.training:
            return x
        keep = 1 - self.rate
        scale = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep).div_(keep)
        return x * scale

    def extra_repr(self) -> str:
        return f'rate={self.rate:.3f}'


def build_dropout(rate: float) -> Optional[nn.Dropout]:
    """A dropout layer. None where the rate is 0: a call would cost time and do nothing."""
    return nn.Dropout(rate) if rate else None
