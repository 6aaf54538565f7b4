"""The one call that makes a model fast on a CPU, and undoes it."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Optional, TypeVar

import torch
from torch import nn

from ..model import MLP, Attention, PatchEmbed
from ..plain_layers import is_plain_linear, plain_class
from ..versions import VERSION
from .attention import AttentionInParts, FusedGlobalAttention, FusedLinearAttention, in_parts
from .blocks import FusedBlock
from .conv_mlp import FusedConvMLP
from .embeddings import FusedOverlapPatchEmbed, FusedPatchEmbed
from .library import library
from .memory import keep_freed_memory
from .norms import FastLayerNorm
from .ordinary import is_plain_parameter
from .patches import PatchConv, takes_patches
from .pegs import FusedPosCNN
from .products import FusedMLP, OneDNNLinear
from .windows import BorderWindowAttention
from .winograd import FEWEST_CHANNELS, WinogradConv2d, takes_tiles

Model = TypeVar('Model', bound=nn.Module)

# The class that takes the place of a class; attentions without an `attend` of their own get one
# that is made for them. `forward` of a fast class calls that of the plain one for layers of other
# classes: of derived ones, whose weight is parametrized and computed each time that it is read, and
# of plain ones, by hooks of others that kept the method of an accelerated layer.
FAST: dict[type, type] = {
    fast.stands_for: fast
    for fast in (
        OneDNNLinear,
        FastLayerNorm,
        FusedMLP,
        FusedConvMLP,
        FusedGlobalAttention,
        FusedLinearAttention,
        BorderWindowAttention,
        FusedBlock,
        FusedPatchEmbed,
        FusedOverlapPatchEmbed,
        FusedPosCNN,
    )
}
CONVOLUTIONS = (PatchConv, WinogradConv2d)  # the place and the size of one decide


def accelerate(
    model: Model,
    enable: bool = True,
    filter_fn: Optional[Callable[[nn.Module, str], bool]] = None,
) -> Model:
    """Make inference and training of a model faster on a CPU, in place.

    It does so in float32 and, where oneDNN has it, in bfloat16: with weights in bfloat16, or with
    weights in float32 under `torch.autocast('cpu', torch.bfloat16)`.

    Layers get another class that computes the same: products by oneDNN, with their GELU, or, in
    float32 without AVX-512, by MKL, which is faster there; MLPs in parts, also those with a
    depthwise convolution (PVTv2, MiT); smaller windows at the border of a map; patches by one
    product; and, in inference in float32, 3x3 convolutions with 256 channels or more by Winograd's
    minimal filtering. The last one has 4 to 7 times the rounding errors of PyTorch's convolution,
    and NaN and infinite values reach the 3 x 3 outputs around those that depend on them. Small maps
    are computed as before, where that takes less time.

    In inference, patch embeddings, attention, layer norms, MLPs and PEGs are computed by functions
    of this package, in `acceleration/kernels.cpp`. A patch embedding is one function with the layer
    norm after it. Attention is one function with the layer norm before it and the linear layers of
    its queries and of its result, inside windows also with those of keys and values; those of
    patches are another one. An MLP is one with the sum and the layer norm before it, its depthwise
    convolution and the sum after it. Training computes the forward pass of an MLP's convolution by
    them, too, and saves one map for the layer norm and the MLP. The first call on a machine
    compiles them, in some ten seconds, into `~/.cache/cpvt_pyramid` (or `$XDG_CACHE_HOME`). They
    need Linux, a C++ compiler (`CXX`, or g++) and a processor with AVX2, in bfloat16 one with
    avx512_bf16. Where the processor has AMX, they multiply bfloat16 by it, if g++ is 11 or newer
    and channels are multiples of 32; else products are oneDNN's and PyTorch's, which use it, too.
    Without the kernels PyTorch's functions compute the same; `cpvt doctor` says why.

    The process keeps blocks of memory of up to 32 MiB that it frees, also after `enable=False`: see
    `acceleration/memory.py`.

    Parameters, their names and hooks of modules stay. What it does not know it leaves alone: layers
    of other classes (also of derived ones), and layers with weights that are parametrized, pruned,
    quantized, sharded, in another dtype or not on a CPU.

    An accelerated model computes as it did before on other devices, in other dtypes (also those of
    autocast), with subclasses of tensors, compiled or exported, in `torch.jit.trace`, forward-mode
    AD and functions of `torch.func`, in modes that see functions or operations (`torch.device` as a
    context is one), and in layers that are hooked, replaced, pruned or parametrized later.

    It differs in this, until it is undone:

    - `quantize_dynamic` finds no linear layer, because it looks for the class `nn.Linear` itself,
      and a patched `nn.Linear.forward` or `F.linear` is not called.
    - A backward pass that recomputes a map needs the input, the weights and the biases of the
      layers that made it: changing one in place between the two passes is an error, also where a
      plain layer needs it no longer.

    It needs PyTorch 2.7 with oneDNN. With others it warns and changes nothing.

    Args:
        model: a backbone, or a model that has parts to accelerate, such as a detector.
        enable: False undoes it: classes are as they were before.
        filter_fn: called with each module and its name, says whether that module may change. None:
            all may.

    Returns:
        The model.

    Examples:
        >>> model = accelerate(CPVTPyramid('pcpvt_nano').eval())
        >>> with torch.no_grad():
        ...     maps = model(torch.rand(1, 3, 64, 64))
    """
    if not enable:
        for module in model.modules():
            restore(module)
        return model
    if reason := what_is_missing():
        warnings.warn(f'the model is not accelerated: {reason}', stacklevel=2)
        return model
    keep_freed_memory()
    library()  # compiled now, not by the first image
    # Found before the first class changes, since what an MLP becomes depends on its layers.
    found = [
        (module, fast)
        for name, module, fast in replacements(model)
        if filter_fn is None or filter_fn(module, name)
    ]
    with torch.inference_mode(False):  # a transformed weight serves outside of it, too
        for module, fast in found:
            module.__class__ = fast
            if isinstance(module, WinogradConv2d) and not module.training:
                module.transformed_weight()  # processes that are forked later share it
    return model


def what_is_missing() -> Optional[str]:
    """What accelerated layers need and this PyTorch does not have, or None."""
    if VERSION < (2, 7):
        return f'torch 2.7 or newer is needed, found {torch.__version__}'
    backend = torch.backends.mkldnn
    if not backend.is_available() or not hasattr(torch.ops.mkldnn, '_linear_pointwise'):
        return 'this PyTorch was built without oneDNN'
    if not backend.enabled:
        return 'torch.backends.mkldnn is switched off'
    return None


def replacements(model: nn.Module) -> Iterator[tuple[str, nn.Module, type]]:
    """The modules that get another class, each with its name, and that class."""
    patches: set[nn.Module] = set()  # what turns patches into tokens
    for module in model.modules():
        if isinstance(module, (PatchEmbed, Attention)):
            patches.update(part for part in module.children() if type(part) is nn.Conv2d)
    for name, module in model.named_modules():
        fast = fast_class(type(module))
        if type(module) is nn.Conv2d and has_plain_weight(module):
            if module in patches and takes_patches(module):
                yield name, module, PatchConv
            elif takes_tiles(module) and min(module.weight.shape[:2]) >= FEWEST_CHANNELS:
                yield name, module, WinogradConv2d
        elif isinstance(module, nn.Linear):
            if fast and has_plain_weight(module):
                yield name, module, fast
        elif isinstance(module, MLP):
            layers = (module.fc1, module.fc2)
            if fast and all(is_plain_linear(fc) and has_plain_weight(fc) for fc in layers):
                yield name, module, fast
        elif fast and all(is_plain_parameter(parameter) for parameter in module.parameters()):
            yield name, module, fast


def fast_class(kind: Any) -> Optional[type]:
    """The class that takes the place of a class; None: it is left alone."""
    if kind in FAST:
        return FAST[kind]
    is_plain = issubclass(kind, Attention) and not issubclass(kind, AttentionInParts)
    return in_parts(kind) if is_plain and kind.attend is Attention.attend else None


def has_plain_weight(layer: nn.Module) -> bool:
    """True if a layer has an ordinary weight and bias, in a supported dtype on a CPU."""
    has_plain_bias = layer.bias is None or is_plain_parameter(layer.bias)
    return is_plain_parameter(layer.weight) and has_plain_bias


def is_accelerated(module: nn.Module) -> bool:
    """True if a module has a fast class."""
    kind = type(module)
    is_made = 'stands_for' in vars(kind) and issubclass(kind, AttentionInParts)
    return is_made or kind in FAST.values() or kind in CONVOLUTIONS


def restore(module: nn.Module) -> None:
    """Give an accelerated layer the class that it had."""
    if not is_accelerated(module):
        return
    if isinstance(module, WinogradConv2d):
        module.forget()
    module.__class__ = plain_class(module)
