"""How far a command is: a bar on a terminal, lines in a log."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, Optional

from tqdm import tqdm

from .command import rank

INTERVAL = 30.0  # seconds between two lines in a log
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

    Both a bar and lines go to stderr, of the first process of a run only.

    Args:
        total: number of items, if it is known.
        unit: what the items are, in the plural, such as 'images'.
        name: of what is done; begins the bar and the lines.
    """
    start = f'{name}: ' if name else ''
    if sys.stderr.isatty() and rank() == 0:
        form = BAR if total else BAR_OF_UNKNOWN
        with terminal_bar(total=total, unit=f' {unit}', desc=start, bar_format=form) as bar:
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
