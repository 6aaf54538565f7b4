"""How far a command is: a bar on a terminal, lines in a log."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable, Optional

from tqdm import tqdm

from .command import rank

INTERVAL = 30.0  # seconds between two lines in a log
BAR = (
    '{desc}{percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} [{elapsed}<{remaining}, '
    '{rate_noinv_fmt}]'
)
BAR_OF_UNKNOWN = '{desc}{n_fmt} [{elapsed}, {rate_noinv_fmt}]'


@contextmanager
def progress(total: Optional[int], unit: str, name: str = '') -> Iterator[Callable[[int], object]]:
    """A function to call with the number of items that are finished since the last call.

    Both a bar and lines go to stderr, of the first process of a run only.

    Args:
        total: number of items, if it is known.
        unit: what the items are, in the plural, such as 'images'.
        name: of what is done; begins the bar and the lines.
    """
    start = f'{name}: ' if name else ''
    if sys.stderr.isatty() and rank() == 0:
        columns, lines = shutil.get_terminal_size()  # tqdm shows nothing on one of unknown size
        with tqdm(
            total=total,
            unit=f' {unit}',
            desc=start,
            ncols=columns,
            nrows=lines,
            bar_format=BAR if total else BAR_OF_UNKNOWN,
        ) as bar:
            yield bar.update
        return

    done = 0
    begin = reported = time.monotonic()

    def update(count: int) -> None:
        nonlocal done, reported
        done += count
        now = time.monotonic()
        if now - reported < INTERVAL or rank():
            return
        share = f'{done} of {total}' if total else f'{done}'
        speed = done / (now - begin)
        print(f'{start}{share} {unit}, {speed:.3g} {unit}/s', file=sys.stderr, flush=True)
        reported = now

    yield update
