"""Products of oneDNN, and the layers that consist of them.

PyTorch's `F.linear` hands float32 products on a CPU to MKL, and the GELU is a separate pass over
the widest map of the model. oneDNN, which is part of PyTorch, does both in one pass, and on AMD
processors its products are 1.1 (Zen 4) to 2 times (Zen 5) as fast.

Shapes: x is (..., C), weights are (out, in) as in `nn.Linear`.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..model import MLP, Grid
from ..recompute import PLAIN_LINEAR
from ..versions import is_compiling
from .processor import mkl_is_slow

# Values of a wide map that are computed at a time: 8 MiB of float32, which stay in the cache. The
# fastest of the powers of two that were tried.
AT_A_TIME = 2**21


def is_computed_here(x: Tensor, weight: Optional[Tensor] = None) -> bool:
    """True if the functions of this folder compute with x and a weight.

    They take ordinary float32 tensors with values on a CPU, without autocast, and weights that are
    parameters: others are computed by hooks, or stand for a parameter in a call of `torch.func`. Of
    anything else, and of graphs that are compiled or exported, PyTorch's own functions are called.
    """
    if type(x) is not Tensor or x.dtype != torch.float32 or not x.is_cpu or is_compiling():
        return False
    if weight is not None and not is_plain_parameter(weight):
        return False
    return x.numel() > 0 and not torch.is_autocast_enabled('cpu')


def is_plain_parameter(parameter: object) -> bool:
    """True for an ordinary parameter in float32 on a CPU."""
    if type(parameter) is not nn.Parameter or parameter.is_inference():
        return False
    return parameter.dtype == torch.float32 and parameter.is_cpu


class OneDNNLinear(nn.Linear):
    """`nn.Linear`, computed by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        # A parametrized layer, of a derived class, computes its weight each time that it is read.
        if type(self) is not OneDNNLinear or input.dim() < 2:
            return super().forward(input)
        if not is_computed_here(input, self.weight):
            return super().forward(input)
        if torch.is_grad_enabled():
            return OneDNNProduct.apply(input, self.weight, self.bias)
        return affine(input, self.weight, self.bias)


PLAIN_LINEAR.add(OneDNNLinear)


class FusedMLP(MLP):
    """An `MLP` computed as one function, part by part.

    The hidden map is the widest of a block. Inference applies the GELU as oneDNN computes it, and
    training saves it once, before the GELU. A large one is computed in parts that stay in the
    processor's cache, and recomputed in the backward pass.
    """

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        drops = self.drop and self.training
        # They are of another class if they were replaced later, by LoRA for example.
        is_known = type(fc1) is OneDNNLinear and type(fc2) is OneDNNLinear
        if drops or not is_known or not is_computed_here(x, fc1.weight):
            return super().forward(x, grid)
        if not is_plain_parameter(fc2.weight):
            return super().forward(x, grid)
        return fused_mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias)


def fused_mlp(x: Tensor, *layers: Tensor) -> Tensor:
    """Two linear layers, given as weight, bias, weight and bias, with a GELU between them."""
    parts = x.flatten(0, -2).split(max(AT_A_TIME // len(layers[0]), 1))
    results = []
    for part in parts:
        if torch.is_grad_enabled():
            results.append(PartOfMLP.apply(part, *layers, len(parts) == 1))
        else:
            weight1, bias1, weight2, bias2 = layers
            hidden = affine(part, weight1, bias1, gelu=True)
            results.append(affine(hidden, weight2, bias2))
    out = torch.cat(results) if len(results) > 1 else results[0]
    return out.unflatten(0, x.shape[:-1])


def affine(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    """x @ weight.T + bias by oneDNN, then a GELU if asked for; without gradient."""
    if gelu:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'gelu', [], 'none')
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


class OneDNNProduct(torch.autograd.Function):
    """`affine` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        return affine(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        return gradients(grad, x, weight, ctx.needs_input_grad)


class PartOfMLP(torch.autograd.Function):
    """`fused_mlp` of some tokens (T, C), with its gradient.

    `keep` the hidden map for the gradient, or recompute it.
    """

    @staticmethod
    def forward(
        ctx: Any,
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
            activated = F.gelu(hidden)
        else:
            activated = affine(x, weight1, bias1, gelu=True)
        ctx.save_for_backward(x, weight1, bias1, weight2, hidden)
        return affine(activated, weight2, bias2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight1, bias1, weight2, hidden = ctx.saved_tensors
        *need_first, need_weight2, need_bias2, _ = ctx.needs_input_grad
        if hidden is None:
            hidden = affine(x, weight1, bias1)
        grad_weight2 = summed_outer(grad, F.gelu(hidden)) if need_weight2 else None
        grad_hidden = affine(grad, weight2.t())
        torch.ops.aten.gelu_backward.grad_input(grad_hidden, hidden, grad_input=grad_hidden)
        grad_bias2 = grad.sum(0) if need_bias2 else None
        first = gradients(grad_hidden, x, weight1, need_first)
        return *first, grad_weight2, grad_bias2, None


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a linear layer's input, weight and bias, where needed."""
    need_x, need_weight, need_bias = needed
    return (
        affine(grad, weight.t()) if need_x else None,
        summed_outer(grad, x) if need_weight else None,
        grad.flatten(0, -2).sum(0) if need_bias else None,
    )


def summed_outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x over all tokens: the gradient of a linear layer's weight."""
    grad = grad.flatten(0, -2)
    x = x.flatten(0, -2)
    # oneDNN is fastest with the smaller side first.
    if grad.shape[1] < x.shape[1]:
        return affine(grad.t(), x.t())
    if not mkl_is_slow():
        return grad.t() @ x
    if grad.shape[1] == x.shape[1]:
        return affine(grad.t(), x.t())
    return affine(x.t(), grad.t()).t()
