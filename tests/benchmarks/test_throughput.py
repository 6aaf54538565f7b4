"""The benchmark of images per second: its arithmetic, and its commands on tiny images."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image
from support import ROOT

from benchmarks import throughput as tool

RETINANET = str(ROOT / 'configs/demo/pages_retinanet_cpvt_nano.py')


@pytest.fixture
def photographs(tmp_path) -> Path:
    folder = tmp_path / 'photographs'
    folder.mkdir()
    for i in range(3):
        image = Image.effect_noise((90 + 40 * i, 100), 80).convert('RGB')
        image.save(folder / f'{i}.jpg')
    return folder


def test_rates(photographs, tmp_path, monkeypatch, capsys):
    """The commands take turns, with and without pictures."""
    took = {'mm': 8, 'infer': 4, 'openvino': 2}
    commands = []

    def run(command, work, cores, images):
        name, pictures = command
        assert images == (0 if name == 'mm' and not pictures else 5)
        commands.append(command)
        return took[name] / (1 if pictures else 2) + 0.001 * len(commands)

    def command_line(name, work, folder, threshold, pictures, against):
        assert len(list(folder.iterdir())) == 5
        return name, pictures

    monkeypatch.setattr(tool, 'prepare', lambda *_: '0.3')
    monkeypatch.setattr(tool, 'command_line', command_line)
    monkeypatch.setattr(tool, 'run', run)
    options = ['--commands', *took, '--images', str(photographs), '--cores', '1', '--rounds', '2']
    options += ['--count', '5', '--folder', str(tmp_path / 'work')]
    assert tool.main([RETINANET, *options, '--json', str(tmp_path / 'runs.json')]) == 0
    assert commands == [(name, pictures) for pictures in (True, False) for name in took] * 2
    runs = json.loads((tmp_path / 'runs.json').read_text())
    assert [run['seconds'] for run in runs] == pytest.approx([8, 4, 2, 4, 2, 1] * 2, abs=0.02)
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines()[-7:])
    assert head == ['cores', 'command', 'pictures', 'seconds', 'images/s', 'x', 'mm']
    assert [row[:3] for row in rows[2:4]] == [['1', 'openvino', 'yes'], ['1', 'mm', 'no']]
    assert [float(row[4]) for row in rows] == pytest.approx(
        [0.62, 1.25, 2.5] + [1.25, 2.5, 5], abs=0.05
    )
    assert [float(row[5]) for row in rows] == pytest.approx([1, 2, 4] * 2, abs=0.05)


def test_commands(photographs, tmp_path, monkeypatch):
    """mmdetection's inferencer with the backbone of mmsegmentation, and a runtime."""
    work = tmp_path / 'work'
    work.mkdir()
    threshold = tool.prepare(RETINANET, work, photographs / '0.jpg', exported=False)
    assert 0 < float(threshold) < 1
    shutil.copy(ROOT / 'examples/trees.onnx', work / 'model.onnx')
    monkeypatch.chdir(tmp_path)  # the default folder is relative
    folder = tool.link(sorted(Path('photographs').iterdir()), 4, work)
    assert (folder / '0003.jpg').resolve() == photographs / '0.jpg'
    for pictures in (True, False):
        command = tool.command_line('onnxruntime', work, folder, threshold, pictures, None)
        assert tool.run(command, work, 1, 4) > 0
        assert any((work / 'results').glob('*.jpg')) == pictures
    with pytest.raises(tool.UserError, match='wrote results of 4 of 5'):
        tool.run(command, work, 1, 5)
    # In this process, which has imported mm.
    shutil.rmtree(work / 'results')
    for pictures, expected in ((False, 0), (True, 4)):
        command = tool.command_line('mm', work, folder, threshold, pictures, None)
        _, _, code, *arguments = map(str, command)
        monkeypatch.setattr(sys, 'argv', ['-c', *arguments])
        exec(code, {})
        assert tool.count_results(work / 'results') == expected
