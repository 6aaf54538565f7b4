"""Where position comes from: the PEG of CPVT (arXiv 2102.10882) and what it is compared with.

Every encoding is a module that takes tokens (B, H, W, C) and their mask (see `mask.py`), and
returns the tokens with their position added; except `RelativePosition`, which acts on attention.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .mask import fill_outside, valid_sizes

POSITIONS = ('peg', 'learned', 'sincos', 'none')
CONVS = ('depthwise', 'separable', 'dense')


class PEG(NamedTuple):
    """Where PEGs are and what they are made of; the defaults are those of CPVTv2 and Twins.

    The figures are the CPVT paper's, top-1 of DeiT-tiny on ImageNet (sections 4.2 to 4.5 and
    appendix): 68.2 without position, 72.2 with a learned table.
    """

    # Blocks that a PEG follows; -1: before the first; 'all': each.
    # -1: 70.6; 0: 72.4; 3: about 72.4; (0, 1, 2, 3, 4, 5), the paper's main model: 73.4
    after: Union[int, str, Sequence[int]] = (0,)
    kernel_size: int = 3  # 27 at -1: 72.5
    # 'depthwise'; 'separable': followed by a 1x1 convolution; 'dense': over all channels.
    # The control, dense and kernel_size 1 after each of the twelve blocks: 68.6
    conv: str = 'depthwise'
    layers: int = 1  # PEGs in a row; four of them, separable: 72.9
    zero_padding: bool = True  # False: replicate the border, which hides it. 70.5
    frozen: bool = False  # as drawn at random, never trained: 71.3
    qk_only: bool = False  # for queries and keys alone (columnar model): 71.3
    # Start at zero, so that PEGs added to a pretrained model change nothing before training.
    zero_init: bool = False

    def indices(self, depth: int) -> list[int]:
        """The blocks that a PEG follows, in a sequence of `depth` blocks; -1: before the first."""
        if self.after == 'all':
            return list(range(depth))
        after = (self.after,) if isinstance(self.after, int) else tuple(self.after)
        return [i for i in range(-1, depth) if i in after]

    def check(self, depth: int) -> None:
        """Raise a ValueError unless `after` names blocks of a sequence of `depth` blocks."""
        if self.after != 'all':
            after = {self.after} if isinstance(self.after, int) else set(self.after)
            if not after or after != set(self.indices(depth)):
                raise ValueError(
                    f"peg.after must be blocks from -1 to {depth - 1} or 'all', got {self.after!r}"
                )

    def build(self, dim: int) -> 'PosCNN':
        """One PEG, for tokens with `dim` channels."""
        return PosCNN(dim, self.kernel_size, 1, self.conv, self.layers, self.zero_padding)

    def start(self, model: nn.Module) -> None:
        """Zero and freeze the PEGs of a model, according to `zero_init` and `frozen`."""
        for part in model.modules():
            if isinstance(part, PosCNN):
                part.requires_grad_(not self.frozen)
                for parameter in part.parameters() if self.zero_init else ():
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

        def convolution() -> nn.Module:
            shape = dict(kernel_size=kernel_size, stride=stride, padding=kernel_size // 2)
            if self.border:
                shape.update(padding=0)
            if conv == 'dense':
                return Conv(dim, dim, **shape)
            depthwise = Conv(dim, dim, **shape, groups=dim)
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
        size = x.shape[1:3]
        if mask is None:
            return x + ops.resize_table(self.table, *size, self.mode)
        return x + ops.resize_table_each(self.table, *valid_sizes(mask), size, self.mode)


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
        frequency = 10_000 ** (-torch.arange(quarter, device=x.device) / quarter)
        rows = torch.arange(height, device=x.device)[:, None] * frequency  # (H, C / 4)
        columns = torch.arange(width, device=x.device)[:, None] * frequency  # (W, C / 4)
        rows = torch.cat([rows.sin(), rows.cos()], dim=1)[:, None].expand(-1, width, -1)
        columns = torch.cat([columns.sin(), columns.cos()], dim=1)[None].expand(height, -1, -1)
        return x + torch.cat([rows, columns], dim=2).to(x.dtype)


class RelativePosition(nn.Module):
    """Attention scores from the distance of key and query, in rows and in columns.

    A learned vector for each distance is added to the key (Shaw et al., arXiv 1803.02155,
    equation 4), one for the rows and one for the columns, shared by all heads.

    Args:
        dim: d, channels of a head.
        reach: K, the distance at which distances are clipped; 8 in the CPVT paper's comparison.
    """

    def __init__(self, dim: int, reach: int = 8) -> None:
        super().__init__()
        self.reach = reach
        self.rows, self.columns = (
            nn.Parameter(nn.init.trunc_normal_(torch.empty(2 * reach + 1, dim), std=0.02))
            for _ in range(2)
        )

    def forward(self, q: Tensor, height: int, width: int) -> Tensor:
        """(B, heads, N, N), to be added to the scores of the queries (B, heads, N, d) of a map."""
        q = q.unflatten(2, (height, width)) * q.shape[-1] ** -0.5
        rows, columns = F.linear(q, self.rows), F.linear(q, self.columns)  # of all distances
        of_row, of_column = self.distances(height)[:, None], self.distances(width)
        rows = rows.gather(-1, of_row.expand(*q.shape[:4], height))
        columns = columns.gather(-1, of_column.expand(*q.shape[:4], width))
        scores = rows[..., :, None] + columns[..., None, :]  # (B, heads, H, W, H, W)
        return scores.flatten(4).flatten(2, 3)

    def distances(self, side: int) -> Tensor:
        """(side, side), from each query to each key, as indices into a table."""
        at = torch.arange(side, device=self.rows.device)
        return (at - at[:, None]).clamp(-self.reach, self.reach) + self.reach


class NoPosition(nn.Module):
    """Tokens unchanged: the place of an encoding that is not used."""

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        return x


def position_table(kind: str, dim: int, size: int, mode: str = 'bilinear') -> nn.Module:
    """What is added before the first block: 'learned' a table, 'sincos' a formula, else nothing."""
    if kind == 'learned':
        return LearnedPosition(dim, (size, size), mode)
    return SinCosPosition(dim) if kind == 'sincos' else NoPosition()


def parse_position(
    position: str, peg: Union[PEG, dict, None], known: Sequence[str] = POSITIONS
) -> tuple[str, Optional[PEG]]:
    """The table or formula added before the first block, and the PEG, of a `position` argument.

    Args:
        position: one of `known`, or one of them and a PEG, as in 'learned+peg'.
        peg: the PEG, or a dict of its fields; None: the published one.
        known: the encodings of the model.

    Raises:
        ValueError: an unknown name, or settings of a PEG where there is none.
    """
    before, _, after = position.partition('+')
    if before not in known or after not in ('', 'peg') or (after and before in ('peg', 'none')):
        raise ValueError(
            f'unknown position {position!r}; one of {", ".join(known)}, or one of them and a PEG, '
            f"as in 'learned+peg'"
        )
    if 'peg' not in (before, after):
        if peg:
            raise ValueError(f'peg={peg} needs a position with a PEG, got position={position!r}')
        return before, None
    peg = peg if isinstance(peg, PEG) else PEG(**(peg or {}))
    return 'none' if before == 'peg' else before, peg


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
