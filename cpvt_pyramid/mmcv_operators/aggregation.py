"""Sums of features whose weights depend on the image: deformable attention, CARAFE, PSANet.

Gradients are those that autograd finds for the plain version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .regions import widened


def plain_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of a function of these tensors, in float32 or float64."""
    leaves = [widened(x).detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = function(*leaves)
    return torch.autograd.grad(output, leaves, grad_output.to(output.dtype))


# Multi-scale deformable attention ([2010.04159](https://arxiv.org/abs/2010.04159), section 4.1).
# mmcv calls it on a GPU; on a CPU it has a function of its own.


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """
    Args:
        value: (B, N, heads, C), the tokens of all levels.
        value_spatial_shapes: (levels, 2), height and width.
        value_level_start_index: (levels,), the index of a level's first token.
        sampling_locations: (B, queries, heads, levels, points, 2), x and y in 0 to 1.
        attention_weights: (B, queries, heads, levels, points).
        im2col_step: memory of the compiled operator.

    Returns:
        (B, queries, heads * C).
    """
    shapes = value_spatial_shapes.tolist()
    inputs = [widened(x) for x in (value, sampling_locations, attention_weights)]
    return attention_at_points(shapes, *inputs).to(value.dtype)


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """`grad_value`, `grad_sampling_loc` and `grad_attn_weight` are filled."""
    shapes = value_spatial_shapes.tolist()

    def attention(*inputs: Tensor) -> Tensor:
        return attention_at_points(shapes, *inputs)

    inputs = (value, sampling_locations, attention_weights)
    grads = plain_gradients(attention, inputs, grad_output)
    for target, grad in zip((grad_value, grad_sampling_loc, grad_attn_weight), grads):
        target.copy_(grad)


def attention_at_points(
    shapes: Sequence[tuple[int, int]], value: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    batch, queries, heads, _, points, _ = locations.shape
    channels = value.shape[-1]
    grid = 2 * locations - 1
    levels = value.split([height * width for height, width in shapes], dim=1)
    output = value.new_zeros(batch * heads, channels, queries)
    for level, (tokens, (height, width)) in enumerate(zip(levels, shapes)):
        maps = tokens.permute(0, 2, 3, 1).reshape(batch * heads, channels, height, width)
        at = grid[:, :, :, level].transpose(1, 2).flatten(0, 1)  # (B * heads, queries, points, 2)
        sampled = F.grid_sample(maps, at, align_corners=False)  # (B * heads, C, queries, points)
        weight = weights[:, :, :, level].transpose(1, 2).reshape(batch * heads, 1, queries, points)
        output = output + (sampled * weight).sum(-1)
    return output.view(batch, heads * channels, queries).transpose(1, 2).contiguous()


# CARAFE ([1905.02188](https://arxiv.org/abs/1905.02188), section 3.2)


def carafe_naive_forward(
    features: Tensor,
    masks: Tensor,
    output: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """
    Args:
        features: (B, C, H, W).
        masks: (B, group_size * kernel_size**2, H * scale_factor, W * scale_factor), the weights of
            the window around each position of the features.
        output: (B, C, H * scale_factor, W * scale_factor), filled.
    """
    inputs = (widened(features), widened(masks))
    output.copy_(reassembled(*inputs, kernel_size, group_size, scale_factor))


def carafe_naive_backward(
    top_grad: Tensor,
    features: Tensor,
    masks: Tensor,
    bottom_grad: Tensor,
    mask_grad: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """`bottom_grad` and `mask_grad` are filled with the gradients of features and masks."""

    def reassemble(features: Tensor, masks: Tensor) -> Tensor:
        return reassembled(features, masks, kernel_size, group_size, scale_factor)

    grads = plain_gradients(reassemble, (features, masks), top_grad)
    bottom_grad.copy_(grads[0])
    mask_grad.copy_(grads[1])


def carafe_forward(
    features: Tensor,
    masks: Tensor,
    rfeatures: Tensor,
    routput: Tensor,
    rmasks: Tensor,
    output: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """See `carafe_naive_forward`. `rfeatures` is filled with the features, for the gradient."""
    rfeatures.copy_(features)
    carafe_naive_forward(features, masks, output, kernel_size, group_size, scale_factor)


def carafe_backward(
    top_grad: Tensor,
    rfeatures: Tensor,
    masks: Tensor,
    rtop_grad: Tensor,
    rbottom_grad_hs: Tensor,
    rbottom_grad: Tensor,
    rmask_grad: Tensor,
    bottom_grad: Tensor,
    mask_grad: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """See `carafe_naive_backward`."""
    carafe_naive_backward(
        top_grad, rfeatures, masks, bottom_grad, mask_grad, kernel_size, group_size, scale_factor
    )


def reassembled(
    features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> Tensor:
    batch, channels, height, width = features.shape
    grouped = (batch, group_size, channels // group_size)
    windows = F.unfold(features, kernel_size, padding=kernel_size // 2)
    windows = windows.view(*grouped, kernel_size**2, height, 1, width, 1)
    weights = masks.view(
        batch, group_size, 1, kernel_size**2, height, scale_factor, width, scale_factor
    )
    output = features.new_zeros(*grouped, height, scale_factor, width, scale_factor)
    for position in range(kernel_size**2):  # one by one: all of them take much memory
        output = output + windows[:, :, :, position] * weights[:, :, :, position]
    return output.view(batch, channels, height * scale_factor, width * scale_factor)


# Point-wise spatial attention (PSANet, ECCV 2018, section 3.3)


def psamask_forward(
    input: Tensor,
    output: Tensor,
    psa_type: int,
    num_: int,
    h_feature: int,
    w_feature: int,
    h_mask: int,
    w_mask: int,
    half_h_mask: int,
    half_w_mask: int,
) -> None:
    """
    Args:
        input: (B, h_mask * w_mask, H, W), the attention of each position to its neighborhood.
        output: (B, H * W, H, W), filled with its attention to each position of the map: the second
            dimension is that position if `psa_type` is 0 (collect), and the own one if it is 1
            (distribute).
    """
    own, other, neighbor = neighborhoods(
        h_feature, w_feature, h_mask, w_mask, half_h_mask, half_w_mask, input.device
    )
    attention = input.flatten(2)[:, neighbor, own]
    first, second = (other, own) if psa_type == 0 else (own, other)
    filled = torch.zeros_like(output).flatten(2)
    filled[:, first, second] = attention
    output.copy_(filled.view_as(output))


def psamask_backward(
    grad_output: Tensor,
    grad_input: Tensor,
    psa_type: int,
    num_: int,
    h_feature: int,
    w_feature: int,
    h_mask: int,
    w_mask: int,
    half_h_mask: int,
    half_w_mask: int,
) -> None:
    """`grad_input` (B, h_mask * w_mask, H, W) is filled."""
    own, other, neighbor = neighborhoods(
        h_feature, w_feature, h_mask, w_mask, half_h_mask, half_w_mask, grad_output.device
    )
    first, second = (other, own) if psa_type == 0 else (own, other)
    filled = torch.zeros_like(grad_input).flatten(2)
    filled[:, neighbor, own] = grad_output.flatten(2)[:, first, second]
    grad_input.copy_(filled.view_as(grad_input))


def neighborhoods(
    height: int,
    width: int,
    mask_height: int,
    mask_width: int,
    half_height: int,
    half_width: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of a position and one of its neighborhood, flattened: the index of the position, of
    the other, and of the place that the other has in the neighborhood."""
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    down = torch.arange(mask_height, device=device)
    right = torch.arange(mask_width, device=device)
    y, x, i, j = torch.meshgrid(row, column, down, right, indexing='ij')
    other_y, other_x = y + i - half_height, x + j - half_width
    is_on_map = (other_y >= 0) & (other_y < height) & (other_x >= 0) & (other_x < width)
    own = (y * width + x)[is_on_map]
    other = (other_y * width + other_x)[is_on_map]
    neighbor = (i * mask_width + j)[is_on_map]
    return own, other, neighbor
