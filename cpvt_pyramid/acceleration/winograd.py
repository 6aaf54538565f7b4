"""3x3 convolutions with a third of the multiplications, for inference.

They take most of the time of an FPN and of the heads of RetinaNet and UPerNet. PyTorch computes
them directly on a CPU. Winograd's minimal filtering (Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks", arXiv:1509.09308, section 4) computes a tile of 3 x 3 outputs from
5 x 5 inputs with 25 products for each pair of channels instead of 81. On random maps of 128 to 512
channels its rounding errors are 4 to 7 times those of direct convolutions (root mean square).

The rounding of a value reaches all outputs of each tile that has it, also those that do not depend
on it. An infinite value or NaN spreads as far.

Shapes: B batch, H x W map, C channels of the input, K of the output, h x w tiles.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..padding.batching import ceil_div
from ..plain_layers import has_usual_bias
from .ordinary import fast_dtype
from .products import affine

# Values of a transformed map that are computed at a time: 8 MiB of float32, which stay in the
# cache. The fastest of the powers of two that were tried.
AT_A_TIME = 2**21
FEWEST_CHANNELS = 256  # with fewer, the transforms take longer than the products that they save

# F(3, 3), along each axis: polynomials are evaluated at 0, 1, -1/2, -2 and infinity. Points whose
# product is 1 round less than 0, 1, -1 and 2.
OUTPUTS = 3  # side of a tile's output
INPUTS = 5  # side of a tile's input
Matrix = list[list[float]]
INPUT: Matrix = [
    [-1, -1.5, 1.5, 1, 0],
    [0, 1, 2.5, 1, 0],
    [0, -2, 1, 1, 0],
    [0, -0.5, -0.5, 1, 0],
    [0, -1, -1.5, 1.5, 1],
]
WEIGHT: Matrix = [
    [-1, 0, 0],
    [2 / 9, 2 / 9, 2 / 9],
    [8 / 9, -4 / 9, 2 / 9],
    [-1 / 9, 2 / 9, -4 / 9],
    [0, 0, 1],
]
OUTPUT: Matrix = [[1, 1, 1, 1, 0], [0, 1, -0.5, -2, 0], [0, 1, 0.25, 4, 1]]


class Transformed(NamedTuple):
    """A weight in the form that tiles take.

    Attributes:
        values: a copy of the weight that it was made from.
        result: the weight in the form that tiles take.
    """

    values: Tensor
    result: Tensor


class WinogradConv2d(nn.Conv2d):
    """`nn.Conv2d` with a 3x3 kernel, stride 1 and padding 1, computed by tiles in inference.

    The weight is transformed once, and again when its values are others. Each pass compares them:
    fused optimizers and changes of `weight.data`, by which moving averages are updated and swapped,
    leave no other trace. A pass with gradients forgets the transformed weight.
    """

    stands_for = nn.Conv2d

    transformed: Optional[Transformed] = None

    def forward(self, input: Tensor) -> Tensor:
        if type(self) is not WinogradConv2d:  # see `FAST`
            return nn.Conv2d.forward(self, input)
        if is_captured() or '_conv_forward' in vars(self):
            return super().forward(input)
        if fast_dtype(input, self.weight, self.bias) != torch.float32:
            return super().forward(input)
        if not takes_tiles(self):
            return super().forward(input)
        if torch.is_grad_enabled():
            self.forget()
            return super().forward(input)
        if input.dim() != 4 or input.shape[1] != self.weight.shape[1] or not has_usual_bias(self):
            return super().forward(input)
        return winograd_conv(input, self.transformed_weight(), self.bias)

    def transformed_weight(self) -> Tensor:
        """The weight in the form that tiles take."""
        kept = self.transformed
        if kept is None or not torch.equal(kept.values, self.weight):
            values = self.weight.detach().clone()
            kept = Transformed(values, transform_weight(values))
            self.transformed = kept
        return kept.result

    def forget(self) -> None:
        """Forget the transformed weight."""
        self.__dict__.pop('transformed', None)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and saved: all but the transformed weight."""
        state = self.__dict__.copy()
        state.pop('transformed', None)
        return state


def takes_tiles(conv: nn.Conv2d) -> bool:
    """True if a convolution computes what `winograd_conv` does. Each pass asks, since attributes
    and weights can be changed at any time."""
    kernel = tuple(conv.weight.shape[2:])
    settings = (kernel, conv.stride, conv.padding, conv.dilation, conv.groups)
    return settings == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and conv.padding_mode == 'zeros'


def transform_weight(weight: Tensor) -> Tensor:
    """The weight (K, C, 3, 3) of a convolution in the form that tiles take, (25, K, C)."""
    matrix = weight.new_tensor(WEIGHT, dtype=torch.float64)
    found = torch.einsum('ai,bj,kcij->abkc', matrix, matrix, weight.double())
    return found.flatten(0, 1).to(weight.dtype)


def winograd_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """`F.conv2d` with padding 1 of a map (B, C, H, W), by a weight from `transform_weight`."""
    b, c, height, width = x.shape
    k = weight.shape[1]
    # The format is that of F.conv2d: mmcv's RoIAlign reads any map as if it were contiguous.
    layout = torch.contiguous_format
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        layout = torch.channels_last
    out = torch.empty(b, k, height, width, dtype=x.dtype, device=x.device, memory_format=layout)
    w = ceil_div(width, OUTPUTS)
    # Rows of tiles whose products stay in the cache, of one image or of several small ones.
    rows = OUTPUTS * ceil_div(AT_A_TIME, INPUTS**2 * w * max(c, k))
    images = ceil_div(rows, height)
    for maps, to in zip(x.split(images), out.split(images)):
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            above = min(top, 1)  # a row of the map, or of zeros
            part = maps[:, :, top - above : bottom + 1].permute(0, 2, 3, 1)
            h = ceil_div(bottom - top, OUTPUTS)
            padded = x.new_zeros(len(maps), OUTPUTS * h + 2, OUTPUTS * w + 2, c)
            padded[:, 1 - above : 1 - above + part.shape[1], 1 : width + 1] = part
            found = convolve_tiles(padded, weight)
            if bias is not None:
                found += bias
            to[:, :, top:bottom] = found[:, : bottom - top, :width].permute(0, 3, 1, 2)
    return out


def convolve_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve whole tiles (B, 3 h + 2, 3 w + 2, C), without padding, to (B, 3 h, 3 w, K)."""
    b, height, width, c = x.shape
    k = weight.shape[1]
    h = height // OUTPUTS
    w = width // OUTPUTS
    tall = x.new_empty(INPUTS, b, h, width, c)
    combine(INPUT, [x[:, i::OUTPUTS][:, :h] for i in range(INPUTS)], tall)
    tiles = x.new_empty(INPUTS, INPUTS, b, h, w, c)
    columns = [tall[:, :, :, i::OUTPUTS][:, :, :, :w] for i in range(INPUTS)]
    combine(INPUT, columns, tiles.transpose(0, 1))
    pairs = zip(tiles.view(INPUTS**2, b * h * w, c), weight)
    products = torch.stack([affine(tile, of_tile) for tile, of_tile in pairs])
    combined = x.new_empty(OUTPUTS, INPUTS, b, h, w, k)
    combine(OUTPUT, products.view(INPUTS, INPUTS, b, h, w, k).unbind(0), combined)
    out = x.new_empty(b, h, OUTPUTS, w, OUTPUTS, k)
    combine(OUTPUT, combined.unbind(1), out.permute(4, 2, 0, 1, 3, 5))
    return out.view(b, OUTPUTS * h, OUTPUTS * w, k)


def combine(matrix: Sequence[Sequence[float]], x: Sequence[Tensor], out: Tensor) -> None:
    """out[i] = the sum of matrix[i][j] * x[j] over j; each row of the matrix has a 1."""
    for factors, to in zip(matrix, out):
        first = factors.index(1)
        total = x[first]
        for j, factor in enumerate(factors):
            if factor and j != first:
                total = torch.add(total, x[j], alpha=factor, out=to)
