"""The page about torchvision's detectors, and the example that trains one."""

import re
import runpy
import sys
from pathlib import Path

import torch
from support import ROOT

from cpvt_pyramid import CPVTPyramid


def test_the_page_about_torchvision(tmp_path, monkeypatch):
    """Its code, with the smallest backbone and small images."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / 'docs/torchvision.md').read_text().replace('pcpvt_small', 'pcpvt_nano')
    (first,) = re.findall(r'```python\n(.*?)```', page, re.S)
    torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'pcpvt_nano.pth')
    monkeypatch.setattr(
        'cpvt_pyramid.checkpoints.downloads.from_hub', lambda *_: Path('pcpvt_nano.pth')
    )
    target = dict(boxes=torch.tensor([[2.0, 3, 40, 50]]), labels=torch.tensor([1]))
    names = dict(images=[torch.rand(3, 60, 70), torch.rand(3, 70, 50)], targets=[target] * 2)
    small = 'num_classes=10, out_channels=16, head_convs=1, min_size=40, max_size=50'
    exec(first.replace('num_classes=10', small), names)
    assert set(names['losses']) == {'classification', 'bbox_regression'}
    assert set(names['predictions'][1]) == {'boxes', 'scores', 'labels'}


def test_the_example_trains_and_evaluates(sample_dataset, tmp_path, monkeypatch, capsys):
    path, root = str(ROOT / 'examples/torchvision_detection.py'), str(sample_dataset / 'coco')
    out = tmp_path / 'model.pth'
    arguments = [path, '--data', root, '--splits', 'train2017', 'val2017']
    arguments += ['--steps', '1', '--out', str(out)]
    monkeypatch.setattr(sys, 'argv', arguments)
    runpy.run_path(path, run_name='__main__')
    assert 'no boxes found' in capsys.readouterr().out
    assert out.is_file()

    example = runpy.run_path(path)
    data = example['CocoFolder'](root, 'val2017')
    answers = (
        target | dict(scores=torch.ones(len(target['boxes'])))
        for _, target in (data[i] for i in range(len(data)))
    )
    example['evaluate'](lambda images: [next(answers) for _ in images], data)
    assert 'area=   all | maxDets=100 ] = 1.000' in capsys.readouterr().out
