"""Forked copies of this process, which share the images of a run on a CPU.

One pass of one image leaves cores waiting: 1.7 of 2 are busy, and far less than 16 of 16. Processes
with a thread each keep all of them busy. They are forks: the weights and the imported libraries are
in memory once, and nothing is loaded a second time. Not threads of one process, because models of
mm may write to themselves in a pass, and Python runs one thread at a time.
"""

import math
import multiprocessing
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import torch

from ...tooling import memory
from ...tooling.command import UserError
from ...tooling.threads import ahead, usable_cores

PARALLEL = 0.82  # share of a pass that threads divide: two take 0.59 of the time of one
MEMORY = 3 * 2**29  # bytes that a process takes at most at 800 x 1333, in addition to the first
KILL_FIRST = 500  # of the kernel's badness, 0 to 1000; see proc(5), oom_score_adj


class Cores(NamedTuple):
    """The cores of the machine, which processes divide among them."""

    count: int  # threads of all processes together
    processes: Optional[int] = None  # what the user asked for
    memory: Optional[int] = None  # bytes for all processes

    @classmethod
    def for_model(
        cls, device: torch.device, processes: Optional[int], limit: Optional[int] = None
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
        """The number of processes, and of threads of each, that finish `items` images first, if
        each takes up to `need` bytes in addition to the first."""

        def time(processes: int) -> float:
            parallel = PARALLEL / (self.count // processes)
            return math.ceil(items / processes) * (1 - PARALLEL + parallel)

        count = self.processes
        if count is None:
            room = self.memory or memory.available()
            most = max(1, min(self.count, items, room // need))
            count = min(range(1, most + 1), key=time)
        return count, max(self.count // count, 1)


class Workers:
    """Calls a function in forked processes; each takes one item at a time.

    If the function raises in a process, or the process is killed, this process repeats the item:
    errors have their traceback, and a lost process costs no result. When this process leaves the
    context or ends, the others finish their items and end.

    Args:
        function: its arguments and results can be pickled.
        items, need: see `Cores.divided`.
        cores: divided among the processes; None: this process does the work, as it does if it is
            the only one. Then `len()` is 0.
    """

    def __init__(
        self, function: Callable, items: int, cores: Optional[Cores], need: int = MEMORY
    ) -> None:
        self.function, self.processes = function, []
        self.connections: list[Connection] = []
        self.free: queue.SimpleQueue[Optional[Connection]] = queue.SimpleQueue()
        self.here, self.closed = threading.Lock(), False
        count, self.threads = cores.divided(items, need) if cores else (1, torch.get_num_threads())
        if count == 1:
            torch.set_num_threads(self.threads)
            self.free.put(None)
            return
        # A fork has none of OpenCV's threads, and would wait for them forever.
        threads_of_opencv = cv2.getNumThreads()
        cv2.setNumThreads(1)
        fork = multiprocessing.get_context('fork')
        for _ in range(count):
            connection, other = fork.Pipe()
            self.connections.append(connection)
            self.processes.append(fork.Process(target=self.serve, args=(other,), daemon=True))
            self.processes[-1].start()
            other.close()  # the process has the only copy: its end is seen here
            self.free.put(connection)
        cv2.setNumThreads(threads_of_opencv)

    def __len__(self) -> int:
        return len(self.processes)

    def __enter__(self) -> 'Workers':
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        try:
            for _ in self.processes:
                self.free.get()  # waits for its item
        finally:
            for connection in self.connections:
                self.free.put(None)  # for threads that are late
                connection.close()
        for process in self.processes:
            process.join()

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """The results of items, in order. They are taken as the processes need them."""
        return (result() for result in ahead(self, items, len(self)))

    def __call__(self, item: Any) -> Any:
        """The result of an item; called in as many threads as there are processes."""
        connection = self.free.get()
        try:
            if connection and not self.closed:
                connection.send_bytes(pickle.dumps(item))
                done, result = pickle.loads(connection.recv_bytes())
                if done:
                    return result
        except (EOFError, OSError):
            connection = None  # its process was killed
        finally:
            self.free.put(connection)
        with self.here:
            if self.closed:
                raise InterruptedError
            torch.set_num_threads(self.threads)
            return self.function(item)

    def serve(self, connection: Connection) -> None:
        """In a forked process, answer items until the connection is closed at the other end."""
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to all; the first process ends this
            signal.signal(number, signal.SIG_IGN)
        for other in self.connections:
            other.close()  # the first process has the only copies: its end is seen here
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
            while True:
                item = pickle.loads(connection.recv_bytes())
                try:
                    answer = True, self.function(item)
                except Exception:
                    answer = False, None
                connection.send_bytes(pickle.dumps(answer))
