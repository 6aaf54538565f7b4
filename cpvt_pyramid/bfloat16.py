"""What PyTorch computes wrongly in bfloat16 on a CPU, in float32 instead.

In PyTorch 2.13, on any processor:

- The backward pass of `F.layer_norm` sums the gradients of weight and bias over all tokens in the
  dtype of the input. As a sum in bfloat16 grows, it no longer changes by what is added: half of a
  bias's gradient was lost at 2048 tokens, nine tenths at 16384. float16 loses as much at 65536.

And, found on AMD's and Intel's processors with `avx512_bf16`, in oneDNN's convolutions:

- Parts of a weight's gradient are not initialized where a part of the kernel sees nothing but
  padding, as a 3x3 kernel with stride 2 does on a map that is one pixel wide. They are NaN or any
  number, in some runs.
- Results of kernels that equal their stride are wrong with few channels: of kernels of 4 and 8 with
  8 to 24 channels, on AMD's where the result is one pixel wide, on Intel's with AMX nearly
  everywhere; of kernels of 16 to 32 with 2 and 4 channels where the result is one pixel wide. For
  RGB images they are wrong on an Intel with AMX where the result is one pixel wide. With 32 to 320
  channels none was. With others that few, none is trusted.

All cost little in float32. What is compiled or exported is left alone.

Private to PyTorch are `torch._C._is_tracing`, in `is_captured`, and, in `is_transformed`,
`torch._C._are_functorch_transforms_active` and `torch.autograd.forward_ad._current_level`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional, Union, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from .plain_layers import acts_alone, plain_class
from .versions import cpu_autocast_dtype, is_compiling, is_cpu_autocast

HALF = (torch.bfloat16, torch.float16)  # dtypes in which layer norms have wrong gradients
FEWEST_CHANNELS = 32  # with fewer, results are wrong on some processors
RGB = 3  # channels: wide images with these are computed by another, right kernel

Pair = Union[int, Sequence[int]]


class CorrectedBFloat16(TorchFunctionMode):
    """Inside this context layer norms and convolutions in bfloat16 are right on a CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.layer_norm:
            return layer_norm(*args, **kwargs)
        if function is torch.conv2d:
            return safe_conv2d(*args, **kwargs)
        if function is torch.conv_transpose2d:
            return safe_conv_transpose2d(*args, **kwargs)
        return function(*args, **kwargs)


def corrected_bfloat16(device: str) -> AbstractContextManager:
    """Inside this context bfloat16 is right, on any type of device."""
    return nullcontext() if device != 'cpu' or is_captured() else CorrectedBFloat16()


def corrected(x: Tensor) -> AbstractContextManager:
    """Inside this context convolutions and layer norms of x are right, if it would be computed in
    bfloat16 on a CPU."""
    if not x.is_cpu or computed_dtype(x) != torch.bfloat16 or is_captured():
        return nullcontext()
    return CorrectedBFloat16()


def is_captured() -> bool:
    """True where a graph is made of the operations."""
    return is_compiling() or torch._C._is_tracing()


# Layer norms


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm`, whose gradients of weight and bias are summed in float32."""
    if not torch.is_grad_enabled() or weight is None or is_captured() or not is_half(input):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    if is_transformed(input, weight, bias):
        bias = None if bias is None else bias.float()
        out = F.layer_norm(input.float(), normalized_shape, weight.float(), bias, eps)
        return out.to(input.dtype)
    return LayerNormFunction.apply(input, tuple(normalized_shape), weight, bias, eps)


def is_half(x: Tensor) -> bool:
    """True for tensors whose layer norms have wrong gradients."""
    return x.is_cpu and x.dtype in HALF


def is_transformed(*tensors: Optional[Tensor]) -> bool:
    """True inside functions of `torch.func`, and where a tensor has a tangent."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:  # no tensor has one
        return False
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            return True
    return False


class LayerNormFunction(torch.autograd.Function):
    """`F.layer_norm`: it saves what PyTorch saves, and computes gradients in float32.

    Functions of `torch.func` need `setup_context`, with which the forward pass took a sixth longer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: tuple[int, ...],
        weight: Tensor,
        bias: Optional[Tensor],
        eps: float,
    ) -> Tensor:
        out, mean, inverse_deviation = layer_norm_with_statistics(x, shape, weight, bias, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, mean, inverse_deviation, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x, mean, inverse_deviation, weight, bias = ctx.saved_tensors
        need_x, _, *need_parameters, _ = ctx.needs_input_grad
        needed = (need_x, *need_parameters)
        grad_x, *grads = layer_norm_gradients(
            grad, x, ctx.shape, mean, inverse_deviation, weight, bias, needed
        )
        return grad_x, None, *grads, None


def layer_norm_with_statistics(
    x: Tensor, shape: Sequence[int], weight: Tensor, bias: Optional[Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`F.layer_norm`, and of each token the mean and the inverse of the standard deviation, in
    float32."""
    # With parameters in bfloat16 these would be in bfloat16, too.
    bias = None if bias is None else bias.float()
    return torch.native_layer_norm(x, shape, weight.float(), bias, eps)


def layer_norm_gradients(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    inverse_deviation: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    needed: Sequence[bool],
) -> Sequence[Optional[Tensor]]:
    """The gradients of the input, weight and bias of a layer norm, where needed.

    They are in float32; autograd casts them to the dtypes of these.
    """
    return torch.ops.aten.native_layer_norm_backward.default(
        grad.float(),
        x.float(),
        shape,
        mean,
        inverse_deviation,
        weight.float(),
        None if bias is None else bias.float(),
        needed,
    )


# Convolutions


def safe_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    stride: Pair = 1,
    padding: Union[str, Pair] = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d`, in float32 where it may be wrong in bfloat16."""
    options = (stride, padding, dilation, groups)
    may_be_wrong = is_untrusted(input.shape[-2:], weight, *options)
    return convolve_safely(F.conv2d, may_be_wrong, input, weight, bias, *options)


def needs_correction(module: nn.Module, input: Tensor) -> bool:
    """True if a module that convolves (B, C, H, W) must be called in `CorrectedBFloat16`.

    Operations take longer in this mode, so that convolutions that are known to be right are called
    without it.
    """
    if not input.is_cpu or not (input.dtype == torch.bfloat16 or is_cpu_autocast()):
        return False  # nothing more is asked in float32
    if computed_dtype(input) != torch.bfloat16 or is_captured():
        return False
    return not is_right(module, input)


def is_right(module: nn.Module, input: Tensor) -> bool:
    """True if a module is known to be a convolution of (B, C, H, W) that is right in bfloat16.

    Subclasses, adapters and hooks may run other convolutions: of these nothing is known.
    """
    if plain_class(module) is not nn.Conv2d or not acts_alone(module):
        return False
    conv = cast(nn.Conv2d, module)
    options = (conv.stride, conv.padding, conv.dilation, conv.groups)
    return not is_untrusted(input.shape[-2:], conv.weight, *options)


def safe_conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
) -> Tensor:
    """`F.conv_transpose2d`, in float32 where it may be wrong in bfloat16."""
    may_be_wrong = has_few_channels(weight.shape[0], weight.shape[1] * groups)
    options = (stride, padding, output_padding, groups, dilation)
    return convolve_safely(F.conv_transpose2d, may_be_wrong, input, weight, bias, *options)


def convolve_safely(
    function: Callable,
    may_be_wrong: bool,
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    *options: Any,
) -> Tensor:
    """Call a function that convolves, in float32 if it would compute in bfloat16 on a CPU and may
    be wrong there.

    Args:
        function: `F.conv2d` or `F.conv_transpose2d`.
        may_be_wrong: in bfloat16 on a CPU.
        input: (B, C, H, W).
        weight: as `function` takes it.
        bias: (C',), or None.
        options: the other positional arguments of `function`.
    """
    if not may_be_wrong or not input.is_cpu or computed_dtype(input) != torch.bfloat16:
        return function(input, weight, bias, *options)
    with torch.autocast('cpu', enabled=False):
        bias = None if bias is None else bias.float()
        out = function(input.float(), weight.float(), bias, *options)
    return out.to(torch.bfloat16)


def computed_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a convolution of x is computed, also under autocast."""
    if x.dtype == torch.float64:
        return x.dtype
    return cpu_autocast_dtype() or x.dtype


def is_untrusted(
    sides: Sequence[int],
    weight: Tensor,
    stride: Pair,
    padding: Union[str, Pair],
    dilation: Pair,
    groups: int,
) -> bool:
    """True if oneDNN may compute a convolution of maps with these sides wrongly in bfloat16."""
    # A replaced weight may have another shape than the attributes of its module say.
    out_channels, of_group, *kernel = weight.shape
    in_channels = of_group * groups
    if has_few_channels(in_channels, out_channels):
        return True
    if in_channels == RGB and sides[-1] < 2 * kernel[-1]:  # a result that is one pixel wide
        return True
    return sees_padding_alone(sides, kernel, stride, padding, dilation)


def has_few_channels(in_channels: int, out_channels: int) -> bool:
    """True if a convolution has so few channels that oneDNN may compute it wrongly in bfloat16."""
    if in_channels < FEWEST_CHANNELS and in_channels != RGB:
        return True
    return out_channels < FEWEST_CHANNELS


def sees_padding_alone(
    sides: Sequence[int],
    kernel: Sequence[int],
    stride: Pair,
    padding: Union[str, Pair],
    dilation: Pair,
) -> bool:
    """True if the first or last row or column of a kernel is never on a pixel of a map.

    `sides` are those of the map.
    """
    if padding == 'valid':
        return False
    for axis in (-2, -1):
        side = sides[axis]
        reach = (kernel[axis] - 1) * at(dilation, axis)  # from the first to the last
        if isinstance(padding, str):  # 'same'
            before = reach // 2
            after = reach - before
        else:
            before = after = at(padding, axis)
        step = at(stride, axis)
        last = (side + before + after - reach - 1) // step * step - before  # of the first
        if last < 0 or reach - before >= side:
            return True
    return False


def at(values: Pair, axis: int) -> int:
    """The entry of an axis, -2 or -1, in what may be one number for both."""
    return values if isinstance(values, int) else values[axis % len(values)]
