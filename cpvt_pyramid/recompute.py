"""A linear layer on the GELU of a map, which saves one wide map for the gradient instead of two.

The GELU of an MLP lies between its two widest maps, and autograd saves both: the first for the
GELU, the second for the linear layer after it. `gelu_linear` saves the first and recomputes the
second.

Private to PyTorch is `torch.ops.aten.gelu_backward`: the gradient of a GELU in one pass, which is
differentiable itself.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import DropPath
from .plain_layers import has_hooks


def gelu_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """`F.linear(F.gelu(x), weight, bias)`, which saves x and recomputes its GELU.

    It can be differentiated twice, in forward mode, and by the functions of `torch.func`; under
    autocast it computes what these two functions compute.

    Args:
        x: (..., in).
        weight: (out, in).
        bias: (out,), or None.
    """
    if weight.dtype != x.dtype:  # autocast would save its copy, too
        weight = weight.to(x.dtype)
    rows = GELULinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    # A function's result that is a view cannot be changed in place: this one is of rows.
    return rows.view(*x.shape[:-1], weight.shape[0])


class GELULinear(torch.autograd.Function):
    """`gelu_linear` of rows (T, in), whose dtype may differ from the weight's under autocast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        # Autocast caches its copy of a weight that requires a gradient. This copy would have none.
        bias = None if bias is None else bias.detach()
        return F.linear(F.gelu(x), weight.detach(), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if need_x:
            grad_gelu = grad @ weight.to(grad.dtype)
            grad_x = torch.ops.aten.gelu_backward(grad_gelu.to(x.dtype), x)
        if need_weight:
            grad_weight = grad.t() @ F.gelu(x).to(grad.dtype)
        if need_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias

    @staticmethod
    def jvp(
        ctx: Any, x_tangent: Optional[Tensor], weight_tangent: Optional[Tensor], bias_tangent: Any
    ) -> Tensor:
        x, weight = ctx.saved_tensors
        terms = []
        if x_tangent is not None:
            # The derivative of a GELU is diagonal: tangents are multiplied as gradients are.
            activated_tangent = torch.ops.aten.gelu_backward(x_tangent, x)
            terms.append(F.linear(activated_tangent.to(ctx.dtype), weight.to(ctx.dtype)))
        if weight_tangent is not None:
            terms.append(F.linear(F.gelu(x).to(ctx.dtype), weight_tangent.to(ctx.dtype)))
        if bias_tangent is not None:
            terms.append(bias_tangent.to(ctx.dtype).expand(len(x), -1))
        return sum(terms[1:], terms[0])


def drops_nothing(drop: Optional[nn.Module]) -> bool:
    """True if there is no dropout or stochastic depth, or a call of it would do nothing: it is
    PyTorch's layer or ours, in evaluation, and no hooks are called with it."""
    if drop is None:
        return True
    if type(drop) not in (nn.Dropout, DropPath) or 'forward' in vars(drop):
        return False
    return not drop.training and not has_hooks(drop)
