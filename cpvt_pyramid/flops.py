"""What a computation costs, from the shapes of its tensors: multiply-additions and bytes.

    model = CPVTPyramid('pcpvt_small').to('meta')
    with Counter() as counter:
        model(torch.empty(1, 3, 800, 1344, device='meta'))
    counter.total, counter.by_module['CPVTPyramid.blocks']

Fused attention counts as the two products that it is: torch's own counter sees none in the CPU's
fused kernel, and mmengine's in no fused kernel. Of depthwise convolutions, the backward pass counts
as twice the forward pass, where torch's own has it as a dense convolution's. Modules count
whether or not they are called as such, as lists and many heads are not.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry
from torch.utils.module_tracker import ModuleTracker

aten = torch.ops.aten
WEIGHTED = (aten.mm, aten.addmm, aten.convolution, aten.convolution_backward)


class Counter(ExitStack):
    """Counts what runs inside of a `with`, the backward pass included, on any device; on torch's
    meta device nothing is computed for it.

    Attributes:
        total: multiply-additions of matrix products, convolutions and attention, which papers
            call FLOPs; all else is small beside them, and not counted.
        by_module: the same of the forward pass alone, for each module by its name, as in
            'CPVTPyramid.blocks.0', whose first part is the class of the outermost that was called.
        bytes: operands and results of products with weights and of convolutions, each read or
            written once: what attention reads and leaves is among them, its scores are not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = self.bytes = 0
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
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)


class _Operations(TorchDispatchMode):
    """Shows a counter each operation that has FLOPs, taking apart those made of others."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Optional[dict] = None
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
        grad, x, weight, _, _, _, _, transposed, _, _, wanted = args
        each = conv_flop_count(x.shape, weight.shape, grad.shape, transposed) // 2
        return each * sum(wanted[:2])  # the gradients of x and of the weight
    return flop_registry[op](*args, **kwargs, out_val=out) // 2


def above(names: set[str]) -> set[str]:
    """Module names and those of the modules around them: 'A.b.c' is in 'A.b' and 'A'."""
    parts = [name.split('.') for name in names]
    return {'.'.join(path[:i]) for path in parts for i in range(1, len(path) + 1)}
