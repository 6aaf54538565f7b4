"""Start processes with torchrun, and return their exit status without a traceback of torchrun.

dist_*.sh and slurm_*.sh call this; for the environment variables, see dist_train.sh.

SIGTERM and SIGUSR1 are passed on to the processes, which may take their time. torchrun itself would
kill them after 30 seconds, and dies of SIGUSR1.
"""

# torch is imported inside the function, so that a missing one is reported in one line.
import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
from cpvt_pyramid.tooling.command import exit_on_signal, run_tool


def torchrun(processes: int, command: Sequence[str]) -> int:
    """Run a command in several connected processes; returns the exit status."""
    import torch
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        print(
            f'torchrun: {processes} processes need {processes} GPUs, found {gpus}', file=sys.stderr
        )
        return 2
    nodes, port = os.environ.get('NNODES', '1'), os.environ.get('PORT')
    options = [f'--nnodes={nodes}', f'--nproc-per-node={processes}']
    if nodes == '1' and port is None:
        options += ['--standalone']  # chooses a free port
    else:
        options += [
            f'--node-rank={os.environ.get("NODE_RANK", "0")}',
            f'--master-addr={os.environ.get("MASTER_ADDR", "127.0.0.1")}',
            f'--master-port={port}',
        ]
    threads = str(max(1, os.cpu_count() // processes))
    os.environ.setdefault('OMP_NUM_THREADS', threads)
    os.environ.setdefault('MKL_NUM_THREADS', threads)
    logging.disable()
    arguments = parse_args([*options, *command])
    # Older versions of PyTorch read the variable, and the oldest handle SIGTERM in any case.
    arguments.signals_to_handle = 'SIGINT,SIGHUP,SIGQUIT'
    os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'] = arguments.signals_to_handle
    end = api._terminate_process_handler
    api._terminate_process_handler = lambda number, frame: (
        pass_on(number, frame) if number == signal.SIGTERM else end(number, frame)
    )
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    try:
        run(arguments)
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        if first.exitcode < 0:
            print(
                f'process {first.global_rank} was killed by signal {-first.exitcode}',
                file=sys.stderr,
            )
        return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode
    except api.SignalException as error:
        return 128 + error.sigval
    return 0


def pass_on(number: int, frame: Optional[FrameType]) -> None:
    """Send a signal to the child processes; without any, exit."""
    processes = list(children())
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    if not processes:
        exit_on_signal(number, frame)


def children() -> Iterator[int]:
    """The ids of the processes that this one has started."""
    for path in Path('/proc').glob('[0-9]*/stat'):
        with suppress(OSError):
            parent = path.read_text().rpartition(')')[2].split()[1]
            if int(parent) == os.getpid():
                yield int(path.parent.name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('processes', type=int, metavar='NPROC', help='number of processes')
    parser.add_argument('script', metavar='SCRIPT', help='what each of them runs')
    parser.add_argument('arguments', nargs=argparse.REMAINDER, metavar='...', help='of that script')
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f'NPROC must be at least 1, got {args.processes}')
    options = {'processes': args.processes, 'command': [args.script, *args.arguments]}
    return run_tool('torchrun', torchrun, options, 'the processes have ended')


if __name__ == '__main__':
    sys.exit(main())
