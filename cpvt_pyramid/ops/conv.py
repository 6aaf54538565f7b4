"""Convolution of tokens.

Shapes: B batch, H x W map, C channels.
"""

import torch.nn.functional as F
from torch import Tensor

from .dispatch import graph_is_captured, opaque_when_compiled


def convolved_like(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    k = weight.shape[-1]
    h, w = ((side + 2 * padding - k) // stride + 1 for side in x.shape[1:3])
    return x.new_empty(x.shape[0], h, w, len(weight))


@opaque_when_compiled(convolved_like)
def convolve(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    """`F.conv2d` of tokens (B, H, W, C); the groups follow from the shape of the weight."""
    groups = x.shape[-1] // weight.shape[1]
    if not graph_is_captured() and weight.stride(1) > 1:
        # The gradient of a depthwise weight comes with channels-last strides, which are different
        # numbers for the same memory. That of a view has the weight's, which DDP asks for.
        weight = weight.view_as(weight)
    x = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding, groups=groups)
    return x.permute(0, 2, 3, 1).contiguous()
