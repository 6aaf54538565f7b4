"""What this folder computes with: which tensors, parameters and calls, and in which dtype."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..bfloat16 import CorrectedBFloat16, is_transformed
from ..plain_layers import has_hooks, replaces_forward
from ..versions import cpu_autocast_dtype
from .processor import multiplies_bfloat16

# Plain layers compute products of up to this number of multiplications: a call of oneDNN's takes
# 20 us, one of PyTorch's 5, and the questions before it some more (Emerald Rapids). So they do for
# up to this number of tokens, which MKL multiplies 1.1 to 2 times as fast.
FEW_OPERATIONS = 2**22
FEW_TOKENS = 16


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


class NotPlain(Exception):
    """A call of a layer does more than to apply ordinary parameters of its own, or they have other
    shapes or dtypes than a function of ours reads."""


def check_plain(module: nn.Module, *kinds: type) -> None:
    """Raise `NotPlain` unless a module is of one of some classes and its call does what that
    says."""
    if type(module) not in kinds or replaces_forward(module) or has_hooks(module):
        raise NotPlain


def own_parameter(
    layer: nn.Module, name: str, shape: Sequence[int], dtype: torch.dtype
) -> nn.Parameter:
    """A parameter of a layer that is computed in a dtype, as it is.

    Raises:
        NotPlain: it is no ordinary parameter of its own with this shape, or has a dtype that is not
            cast to that dtype.
    """
    parameter: Any = layer._parameters.get(name)
    if name in vars(layer) or not is_ordinary_parameter(parameter):  # the former hides the latter
        raise NotPlain
    if parameter.shape != shape:
        raise NotPlain
    if parameter.dtype != dtype and not casts(parameter):
        raise NotPlain
    return parameter


def values(layer: nn.Module, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`own_parameter` in the dtype."""
    parameter = own_parameter(layer, name, shape, dtype)
    return parameter if parameter.dtype == dtype else parameter.to(dtype)
