"""Calling a function in threads, with results in order."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable

CPU_QUOTA = Path('/sys/fs/cgroup/cpu.max')  # two numbers of microseconds, or max and one


def usable_cores() -> int:
    """The number of cores that this process may use: those that it is bound to, or fewer if its
    control group (version 2) has a quota, as in a container."""
    cores = bound_cores()
    with suppress(OSError, ValueError):  # no such group, or no quota
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def bound_cores() -> int:
    """The number of cores that this process is bound to; by default all."""
    if hasattr(os, 'process_cpu_count'):  # from Python 3.13
        return os.process_cpu_count() or 1
    if hasattr(os, 'sched_getaffinity'):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Budget:
    """Bytes that threads share.

    Args:
        total: how many there are.
    """

    def __init__(self, total: float) -> None:
        self.total = self.free = total
        self.changed = threading.Condition()

    @contextmanager
    def take(self, amount: float) -> Iterator[None]:
        """Wait until this amount is free, or, if it exceeds the total, until all is."""
        amount = min(amount, self.total)
        with self.changed:
            self.changed.wait_for(lambda: amount <= self.free)
            self.free -= amount
        try:
            yield
        finally:
            with self.changed:
                self.free += amount
                self.changed.notify_all()


def prefetch(
    function: Callable[[Any], Any], items: Iterable[Any], threads: int
) -> Iterator[Callable[[], Any]]:
    """For each item, in order, a function that returns or raises what `function` does for it.

    Threads call it for the next items, one more than there are threads, while an item is in use. If
    the results are not read to their end, such as after an interrupt, calls that have begun are
    waited for, and no others begin.
    """
    if not threads:
        yield from (partial(function, item) for item in items)
        return
    waiting: deque[Future] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result
            while waiting:
                yield waiting.popleft().result
        except BaseException:  # GeneratorExit if the results are not read to their end
            pool.shutdown(wait=False, cancel_futures=True)
            raise
