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
from ctypes import POINTER, c_bool, c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple, Optional, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..padding.batching import ceil_div
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


class NormPointer(ctypes.Structure):
    """`Norm` of kernels.cpp."""

    _fields_ = [
        ('weight', c_void_p),
        ('bias', c_void_p),
        ('eps', c_float),
        ('in_float', c_int32),
    ]


class NormMLP(ctypes.Structure):
    """`NormMLP` of kernels.cpp."""

    _fields_ = [
        ('norm', NormPointer),
        ('fc1', LinearPointer),
        ('fc2', LinearPointer),
    ]


class Patches(ctypes.Structure):
    """`Patches` of kernels.cpp."""

    _fields_ = [
        ('images', c_int64),
        ('height', c_int64),
        ('width', c_int64),
        ('channels', c_int64),
        ('side', c_int64),
        ('step', c_int64),
        ('border', c_int64),
        ('rows', c_int64),
        ('columns', c_int64),
        ('room', c_int64),
        ('outside', c_void_p),
        ('has_planes', c_int32),
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


# The results and the arguments of the functions of kernels.cpp. A bool says whether they had the
# memory that they need.
SIGNATURES: dict[str, list[Any]] = {
    'layer_norm': [None, c_void_p, POINTER(NormPointer), c_void_p, *[c_int64] * 3],
    'attention': [
        c_bool,
        *[POINTER(Heads)] * 4,
        c_void_p,
        POINTER(Sizes),
        c_float,
        c_int64,
    ],
    'window_attention': [
        c_bool,
        c_void_p,
        POINTER(NormPointer),
        c_void_p,
        *[POINTER(LinearPointer)] * 2,
        c_void_p,
        POINTER(AttentionSizes),
        c_int64,
    ],
    'global_attention': [
        c_bool,
        c_void_p,
        POINTER(NormPointer),
        *[c_void_p] * 2,
        *[POINTER(LinearPointer)] * 2,
        c_void_p,
        POINTER(AttentionSizes),
        c_int64,
    ],
    'mlp': [c_bool, *[c_void_p] * 2, POINTER(NormMLP), c_void_p, *[c_int64] * 2],
    'conv_mlp': [
        c_bool,
        *[c_void_p] * 2,
        POINTER(NormMLP),
        POINTER(MapConvolution),
        c_void_p,
        c_int64,
    ],
    'convolve_gelu': [None, *[c_void_p] * 4, *[c_int64] * 7],
    'convolve_add': [None, *[c_void_p] * 5, *[c_int64] * 5],
    'split_patches': [None, *[c_void_p] * 2, *[c_int64] * 6],
    'join_patches': [None, *[c_void_p] * 2, *[c_int64] * 6],
    'embed_patches': [
        c_bool,
        c_void_p,
        POINTER(Patches),
        POINTER(LinearPointer),
        POINTER(NormPointer),
        c_void_p,
        c_int64,
    ],
    'keys_of_patches': [
        c_bool,
        c_void_p,
        POINTER(NormPointer),
        POINTER(Patches),
        POINTER(LinearPointer),
        POINTER(NormPointer),
        POINTER(LinearPointer),
        c_void_p,
        c_int64,
    ],
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
    if function.restype is c_bool:
        function.errcheck = check_memory
    return function


def check_memory(had_memory: Any, *_: Any) -> Any:
    """Raise an error if a function did not have the memory that it needs."""
    if not had_memory:
        raise MemoryError('there is not enough memory')


def of_shape(x: Tensor, *shape: int) -> Tensor:
    """A tensor of a shape, one value next to the other. The functions in C++ check nothing: what
    does not fit ends here."""
    if x.shape != shape:
        raise ValueError(f'a tensor of shape {shape} is needed, got {tuple(x.shape)}')
    return x.contiguous()


class Call(NamedTuple):
    """A call of a function of kernels.cpp for all that it reads, which is not made yet.

    All calls of a block are prepared first, and then made one after another. Each of them reads so
    much that after it Python's own code is no longer in the processor's cache.
    """

    function: Any
    arguments: Sequence[Any]
    kept: Sequence[Any]  # what the arguments point to
    out: Tensor  # the result, when the call has been made

    def run(self) -> Tensor:
        self.function(*self.arguments)
        return self.out


class Linear(NamedTuple):
    """The weight of a linear layer, (out, in), and its bias, (out,), in the dtype of the tokens."""

    weight: Tensor
    bias: Tensor

    def checked(self, in_channels: int, out_channels: int) -> 'Linear':
        """The same as the functions in C++ read it. Dtypes are the caller's."""
        weight = of_shape(self.weight, out_channels, in_channels)
        return Linear(weight, of_shape(self.bias, out_channels))

    def pointers(self) -> LinearPointer:
        weight, bias = self
        out_channels, in_channels = weight.shape
        return LinearPointer(weight.data_ptr(), bias.data_ptr(), in_channels, out_channels)


class Norm(NamedTuple):
    """The weight and bias of a layer norm, (C,), and its epsilon."""

    weight: Tensor
    bias: Tensor
    eps: float

    def checked(self, channels: int, dtype: torch.dtype) -> 'Norm':
        """The same as the functions in C++ read it with tokens of a dtype: in that dtype, or in
        float32."""
        weight = of_shape(self.weight, channels)
        bias = of_shape(self.bias, channels)
        if not weight.dtype == bias.dtype == dtype:
            weight, bias = weight.float(), bias.float()
        return Norm(weight, bias, self.eps)

    def pointers(self) -> NormPointer:
        weight, bias, eps = self
        in_float = weight.dtype == torch.float32
        return NormPointer(weight.data_ptr(), bias.data_ptr(), eps, in_float)


class Depthwise(NamedTuple):
    """The weight of a depthwise convolution, (C, 1, 3, 3), and its bias, (C,), in the dtype of the
    map."""

    weight: Tensor
    bias: Tensor


def fast_layer_norm(x: Tensor, norm: Norm) -> Tensor:
    """A layer norm of tokens (..., C), without gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    channels = x.shape[-1]
    norm = norm.checked(channels, x.dtype)
    kernel_function('layer_norm', x.dtype)(
        x.data_ptr(),
        norm.pointers(),
        out.data_ptr(),
        x.numel() // channels,
        channels,
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
    kernel_function('attention', q.dtype, channels)(
        pointer(q),
        pointer(k),
        pointer(v),
        pointer(out.transpose(1, 2)),
        None if bias is None else bias.data_ptr(),
        sizes,
        channels**-0.5,
        torch.get_num_threads(),
    )
    return out


def prepare_window_attention(
    x: Tensor,
    norm: Optional[Norm],
    qkv: Linear,
    proj: Linear,
    heads: int,
    window: int,
    bias: Optional[Tensor] = None,
) -> Call:
    """The call for attention of tokens (B, H, W, C) inside windows with its linear layers, in the
    same shape, without gradient.

    Args:
        x: tokens.
        norm: of the tokens, before the attention. None: there is none.
        qkv: the layer of queries, keys and values, to 3 C channels.
        proj: the layer of their attention.
        heads: of attention.
        window: side of the windows. Those at the border may be smaller.
        bias: added to the scores of each key, (B, H, W). None: nothing is.
    """
    x = x.contiguous()
    images, height, width, channels = x.shape
    if bias is not None:
        bias = bias.float().expand(images, height, width).contiguous()
    return attention_with_layers(
        'window_attention',
        x,
        norm,
        [bias],
        [qkv.checked(channels, 3 * channels), proj.checked(channels, channels)],
        AttentionSizes(images, height, width, channels, heads, 0, window),
    )


def prepare_global_attention(
    x: Tensor,
    norm: Optional[Norm],
    kv: Tensor,
    q: Linear,
    proj: Linear,
    heads: int,
    bias: Optional[Tensor] = None,
) -> Call:
    """The call for attention of tokens (B, H, W, C) to the keys of their image, with the linear
    layers of queries and result, in the same shape, without gradient.

    Args:
        x: tokens.
        norm: of the tokens, before the layer of queries. None: there is none.
        kv: keys and values, (B, M, 2 C).
        q: the layer of queries.
        proj: the layer of their attention.
        heads: of attention.
        bias: added to the scores of each key, (B, M). None: nothing is.
    """
    x = x.contiguous()
    images, height, width, channels = x.shape
    kv = of_shape(kv, images, kv.shape[1], 2 * channels)
    if bias is not None:
        bias = bias.float().expand(kv.shape[:2]).contiguous()
    return attention_with_layers(
        'global_attention',
        x,
        norm,
        [kv, bias],
        [layer.checked(channels, channels) for layer in (q, proj)],
        AttentionSizes(images, height, width, channels, heads, kv.shape[1], 0),
    )


class KeyLayers(NamedTuple):
    """What keys and values are made by, of patches of k x k tokens with C channels: a linear layer
    of their C * k * k values, a layer norm, and a linear layer to 2 C channels."""

    sr: Linear
    norm: Norm
    kv: Linear


def prepare_keys_of_patches(
    x: Tensor,
    norm: Norm,
    layers: KeyLayers,
    k: int,
    rows: int,
    columns: int,
    outside: Optional[Tensor] = None,
) -> Call:
    """The call for the keys and values (B, rows * columns, 2 C) of the patches of tokens
    (B, H, W, C) after a layer norm, without gradient.

    Args:
        x: tokens.
        norm: the layer norm.
        layers: of the patches.
        k: side of a patch.
        rows: of patches. Beyond the map, they are zeros.
        columns: of patches.
        outside: (B, H, W, 1), True where patches are zeros, too. None: nowhere.
    """
    x = x.contiguous()
    images, height, width, channels = x.shape
    norm = norm.checked(channels, x.dtype)
    sr = layers.sr.checked(channels * k * k, channels)
    norm_of_patches = layers.norm.checked(channels, x.dtype)
    kv = layers.kv.checked(channels, 2 * channels)
    if outside is not None:
        outside = of_shape(outside, images, height, width, 1)
    patches = Patches(images, height, width, channels, k, k, 0, rows, columns, channels * k * k)
    patches.outside = None if outside is None else outside.data_ptr()
    out = x.new_empty(images, rows * columns, 2 * channels)
    arguments = (
        x.data_ptr(),
        norm.pointers(),
        patches,
        sr.pointers(),
        norm_of_patches.pointers(),
        kv.pointers(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    function = kernel_function('keys_of_patches', x.dtype, channels)
    return Call(function, arguments, (x, norm, outside, sr, norm_of_patches, kv), out)


def fast_embed_patches(
    x: Tensor, layer: Linear, norm: Optional[Norm], k: int, step: int, border: int
) -> Tensor:
    """The tokens (B, ceil(H / step), ceil(W / step), K) that the patches of a map (B, H, W, C)
    become by a linear layer and a layer norm, without gradient.

    Args:
        x: the map. An image, (B, C, H, W) in memory, is not copied.
        layer: of the values (C * k * k) of a patch to K channels.
        norm: the layer norm. None: there is none.
        k: side of a patch.
        step: from one patch to the next.
        border: how far the first patch begins before the map. Beyond the map, patches are zeros.
    """
    images, height, width, channels = x.shape
    has_planes = channels > 1 and x.permute(0, 3, 1, 2).is_contiguous()
    x = x if has_planes else x.contiguous()
    values = channels * k * k  # of a patch
    weight, bias = layer.checked(values, len(layer.weight))
    room = values
    if x.dtype == torch.bfloat16:  # zeros at the end let AMX multiply any number of values
        room = ceil_div(values, OF_TILES) * OF_TILES
        weight = F.pad(weight, (0, room - values))
    rows, columns = ceil_div(height, step), ceil_div(width, step)
    patches = Patches(images, height, width, channels, k, step, border, rows, columns, room)
    patches.has_planes = has_planes
    if norm is not None:
        norm = norm.checked(len(weight), x.dtype)
    out = x.new_empty(images, rows, columns, len(weight))
    kernel_function('embed_patches', x.dtype, room)(
        x.data_ptr(),
        patches,
        Linear(weight, bias).pointers(),
        NormPointer() if norm is None else norm.pointers(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def attention_with_layers(
    name: str,
    x: Tensor,
    norm: Optional[Norm],
    others: Sequence[Optional[Tensor]],
    layers: Sequence[Linear],
    sizes: AttentionSizes,
) -> Call:
    """Prepare a call of a function of kernels.cpp for tokens after a layer norm, if there is one,
    other tensors and linear layers. All but the norm are checked."""
    if sizes.channels % sizes.heads:
        raise ValueError(f'{sizes.heads} heads do not divide {sizes.channels} channels')
    if norm is not None:
        norm = norm.checked(sizes.channels, x.dtype)
    out = torch.empty_like(x)
    arguments = (
        x.data_ptr(),
        NormPointer() if norm is None else norm.pointers(),
        *[None if other is None else other.data_ptr() for other in others],
        *[layer.pointers() for layer in layers],
        out.data_ptr(),
        sizes,
        torch.get_num_threads(),
    )
    function = kernel_function(name, x.dtype, sizes.channels, sizes.channels // sizes.heads)
    return Call(function, arguments, (x, norm, others, layers), out)


class NormAndMLP(NamedTuple):
    """The parameters of a block's second branch: a layer norm of C channels, and two linear layers,
    to K channels and back."""

    norm: Norm
    fc1: Linear
    fc2: Linear

    def checked(self, channels: int, dtype: torch.dtype) -> 'NormAndMLP':
        """The same as the functions in C++ read it with tokens of a dtype."""
        width = len(self.fc1.weight)
        return NormAndMLP(
            self.norm.checked(channels, dtype),
            self.fc1.checked(channels, width),
            self.fc2.checked(width, channels),
        )

    def pointers(self) -> NormMLP:
        return NormMLP(self.norm.pointers(), self.fc1.pointers(), self.fc2.pointers())


def prepare_mlp(x: Tensor, attended: Tensor, layers: NormAndMLP) -> Call:
    """The call for y + an MLP of the layer norm of y = x + attended, tokens (..., C), without
    gradient."""
    x = x.contiguous()
    attended = of_shape(attended, *x.shape)
    tokens = x.numel() // x.shape[-1]
    layers = layers.checked(x.shape[-1], x.dtype)
    width, channels = layers.fc1.weight.shape
    out = torch.empty_like(x)
    arguments = (
        x.data_ptr(),
        attended.data_ptr(),
        layers.pointers(),
        out.data_ptr(),
        tokens,
        torch.get_num_threads(),
    )
    function = kernel_function('mlp', x.dtype, width, channels)
    return Call(function, arguments, (x, attended, layers), out)


def prepare_conv_mlp(
    x: Tensor,
    attended: Tensor,
    layers: NormAndMLP,
    conv: Depthwise,
    relu: bool = False,
    outside: Optional[Tensor] = None,
) -> Call:
    """The call for y + an MLP, with a depthwise convolution before its GELU, of the layer norm of
    y = x + attended, tokens (B, H, W, C), without gradient.

    Args:
        x: tokens.
        attended: tokens.
        layers: the other parameters.
        conv: the convolution, of K channels.
        relu: a ReLU before the convolution.
        outside: (B, H, W, 1), True where the convolution sees zeros. None: nowhere.
    """
    x = x.contiguous()
    attended = of_shape(attended, *x.shape)
    images, height, map_width, channels = x.shape
    layers = layers.checked(channels, x.dtype)
    width = len(layers.fc1.weight)
    kernel = of_shape(conv.weight, width, 1, 3, 3)
    bias = of_shape(conv.bias, width)
    if outside is not None:
        outside = of_shape(outside, images, height, map_width, 1)
    convolution = MapConvolution(
        kernel.data_ptr(),
        bias.data_ptr(),
        None if outside is None else outside.data_ptr(),
        relu,
        images,
        height,
        map_width,
    )
    out = torch.empty_like(x)
    arguments = (
        x.data_ptr(),
        attended.data_ptr(),
        layers.pointers(),
        convolution,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    function = kernel_function('conv_mlp', x.dtype, width, channels)
    return Call(function, arguments, (x, attended, layers, kernel, bias, outside), out)


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


def fast_convolve_add(x: Tensor, others: Tensor, conv: Depthwise) -> Tensor:
    """The sum of a zero-padded depthwise convolution of x and of other tokens, without gradient.

    Args:
        x: a map (B, H, W, C).
        others: tokens of the same shape.
        conv: the convolution, of C channels.
    """
    images, height, width, channels = x.shape
    x = x.contiguous()
    others = of_shape(others, *x.shape)
    weights = of_shape(conv.weight, channels, 1, 3, 3).view(channels, 9).t().contiguous()
    bias = of_shape(conv.bias, channels)
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
