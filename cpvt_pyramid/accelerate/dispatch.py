"""Which version of an operation runs: the plain one or the fast one.

Below PyTorch 2.7 the plain versions run, whatever is selected: the fast ones need newer operators.

Every file of `cpvt_pyramid.ops` has the plain version of its operations first, in PyTorch's public
functions, then the choice, then the fast version. If you suspect a fast version, select the plain
ones everywhere, with the context manager `plain` or the environment variable `CPVT_PLAIN_OPS=1`,
and compare.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

VERSION = tuple(int(number) for number in re.findall(r'\d+', torch.__version__)[:2])


def require_torch(version: tuple[int, int], what: str) -> None:
    """Raise an ImportError if PyTorch is older than a version that something needs."""
    if version > VERSION:
        needed = '.'.join(map(str, version))
        raise ImportError(
            f'{what} needs torch {needed} or newer, found {torch.__version__}; '
            f"pip install --upgrade 'torch>={needed}'"
        )


require_torch((2, 1), 'cpvt_pyramid')  # before what an older one does not have is imported

# ruff: noqa: E402
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.backends import mkldnn
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import _get_current_dispatch_mode

# Without it the plain versions run.
HAS_ONEDNN_LINEAR = mkldnn.is_available() and hasattr(torch.ops.mkldnn, '_linear_pointwise')

# What the processor can do, by name; empty where PyTorch does not say.
CAPABILITIES = dict(getattr(torch.cpu, 'get_capabilities', dict)())

# Whether float32 products by MKL take twice as long as by oneDNN. They do on AMD's Zen 5, where MKL
# uses half of the width of AVX-512. On Zen 4, which has no AVX-VNNI, AVX2 is as fast as AVX-512.
# Where PyTorch does not say what the processor has, it is treated as a Zen 5.
MKL_IS_SLOW = CAPABILITIES.get('avx_vnni', True)

# Whether the processor multiplies bfloat16 by AVX-512. With AMX, PyTorch has a fused kernel of its
# own, which was not measured.
MULTIPLIES_BFLOAT16 = bool(CAPABILITIES.get('avx512_bf16')) and not CAPABILITIES.get('amx_bf16')

if hasattr(torch.compiler, 'is_compiling'):
    is_compiling = torch.compiler.is_compiling
else:  # PyTorch 2.1 and 2.2
    is_compiling = torch._utils.is_compiling

HAS_FAST_OPS = VERSION >= (2, 7)

_selected = os.environ.get('CPVT_PLAIN_OPS', '0') not in ('', '0')


@contextmanager
def plain(select: bool = True) -> Iterator[None]:
    """Select the plain version of every operation, in the whole process.

    Gradients of gradients need the plain versions. Attention that is recorded for a gradient then
    keeps its scores, which takes more memory than a fused kernel.

    Args:
        select: False selects the fast versions instead, whatever is selected outside.

    Examples:
        >>> model, image = CPVTPyramid('pcpvt_nano').eval(), torch.rand(1, 3, 64, 64)
        >>> with plain(), torch.inference_mode():
        ...     expected = model(image)
        >>> torch.testing.assert_close(model(image), expected)
    """
    global _selected
    before = _selected
    _selected = select
    try:
        yield
    finally:
        _selected = before


def plain_selected() -> bool:
    """True if `plain` or the environment selects the plain versions."""
    return _selected


def graph_is_captured() -> bool:
    """True if this call is compiled, exported or traced to a graph that must serve other sizes."""
    is_traced_by_fx = getattr(_symbolic_trace, '_is_fx_tracing_flag', False)
    return is_compiling() or torch.jit.is_tracing() or is_traced_by_fx


def graph_is_exported() -> bool:
    """True if this call is captured by torch.export."""
    return HAS_FAST_OPS and torch.compiler.is_exporting()


def transform_is_active() -> bool:
    """True inside a transform of `torch.func` or a level of forward-mode AD.

    Fast operations drop tangents there, or fail. The public `unpack_dual` tells whether a given
    tensor has a tangent, but it may be a weight that has one.
    """
    if forward_ad._current_level >= 0:
        return True
    # To torch.compile the stack of torch.func is never empty.
    return not is_compiling() and peek_interpreter_stack() is not None


def every_derivative_is_needed() -> bool:
    """True if attention must be differentiable in forward mode and more than once, which PyTorch's
    fused kernels are not."""
    if graph_is_exported():
        return False
    recorded = torch.is_grad_enabled() and not graph_is_captured()
    return (_selected and recorded) or transform_is_active()


def use_plain() -> bool:
    """True if the plain version runs: it was selected, nothing else can run, or a graph is
    captured."""
    return _selected or not HAS_FAST_OPS or graph_is_captured() or transform_is_active()


def use_onednn(x: Tensor) -> bool:
    """True if oneDNN computes the matrix products of x: float32 on a CPU, without autocast."""
    return float32_on_cpu(x) and is_unobserved(x) and has_onednn()


def use_onednn_bfloat16(x: Tensor) -> bool:
    """True if x is bfloat16 on a CPU that multiplies it by AVX-512 instructions. PyTorch's own
    products are oneDNN's there, but its GELU and its attention are not."""
    if not (x.is_cpu and x.dtype == torch.bfloat16 and MULTIPLIES_BFLOAT16):
        return False
    return is_unobserved(x) and has_onednn()


def has_onednn() -> bool:
    """True if oneDNN's operator exists and `torch.backends.mkldnn` is not switched off."""
    return HAS_ONEDNN_LINEAR and bool(mkldnn.enabled)


def is_unobserved(x: Tensor) -> bool:
    """True if x has values, and no dispatch mode, captured graph or transform must observe the ATen
    operations on it."""
    is_observed = use_plain() or _get_current_dispatch_mode() is not None
    return not is_observed and x.numel() > 0


def float32_on_cpu(x: Tensor) -> bool:
    """True if operations on x run in float32 on a CPU and are not autocast."""
    if not isinstance(x, Tensor):  # a proxy of torch.fx
        return False
    return x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled('cpu')


def opaque_when_compiled(like: Callable[..., Tensor]) -> Callable[..., Callable[..., Tensor]]:
    """Decorator: graphs compiled for float32 inference on a CPU call the function as one operator,
    `torch.ops.cpvt_pyramid.<its name>`.

    With dynamic shapes the compiler's own kernels for these functions are slower than the functions
    (benchmarks/notes.md). In training, on other devices or dtypes, and in exports, the
    functions are traced through. `like(*arguments)` is an empty tensor shaped as the result.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if not HAS_FAST_OPS:
            return function
        name = f'cpvt_pyramid::{function.__name__}'
        torch.library.custom_op(name, function, mutates_args=()).register_fake(like)
        operator = getattr(torch.ops.cpvt_pyramid, function.__name__)

        @functools.wraps(function)
        def call(x: Tensor, *others: Any) -> Tensor:
            if not is_compiling() or graph_is_exported() or torch.is_grad_enabled():
                return function(x, *others)
            if _selected or transform_is_active() or not float32_on_cpu(x):
                return function(x, *others)
            return operator(x, *others)

        return call

    return register
