"""Weights by name, from a server on this machine."""

import hashlib
import io
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from hub_server import serve_hub
from safetensors import safe_open
from safetensors.torch import save
from support import load_tool

from cpvt_pyramid import CPVTPyramid, load_weights, timm_models
from cpvt_pyramid.checkpoints.convert import convert_checkpoint
from cpvt_pyramid.checkpoints.downloads import IN_PACKAGE, local_file

REPO = 'timm/twins_pcpvt_nano.in1k'
NAMES = (
    'timm://twins_pcpvt_nano.in1k',
    f'hf://{REPO}/of/others.pth',
    '{url}/me/a/resolve/main/nano.pth?download=true',
)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    torch.hub.set_dir(tmp_path / 'torch')
    tensors, buffer = CPVTPyramid('pcpvt_nano').state_dict(), io.BytesIO()
    torch.save(tensors, buffer)
    content = buffer.getvalue()
    with serve_hub(monkeypatch, tmp_path / 'cache') as server:
        server.repos[REPO] = {'model.safetensors': save(tensors), 'of/others.pth': content}
        good = hashlib.sha256(b'good').hexdigest()[:8]
        names = (f'good-{good}.pth', 'bad-0123abcd.pth', 'of-20240131.pth')
        server.repos['me/a'] = {'nano.pth': content, **dict.fromkeys(names, b'good')}
        yield server
    monkeypatch.setattr(torch.hub, '_hub_dir', None)


@pytest.mark.parametrize('name', NAMES)
def test_loads_and_is_downloaded_once(name, hub):
    name = name.format(url=hub.url)
    report = load_weights(CPVTPyramid('pcpvt_nano'), name)
    assert report.loaded and str(report).endswith('tensors, 0 missing, 0 unused')
    hub.shutdown()
    hub.server_close()
    assert load_weights(CPVTPyramid('pcpvt_nano'), name) == report


@pytest.mark.parametrize('kind', ['safetensors', 'pickle', 'shards'])
def test_a_repository_by_its_name(kind, hub):
    """The weights that transformers or huggingface_hub saved there, downloaded once."""
    tensors, buffer = CPVTPyramid('pcpvt_nano').state_dict(), io.BytesIO()
    torch.save(tensors, buffer)
    places = dict.fromkeys(tensors, 'model-00001-of-00001.safetensors')
    files = {
        'safetensors': {'model.safetensors': save(tensors), 'pytorch_model.bin': b'not read'},
        'pickle': {'pytorch_model.bin': buffer.getvalue()},
        'shards': {
            'model.safetensors.index.json': json.dumps({'weight_map': places}).encode(),
            'model-00001-of-00001.safetensors': save(tensors),
        },
    }
    hub.repos['me/b'] = files[kind] | {'config.json': b'{}'}
    report = load_weights(CPVTPyramid('pcpvt_nano'), 'hf://me/b')
    hub.shutdown()
    hub.server_close()
    assert len(report.loaded) == len(tensors)
    assert load_weights(CPVTPyramid('pcpvt_nano'), 'hf://me/b') == report


def test_a_repository_without_weights(hub):
    hub.repos['me/c'] = {'config.json': b'{}'}
    with pytest.raises(FileNotFoundError, match='^hf://me/c has no model.safetensors, .*/FILE$'):
        local_file('hf://me/c')
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ConnectionError, match='^cannot download hf://me/d .*model.safetensors of'):
        local_file('hf://me/d')


def test_a_hash_in_a_name_is_checked(hub):
    url = f'{hub.url}/me/a/resolve/main'
    for name in hub.repos['me/a']:
        if not name.startswith('bad'):
            assert local_file(f'{url}/{name}').name == name
    for _ in range(2):
        with pytest.raises(
            ConnectionError, match='its SHA-256 begins with [0-9a-f]{8}, not 0123abcd'
        ):
            local_file(f'{url}/bad-0123abcd.pth')
    cached = Path(torch.hub.get_dir(), 'checkpoints').iterdir()
    assert {path.name for path in cached} == hub.repos['me/a'].keys() - {'bad-0123abcd.pth'}


def test_a_file_in_the_cache_is_checked_again(hub):
    """The error names the file, not its address: it is the file that must go."""
    url = f'{hub.url}/me/a/resolve/main'
    (good,) = (name for name in hub.repos['me/a'] if name.startswith('good'))
    path = local_file(f'{url}/{good}')
    hub.shutdown()
    hub.server_close()
    assert local_file(f'{url}/{good}') == path
    path.write_bytes(b'goof')
    line = (
        f'^{re.escape(str(path))} is damaged .* not {good[5:13]}. Delete it, and it is downloaded'
    )
    with pytest.raises(ValueError, match=line):
        local_file(f'{url}/{good}')


def test_a_missing_checkpoint_names_those_that_are_there(tmp_path):
    """The newest first, as after a training without a best one."""
    pattern = tmp_path / 'best_*.pth'
    with pytest.raises(FileNotFoundError, match=rf'^no checkpoint at {re.escape(str(pattern))}$'):
        local_file(pattern)
    for time_, name in enumerate(('epoch_1.pth', 'epoch_2.pth', 'log.txt')):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time_, time_))
    with pytest.raises(FileNotFoundError) as caught:
        local_file(pattern)
    assert str(caught.value).endswith(f'*.pth; {tmp_path} has epoch_2.pth, epoch_1.pth')
    with pytest.raises(FileNotFoundError, match='nowhere/a.pth$'):
        local_file(tmp_path / 'nowhere/a.pth')


MISSING = {
    'timm://nothing': r'timm://nothing \(.*Download model.safetensors of timm/nothing elsewhere',
    f'hf://{REPO}/of/none.pth': rf'EntryNotFound.*Download of/none.pth of {REPO} elsewhere',
    '{url}/me/b.pth': r'/me/b.pth \(HTTPError: HTTP Error 404: Not Found\). Download it elsewhere',
}


@pytest.mark.parametrize('name', MISSING)
@pytest.mark.parametrize('is_reachable', [True, False])
def test_what_cannot_be_downloaded_is_one_line_at_once(name, is_reachable, hub):
    if not is_reachable:
        hub.shutdown()
        hub.server_close()
    start = time.monotonic()
    reason = MISSING[name] if is_reachable else r'\(\w+: .*refused.*\). Download .* elsewhere'
    with pytest.raises(ConnectionError, match=f'^cannot download .*{reason}') as caught:
        local_file(name.format(url=hub.url))
    assert '\n' not in str(caught.value) and time.monotonic() - start < 5


def test_other_mistakes():
    with pytest.raises(ValueError, match='is hf://OWNER/REPO or .*/FILE, got hf://me'):
        local_file('hf://me')
    with pytest.raises(FileNotFoundError, match='^no checkpoint at tim://a$'):
        local_file('tim://a')


def test_tools_take_names_or_say_why_not_in_one_line(hub, tmp_path, capsys):
    from cpvt_pyramid.app.export.exporting import open_source  # needs onnx

    name, body = NAMES[0], CPVTPyramid('pcpvt_nano')
    load_weights(body, name)
    converted, _ = convert_checkpoint(name, 'ours', tmp_path)
    assert converted.name.startswith('twins_pcpvt_nano_ours-')
    model = open_source('pcpvt_nano', name, ()).model
    torch.testing.assert_close(model.state_dict(), body.state_dict(), rtol=0, atol=0)
    for command, out in (
        ('convert_weights timm://nothing --to mmseg --out-dir', tmp_path),
        ('export pcpvt_nano timm://nothing --out', tmp_path / 'a.onnx'),
    ):
        tool, *arguments = command.split()
        assert load_tool(tool).main([*arguments, str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f'cpvt {tool.replace("_", "-")}: cannot download timm://nothing')


# Weights that come with the package


@pytest.mark.parametrize('path', sorted(IN_PACKAGE.glob('*.safetensors')), ids=lambda p: p.stem)
def test_weights_in_the_package_load_completely(path):
    """Into every kind of model, without a network; the file says what they were made of."""
    name = f'cpvt://{path.stem}'
    with safe_open(path, 'pt') as file:
        about = json.loads(file.metadata()['distillation'])
    arch = about['arch']
    model = CPVTPyramid(arch)
    before = model.state_dict()['patch_embeds.0.proj.weight'].clone()
    report = load_weights(model, name)
    assert str(report).endswith('0 missing, 0 unused')
    weights = model.state_dict()
    assert not torch.equal(weights['patch_embeds.0.proj.weight'], before)
    assert all(value.isfinite().all() for value in weights.values())
    classifier = timm_models.classifier(arch, num_classes=3)
    assert load_weights(classifier, name).loaded == report.loaded


def test_the_package_has_weights():
    assert list(IN_PACKAGE.glob('*.safetensors'))


def test_unknown_weights_of_the_package_are_named():
    with pytest.raises(FileNotFoundError, match='no weights cpvt://resnet50 .* cpvt://pcpvt_nano'):
        local_file('cpvt://resnet50')
    with pytest.raises(FileNotFoundError, match='no weights'):
        local_file('cpvt://../weights/pcpvt_nano')
