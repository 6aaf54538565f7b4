"""The benchmark of images per second: its arithmetic, and its commands on tiny images."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image
from support import ROOT

from benchmarks import throughput as tool

RETINANET = str(ROOT / 'configs/demo/retinanet_cpvt_nano.py')


@pytest.fixture
def photographs(tmp_path) -> Path:
    folder = tmp_path / 'photographs'
    folder.mkdir()
    for i in range(3):
        image = Image.effect_noise((90 + 40 * i, 100), 80).convert('RGB')
        image.save(folder / f'{i}.jpg')
    return folder


def test_starts_and_rates(photographs, tmp_path, monkeypatch, capsys):
    """The commands take turns; a start is what does not grow with the folder."""
    took = {'mm': (5, 2), 'infer': (4, 0.5), 'openvino': (1, 0.25)}
    commands = []

    def run(command, work, cores, images):
        commands.append(command)
        start, each = took[command]
        return start + each * images + 0.01 * len(commands)

    monkeypatch.setattr(tool, 'prepare', lambda *_: '0.3')
    monkeypatch.setattr(tool, 'command_line', lambda name, *_: name)
    monkeypatch.setattr(tool, 'run', run)
    options = ['--commands', *took, '--images', str(photographs), '--cores', '1', '--rounds', '2']
    folder = ['--folder', str(tmp_path / 'work'), '--json', str(tmp_path / 'runs.json')]
    assert tool.main([RETINANET, *options, *folder]) == 0
    assert commands == [name for name in took for _ in range(2)] * 2
    runs = json.loads((tmp_path / 'runs.json').read_text())
    assert [run['each'] for run in runs] == pytest.approx([2, 0.5, 0.25] * 2, abs=0.01)
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines()[-4:])
    assert head[:3] == ['cores', 'command', 'start']
    assert [float(row[2]) for row in rows] == pytest.approx([5, 4, 1], abs=0.15)
    assert [float(row[4]) for row in rows] == pytest.approx([1, 4, 8], abs=0.1)


def test_commands(photographs, tmp_path, monkeypatch):
    """mmdetection's inferencer with the backbone of mmsegmentation, and a runtime."""
    work = tmp_path / 'work'
    work.mkdir()
    threshold = tool.prepare(RETINANET, work, photographs / '0.jpg', exported=False)
    assert 0 < float(threshold) < 1
    shutil.copy(ROOT / 'examples/digits-detection.onnx', work / 'model.onnx')
    monkeypatch.chdir(tmp_path)  # the default folder is relative
    folder = tool.link(sorted(Path('photographs').iterdir()), 4, work)
    assert (folder / '0003.jpg').resolve() == photographs / '0.jpg'
    command = tool.command_line('onnxruntime', work, folder, threshold, None)
    assert tool.run(command, work, 1, 4) > 0
    with pytest.raises(tool.UserError, match='wrote 4 of 5 pictures'):
        tool.run(command, work, 1, 5)
    # In this process, which has imported mm.
    _, _, code, *arguments = map(str, tool.command_line('mm', work, folder, threshold, None))
    monkeypatch.setattr(sys, 'argv', ['-c', *arguments])
    exec(code, {})
    assert len(list((work / 'results/vis').iterdir())) == 4
