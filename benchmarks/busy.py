"""Measures a forward pass of our backbone while other processes keep all cores busy.

    python -m benchmarks.busy --arch svt_small --size 512

OpenMP's threads wait for each other hundreds of times in a pass. Each way of waiting is measured
in a process of its own, on idle cores and then with one other process per core that computes:

    passive  threads sleep (OMP_WAIT_POLICY=passive)
    bounded  they spin for a fraction of a millisecond, as in all tools of this repository
    default  they spin for milliseconds, libgomp's default

    idle ms  median without the other processes
    ms       median with them
    ratio    to the first line: ratio of the medians, and quartiles of the rounds' ratios
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from cpvt_pyramid.tooling.command import (
    SPIN_COUNT,
    WAIT_VARIABLES,
    UserError,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.tooling.report import text_table

prepare_for_torch()  # before torch is imported

with imports_of('busy'):
    from benchmarks.measuring import (
        Case,
        compared,
        in_process,
        parse_size,
        ratio_text,
        say,
        time_rounds,
    )
    from cpvt_pyramid import ARCHS

WAITS = {
    'passive': {'OMP_WAIT_POLICY': 'passive'},
    'bounded': {'GOMP_SPINCOUNT': SPIN_COUNT},
    'default': {'GOMP_SPINCOUNT': '300000'},
}
BUSY = 'while True: pass'  # a process that keeps a core busy


def busy(
    *,
    arch: Literal[tuple(ARCHS)] = 'pcpvt_small',
    size: str = '512',
    threads: int | None = None,
    rounds: int = 7,
) -> None:
    """Print the table.

    Args:
        arch: of the backbone
        size: of the image, in pixels, as SIDE or HEIGHTxWIDTH
        threads: CPU threads; by default as many as cores
        rounds: timed passes
    """
    threads = threads or os.cpu_count()
    if min(rounds, threads) < 1:
        raise UserError('--rounds and --threads must be at least 1')
    case = Case('forward', 'float32', *parse_size(size), 1, 'cpu')
    base = None
    lines = []
    for name, variables in WAITS.items():
        say(f'{case}: {name}')
        environment = {k: v for k, v in os.environ.items() if k not in WAIT_VARIABLES} | variables
        call = time_rounds, rounds, 'ours', arch, case, threads
        try:
            idle = in_process(*call, environment=environment)
            with busy_cores():
                seconds = in_process(*call, environment=environment)
        except MemoryError as error:
            raise UserError(f'{name}: {error}') from error
        base = base or seconds
        row = compared(seconds, base)
        median = 1e3 * statistics.median(idle)
        lines.append((name, f'{median:.1f}', f'{row["ms"]:.1f}', ratio_text(row)))
    print(f'{arch}, {case}\n{text_table(("", "idle ms", "ms", "ratio"), lines)}')


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """One busy process per core, until the context ends."""
    processes = [subprocess.Popen([sys.executable, '-c', BUSY]) for _ in range(os.cpu_count())]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(busy, argv)


if __name__ == '__main__':
    sys.exit(main())
