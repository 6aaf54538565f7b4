"""Layer norm, attention, MLP, convolution and copies of patches by functions of our own, in
kernels.cpp.

They are compiled when a model is accelerated for the first time on a machine. They need Linux, a
C++ compiler and a processor with AVX2 or AVX-512, for bfloat16 one with avx512_bf16. Elsewhere
PyTorch's functions compute.

Shapes: B batch, H x W map, N queries, M keys, d channels of a head.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple, Optional, cast

import torch
from torch import Tensor

from .library import library
from .processor import has_amx

NAMES = {torch.float32: 'float32', torch.bfloat16: 'bfloat16'}


class Heads(ctypes.Structure):
    """`Heads` of kernels.cpp, of a tensor (B, heads, N, d)."""

    _fields_ = [
        ('data', c_void_p),
        ('image', c_int64),
        ('head', c_int64),
        ('token', c_int64),
    ]


class Sizes(ctypes.Structure):
    """`Sizes` of kernels.cpp."""

    _fields_ = [
        ('images', c_int64),
        ('heads', c_int64),
        ('channels', c_int64),
        ('queries', c_int64),
        ('keys', c_int64),
    ]


class AttentionSizes(ctypes.Structure):
    """`AttentionSizes` of kernels.cpp."""

    _fields_ = [
        ('images', c_int64),
        ('height', c_int64),
        ('width', c_int64),
        ('channels', c_int64),
        ('heads', c_int64),
        ('keys', c_int64),
        ('window', c_int64),
    ]


class LinearPointer(ctypes.Structure):
    """`Linear` of kernels.cpp."""

    _fields_ = [
        ('weight', c_void_p),
        ('bias', c_void_p),
        ('in_channels', c_int64),
        ('out_channels', c_int64),
    ]


class NormMLP(ctypes.Structure):
    """`NormMLP` of kernels.cpp."""

    _fields_ = [
        ('norm_weight', c_void_p),
        ('norm_bias', c_void_p),
        ('eps', c_float),
        ('fc1', LinearPointer),
        ('fc2', LinearPointer),
    ]


class MapConvolution(ctypes.Structure):
    """`MapConvolution` of kernels.cpp."""

    _fields_ = [
        ('weights', c_void_p),
        ('bias', c_void_p),
        ('outside', c_void_p),
        ('relu', c_int32),
        ('images', c_int64),
        ('height', c_int64),
        ('width', c_int64),
    ]


# The results and the arguments of the functions of kernels.cpp.
SIGNATURES: dict[str, list[Any]] = {
    'layer_norm': [None, *[c_void_p] * 4, c_int64, c_int64, c_float, c_int64],
    'attention_memory': [c_int64, POINTER(Sizes)],
    'attention': [
        None,
        *[POINTER(Heads)] * 4,
        c_void_p,
        POINTER(Sizes),
        c_float,
        c_void_p,
        c_int64,
    ],
    'window_attention_memory': [c_int64, POINTER(AttentionSizes), c_int64],
    'window_attention': [
        None,
        *[c_void_p] * 2,
        *[POINTER(LinearPointer)] * 2,
        c_void_p,
        POINTER(AttentionSizes),
        c_void_p,
        c_int64,
    ],
    'global_attention_memory': [c_int64, POINTER(AttentionSizes), c_int64],
    'global_attention': [
        None,
        *[c_void_p] * 3,
        *[POINTER(LinearPointer)] * 2,
        c_void_p,
        POINTER(AttentionSizes),
        c_void_p,
        c_int64,
    ],
    'mlp_memory': [c_int64, *[c_int64] * 4],
    'mlp': [None, c_void_p, c_void_p, POINTER(NormMLP), c_void_p, c_int64, c_void_p, c_int64],
    'conv_mlp_memory': [c_int64, POINTER(NormMLP), POINTER(MapConvolution), c_int64],
    'conv_mlp': [
        None,
        c_void_p,
        c_void_p,
        POINTER(NormMLP),
        POINTER(MapConvolution),
        c_void_p,
        c_void_p,
        c_int64,
    ],
    'convolve_gelu': [None, *[c_void_p] * 4, *[c_int64] * 7],
    'convolve_add': [None, *[c_void_p] * 5, *[c_int64] * 5],
    'split_patches': [None, *[c_void_p] * 2, *[c_int64] * 6],
    'join_patches': [None, *[c_void_p] * 2, *[c_int64] * 6],
}

OF_TILES = 32  # channels of tiles in bfloat16


@functools.cache
def has_kernels(dtype: torch.dtype) -> bool:
    """True if the functions of this module can compute with a dtype."""
    functions = library()
    if functions is None or dtype not in NAMES:
        return False
    return dtype == torch.float32 or bool(functions.kernels_have_bfloat16())


@functools.cache
def multiplies_pairs() -> bool:
    """True if products of bfloat16 multiply pairs of them. Else, where that is not faster, they
    multiply floats."""
    return bool(cast(ctypes.CDLL, library()).kernels_have_fast_pairs())


@functools.cache
def multiplies_tiles() -> bool:
    """True if products of bfloat16 multiply tiles: the processor has AMX."""
    return bool(cast(ctypes.CDLL, library()).kernels_have_tiles())


def has_products(dtype: torch.dtype, *channels: int) -> bool:
    """True if the functions of this module that multiply matrices can compute with a dtype, and are
    faster than PyTorch's, which use AMX with any number of channels."""
    if not has_kernels(dtype):
        return False
    if dtype == torch.float32 or not has_amx():
        return True
    return multiplies_tiles() and are_multiples(channels, OF_TILES)


def kernel_function(name: str, dtype: torch.dtype, *channels: int) -> Any:
    """A function of kernels.cpp, for a dtype. There must be kernels for it, see `has_kernels`.

    `channels`: of the matrices that it multiplies. They decide how it does so in bfloat16.
    """
    products = ''
    if channels and dtype == torch.bfloat16:
        if multiplies_tiles() and are_multiples(channels, OF_TILES):
            products = '_tiles'
        elif multiplies_pairs() and are_multiples(channels, 2):
            products = '_pairs'
    return loaded_function(name, f'{name}_{NAMES[dtype]}{products}')


def are_multiples(numbers: Sequence[int], of: int) -> bool:
    return not any(number % of for number in numbers)


@functools.cache
def loaded_function(name: str, symbol: str) -> Any:
    function = cast(ctypes.CDLL, library())[symbol]
    function.restype, *function.argtypes = SIGNATURES[name]
    return function


def fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` over the last axis, without gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    channels = x.shape[-1]
    symbol = f'layer_norm_{NAMES[x.dtype]}'
    if weight.dtype == bias.dtype == x.dtype == torch.bfloat16:
        symbol += '_parameters'
        weight, bias = weight.contiguous(), bias.contiguous()
    else:
        weight, bias = weight.float().contiguous(), bias.float().contiguous()
    loaded_function('layer_norm', symbol)(
        x.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        x.numel() // channels,
        channels,
        eps,
        torch.get_num_threads(),
    )
    return out


def fast_attention(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v, (B, N, heads, d), without gradient.

    Args:
        q: queries, (B, heads, N, d).
        k: keys, (B, heads, M, d). They and the bias are broadcast, as PyTorch's function does.
        v: values, as the keys.
        bias: added to the scores of each key, (B, M). None: nothing is.
    """
    images, heads, queries, channels = q.shape
    # The function in C++ checks nothing: what does not fit ends here.
    k = k.expand(images, heads, -1, channels)
    v = v.expand(k.shape)
    q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
    out = q.new_empty(images, queries, heads, channels)
    if bias is not None:
        bias = bias.to(torch.float32).expand(images, k.shape[2]).contiguous()
    sizes = Sizes(images, heads, channels, queries, k.shape[2])
    threads = torch.get_num_threads()
    memory_of_thread = kernel_function('attention_memory', q.dtype, channels)(sizes)
    memory = q.new_empty(memory_of_thread * threads, dtype=torch.uint8)
    kernel_function('attention', q.dtype, channels)(
        pointer(q),
        pointer(k),
        pointer(v),
        pointer(out.transpose(1, 2)),
        None if bias is None else bias.data_ptr(),
        sizes,
        channels**-0.5,
        memory.data_ptr(),
        threads,
    )
    return out


class Linear(NamedTuple):
    """The weight of a linear layer, (out, in), and its bias, (out,), in the dtype of the tokens."""

    weight: Tensor
    bias: Tensor

    def checked(self, in_channels: int, out_channels: int) -> 'Linear':
        """The same in the shapes that the functions in C++ read, which check nothing: others end
        here. Dtypes are the caller's."""
        weight = self.weight.expand(out_channels, in_channels).contiguous()
        return Linear(weight, self.bias.expand(out_channels).contiguous())

    def pointers(self) -> LinearPointer:
        out_channels, in_channels = self.weight.shape
        return LinearPointer(
            self.weight.data_ptr(), self.bias.data_ptr(), in_channels, out_channels
        )


def fast_window_attention(
    x: Tensor, qkv: Linear, proj: Linear, heads: int, window: int, bias: Optional[Tensor] = None
) -> Tensor:
    """Attention of tokens (B, H, W, C) inside windows with its linear layers, in the same shape,
    without gradient.

    Args:
        x: tokens.
        qkv: the layer of queries, keys and values, to 3 C channels.
        proj: the layer of their attention.
        heads: of attention.
        window: side of the windows. Those at the border may be smaller.
        bias: added to the scores of each key, (B, H, W). None: nothing is.
    """
    x = x.contiguous()
    images, height, width, channels = x.shape
    if bias is not None:
        bias = bias.to(torch.float32).expand(images, height, width).contiguous()
    return attention_with_layers(
        'window_attention',
        x,
        [bias],
        [qkv.checked(channels, 3 * channels), proj.checked(channels, channels)],
        AttentionSizes(images, height, width, channels, heads, 0, window),
    )


def fast_global_attention(
    x: Tensor, kv: Tensor, q: Linear, proj: Linear, heads: int, bias: Optional[Tensor] = None
) -> Tensor:
    """Attention of tokens (B, H, W, C) to the keys of their image, with the linear layers of
    queries and result, in the same shape, without gradient.

    Args:
        x: tokens.
        kv: keys and values, (B, M, 2 C).
        q: the layer of queries.
        proj: the layer of their attention.
        heads: of attention.
        bias: added to the scores of each key, (B, M). None: nothing is.
    """
    x = x.contiguous()
    images, height, width, channels = x.shape
    kv = kv.expand(images, -1, 2 * channels).contiguous()
    if bias is not None:
        bias = bias.to(torch.float32).expand(kv.shape[:2]).contiguous()
    return attention_with_layers(
        'global_attention',
        x,
        [kv, bias],
        [layer.checked(channels, channels) for layer in (q, proj)],
        AttentionSizes(images, height, width, channels, heads, kv.shape[1], 0),
    )


def attention_with_layers(
    name: str,
    x: Tensor,
    others: Sequence[Optional[Tensor]],
    layers: Sequence[Linear],
    sizes: AttentionSizes,
) -> Tensor:
    """Call a function of kernels.cpp for tokens, other tensors and layers, which are checked."""
    if sizes.channels % sizes.heads:
        raise ValueError(f'{sizes.heads} heads do not divide {sizes.channels} channels')
    channels = (sizes.channels, sizes.channels // sizes.heads)
    threads = torch.get_num_threads()
    size = kernel_function(f'{name}_memory', x.dtype, *channels)(sizes, threads)
    memory = x.new_empty(size, dtype=torch.uint8)
    out = torch.empty_like(x)
    kernel_function(name, x.dtype, *channels)(
        x.data_ptr(),
        *[None if other is None else other.data_ptr() for other in others],
        *[layer.pointers() for layer in layers],
        out.data_ptr(),
        sizes,
        memory.data_ptr(),
        threads,
    )
    return out


class NormAndMLP(NamedTuple):
    """The parameters of a block's second branch: a layer norm (C,) with its epsilon, and two linear
    layers, to K channels and back."""

    norm_weight: Tensor
    norm_bias: Tensor
    eps: float
    fc1: Linear
    fc2: Linear

    def checked(self, channels: int) -> 'NormAndMLP':
        """What the functions in C++, which check nothing, read: what does not fit ends here."""
        width = len(self.fc1.weight)
        norm_weight, norm_bias = [
            values.float().expand(channels).contiguous()
            for values in (self.norm_weight, self.norm_bias)
        ]
        fc1 = self.fc1.checked(channels, width)
        return NormAndMLP(norm_weight, norm_bias, self.eps, fc1, self.fc2.checked(width, channels))

    def pointers(self) -> NormMLP:
        return NormMLP(
            self.norm_weight.data_ptr(),
            self.norm_bias.data_ptr(),
            self.eps,
            self.fc1.pointers(),
            self.fc2.pointers(),
        )


def fast_mlp(x: Tensor, attended: Tensor, layers: NormAndMLP) -> Tensor:
    """y + an MLP of the layer norm of y = x + attended, tokens (..., C), without gradient."""
    x = x.contiguous()
    attended = attended.expand(x.shape).contiguous()
    tokens = x.numel() // x.shape[-1]
    layers = layers.checked(x.shape[-1])
    width, channels = layers.fc1.weight.shape
    threads = torch.get_num_threads()
    size = kernel_function('mlp_memory', x.dtype, width, channels)(tokens, channels, width, threads)
    memory = x.new_empty(size, dtype=torch.uint8)
    out = torch.empty_like(x)
    kernel_function('mlp', x.dtype, width, channels)(
        x.data_ptr(),
        attended.data_ptr(),
        layers.pointers(),
        out.data_ptr(),
        tokens,
        memory.data_ptr(),
        threads,
    )
    return out


def fast_conv_mlp(
    x: Tensor,
    attended: Tensor,
    layers: NormAndMLP,
    kernel: Tensor,
    kernel_bias: Tensor,
    relu: bool = False,
    outside: Optional[Tensor] = None,
) -> Tensor:
    """y + an MLP, with a depthwise convolution before its GELU, of the layer norm of
    y = x + attended, tokens (B, H, W, C), without gradient.

    Args:
        x: tokens.
        attended: tokens.
        layers: the other parameters.
        kernel: (K, 1, 3, 3), in the dtype of x, as its bias.
        kernel_bias: (K,).
        relu: a ReLU before the convolution.
        outside: (B, H, W, 1), True where the convolution sees zeros. None: nowhere.
    """
    x = x.contiguous()
    attended = attended.expand(x.shape).contiguous()
    images, height, map_width, channels = x.shape
    layers = layers.checked(channels)
    width = len(layers.fc1.weight)
    # The function in C++ checks nothing: what does not fit ends here.
    weights = kernel.reshape(width, 9).contiguous()
    kernel_bias = kernel_bias.expand(width).contiguous()
    if outside is not None:
        outside = outside.expand(images, height, map_width, 1).contiguous()
    convolution = MapConvolution(
        weights.data_ptr(),
        kernel_bias.data_ptr(),
        None if outside is None else outside.data_ptr(),
        relu,
        images,
        height,
        map_width,
    )
    pointers = layers.pointers()
    threads = torch.get_num_threads()
    sides = layers.fc1.weight.shape
    size = kernel_function('conv_mlp_memory', x.dtype, *sides)(pointers, convolution, threads)
    memory = x.new_empty(size, dtype=torch.uint8)
    out = torch.empty_like(x)
    kernel_function('conv_mlp', x.dtype, *sides)(
        x.data_ptr(),
        attended.data_ptr(),
        pointers,
        convolution,
        out.data_ptr(),
        memory.data_ptr(),
        threads,
    )
    return out


def fast_convolve_gelu(x: Tensor, kernel: Tensor, bias: Optional[Tensor], rows: slice) -> Tensor:
    """The GELU of a zero-padded depthwise convolution, without gradient.

    Args:
        x: a map (B, H, W, C).
        kernel: (C, 1, 3, 3), in the dtype of x, as the bias.
        bias: (C,). None: there is none.
        rows: of the result that are computed, (B, rows, W, C).
    """
    images, height, width, channels = x.shape
    x = x.contiguous()
    out = x.new_empty(images, rows.stop - rows.start, width, channels)
    # The function in C++ checks nothing: what does not fit ends here.
    weights = kernel.reshape(channels, 9).t().contiguous()
    bias = x.new_zeros(channels) if bias is None else bias.expand(channels).contiguous()
    kernel_function('convolve_gelu', x.dtype)(
        x.data_ptr(),
        weights.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        images,
        height,
        width,
        channels,
        rows.start,
        rows.stop,
        torch.get_num_threads(),
    )
    return out


def fast_convolve_add(x: Tensor, others: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """The sum of a zero-padded depthwise convolution of x and of other tokens, without gradient.

    Args:
        x: a map (B, H, W, C).
        others: tokens of the same shape.
        kernel: (C, 1, 3, 3), in the dtype of x, as the bias.
        bias: (C,).
    """
    images, height, width, channels = x.shape
    x = x.contiguous()
    # The function in C++ checks nothing: what does not fit ends here.
    others = others.expand(x.shape).contiguous()
    weights = kernel.reshape(channels, 9).t().contiguous()
    bias = bias.expand(channels).contiguous()
    out = torch.empty_like(x)
    kernel_function('convolve_add', x.dtype)(
        x.data_ptr(),
        weights.data_ptr(),
        bias.data_ptr(),
        others.data_ptr(),
        out.data_ptr(),
        images,
        height,
        width,
        channels,
        torch.get_num_threads(),
    )
    return out


def fast_split_patches(x: Tensor, k: int) -> Tensor:
    """The patches of a map (B, H, W, C), both sides multiples of k, as rows
    (B * H / k * W / k, C * k * k), without gradient."""
    images, height, width, channels = x.shape
    x = x.contiguous()
    out = x.new_empty(images * (height // k) * (width // k), channels * k * k)
    copy_patches('split_patches', x, out, k)
    return out


def fast_join_patches(rows: Tensor, shape: Sequence[int], k: int) -> Tensor:
    """The map (B, H, W, C) of the patches that `fast_split_patches` returns, without gradient."""
    out = rows.new_empty(shape)
    copy_patches('join_patches', out, rows.contiguous(), k)
    return out


def copy_patches(name: str, x: Tensor, rows: Tensor, k: int) -> None:
    """Copy a map (B, H, W, C) to the rows of its patches, or back; both are contiguous."""
    images, height, width, channels = x.shape
    # The function in C++ checks nothing: what does not fit ends here.
    rows.view(images, height // k, width // k, channels, k, k)
    kernel_function(name, x.dtype)(
        x.data_ptr(),
        rows.data_ptr(),
        images,
        height // k,
        width // k,
        channels,
        k,
        torch.get_num_threads(),
    )


def pointer(x: Tensor) -> Heads:
    return Heads(x.data_ptr(), *x.stride()[:3])
