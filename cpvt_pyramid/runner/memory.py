"""What this process has in memory, in bytes. Outside Linux less is known of it."""

import ctypes
import gc
import resource
import sys
from pathlib import Path


def resident() -> int:
    """Bytes that this process has in memory now. Outside Linux: as `peak`."""
    return of_process('VmRSS')


def peak() -> int:
    """The most bytes that this process has had in memory, since `restart_peak` or its beginning.
    Outside Linux: since its beginning."""
    return of_process('VmHWM')


def of_process(field: str) -> int:
    """Bytes, by Linux's name of them; elsewhere the most that getrusage knows of."""
    try:
        return in_bytes('/proc/self/status', field)
    except OSError:  # on Linux getrusage would count what started the process as well
        unit = 1 if sys.platform == 'darwin' else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def restart_peak() -> None:
    """Let `peak` be what is in memory now, and grow from there. Outside Linux: nothing happens."""
    try:
        Path('/proc/self/clear_refs').write_text('5')
    except OSError:
        pass


def trim() -> None:
    """Give back what is freed, which could be taken again without a trace. Without glibc: what
    Python gives back by itself."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if malloc_trim:
        malloc_trim(0)


def limit() -> None:
    """Let this process fail rather than take more than the machine has left, which would push
    others out. Outside Linux: no limit."""
    try:
        most = in_bytes('/proc/meminfo', 'MemAvailable') + of_process('VmSize')
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):
        pass


def in_bytes(path: str, field: str) -> int:
    """What a line such as `VmHWM:  1234 kB` says."""
    (line,) = (line for line in Path(path).read_text().splitlines() if line.startswith(field + ':'))
    return int(line.split()[1]) * 1024
