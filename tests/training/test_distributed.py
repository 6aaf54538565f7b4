"""Two processes, of which one or both have an error before the training."""

import os

import mmengine.dist
import pytest
import torch
from support import in_processes, load_tool

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.tooling.command import UserError, run_tool
from cpvt_pyramid.tooling.explain import explained
from cpvt_pyramid.training import processes
from cpvt_pyramid.training.processes import all_or_none

train = load_tool('train')


def test_data_that_one_process_lacks(configs, sample_dataset):
    load_config(configs['detector'])  # imports mm once, and not in each process

    def run(rank: int) -> int:
        data = sample_dataset / 'coco' if rank == 0 else 'nowhere'
        options = [f'{split}_dataloader.dataset.data_root={data}' for split in ('train', 'val')]
        command = [str(configs['detector']), '--launcher', 'pytorch', '--cfg-options', *options]
        return train.main(command)

    (status, silent), (other_status, line) = in_processes(2, run)
    assert (status, other_status) == (2, 2) and silent == ''
    assert line.startswith(f'cpvt train: rank 1: no train data at {os.getcwd()}/nowhere/')
    assert line.count('\n') == 1


@pytest.mark.parametrize(
    'messages, lines',
    [
        (['no data', 'no data'], ['tool: no data\n', '']),
        (['no data', 'no checkpoint'], ['tool: no data\n', 'tool: rank 1: no checkpoint\n']),
    ],
)
def test_each_error_is_printed_once(messages, lines):
    def fail(message: str) -> None:
        with all_or_none('pytorch'):
            if message:
                raise UserError(message)

    ended = in_processes(2, lambda rank: run_tool('tool', fail, {'message': messages[rank]}, ''))
    assert ended == [(2, line) for line in lines]


def test_a_process_that_ends_later_ends_the_others_with_one_line():
    def work() -> None:
        with all_or_none('pytorch'):
            pass
        if os.environ['RANK'] == '1':
            raise UserError('no more data')
        with explained():
            mmengine.dist.barrier()

    (status, line), (other_status, other_line) = in_processes(
        2, lambda rank: run_tool('tool', work, {}, '')
    )
    assert (status, other_status) == (2, 2) and other_line == 'tool: rank 1: no more data\n'
    assert line.startswith('tool: RuntimeError: ') and line.count('\n') == 1


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(processes, 'get_device', lambda: 'cuda')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    with pytest.raises(UserError, match='^2 processes need a GPU each, found 1$'):
        processes.connect('pytorch', {})
