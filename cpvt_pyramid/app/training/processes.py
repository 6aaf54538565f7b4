"""Several processes: joining and leaving them.

A process with an error ends with a status other than 0, and its launcher ends the others.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import broadcast_object_list, get_dist_info, init_dist
from mmengine.utils.dl_utils import set_multi_processing

from ..config.parts import dicts_in, kind_of
from ..tooling.command import RANKS, UserError, rank

SYNC_BATCH_NORMS = 'SyncBN', 'MMSyncBN', 'SyncBatchNorm'


def of_first_process(function: Callable[[], Any]) -> Any:
    """What a function returns in the first process, in all of them.

    After a UserError the other processes end without a line.

    Args:
        function: called in the first process alone; its result must be picklable.
    """
    result: list[Any] = [None]
    if get_dist_info()[0] == 0:
        try:
            result[0] = function()
        except UserError as error:
            result[0] = error
    broadcast_object_list(result)
    if not isinstance(result[0], UserError):
        return result[0]
    if get_dist_info()[0] == 0:
        raise result[0]
    sys.exit(result[0].status)


def use_launcher(cfg: Config, launcher: str) -> None:
    """Set a config to run in the processes of a launcher: none, pytorch, slurm or mpi.

    Raises:
        UserError: this launcher did not start the process, or cannot be used on this device.
    """
    if launcher != 'none' and RANKS[launcher] not in os.environ:
        raise UserError(f'--launcher {launcher} is for processes started by {launcher}')
    if launcher in ('slurm', 'mpi') and get_device() == 'cpu':
        raise UserError(f'--launcher {launcher} needs GPUs; on CPUs use dist_train.sh')
    cfg.launcher = launcher
    if get_device() != 'cpu':
        return
    replace_sync_batch_norms(cfg)
    if launcher == 'none':
        return
    if kind_of(cfg.get('model_wrapper_cfg') or {}) in ('', 'MMDistributedDataParallel'):
        cfg.model_wrapper_cfg = {
            'type': 'MMDistributedDataParallel',
            'device_ids': None,  # mmengine assumes a GPU for each process
            'broadcast_buffers': False,
            'find_unused_parameters': cfg.get('find_unused_parameters', False),
        }


def replace_sync_batch_norms(cfg: Config) -> None:
    """Replace SyncBN, which CPUs cannot compute, and say it."""
    found = [part for _, part in dicts_in(cfg.model) if kind_of(part) in SYNC_BATCH_NORMS]
    converts = cfg.get('sync_bn') and cfg.launcher != 'none'
    if (found or converts) and rank() == 0:
        print('SyncBN needs GPUs: on CPUs, batch norms use the statistics of their own process')
    cfg.sync_bn = None
    for part in found:
        part['type'] = 'BN'


def connect(launcher: str, env_cfg: dict) -> None:
    """Connect the processes of a launcher, unless they are connected.

    Raises:
        UserError: there are fewer GPUs on this machine than processes that torchrun started.
    """
    if launcher == 'none' or torch.distributed.is_initialized():
        return
    # Until all have joined, a handler in Python would not run, nor the launcher end this process.
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if get_device() == 'cpu':
        torch.distributed.init_process_group('gloo')
    else:
        connect_gpus(launcher, env_cfg)
    signal.signal(signal.SIGTERM, handler)


def connect_gpus(launcher: str, env_cfg: dict) -> None:
    gpus = torch.cuda.device_count()
    processes = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    if launcher == 'pytorch' and processes > gpus:
        raise UserError(f'{processes} processes need a GPU each, found {gpus}')
    if launcher == 'mpi':
        local_rank = os.environ.get('OMPI_COMM_WORLD_LOCAL_RANK', '0')
        os.environ.setdefault('LOCAL_RANK', local_rank)  # mmengine reads it to choose the GPU
    # As mmengine's Runner does it, in this order.
    set_multi_processing(**env_cfg.get('mp_cfg', {}), distributed=True)
    init_dist(launcher, **env_cfg.get('dist_cfg', {}))


def leave_processes() -> None:
    """Wait for the other processes and disconnect.

    A process that exits while another still works can abort while the interpreter shuts down.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
