"""Counts what the host does for a model, beside timm's Twins: calls, operations and time.

    python -m benchmarks.host
    python -m benchmarks.host --archs svt_small --rounds 1000

Where operations are short, on a GPU or for small maps, the host's work is what takes the time.
Three tables compare our backbone with timm's, the first two exactly, the third in turns:

    calls       functions, of Python and of C, that the Python code of a forward pass or a training
                step calls (sys.setprofile)
    operations  ATen operations that compute or copy, on meta tensors: without views and memory
                that is only reserved. Attention counts as its parts, as on every device without
                a kernel for it. `padded`: a forward pass with `valid`, for images of two sizes
    host time   ms of processor time, with 8 channels in each head and one or two images of 32 x 32
                pixels, so that arithmetic takes next to nothing: minimum, lower quartile, and their
                ratios. A batch of one is a case of its own: PyTorch takes timm's maps for
                contiguous there and copies them for each convolution, where it copies our weights

A training step is the forward pass, the mean square of all maps and the backward pass. timm's
model is called by `forward_intermediates`, which returns four maps, too.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # PyTorch's notes import it from here

from benchmarks.timing import time_call, torch_threads
from cpvt_pyramid import ARCHS, Arch, CPVTPyramid
from cpvt_pyramid.app.tooling.command import check_at_least, run_command
from cpvt_pyramid.app.tooling.report import text_table
from tests.models import ports

STEPS = ('forward', 'training step')
COUNT_SIZE = 224  # pixels, of the image of the counts
PADDED = ((224, 224), (190, 157))  # true sizes of a padded batch
HEAD_WIDTH = 8  # channels, of the models whose host time is measured
TIME_SIZE = 32  # pixels, of their images
TIME_BATCHES = (1, 2)  # images at a time
WARM_UP = 5  # steps before time counts
RESERVED = ('empty', 'new_empty', 'empty_like', 'empty_strided', 'new_empty_strided')


def host(
    *,
    archs: Sequence[Literal['pcpvt_small', 'pcpvt_base', 'svt_small', 'svt_base']] = (
        'pcpvt_small',
        'svt_small',
    ),
    rounds: int = 100,
) -> None:
    """Print the three tables.

    Args:
        archs: architectures
        rounds: how often each step is timed; 0 leaves out the times
    """
    check_at_least('rounds', rounds, 0)
    torch.manual_seed(0)
    with torch_threads(1):
        print(text_table(('calls', 'step', 'ours', 'timm', 'ratio'), calls_table(archs)))
        print()
        print(text_table(('operations', 'step', 'ours', 'timm', 'ratio'), operations_table(archs)))
        if rounds:
            print()
            ratios = ('ratio of minima', 'of lower quartiles')
            head = ('host time', 'step', 'images', 'ours', 'timm', *ratios)
            with without_onednn():
                print(text_table(head, time_table(archs, rounds)))


class Pair(NamedTuple):
    """Our backbone and timm's, each of which returns four maps of an image."""

    ours: nn.Module
    timm: nn.Module

    def to(self, device: str, dtype: torch.dtype = torch.float32) -> Pair:
        return Pair(self.ours.to(device, dtype), self.timm.to(device, dtype))

    def forwards(
        self, image: Tensor, valid: Tensor | None = None
    ) -> tuple[Callable[[], Sequence[Tensor]], Callable[[], Sequence[Tensor]]]:
        """A function for each that makes the maps, without a wrapper that would count.

        `valid`, the true sizes of a padded batch, is for ours alone: timm has no padded batches.
        """

        def forward_ours() -> Sequence[Tensor]:
            return self.ours(image, valid)

        def forward_timm() -> Sequence[Tensor]:
            return self.timm.forward_intermediates(image, intermediates_only=True)

        return forward_ours, forward_timm


def build(arch: str | Arch) -> Pair:
    """Both models of an architecture without stage norms, which timm's SVT does not have."""
    return Pair(
        CPVTPyramid(arch, stage_norm=False).eval(),
        ports.of_timm(arch, num_classes=0),
    )


def narrow(arch: str) -> Arch:
    """An architecture with 8 channels in each head."""
    full = ARCHS[arch]
    return full._replace(dims=tuple(HEAD_WIDTH * heads for heads in full.heads))


def one_step(
    step: str, model: nn.Module, forward: Callable[[], Sequence[Tensor]]
) -> Callable[[], None]:
    """A function that runs a step of STEPS once; gradients must be freed after it."""
    model.train(step == 'training step')

    def infer() -> None:
        with torch.no_grad():
            forward()

    def train() -> None:
        loss = sum(maps.square().mean() for maps in forward())
        loss.backward()

    return infer if step == 'forward' else train


def free_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


# Calls


def calls_table(archs: Sequence[str]) -> list[list[str]]:
    """A row for each step of each architecture."""
    image = torch.randn(1, 3, COUNT_SIZE, COUNT_SIZE)
    rows = []
    for arch in archs:
        pair = build(arch)
        for step in STEPS:
            counts = []
            for model, forward in zip(pair, pair.forwards(image)):
                function = one_step(step, model, forward)
                function()  # what is made once is made now
                free_gradients(model)
                counts.append(count_calls(function))
                free_gradients(model)
            rows.append(compared(arch, step, *counts))
    return rows


def count_calls(function: Callable[[], object]) -> int:
    """The functions, of Python and of C, that a call of a Python function calls."""
    count = 0

    def count_event(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ('call', 'c_call')

    before = sys.getprofile()
    sys.setprofile(count_event)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count - 2  # without the function itself and the last line's setprofile


# Operations


class CountOperations(TorchDispatchMode):
    """Counts ATen operations that are no views.

    Attributes:
        count: operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.count += not is_free(func)
        return func(*args, **(kwargs or {}))


def is_free(operation: Any) -> bool:
    """True for a view and for an operation that only reserves memory."""
    name = operation.overloadpacket.__name__
    return operation.is_view or name == '_unsafe_view' or name in RESERVED


def operations_table(archs: Sequence[str]) -> list[list[str]]:
    """A row for each step of each architecture, and one for a padded batch."""
    image = torch.empty(len(PADDED), 3, COUNT_SIZE, COUNT_SIZE, device='meta')
    valid = torch.tensor(PADDED)
    rows = []
    for arch in archs:
        pair = build(arch).to('meta')
        counts = {}
        for step in STEPS:
            for name, model, forward in zip(pair._fields, pair, pair.forwards(image)):
                counts[step, name] = count_operations(one_step(step, model, forward))
                free_gradients(model)
            rows.append(compared(arch, step, counts[step, 'ours'], counts[step, 'timm']))
        forward_padded, _ = pair.forwards(image, valid)
        padded = count_operations(one_step('forward', pair.ours, forward_padded))
        ratio = f'{padded / counts["forward", "ours"]:.2f} of unpadded'
        rows.append([arch, 'forward, padded', str(padded), '', ratio])
    return rows


def count_operations(function: Callable[[], object]) -> int:
    """The operations of a call that are no views."""
    with CountOperations() as counter:
        function()
    return counter.count


def compared(arch: str, step: str, ours: int, theirs: int) -> list[str]:
    return [arch, step, str(ours), str(theirs), f'{ours / theirs:.2f}']


# Time


@contextmanager
def without_onednn() -> Iterator[None]:
    """Inside this context operations cost the host as little as on a GPU: oneDNN's cost more."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def time_table(archs: Sequence[str], rounds: int) -> list[list[str]]:
    """A row for each step of each architecture and batch; the models take turns."""
    rows = []
    for arch, batch in product(archs, TIME_BATCHES):
        image = torch.randn(batch, 3, TIME_SIZE, TIME_SIZE)
        pair = build(narrow(arch))
        for step in STEPS:
            functions = []
            for model, forward in zip(pair, pair.forwards(image)):
                functions.append(one_step(step, model, forward))
            ours, theirs = time_in_turns(pair, functions, rounds)
            minima = min(ours) / min(theirs)
            quartiles = lower_quartile(ours) / lower_quartile(theirs)
            ratios = [f'{minima:.2f}', f'{quartiles:.2f}']
            rows.append([arch, step, str(batch), shown(ours), shown(theirs), *ratios])
    return rows


def time_in_turns(
    models: Sequence[nn.Module], functions: Sequence[Callable[[], None]], rounds: int
) -> list[list[float]]:
    """Seconds of processor time of each round of each function; first one begins, then the other.

    On one thread it is the host's work, whatever else the machine does.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    order = list(range(len(functions)))
    collects = gc.isenabled()
    gc.disable()
    try:
        for number in range(-WARM_UP, rounds):
            for i in order:
                elapsed = time_call(functions[i])
                free_gradients(models[i])
                if number >= 0:
                    seconds[i].append(elapsed.processor)
            order.reverse()
            if number % 50 == 0:
                gc.collect()
    finally:
        if collects:
            gc.enable()
    return seconds


def lower_quartile(seconds: Sequence[float]) -> float:
    if len(seconds) < 2:
        return min(seconds)
    return statistics.quantiles(seconds, n=4)[0]


def shown(seconds: Sequence[float]) -> str:
    return f'{1e3 * min(seconds):.2f} / {1e3 * lower_quartile(seconds):.2f}'


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(host, argv)


if __name__ == '__main__':
    sys.exit(main())
