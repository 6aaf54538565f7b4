"""Where the model is not run but captured as a graph: compiled, exported or traced."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def graph_is_captured() -> bool:
    """Whether what runs is being compiled, exported or traced, for other sizes than this one."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def opaque(like: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A function that stays one operator in a graph compiled for float32 inference on a CPU.

    For open sizes the compiler makes slower kernels of these functions than they are
    (docs/performance.md). With gradient, elsewhere, and in exported graphs they are taken apart.

    Args:
        like: called with the function's arguments, gives an empty tensor of its result's shape.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = f'cpvt_pyramid::{function.__name__}'
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(like)

        @functools.wraps(function)
        def call(x: Tensor, *others: object) -> Tensor:
            return (operator if stays_whole(x) else function)(x, *others)

        return call

    return decorate


def stays_whole(x: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and not torch.is_grad_enabled()
        and float32_on_cpu(x)
    )


def float32_on_cpu(x: Tensor) -> bool:
    """Whether what is done with x is done in float32 on a CPU, and not cast."""
    return x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled('cpu')
