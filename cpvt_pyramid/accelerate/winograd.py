"""3x3 convolutions of other people's modules with a third of the multiplications, for inference.

They take most of the time of an FPN and of the heads of RetinaNet and UPerNet. PyTorch computes
them directly on a CPU. Winograd's minimal filtering (Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks", arXiv:1509.09308, section 4) computes a tile of 3 x 3 outputs from
5 x 5 inputs with 25 products for each pair of channels instead of 81. On random maps of 128 to 512
channels its rounding errors are 4 to 7 times those of direct convolutions (root mean square).

The rounding of a large value reaches all outputs of each tile that has it, also those that do not
depend on it. Maps with such values, infinite ones or NaNs are computed directly (`has_outliers`).

Shapes: B batch, H x W map, C channels of the input, K of the output, h x w tiles.
"""

from collections.abc import MutableMapping, Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary
from torch.utils.weak import WeakIdKeyDictionary

from .dispatch import use_onednn
from .patches import ceil_div
from .products import AT_A_TIME, onednn_affine

# The largest absolute value of a map, divided by their mean, up to which it is computed by tiles. A
# value as large as this multiplies the rounding errors of outputs that do not depend on it by 5. In
# the trained models of examples/, maps have 4 to 122.
MOST_MEANS = 256
LARGEST = 1e30  # from which on the transforms may overflow

FEWEST_CHANNELS = 128  # with fewer, the transforms take longer than the products that they save

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


def use_winograd(model: nn.Module) -> None:
    """Compute the 3x3 convolutions of a model by `WinogradConv2d` where that is faster, in place.

    The modules get another class: their parameters, hooks and names stay. Subclasses of `nn.Conv2d`
    are left alone.

    Args:
        model: any model, for float32 inference on a CPU. In training and elsewhere its convolutions
            are PyTorch's.

    Examples:
        >>> conv = torch.nn.Conv2d(128, 128, 3, padding=1)
        >>> x = torch.rand(1, 128, 30, 30)
        >>> expected = conv(x)
        >>> use_winograd(conv)
        >>> with torch.no_grad():
        ...     torch.testing.assert_close(conv(x), expected, atol=1e-4, rtol=1e-4)
    """
    for module in model.modules():
        if type(module) is nn.Conv2d and takes_winograd(module):
            module.__class__ = WinogradConv2d
            if use_onednn(module.weight):
                transformed(module.weight)  # processes that are forked later share it


def takes_winograd(conv: nn.Conv2d) -> bool:
    """True if a layer computes what `winograd_conv` does, with enough channels and a weight that is
    neither pruned, quantized nor computed."""
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
    has_shape = shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and conv.padding_mode == 'zeros'
    has_own_weight = type(conv.weight) is nn.Parameter
    is_wide = min(conv.in_channels, conv.out_channels) >= FEWEST_CHANNELS
    return has_shape and has_own_weight and is_wide


class WinogradConv2d(nn.Conv2d):
    """`nn.Conv2d`, computed by `conv3x3`."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.conv2d(input, self.weight, self.bias, 1, 1)
        return conv3x3(input, self.weight, self.bias)


def conv3x3(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """`F.conv2d` with stride and padding 1, by `winograd_conv` in float32 inference on a CPU."""
    is_tensor = not has_torch_function_unary(x)  # neither a subclass nor a proxy of torch.fx
    if torch.is_grad_enabled() or not is_tensor:
        return F.conv2d(x, weight, bias, 1, 1)
    fits = x.dim() == 4 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype
    if not fits or not use_onednn(x) or has_outliers(x):
        return F.conv2d(x, weight, bias, 1, 1)
    return winograd_conv(x, transformed(weight), bias)


def has_outliers(x: Tensor) -> bool:
    """True if a value of a map is not finite, or so large that its rounding would show in outputs
    that do not depend on it."""
    sizes = x.abs()
    largest = sizes.amax().item()  # NaN if there is one
    return not largest < min(MOST_MEANS * sizes.mean().item(), LARGEST)


# For each weight, a copy from when it was transformed, and the result. Weights can be changed in
# place, as mmengine's EMAHook does before a test, so they are compared with the copy each time.
_transformed: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakIdKeyDictionary()


def transformed(weight: Tensor) -> Tensor:
    """`transform_weight`, whose result is kept as long as the weight exists."""
    if weight in _transformed:
        copy, result = _transformed[weight]
        if torch.equal(weight, copy):
            return result
    copy = weight.detach().clone()
    result = transform_weight(copy)
    _transformed[weight] = copy, result
    return result


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
    out = torch.empty(b, k, height, width, dtype=x.dtype, memory_format=layout)
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
    products = torch.stack([onednn_affine(tile, of_tile) for tile, of_tile in pairs])
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
