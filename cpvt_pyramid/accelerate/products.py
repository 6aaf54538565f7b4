"""Linear layers and the MLP.

PyTorch's `F.linear` hands float32 products on a CPU to MKL, and the GELU is a separate pass over
the widest map of the model. oneDNN, which is part of PyTorch, does both in one pass, and on AMD
processors its products are 1.1 (Zen 4) to 2 times as fast (benchmarks/notes.md). PyTorch's
bfloat16 products are oneDNN's already; here they get their GELU in the same pass. On other devices
and dtypes the products are PyTorch's own. The gradients are ours everywhere, because they save
fewer tensors than autograd does.

Shapes: x is (..., C), weights are (out, in) as in `nn.Linear`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from .dispatch import (
    MKL_IS_SLOW,
    float32_on_cpu,
    opaque_when_compiled,
    use_onednn,
    use_onednn_bfloat16,
    use_plain,
)

# Values of a wide map that are computed at a time: 8 MiB of float32, which stay in the cache. The
# fastest of the powers of two that were tried.
AT_A_TIME = 2**21

# Types of weights without a behavior of their own: neither sharded nor quantized.
PLAIN_TENSORS = (Tensor, nn.Parameter)


def plain_mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


@opaque_when_compiled(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias."""
    if not use_onednn(x):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return onednn_affine(x, weight, bias)


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), computed by `linear` in float32 on a CPU, unless calling the layer has another
    effect.

    The layers are of the class `nn.Linear` itself: tools such as `quantize_dynamic` replace layers
    of exactly this class.
    """
    if float32_on_cpu(x) and is_plain_linear(layer):
        return linear(x, layer.weight, layer.bias)
    return layer(x)


def mlp(x: Tensor, fc1: nn.Module, drop: nn.Module, fc2: nn.Module) -> Tensor:
    """Two linear layers with a GELU (erf) between them and dropout after each.

    One function computes it (`fused_mlp`), unless calling the layers has another effect.
    """
    if is_plain_linear(fc1) and is_plain_linear(fc2) and is_identity(drop):
        return fused_mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias)
    return drop(fc2(drop(F.gelu(fc1(x)))))


@opaque_when_compiled(lambda x, *layers: x.new_empty(*x.shape[:-1], len(layers[2])))
def fused_mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Two linear layers with a GELU between them, without dropout.

    The hidden map is the widest of a block. Training saves it once, before the GELU. With oneDNN, a
    large one is computed in parts that stay in the processor's cache, and recomputed in the
    backward pass.
    """
    if use_plain():
        return plain_mlp(x, weight1, bias1, weight2, bias2)
    x, *layers = autocast(x, weight1, bias1, weight2, bias2)
    affine = affine_for(x)
    if affine is torch_affine:
        return mlp_of_part(x, layers, True, affine)
    parts = x.flatten(0, -2).split(max(AT_A_TIME // len(weight1), 1))
    results = [mlp_of_part(part, layers, len(parts) == 1, affine) for part in parts]
    out = torch.cat(results) if len(results) > 1 else results[0]
    return out.unflatten(0, x.shape[:-1])


def mlp_of_part(
    x: Tensor, layers: Sequence[Tensor], keep: bool, affine: Callable[..., Tensor]
) -> Tensor:
    """`fused_mlp` of some tokens; `keep` the hidden map for the gradient, or recompute it."""
    if torch.is_grad_enabled():
        return _MLP.apply(x, *layers, keep, affine)
    weight1, bias1, weight2, bias2 = layers
    hidden = affine(x, weight1, bias1, gelu=True)
    return affine(hidden, weight2, bias2)


def is_plain_linear(layer: nn.Module) -> bool:
    """True if calling a layer does nothing but apply its weight and bias.

    False for a layer that was replaced (LoRA, quantization), parametrized, pruned, sharded or
    hooked: it must be called.
    """
    if type(layer) is not nn.Linear or is_hooked(layer):
        return False
    return type(layer.weight) in PLAIN_TENSORS and type(layer.bias) in PLAIN_TENSORS


def is_identity(drop: nn.Module) -> bool:
    """True if calling a dropout layer, or what has replaced it, does nothing."""
    if is_hooked(drop):
        return False
    if type(drop) is nn.Dropout:
        return not drop.training or drop.p == 0
    return type(drop) is nn.Identity


def is_hooked(module: nn.Module) -> bool:
    """True if calling a module runs more than the `forward` of its class.

    It is asked of several layers of a block in each pass, and written out to be fast.
    """
    has_own = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or 'forward' in module.__dict__
    )
    has_global = (
        all_modules._global_forward_hooks
        or all_modules._global_forward_pre_hooks
        or all_modules._global_backward_hooks
        or all_modules._global_backward_pre_hooks
    )
    return bool(has_own or has_global)


def autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands of products in the dtype to which autocast casts them, so that several products
    share one cast. The plain versions leave that to autocast."""
    device = operands[0].device.type
    if (
        use_plain()
        or not torch.amp.is_autocast_available(device)
        or not torch.is_autocast_enabled(device)
    ):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in operands)


def onednn_affine(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False
) -> Tensor:
    """x @ weight.T + bias by oneDNN, then a GELU if asked for; without gradient."""
    if x.dtype != weight.dtype:  # PyTorch's error says so, oneDNN's does not
        return torch_affine(x, weight, bias, gelu)
    if gelu:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'gelu', [], 'none')
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


def torch_affine(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False
) -> Tensor:
    """`onednn_affine` by PyTorch's products; in bfloat16 the GELU is part of them if it can be."""
    if gelu and x.dtype == weight.dtype and use_onednn_bfloat16(x):
        return onednn_affine(x, weight, bias, gelu)
    out = F.linear(x, weight, bias)
    return torch.ops.aten.gelu_(out) if gelu else out


def affine_for(x: Tensor) -> Callable[..., Tensor]:
    """The function that computes products of x."""
    return onednn_affine if use_onednn(x) else torch_affine


class _Linear(torch.autograd.Function):
    """`linear` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_affine(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        refuse_create_graph()
        x, weight = ctx.saved_tensors
        return gradients(grad, x, weight, ctx.needs_input_grad)


class _MLP(torch.autograd.Function):
    """`mlp` of one part with its gradient; the hidden map is saved for it, or recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
        keep: bool,
        affine: Callable[..., Tensor],
    ) -> Tensor:
        if keep:
            hidden = affine(x, weight1, bias1)
            activated = F.gelu(hidden)
        else:
            hidden = None
            activated = affine(x, weight1, bias1, gelu=True)
        ctx.save_for_backward(x, weight1, bias1, weight2, hidden)
        return affine(activated, weight2, bias2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        refuse_create_graph()
        x, weight1, bias1, weight2, hidden = ctx.saved_tensors
        *need_first, need_weight2, need_bias2, _, _ = ctx.needs_input_grad
        affine = affine_for(grad)
        if hidden is None:
            hidden = affine(x, weight1, bias1)
        grad_weight2 = summed_outer(grad, F.gelu(hidden)) if need_weight2 else None
        grad_hidden = affine(grad, weight2.t())
        torch.ops.aten.gelu_backward.grad_input(grad_hidden, hidden, grad_input=grad_hidden)
        grad_bias2 = grad.flatten(0, -2).sum(0) if need_bias2 else None
        first = gradients(grad_hidden, x, weight1, need_first)
        return *first, grad_weight2, grad_bias2, None, None


def refuse_create_graph() -> None:
    """Raise a RuntimeError in a backward pass with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise RuntimeError('gradients of gradients need `with cpvt_pyramid.ops.plain():`')


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]
) -> tuple[Optional[Tensor], ...]:
    """The gradients of a linear layer's input, weight and bias, where needed."""
    need_x, need_weight, need_bias = needed
    return (
        affine_for(grad)(grad, weight.t()) if need_x else None,
        summed_outer(grad, x) if need_weight else None,
        grad.flatten(0, -2).sum(0) if need_bias else None,
    )


def summed_outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x over all tokens: the gradient of a linear layer's weight."""
    grad = grad.flatten(0, -2)
    x = x.flatten(0, -2)
    if use_onednn(grad):  # oneDNN is fastest with the smaller side first
        if grad.shape[1] < x.shape[1] or (MKL_IS_SLOW and grad.shape[1] == x.shape[1]):
            return onednn_affine(grad.t(), x.t())
        if MKL_IS_SLOW:
            return onednn_affine(x.t(), grad.t()).t()
    return grad.t() @ x
