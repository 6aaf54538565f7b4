"""Which version of an operation runs: the plain one or the fast one.

Every file of `cpvt_pyramid.ops` has the plain version of its operations first, in PyTorch's public
functions, then the choice, then the fast version. If you suspect a fast version, select the plain
ones everywhere, with the context manager `plain` or the environment variable `CPVT_PLAIN_OPS=1`,
and compare.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

# Private to PyTorch. Without it the plain versions run.
HAS_ONEDNN_LINEAR = hasattr(torch.ops.mkldnn, '_linear_pointwise')

# What the processor can do, by name; empty where PyTorch does not say.
CAPABILITIES = dict(getattr(torch.cpu, 'get_capabilities', dict)())

# Whether float32 products by MKL take twice as long as by oneDNN. They do on AMD's Zen 5, where MKL
# uses half of the width of AVX-512. Zen 4, which has no AVX-VNNI, is as fast with AVX2. Where
# PyTorch does not say what the processor has, it is taken for the former.
MKL_IS_SLOW = CAPABILITIES.get('avx_vnni', True)

_plain = os.environ.get('CPVT_PLAIN_OPS', '0') not in ('', '0')


@contextmanager
def plain(select: bool = True) -> Iterator[None]:
    """Select the plain version of every operation, in the whole process.

    A backward pass belongs inside the context if its forward pass did: with activation
    checkpointing it runs the forward pass a second time.

    Args:
        select: False selects the fast versions instead, whatever is selected outside.
    """
    global _plain
    before, _plain = _plain, select
    try:
        yield
    finally:
        _plain = before


def plain_selected() -> bool:
    """Whether `plain` or the environment selects the plain versions."""
    return _plain


def graph_is_captured() -> bool:
    """Whether this call is compiled, exported or traced to a graph that must serve other sizes."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def use_plain() -> bool:
    """Whether the plain version runs: it was selected, or a graph is captured."""
    return _plain or graph_is_captured()


def onednn_takes(x: Tensor) -> bool:
    """Whether oneDNN computes the matrix products of x: float32 on a CPU, and nothing that has to
    see PyTorch's own operators (autocast, a captured graph, a FLOP counter)."""
    return float32_on_cpu(x) and onednn_is_free(x)


def onednn_takes_bfloat16(x: Tensor) -> bool:
    """Whether x is bfloat16 on a CPU that multiplies it by AVX-512 instructions. PyTorch's own
    products are oneDNN's there, but its GELU and its attention are not."""
    return (
        x.is_cpu
        and x.dtype == torch.bfloat16
        and CAPABILITIES.get('avx512_bf16', False)
        and not CAPABILITIES.get('amx_bf16', False)  # has a fused kernel, not measured
        and onednn_is_free(x)
    )


def onednn_is_free(x: Tensor) -> bool:
    """Whether oneDNN is there, is enabled, and nothing has to see PyTorch's own operators."""
    return (
        nothing_watches(x)
        and HAS_ONEDNN_LINEAR
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


def nothing_watches(x: Tensor) -> bool:
    """Whether nothing has to see PyTorch's own operators, and x is not empty."""
    return not use_plain() and x.numel() > 0 and _get_current_dispatch_mode() is None


def float32_on_cpu(x: Tensor) -> bool:
    """Whether operations on x run in float32 on a CPU and are not autocast."""
    return x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled('cpu')


def stays_whole(like: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable]:
    """Decorator: keep a function one operator in graphs compiled for float32 inference on CPUs.

    With dynamic shapes the compiler's own kernels for these functions are slower than the functions
    (docs/performance.md). In training, on other devices or dtypes, and in exports, the function is
    traced through.

    Args:
        like: called with the function's arguments, returns an empty tensor shaped as its result.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = f'cpvt_pyramid::{function.__name__}'
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(like)

        @functools.wraps(function)
        def call(x: Tensor, *others: object) -> Tensor:
            whole = (
                not _plain
                and torch.compiler.is_compiling()
                and not torch.compiler.is_exporting()
                and not torch.is_grad_enabled()
                and float32_on_cpu(x)
            )
            return (operator if whole else function)(x, *others)

        return call

    return decorate
