"""Two processes, of which one or both have an error before or in a training."""

import os

import mmengine.dist
import pytest
import torch
from support import in_processes, load_tool

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.tooling.command import UserError, run_tool
from cpvt_pyramid.app.training import processes
from cpvt_pyramid.app.training import train as training
from cpvt_pyramid.app.training.processes import connect, of_first_process

train = load_tool('train')


def test_data_that_one_process_lacks(configs, sample_dataset):
    """The other one waits for it, and is ended at once."""
    training.check_training(load_config(configs['detector']))  # imports mm, before the fork

    def run(rank: int) -> int:
        data = sample_dataset / 'coco' if rank == 0 else 'nowhere'
        options = [f'{split}_dataloader.dataset.data_root={data}' for split in ('train', 'val')]
        command = [str(configs['detector']), '--launcher', 'pytorch', '--cfg-options', *options]
        return train.main(command)

    (status, silent), (other_status, line) = in_processes(2, run)
    assert (status, other_status) == (-15, 2) and silent == ''
    assert line.startswith(f'cpvt train: rank 1: no train data at {os.getcwd()}/nowhere/')
    assert line.count('\n') == 1


def test_an_error_of_the_first_process_is_printed_once():
    def work() -> None:
        def check() -> None:
            raise UserError('damaged data')

        connect('pytorch', {})
        of_first_process(check)

    ended = in_processes(2, lambda rank: run_tool('tool', work, {}, ''))
    assert ended == [(2, 'tool: damaged data\n'), (2, '')]


def test_a_process_that_ends_later_ends_the_others_with_one_line():
    def work() -> None:
        connect('pytorch', {})
        if os.environ['RANK'] == '1':
            raise ValueError('no more data')
        mmengine.dist.barrier()

    (status, line), (other_status, other_line) = in_processes(
        2, lambda rank: run_tool('tool', work, {}, '')
    )
    assert (status, other_status) == (2, 2)
    assert other_line == ('tool: rank 1: ValueError: no more data (--debug shows the traceback)\n')
    assert line.startswith('tool: RuntimeError: ') and line.count('\n') == 1


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(processes, 'get_device', lambda: 'cuda')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    with pytest.raises(UserError, match='^2 processes need a GPU each, found 1$'):
        processes.connect('pytorch', {})
