"""cpvt export: what it is asked, what it refuses, in one line."""

import json
from pathlib import Path

import pytest
import torch
from support import load_tool

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.export.files import Written

tool = load_tool('export')


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'weights.pth')
    return ['pcpvt_nano', 'weights.pth', '--out']


def test_a_backbone_by_its_name(command, capsys):
    """The photographs are scikit-image's: there is no data set."""
    command += ['nano.pt2', '--format', 'torch', '--size', '64x70']
    assert tool.main([*command, '--no-valid', '--license', 'CC0']) == 0
    extra = {'cpvt_pyramid.json': ''}
    module = torch.export.load('nano.pt2', extra_files=extra).module()
    about = json.loads(extra['cpvt_pyramid.json'])
    assert (about['license'], about['arch'], about['size']) == ('CC0', 'pcpvt_nano', [64, 70])
    maps = module(torch.zeros(1, 3, 64, 70))
    assert [tuple(x.shape[1:]) for x in maps] == [
        (32, 16, 18),
        (64, 8, 9),
        (128, 4, 5),
        (192, 2, 3),
    ]
    assert 'nano.report.md' in capsys.readouterr().out
    assert tool.main(command) == 2
    assert 'exists; remove it' in capsys.readouterr().err


def test_a_file_that_fails_in_openvino_has_another_status(command, capsys, monkeypatch):
    line = 'do not use the file in OpenVINO: runtime: no kernel'

    def write(path: Path, *given: object) -> Written:
        return Written([path], line)

    monkeypatch.setattr('cpvt_pyramid.export.files.write_verified', write)
    assert tool.main([*command, 'nano.onnx']) == 3
    assert capsys.readouterr().out.splitlines() == ['wrote nano.onnx', line]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['model.pt'], 'must end in .onnx'),
        (['model.onnx', '--format', 'torch'], 'must end in .pt2'),
        (['model.onnx', '--size', '800'], '--size must be HEIGHTxWIDTH'),
        (['model.onnx', '--raw'], '--raw needs a detector'),
        (['model.onnx', '--images', 'nothing.jpg'], 'no image or folder at nothing.jpg'),
    ],
    ids=str,
)
def test_refusals(options, message, command, capsys):
    assert tool.main([*command, *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert [path.name for path in Path().iterdir()] == ['weights.pth']
