"""Memory that this process takes, in bytes."""

import re
from contextlib import suppress
from pathlib import Path

import psutil

STATUS = Path('/proc/self/status')


def resident() -> int:
    """Resident memory of this process now."""
    return psutil.Process().memory_info().rss


def peak() -> int:
    """Peak resident memory of this process since its start or, on Linux, since `restart_peak`."""
    with suppress(FileNotFoundError):  # on Linux, where getrusage includes the parent process
        (kilobytes,) = re.findall(r'^VmHWM:\s+(\d+) kB', STATUS.read_text(), re.M)
        return int(kilobytes) * 1024
    info = psutil.Process().memory_info()
    if hasattr(info, 'peak_wset'):  # on Windows
        return info.peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on macOS, in bytes


def restart_peak() -> None:
    """Reset `peak` to the resident memory now. No effect outside Linux."""
    with suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')
