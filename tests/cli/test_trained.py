"""Names of trained models in commands."""

import pytest
from support import load_tool

from cpvt_pyramid.__main__ import main
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


def test_the_page_needs_an_exported_model(capsys):
    assert main(['app', NAME]) == 2
    assert f'first run cpvt export {NAME} --out {NAME}.onnx' in capsys.readouterr().err
