"""Linear layers and the MLP.

PyTorch's `F.linear` hands float32 products on a CPU to MKL, and the GELU is a separate pass over
the widest map of the model. oneDNN, which is part of PyTorch, does both in one pass, and on AMD
processors its products are 1.1 (Zen 4) to 2 times as fast (docs/performance.md). bfloat16 products
are oneDNN's in PyTorch, too, and get their GELU in the same pass. On other devices and dtypes the
products are PyTorch's own. The gradients are ours everywhere, because they save less than autograd
does.

Shapes: x is (..., C), weights are (out, in) as in `nn.Linear`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .dispatch import MKL_IS_SLOW, onednn_takes, onednn_takes_bfloat16, stays_whole, use_plain

# Values of a wide map that are computed at a time: 8 MiB of float32, which stay in the cache. The
# fastest of the powers of two around it.
AT_A_TIME = 2**21

# Whether `mlp` skips its output, see `skip_mlp_output`.
SKIP_OUTPUT = ContextVar('SKIP_OUTPUT', default=False)


def plain_mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


@stays_whole(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias."""
    if not onednn_takes(x):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return affine(x, weight, bias)


@stays_whole(lambda x, *layers: x.new_empty(x.shape))
def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Two linear layers with a GELU (erf) between them.

    The hidden map is the widest of a block. Training saves it once, as it is before the GELU. With
    oneDNN a large one is computed part by part, each of which stays in the processor's cache, and
    is recomputed in the backward pass.
    """
    layers = (weight1, bias1, weight2, bias2)
    if use_plain():
        return plain_mlp(x, *layers)
    x, *layers = autocast(x, *layers)
    tokens = x.flatten(0, -2)
    at_a_time = AT_A_TIME // len(weight1) if onednn_takes(x) else len(tokens)
    parts = tokens.split(max(at_a_time, 1))
    if torch.is_grad_enabled():
        parts = [_MLP.apply(part, *layers, len(parts) == 1) for part in parts]
    else:
        weight1, bias1, weight2, bias2 = layers
        parts = [affine(affine(part, weight1, bias1, gelu=True), weight2, bias2) for part in parts]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out.unflatten(0, x.shape[:-1])


@contextmanager
def skip_mlp_output() -> Iterator[None]:
    """Inside this context `mlp` saves tensors for backward but skips computing its output."""
    token = SKIP_OUTPUT.set(True)
    try:
        yield
    finally:
        SKIP_OUTPUT.reset(token)


def cast_once(x: Tensor) -> Tensor:
    """x in the dtype that autocast uses for products, so that several products share one cast."""
    return x if use_plain() else autocast(x)[0]


def autocast(*operands: Tensor) -> Sequence[Tensor]:
    """Operands of a product in the dtype to which autocast casts them."""
    device = operands[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in operands]


def affine(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    """x @ weight.T + bias, then a GELU if asked for; without gradient."""
    # Of two dtypes PyTorch's error says so, oneDNN's does not.
    if x.dtype == weight.dtype and (onednn_takes(x) or (gelu and onednn_takes_bfloat16(x))):
        activation, variant = ('gelu', 'none') if gelu else ('none', '')
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], variant)
    out = F.linear(x, weight, bias)
    return torch.ops.aten.gelu_(out) if gelu else out


class _Linear(torch.autograd.Function):
    """`linear` with its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return affine(x, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable(F.linear, (x, weight, bias), ctx.needs_input_grad, grad)
        return gradients(grad, x, weight, ctx.needs_input_grad)


class _MLP(torch.autograd.Function):
    """`mlp` of one part with its gradient; the hidden map is saved for it, or recomputed."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
        keep: bool,
    ) -> Tensor:
        hidden = None
        if keep:
            hidden = affine(x, weight1, bias1)
        ctx.save_for_backward(x, weight1, bias1, weight2, bias2, hidden)
        if SKIP_OUTPUT.get():
            return x.new_empty(*x.shape[:-1], len(weight2))
        activated = F.gelu(hidden) if keep else affine(x, weight1, bias1, gelu=True)
        return affine(activated, weight2, bias2)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        *inputs, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(plain_mlp, inputs, ctx.needs_input_grad, grad), None
        x, weight1, bias1, weight2, _ = inputs
        *need_first, need_weight2, need_bias2, _ = ctx.needs_input_grad
        if hidden is None:
            hidden = affine(x, weight1, bias1)
        grad_weight2 = summed_outer(grad, F.gelu(hidden)) if need_weight2 else None
        grad_hidden = times(grad, weight2)
        torch.ops.aten.gelu_backward(grad_hidden, hidden, grad_input=grad_hidden)
        grad_bias2 = grad.flatten(0, -2).sum(0) if need_bias2 else None
        return *gradients(grad_hidden, x, weight1, need_first), grad_weight2, grad_bias2, None


def differentiable(
    function: Callable, inputs: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a function's inputs by autograd, for gradients of gradients."""
    wanted = [x for x, need in zip(inputs, needed) if need]
    found = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a linear layer's input, weight and bias, where needed."""
    need_x, need_weight, need_bias = needed
    return (
        times(grad, weight) if need_x else None,
        summed_outer(grad, x) if need_weight else None,
        grad.flatten(0, -2).sum(0) if need_bias else None,
    )


def times(grad: Tensor, weight: Tensor) -> Tensor:
    """grad @ weight: the gradient of a linear layer's input."""
    return affine(grad, weight.t())


def summed_outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x over all tokens: the gradient of a linear layer's weight."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    if onednn_takes(grad):  # oneDNN is fastest with the smaller side first
        if grad.shape[1] < x.shape[1] or (MKL_IS_SLOW and grad.shape[1] == x.shape[1]):
            return affine(grad.t(), x.t())
        if MKL_IS_SLOW:
            return affine(x.t(), grad.t()).t()
    return grad.t() @ x
