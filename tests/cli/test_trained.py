"""Names of trained models in commands."""

import shutil

import pytest
from support import load_tool
from tiny_onnx import model as model

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app import Server
from cpvt_pyramid.tooling.command import UserError
from cpvt_pyramid.trained import TRAINED

NAME = 'segformer_b0_ade20k'


def test_export_takes_the_config_and_the_weights_of_a_name(tmp_path, monkeypatch, capsys):
    asked = []

    def load(*arguments: object) -> None:
        asked.append(arguments)
        raise UserError('enough')

    monkeypatch.setattr(load_tool('export'), 'load', load)
    out = str(tmp_path / 'model.onnx')
    assert main(['export', NAME, '--out', out]) == 2
    assert main(['export', 'pcpvt_small', 'weights.pth', '--out', out]) == 2
    assert asked == [
        (str(TRAINED[NAME].config_path), NAME, (), False),
        ('pcpvt_small', 'weights.pth', (), False),
    ]
    assert capsys.readouterr().err == 2 * 'cpvt export: enough\n'


@pytest.mark.parametrize(
    'name, hint', [('segformer_b0_ade20', f'; did you mean {NAME}?'), ('a.py', '')]
)
def test_export_without_weights(name, hint, tmp_path, capsys):
    assert main(['export', name, '--out', str(tmp_path / 'model.onnx')]) == 2
    line = f'give a checkpoint after {name}, which is not the name of a trained model{hint}'
    assert capsys.readouterr().err == f'cpvt export: {line}\n'


def test_the_page_exports_a_name_once(model, tmp_path, monkeypatch, capsys):
    asked = []

    def export(name: str, *, out: str) -> int:
        asked.append(name)
        shutil.copy(model('labels'), out)
        return 0

    def run(server: Server, _sockets: list) -> None:
        asked.append(server.page.about()['name'])
        server.listener.close()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load_tool('export'), 'export', export)
    monkeypatch.setattr(Server, 'run', run)
    for _ in range(2):
        assert main(['app', NAME, '--port', '0']) == 0
    assert asked == [NAME, f'{NAME}.onnx', f'{NAME}.onnx']
    assert capsys.readouterr().out.startswith(f'exporting {NAME} to {NAME}.onnx, once\nhttp://')


def test_the_page_suggests_a_name(capsys):
    assert main(['app', 'segformer_b0']) == 2
    line = f'cpvt app: no model at segformer_b0; did you mean {NAME}?\n'
    assert capsys.readouterr().err == line
