"""Counts multiply-additions and bytes of a computation, from the shapes of its tensors.

    model = CPVTPyramid('pcpvt_small').to('meta')
    with Counter() as counter:
        model(torch.empty(1, 3, 800, 1344, device='meta'))
    counter.total, counter.by_module['CPVTPyramid.blocks']

Fused attention counts as two matrix products; torch's FlopCounterMode counts 0 for the CPU's fused
kernel, and mmengine 0 for all of them. The backward pass of a depthwise convolution counts twice
the forward pass; torch counts that of a dense one. A module's count includes its submodules even if
its own forward is not called, for example a ModuleList.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Optional

import torch

from .versions import require_torch

require_torch((2, 4), 'Counting multiply-additions')

# ruff: noqa: E402
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode  # PyTorch's notes import it from here
from torch.utils.flop_counter import conv_flop_count, flop_registry
from torch.utils.module_tracker import ModuleTracker

aten = torch.ops.aten
WEIGHTED = (aten.mm, aten.addmm, aten.convolution, aten.convolution_backward)


class Counter(ExitStack):
    """Context manager that counts operations, including the backward pass, on any device. On the
    meta device nothing is computed.

    Attributes:
        total: multiply-additions of matrix products, convolutions and attention, which papers
            call FLOPs. Other operations are comparatively small and not counted.
        by_module: multiply-additions of the forward pass by module name, for example
            'CPVTPyramid.blocks.0', where the first part is the class of the outermost module.
        bytes: size of the operands and results of convolutions and of matrix products with weights,
            each read or written once. This includes attention's inputs and output, not its scores.

    Examples:
        >>> with torch.device('meta'):
        ...     model = CPVTPyramid('pcpvt_small')
        ...     image = torch.rand(1, 3, 224, 224)
        >>> with Counter() as counter:
        ...     maps = model(image)
        >>> round(counter.total / 1e9, 1)
        3.8
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.bytes = 0
        self.by_module: dict[str, int] = defaultdict(int)

    def __enter__(self) -> 'Counter':
        self.modules = self.enter_context(ModuleTracker())
        self.enter_context(sdpa_kernel(SDPBackend.MATH))
        self.enter_context(_Operations(self))
        return self

    def count(self, op: Callable, out: object, args: tuple, kwargs: dict) -> None:
        flops = multiply_additions(op, out, args, kwargs)
        self.total += flops
        if not self.modules.is_bw:
            for name in above(self.modules.parents - {'Global'}):
                self.by_module[name] += flops
        if op in WEIGHTED:
            results = out if isinstance(out, tuple) else (out,)
            for x in (*args, *kwargs.values(), *results):
                if isinstance(x, Tensor):
                    self.bytes += x.numel() * x.element_size()


class _Operations(TorchDispatchMode):
    """Reports operations that have FLOPs to a counter, decomposing composite operations."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Optional[dict] = None,
    ) -> object:
        kwargs = kwargs or {}
        op = func.overloadpacket
        if op not in flop_registry:
            with self:
                out = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        out = func(*args, **kwargs)
        self.counter.count(op, out, args, kwargs)
        return out


def multiply_additions(op: Callable, out: object, args: tuple, kwargs: dict) -> int:
    if op is aten.convolution_backward:
        grad, x, weight = args[:3]
        transposed = args[7]
        wants_x, wants_weight, _ = args[10]
        each = conv_flop_count(x.shape, weight.shape, grad.shape, transposed) // 2
        return each * (wants_x + wants_weight)
    return flop_registry[op](*args, **kwargs, out_val=out) // 2


def above(names: set[str]) -> set[str]:
    """The names and those of their parent modules: for 'A.b.c' also 'A.b' and 'A'."""
    found = set()
    for name in names:
        while name:
            found.add(name)
            name = name.rpartition('.')[0]
    return found
