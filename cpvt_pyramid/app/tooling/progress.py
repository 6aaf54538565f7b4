"""How far a command is: a bar on a terminal, lines in a log."""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, Optional

from tqdm import tqdm

from .command import rank

INTERVAL = 10.0  # seconds between two lines in a log
REFRESH = 1.0  # seconds between two states of a bar whose items take longer
BAR = (
    '{desc}{percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} [{elapsed}<{remaining}, '
    '{rate_noinv_fmt}]'
)
BAR_OF_UNKNOWN = '{desc}{n_fmt} [{elapsed}, {rate_noinv_fmt}]'


def terminal_bar(**options: Any) -> tqdm:
    """A bar of tqdm as wide as the terminal; tqdm alone shows nothing on one of unknown size."""
    columns, lines = shutil.get_terminal_size()
    return tqdm(ncols=columns, nrows=lines, **options)


@contextmanager
def progress(total: Optional[int], unit: str, name: str = '') -> Iterator[Callable[[int], object]]:
    """A function to call with the number of items that are finished since the last call.

    Both a bar and lines go to stderr, of the first process of a run only. A log gets a line after
    each `INTERVAL`, also while an item takes longer.

    Args:
        total: number of items, if it is known.
        unit: what the items are, in the plural, such as 'images'.
        name: of what is done; begins the bar and the lines.
    """
    start = f'{name}: ' if name else ''
    if rank():
        yield lambda count: None
        return
    if sys.stderr.isatty():
        form = BAR if total else BAR_OF_UNKNOWN
        options = {'total': total, 'unit': f' {unit}', 'desc': start, 'bar_format': form}
        with terminal_bar(**options, leave=None) as bar:  # one inside another does not stay
            with every(REFRESH, bar.refresh):
                yield bar.update
        return
    done = 0
    begin = time.monotonic()

    def update(count: int) -> None:
        nonlocal done
        done += count

    def report() -> None:
        seconds = time.monotonic() - begin
        share = f'{done} of {total}' if total else f'{done}'
        speed = f'{done / seconds:.3g} {unit}/s' if done else f'{seconds:.0f} s'
        # One call with its end of line: the lines of two threads would mix.
        print(f'{start}{share} {unit}, {speed}\n', end='', file=sys.stderr, flush=True)

    with every(INTERVAL, report):
        yield update


@contextmanager
def working(what: str) -> Iterator[None]:
    """Inside this context, which has no steps to count, stderr gets a line each `INTERVAL`."""
    if rank():
        yield
        return
    begin = time.monotonic()

    def report() -> None:
        seconds = time.monotonic() - begin
        print(f'{what}, {seconds:.0f} s\n', end='', file=sys.stderr, flush=True)

    with every(INTERVAL, report):
        yield


@contextmanager
def every(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Inside this context another thread calls a function each time this many seconds have
    passed."""
    is_over = threading.Event()

    def call() -> None:
        while not is_over.wait(seconds):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
