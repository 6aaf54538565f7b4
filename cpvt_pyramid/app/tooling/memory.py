"""Memory that this process can still take, in bytes.

psutil is imported inside functions: commands begin without any package, to say which are missing.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Optional

# How onnxruntime, OpenVINO, PyTorch and OpenCV say that they could not allocate memory. oneDNN
# says the last; its 'primitive descriptor' is about operations that it does not have.
EXHAUSTED = re.compile(
    "failed to allocate memory|bad_alloc|bad allocation|out of memory|can(no|')t allocate memory|"
    'not enough memory|insufficient memory|could not (create|execute) a primitive(?! desc)',
    re.I,
)
GROUP = Path('/sys/fs/cgroup')  # the control group (version 2) of this process, as in a container


def available() -> int:
    """Memory that this process can still take: of this machine, and in its control group and its
    address space, of whose limits psutil knows nothing."""
    import psutil

    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such group, or no limit
        limit = int((GROUP / 'memory.max').read_text())
        (used,) = re.findall(r'^anon (\d+)$', (GROUP / 'memory.stat').read_text(), re.M)
        free = min(free, limit - int(used))
    address_space = address_limit()
    if address_space is not None:
        free = min(free, address_space - psutil.Process().memory_info().vms)
    return max(free, 0)


def free_text() -> str:
    """What is `available`, for a message."""
    return f'{available() / 1e9:.1f} GB are free'


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, for which many libraries have no
    class of their own."""
    return isinstance(error, MemoryError) or EXHAUSTED.search(str(error)) is not None


def address_limit() -> Optional[int]:
    """The limit of the address space of this process (`ulimit -v`); None without a limit. Libraries
    that reach it end the process without a message."""
    try:
        import resource
    except ImportError:  # on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
