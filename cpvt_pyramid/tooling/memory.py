"""Memory of this process, in bytes. Exact on Linux; on macOS an upper bound; not on Windows."""

import sys
from contextlib import suppress
from pathlib import Path

from .command import UserError

try:
    import resource
except ImportError:  # Windows
    resource = None


def resident() -> int:
    """Resident memory now. Outside Linux: the same as `peak`."""
    return of_process('VmRSS')


def peak() -> int:
    """Peak resident memory since the process started or, on Linux, since `restart_peak`."""
    return of_process('VmHWM')


def of_process(field: str) -> int:
    """A field of /proc/self/status; outside Linux, the peak from getrusage."""
    try:
        return in_bytes('/proc/self/status', field)
    except OSError:  # not used on Linux, where getrusage includes the parent process
        if resource is None:
            raise UserError('memory can be measured on Linux and macOS only') from None
        unit = 1 if sys.platform == 'darwin' else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def restart_peak() -> None:
    """Reset `peak` to the resident memory now. No effect outside Linux."""
    with suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')


def available() -> int:
    """Memory that processes can still take, on this machine and in the control group of this
    process. On Linux only."""
    free = in_bytes('/proc/meminfo', 'MemAvailable')
    group = Path('/sys/fs/cgroup')
    with suppress(OSError, ValueError):  # no such group, or no limit
        numbers = dict(line.split() for line in (group / 'memory.stat').read_text().splitlines())
        free = min(free, int((group / 'memory.max').read_text()) - int(numbers['anon']))
    return free


def in_bytes(path: str, field: str) -> int:
    """The value of a line such as `VmHWM:  1234 kB`."""
    (line,) = (line for line in Path(path).read_text().splitlines() if line.startswith(field + ':'))
    return int(line.split()[1]) * 1024
