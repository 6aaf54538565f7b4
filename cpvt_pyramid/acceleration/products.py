"""Products of oneDNN, and the layers that consist of them.

PyTorch's `F.linear` hands float32 products on a CPU to MKL, and the GELU is a separate pass over
the widest map of the model. oneDNN, which is part of PyTorch, does both in one pass, and its
products are 1.1 (Zen 4) to 2 times (Zen 5) as fast on AMD's processors with AVX-512, and about as
fast on Intel's (Emerald Rapids). Without AVX-512 MKL's are faster, and compute. The gradients of
weights are products of PyTorch's: oneDNN's take up to twice as long there.

Shapes: x is (..., C), weights are (out, in) as in `nn.Linear`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bfloat16 import is_captured, is_transformed
from ..grid import Grid
from ..model import MLP
from ..plain_layers import has_usual_bias, is_plain_linear
from ..recompute import drops_nothing
from ..versions import without_autocast
from .kernels import Linear
from .normed import NO_NORM, TrainedNorm, differentiable_norm, norm_gradients, normalize
from .ordinary import NotPlain, cast, check_plain, fast_dtype, takes_plain, values
from .processor import prefers_mkl

LEAST_RATIO = 4  # of an MLP's wide channels to the others: 4 or 8

# Values of an MLP's hidden map that are computed at a time: 2 MiB of float32, which stay in the
# cache. Twice and half as many take as long; the memory of a training step grows with them.
AT_A_TIME = 2**19

# Values of a hidden map that training saves at most. To recompute one of them takes longer, in
# bfloat16 above all.
LARGEST_SAVED = 2**21


class OneDNNLinear(nn.Linear):
    """`nn.Linear`, computed by oneDNN."""

    stands_for = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        if type(self) is not OneDNNLinear:  # see `FAST`
            return nn.Linear.forward(self, input)
        if is_captured() or input.dim() < 2 or takes_plain(input, self.out_features):
            return super().forward(input)
        dtype = fast_dtype(input, self.weight, self.bias)
        if dtype is None or not has_usual_bias(self):
            return super().forward(input)
        x, weight, bias = cast(dtype, input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return affine(x, weight, bias)
        # A function's result that is a view, as oneDNN's of three axes are, cannot be changed in
        # place: the product of rows is none.
        rows = OneDNNProduct.apply(x.flatten(0, -2), weight, bias)
        return rows.view(*x.shape[:-1], -1)


def linear_of(layer: nn.Module, in_channels: int, out_channels: int, dtype: torch.dtype) -> Linear:
    """The parameters of a linear layer whose call does nothing but apply them, in a dtype.

    Raises:
        NotPlain: it is another layer.
    """
    check_plain(layer, OneDNNLinear)
    weight = values(layer, 'weight', (out_channels, in_channels), dtype)
    return Linear(weight, values(layer, 'bias', (out_channels,), dtype))


class FusedMLP(MLP):
    """An `MLP` computed as one function, part by part.

    The hidden map is the widest of a block. Inference applies the GELU as oneDNN computes it, and
    training saves it once, before the GELU, also if it is small. A large one is computed in parts
    that stay in the processor's cache, and recomputed in the backward pass.
    """

    stands_for = MLP

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) is not FusedMLP:  # see `FAST`
            return MLP.forward(self, x, grid)
        if is_captured() or 'contract' in vars(self):
            return super().forward(x, grid)
        if not torch.is_grad_enabled() and takes_plain(x, LEAST_RATIO * x.shape[-1]):
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
        fc1, fc2 = self.fc1, self.fc2
        if not (drops_nothing(self.drop) and is_plain_linear(fc1) and is_plain_linear(fc2)):
            raise NotPlain
        layers = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        dtype = fast_dtype(x, norm.weight, norm.bias, *layers)
        if dtype is None:
            raise NotPlain
        return cast(dtype, *layers)

    def compute(self, x: Tensor, grid: Grid, norm: TrainedNorm, layers: Sequence[Any]) -> Tensor:
        """The MLP of the layer norm of tokens x."""
        rows = x.flatten(0, -2)
        if torch.is_grad_enabled():
            rows = MLPInParts.apply(rows, *norm, *layers)
        else:
            rows = mlp_in_parts(rows, norm, *layers)
        return rows.unflatten(0, x.shape[:-1])


def mlp_in_parts(
    x: Tensor,
    norm: TrainedNorm,
    weight1: Tensor,
    bias1: Optional[Tensor],
    weight2: Tensor,
    bias2: Optional[Tensor],
) -> Tensor:
    """Two linear layers with a GELU between them, of the layer norm of tokens (T, C), without
    gradient."""
    x = normalize(x, norm).out.to(weight1.dtype)
    out = x.new_empty(len(x), len(weight2))
    size = rows_at_a_time(weight1)
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        out[rows] = affine(affine(x[rows], weight1, bias1, 'gelu'), weight2, bias2)
    return out


def differentiable_mlp(
    x: Tensor, norm_weight: Any, norm_bias: Any, eps: float, *layers: Any
) -> Tensor:
    """`mlp_in_parts` by functions of PyTorch."""
    weight1, bias1, weight2, bias2 = layers
    x = differentiable_norm(x, TrainedNorm(norm_weight, norm_bias, eps)).to(weight1.dtype)
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


def concatenated(parts: list[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`, without a copy of a single part."""
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def rows_at_a_time(weight: Tensor) -> int:
    """Number of tokens whose hidden map, by the first layer's weight, stays in the cache."""
    return max(AT_A_TIME // len(weight), 1)


def affine(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: str = 'none'
) -> Tensor:
    """x @ weight.T + bias by the faster library, then a GELU if `activation` is 'gelu'; without
    gradient."""
    if x.dtype == torch.float32 and prefers_mkl():
        out = F.linear(x, weight, bias)
        return torch.ops.aten.gelu_(out) if activation == 'gelu' else out
    exact = 'none'  # approximation of a GELU
    return torch.ops.mkldnn._linear_pointwise(x, weight, contiguous(bias), activation, [], exact)


def contiguous(bias: Optional[Tensor]) -> Optional[Tensor]:
    """A bias as PyTorch passes it to oneDNN: by its address alone, without its stride. Those of
    maps and weights are passed."""
    return None if bias is None else bias.contiguous()


def in_dtypes_of_forward(backward: Callable) -> Callable:
    """A backward pass without autocast, also where it is called under it: what is saved has the
    dtype that the forward pass computed in."""

    @functools.wraps(backward)
    def without(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        with without_autocast('cpu'):
            return backward(ctx, grad)

    return without


class OneDNNProduct(torch.autograd.Function):
    """`affine` of rows (T, C), with its gradient. It saves what PyTorch's `F.linear` saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return affine(x, weight, bias)

    @staticmethod
    @in_dtypes_of_forward
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        return gradients(grad, x, weight, ctx.needs_input_grad)


class MLPInParts(torch.autograd.Function):
    """`mlp_in_parts` with its gradient, for which the layer norm is recomputed.

    It saves the tokens, and the hidden map before the GELU if that is small.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Any, norm_bias: Any, eps: float, *layers: Any
    ) -> Tensor:
        norm = TrainedNorm(norm_weight, norm_bias, eps)
        weight1, bias1, weight2, bias2 = layers
        hidden: Optional[Tensor] = None
        if len(x) * len(weight1) > LARGEST_SAVED:
            out = mlp_in_parts(x, norm, *layers)
        else:
            hidden = affine(normalize(x, norm).out.to(weight1.dtype), weight1, bias1)
            out = affine(F.gelu(hidden), weight2, bias2)
        ctx.save_for_backward(x, hidden, norm_weight, norm_bias, *layers)
        ctx.eps = eps
        return out

    @staticmethod
    @in_dtypes_of_forward
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, hidden, norm_weight, norm_bias, *layers = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if is_differentiated(grad):
            inputs = (x, norm_weight, norm_bias, ctx.eps, *layers)
            return differentiable_gradients(differentiable_mlp, inputs, needed, grad)
        need_x, need_norm_weight, need_norm_bias, _, *need_layers = needed
        need_first = (need_x, need_norm_weight, need_norm_bias)
        norm = TrainedNorm(norm_weight, norm_bias, ctx.eps)
        normalized = normalize(x, norm)
        grad_normed, *of_layers = mlp_gradients(
            grad, normalized.out.to(grad.dtype), hidden, layers, [any(need_first), *need_layers]
        )
        grad_x, *of_norm = norm_gradients(grad_normed, x, norm, normalized, need_first)
        return grad_x, *of_norm, None, *of_layers


def gradients(
    grad: Tensor, x: Optional[Tensor], weight: Optional[Tensor], needed: Sequence[bool]
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a linear layer's input, weight and bias, where needed.

    The gradient of the input needs the weight, and that of the weight needs the input x.
    """
    need_x, need_weight, need_bias = needed
    grad_x = grad_weight = grad_bias = None
    if need_x and weight is not None:
        grad_x = product(grad, weight)
    if need_weight and x is not None:
        grad_weight = grad.t() @ x
    if need_bias:
        grad_bias = grad.sum(0)
    return grad_x, grad_weight, grad_bias


def mlp_gradients(
    grad: Tensor,
    x: Tensor,
    hidden: Optional[Tensor],
    layers: Sequence[Any],
    needed: Sequence[bool],
) -> list[Optional[Tensor]]:
    """The gradients of the input (T, C), weights and biases of an MLP, where needed.

    Args:
        grad: that of the output.
        x: the input.
        hidden: the map before the GELU. None: it is recomputed, part by part.
        layers: weight, bias, weight and bias.
        needed: for x and the layers.
    """
    if hidden is not None:
        return gradients_of_rows(grad, x, hidden, layers, needed)
    weight1, bias1, _, _ = layers
    size = rows_at_a_time(weight1)
    grad_x = torch.empty_like(x) if needed[0] else None
    sums: list[Optional[Tensor]] = [None] * len(layers)
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        hidden = affine(x[rows], weight1, bias1)
        part_x, *of_part = gradients_of_rows(grad[rows], x[rows], hidden, layers, needed)
        if grad_x is not None and part_x is not None:
            grad_x[rows] = part_x
        sums = [add_in_float32(total, more) for total, more in zip(sums, of_part)]
    return [grad_x, *sums]


def gradients_of_rows(
    grad: Tensor, x: Tensor, hidden: Tensor, layers: Sequence[Any], needed: Sequence[bool]
) -> list[Optional[Tensor]]:
    """`mlp_gradients` of some rows and their hidden map."""
    weight1, _, weight2, _ = layers
    *need_first, need_weight2, need_bias2 = needed
    activated = F.gelu(hidden) if need_weight2 else None
    _, *second = gradients(grad, activated, None, (False, need_weight2, need_bias2))
    first: tuple[Optional[Tensor], ...] = (None, None, None)
    if any(need_first):
        grad_hidden = gelu_gradient(affine(grad, weight2.t()), hidden)
        first = gradients(grad_hidden, x, weight1, need_first)
    return [*first, *second]


def add_in_float32(total: Optional[Tensor], more: Optional[Tensor]) -> Optional[Tensor]:
    """A sum of gradients of many parts, each of which may be in bfloat16; None is nothing."""
    if more is None:
        return total
    return more.float() if total is None else total.add_(more)


def is_differentiated(grad: Tensor) -> bool:
    """True in a backward pass that PyTorch's functions must compute: one that is differentiated
    itself, also in forward mode, or one of several gradients at once."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor(grad)  # by `is_grads_batched`
    return torch.is_grad_enabled() or is_batched or is_transformed(grad)


def product(grad: Tensor, weight: Tensor) -> Tensor:
    """grad @ weight in a backward pass."""
    return grad @ weight if is_differentiated(grad) else affine(grad, weight.t())


def gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the GELU of x, in the memory of `grad`, without gradient."""
    return torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=grad)


def differentiable_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Any], needed: Sequence[bool], grad: Tensor
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a function's inputs, where needed, by functions of PyTorch.

    Args:
        function: consists of such functions.
        inputs: of the function. Some may be no tensors.
        needed: for each of the inputs.
        grad: that of the function's result.
    """
    with torch.enable_grad():
        # Views have none of the hooks of these tensors, which are called with the results.
        values = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
        out = function(*values)
        wanted = [value for value, is_needed in zip(values, needed) if is_needed]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple([next(found) if is_needed else None for is_needed in needed])
