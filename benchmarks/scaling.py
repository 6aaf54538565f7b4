"""Shows which operations of a forward pass use several threads, and how well.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --archs svt_small --sizes 224 --dtypes bfloat16 --threads 1 2 4

A table for each architecture, size and dtype has a line for each kind of operation of our
accelerated model, and one for Python, which runs between operations:

    calls        in a forward pass
    ms           in each number of threads
    x 1 thread   how many times as fast as in one thread
    lost         ms beyond those that perfect scaling would take, and their share of the pass

`ours` are functions of kernels.cpp. With --plain it shows the model without `accelerate`.

PyTorch's profiler times each operation, without those that it calls. The passes make the same
operations in the same order, and each of them counts with its least time. So other programs on the
machine disturb less than in the time of a whole pass.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

from cpvt_pyramid.app.tooling.command import (
    UserError,
    check_at_least,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.app.tooling.report import text_table
from cpvt_pyramid.app.tooling.sizes import Size

prepare_for_torch()  # before torch is imported

with imports_of('scaling'):
    import torch
    from torch import Tensor, nn
    from torch.profiler import profile, record_function

    from benchmarks.machine import processor
    from benchmarks.timing import show_progress, torch_threads
    from cpvt_pyramid import ARCHS, CPVTPyramid, accelerate
    from cpvt_pyramid.acceleration import kernels

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}
PASS = 'Python'  # the time of a pass that is in none of its operations
WARM_UP = 3  # passes before time counts


class Operation(NamedTuple):
    """An operation of a pass."""

    name: str
    microseconds: float  # without the operations that it calls


def scaling(
    *,
    archs: Sequence[str] = ('pcpvt_small', 'svt_small', 'pvt_v2_b2', 'mit_b2'),
    sizes: Sequence[Size] = (Size(512, 512),),
    dtypes: Sequence[Literal['float32', 'bfloat16']] = ('float32', 'bfloat16'),
    threads: Sequence[int] = (1, 2),
    batch: int = 1,
    passes: int = 30,
    plain: bool = False,
) -> None:
    """Print a table for each architecture, size and dtype.

    Args:
        archs: architectures of pyramids
        sizes: of the image, in pixels
        dtypes: of weights and image
        threads: numbers of threads, the first of which is 1
        batch: images at a time
        passes: of which each operation's least time counts
        plain: without `accelerate`
    """
    for arch in archs:
        if arch not in ARCHS:
            raise UserError(f'unknown arch {arch!r}; one of {", ".join(ARCHS)}')
    if threads[0] != 1:
        raise UserError(f'the first of --threads must be 1, got {threads[0]}')
    check_at_least('threads', min(threads), 1)
    check_at_least('passes', passes, 1)
    check_at_least('batch', batch, 1)
    for arch, size, dtype in itertools.product(archs, sizes, dtypes):
        torch.manual_seed(0)
        model = CPVTPyramid(arch).eval().to(DTYPES[dtype])
        if not plain:
            accelerate(model)
        image = torch.randn(batch, 3, *size).to(DTYPES[dtype])
        found = measure(model, image, threads, passes)
        print(f'\n{processor()}, {arch}, {batch} x {size}, {dtype}\n')
        print(text_table(head(threads), lines(found)), flush=True)


def measure(
    model: nn.Module, image: Tensor, threads: Sequence[int], passes: int
) -> dict[int, list[Operation]]:
    """The operations of a forward pass in each number of threads, with their least times.

    The numbers of threads take turns.
    """
    all_passes: dict[int, list[list[Operation]]] = {number: [] for number in threads}
    with recorded_kernels(), torch.inference_mode():
        for number in threads:
            with torch_threads(number):
                for _ in range(WARM_UP):
                    model(image)
        for i in range(passes):
            show_progress(f'pass {i + 1} of {passes}')
            for number in threads:
                with torch_threads(number):
                    all_passes[number].append(profiled(functools.partial(model, image)))
    return {number: least(found) for number, found in all_passes.items()}


@contextlib.contextmanager
def recorded_kernels() -> Iterator[None]:
    """Inside this context the profiler sees the functions of kernels.cpp."""
    plain = kernels.loaded_function

    def loaded_function(name: str, symbol: str) -> Any:
        function = plain(name, symbol)

        def recorded(*arguments: object) -> Any:
            with record_function(f'ours: {name}'):
                return function(*arguments)

        return recorded

    with mock.patch.object(kernels, 'loaded_function', loaded_function):
        yield


def profiled(function: Callable[[], object]) -> list[Operation]:
    """The operations of a call, in their order; the first one is the call itself."""
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        with record_function(PASS):
            function()
    events = sorted(found.events(), key=lambda event: event.time_range.start)
    events = [event for event in events if event.name == PASS or is_within(event)]
    return [Operation(event.name, event.self_cpu_time_total) for event in events]


def is_within(event: Any) -> bool:
    """True for operations that a pass calls."""
    while event is not None:
        if event.name == PASS:
            return True
        event = event.cpu_parent
    return False


def least(passes: Sequence[Sequence[Operation]]) -> list[Operation]:
    """Each operation of passes that make the same ones, with its least time."""
    names = [operation.name for operation in passes[0]]
    for other in passes[1:]:
        if [operation.name for operation in other] != names:
            raise RuntimeError('two forward passes made different operations')
    return [min(of_all, key=lambda x: x.microseconds) for of_all in zip(*passes)]


def head(threads: Sequence[int]) -> list[str]:
    columns = ['operation', 'calls', 'ms, 1 thread']
    for number in threads[1:]:
        columns += [f'{number} threads', 'x 1 thread', 'lost', 'of the pass']
    return columns


def lines(found: dict[int, list[Operation]]) -> list[list[str]]:
    """The cells of a table: a line for each kind of operation, the slowest first, and their sum."""
    one, *others = (by_kind(operations) for operations in found.values())
    threads = list(found)[1:]
    wholes = [sum(map(sum, other.values())) for other in others]
    # An operation may call others in several threads alone.
    kinds = {kind for kind_times in (one, *others) for kind in kind_times}
    cells = []
    for kind in sorted(kinds, key=lambda kind: -sum(one.get(kind, []))):
        alone = one.get(kind, [])
        shared = [sum(other.get(kind, [])) for other in others]
        cells.append([kind, str(len(alone)), *times_of(sum(alone), threads, shared, wholes)])
    calls = sum(map(len, one.values()))
    alone = sum(map(sum, one.values()))
    return [*cells, ['all', str(calls), *times_of(alone, threads, wholes, wholes)]]


def times_of(
    alone: float, threads: Sequence[int], shared: Sequence[float], wholes: Sequence[float]
) -> list[str]:
    """The cells of a line after its name and its calls.

    Args:
        alone: ms in one thread.
        threads: the other numbers of threads.
        shared: ms in each of them.
        wholes: ms of the pass in each of them.
    """
    cells = [f'{alone:.2f}']
    for number, time, whole in zip(threads, shared, wholes):
        lost = time - alone / number
        speed_up = f'{alone / time:.2f}' if time else ''
        cells += [f'{time:.2f}', speed_up, f'{lost:.2f}', f'{lost / whole:.1%}']
    return cells


def by_kind(operations: Sequence[Operation]) -> dict[str, list[float]]:
    """Milliseconds of the operations of each name."""
    found = defaultdict(list)
    for operation in operations:
        found[operation.name].append(operation.microseconds / 1e3)
    return dict(found)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(scaling, argv)


if __name__ == '__main__':
    sys.exit(main())
