"""Names of trained models in commands."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_onnx import model as model

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.export import exporting
from cpvt_pyramid.app.page.server import Server
from cpvt_pyramid.app.tooling.command import UserError

NAME = 'segformer_b0_ade20k'


def test_export_takes_a_name_or_a_config(tmp_path, monkeypatch, capsys):
    """A name is a model in PyTorch, and a config one of OpenMMLab."""
    asked = []

    def ask(*arguments: object) -> None:
        asked.append(arguments)
        raise UserError('enough')

    monkeypatch.setattr(exporting, 'trained_from_config', ask)
    monkeypatch.setattr(exporting, 'trained_by_name', ask)
    monkeypatch.chdir(tmp_path)
    out = ['--out', str(tmp_path / 'model.onnx')]
    (tmp_path / 'a.py').touch()
    (tmp_path / 'best.pth').touch()
    path = str(tmp_path / 'best.pth')
    for command in ([NAME], [NAME, 'mine.pth'], ['a.py', 'b.pth'], [path]):
        assert main(['export', *command, *out]) == 2
    assert asked == [
        (NAME, None),
        (NAME, 'mine.pth'),
        ('b.pth', 'a.py', ()),
        (path, None, ()),
    ]
    assert capsys.readouterr().err == 4 * 'cpvt export: enough\n'


@pytest.mark.parametrize(
    'command, line',
    [
        (['segformer_b0_ade20'], 'no model at segformer_b0_ade20, and none of this name'),
        (['a.py'], 'a.py is a config; its checkpoint comes next'),
        (['missing.py'], 'no config at missing.py; those of this package are in'),
        (['missing.py', 'b.pth'], 'no config at missing.py; those of this package are in'),
        (['pcpvt_nano'], 'pcpvt_nano is an architecture; its checkpoint comes next'),
        ([NAME, 'photo.jpg'], f'{NAME} has its own weights; leave out photo.jpg'),
        (['model.onnx'], 'model.onnx is exported already'),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, list) else '',
)
def test_what_export_does_not_take(command, line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('a.py').touch()
    assert main(['export', *command, '--out', str(tmp_path / 'model.onnx')]) == 2
    assert capsys.readouterr().err.startswith(f'cpvt export: {line}')


def test_the_page_refuses_a_backend_for_a_name(capsys):
    assert main(['app', NAME, '--backend', 'openvino']) == 2
    assert capsys.readouterr().err.startswith('cpvt app: --backend is for exported models')


@pytest.mark.parametrize('backend, status', [('onnxruntime', 0), ('openvino', 2)])
def test_the_page_refuses_a_file_that_its_export_found_wrong(
    backend, status, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'model.onnx'
    shutil.copy(model('labels'), path)
    checks = [
        {'runtime': 'onnxruntime', 'passed': True},
        {'runtime': 'openvino', 'passed': False},
    ]
    path.with_suffix('.report.json').write_text(json.dumps({'checks': checks}))
    monkeypatch.setattr(Server, 'run', lambda server, _: server.listener.close())
    assert main(['app', str(path), '--port', '0', '--backend', backend]) == status
    error = capsys.readouterr().err
    assert ('other results than PyTorch in openvino' in error) == bool(status)
