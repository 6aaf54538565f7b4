"""Deformable convolutions, and convolutions at some positions only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torchvision  # noqa: F401 (registers its operators)
from torch import Tensor

from .regions import widened

# Deformable convolution ([1703.06211](https://arxiv.org/abs/1703.06211), section 2.1), and with a
# factor of each sample its second version ([1811.11168](https://arxiv.org/abs/1811.11168)).


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """
    Args:
        offset: (B, deformable_group * kH * kW * 2, H', W'), y and x of each sample.
        output: (B, C', H', W'), filled.
        columns, ones: memory of the compiled operator.
    """
    geometry = (dH, dW, padH, padW, dilationH, dilationW, group, deformable_group)
    output.copy_(deformed(input, weight, offset, None, None, geometry, output.shape))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """`gradInput` and `gradOffset` are filled.

    So is `columns`, with the gradient of the weights, which comes with the others:
    `deform_conv_backward_parameters`, which mmcv calls next with the same memory, takes it.
    """
    geometry = (dH, dW, padH, padW, dilationH, dilationW, group, deformable_group)
    grads = deformed_backward(gradOutput, input, weight, offset, None, None, geometry)
    gradInput.copy_(grads[0])
    of_output(gradOffset, gradOutput.shape).copy_(grads[2])
    columns.resize_(weight.shape).copy_(grads[1])


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: int,
) -> None:
    """`scale` times the gradient is added to `gradWeight`."""
    if columns.shape == gradWeight.shape:
        grad = columns
    else:  # the input and the offsets need no gradient
        geometry = (dH, dW, padH, padW, dilationH, dilationW, group, deformable_group)
        grads = deformed_backward(gradOutput, input, gradWeight, offset, None, None, geometry)
        grad = grads[1].to(gradWeight.dtype)
    gradWeight.add_(grad, alpha=scale)


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """
    Args:
        mask: (B, deformable_group * kernel_h * kernel_w, H', W'), a factor of each sample.
        output: filled; see `deform_conv_forward`.
    """
    geometry = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, deformable_group)
    bias_or_none = bias if with_bias else None
    output.copy_(deformed(input, weight, offset, mask, bias_or_none, geometry, output.shape))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """All tensors `grad_*` but the first given, `grad_output`, are filled."""
    geometry = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, deformable_group)
    bias_or_none = bias if with_bias else None
    grads = deformed_backward(grad_output, input, weight, offset, mask, bias_or_none, geometry)
    grad_input.copy_(grads[0])
    grad_weight.copy_(grads[1])
    of_output(grad_offset, grad_output.shape).copy_(grads[2])
    of_output(grad_mask, grad_output.shape).copy_(grads[3])
    if with_bias:
        grad_bias.copy_(grads[4])


def deformed(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    geometry: tuple[int, ...],
    output_shape: torch.Size,
) -> Tensor:
    tensors = torchvision_tensors(input, weight, offset, mask, bias, output_shape)
    return torch.ops.torchvision.deform_conv2d(*tensors, *geometry, mask is not None)


def deformed_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    geometry: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """Gradients of input, weight, offset, mask and bias."""
    tensors = torchvision_tensors(input, weight, offset, mask, bias, grad_output.shape)
    grad = widened(grad_output)
    return torch.ops.torchvision._deform_conv2d_backward(
        grad, *tensors, *geometry, mask is not None
    )


def torchvision_tensors(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    output_shape: torch.Size,
) -> list[Tensor]:
    """What torchvision's operator takes: an empty mask and a bias of zeros for none."""
    offset = of_output(offset, output_shape)
    mask = input.new_zeros(len(input), 1) if mask is None else of_output(mask, output_shape)
    if bias is None:
        bias = input.new_zeros(len(weight))
    return [widened(x).contiguous() for x in (input, weight, offset, mask, bias)]


def of_output(values: Tensor, output_shape: torch.Size) -> Tensor:
    """Offsets or factors (B, C, H, W) at the positions of the output (B, C', H', W').

    DyHead passes those of a larger map. The compiled operator does not notice, and reads the memory
    of each image as if it were (C, H', W'). DyHead's weights are trained with that.
    """
    size = output_shape[2:]
    if values.shape[2:] == size:
        return values
    count = values.shape[1] * size.numel()
    memory = values.flatten(1)
    if count > memory.shape[1]:
        raise ValueError(
            f'deformable convolution: offsets must be of the size of the output {tuple(size)}, '
            f'got {tuple(values.shape[2:])}'
        )
    return memory[:, :count].unflatten(1, (values.shape[1], *size))


# Convolution at the positions of a mask, as in guided anchoring


def masked_im2col_forward(
    im: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    col: Tensor,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
) -> None:
    """
    Args:
        im: one image (1, C, H, W).
        mask_h_idx, mask_w_idx: the positions, (P,) each.
        col: (C * kernel_h * kernel_w, P), filled with the patches that a convolution reads there.
    """
    padded = F.pad(im[0], (pad_w, pad_w, pad_h, pad_h))
    rows = mask_h_idx + torch.arange(kernel_h, device=im.device)[:, None]  # (kernel_h, P)
    columns = mask_w_idx + torch.arange(kernel_w, device=im.device)[:, None]
    patches = padded[:, rows[:, None], columns[None]]  # (C, kernel_h, kernel_w, P)
    col.copy_(patches.reshape(col.shape))


def masked_col2im_forward(
    col: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    im: Tensor,
    height: int,
    width: int,
    channels: int,
) -> None:
    """`im` (1, C, H, W) gets the columns of `col` (C, P) at the positions."""
    im[0, :, mask_h_idx, mask_w_idx] = col
