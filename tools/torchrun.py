"""Start processes with torchrun, and return their exit status without a traceback of torchrun.

usage: torchrun.py NPROC SCRIPT [ARGUMENT ...]; for the environment variables, see dist_train.sh.
"""

# torch is imported inside the function, so that a missing one is reported in one line.
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
from cpvt_pyramid.runner.command import run_tool


def torchrun(processes: int, command: Sequence[str]) -> int:
    """Run a command in several connected processes; returns the exit status."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
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
    try:
        run(parse_args([*options, *command]))
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        if first.exitcode < 0:
            print(
                f'process {first.global_rank} was killed by signal {-first.exitcode}',
                file=sys.stderr,
            )
        return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == '__main__':
    options = {'processes': int(sys.argv[1]), 'command': sys.argv[2:]}
    sys.exit(run_tool('torchrun', torchrun, options, 'the processes have ended'))
