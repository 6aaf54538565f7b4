"""Position encodings inside attentions: queries and keys are rotated, or scores get a bias."""

import math
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid, Rotation
from ..padding.batching import ceil_div
from .site import Site


class RoPE:
    """2-D rotary position embedding: queries and keys are rotated by angles that are linear in
    their row and column, so that a score depends on the offset from the query to the key.

    It is RoPE-Axial of RoPE-ViT (arXiv 2403.13298, section 3.2). Two neighboring channels are a
    plane. Half of the planes see columns alone, the other half rows, at d / 4 frequencies from 1 to
    about 1 / base. The class token is not rotated.

    Args:
        base: the ratio of the largest to the smallest frequency, nearly; 100 in the paper.
        normalized: coordinates from -2 pi to 2 pi across each image, whatever its size, instead of
            counting tokens; as in DINOv3 (arXiv 2508.10104).
    """

    def __init__(self, base: float = 100, normalized: bool = False) -> None:
        if not isinstance(base, (int, float)) or base <= 1:
            raise ValueError(f'base of RoPE must be greater than 1, got {base!r}')
        self.base = base
        self.normalized = normalized

    @classmethod
    def at(cls, site: Site, **options: Any) -> 'RoPE':
        """The rotation of a stage.

        Raises:
            ValueError: its attentions cannot have it.
        """
        rope = cls(**options)
        if not site.all_attentions('keys_have_places'):
            raise ValueError('rope needs keys at places, which linear attention does not have')
        if site.drop_border:
            raise ValueError('rope needs keys for the whole map, which drop_border leaves out')
        if rope.normalized and not site.all_attentions('sees_map'):
            raise ValueError(
                'normalized coordinates need attention over the whole map, and not in windows'
            )
        if site.head_dim % 4:
            raise ValueError(
                f'channels of a head must be a multiple of 4 for RoPE, got {site.head_dim}'
            )
        return rope

    def describe(self, grid: Grid, head_dim: int, like: Tensor) -> None:
        """Add the rotations of queries and keys to a grid and to that of its windows."""
        grid.rotations = self.rotations(grid, head_dim, like)
        if grid.windows is not None:
            grid.windows.rotations = self.rotations(grid.windows, head_dim, like)

    def rotations(self, grid: Grid, head_dim: int, like: Tensor) -> tuple[Rotation, Rotation]:
        """The rotations of queries and keys of `head_dim` channels, see `rotation`."""
        queries = self.rotation(grid, 1, head_dim, like)
        if grid.step == 1:
            return queries, queries
        return queries, self.rotation(grid, grid.step, head_dim, like)

    def rotation(self, grid: Grid, step: int, head_dim: int, like: Tensor) -> Rotation:
        """Sines and cosines at the centers of cells of `step` x `step` tokens.

        They are on the device of `like`, in its dtype or float32 if that is more precise.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        rows = centers(grid.height, step, like.device, dtype)[None]  # (1, H')
        columns = centers(grid.width, step, like.device, dtype)[None]  # (1, W')
        if self.normalized:
            height: Union[int, Tensor] = grid.height
            width: Union[int, Tensor] = grid.width
            if grid.padding is not None:
                heights, widths = grid.padding.sizes()
                height = heights.clamp(min=1)[:, None]
                width = widths.clamp(min=1)[:, None]
            rows = 2 * math.pi * ((2 * rows + 1) / height - 1)  # (B or 1, H')
            columns = 2 * math.pi * ((2 * columns + 1) / width - 1)  # (B or 1, W')
        quarter = head_dim // 4
        frequency = self.base ** (-torch.arange(quarter, device=like.device, dtype=dtype) / quarter)
        column_angles = (columns[..., None] * frequency)[:, None].expand(-1, rows.shape[1], -1, -1)
        row_angles = (rows[..., None] * frequency)[:, :, None].expand(-1, -1, columns.shape[1], -1)
        angles = torch.cat([column_angles, row_angles], dim=-1)  # (B or 1, H', W', d / 2)
        angles = F.pad(angles.flatten(1, 2), (0, 0, grid.class_tokens, 0))
        angles = angles.repeat_interleave(2, dim=-1)[:, None]  # (B or 1, 1, T, d)
        return angles.sin(), angles.cos()


def centers(side: int, step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Places of the centers of cells of `step` tokens along a side, in tokens."""
    cells = torch.arange(ceil_div(side, step), device=device, dtype=dtype)
    return cells * step + (step - 1) / 2


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of neighboring channels of queries or keys (B, heads, T, d)."""
    sin, cos = rotation
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-b, a], dim=-1).flatten(-2)  # by a quarter
    return (x * cos + turned * sin).to(x.dtype)


REACH = 8  # of relative positions in the comparison of the CPVT paper


class RelativePosition(nn.Module):
    """A bias of attention scores from the distance of key and query, in rows and in columns.

    A learned vector for each distance is added to the key (Shaw et al., arXiv 1803.02155,
    equation 4), one for the rows and one for the columns, shared by all heads. Nothing is added
    where the query or the key is the class token.

    Args:
        dim: d, channels of a head.
        reach: K, the distance at which distances are clipped.
    """

    def __init__(self, dim: int, reach: int = REACH) -> None:
        super().__init__()
        if reach < 1:
            raise ValueError(f'reach of relative positions must be at least 1, got {reach}')
        self.reach = reach
        self.rows = distance_table(reach, dim)
        self.columns = distance_table(reach, dim)

    @classmethod
    def at(cls, site: Site, reach: int = REACH) -> 'RelativePosition':
        """The positions of an attention.

        Raises:
            ValueError: distances would not be whole.
        """
        if not (site.all_attentions('queries_are_keys') and site.all_attentions('sees_map')):
            raise ValueError(
                "position 'relative' needs whole distances of queries and keys, which the columnar "
                'models (CPVT, DenseCPVT) have'
            )
        return cls(site.head_dim, reach)

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, T, d), keys, and a bias (B, heads, T, T) of their scores."""
        first = grid.class_tokens
        height = grid.height
        width = grid.width
        of_map = q[:, :, first:].unflatten(2, (height, width)) * q.shape[-1] ** -0.5
        rows = F.linear(of_map, self.rows)  # of all distances
        columns = F.linear(of_map, self.columns)
        row_index = self.distances(height)[:, None]
        column_index = self.distances(width)
        rows = rows.gather(-1, row_index.expand(*of_map.shape[:4], height))
        columns = columns.gather(-1, column_index.expand(*of_map.shape[:4], width))
        scores = rows[..., :, None] + columns[..., None, :]  # (B, heads, H, W, H, W)
        bias = scores.flatten(4).flatten(2, 3)
        return q, k, F.pad(bias, (first, 0, first, 0))

    def distances(self, side: int) -> Tensor:
        """(side, side), from each query to each key, as indices into a table."""
        at = torch.arange(side, device=self.rows.device)
        return (at - at[:, None]).clamp(-self.reach, self.reach) + self.reach


def distance_table(reach: int, dim: int) -> nn.Parameter:
    """A vector for each distance from -reach to reach."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(2 * reach + 1, dim), std=0.02))
