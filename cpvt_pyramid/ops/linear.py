"""Matrix products, what can be done in the same pass (bias and GELU), and their gradients.

torch's `F.linear` hands float32 products on a CPU to MKL, and GELU is a pass of its own over the
widest map of the model. oneDNN, which is part of torch, does both in one pass, and on the AMD
processor where we measured its products are twice as fast (docs/performance.md). Elsewhere the
products are torch's own. The gradients are ours everywhere, to keep less for them than torch does.
Where a graph is captured and these do not stay whole in it (`captured.py`), everything here is
torch's ordinary functions.

Shapes: x is (..., C), weights are (out, in), as in `nn.Linear`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .captured import float32_on_cpu, graph_is_captured, opaque

# Values of a wide map that are made at a time: 8 MiB of float32, which stay in the cache. On the
# whole the fastest of the powers of two around it.
AT_A_TIME = 2**21

# Whether nobody will read what an MLP makes, but only what it keeps for the gradient.
NOT_READ = ContextVar('NOT_READ', default=False)


class Linear(nn.Linear):
    """`nn.Linear`, by way of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@opaque(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias."""
    if not onednn_takes(x):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return product(x, weight, bias)


@opaque(lambda x, *layers: x.new_empty(x.shape))
def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Two linear layers with a GELU (erf) between them.

    The hidden map is the widest of a block. In training it is kept once, as it is before the GELU.
    oneDNN makes a large one part by part, each while it is in the processor's cache, and makes it
    again in the backward pass.
    """
    layers = (weight1, bias1, weight2, bias2)
    if graph_is_captured():
        return plain_mlp(x, *layers)
    x, *layers = as_autocast(x, *layers)
    tokens = x.flatten(0, -2)
    at_a_time = AT_A_TIME // len(weight1) if onednn_takes(x) else len(tokens)
    parts = tokens.split(max(at_a_time, 1))
    if torch.is_grad_enabled():
        parts = [_MLP.apply(part, *layers, len(parts) == 1) for part in parts]
    else:
        weight1, bias1, weight2, bias2 = layers
        parts = [
            product(product(part, weight1, bias1, gelu=True), weight2, bias2) for part in parts
        ]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out.unflatten(0, x.shape[:-1])


@contextmanager
def not_read() -> Iterator[None]:
    """Here MLPs keep what their gradient needs, and what they return is arbitrary."""
    token = NOT_READ.set(True)
    try:
        yield
    finally:
        NOT_READ.reset(token)


def plain_mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


def onednn_takes(x: Tensor) -> bool:
    """Whether oneDNN does the products with x: float32 on a CPU, where nobody captures a graph,
    counts FLOPs or casts."""
    return (
        not graph_is_captured()
        and float32_on_cpu(x)
        and x.numel() > 0
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and _get_current_dispatch_mode() is None
    )


def as_autocast(*operands: Tensor) -> Sequence[Tensor]:
    """Operands of a product, in the type that they are cast to where autocast is on."""
    device = operands[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in operands]


def product(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    """x @ weight.T + bias, with a GELU behind it if asked for; without gradient."""
    if onednn_takes(x):
        activation, variant = ('gelu', 'none') if gelu else ('none', '')
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], variant)
    out = F.linear(x, weight, bias)
    return torch.ops.aten.gelu_(out) if gelu else out


class _Linear(torch.autograd.Function):
    """`linear` with its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable(F.linear, (x, weight, bias), ctx.needs_input_grad, grad)
        return gradients(grad, x, weight, ctx.needs_input_grad)


class _MLP(torch.autograd.Function):
    """`mlp` of one part with its gradient; the hidden map is kept for it, or made again."""

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
            hidden = product(x, weight1, bias1)
        ctx.save_for_backward(x, weight1, bias1, weight2, bias2, hidden)
        if NOT_READ.get():
            return x.new_empty(*x.shape[:-1], len(weight2))
        activated = F.gelu(hidden) if keep else product(x, weight1, bias1, gelu=True)
        return product(activated, weight2, bias2)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        *inputs, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(plain_mlp, inputs, ctx.needs_input_grad, grad), None
        x, weight1, bias1, weight2, _ = inputs
        *need_first, need_weight2, need_bias2, _ = ctx.needs_input_grad
        if hidden is None:
            hidden = product(x, weight1, bias1)
        grad_weight2 = summed_outer(grad, F.gelu(hidden)) if need_weight2 else None
        grad_hidden = times(grad, weight2)
        torch.ops.aten.gelu_backward(grad_hidden, hidden, grad_input=grad_hidden)
        grad_bias2 = grad.flatten(0, -2).sum(0) if need_bias2 else None
        return *gradients(grad_hidden, x, weight1, need_first), grad_weight2, grad_bias2, None


def differentiable(
    function: Callable, inputs: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a function's inputs as torch finds them, for gradients of gradients."""
    wanted = [x for x, need in zip(inputs, needed) if need]
    found = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a linear layer's input, weight and bias, as far as they are needed."""
    need_x, need_weight, need_bias = needed
    return (
        times(grad, weight) if need_x else None,
        summed_outer(grad, x) if need_weight else None,
        grad.flatten(0, -2).sum(0) if need_bias else None,
    )


def times(grad: Tensor, weight: Tensor) -> Tensor:
    """grad @ weight: the gradient of a linear layer's input."""
    return product(grad, weight.t())


def summed_outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x over all tokens: the gradient of a linear layer's weight."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    if grad.shape[1] <= x.shape[1]:  # oneDNN is at its best with the smaller side in front
        return product(grad.t(), x.t())
    return product(x.t(), grad.t()).t()
