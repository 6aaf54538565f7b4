"""Files, wrappers and prefixes."""

import argparse
import gzip
import json
import os
import pickle
import struct
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign import (
    TINY,
    of_timm,
)
from mmengine.logging import HistoryBuffer
from PIL import Image
from safetensors.torch import save_file
from support import assert_loaded
from torch import nn

from cpvt_pyramid import CPVTPyramid, load_weights
from cpvt_pyramid.checkpoints.files import BEGINNING
from cpvt_pyramid.checkpoints.loading import fit_checkpoint

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
    'Lightning': lambda w: {'state_dict': prefixed('model.backbone.', w), 'epoch': 3},
    "a detector of torchvision's": lambda w: prefixed('backbone.body.', w) | {'head.a': w},
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
        fit_checkpoint(CPVTPyramid('pcpvt_nano'), checkpoint(published))


AVERAGE = 'the moving average'
LAST = 'taken from state_dict, which is the moving average; ema_state_dict holds the last weights'


@pytest.mark.parametrize(
    ('checkpoint', 'taken', 'remark'),
    [
        (
            lambda a, b: {'model': a, 'model_ema': b, 'state_dict': {}},
            'b',
            f'; taken from model_ema ({AVERAGE}), not from model',
        ),
        (  # of RT-DETR
            lambda a, b: {'model': a, 'ema': {'module': b, 'updates': 3}},
            'b',
            f'; taken from ema ({AVERAGE}), not from model',
        ),
        (  # of mmengine, which swaps them
            lambda a, b: {
                'state_dict': a,
                'ema_state_dict': {'steps': torch.tensor(3)} | prefixed('module.', b),
            },
            'a',
            f'; {LAST}',
        ),
        (
            lambda a, b: {'state_dict': a, 'ema_state_dict': b},
            'b',
            f'; taken from ema_state_dict ({AVERAGE}), not from state_dict',
        ),
        (lambda a, _: {'model': a, 'model_ema': {}}, 'a', ', 4 unused (norm.weight'),
    ],
)
def test_the_report_says_which_of_several_was_taken(published, checkpoint, taken, remark, tmp_path):
    other = {name: value * 0.5 for name, value in published.items()}
    torch.save(checkpoint(published, other), tmp_path / 'a.pth')
    model = CPVTPyramid('pcpvt_nano')
    report = str(load_weights(model, tmp_path / 'a.pth'))
    assert_loaded(model, {'a': published, 'b': other}[taken])
    assert report.endswith(remark) if ';' in remark else remark in report and ';' not in report


def test_a_checkpoint_inside_itself_is_no_endless_loop():
    checkpoint = {}
    checkpoint['model'] = checkpoint
    with pytest.raises(ValueError, match='no tensor of this backbone, but model'):
        fit_checkpoint(CPVTPyramid(TINY['pcpvt']), checkpoint)
    found = CPVTPyramid(TINY['pcpvt']).load_state_dict(checkpoint, strict=False)
    assert found.unexpected_keys == ['model']


@pytest.mark.parametrize('stray', ['module.step', 'backbone.step', 'module.backbone.step'])
def test_a_stray_prefix_beside_bare_names(published, stray, tmp_path):
    torch.save(published | {stray: torch.ones(())}, tmp_path / 'a.pth')
    model = CPVTPyramid('pcpvt_nano')
    report = load_weights(model, tmp_path / 'a.pth')
    assert_loaded(model, published)
    assert report.unused == [stray]


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


def write_script(path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), path)


def write_exported(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), f'{path}.pt2')
    Path(f'{path}.pt2').rename(path)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('weights/nano.pth', b'')


def write_zip_of_text(path: Path) -> None:
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('notes.txt', b'')


def write_damaged_zip(path: Path) -> None:
    """Whose end says that there are two disks, of which `zipfile.is_zipfile` raises."""
    locator = struct.pack('<4sLQL', b'PK\x06\x07', 0, 0, 2)
    path.write_bytes(b'PK\x03\x04' + locator + struct.pack('<4s4H2LH', b'PK\x05\x06', *[0] * 7))


def write_tar(path: Path) -> None:
    with tarfile.open(path, 'w') as archive:
        archive.add(__file__, 'weights/nano.pth')


def write_image(path: Path, kind: str) -> None:
    Image.new('RGB', (8, 8)).save(path, kind)


def write_cut_text(path: Path) -> None:
    """The second byte of the last character is beyond what is looked at."""
    path.write_bytes(b'a' * (BEGINNING - 1) + 'ü'.encode())


@pytest.mark.parametrize(
    'write, complaint',
    [
        *((partial(write_torn, end=end), 'not a complete checkpoint') for end in (1, 0.5, -1)),
        (partial(write_torn, end=0), 'is empty'),
        (lambda path: path.write_bytes(pickle.dumps(os.system, 2)), 'than tensors: posix.system'),
        (lambda path: torch.save({'a': os.system}, path), 'holds more than tensors: posix.system'),
        (lambda path: torch.save({'a': nn.Linear(2, 2)}, path), 'holds more than tensors: torch'),
        (lambda path: torch.save(torch.ones(3), path), 'holds a Tensor, not tensors by their'),
        (lambda path: torch.save({}, path), 'is empty'),
        (lambda path: torch.save({'state_dict': {}}, path), 'no tensor of this backbone, but'),
        # Files of other kinds
        (lambda path: path.write_bytes(gzip.compress(b'weights')), 'is compressed with gzip; de'),
        (lambda path: path.write_text('<!DOCTYPE html>'), 'is a web page'),
        (lambda path: path.write_text('version https://git-lfs.github.com'), 'pointer of Git LFS'),
        (lambda path: np.savez(path.open('wb'), a=np.ones(3)), r'is a NumPy archive \(.npz\)'),
        (lambda path: np.save(path.open('wb'), np.ones(3)), 'is a NumPy array'),
        (write_zip, 'is a zip archive that holds weights/nano.pth; unpack it first'),
        (write_zip_of_text, 'is a zip archive that holds notes.txt; a checkpoint is a file of'),
        (write_damaged_zip, 'is not a complete checkpoint'),
        (write_tar, 'is a tar archive; unpack it first'),
        *(
            (partial(write_image, kind=kind), 'is an image; a checkpoint is')
            for kind in ('PNG', 'JPEG', 'GIF', 'TIFF', 'WEBP')
        ),
        (lambda path: path.write_text("model = dict(type='A')\n"), 'is a text file; a checkpoint'),
        (
            lambda path: path.write_text('cat\ndog\nowl\n'),
            'is a text file',
        ),  # also a pickle's GLOBAL
        (write_cut_text, 'is a text file'),
        (lambda path: path.write_bytes(b'%PDF-1.4\n%\xe2\xe3'), 'is not a complete checkpoint'),
        (lambda path: path.write_bytes(b'\x08'), 'is not a complete checkpoint'),
        (write_script, 'is a TorchScript archive: .* save the state_dict'),
        (write_exported, 'is an exported program of torch.export'),
        (
            lambda path: path.write_bytes(b'\x08\x0a\x12\x07pytorch\x1a\x06'),
            'is an ONNX model: .* save the state_dict',
        ),
        # Folders
        (lambda path: path.mkdir(), 'no checkpoint in the folder'),
        (
            lambda path: [path.mkdir(), (path / 'a.pth').touch(), (path / 'b.pth').touch()],
            'holds several checkpoints: a.pth, b.pth. Give one',
        ),
        (
            lambda path: [path.mkdir(), (path / '.metadata').touch()],
            'torch.distributed.checkpoint; make one file of it with python -m .* dcp_to_torch',
        ),
        (
            lambda path: [path.mkdir(), (path / 'adapter_config.json').touch()],
            'is an adapter of peft',
        ),
    ],
)
@pytest.mark.filterwarnings('ignore:.torch.jit:DeprecationWarning')
def test_files_that_are_no_checkpoints(write, complaint, tmp_path):
    path = tmp_path / 'file.pth'
    write(path)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint) as caught:
        load_weights(CPVTPyramid(TINY['pcpvt']), path)
    assert str(path) in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize('protocol', [4, 5])
@pytest.mark.parametrize('plain', [True, False])
@pytest.mark.skipif(not HAS_SAFE_GLOBALS, reason='below torch 2.5 our own unpickler reads them')
def test_other_pickle_protocols_are_named(protocol, plain, tmp_path):
    path = tmp_path / 'file.pth'
    weights = {'a': torch.ones(3)}
    if plain:
        path.write_bytes(pickle.dumps(weights, protocol))
    else:
        torch.save(weights, path, pickle_protocol=protocol)
    with pytest.raises(ValueError, match=f'was pickled with protocol {protocol}; only .* again'):
        load_weights(CPVTPyramid(TINY['pcpvt']), path)


# Folders that can be loaded


def write_shards(folder: Path, weights: dict, name: str = 'model.safetensors') -> None:
    """Two files and their index, as huggingface_hub writes them."""
    stem, _, ending = name.partition('.')
    names = list(weights)
    places = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f'{stem}-0000{i}-of-00002.{ending}'
        tensors = {key: weights[key] for key in part}
        if ending == 'bin':
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / f'{name}.index.json').write_text(json.dumps({'weight_map': places}))


def write_snapshot(folder: Path, weights: dict) -> None:
    """A repository in the cache of huggingface_hub."""
    snapshot = folder / 'snapshots/0123abcd'
    snapshot.mkdir(parents=True)
    (snapshot / 'config.json').write_text('{}')
    save_file(weights, snapshot / 'model.safetensors')


@pytest.mark.parametrize(
    'write',
    [
        write_shards,
        partial(write_shards, name='pytorch_model.bin'),
        write_snapshot,
        lambda folder, weights: save_file(weights, folder / 'any.safetensors'),
        lambda folder, weights: torch.save({'model': weights}, folder / 'checkpoint.pth.tar'),
    ],
)
def test_folders_that_hold_one_checkpoint(published, write, tmp_path):
    write(tmp_path, published)
    (tmp_path / 'README.md').touch()
    model = CPVTPyramid('pcpvt_nano')
    load_weights(model, tmp_path)
    assert_loaded(model, published)


def test_damaged_indices_of_shards(published, tmp_path):
    write_shards(tmp_path, published)
    index = tmp_path / 'model.safetensors.index.json'
    model = CPVTPyramid('pcpvt_nano')
    load_weights(model, index)  # the index itself
    for text, complaint in (
        ('{}', "must hold a 'weight_map'"),
        ('[' * 100_000, "must hold a 'weight_map'"),
        ('{"weight_map": {"a": "../a.safetensors"}}', 'must list files of its own folder'),
        ('{"weight_map": {"a": 3}}', 'must list files of its own folder'),
        ('{"weight_map": {"a": "b.safetensors"}}', 'lists files that are not there: b.safetensors'),
    ):
        index.write_text(text)
        with pytest.raises((ValueError, FileNotFoundError), match=complaint):
            load_weights(model, tmp_path)
