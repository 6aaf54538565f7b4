"""Reading checkpoints, and what it leaves unchanged in its process."""

import os
from argparse import Namespace
from unittest import mock
from urllib.error import URLError

import mmengine.runner.checkpoint
import pytest
import torch

from cpvt_pyramid.predict.openmmlab.models import fetch_checkpoint
from cpvt_pyramid.tooling.command import UserError

LOADER = 'cpvt_pyramid.predict.openmmlab.models.CheckpointLoader'
FORCE = 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'


@pytest.mark.parametrize('family', ['maintained', 'original'])
def test_checkpoints_with_options_load_and_the_process_stays_as_it_was(family, monkeypatch):
    monkeypatch.delenv(FORCE, raising=False)
    seen = []

    def load(*_: object, **__: object) -> dict:
        seen.append(os.environ.get(FORCE))
        return torch.load('timm.pth')

    names = mmengine.runner.checkpoint, 'get_torch_safe_globals'
    if family == 'original':
        monkeypatch.delattr(*names, raising=False)
    else:
        monkeypatch.setattr(*names, list, raising=False)
    monkeypatch.setattr(
        'cpvt_pyramid.predict.openmmlab.models.CheckpointLoader.load_checkpoint', load
    )
    torch.save({'state_dict': {'a': torch.ones(1)}, 'args': Namespace(lr=1)}, 'timm.pth')
    environment, allowed = dict(os.environ), set(torch.serialization.get_safe_globals())
    assert fetch_checkpoint('s3://a/timm.pth')['args'].lr == 1
    assert seen == [None if family == 'maintained' else '1']
    assert dict(os.environ) == environment
    assert set(torch.serialization.get_safe_globals()) == allowed


class Payload:
    def __reduce__(self) -> tuple:
        return os.mkdir, ('executed',)


def test_a_file_executes_no_code():
    torch.save({'state_dict': {'a': torch.ones(1)}, 'meta': Payload()}, 'a.pth')
    with pytest.raises(UserError, match='a.pth holds more than tensors: .*mkdir. Such a file can'):
        fetch_checkpoint('a.pth')
    assert not os.path.exists('executed')
    torch.save({'a': torch.ones(1)}, 'a.pth')  # tensors alone are a state dict
    assert fetch_checkpoint('a.pth') == {'state_dict': {'a': torch.ones(1)}}


@pytest.mark.parametrize(
    'error, message',
    [
        (URLError('no route'), r'cannot download s3://a/b.pth \(.*no route'),
        (ConnectionError('cannot download t://b: offline'), '^cannot download t://b: offline$'),
        (RuntimeError('bad hash'), 'b.pth is not a complete checkpoint: bad hash'),
    ],
)
def test_addresses(error, message, monkeypatch):
    load = mock.Mock(side_effect=error)
    monkeypatch.setattr(
        'cpvt_pyramid.predict.openmmlab.models.CheckpointLoader.load_checkpoint', load
    )
    with pytest.raises(UserError, match=message):
        fetch_checkpoint('s3://a/b.pth')
