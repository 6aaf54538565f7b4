"""Position encodings inside every attention.

Queries and keys are rotated (`RoPE`), or a bias is added to their scores (`RelativePosition`,
`FIRE`, `ALiBi`, `LookHere`).
"""

import math
from typing import Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..padding.mask import valid_sizes
from .grid import Grid
from .settings import PositionSettings

Encoded = tuple[Tensor, Tensor, Optional[Tensor]]  # queries, keys, and a bias of their scores


class AttentionPosition(nn.Module):
    """Position inside an attention. This one has none; others derive from it."""

    def forward(self, q: Tensor, k: Tensor, grid: Grid, step: int = 1) -> Encoded:
        """Queries, keys, and a bias (B, heads, T, M) of their scores, or None.

        Args:
            q: queries (B, heads, T, d): of the class token, if there is one, and of the map.
            k: keys (B, heads, M, d): of the class token, if there is one, and of `step` x `step`
                cells of the map.
            grid: the map of the queries.
            step: side of a cell, in tokens. A key is at the centre of its cell.
        """
        return q, k, None


class RoPE(AttentionPosition):
    """2-D rotary position embedding: queries and keys are rotated by angles that are linear in
    their row and column, so that a score depends on the offset from the query to the key.

    From RoPE-ViT (arXiv 2403.13298, section 3.2). Two neighboring channels are a plane, rotated by
    column * f_x + row * f_y. 'rope' is its RoPE-Axial: half of the planes see columns alone, the
    other half rows, at d / 4 frequencies from 1 to about 1 / base. 'rope-mixed' is its RoPE-Mixed:
    f_x and f_y are learned, in each layer for each head; they start as axial frequencies, turned by
    a random angle for each head. The class token is not rotated.

    Args:
        heads: attention heads.
        dim: d, channels of a head, a multiple of 4.
        mixed: False for RoPE-Axial, True for RoPE-Mixed.
        base: the ratio of the largest to the smallest frequency, nearly. None: the paper's, 100 for
            axial and 10 for mixed.
        normalized: coordinates from -2 pi to 2 pi across each image, whatever its size, instead of
            counting tokens; as in DINOv3 (arXiv 2508.10104).
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        mixed: bool = False,
        base: Optional[float] = None,
        normalized: bool = False,
    ) -> None:
        super().__init__()
        if dim % 4:
            raise ValueError(f'channels of a head must be a multiple of 4 for RoPE, got {dim}')
        if base is None:
            base = 10 if mixed else 100
        self.base = base
        if self.base <= 1:
            raise ValueError(f'base of RoPE must be greater than 1, got {base}')
        self.dim = dim
        self.normalized = normalized
        self.frequencies = None
        if mixed:
            turns = torch.rand(heads, 1)
            # The default dtype, which may be bfloat16, is not precise enough for the angles.
            precise = turns.to(torch.promote_types(turns.dtype, torch.float32))
            start = self.turned_axes(precise * 2 * math.pi)
            self.frequencies = nn.Parameter(start.to(turns.dtype))

    def turned_axes(self, angle: Tensor) -> Tensor:
        """(2, heads, d / 2): f_x and f_y of axial frequencies, turned by an angle (heads, 1)."""
        quarter = self.dim // 4
        exponents = torch.arange(quarter, device=angle.device, dtype=angle.dtype) / quarter
        frequency = self.base**-exponents
        along = frequency * angle.cos()
        across = frequency * angle.sin()
        return torch.stack([torch.cat([along, -across], 1), torch.cat([across, along], 1)])

    def forward(self, q: Tensor, k: Tensor, grid: Grid, step: int = 1) -> Encoded:
        query_angles = self.angles(grid, 1, q)
        key_angles = query_angles if step == 1 else self.angles(grid, step, q)
        return rotate(q, query_angles), rotate(k, key_angles), None

    def angles(self, grid: Grid, step: int, like: Tensor) -> Tensor:
        """Angles of the planes of queries or keys, (B or 1, heads or 1, T, d / 2)."""
        rows, columns = grid.centers(step, like)
        rows = rows[None]  # (1 or B, H')
        columns = columns[None]  # (1 or B, W')
        if self.normalized:
            height: Union[int, Tensor] = grid.height
            width: Union[int, Tensor] = grid.width
            if grid.mask is not None:
                heights, widths = valid_sizes(grid.mask)
                height = heights.clamp(min=1)[:, None]
                width = widths.clamp(min=1)[:, None]
            rows = 2 * math.pi * ((2 * rows + 1) / height - 1)
            columns = 2 * math.pi * ((2 * columns + 1) / width - 1)
        if self.frequencies is None:
            f_x, f_y = self.turned_axes(rows.new_zeros(1, 1))
        else:
            f_x, f_y = self.frequencies.to(rows.dtype)
        column_angles = columns[:, None, None, :, None] * f_x[:, None, None]
        row_angles = rows[:, None, :, None, None] * f_y[:, None, None]
        angles = (row_angles + column_angles).flatten(2, 3)
        return F.pad(angles, (0, 0, grid.class_tokens, 0))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of neighboring channels of queries or keys (B, heads, T, d)."""
    cos = angles.cos()
    sin = angles.sin()
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


class AttentionBias(AttentionPosition):
    """Adds a `bias`, a function of the offset from the query to the key, to each score.

    Nothing is added where the query or the key is the class token.
    """

    def forward(self, q: Tensor, k: Tensor, grid: Grid, step: int = 1) -> Encoded:
        first = grid.class_tokens
        bias = self.bias(q[:, :, first:], grid, step).to(q.dtype)
        return q, k, F.pad(bias, (first, 0, first, 0)).expand(q.shape[0], -1, -1, -1)

    def bias(self, q: Tensor, grid: Grid, step: int) -> Tensor:
        """(B or 1, heads, N, M), for the queries (B, heads, N, d) of a map."""
        raise NotImplementedError


class RelativePosition(AttentionBias):
    """Attention scores from the distance of key and query, in rows and in columns.

    A learned vector for each distance is added to the key (Shaw et al., arXiv 1803.02155,
    equation 4), one for the rows and one for the columns, shared by all heads.

    Args:
        dim: d, channels of a head.
        reach: K, the distance at which distances are clipped; 8 in the CPVT paper's comparison.
    """

    def __init__(self, dim: int, reach: int = 8) -> None:
        super().__init__()
        if reach < 1:
            raise ValueError(f'reach of relative positions must be at least 1, got {reach}')
        self.reach = reach
        self.rows = distance_table(reach, dim)
        self.columns = distance_table(reach, dim)

    def bias(self, q: Tensor, grid: Grid, step: int) -> Tensor:
        height = grid.height
        width = grid.width
        q = q.unflatten(2, (height, width)) * q.shape[-1] ** -0.5
        rows = F.linear(q, self.rows)  # of all distances
        columns = F.linear(q, self.columns)
        row_index = self.distances(height)[:, None]
        column_index = self.distances(width)
        rows = rows.gather(-1, row_index.expand(*q.shape[:4], height))
        columns = columns.gather(-1, column_index.expand(*q.shape[:4], width))
        scores = rows[..., :, None] + columns[..., None, :]  # (B, heads, H, W, H, W)
        return scores.flatten(4).flatten(2, 3)

    def distances(self, side: int) -> Tensor:
        """(side, side), from each query to each key, as indices into a table."""
        at = torch.arange(side, device=self.rows.device)
        return (at - at[:, None]).clamp(-self.reach, self.reach) + self.reach


def distance_table(reach: int, dim: int) -> nn.Parameter:
    """A vector for each distance from -reach to reach."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(2 * reach + 1, dim), std=0.02))


class FIRE(AttentionBias):
    """A learned function of the offset, in rows and columns, relative to the size of the image.

    FIRE (arXiv 2310.04418, equation 2) adds f(psi(i - j) / psi(max(i, L))) to the score of query i
    and key j of a causal sequence, with psi(x) = log(c x + 1), c learned, and f an MLP of 32
    channels with a value for each head.

    Interpreted here, for images: f takes two numbers, one for the rows and one for the columns; psi
    keeps the sign of the offset; and the largest offset is that of the image, height or width, in
    place of max(i, L), whose L serves the short beginnings of sequences.

    Args:
        heads: attention heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.tensor(0.1))
        self.mlp = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, heads))

    def bias(self, q: Tensor, grid: Grid, step: int) -> Tensor:
        if grid.mask is None:
            heights = torch.full((1,), grid.height, device=q.device)
            widths = torch.full((1,), grid.width, device=q.device)
        else:
            heights, widths = valid_sizes(grid.mask)
            heights = heights.clamp(min=1)
            widths = widths.clamp(min=1)
        rows = self.relative_offsets(grid.height, heights)  # (B or 1, 2 H - 1)
        columns = self.relative_offsets(grid.width, widths)  # (B or 1, 2 W - 1)
        pairs = torch.broadcast_tensors(rows[:, :, None], columns[:, None])
        offsets = torch.stack(pairs, dim=-1)  # (B or 1, 2 H - 1, 2 W - 1, 2)
        table = self.mlp(offsets.to(self.c.dtype)).permute(0, 3, 1, 2)
        down = offset_index(grid.height, q.device)
        right = offset_index(grid.width, q.device)
        # (B or 1, heads, H, W, H', W')
        scores = table[:, :, down[:, None, :, None], right[None, :, None]]
        return scores.flatten(4).flatten(2, 3)

    def relative_offsets(self, side: int, lengths: Tensor) -> Tensor:
        """psi of all offsets along a side, relative to that of the length of each image."""
        offsets = torch.arange(1 - side, side, device=lengths.device)
        return self.psi(offsets) / self.psi(lengths)[:, None]

    def psi(self, x: Tensor) -> Tensor:
        """Logarithmic distances, in float32 at least; c may become negative in training."""
        c = self.c.to(torch.promote_types(self.c.dtype, torch.float32))
        return x.sign() * torch.log1p(c.abs() * x.abs())


def offset_index(side: int, device: torch.device) -> Tensor:
    """(side, side), the index of the offset from each query to each key, from 1 - side on."""
    at = torch.arange(side, device=device)
    return at - at[:, None] + side - 1


class ALiBi(AttentionBias):
    """A penalty proportional to the Euclidean distance from query to key; each head has a slope.

    ALiBi (arXiv 2108.12409) in 2-D, as in CROMA (arXiv 2311.00566), with ALiBi's slopes: for n
    heads, a power of two, 2^(-8 / n), 2^(-16 / n) ... 2^-8. For other numbers, the slopes of the
    next smaller power of two, then every second slope of the next larger one.

    Args:
        heads: attention heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        power = 2 ** int(math.log2(heads))
        exponents = [8 * (i + 1) / power for i in range(power)]
        exponents += [4 * (2 * i + 1) / power for i in range(heads - power)]
        self.slopes = [2**-exponent for exponent in exponents]

    def bias(self, q: Tensor, grid: Grid, step: int) -> Tensor:
        rows, columns = grid.centers(1, q)
        key_rows, key_columns = grid.centers(step, q)
        down = (key_rows - rows[:, None])[:, None, :, None]  # (H, 1, H', 1), from query to key
        right = (key_columns - columns[:, None])[:, None]  # (1, W, 1, W')
        heads = [self.penalty(head, down, right) for head in range(len(self.slopes))]
        return torch.stack(heads).flatten(3).flatten(1, 2)[None]

    def penalty(self, head: int, down: Tensor, right: Tensor) -> Tensor:
        """(H, W, H', W'), the bias of a head, from the offsets of keys from queries."""
        return -self.slopes[head] * distance(down, right)


class LookHere(ALiBi):
    """Heads that each look in one direction, with a penalty proportional to distance: keys outside
    a head's field of view are hidden.

    LookHere (arXiv 2405.13985). The paper's model has 12 heads. Eight are directed, with slope 1/2:
    head i sees the directions from i * 45 to i * 45 + view degrees, the paper's LH-180, LH-90 and
    LH-45. Four see everything, with slopes 1/4, 1/16, 1/64, 1/256. Slopes are scaled by layer, from
    1.5 at the first to 0.5 at the last. A token always sees itself. The class token sees and is
    seen by all, without penalty.

    Interpreted here: for other numbers of heads, a third of them, rounded down, sees everything,
    and the directions of the others are spread evenly over the circle. The default view is not the
    paper's, which compares three. Hidden keys get `HIDDEN`, not minus infinity: the weights are the
    same, and tokens of the padding, which may see nothing but padding, do not become NaN.

    Args:
        heads: attention heads.
        depth: of the layer, from 0 for the first to 1 for the last.
        view: angle of the field of view, in degrees; 180, 90 or 45 in the paper.
    """

    HIDDEN = -1e4  # exp(-1e4) is 0 in any precision

    def __init__(self, heads: int, depth: float, view: float = 90) -> None:
        super().__init__(heads)
        if not 0 < view <= 360:
            raise ValueError(f'view of LookHere must be an angle from 0 to 360 degrees, got {view}')
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


def attention_position(
    settings: PositionSettings, heads: int, dim: int, depth: float
) -> AttentionPosition:
    """Build the encoding inside an attention.

    Args:
        settings: of the model. Kinds that are not inside attentions give none.
        heads: attention heads.
        dim: channels of a head.
        depth: of the layer, from 0 for the first to 1 for the last.
    """
    kind = settings.kind
    if kind in ('rope', 'rope-mixed'):
        return RoPE(heads, dim, mixed=kind == 'rope-mixed', **settings.options)
    if kind == 'relative':
        return RelativePosition(dim, **settings.options)
    if kind == 'fire':
        return FIRE(heads)
    if kind == 'lookhere':
        return LookHere(heads, depth, **settings.options)
    if kind == 'alibi':
        return ALiBi(heads)
    return AttentionPosition()
