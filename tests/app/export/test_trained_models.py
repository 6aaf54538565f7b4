"""Trained models by name are exported from PyTorch, without OpenMMLab."""

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from support import ROOT, run
from torch import nn

from cpvt_pyramid import Arch, CPVTPyramid
from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.export import verification
from cpvt_pyramid.app.export.accuracy import agreement_of
from cpvt_pyramid.app.export.base import Exportable, Settings
from cpvt_pyramid.app.export.models import exportable
from cpvt_pyramid.app.export.self_test import draw
from cpvt_pyramid.app.export.verification import verify
from cpvt_pyramid.app.predict import Predictor
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.tasks import trained
from cpvt_pyramid.tasks.trained import CLASSES, TRAINED, Trained
from tests.models.patches import Patches
from tests.models.ports import randomize

DETECTOR, SEGMENTOR = 'retinanet_pvt_v2_b0_coco', 'segformer_b0_ade20k'
WINDOWED = 'segformer_b0_cityscapes'
NAMES = (DETECTOR, 'semantic_fpn_cpvt_s_ade20k', 'upernet_cpvt_s_ade20k', SEGMENTOR, WINDOWED)
SIZE = 64, 96
BATCHES = [SIZE], [(75, 131)], [(33, 47)], [(64, 50)] * 2
IMAGES = [draw(seed, 80, 120) for seed in range(2)]
NARROW = {
    'retinanet': {'out_channels': 16, 'head_convs': 1},
    'semantic_fpn': {'channels': 16, 'fpn_channels': 16},
    'upernet': {'channels': 16, 'auxiliary_channels': 16},
    'segformer': {'channels': 16},
}
build_trained = trained.build_trained


def build_small(row: Trained, **_: object) -> nn.Module:
    """The model of a row, with few channels and a backbone that is captured in no time."""
    module = import_module(f'cpvt_pyramid.tasks.{"detectors" if row.detects else "segmentors"}')
    narrow = partial(getattr(module, row.head), **NARROW[row.head])
    with mock.patch.object(module, row.head, narrow):
        model = build_trained(row._replace(arch='pcpvt_nano'))
    whole = model.backbone if row.detects else model
    name = 'body' if row.detects else 'backbone'
    setattr(whole, name, Patches(getattr(whole, name)))
    return model


def small(name: str) -> nn.Module:
    """The model of a name, small and with random weights."""
    torch.manual_seed(0)
    return randomize(build_small(TRAINED[name]), seed=1).eval()


@pytest.fixture(autouse=True)
def _quick_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_quickly(monkeypatch)


def compare_quickly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verification, 'BATCHES', BATCHES)


def test_narrow_images_without_borders(tmp_path):
    """onnxruntime keeps a map that is less than a patch of keys, as PyTorch does."""
    arch = Arch((32,), (1,), (2,), (1,), sr_ratios=(8,))
    model = randomize(CPVTPyramid(arch, out_indices=(0,), drop_border=True)).eval()
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    example = torch.randn(2, 3, 75, 90)
    path = tmp_path / 'backbone.onnx'
    with torch.no_grad():
        torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=(sizes,)).save(path)
        session = onnxruntime.InferenceSession(path)
        for size in [(9, 129), (31, 64), (1, 300), (100, 33)]:
            image = torch.randn(1, 3, *size)
            (found,) = session.run(None, {'image': image.numpy()})
            torch.testing.assert_close(torch.from_numpy(found), model(image)[0], rtol=0, atol=1e-4)


def differences(model: Exportable, settings: Settings) -> set[str]:
    """The stages in which a graph, run in PyTorch, differs from what the model predicts."""

    def run_in_pytorch(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return verification.stages_of(model, inputs)

    checks = verify(model, {'': run_in_pytorch}, IMAGES, settings)
    outputs = {'boxes'} if model.task == 'detection' else {*model.output_names}
    assert outputs <= {check.stage for check in checks}
    return {check.stage for check in checks if not check.passed}


@pytest.mark.parametrize('settings', [Settings(), Settings(SIZE), Settings(SIZE, has_valid=False)])
@pytest.mark.parametrize('name', NAMES)
def test_graphs_give_what_the_models_predict(name, settings):
    if name == WINDOWED and settings.size is None:
        return
    model = small(name)
    assert not differences(exportable(model), settings)
    if not TRAINED[name].detects:
        assert not differences(exportable(model, probabilities=True), settings)


@pytest.mark.parametrize('part', ['head.regression_head', 'backbone.fpn', 'box_coder'])
def test_a_wrong_detector_is_found(part):
    """The graph, whose reference is the right model."""
    right, wrong = exportable(small(DETECTOR)), exportable(small(DETECTOR))
    if part == 'box_coder':
        wrong.model.box_coder.weights = (1.0, 1.0, 1.1, 1.0)
    else:
        next(wrong.model.get_submodule(part).parameters()).data.mul_(1.1)
    wrong.reference = right.reference
    assert differences(wrong, Settings())


def test_windows_are_exported_one_by_one():
    graph = exportable(small(WINDOWED), probabilities=True)
    for size in (None, (1024, 2048)):
        with pytest.raises(UserError, match='windows of 1024 x 1024 .* --size 1024x1024 .*--tile'):
            graph.check(Settings(size))
    graph.check(Settings((1024, 1024)))
    graph.check(Settings(SIZE))
    exportable(small(SEGMENTOR)).check(Settings())


def test_a_detector_has_no_probabilities():
    with pytest.raises(UserError, match='--probabilities needs a segmentor'):
        exportable(small(DETECTOR), probabilities=True)


def export_and_predict(name: str) -> None:
    """Export a name with its weights in this folder, and compare predictions with the model's."""
    weights, exported = f'{name}.pth', f'{name}.onnx'
    patch = pytest.MonkeyPatch()
    patch.setattr(trained, 'build_trained', build_small)
    compare_quickly(patch)
    patch.setattr(verification, 'BATCHES', BATCHES[1:2])
    assert main(['export', name, weights, '--out', exported, '--images', 'photo.png']) == 0
    expected = Predictor(name, weights, shorter_side=97)('photo.png')
    found = Predictor(exported, shorter_side=97)('photo.png')
    assert list(found.classes) == list(expected.classes) == CLASSES[TRAINED[name].data]
    assert agreement_of(found, expected).share > 0.99


# A process in which OpenMMLab cannot be imported and, until a detector is exported, torchvision.
REFUSING_IMPORTS = """
import sys
detector, segmentor = sys.argv[1:]
refused = 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'torchvision'
sys.modules.update(dict.fromkeys(refused))
from tests.app.export.test_trained_models import export_and_predict
export_and_predict(segmentor)
del sys.modules['torchvision']
export_and_predict(detector)
"""


def test_by_name_where_openmmlab_is_not_installed(tmp_path, monkeypatch):
    """A segmentor also without torchvision."""
    monkeypatch.chdir(tmp_path)
    for name in (DETECTOR, SEGMENTOR):
        torch.save({'state_dict': small(name).state_dict()}, f'{name}.pth')
    Image.fromarray(draw(0, 80, 120)).save('photo.png')
    paths = [str(ROOT), str(ROOT / 'tests'), os.environ.get('PYTHONPATH', '')]
    command = [sys.executable, '-c', REFUSING_IMPORTS, DETECTOR, SEGMENTOR]
    done = run(*command, PYTHONPATH=os.pathsep.join(paths))
    assert done.returncode == 0, done.stderr[-3000:]
    for name in (DETECTOR, SEGMENTOR):
        report = Path(f'{name}.report.md').read_text()
        assert ' onnxruntime ' in report and ' openvino ' in report


@pytest.mark.parametrize(
    'options, line',
    [
        (['--cfg-options', 'a=1'], f'--cfg-options needs a config; {DETECTOR} is a trained model'),
        (['--backbone'], f'{DETECTOR} by cpvt export pvt_v2_b0 nothing.pth'),
        ([], 'nothing.pth'),
    ],
)
def test_what_a_name_does_not_take(options, line, tmp_path, capsys):
    command = ['export', DETECTOR, 'nothing.pth', '--out', str(tmp_path / 'model.onnx'), *options]
    assert main(command) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith('cpvt export: ') and line in error
