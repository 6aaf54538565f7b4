"""Function calls in several processes. Importing this file imports no torch."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tqdm import tqdm


def in_parallel(jobs: Sequence[tuple[Callable, tuple]], workers: int, label: str) -> list:
    """The results of function calls, in order, with a progress bar; an interrupt ends them all."""
    if workers <= 1 or len(jobs) <= 1:
        return [function(*args) for function, args in tqdm(jobs, desc=label, disable=None)]
    context = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(workers, context, initializer=ignore_interrupts) as pool:
        futures = [pool.submit(function, *args) for function, args in jobs]
        try:
            for future in tqdm(as_completed(futures), label, len(jobs), disable=None):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        return [future.result() for future in futures]


def ignore_interrupts() -> None:
    """In a worker: Ctrl-C reaches the whole process group, and the parent ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
