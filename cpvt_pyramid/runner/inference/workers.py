"""Forked copies of this process, which share the images of a run on a CPU.

One pass of one image leaves cores waiting: 1.7 of 2 are busy, and far less than 16 of 16. Processes
with a thread each keep all of them busy. They are forks: the weights and the imported libraries are
in memory once, and nothing is loaded a second time. Not threads of one process, because models of
mm may write to themselves in a pass, and Python runs one thread at a time.
"""

import ctypes
import math
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import torch

from ...tooling import memory
from ...tooling.command import TERMINATED, UserError
from ...tooling.threads import usable_cores

PARALLEL = 0.82  # share of a pass that threads divide: two take 0.59 of the time of one
MEMORY = 3 * 2**29  # bytes that a process takes at most at 800 x 1333, in addition to the first
KILL_FIRST = 500  # of the kernel's badness, 0 to 1000; see proc(5), oom_score_adj
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Cores(NamedTuple):
    """The cores of the machine, which processes divide among them."""

    count: int  # threads of all processes together
    processes: Optional[int] = None  # what the user asked for
    memory: Optional[int] = None  # bytes for all processes

    @classmethod
    def for_model(
        cls,
        device: torch.device,
        processes: Optional[int],
        limit: Optional[int] = None,
    ) -> 'Cores':
        """The cores that this process may use; one process where forks cannot help.

        Raises:
            UserError: more processes than one are not possible here.
        """
        possible = device.type == 'cpu' and sys.platform == 'linux'
        if processes and processes > 1 and not possible:
            raise UserError('--processes needs a CPU and Linux; for several GPUs see dist_infer.sh')
        cores = min(torch.get_num_threads(), usable_cores())
        return cls(cores, processes if possible else 1, limit)

    def divided(self, items: int, need: int = MEMORY) -> tuple[int, int]:
        """The number of processes, and of threads of each, that finish `items` images first.

        Args:
            items: how many there are.
            need: bytes that a process may take in addition to the first one.
        """
        if self.processes:
            count = self.processes
        else:
            room = self.memory or memory.available()
            most = max(1, min(self.count, items, room // need))

            def time(processes: int) -> float:
                parallel = PARALLEL / (self.count // processes)
                return math.ceil(items / processes) * (1 - PARALLEL + parallel)

            count = min(range(1, most + 1), key=time)
        return count, max(self.count // count, 1)


class Workers:
    """Calls a function in forked processes; each takes one item at a time.

    An instance is called in as many threads as it has processes, as `ahead` does. If the function
    raises in a process, or the process is killed, this process repeats the item. So errors have
    their traceback, and a lost process costs no result.

    Args:
        function: its arguments and results can be pickled.
        items: how many there are.
        cores: divided among the processes; None: this process does the work, as it does if it is
            the only one. Then `len()` is 0.
        need: see `Cores.divided`.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        items: int,
        cores: Optional[Cores],
        need: int = MEMORY,
    ) -> None:
        self.function, self.processes = function, []
        self.free: queue.SimpleQueue[Optional[Connection]] = queue.SimpleQueue()
        self.here = threading.Lock()
        self.busy = self.closed = False
        count, self.threads = cores.divided(items, need) if cores else (1, torch.get_num_threads())
        if count == 1:
            torch.set_num_threads(self.threads)
            self.free.put(None)
            return
        fork = multiprocessing.get_context('fork')
        for _ in range(count):
            connection, other = fork.Pipe()
            process = fork.Process(target=self.serve, args=(other, os.getpid()), daemon=True)
            process.start()
            other.close()  # the process has the only copy: its end is seen here
            self.processes.append(process)
            self.free.put(connection)

    def __len__(self) -> int:
        return len(self.processes)

    def __enter__(self) -> 'Workers':
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()

    def __call__(self, item: Any) -> Any:
        connection = self.free.get()
        if connection is None:  # the process was killed, or there are none
            self.free.put(None)
            return self.repeat(item)
        try:
            connection.send_bytes(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
            done, result = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            connection = None
            done = False
        self.free.put(connection)
        return result if done else self.repeat(item)

    def repeat(self, item: Any) -> Any:
        with self.here:
            if self.closed:
                raise InterruptedError
            torch.set_num_threads(self.threads)
            return self.function(item)

    # In a forked process

    def end(self, *_: object) -> None:
        """Exit, but finish the item at work: its files are complete or not written."""
        self.closed = True
        if not self.busy:
            os._exit(TERMINATED)

    def serve(self, connection: Connection, parent: int) -> None:
        """Answer items until this process is told to end, or the one that forked it has ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first one ends this
        signal.signal(signal.SIGTERM, self.end)
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            return
        with suppress(OSError):  # if memory runs out, rather this one than the first
            Path('/proc/self/oom_score_adj').write_text(str(KILL_FIRST))
        # In a thread of its own: OpenMP's threads of the one that was forked do not exist here.
        work = threading.Thread(target=self.answer, args=(connection,))
        work.start()
        work.join()

    def answer(self, connection: Connection) -> None:
        torch.set_num_threads(self.threads)
        cv2.setNumThreads(self.threads)
        with suppress(EOFError, OSError):
            while not self.closed:
                item = pickle.loads(connection.recv_bytes())
                self.busy = True
                try:
                    answer = True, self.function(item)
                except Exception:
                    answer = False, None
                connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
                self.busy = False
