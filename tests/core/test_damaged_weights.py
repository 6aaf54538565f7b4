"""Damaged and hostile checkpoints: one ValueError, and the model is as it was."""

import copy
import random

import pytest
import torch
from foreign import TINY, of_mmdet, of_mmseg, of_timm
from mutations import BAD, NAMES
from torch import Tensor, nn

from cpvt_pyramid import CPVTPyramid, load_weights

SOURCES = {
    'timm': ('svt', lambda: of_timm('svt').state_dict()),
    'mmseg': ('pcpvt', lambda: of_mmseg('pcpvt').state_dict()),
    'mmdet': ('pvt', lambda: of_mmdet('pvt').state_dict()),
}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def refuses(model: nn.Module, tensors: dict, match: str = '.') -> None:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=match) as caught:
        model.load_state_dict(tensors, strict=False)
    assert len(str(caught.value)) < 1000
    assert unchanged(model, before)


@pytest.mark.parametrize('source', SOURCES)
@pytest.mark.parametrize('defect', BAD)
def test_a_bad_value_is_refused(source, defect):
    arch, make = SOURCES[source]
    model, tensors = CPVTPyramid(TINY[arch]), make()
    for name in random.Random(0).sample(sorted(k for k in tensors if 'head' not in k), 12):
        if name.startswith('norm.'):  # a classifier's, which this model leaves out
            continue
        refuses(model, tensors | {name: BAD[defect](tensors[name])})


@pytest.mark.parametrize('source', SOURCES)
def test_a_missing_tensor_is_refused(source):
    arch, make = SOURCES[source]
    model, tensors = CPVTPyramid(TINY[arch]), make()
    for name in tensors:
        if not name.startswith(('norm', 'head')):  # a stage norm starts as the identity
            refuses(model, {k: v for k, v in tensors.items() if k != name}, 'lacks')


@pytest.mark.parametrize('source', SOURCES)
@pytest.mark.parametrize('name', NAMES, ids=lambda n: repr(n)[:40])
def test_a_strange_name_is_no_crash(source, name):
    """It is refused, or reported as unused if it cannot be taken for a part of the model."""
    arch, make = SOURCES[source]
    model, tensors = CPVTPyramid(TINY[arch]), make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for value in (torch.ones(3), torch.ones(()), None):
        try:
            model.load_state_dict({**copy.copy(tensors), name: value}, strict=False)
        except ValueError:
            assert unchanged(model, before)
            continue
        clean = CPVTPyramid(TINY[arch])
        clean.load_state_dict(tensors)
        assert unchanged(clean, model.state_dict())
        model.load_state_dict(before)


def test_files(tmp_path):
    model = CPVTPyramid(TINY['pcpvt'])
    for content, match in (
        ({}, 'is empty'),
        ({'state_dict': {}}, 'no tensor of this backbone|is empty'),
        ({'epoch': 3}, 'no tensor of this backbone'),
        ([1, 2], 'holds a list'),
        ({'state_dict': {'fc.weight': torch.ones(3)}}, 'no tensor of this backbone'),
    ):
        torch.save(content, tmp_path / 'file.pth')
        with pytest.raises(ValueError, match=match):
            load_weights(model, tmp_path / 'file.pth')
    torch.save(of_timm('pcpvt').state_dict(), tmp_path / 'file.pth')
    whole = (tmp_path / 'file.pth').read_bytes()
    for end in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / 'torn.pth').write_bytes(whole[:end])
        with pytest.raises(ValueError, match='not a complete checkpoint'):
            load_weights(model, tmp_path / 'torn.pth')
    for path in (tmp_path, tmp_path / 'absent.pth', '~nobody/x.pth'):
        with pytest.raises(FileNotFoundError, match='no checkpoint at'):
            load_weights(model, path)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_floating_point_dtypes_load(dtype):
    tensors = {k: v.to(dtype) for k, v in of_timm('pcpvt').state_dict().items()}
    model = CPVTPyramid(TINY['pcpvt'])
    model.load_state_dict(tensors)
    assert torch.equal(
        model.pos_block[0].proj[0].weight, tensors['pos_block.0.proj.0.weight'].float()
    )


WRAPS = {
    'compiled': lambda w: {f'_orig_mod.{k}': v for k, v in w.items()},
    'compiled backbone': lambda w: {f'backbone._orig_mod.{k}': v for k, v in w.items()},
    'compiled blocks': lambda w: {k.replace('.mlp.', '._orig_mod.mlp.'): v for k, v in w.items()},
    'DDP in DDP': lambda w: {f'module.module.{k}': v for k, v in w.items()},
    'DDP of compiled': lambda w: {f'module._orig_mod.backbone.{k}': v for k, v in w.items()},
    "mmengine's EMA alone": lambda w: {
        'ema_state_dict': {'steps': torch.tensor(3)}
        | {f'module.backbone.{k}': v for k, v in w.items()}
    },
}


@pytest.mark.parametrize('wrap', WRAPS)
def test_wrappers_of_training_scripts(wrap):
    tensors = of_timm('pcpvt').state_dict()
    model = CPVTPyramid(TINY['pcpvt'])
    model.load_state_dict(WRAPS[wrap](tensors))
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
