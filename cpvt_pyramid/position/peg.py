"""The PEG of CPVT (arXiv 2102.10882), which gets position from zeros around the map."""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor, nn

from .. import ops
from ..padding.mask import fill_outside, valid_sizes

CONVS = ('depthwise', 'separable', 'dense')


class PEGConfig(NamedTuple):
    """Placement and structure of PEGs; the defaults are those of CPVTv2 and Twins.

    The figures are the CPVT paper's, top-1 of DeiT-tiny on ImageNet in percent (sections 4.2 to 4.5
    and appendix): 68.2 without position, 72.2 with a learned position embedding.

    Attributes:
        after: indices of the blocks that a PEG follows; -1: before the first; 'all': after each.
            -1: 70.6; 0: 72.4; 3: about 72.4; (0, 1, 2, 3, 4, 5), the paper's main model: 73.4.
        kernel_size: side of the kernel, odd. 27 at -1: 72.5. What a large one gains and loses at
            other sizes is in docs/position.md.
        conv: 'depthwise'; 'separable', followed by a 1x1 convolution; or 'dense', over all
            channels. The control, dense and kernel_size 1 after each of the twelve blocks: 68.6.
        layers: PEGs in a row. Four of them, separable: 72.9.
        zero_padding: False: replicate the border, which hides it. 70.5.
        frozen: random weights that are never trained. 71.3.
        qk_only: apply PEGs only to queries and keys (columnar model). 71.3.
        zero_init: start at zero, so that PEGs added to a pretrained model change nothing before
            training.

    Examples:
        >>> before_the_blocks = CPVTPyramid('pcpvt_nano', peg=PEGConfig(after=-1, kernel_size=5))
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

        Args:
            depth: blocks of this sequence.
            most: blocks of the longest sequence of the model, which `after` may name.

        Raises:
            ValueError: `after` names other blocks.
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
        """Build a PEG for tokens with `dim` channels."""
        return PosCNN(
            dim,
            self.kernel_size,
            conv=self.conv,
            layers=self.layers,
            zero_padding=self.zero_padding,
        )

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

    The zeros beyond the border are the source of absolute position. The padding of a batch must
    look like them: tokens outside the mask are set to zero first.

    Args:
        dim: channels of the tokens.
        kernel_size: side of the kernel, odd; the paper's is 3.
        stride: of the convolution. With more than 1 the output is the convolution alone, with
            ceil(H / stride) x ceil(W / stride) tokens.
        conv: 'depthwise', 'separable' or 'dense', see `PEGConfig`.
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
            # Values in the padding do not matter: every reader masks them first.
            x = position if self.stride > 1 else x + position
        return x


class Conv(nn.Conv2d):
    """`nn.Conv2d` of tokens (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.convolve(x, self.weight, self.bias, self.stride[0], self.padding[0])


def repeat_border(x: Tensor, mask: Optional[Tensor], border: int) -> Tensor:
    """Extend each image by its nearest tokens, to (B, H + 2 border, W + 2 border, C)."""
    b, h, w, _ = x.shape
    # The row and the column that each token of the result comes from.
    rows = torch.arange(-border, h + border, device=x.device).clamp(0, h - 1).expand(b, -1)
    columns = torch.arange(-border, w + border, device=x.device).clamp(0, w - 1).expand(b, -1)
    if mask is not None:
        height, width = valid_sizes(mask)
        rows = rows.minimum(height[:, None] - 1).clamp(min=0)
        columns = columns.minimum(width[:, None] - 1).clamp(min=0)
    batch = torch.arange(b, device=x.device)[:, None, None]
    return x[batch, rows[:, :, None], columns[:, None]]
