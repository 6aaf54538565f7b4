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

from ..bfloat16 import CorrectedBFloat16, is_captured, is_transformed
from ..grid import Grid
from ..model import MLP
from ..plain_layers import is_plain_linear
from ..recompute import drops_nothing
from ..versions import cpu_autocast_dtype, without_autocast
from .normed import NO_NORM, Norm, differentiable_norm, norm_gradients, normalize
from .processor import multiplies_bfloat16, prefers_mkl

# Plain layers compute products of up to this number of multiplications: a call of oneDNN's takes
# 20 us, one of PyTorch's 5, and the questions before it some more (Emerald Rapids). So they do for
# up to this number of tokens, which MKL multiplies 1.1 to 2 times as fast.
FEW_OPERATIONS = 2**22
FEW_TOKENS = 16

LEAST_RATIO = 4  # of an MLP's wide channels to the others: 4 or 8

# Values of an MLP's hidden map that are computed at a time: 2 MiB of float32, which stay in the
# cache. Twice and half as many take as long; the memory of a training step grows with them.
AT_A_TIME = 2**19

# Values of a hidden map that training saves at most. To recompute one of them takes longer, in
# bfloat16 above all.
LARGEST_SAVED = 2**21


def takes_plain(x: Tensor, results: int) -> bool:
    """True if the plain layer is to compute: a tensor is nested, or a product of x with this number
    of results for each token is small. A captured graph must not depend on that: callers ask
    `is_captured` before."""
    if x.is_nested:
        return True
    values = x.numel()
    return values * results <= FEW_OPERATIONS or values <= FEW_TOKENS * x.shape[-1]


def fast_dtype(x: Tensor, *parameters: Optional[Tensor]) -> Optional[torch.dtype]:
    """The dtype in which this folder computes with x and the weights and biases of a layer.

    That is float32 or, where oneDNN has it, bfloat16: the dtype of ordinary tensors with values on
    a CPU, and of parameters, or that of autocast. Other weights are computed by hooks, or stand for
    a parameter in a call of `torch.func`. Where a graph is captured, nothing of this folder
    computes: callers ask `is_captured` before.

    Returns:
        The dtype; `cast` brings tensors to it. None: PyTorch's functions are to compute, because
        of what the tensors are, or because something sees or transforms these functions.
    """
    if not is_ordinary(x) or is_watched():
        return None
    dtype = cpu_autocast_dtype() or x.dtype
    if not is_supported(dtype) or (x.dtype != dtype and not casts(x)):
        return None
    for parameter in parameters:
        if parameter is None:
            continue
        if not is_ordinary_parameter(parameter):
            return None
        if parameter.dtype != dtype and not casts(parameter):
            return None
    return dtype


def common_dtype(x: Tensor, *others: Tensor) -> Optional[torch.dtype]:
    """`fast_dtype` of tensors that are computed together. None: PyTorch's functions are to
    compute."""
    dtype = fast_dtype(x)
    if dtype is None:
        return None
    for other in others:
        if not is_ordinary(other) or (other.dtype != dtype and not casts(other)):
            return None
    return dtype


def casts(x: Tensor) -> bool:
    """True if autocast brings a tensor to its dtype."""
    return cpu_autocast_dtype() is not None and is_supported(x.dtype)


def cast(dtype: torch.dtype, *tensors: Optional[Tensor]) -> Sequence[Any]:
    """Tensors in a dtype, as autocast casts them, and None for None."""
    return [
        tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)
        for tensor in tensors
    ]


def is_supported(dtype: torch.dtype) -> bool:
    """True for the dtypes in which oneDNN's products are fast on this processor."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())


def is_watched() -> bool:
    """True where something sees or transforms each operation.

    It may be `torch.jit.trace`, a function of `torch.func`, or a mode: of functions, such as
    `torch.device` as a context, or of operations, such as a counter of FLOPs. The mode that
    corrects bfloat16 leaves products alone.
    """
    return (
        torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and has_other_modes())
    )


def has_other_modes() -> bool:
    """True if a mode of functions is active that is not ours."""
    count = torch._C._len_torch_function_stack()
    modes = [torch._C._get_function_stack_at(i) for i in range(count)]
    return any(type(mode) is not CorrectedBFloat16 for mode in modes)


def is_plain_parameter(parameter: Any) -> bool:
    """True for an ordinary parameter in a supported dtype on a CPU."""
    return is_ordinary_parameter(parameter) and is_supported(parameter.dtype)


def is_ordinary_parameter(parameter: Any) -> bool:
    """True for a parameter of PyTorch's own class with values on a CPU."""
    if type(parameter) is not nn.Parameter or parameter.is_inference():
        return False
    return parameter.is_cpu and has_values(parameter)


def is_ordinary(x: Tensor) -> bool:
    """True for a tensor of PyTorch's own class with values on a CPU, and without a tangent."""
    return type(x) is Tensor and x.is_cpu and not is_transformed(x) and has_values(x)


def has_values(x: Tensor) -> bool:
    """True for a tensor whose memory has its values, as they are: it is neither empty, sparse,
    nested nor in a layout of oneDNN, nor is it negated when it is read, nor zero without memory."""
    return x.layout == torch.strided and not x.is_nested and not x.is_neg() and x.data_ptr() != 0


class OneDNNLinear(nn.Linear):
    """`nn.Linear`, computed by oneDNN."""

    stands_for = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        if type(self) is not OneDNNLinear:  # see `FAST`
            return nn.Linear.forward(self, input)
        if is_captured() or input.dim() < 2 or takes_plain(input, self.out_features):
            return super().forward(input)
        dtype = fast_dtype(input, self.weight, self.bias)
        if dtype is None:
            return super().forward(input)
        x, weight, bias = cast(dtype, input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return affine(x, weight, bias)
        # A function's result that is a view, as oneDNN's of three axes are, cannot be changed in
        # place: the product of rows is none.
        rows = OneDNNProduct.apply(x.flatten(0, -2), weight, bias)
        return rows.view(*x.shape[:-1], -1)


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
        if is_captured():
            return super().forward(x, grid)
        if not torch.is_grad_enabled() and takes_plain(x, LEAST_RATIO * x.shape[-1]):
            return super().forward(x, grid)
        layers = self.fast_layers(x, grid, NO_NORM)
        if layers is None:
            return super().forward(x, grid)
        return self.compute(x, grid, NO_NORM, layers)

    def fast_layers(self, x: Tensor, grid: Grid, norm: Norm) -> Optional[Sequence[Any]]:
        """The weights and biases for `compute`, in the dtype in which it computes with them. None:
        it cannot compute the MLP of the layer norm of tokens x."""
        fc1, fc2 = self.fc1, self.fc2
        if not (drops_nothing(self.drop) and is_plain_linear(fc1) and is_plain_linear(fc2)):
            return None
        layers = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        dtype = fast_dtype(x, norm.weight, norm.bias, *layers)
        return None if dtype is None else cast(dtype, *layers)

    def compute(self, x: Tensor, grid: Grid, norm: Norm, layers: Sequence[Any]) -> Tensor:
        """The MLP of the layer norm of tokens x."""
        rows = x.flatten(0, -2)
        if torch.is_grad_enabled():
            rows = MLPInParts.apply(rows, *norm, *layers)
        else:
            rows = mlp_in_parts(rows, norm, *layers)
        return rows.unflatten(0, x.shape[:-1])


def mlp_in_parts(
    x: Tensor,
    norm: Norm,
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
    x = differentiable_norm(x, Norm(norm_weight, norm_bias, eps)).to(weight1.dtype)
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
        norm = Norm(norm_weight, norm_bias, eps)
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
        norm = Norm(norm_weight, norm_bias, ctx.eps)
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
        return part_gradients(grad, x, hidden, layers, needed)
    weight1, bias1, _, _ = layers
    size = rows_at_a_time(weight1)
    grad_x = torch.empty_like(x) if needed[0] else None
    sums: list[Optional[Tensor]] = [None] * len(layers)
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        hidden = affine(x[rows], weight1, bias1)
        part_x, *of_part = part_gradients(grad[rows], x[rows], hidden, layers, needed)
        if grad_x is not None and part_x is not None:
            grad_x[rows] = part_x
        sums = [add_in_float32(total, more) for total, more in zip(sums, of_part)]
    return [grad_x, *sums]


def part_gradients(
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
