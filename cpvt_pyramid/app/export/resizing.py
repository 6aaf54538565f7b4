"""Bilinear resizing and adaptive pooling as products with matrices of weights.

ONNX has no adaptive pooling for maps of any size, and no resizing to a size for each image.

Shapes: B batch, C channels, h x w map.
"""

from typing import Union

import torch
from torch import Tensor, nn

Length = Union[int, torch.SymInt]  # of an axis


def resample(rows: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """rows @ x @ columns^T for each image and channel: (B, C, H, W) of a map (B, C, h, w) and
    weights (B, H, h) and (B, W, w)."""
    across = x @ columns.transpose(1, 2)[:, None]
    return rows[:, None] @ across


def resize_weights(
    old: Tensor, old_length: Length, new: Tensor, new_length: Length, align_corners: bool = False
) -> Tensor:
    """Weights (B, new_length, old_length) of bilinear `F.interpolate` along an axis, from the first
    `old` cells of each image to `new` cells, (B,) each."""
    at = torch.arange(new_length, device=old.device)
    cells = torch.arange(old_length, device=old.device)
    old, new = (side.clamp(min=1)[:, None].float() for side in (old, new))
    if align_corners:
        source = at * (old - 1) / (new - 1).clamp(min=1)
    else:
        source = (at + 0.5) * (old / new) - 0.5
    source = source.clamp(min=0).minimum(old - 1)[..., None]  # (B, new_length, 1)
    return (1 - (source - cells).abs()).clamp(min=0)


def pool_weights(length: Length, parts: int, device: torch.device) -> Tensor:
    """Weights (1, parts, length) of adaptive average pooling along an axis."""
    part = torch.arange(parts, device=device)[:, None]
    start = part * length // parts
    stop = ((part + 1) * length + parts - 1) // parts
    cells = torch.arange(length, device=device)
    inside = ((cells >= start) & (cells < stop)).float()
    return (inside / inside.sum(1, keepdim=True))[None]


class AdaptiveAvgPool2d(nn.Module):
    """`nn.AdaptiveAvgPool2d` with these numbers of parts along the axes."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.parts = rows, columns

    def forward(self, x: Tensor) -> Tensor:
        axes = zip(x.shape[2:], self.parts)
        rows, columns = (pool_weights(length, parts, x.device) for length, parts in axes)
        return resample(rows, x, columns)
