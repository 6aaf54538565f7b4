"""Reading checkpoints, and what it leaves unchanged in its process."""

import os
from argparse import Namespace
from unittest import mock
from urllib.error import URLError

import mmengine.runner.checkpoint
import pytest
import torch
from foreign import TINY
from torch import nn

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.app.predict.openmmlab.loading import fetch_checkpoint, load_whole_model
from cpvt_pyramid.app.tooling.command import UserError

LOADER = 'cpvt_pyramid.app.predict.openmmlab.loading.CheckpointLoader'
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
        'cpvt_pyramid.app.predict.openmmlab.loading.CheckpointLoader.load_checkpoint', load
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
        'cpvt_pyramid.app.predict.openmmlab.loading.CheckpointLoader.load_checkpoint', load
    )
    with pytest.raises(UserError, match=message):
        fetch_checkpoint('s3://a/b.pth')


@pytest.mark.parametrize('name', ['backbone.blocks.1.0.norm1.bias', 'head.weight'])
def test_a_diverged_model_is_refused_although_pytorch_loads_it(name):
    model = nn.Module()
    model.backbone = CPVTPyramid(TINY['pcpvt'])
    model.head = nn.Linear(64, 4)
    tensors = {**model.state_dict()}
    tensors[name] = tensors[name] * float('nan')
    with pytest.raises(UserError, match=f'^a.pth is damaged: {name} has values that are not fin'):
        load_whole_model(model, {'state_dict': tensors}, 'a.pth')
    model.load_state_dict(tensors)
    assert model.get_parameter(name).isnan().all()


def test_a_backbone_of_another_architecture_is_named():
    model = nn.Module()
    model.backbone = CPVTPyramid('pcpvt_nano')
    tensors = {f'backbone.{k}': v for k, v in CPVTPyramid('mit_b0').state_dict().items()}
    with pytest.raises(UserError, match='^a.pth does not fit the model: .* mit_b0; the model is '):
        load_whole_model(model, {'state_dict': tensors}, 'a.pth')


@pytest.mark.parametrize('tensors', [5, [torch.zeros(1)], {1: torch.zeros(1)}])
def test_a_checkpoint_without_names_of_tensors(tensors):
    torch.save({'state_dict': tensors, 'meta': {}}, 'a.pth')
    with pytest.raises(UserError, match='a.pth holds no tensors by their names'):
        fetch_checkpoint('a.pth')
