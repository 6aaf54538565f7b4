"""Files, wrappers and prefixes."""

import argparse
import os
import pickle
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from foreign import (
    TINY,
    of_timm,
)
from mmengine.logging import HistoryBuffer
from safetensors.torch import save_file
from support import assert_loaded, load
from torch import nn

from cpvt_pyramid import CPVTPyramid, load_weights

HAS_SAFE_GLOBALS = hasattr(torch.serialization, 'safe_globals')


def prefixed(prefix: str, weights: dict) -> dict:
    return {f'{prefix}{k}': v for k, v in weights.items()}


WRAPS = {
    'none': lambda w: w,
    'state_dict': lambda w: {'state_dict': w},
    'model in float64': lambda w: {'model': {k: v.double() for k, v in w.items()}, 'epoch': 3},
    'average': lambda w: {'model_ema': w, 'model': {}},
    'no average yet': lambda w: {'model': w, 'model_ema': {}, 'state_dict_ema': None},
    'settings of an average': lambda w: {'model': w, 'model_ema': {'decay': 0.999}},
    'DeepSpeed': lambda w: {'module': prefixed('module.', w), 'optimizer': {'lr': 0.1}},
    'DDP': lambda w: prefixed('module.', w),
    'DDP of a detector': lambda w: {'state_dict': prefixed('module.backbone.', w)},
    'detector': lambda w: prefixed('backbone.', w) | {'neck.conv.weight': torch.ones(1)},
    'compiled': lambda w: prefixed('_orig_mod.', w),
    'compiled backbone': lambda w: prefixed('backbone._orig_mod.', w),
    'compiled blocks': lambda w: {k.replace('.mlp.', '._orig_mod.mlp.'): v for k, v in w.items()},
    'DDP in DDP': lambda w: prefixed('module.module.', w),
    'DDP of compiled': lambda w: prefixed('module._orig_mod.backbone.', w),
    "mmengine's EMA alone": lambda w: {
        'ema_state_dict': {'steps': torch.tensor(3)} | prefixed('module.backbone.', w)
    },
    # Other objects in the file of a training, read without the packages that wrote it.
    'a training': lambda w: {
        'state_dict': w,
        'message_hub': {'loss': HistoryBuffer([1.0, 2.0], [1, 1])},
        'args': argparse.Namespace(lr=0.1),
    },
}


@pytest.mark.parametrize('wrap', WRAPS)
def test_wrappers_and_prefixes(published, wrap, tmp_path):
    torch.save(WRAPS[wrap](published), tmp_path / 'checkpoint.pth')
    model = CPVTPyramid('pcpvt_nano')
    report = load_weights(model, tmp_path / 'checkpoint.pth')
    assert_loaded(model, published)
    count = len(report.loaded)
    assert str(report).startswith(f'loaded {count} of {count} tensors, 0 missing, 4 unused (norm')


@pytest.mark.parametrize(
    ('checkpoint', 'contents'),
    [
        (
            lambda w: {'student': w, 'teacher': w, 'epoch': torch.tensor(3)},
            "student, teacher, epoch. Load a part that holds its tensors, such as 'student'",
        ),
        (lambda w: {'shard_0': w, 'shard_1': {}}, "shard_0, shard_1. Load .* such as 'shard_0'"),
        (lambda w: {'model': {}, 'model_ema': {}}, 'model, model_ema'),
        (lambda w: {'model': {'arguments': 1}}, 'model'),
    ],
)
def test_other_wrappers_are_listed(published, checkpoint, contents):
    with pytest.raises(ValueError, match=f'has no tensor of this backbone, but {contents}. Check'):
        CPVTPyramid('pcpvt_nano').load_state_dict(checkpoint(published))


def test_the_report_says_which_of_several_was_taken(published):
    average = {name: value * 0.5 for name, value in published.items()}
    checkpoint = {'model': published, 'model_ema': average, 'state_dict': {}}
    model = CPVTPyramid('pcpvt_nano')
    report = load(model, checkpoint, strict=False)
    assert str(report).endswith('; taken from model_ema, not from model')
    assert_loaded(model, average)
    assert not load(model, {'model': published, 'model_ema': {}}, strict=False).choice


def test_a_checkpoint_inside_itself_is_no_endless_loop():
    checkpoint = {}
    checkpoint['model'] = checkpoint
    with pytest.raises(ValueError, match='no tensor of this backbone, but model'):
        CPVTPyramid(TINY['pcpvt']).load_state_dict(checkpoint)


def test_a_missing_package_is_named(published, tmp_path, monkeypatch):
    save_file(published, tmp_path / 'model.safetensors')
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    with pytest.raises(ImportError, match='pip install safetensors'):
        load_weights(CPVTPyramid(TINY['pcpvt']), tmp_path / 'model.safetensors')


@pytest.mark.parametrize('name', ['model.bin', 'model.SAFETENSORS', 'model'])
def test_a_safetensors_file_of_any_name(published, name, tmp_path):
    save_file(published, tmp_path / name)
    model = CPVTPyramid('pcpvt_nano')
    load_weights(model, tmp_path / name)
    assert_loaded(model, published)
    os.truncate(tmp_path / name, 1000)
    with pytest.raises(ValueError, match='is not a complete checkpoint'):
        load_weights(model, tmp_path / name)


def write_torn(path: Path, end: float) -> None:
    """Up to a part of its length, or to a byte."""
    torch.save(of_timm('pcpvt').state_dict(), path)
    size = path.stat().st_size
    os.truncate(path, int(end * size) if 0 < end < 1 else end % size)


@pytest.mark.parametrize(
    'write, complaint',
    [
        *((partial(write_torn, end=end), 'not a complete checkpoint') for end in (0, 1, 0.5, -1)),
        (
            lambda path: path.write_bytes(pickle.dumps(os.system)),
            # Below torch 2.5, our own unpickler reads it.
            'is not a complete checkpoint' if HAS_SAFE_GLOBALS else 'than tensors: posix.system',
        ),
        (lambda path: torch.save({'a': os.system}, path), 'holds more than tensors: posix.system'),
        (lambda path: torch.save({'a': nn.Linear(2, 2)}, path), 'holds more than tensors: torch'),
        (lambda path: torch.save(torch.ones(3), path), 'holds a Tensor, not tensors by their'),
        (lambda path: torch.save({}, path), 'is empty'),
        (lambda path: torch.save({'state_dict': {}}, path), 'no tensor of this backbone|is empty'),
        (lambda path: path.mkdir(), 'no checkpoint at'),
    ],
)
@pytest.mark.filterwarnings('ignore:Detected pickle protocol')
def test_files_that_are_no_checkpoints(write, complaint, tmp_path):
    path = tmp_path / 'file.pth'
    write(path)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint) as caught:
        load_weights(CPVTPyramid(TINY['pcpvt']), path)
    assert str(path) in str(caught.value) and '\n' not in str(caught.value)
