"""Matrix products, and what can be done in the same pass: bias and GELU.

torch's `F.linear` hands float32 products on a CPU to MKL, and GELU is a pass of its own over the
widest map of the model. oneDNN, which is part of torch, does both in one pass, and on the AMD
processor where we measured its products are twice as fast (docs/performance.md). Elsewhere, and
where a graph is captured and these do not stay whole in it (`captured.py`), everything here is
torch's ordinary functions.

Shapes: x is (..., C), weights are (out, in), as in `nn.Linear`.
"""

from collections.abc import Callable, Sequence
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

    The hidden map is the widest of a block. A large one is made part by part, each while it is in
    the processor's cache, and made again in the backward pass. A small one is kept in training,
    once, as it is before the GELU.
    """
    layers = (weight1, bias1, weight2, bias2)
    if not onednn_takes(x):
        return plain_mlp(x, *layers)
    parts = x.flatten(0, -2).split(max(AT_A_TIME // len(weight1), 1))
    if torch.is_grad_enabled():
        parts = [_MLP.apply(part, *layers, len(parts) == 1) for part in parts]
    else:
        parts = [
            product(product(part, weight1, bias1, gelu=True), weight2, bias2) for part in parts
        ]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out.unflatten(0, x.shape[:-1])


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


def product(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    """x @ weight.T + bias by oneDNN, with a GELU behind it if asked for; without gradient."""
    activation, variant = ('gelu', 'none') if gelu else ('none', '')
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], variant)


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
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            times(grad, weight) if need_x else None,
            summed_outer(grad, x) if need_weight else None,
            grad.flatten(0, -2).sum(0) if need_bias else None,
        )


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
        hidden = product(x, weight1, bias1, gelu=not keep)
        ctx.save_for_backward(x, weight1, bias1, weight2, bias2, hidden if keep else None)
        return product(F.gelu(hidden) if keep else hidden, weight2, bias2)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        *inputs, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(plain_mlp, inputs, ctx.needs_input_grad, grad), None
        x, weight1, bias1, weight2, _ = inputs
        need_x, need_weight1, need_bias1, need_weight2, need_bias2, _ = ctx.needs_input_grad
        if hidden is None:
            hidden = product(x, weight1, bias1)
        grad_weight2 = summed_outer(grad, F.gelu(hidden)) if need_weight2 else None
        grad_hidden = times(grad, weight2)
        torch.ops.aten.gelu_backward(grad_hidden, hidden, grad_input=grad_hidden)
        return (
            times(grad_hidden, weight1) if need_x else None,
            summed_outer(grad_hidden, x) if need_weight1 else None,
            grad_hidden.flatten(0, -2).sum(0) if need_bias1 else None,
            grad_weight2,
            grad.flatten(0, -2).sum(0) if need_bias2 else None,
            None,
        )


def differentiable(
    function: Callable, inputs: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a function's inputs as torch finds them, for gradients of gradients."""
    wanted = [x for x, need in zip(inputs, needed) if need]
    found = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


def times(grad: Tensor, weight: Tensor) -> Tensor:
    """grad @ weight: the gradient of a linear layer's input."""
    return product(grad, weight.t())


def summed_outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x over all tokens: the gradient of a linear layer's weight."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    if grad.shape[1] <= x.shape[1]:  # oneDNN is at its best with the smaller side in front
        return product(grad.t(), x.t())
    return product(x.t(), grad.t()).t()
