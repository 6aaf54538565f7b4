"""Matrix products, and what can be done in the same pass: bias and GELU.

torch's `F.linear` hands float32 products on a CPU to MKL, and GELU is a pass of its own over the
widest map of the model. oneDNN, which is part of torch, does both in one pass, and its products
are no slower than MKL's and on AMD's processors twice as fast (docs/performance.md). Elsewhere,
and where a graph is captured, everything here is torch's ordinary functions.

Shapes: x is (..., C), weights are (out, in), as in `nn.Linear`.
"""

from collections.abc import Callable, Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _get_current_dispatch_mode


class Linear(nn.Linear):
    """`nn.Linear`, by way of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias."""
    if not onednn_takes(x):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return product(x, weight, bias)


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Two linear layers with a GELU (erf) between them.

    In training, the hidden map is kept once, as it is before the GELU, which is done again in the
    backward pass: it is the widest map of a block.
    """
    if not onednn_takes(x):
        return plain_mlp(x, weight1, bias1, weight2, bias2)
    if torch.is_grad_enabled():
        return _MLP.apply(x, weight1, bias1, weight2, bias2)
    return product(product(x, weight1, bias1, gelu=True), weight2, bias2)


def plain_mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


def onednn_takes(x: Tensor) -> bool:
    """Whether oneDNN does the products with x: float32 on a CPU, where nobody captures a graph,
    counts FLOPs or casts."""
    return (
        not graph_is_captured()
        and x.is_cpu
        and x.dtype == torch.float32
        and x.numel() > 0
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled('cpu')
        and _get_current_dispatch_mode() is None
    )


def graph_is_captured() -> bool:
    """Whether what runs is being compiled, exported or traced, for other sizes than this one."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


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
    """`mlp` with its gradient."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
    ) -> Tensor:
        hidden = product(x, weight1, bias1)
        ctx.save_for_backward(x, weight1, bias1, weight2, bias2, hidden)
        return product(F.gelu(hidden), weight2, bias2)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        *inputs, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable(plain_mlp, inputs, ctx.needs_input_grad, grad)
        x, weight1, _, weight2, _ = inputs
        need_x, need_weight1, need_bias1, need_weight2, need_bias2 = ctx.needs_input_grad
        grad_weight2 = summed_outer(grad, F.gelu(hidden)) if need_weight2 else None
        grad_hidden = torch.ops.aten.gelu_backward(times(grad, weight2), hidden)
        return (
            times(grad_hidden, weight1) if need_x else None,
            summed_outer(grad_hidden, x) if need_weight1 else None,
            grad_hidden.flatten(0, -2).sum(0) if need_bias1 else None,
            grad_weight2,
            grad.flatten(0, -2).sum(0) if need_bias2 else None,
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
