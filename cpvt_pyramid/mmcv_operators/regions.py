"""Features of regions of interest: RoIAlign, RoIPool, and its deformable kind.

`rois` are (K, 5): the index of the image, and x1, y1, x2, y2 in pixels. A feature map has
`spatial_scale` times their coordinates.
"""

from __future__ import annotations

import torch
import torchvision  # noqa: F401 (registers its operators)
from torch import Tensor

from .missing import raise_missing

MAX, AVERAGE = 0, 1  # modes of RoIAlign


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """
    Args:
        input: (B, C, H, W).
        output: (K, C, aligned_height, aligned_width), filled.
        argmax_y, argmax_x: of the maximum, which is not provided.
    """
    if pool_mode == MAX:
        raise_missing("roi_align with pool_mode='max'")
    pooled = torch.ops.torchvision.roi_align(
        widened(input),
        widened(rois),
        spatial_scale,
        aligned_height,
        aligned_width,
        sampling_ratio,
        aligned,
    )
    output.copy_(pooled)


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """`grad_input` (B, C, H, W) is filled."""
    grad = torch.ops.torchvision._roi_align_backward(
        widened(grad_output),
        widened(rois),
        spatial_scale,
        aligned_height,
        aligned_width,
        *grad_input.shape,
        sampling_ratio,
        aligned,
    )
    grad_input.copy_(grad)


def widened(x: Tensor) -> Tensor:
    """A tensor in float32, or float64 if it is in that."""
    return x if x.dtype == torch.float64 else x.float()


# RoIPool: torchvision's rounds the corners of regions, mmcv's does not.


def roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """
    Args:
        output: (K, C, pooled_height, pooled_width), filled with the maximum of each cell, and 0
            where a cell is empty.
        argmax: the same shape, filled with y * W + x of the maximum, and -1.
    """
    height, width = input.shape[2:]
    output.zero_()
    argmax.fill_(-1)
    if not len(rois):
        return
    rows = cells(rois[:, 2], rois[:, 4], spatial_scale, pooled_height, height)
    columns = cells(rois[:, 1], rois[:, 3], spatial_scale, pooled_width, width)
    for k, image in enumerate(rois[:, 0].long().tolist()):
        for i, (top, bottom) in enumerate(rows[k]):
            for j, (left, right) in enumerate(columns[k]):
                if top >= bottom or left >= right:
                    continue
                cell = input[image, :, top:bottom, left:right]
                output[k, :, i, j], index = cell.flatten(1).max(1)
                y = top + index // (right - left)
                x = left + index % (right - left)
                argmax[k, :, i, j] = (y * width + x).int()


def cells(
    first: Tensor, last: Tensor, spatial_scale: float, count: int, size: int
) -> list[list[list[int]]]:
    """Start and end of `count` cells along one side of each region, in [0, size], half-open."""
    start = (first * spatial_scale)[:, None]
    length = ((last + 1) * spatial_scale)[:, None] - start
    cell = length / count
    index = torch.arange(count, device=first.device)
    starts = (index * cell + start).floor().clamp(0, size)
    ends = ((index + 1) * cell + start).ceil().clamp(0, size)
    ends = torch.where(length > 0, ends, 0)
    return torch.stack([starts, ends], -1).int().tolist()


def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """`grad_input` (B, C, H, W) is filled."""
    grad = torch.zeros_like(grad_input, memory_format=torch.contiguous_format).flatten(2)
    index = argmax.long().flatten(2)  # (K, C, cells)
    source = torch.where(index >= 0, grad_output.flatten(2), 0)
    for k, image in enumerate(rois[:, 0].long().tolist()):
        grad[image].scatter_add_(1, index[k].clamp(min=0), source[k])
    grad_input.copy_(grad.view_as(grad_input))


# Deformable RoIPool ([1703.06211](https://arxiv.org/abs/1703.06211), section 2.2)


def deform_roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    output: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    """
    Args:
        offset: (K, 2, pooled_height, pooled_width), by which the cells move, x and y in `gamma`
            times the region's size; or empty.
        output: (K, C, pooled_height, pooled_width), filled with the means of the cells.
    """
    for k in range(len(rois)):
        moved = offset[k] if offset.numel() else None
        output[k] = deformed_region(
            widened(input),
            rois[k],
            moved,
            (pooled_height, pooled_width),
            spatial_scale,
            sampling_ratio,
            gamma,
        )


def deform_roi_pool_backward(
    grad_output: Tensor,
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    """`grad_input` and `grad_offset` are filled."""
    leaf = widened(input).detach().requires_grad_()
    for k in range(len(rois)):
        with torch.enable_grad():
            moved = offset[k].detach().requires_grad_() if offset.numel() else None
            region = deformed_region(
                leaf,
                rois[k],
                moved,
                (pooled_height, pooled_width),
                spatial_scale,
                sampling_ratio,
                gamma,
            )
        inputs = [leaf] if moved is None else [leaf, moved]
        grads = torch.autograd.grad(region, inputs, grad_output[k].to(region.dtype))
        grad_input += grads[0].to(grad_input.dtype)
        if moved is not None:
            grad_offset[k] = grads[1]


def deformed_region(
    input: Tensor,
    roi: Tensor,
    offset: Tensor | None,
    size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> Tensor:
    """(C, height, width), the features of one region."""
    image = int(roi[0])
    x1, y1, x2, y2 = (widened(roi[1:]) * spatial_scale - 0.5).unbind()
    shape = torch.stack([y2 - y1, x2 - x1])  # height and width
    samples = [sampling_ratio] * 2
    if sampling_ratio <= 0:
        cell = shape / torch.tensor(size, device=shape.device)
        samples = [int(count) for count in cell.ceil().tolist()]
    if min(samples) < 1:
        return input.new_zeros(input.shape[1], *size)
    y = sample_points(y1, y2, size[0], samples[0])  # (height, samples)
    x = sample_points(x1, x2, size[1], samples[1])
    y = y[:, None, :, None]
    x = x[None, :, None, :]
    if offset is not None:
        x = x + (gamma * shape[1] * widened(offset[0]))[:, :, None, None]
        y = y + (gamma * shape[0] * widened(offset[1]))[:, :, None, None]
    y, x = torch.broadcast_tensors(y, x)  # (height, width, samples, samples)
    return bilinear(input[image], y, x).mean((-2, -1))


def sample_points(start: Tensor, end: Tensor, cells: int, samples: int) -> Tensor:
    """(cells, samples), in the middles of equal parts."""
    index = torch.arange(cells * samples, device=start.device)
    points = start + (index + 0.5) * (end - start) / (cells * samples)
    return points.view(cells, samples)


def bilinear(feature: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Values (C, ...) of a feature (C, H, W) at points. Up to one pixel outside of the feature,
    points have the value of its border; further outside, 0."""
    height, width = feature.shape[1:]
    is_near = (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
    y = y.clamp(0, height - 1)
    x = x.clamp(0, width - 1)
    top = y.detach().floor().clamp(max=max(height - 2, 0)).long()
    left = x.detach().floor().clamp(max=max(width - 2, 0)).long()
    bottom = (top + 1).clamp(max=height - 1)
    right = (left + 1).clamp(max=width - 1)
    down, along = y - top, x - left
    upper = feature[:, top, left] * (1 - along) + feature[:, top, right] * along
    lower = feature[:, bottom, left] * (1 - along) + feature[:, bottom, right] * along
    return (upper * (1 - down) + lower * down) * is_near
