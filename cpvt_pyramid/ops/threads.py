"""How OpenMP's threads wait for each other at the end of a parallel region.

On Linux PyTorch's wheels ship libgomp, whose threads spin for about 10 ms before they sleep. On a
busy machine, or where a CPU quota is used up, they keep others from the core that they wait for: a
pass has hundreds of parallel regions, and takes several times longer. Threads that sleep at once
(`OMP_WAIT_POLICY=passive`) have to be woken for each region, which costs an idle machine up to a
fifth of the pass. `GOMP_SPINCOUNT=10000` in the environment, as in the tools, is in between: about
0.3 ms. libgomp reads these variables once, when torch is imported.
"""

import functools
import threading

import torch


@functools.cache
def throttle_spinning() -> None:
    """Let OpenMP's threads spin for microseconds only, in a process that has imported torch.

    libgomp does so while it manages more threads than there are cores. A thread of its own that
    runs one parallel region and then sleeps raises their number. Where another OpenMP is in use, or
    a single thread computes, nothing changes.
    """
    started = threading.Event()

    def sleep_after_a_region() -> None:
        torch.zeros(2**20).add_(1)
        started.set()
        threading.Event().wait()

    threading.Thread(target=sleep_after_a_region, daemon=True).start()
    started.wait()
