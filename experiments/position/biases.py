"""Biases of attention scores that the package does not have: examples of an encoding of your own.

A module that is called with queries, keys and their `Grid` and returns queries, keys and a bias is
set as `position` of an attention:

    model = Column(position='none')
    for block in model.blocks:
        block.attn.position = ALiBi(block.attn.heads)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_pyramid.grid import Grid


class ALiBi(nn.Module):
    """A penalty proportional to the Euclidean distance from query to key; each head has a slope.

    ALiBi (arXiv 2108.12409) in 2-D, as in CROMA (arXiv 2311.00566), with ALiBi's slopes: for n
    heads, a power of two, 2^(-8 / n), 2^(-16 / n) ... 2^-8. The class token has no penalty.

    Args:
        heads: attention heads, a power of two.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slopes = [2 ** (-8 * (i + 1) / heads) for i in range(heads)]

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.arange(grid.height, device=q.device, dtype=q.dtype)
        columns = torch.arange(grid.width, device=q.device, dtype=q.dtype)
        down = (rows - rows[:, None])[:, None, :, None]  # (H, 1, H, 1), from query to key
        right = (columns - columns[:, None])[:, None]  # (1, W, 1, W)
        heads = [self.penalty(head, down, right) for head in range(len(self.slopes))]
        bias = torch.stack(heads).flatten(3).flatten(1, 2)[None]  # (1, heads, H * W, H * W)
        first = grid.class_tokens
        return q, k, F.pad(bias, (first, 0, first, 0))

    def penalty(self, head: int, down: Tensor, right: Tensor) -> Tensor:
        """(H, W, H, W), the bias of a head, from the offsets of keys from queries."""
        return -self.slopes[head] * distance(down, right)


class LookHere(ALiBi):
    """Heads that each look in one direction, with a penalty proportional to distance: keys outside
    a head's field of view are hidden.

    LookHere (arXiv 2405.13985), whose model has 12 heads: a third of the heads sees everything,
    with slopes 1/4, 1/16, ...; the directions of the others, with slope 1/2, are spread evenly over
    the circle. Slopes are scaled by layer, from 1.5 at the first to 0.5 at the last. A token always
    sees itself. The class token sees and is seen by all, without penalty.

    Args:
        heads: attention heads.
        depth: of the layer, from 0 for the first to 1 for the last.
        view: angle of the field of view, in degrees; 180, 90 or 45 in the paper.
    """

    HIDDEN = -1e4  # exp(-1e4) is 0 in any precision

    def __init__(self, heads: int, depth: float, view: float = 90) -> None:
        super().__init__(heads)
        self.view = math.radians(view)
        self.directed = heads - heads // 3
        slopes = [1 / 2] * self.directed + [4.0 ** -(i + 1) for i in range(heads // 3)]
        self.slopes = [(1.5 - depth) * slope for slope in slopes]

    def penalty(self, head: int, down: Tensor, right: Tensor) -> Tensor:
        penalty = super().penalty(head, down, right)
        if head >= self.directed:
            return penalty
        center = 2 * math.pi * head / self.directed + self.view / 2  # counter-clockwise from right
        ahead = right * math.cos(center) - down * math.sin(center)
        # A key on the edge of the view is seen, whatever the rounding.
        edge = distance(down, right) * math.cos(self.view / 2) - 1e-3
        return penalty.masked_fill(ahead < edge, self.HIDDEN)


def distance(down: Tensor, right: Tensor) -> Tensor:
    """The Euclidean distance."""
    return (down**2 + right**2).sqrt()
