"""The example that trains one of torchvision's detectors."""

import runpy
import sys

import torch
from support import ROOT

from cpvt_pyramid.tasks.trained import TRAINED, build_trained


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


def test_the_example_starts_from_a_trained_model(sample_dataset, tmp_path, monkeypatch, capsys):
    """All but the layer that classifies, from a file as it would be downloaded."""
    name = 'retinanet_pvt_v2_b0_coco'
    file, out = tmp_path / 'coco.pth', tmp_path / 'model.pth'
    before = build_trained(TRAINED[name]).state_dict()
    torch.save({'state_dict': before}, file)
    arguments = ['x.py', '--data', str(sample_dataset / 'coco'), '--splits', 'train2017', 'val2017']
    arguments += ['--trained', name, str(file), '--side', '64', '--batch-size', '2']
    arguments += ['--steps', '1', '--out', str(out)]
    monkeypatch.setattr(sys, 'argv', arguments)
    runpy.run_path(str(ROOT / 'examples/torchvision_detection.py'), run_name='__main__')
    after = torch.load(out)
    changed = {key for key in before if before[key].shape != after[key].shape}
    assert changed == {f'head.classification_head.cls_logits.{x}' for x in ('weight', 'bias')}
    stem = 'backbone.body.patch_embeds.0.proj.weight'
    assert 0 < (before[stem] - after[stem]).abs().max() < 0.01
