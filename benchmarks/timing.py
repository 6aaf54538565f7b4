"""Time of a call, in a number of threads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

RESOLUTION = time.get_clock_info('process_time').resolution  # seconds


class Time(NamedTuple):
    """Seconds of a call."""

    clock: float
    processor: float  # of all threads


def time_call(function: Callable[[], object]) -> Time:
    """Call a function; returns how long it took."""
    clock = time.perf_counter()
    processor = time.process_time()
    function()
    return Time(time.perf_counter() - clock, time.process_time() - processor)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Inside this context PyTorch computes in a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def show_progress(line: str) -> None:
    """Write what is being measured to stderr, on one line if that is a terminal."""
    if sys.stderr.isatty():
        print(f'{line:78}', end='\r', file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)
