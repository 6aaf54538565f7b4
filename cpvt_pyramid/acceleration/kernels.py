"""Layer norm and attention by functions of our own, in kernels.cpp.

They are compiled when a model is accelerated for the first time on a machine. They need Linux, a
C++ compiler and a processor with AVX-512, for bfloat16 one with avx512_bf16. Elsewhere PyTorch's
functions compute.

Shapes: B batch, H x W map, N queries, M keys, d channels of a head.
"""

import ctypes
import functools
from typing import Any, Optional

import torch
from torch import Tensor

from .library import library

NAMES = {torch.float32: 'float32', torch.bfloat16: 'bfloat16'}


class TokensPointer(ctypes.Structure):
    """`Tokens` of kernels.cpp, of a tensor (B, heads, H, W, d)."""

    _fields_ = [
        ('data', ctypes.c_void_p),
        ('image', ctypes.c_int64),
        ('head', ctypes.c_int64),
        ('row', ctypes.c_int64),
        ('column', ctypes.c_int64),
    ]


class Sizes(ctypes.Structure):
    """`Sizes` of kernels.cpp."""

    _fields_ = [
        ('images', ctypes.c_int64),
        ('heads', ctypes.c_int64),
        ('channels', ctypes.c_int64),
        ('height', ctypes.c_int64),
        ('width', ctypes.c_int64),
        ('key_height', ctypes.c_int64),
        ('key_width', ctypes.c_int64),
        ('window', ctypes.c_int64),
    ]


@functools.cache
def has_kernels(dtype: torch.dtype) -> bool:
    """True if the functions of this module can compute with a dtype."""
    functions = library()
    if functions is None or dtype not in NAMES:
        return False
    return dtype == torch.float32 or bool(functions.kernels_have_bfloat16())


@functools.cache
def kernel(name: str, dtype: torch.dtype, returns: Optional[type] = None) -> Any:
    """A function of kernels.cpp, for a dtype."""
    functions = library()
    assert functions is not None, 'callers ask `has_kernels` first'
    function = functions[f'{name}_{NAMES[dtype]}']
    function.restype = returns
    return function


def fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` over the last axis, without gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    channels = x.shape[-1]
    weight, bias = [parameter.float().contiguous() for parameter in (weight, bias)]
    kernel('layer_norm', x.dtype)(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_void_p(bias.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(x.numel() // channels),
        ctypes.c_int64(channels),
        ctypes.c_float(eps),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return out


def fast_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor] = None, window: int = 0
) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v, (B, H, W, heads, d), without gradient.

    Args:
        q: queries, (B, heads, H, W, d).
        k: keys, (B, heads, H', W', d). They and the bias are broadcast, as PyTorch's function does.
        v: values, as the keys.
        bias: added to the scores of each key, (B, H', W'). None: nothing is.
        window: side of the windows of queries and keys, whose maps are the same. Those at the
            border may be smaller. 0: each query attends to all keys.
    """
    images, heads, height, width, channels = q.shape
    # The function in C++ checks nothing: what does not fit ends here.
    k = k.expand(images, heads, -1, -1, channels)
    v = v.expand(k.shape)
    q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
    out = q.new_empty(images, height, width, heads, channels)
    if bias is not None:
        bias = bias.to(torch.float32).expand(images, *k.shape[2:4]).contiguous()
    sizes = Sizes(images, heads, channels, height, width, k.shape[2], k.shape[3], window)
    threads = torch.get_num_threads()
    memory_of_thread = kernel('attention_memory', q.dtype, ctypes.c_int64)(ctypes.byref(sizes))
    memory = torch.empty(memory_of_thread * threads, dtype=torch.uint8)
    kernel('attention', q.dtype)(
        pointer(q),
        pointer(k),
        pointer(v),
        pointer(out.permute(0, 3, 1, 2, 4)),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        ctypes.byref(sizes),
        ctypes.c_float(channels**-0.5),
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_int64(threads),
    )
    return out


def pointer(x: Tensor) -> object:
    return ctypes.byref(TokensPointer(x.data_ptr(), *x.stride()[:4]))
