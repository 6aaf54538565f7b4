"""The MLP of PVTv2 and MiT, with a depthwise convolution between its layers, as one function.

These models spend most of their time on it. Its two wide maps, before and after the convolution,
do not fit into the processor's cache. So some rows of a map pass through all of it at a time. The
rows next to them, which the convolution reads, are computed again.

Shapes: B batch, H x W map, h some of its rows, C channels, K wide channels.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..grid import Grid
from ..model import ConvMLP
from ..padding.batching import ceil_div
from ..plain_layers import acts_alone, is_plain_linear
from ..recompute import drops_nothing
from .kernels import Depthwise, fast_convolve_gelu, has_kernels
from .normed import NO_NORM, TrainedNorm, differentiable_norm, norm_gradients, normalize
from .ordinary import NotPlain, cast, fast_dtype, values
from .products import (
    add_in_float32,
    affine,
    contiguous,
    differentiable_gradients,
    gelu_gradient,
    gradients,
    in_dtypes_of_forward,
    is_differentiated,
)

# Values of a wide map that are computed at a time: 8 MiB of float32, which stay in the cache. With
# fewer, more rows are computed twice, and training recomputes more maps, which takes longer.
AT_A_TIME = 2**21
FEWEST_ROWS = 8  # of a part: with fewer, too many are computed twice


class FusedConvMLP(ConvMLP):
    """A `ConvMLP` computed as one function, part by part.

    Training saves the wide map before the convolution if there is one part, else no wide map. The
    backward pass recomputes the others.
    """

    stands_for = ConvMLP

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) is not FusedConvMLP:  # see `FAST`
            return ConvMLP.forward(self, x, grid)
        if is_captured() or 'contract' in vars(self):
            return super().forward(x, grid)
        try:
            layers = self.fast_layers(x, grid, NO_NORM)
        except NotPlain:
            return super().forward(x, grid)
        return self.compute(x, grid, NO_NORM, layers)

    def fast_layers(self, x: Tensor, grid: Grid, norm: TrainedNorm) -> Sequence[Any]:
        """The weights and biases for `compute`, in the dtype in which it computes with them.

        Raises:
            NotPlain: it cannot compute the MLP of the layer norm of tokens x.
        """
        fc1, conv, fc2 = self.fc1, self.dwconv, self.fc2
        # In bfloat16 PyTorch's convolution is wrong on a map of one row or column.
        if not drops_nothing(self.drop) or min(grid.height, grid.width) == 1:
            raise NotPlain
        if not (is_plain_linear(fc1) and is_plain_linear(fc2) and is_plain_depthwise(conv)):
            raise NotPlain
        layers = (fc1.weight, fc1.bias, conv.weight, conv.bias, fc2.weight, fc2.bias)
        dtype = fast_dtype(x, norm.weight, norm.bias, *layers)
        if dtype is None:
            raise NotPlain
        return cast(dtype, *layers)

    def compute(self, x: Tensor, grid: Grid, norm: TrainedNorm, layers: Sequence[Any]) -> Tensor:
        """The MLP of the layer norm of tokens x."""
        outside = None if grid.padding is None else grid.padding.outside
        if torch.is_grad_enabled():
            return ConvMLPInParts.apply(x, *norm, outside, self.relu, *layers)
        out, _ = conv_mlp_in_parts(x, norm, outside, self.relu, ConvMLPLayers(*layers))
        return out


def is_plain_depthwise(conv: nn.Module) -> bool:
    """True for a 3x3 depthwise convolution that does nothing but apply its own weights."""
    if type(conv) is not nn.Conv2d or not acts_alone(conv) or conv.padding_mode != 'zeros':
        return False
    settings = (tuple(conv.weight.shape[1:]), conv.stride, conv.padding, conv.dilation)
    is_depthwise = conv.groups == len(conv.weight)
    return is_depthwise and settings == ((1, 3, 3), (1, 1), (1, 1), (1, 1))


def depthwise_of(conv: nn.Module, channels: int, dtype: torch.dtype) -> Depthwise:
    """The parameters of a 3x3 depthwise convolution whose call does nothing but apply them, in a
    dtype.

    Raises:
        NotPlain: it is another layer.
    """
    if not is_plain_depthwise(conv):
        raise NotPlain
    kernel = values(conv, 'weight', (channels, 1, 3, 3), dtype)
    return Depthwise(kernel, values(conv, 'bias', (channels,), dtype))


class ConvMLPLayers(NamedTuple):
    """Weights and biases of an MLP; a bias may be None."""

    weight1: Tensor  # (K, C)
    bias1: Optional[Tensor]
    kernel: Tensor  # (K, 1, 3, 3)
    kernel_bias: Optional[Tensor]
    weight2: Tensor  # (C, K)
    bias2: Optional[Tensor]


class RowsOfMap(NamedTuple):
    """Some rows of some images of a map: their indices, and those of the rows around them.

    Attributes:
        images: the images.
        rows: the rows that are computed.
        near: these and the next row at each side, where the map has it.
        far: these and the next two.
    """

    images: slice
    rows: slice
    near: slice
    far: slice


def rows_in_parts(x: Tensor, width: int) -> Iterator[RowsOfMap]:
    """Split a map (B, H, W, C), of which a wide map has `width` channels, into parts that stay in
    the cache: images, or rows of one image."""
    batch, height, columns, _ = x.shape
    of_row = columns * width
    images = max(AT_A_TIME // (height * of_row), 1)
    count = 1  # of the parts of an image
    if height * of_row > AT_A_TIME:
        count = ceil_div(height, max(AT_A_TIME // of_row, FEWEST_ROWS))
    for image in range(0, batch, images):
        for i in range(count):
            top = i * height // count
            bottom = (i + 1) * height // count
            rows, near, far = [
                slice(max(top - more, 0), min(bottom + more, height)) for more in range(3)
            ]
            yield RowsOfMap(slice(image, image + images), rows, near, far)


def rows_within(rows: slice, more: slice) -> slice:
    """Where rows are among more rows."""
    return slice(rows.start - more.start, rows.stop - more.start)


def conv_mlp_in_parts(
    x: Tensor, norm: TrainedNorm, outside: Optional[Tensor], relu: bool, layers: ConvMLPLayers
) -> tuple[Tensor, Optional[Tensor]]:
    """The MLP of the layer norm of tokens, without gradient.

    Args:
        x: the tokens, (B, H, W, C).
        norm: the layer norm.
        outside: (B, H, W, 1), True in the padding of the batch. None: there is none.
        relu: a ReLU before the convolution.
        layers: of the MLP.

    Returns:
        Tokens, in the same shape; and the wide map before the convolution, if there is one part.
    """
    x = normalize(x, norm).out.to(layers.weight1.dtype)
    out = x.new_empty(*x.shape[:-1], len(layers.weight2))
    parts = list(rows_in_parts(x, len(layers.weight1)))
    for part in parts:
        wide = expand(x, outside, relu, layers, part.images, part.near)
        here = rows_within(part.rows, part.near)
        activated = convolve_gelu(wide, layers.kernel, layers.kernel_bias, here)
        out[part.images, part.rows] = affine(activated, layers.weight2, layers.bias2)
    return out, wide if len(parts) == 1 else None


def differentiable_conv_mlp(
    x: Tensor,
    norm_weight: Any,
    norm_bias: Any,
    eps: float,
    outside: Optional[Tensor],
    relu: bool,
    *values: Any,
) -> Tensor:
    """`conv_mlp_in_parts` by functions of PyTorch."""
    layers = ConvMLPLayers(*values)
    x = differentiable_norm(x, TrainedNorm(norm_weight, norm_bias, eps)).to(layers.weight1.dtype)
    wide = F.linear(x, layers.weight1, layers.bias1)
    if relu:
        wide = F.relu(wide)
    if outside is not None:
        wide = wide.masked_fill(outside, 0)
    wide = wide.permute(0, 3, 1, 2)
    convolved = F.conv2d(
        wide, layers.kernel, layers.kernel_bias, padding=1, groups=len(layers.kernel)
    )
    activated = F.gelu(convolved.permute(0, 2, 3, 1))
    return F.linear(activated, layers.weight2, layers.bias2)


def expand(
    x: Tensor,
    outside: Optional[Tensor],
    relu: bool,
    layers: ConvMLPLayers,
    images: slice,
    rows: slice,
) -> Tensor:
    """Some rows of the wide map before the convolution, (B, h, W, K)."""
    wide = affine(x[images, rows], layers.weight1, layers.bias1)
    if relu:
        wide.relu_()  # oneDNN's makes 0 of NaN
    if outside is not None:
        wide.masked_fill_(outside[images, rows], 0)
    return wide


def convolve_gelu(x: Tensor, kernel: Tensor, bias: Optional[Tensor], rows: slice) -> Tensor:
    """Some rows of the GELU of a zero-padded depthwise convolution of a wide map (B, h, W, K)."""
    if has_kernels(x.dtype):
        return fast_convolve_gelu(x, kernel, bias, rows)
    return depthwise_conv(x, kernel, bias, 'gelu')[:, rows]


def depthwise_conv(
    x: Tensor, kernel: Tensor, bias: Optional[Tensor] = None, activation: str = 'none'
) -> Tensor:
    """A zero-padded depthwise convolution of a wide map (B, h, W, K), and an activation."""
    exact = 'none'  # approximation of a GELU
    out = torch.ops.mkldnn._convolution_pointwise(
        x.permute(0, 3, 1, 2),
        kernel,
        contiguous(bias),
        [1, 1],  # padding
        [1, 1],  # stride
        [1, 1],  # dilation
        len(kernel),
        activation,
        [],
        exact,
    )
    return out.permute(0, 2, 3, 1)


class ConvMLPInParts(torch.autograd.Function):
    """`conv_mlp_in_parts` with its gradient, for which the layer norm is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Any,
        norm_bias: Any,
        eps: float,
        outside: Optional[Tensor],
        relu: bool,
        *values: Any,
    ) -> Tensor:
        norm = TrainedNorm(norm_weight, norm_bias, eps)
        out, wide = conv_mlp_in_parts(x, norm, outside, relu, ConvMLPLayers(*values))
        ctx.save_for_backward(x, wide, norm_weight, norm_bias, outside, *values)
        ctx.eps = eps
        ctx.relu = relu
        return out

    @staticmethod
    @in_dtypes_of_forward
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, wide, norm_weight, norm_bias, outside, *values = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if is_differentiated(grad):
            inputs = (x, norm_weight, norm_bias, ctx.eps, outside, ctx.relu, *values)
            return differentiable_gradients(differentiable_conv_mlp, inputs, needed, grad)
        need_x, need_norm_weight, need_norm_bias, _, _, _, *need_values = needed
        need_first = (need_x, need_norm_weight, need_norm_bias)
        norm = TrainedNorm(norm_weight, norm_bias, ctx.eps)
        normalized = normalize(x, norm)
        grad_normed, *of_layers = conv_mlp_gradients(
            grad,
            normalized.out.to(grad.dtype),
            wide,
            outside,
            ctx.relu,
            ConvMLPLayers(*values),
            [any(need_first), *need_values],
        )
        grad_x, *of_norm = norm_gradients(grad_normed, x, norm, normalized, need_first)
        return grad_x, *of_norm, None, None, None, *of_layers


def conv_mlp_gradients(
    grad: Tensor,
    x: Tensor,
    wide: Optional[Tensor],
    outside: Optional[Tensor],
    relu: bool,
    layers: ConvMLPLayers,
    needed: Sequence[bool],
) -> list[Optional[Tensor]]:
    """The gradients of the input x (B, H, W, C) of an MLP and of its layers, where needed.

    Args:
        grad: that of the output, in the shape of x.
        x: the input.
        wide: the wide map before the convolution. None: it is recomputed.
        outside: as in `conv_mlp_in_parts`.
        relu: a ReLU before the convolution.
        layers: of the MLP.
        needed: for x, and for each weight and bias of the layers.
    """
    grad_x = torch.empty_like(x) if needed[0] else None
    sums: list[Optional[Tensor]] = [None] * len(layers)
    for part in rows_in_parts(x, len(layers.weight1)):
        part_x, *of_part = part_gradients(grad, x, wide, outside, relu, layers, part, needed)
        if grad_x is not None:
            grad_x[part.images, part.rows] = part_x
        sums = [add_in_float32(total, more) for total, more in zip(sums, of_part)]
    return [grad_x, *sums]


def part_gradients(
    grad: Tensor,
    x: Tensor,
    wide: Optional[Tensor],
    outside: Optional[Tensor],
    relu: bool,
    layers: ConvMLPLayers,
    part: RowsOfMap,
    needed: Sequence[bool],
) -> list[Any]:
    """`conv_mlp_gradients` of the rows of a part of x, and of the layers by these rows."""
    images, rows, near, far = part
    need_x, need_weight1, need_bias1, need_kernel, need_kernel_bias, *need_second = needed
    if wide is None:
        wide = expand(x, outside, relu, layers, images, far)
    # The gradient of a row of the wide map is that of the convolution's results near it.
    convolved = depthwise_conv(wide, layers.kernel, layers.kernel_bias)[:, rows_within(near, far)]
    wide = wide[:, rows_within(near, far)]
    here = rows_within(rows, near)
    activated = F.gelu(convolved[:, here])
    _, *second = gradients(
        grad[images, rows].flatten(0, 2), activated.flatten(0, 2), None, (False, *need_second)
    )
    grad_convolved = gelu_gradient(affine(grad[images, near], layers.weight2.t()), convolved)
    grad_wide = depthwise_conv(grad_convolved, layers.kernel.flip(2, 3))[:, here]
    if relu:
        grad_wide.masked_fill_(wide[:, here] <= 0, 0)
    if outside is not None:
        grad_wide.masked_fill_(outside[images, rows], 0)
    part_x = x[images, rows]
    grad_x, *first = gradients(
        grad_wide.flatten(0, 2),
        part_x.flatten(0, 2),
        layers.weight1,
        (need_x, need_weight1, need_bias1),
    )
    if grad_x is not None:
        grad_x = grad_x.view(part_x.shape)
    # Each row counts in its own part.
    grad_convolved[:, : here.start].zero_()
    grad_convolved[:, here.stop :].zero_()
    _, *of_kernel = torch.ops.aten.convolution_backward(
        grad_convolved.permute(0, 3, 1, 2),
        wide.permute(0, 3, 1, 2),
        layers.kernel,
        [len(layers.kernel)],
        [1, 1],  # stride
        [1, 1],  # padding
        [1, 1],  # dilation
        False,
        [0, 0],
        len(layers.kernel),
        [False, need_kernel, need_kernel_bias],
    )
    return [grad_x, *first, *of_kernel, *second]
