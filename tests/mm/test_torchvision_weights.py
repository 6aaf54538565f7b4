"""The example that trains one of torchvision's detectors."""

import runpy
import sys

import torch
from support import ROOT


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
