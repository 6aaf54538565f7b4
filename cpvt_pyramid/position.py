"""Position encodings: the PEG of CPVT (arXiv 2102.10882) and those it is compared with.

There are two kinds of encodings, each with one interface:
- of tokens: a module takes tokens (B, H, W, C) and their mask (see `mask.py`), and returns the
  tokens with their position added (`PosCNN`, `LearnedPosition`, `SinCosPosition`);
- inside every attention (`AttentionPosition`): queries and keys are rotated (`RoPE`), or a bias is
  added to their scores (`RelativePosition`, `FIRE`, `ALiBi`, `LookHere`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .mask import fill_outside, key_mask, subsample, valid_sizes

# The encodings of a model, each with its options; a PEG's are in `PEG`.
ROPE_OPTIONS = ('base', 'normalized')
POSITIONS = {
    'peg': (),
    'learned': (),
    'sincos': (),
    'none': (),
    'rope': ROPE_OPTIONS,
    'rope-mixed': ROPE_OPTIONS,
    'alibi': (),
    'relative': ('reach',),
    'fire': (),
    'lookhere': ('view',),
}
# Queries and keys must be the same tokens: distances are whole, and no view is empty.
COLUMNAR_POSITIONS = ('relative', 'fire', 'lookhere')
CONVS = ('depthwise', 'separable', 'dense')


class PEG(NamedTuple):
    """Placement and structure of PEGs; the defaults are those of CPVTv2 and Twins.

    The figures are the CPVT paper's, top-1 of DeiT-tiny on ImageNet in percent (sections 4.2 to 4.5
    and appendix): 68.2 without position, 72.2 with a learned table.

    Attributes:
        after: indices of the blocks that a PEG follows; -1: before the first; 'all': after each.
            -1: 70.6; 0: 72.4; 3: about 72.4; (0, 1, 2, 3, 4, 5), the paper's main model: 73.4.
        kernel_size: side of the kernel, odd. 27 at -1: 72.5. What a large one gains and loses at
            other sizes is in experiments/position/findings/canvas.md.
        conv: 'depthwise'; 'separable', followed by a 1x1 convolution; or 'dense', over all
            channels. The control, dense and kernel_size 1 after each of the twelve blocks: 68.6.
        layers: PEGs in a row. Four of them, separable: 72.9.
        zero_padding: False: replicate the border, which hides it. 70.5.
        frozen: random weights that are never trained. 71.3.
        qk_only: apply PEGs only to queries and keys (columnar model). 71.3.
        zero_init: start at zero, so that PEGs added to a pretrained model change nothing before
            training.

    Examples:
        >>> before_the_blocks = CPVTPyramid('pcpvt_nano', peg=PEG(after=-1, kernel_size=5))
        >>> replicated = CPVTPyramid('pcpvt_nano', peg=dict(zero_padding=False))
    """

    after: Union[int, str, Sequence[int]] = (0,)
    kernel_size: int = 3
    conv: str = 'depthwise'
    layers: int = 1
    zero_padding: bool = True
    frozen: bool = False
    qk_only: bool = False
    zero_init: bool = False

    def indices(self, depth: int, most: int) -> list[int]:
        """The blocks that a PEG follows, in a sequence of `depth` blocks; -1: before the first.

        Raises:
            ValueError: `after` must name blocks of the longest sequence, of `most` blocks.
        """
        if self.after == 'all':
            return list(range(depth))
        after = {self.after} if isinstance(self.after, int) else {*self.after}
        if not after or not after <= {*range(-1, most)}:
            raise ValueError(
                f"peg.after must be blocks from -1 to {most - 1} or 'all', got {self.after!r}"
            )
        return [i for i in range(-1, depth) if i in after]

    def build(self, dim: int) -> 'PosCNN':
        """One PEG, for tokens with `dim` channels."""
        return PosCNN(dim, self.kernel_size, 1, self.conv, self.layers, self.zero_padding)

    def start(self, model: nn.Module) -> None:
        """Zero and freeze the PEGs of a model, according to `zero_init` and `frozen`."""
        for part in model.modules():
            if isinstance(part, PosCNN):
                part.requires_grad_(not self.frozen)
                if self.zero_init:
                    for parameter in part.parameters():
                        nn.init.zeros_(parameter)


class PosCNN(nn.Module):
    """Positional Encoding Generator (CPVT, section 3.2): a zero-padded depthwise convolution,
    added to the tokens.

    The zeros beyond the border are the source of absolute position, so that the padding of a
    batch must look like them: tokens outside the mask are set to zero first.

    Args:
        dim: channels of the tokens.
        kernel_size: side of the kernel, odd; the paper's is 3.
        stride: of the convolution. With more than 1 the output is the convolution alone, with
            ceil(H / stride) x ceil(W / stride) tokens.
        conv: 'depthwise', 'separable' or 'dense', see `PEG`.
        layers: number of convolutions in a row, each added to its input.
        zero_padding: False replicates the border of each image instead (CPVT, table 3).

    Examples:
        >>> peg = PosCNN(64)
        >>> peg(torch.rand(2, 14, 20, 64)).shape
        torch.Size([2, 14, 20, 64])
    """

    def __init__(
        self,
        dim: int,
        kernel_size: int = 3,
        stride: int = 1,
        conv: str = 'depthwise',
        layers: int = 1,
        zero_padding: bool = True,
    ) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f'kernel_size of a PEG must be odd, got {kernel_size}')
        if conv not in CONVS:
            raise ValueError(f'conv of a PEG must be one of {", ".join(CONVS)}, got {conv!r}')
        if layers < 1 or stride < 1 or (stride > 1 and layers > 1):
            raise ValueError(
                f'layers and stride of a PEG must be at least 1, and one of them 1, got '
                f'layers={layers}, stride={stride}'
            )
        self.stride = stride
        self.border = 0 if zero_padding else kernel_size // 2
        padding = kernel_size // 2 - self.border

        def convolution() -> nn.Module:
            if conv == 'dense':
                return Conv(dim, dim, kernel_size, stride, padding)
            depthwise = Conv(dim, dim, kernel_size, stride, padding, groups=dim)
            if conv == 'depthwise':
                return depthwise
            return nn.Sequential(depthwise, Conv(dim, dim, 1))

        self.proj = nn.Sequential(*(convolution() for _ in range(layers)))  # proj.0, as published

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """Tokens (B, H, W, C) with their position added, in the same shape."""
        for convolution in self.proj:
            if self.border:
                near = repeat_border(x, mask, self.border)
            else:
                near = fill_outside(x, mask)
            position = convolution(near)
            # The padding may hold anything: every reader masks it first.
            x = position if self.stride > 1 else x + position
        return x


class Conv(nn.Conv2d):
    """`nn.Conv2d` of tokens (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.convolve(x, self.weight, self.bias, self.stride[0], self.padding[0])


class LearnedPosition(nn.Module):
    """A learned table, interpolated to the size of the map (ViT, DeiT, PVT).

    In a padded batch the table is interpolated to the size of each image.

    Args:
        dim: channels of the tokens.
        size: height and width of the table.
        mode: of the interpolation; PVT's is bilinear, DeiT's bicubic.
    """

    def __init__(self, dim: int, size: tuple[int, int], mode: str = 'bilinear') -> None:
        super().__init__()
        self.mode = mode
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, *size, dim), std=0.02))

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        _, height, width, _ = x.shape
        if mask is None:
            return x + ops.resize_table(self.table, height, width, self.mode)
        sizes = valid_sizes(mask)
        return x + ops.resize_table_each(self.table, *sizes, (height, width), self.mode)


class SinCosPosition(nn.Module):
    """Sines and cosines of row and column, computed at the size of the map.

    A quarter of the channels each for sine and cosine of the row, then of the column, at
    wavelengths from 2 pi to 10,000 * 2 pi ("Attention is all you need", section 3.5, in 2-D).

    Args:
        dim: channels of the tokens, a multiple of 4.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim % 4:
            raise ValueError(f'dim must be a multiple of 4 for 2-D sines and cosines, got {dim}')
        self.dim = dim

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        height, width = x.shape[1:3]
        quarter = self.dim // 4
        # The default dtype, which may be bfloat16, is not precise enough.
        dtype = torch.promote_types(x.dtype, torch.float32)
        frequency = 10_000 ** (-torch.arange(quarter, device=x.device, dtype=dtype) / quarter)
        rows, columns = (
            torch.arange(side, device=x.device, dtype=dtype)[:, None] * frequency
            for side in (height, width)
        )  # (H, C / 4) and (W, C / 4)
        rows = torch.cat([rows.sin(), rows.cos()], dim=1)[:, None].expand(-1, width, -1)
        columns = torch.cat([columns.sin(), columns.cos()], dim=1)[None].expand(height, -1, -1)
        return x + torch.cat([rows, columns], dim=2).to(x.dtype)


class Grid(NamedTuple):
    """The map that tokens form: the queries of an attention."""

    height: int
    width: int
    mask: Optional[Tensor] = None  # (B, H, W, 1), see mask.py
    class_tokens: int = 0  # 0 or 1, before the map's

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split tokens (B, T, C) into the class token (B, 0 or 1, C) and the map (B, H, W, C)."""
        first, x = x.split([self.class_tokens, self.height * self.width], dim=1)
        return first, x.unflatten(1, (self.height, self.width))

    def encode(self, position: nn.Module, x: Tensor) -> Tensor:
        """Add their position to the map's tokens; the class token passes through untouched."""
        first, x = self.split(x)
        x = position(x, self.mask).flatten(1, 2)
        return torch.cat([first, x], dim=1) if self.class_tokens else x

    def keys(self, step: int = 1) -> Optional[Tensor]:
        """(B, 1, 1, M), True where a key may be attended to; None: everywhere.

        Args:
            step: side of the cells of the map that have a key each.
        """
        cells = subsample(self.mask, step)
        if cells is None:
            return None
        return key_mask(F.pad(cells.flatten(1), (self.class_tokens, 0), value=True))

    def centers(self, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (H',) and columns (W',) of the centres of all `step` x `step` cells, in tokens."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        rows, columns = (
            torch.arange(ops.ceil_div(side, step), device=like.device, dtype=dtype)
            for side in (self.height, self.width)
        )
        return rows * step + (step - 1) / 2, columns * step + (step - 1) / 2


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

    From RoPE-ViT (arXiv 2403.13298, section 3.2). Two neighbouring channels are a plane, rotated by
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
        self.base = (10 if mixed else 100) if base is None else base
        if self.base <= 1:
            raise ValueError(f'base of RoPE must be greater than 1, got {base}')
        self.dim = dim
        self.normalized = normalized
        self.frequencies = None
        if mixed:
            turn = torch.rand(heads, 1)
            precise = turn.to(torch.promote_types(turn.dtype, torch.float32))
            start = self.turned_axes(precise * 2 * math.pi)
            self.frequencies = nn.Parameter(start.to(turn.dtype))

    def turned_axes(self, angle: Tensor) -> Tensor:
        """(2, heads, d / 2): f_x and f_y of axial frequencies, turned by an angle (heads, 1)."""
        quarter = self.dim // 4
        exponents = torch.arange(quarter, device=angle.device, dtype=angle.dtype) / quarter
        frequency = self.base**-exponents
        along = frequency * angle.cos()
        across = frequency * angle.sin()
        return torch.stack([torch.cat([along, -across], 1), torch.cat([across, along], 1)])

    def forward(self, q: Tensor, k: Tensor, grid: Grid, step: int = 1) -> Encoded:
        angles = self.angles(grid, 1, q)
        key_angles = angles if step == 1 else self.angles(grid, step, q)
        return rotate(q, angles), rotate(k, key_angles), None

    def angles(self, grid: Grid, step: int, like: Tensor) -> Tensor:
        """(B or 1, heads or 1, T, d / 2), by which the planes of queries or keys are rotated."""
        rows, columns = (at[None] for at in grid.centers(step, like))
        if self.normalized:
            height: Union[int, Tensor] = grid.height
            width: Union[int, Tensor] = grid.width
            if grid.mask is not None:
                height, width = (side.clamp(min=1)[:, None] for side in valid_sizes(grid.mask))
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
    """Queries or keys (B, heads, T, d), each two neighbouring channels rotated by their angle."""
    cos, sin = angles.cos(), angles.sin()
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
        self.rows, self.columns = (
            nn.Parameter(nn.init.trunc_normal_(torch.empty(2 * reach + 1, dim), std=0.02))
            for _ in range(2)
        )

    def bias(self, q: Tensor, grid: Grid, step: int) -> Tensor:
        height, width = grid.height, grid.width
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
        sides = grid.height, grid.width
        lengths = [torch.full((1,), side, device=q.device) for side in sides]
        if grid.mask is not None:
            lengths = [length.clamp(min=1) for length in valid_sizes(grid.mask)]
        rows, columns = (
            self.psi(torch.arange(1 - side, side, device=q.device)) / self.psi(length)[:, None]
            for side, length in zip(sides, lengths)
        )  # (B or 1, 2 H - 1) and (B or 1, 2 W - 1), of all offsets
        pairs = torch.broadcast_tensors(rows[:, :, None], columns[:, None])
        offsets = torch.stack(pairs, dim=-1)
        table = self.mlp(offsets.to(self.c.dtype)).permute(0, 3, 1, 2)
        index = [torch.arange(side, device=q.device) for side in sides]
        down, right = (at - at[:, None] + at.shape[0] - 1 for at in index)  # from query to key
        # (B or 1, heads, H, W, H', W')
        scores = table[:, :, down[:, None, :, None], right[None, :, None]]
        return scores.flatten(4).flatten(2, 3)

    def psi(self, x: Tensor) -> Tensor:
        """Logarithmic distances, in float32 at least; c may become negative in training."""
        c = self.c.to(torch.promote_types(self.c.dtype, torch.float32))
        return x.sign() * torch.log1p(c.abs() * x.abs())


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
        (rows, columns), (key_rows, key_columns) = grid.centers(1, q), grid.centers(step, q)
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
    return (down**2 + right**2).sqrt()


class NoPosition(nn.Module):
    """The identity, for an encoding that is not used."""

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        return x


def position_table(
    kind: str, dim: int, image_size: Union[int, Sequence[int]], stride: int, mode: str = 'bilinear'
) -> nn.Module:
    """Build the encoding that is added before the first block: a table for images of this size in
    pixels, whose interpolation has this mode, a formula or nothing."""
    sides = image_size if isinstance(image_size, (list, tuple)) else (image_size, image_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(
            f'pretrain_img_size (img_size in timm) must be a side in pixels, or a height and a '
            f'width, got {image_size!r}'
        )
    if kind == 'learned':
        height, width = (ops.ceil_div(side, stride) for side in sides)
        return LearnedPosition(dim, (height, width), mode)
    return SinCosPosition(dim) if kind == 'sincos' else NoPosition()


def attention_position(
    kind: str, heads: int, dim: int, depth: float, options: dict
) -> AttentionPosition:
    """Build the encoding inside an attention: for this number of heads and channels of a head, at
    this depth of the layer, from 0 for the first to 1 for the last."""
    if kind in ('rope', 'rope-mixed'):
        return RoPE(heads, dim, mixed=kind == 'rope-mixed', **options)
    if kind == 'relative':
        return RelativePosition(dim, **options)
    if kind == 'fire':
        return FIRE(heads)
    if kind == 'lookhere':
        return LookHere(heads, depth, **options)
    return ALiBi(heads) if kind == 'alibi' else AttentionPosition()


def parse_position(
    position: str, peg: Union[PEG, dict, None], options: Optional[dict], columnar: bool
) -> tuple[str, Optional[PEG], dict]:
    """The encoding without its PEG, the PEG, and the encoding's options.

    Arguments are those of `CPVTPyramid`, and whether the model is columnar.

    Raises:
        ValueError: an unknown name, an encoding that the model cannot have, or settings that
            nothing reads.
    """
    before, _, after = position.partition('+')
    known = [name for name in POSITIONS if columnar or name not in COLUMNAR_POSITIONS]
    if before not in known or after not in ('', 'peg') or (after and before in ('peg', 'none')):
        others = '' if columnar else f'; columnar models also have {", ".join(COLUMNAR_POSITIONS)}'
        raise ValueError(
            f'unknown position {position!r}; one of {", ".join(known)}, or one of them and a PEG, '
            f"as in 'learned+peg'{others}"
        )
    options = dict(options or {})
    if not options.keys() <= set(POSITIONS[before]):
        allowed = ', '.join(POSITIONS[before]) or 'nothing'
        raise ValueError(
            f'position_options of position={position!r} can hold {allowed}, got {options}'
        )
    if 'peg' not in (before, after):
        if peg:
            raise ValueError(f'peg={peg} needs a position with a PEG, got position={position!r}')
        return before, None, options
    peg = peg if isinstance(peg, PEG) else PEG(**(peg or {}))
    return 'none' if before == 'peg' else before, peg, options


def repeat_border(x: Tensor, mask: Optional[Tensor], border: int) -> Tensor:
    """(B, H + 2 border, W + 2 border, C): beyond its border, each image's nearest token."""
    b, h, w, _ = x.shape
    rows = torch.arange(-border, h + border, device=x.device).clamp(0, h - 1).expand(b, -1)
    columns = torch.arange(-border, w + border, device=x.device).clamp(0, w - 1).expand(b, -1)
    if mask is not None:
        height, width = valid_sizes(mask)
        rows = rows.minimum(height[:, None] - 1).clamp(min=0)
        columns = columns.minimum(width[:, None] - 1).clamp(min=0)
    batch = torch.arange(b, device=x.device)[:, None, None]
    return x[batch, rows[:, :, None], columns[:, None]]
