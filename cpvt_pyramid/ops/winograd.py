"""3x3 convolutions of other people's modules with a third of the multiplications, for inference.

They take most of the time of an FPN and of the heads of RetinaNet and UPerNet. PyTorch computes
them directly on a CPU. Winograd's minimal filtering (Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks", arXiv:1509.09308, section 4) computes a tile of 3 x 3 outputs from
5 x 5 inputs with 25 products for each pair of channels instead of 81. The maps differ from the
direct ones by rounding, five times as much as those from exact ones.

Shapes: B batch, H x W map, C channels of the input, K of the output, h x w tiles.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, nn

from .dispatch import use_onednn
from .patches import ceil_div
from .products import AT_A_TIME, onednn_affine

FEWEST_CHANNELS = 128  # with fewer, the transforms take longer than the products that they save

# F(3, 3), along each axis: polynomials are evaluated at 0, 1, -1/2, -2 and infinity. Points whose
# product is 1 round less than 0, 1, -1 and 2.
OUTPUTS, INPUTS = 3, 5  # of a tile
INPUT = [
    [-1, -1.5, 1.5, 1, 0],
    [0, 1, 2.5, 1, 0],
    [0, -2, 1, 1, 0],
    [0, -0.5, -0.5, 1, 0],
    [0, -1, -1.5, 1.5, 1],
]
WEIGHT = [
    [-1, 0, 0],
    [2 / 9, 2 / 9, 2 / 9],
    [8 / 9, -4 / 9, 2 / 9],
    [-1 / 9, 2 / 9, -4 / 9],
    [0, 0, 1],
]
OUTPUT = [[1, 1, 1, 1, 0], [0, 1, -0.5, -2, 0], [0, 1, 0.25, 4, 1]]


def use_winograd(model: nn.Module) -> None:
    """Let the 3x3 convolutions of a model be `WinogradConv2d` where that is faster, in place.

    Parameters and hooks stay. Subclasses of `nn.Conv2d` are left alone.
    """
    for module in model.modules():
        if type(module) is nn.Conv2d and takes_winograd(module):
            module.__class__ = WinogradConv2d
            if use_onednn(module.weight):
                module.transformed_weight()  # processes that are forked later share it


def takes_winograd(conv: nn.Conv2d) -> bool:
    """True if a layer computes what `winograd_conv` does, with enough channels."""
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
    same = shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and conv.padding_mode == 'zeros'
    return same and min(conv.in_channels, conv.out_channels) >= FEWEST_CHANNELS


class WinogradConv2d(nn.Conv2d):
    """`nn.Conv2d`, computed by `winograd_conv` in float32 inference on a CPU.

    The transformed weight is kept. The weight may change, as by mmengine's EMAHook before a test:
    it is compared with that of the last call.
    """

    kept: Optional[tuple[Tensor, Tensor]] = None  # a weight, and the same transformed

    def forward(self, x: Tensor) -> Tensor:
        fits = x.dim() == 4 and x.shape[1] == self.in_channels and x.dtype == self.weight.dtype
        plain = type(x) is Tensor and type(self.weight) is nn.Parameter and use_onednn(x)
        if torch.is_grad_enabled() or not (plain and fits):
            return super().forward(x)
        return winograd_conv(x, self.transformed_weight(), self.bias)

    def transformed_weight(self) -> Tensor:
        weight = self.weight.detach()
        if self.kept is None or not torch.equal(weight, self.kept[0]):
            self.kept = weight.clone(), transform_weight(weight)
        return self.kept[1]


def transform_weight(weight: Tensor) -> Tensor:
    """The weight (K, C, 3, 3) of a convolution as those of 25 products, (25, K, C)."""
    matrix = weight.new_tensor(WEIGHT, dtype=torch.float64)
    found = torch.einsum('ai,bj,kcij->abkc', matrix, matrix, weight.double())
    return found.flatten(0, 1).to(weight.dtype)


def winograd_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """`F.conv2d` with padding 1.

    Args:
        x: (B, C, H, W).
        weight: of `transform_weight`.
        bias: (K,).

    Returns:
        (B, K, H, W), channels last.
    """
    (b, c, height, width), k = x.shape, weight.shape[1]
    h, w = ceil_div(height, OUTPUTS), ceil_div(width, OUTPUTS)
    padded = x.new_zeros(b, OUTPUTS * h + 2, OUTPUTS * w + 2, c)
    padded[:, 1 : height + 1, 1 : width + 1] = x.permute(0, 2, 3, 1)
    out = x.new_empty(b, h, OUTPUTS, w, OUTPUTS, k)
    # Rows of tiles whose products stay in the cache, of one image or of several small ones.
    rows = ceil_div(AT_A_TIME, INPUTS**2 * w * max(c, k))
    images = ceil_div(rows, h)
    for maps, to in zip(padded.split(images), out.split(images)):
        for top in range(0, h, rows):
            part = maps[:, OUTPUTS * top : OUTPUTS * (top + rows) + 2]
            convolve_tiles(part, weight, to[:, top : top + rows])
    if bias is not None:
        out += bias
    return out.flatten(3, 4).flatten(1, 2)[:, :height, :width].permute(0, 3, 1, 2)


def convolve_tiles(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Convolve rows of tiles.

    Args:
        x: (B, 3 h + 2, 3 w + 2, C).
        weight: of `transform_weight`.
        out: (B, h, 3, w, 3, K), written.
    """
    b, h, _, w, _, k = out.shape
    tall = x.new_empty(INPUTS, b, h, *x.shape[2:])
    combine(INPUT, [x[:, i::OUTPUTS][:, :h] for i in range(INPUTS)], tall)
    tiles = x.new_empty(INPUTS, INPUTS, b, h, w, x.shape[3])
    columns = [tall[:, :, :, i::OUTPUTS][:, :, :, :w] for i in range(INPUTS)]
    combine(INPUT, columns, tiles.transpose(0, 1))
    pairs = zip(tiles.view(INPUTS**2, b * h * w, x.shape[3]), weight)
    products = torch.stack([onednn_affine(tile, of_tile) for tile, of_tile in pairs])
    rows = x.new_empty(OUTPUTS, INPUTS, b, h, w, k)
    combine(OUTPUT, products.view(INPUTS, INPUTS, b, h, w, k), rows)
    combine(OUTPUT, rows.unbind(1), out.permute(4, 2, 0, 1, 3, 5))


def combine(matrix: Sequence[Sequence[float]], x: Sequence[Tensor], out: Tensor) -> None:
    """out[i] = the sum of matrix[i][j] * x[j] over j; each row of the matrix has a 1."""
    for factors, to in zip(matrix, out):
        first = factors.index(1)
        terms = [(x[j], factor) for j, factor in enumerate(factors) if factor and j != first]
        total = x[first]
        for term, factor in terms:
            total = torch.add(total, term, alpha=factor, out=to)
