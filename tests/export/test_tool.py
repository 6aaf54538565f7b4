"""tools/export.py: what it is asked, what it refuses, in one line."""

import json
from pathlib import Path

import pytest
import torch
from support import load_tool

from cpvt_pyramid import CPVTPyramid

tool = load_tool('export')


@pytest.fixture
def weights(tmp_path: Path) -> str:
    torch.save(CPVTPyramid('pcpvt_nano').state_dict(), tmp_path / 'weights.pth')
    return str(tmp_path / 'weights.pth')


def test_a_backbone_by_its_name(weights, tmp_path, capsys):
    """The photographs are scikit-image's: there is no data set."""
    out = tmp_path / 'nano.pt2'
    command = ['pcpvt_nano', weights, '--out', str(out), '--format', 'torch', '--size', '64x70']
    assert tool.main([*command, '--no-valid', '--license', 'CC0']) == 0
    extra = {'cpvt_pyramid.json': ''}
    module = torch.export.load(out, extra_files=extra).module()
    about = json.loads(extra['cpvt_pyramid.json'])
    assert (about['license'], about['arch'], about['size']) == ('CC0', 'pcpvt_nano', [64, 70])
    maps = module(torch.zeros(1, 3, 64, 70))
    assert [tuple(x.shape[1:]) for x in maps] == [
        (32, 16, 18), (64, 8, 9), (128, 4, 5), (192, 2, 3),
    ]  # fmt: skip
    assert 'nano.report.md' in capsys.readouterr().out
    assert tool.main(command) == 2
    assert 'exists; remove it' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--out', 'model.onnx'], 'broken.pth is not a complete checkpoint'),
        (['--out', 'model.pt'], 'must end in .onnx'),
        (['--out', 'model.onnx', '--format', 'torch'], 'must end in .pt2'),
        (['--out', 'model.onnx', '--size', '800'], '--size must be HEIGHTxWIDTH'),
        (['--out', 'model.onnx', '--raw'], '--raw needs a detector'),
        (['--out', 'model.onnx', '--probabilities'], '--probabilities needs a segmentor'),
        (['--out', 'model.onnx', '--images', 'nothing.jpg'], 'no image or folder at nothing.jpg'),
    ],
    ids=str,
)
def test_refusals(options, message, weights, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path('broken.pth').write_bytes(b'not a checkpoint')
    checkpoint = 'broken.pth' if message.startswith('broken.pth') else weights
    assert tool.main(['pcpvt_nano', checkpoint, *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert {path.name for path in tmp_path.iterdir()} == {'weights.pth', 'broken.pth'}
