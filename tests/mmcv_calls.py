"""Calls of mmcv's functions, each with random inputs: what returns tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mmcv import ops
from torch import Tensor


def boxes(count: int, size: float = 100.0) -> Tensor:
    """Boxes of different sizes, many of which overlap."""
    corner = torch.rand(count, 2) * size * 0.7
    return torch.cat([corner, corner + 1 + torch.rand(count, 2) * size * 0.4], 1)


def scores(count: int) -> Tensor:
    """All different."""
    return (torch.randperm(count) + 1) / (count + 1)


def regions(count: int, images: int, size: float) -> Tensor:
    index = torch.randint(images, (count, 1)).float()
    return torch.cat([index, boxes(count, size)], 1)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of a random sum of it, twice: the second pass must not find
    what the first one left."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    found = [output.detach()]
    for _ in range(2):
        grad = torch.randn(output.shape, dtype=output.dtype)
        found += torch.autograd.grad(output, leaves, grad, retain_graph=True)
    return found


def nms(offset: int = 0, count: int = 300) -> list[Tensor]:
    return list(ops.nms(boxes(count), scores(count), 0.4, offset=offset))


def batched_nms() -> list[Tensor]:
    labels = torch.randint(5, (300,))
    config = {'type': 'nms', 'iou_threshold': 0.5, 'max_num': 40}
    return list(ops.batched_nms(boxes(300), scores(300), labels, config))


def soft_nms(method: str) -> list[Tensor]:
    return list(ops.soft_nms(boxes(120), scores(120), 0.3, 0.5, 0.05, method, offset=1))


def nms_match() -> list[Tensor]:
    dets = torch.cat([boxes(200), scores(200)[:, None]], 1)
    groups = ops.nms_match(dets, 0.4)
    return [torch.cat(groups), torch.tensor([len(group) for group in groups])]


def roi_align(
    sampling_ratio: int, aligned: bool, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    rois = regions(9, 2, 60).to(dtype)
    x = torch.randn(2, 3, 16, 20, dtype=dtype)

    def pool(x: Tensor) -> Tensor:
        return ops.roi_align(x, rois, (5, 4), 0.25, sampling_ratio, 'avg', aligned)

    return with_gradients(pool, x)


def deform_conv(
    stride: int = 1, dilation: int = 1, groups: int = 1, deform_groups: int = 1
) -> list[Tensor]:
    x = torch.randn(2, 8, 9, 11)
    weight = torch.randn(6, 8 // groups, 3, 3)
    height, width = (-(-side // stride) for side in x.shape[2:])
    offset = 2 * torch.randn(2, 18 * deform_groups, height, width)

    def convolve(x: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
        return ops.deform_conv2d(
            x, offset, weight, stride, dilation, dilation, groups, deform_groups
        )

    return with_gradients(convolve, x, offset, weight)


def deform_conv_of_fixed_inputs() -> list[Tensor]:
    """Only the weights need a gradient."""
    x, offset = torch.randn(1, 4, 6, 6), torch.randn(1, 18, 6, 6)

    def convolve(weight: Tensor) -> Tensor:
        return ops.deform_conv2d(x, offset, weight, 1, 1)

    return with_gradients(convolve, torch.randn(5, 4, 3, 3))


def modulated_deform_conv(with_bias: bool, groups: int = 1, deform_groups: int = 1) -> list[Tensor]:
    x = torch.randn(2, 8, 9, 11)
    offset = 2 * torch.randn(2, 18 * deform_groups, 5, 6)
    mask = torch.rand(2, 9 * deform_groups, 5, 6)
    weight = torch.randn(6, 8 // groups, 3, 3)

    def convolve(*inputs: Tensor) -> Tensor:
        x, offset, mask, weight, *bias = inputs
        bias_or_none = bias[0] if bias else None
        return ops.modulated_deform_conv2d(
            x, offset, mask, weight, bias_or_none, 2, 1, 1, groups, deform_groups
        )

    inputs = [x, offset, mask, weight]
    if with_bias:
        inputs.append(torch.randn(6))
    return with_gradients(convolve, *inputs)


def deform_conv_of_larger_offsets() -> list[Tensor]:
    """As in DyHead."""
    offset, mask = 2 * torch.randn(2, 18, 8, 10), torch.rand(2, 9, 8, 10)
    inputs = [torch.randn(2, 4, 4, 5), offset, mask, torch.randn(6, 4, 3, 3)]

    def convolve(x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        return ops.modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1)

    return with_gradients(convolve, *inputs)


def psa_mask(kind: str, size: tuple[int, int] = (5, 7)) -> list[Tensor]:
    x = torch.randn(2, size[0] * size[1], 4, 6)
    return with_gradients(ops.PSAMask(kind, size), x)


# Operators that mmcv compiles for CPUs, too
ON_CPU: dict[str, Callable[[], list[Tensor]]] = {
    'nms': nms,
    'nms of pixels': lambda: nms(offset=1),
    'nms of one box': lambda: nms(count=1),
    'nms of no box': lambda: nms(count=0),
    'batched nms': batched_nms,
    'soft nms, naive': lambda: soft_nms('naive'),
    'soft nms, linear': lambda: soft_nms('linear'),
    'soft nms, gaussian': lambda: soft_nms('gaussian'),
    'nms_match': nms_match,
    'roi_align': lambda: roi_align(0, True),
    'roi_align, not aligned': lambda: roi_align(2, False),
    'roi_align in float64': lambda: roi_align(2, True, torch.float64),
    'deform_conv': deform_conv,
    'deform_conv, stride': lambda: deform_conv(stride=2),
    'deform_conv, dilation': lambda: deform_conv(dilation=2),
    'deform_conv, groups': lambda: deform_conv(groups=2, deform_groups=4),
    'deform_conv, weights': deform_conv_of_fixed_inputs,
    'modulated_deform_conv': lambda: modulated_deform_conv(True),
    'modulated_deform_conv, groups': lambda: modulated_deform_conv(False, 2, 2),
    'modulated_deform_conv, larger offsets': deform_conv_of_larger_offsets,
    'psa_mask, collect': lambda: psa_mask('collect'),
    'psa_mask, distribute': lambda: psa_mask('distribute'),
    'psa_mask, small': lambda: psa_mask('distribute', (3, 3)),
}
