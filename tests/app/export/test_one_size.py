"""Files of one size, on images that are smaller, equal and larger, with and without `valid`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from support import ROOT
from tiny_onnx import write_model
from torch import nn

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.app.commands import export as export_tool
from cpvt_pyramid.app.commands import verify as verify_tool
from cpvt_pyramid.app.export import self_test, verification
from cpvt_pyramid.app.export.base import Batch, Exportable, Settings
from cpvt_pyramid.app.export.models import exportable
from cpvt_pyramid.app.export.segmentors import PixelClassifier
from cpvt_pyramid.app.export.self_test import draw
from cpvt_pyramid.app.export.verification import verify
from cpvt_pyramid.app.predict import Predictor
from cpvt_pyramid.app.predict.openmmlab.loading import build_model
from cpvt_pyramid.app.predict.openmmlab.samples import data_sample
from cpvt_pyramid.app.predict.sessions import padded_inputs
from cpvt_pyramid.archs import Arch
from tests.models.patches import Patches
from tests.models.ports import randomize
from tests.models.small import (
    dino,
    mask2former_detector,
    mask2former_segmentor,
    mask_rcnn,
    retinanet,
    semantic_fpn,
    upernet,
)

SIZE = 64, 96
IMAGES = [draw(seed, 80, 120) for seed in range(2)]


def run_in_pytorch(model: Exportable) -> Callable:
    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return verification.stages_of(model, inputs)

    return run


def differences(model: Exportable, has_valid: bool = True) -> set[str]:
    """The stages in which a graph of one size differs from OpenMMLab's results."""
    settings = Settings(SIZE, has_valid=has_valid)
    checks = verify(model, {'': run_in_pytorch(model)}, IMAGES, settings)
    sizes = {size for check in checks for size in check.sizes}
    assert {'64x96', '43x89'} <= sizes and ('64x48' in sizes) == has_valid
    return {check.stage for check in checks if not check.passed}


KINDS = {
    'RetinaNet': retinanet,
    'Mask R-CNN': lambda: mask_rcnn(1),
    'DINO': dino,
    'Mask2Former': lambda: mask2former_detector(1),
    'Semantic FPN': semantic_fpn,
    'UPerNet': upernet,
    'Mask2Former of segments': lambda: mask2former_segmentor(1),
}


def exported(name: str, probabilities: bool = False) -> Exportable:
    model = exportable(KINDS[name](), probabilities=probabilities).eval()
    model.model.backbone = randomize(Patches(model.model.backbone), seed=2)
    return model


@pytest.mark.parametrize('has_valid', [True, False])
@pytest.mark.parametrize('name', KINDS)
def test_smaller_images_have_the_results_of_openmmlab(name, has_valid):
    """In a batch with an image of that size or, without `valid`, with the padding as image."""
    assert not differences(exported(name), has_valid)
    if name in ('Semantic FPN', 'Mask2Former of segments'):
        assert not differences(exported(name, probabilities=True), has_valid)


def squeezed(self: PixelClassifier, batch: Batch, *rest: object) -> list:
    """The padded map resized to the original image, as if all of it were image."""
    return resizing(self, batch._replace(valid=None), *rest)


def input_squeezed(images: list, shapes: dict, originals: list) -> dict[str, np.ndarray]:
    """What files without `valid` got: the sizes of the originals, not enlarged by the padding."""
    inputs = padded_inputs(images, shapes, originals)
    if 'original' in inputs:
        inputs['original'][: len(images)] = originals
    return inputs


resizing = PixelClassifier.resizing


def test_a_squeezed_mask_is_found(monkeypatch):
    """98 % of the labels were wrong, and passed."""
    model = exported('Semantic FPN')
    with monkeypatch.context() as patch:
        patch.setattr(PixelClassifier, 'resizing', squeezed)
        assert differences(model) == {'labels'}
    monkeypatch.setattr(verification, 'padded_inputs', input_squeezed)
    assert differences(model, has_valid=False) == {'labels'}


CONFIG = f"""
_base_ = '{ROOT}/configs/semantic_fpn_cpvt_s.py'
model = dict(
    backbone=dict(arch=dict(
        _delete_=True, dims=[8, 16, 32, 32], heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2),
        depths=(1, 1, 1, 1)), out_indices=(3,), init_cfg=None),
    neck=dict(in_channels=[32], out_channels=16, num_outs=1),
    decode_head=dict(
        in_channels=[16], in_index=(0,), feature_strides=[32], channels=16, num_classes=5))
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackSegInputs')]
test_dataloader = dict(
    dataset=dict(metainfo=dict(classes=('a', 'b', 'c', 'd', 'e')), pipeline=test_pipeline))
"""


def build_fast(cfg: Config, device: str) -> nn.Module:
    model = build_model(cfg, device)
    model.backbone = Patches(model.backbone)
    return model


LONG = pytest.mark.foreign  # the others are exported for one size in `test_tool.py`, too


@pytest.mark.parametrize(
    'options',
    [
        ['--no-valid'],
        pytest.param([], marks=LONG),
        pytest.param(['--no-valid', '--probabilities'], marks=LONG),
    ],
    ids=' '.join,
)
def test_a_segmentor_from_the_config_to_its_masks(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('cpvt_pyramid.app.predict.openmmlab.model.build_model', build_fast)
    Path('config.py').write_text(CONFIG)
    model = randomize(build_fast(Config.fromfile('config.py'), 'cpu'), seed=1)
    torch.save(model.state_dict(), 'weights.pth')
    command = ['config.py', 'weights.pth', '--out', 'model.onnx', '--size', '64x96', *options]
    assert export_tool.main(command) == 0, capsys.readouterr().err
    for backend in ('onnxruntime', 'openvino'):
        assert verify_tool.main(['model.onnx', '--backend', backend, '--batch-size', '2']) == 0
        text = capsys.readouterr().out
        assert 'passed, all 4 comparisons with PyTorch' in text and ': passed, an image' in text
    predictor = Predictor('model.onnx', tile=0)
    graph = exportable(model.eval())
    for size in ((64, 96), (40, 96), (43, 31), (128, 192), (100, 300), (200, 60)):
        image = draw(1, *size)
        labels = predictor(image).labels
        assert labels.shape == size
        agreement = (labels == expected_labels(graph, predictor, image, bool(options))).mean()
        assert agreement > (0.95 if size[0] > 64 or size[1] > 96 else 0.999), size
    if options != ['--no-valid']:
        return
    monkeypatch.setattr(self_test, 'padded_inputs', input_squeezed)
    assert verify_tool.main(['model.onnx', '--batch-size', '2']) == 1
    assert 'FAILED, 2 of 4 comparisons with PyTorch' in capsys.readouterr().out


def expected_labels(
    graph: Exportable, predictor: Predictor, image: np.ndarray, padding_is_image: bool
) -> np.ndarray:
    """MMSegmentation's labels of an image on a canvas of the fixed size."""
    small = predictor.model.to_input_size(image)
    pixels = verification.as_tensor(small)
    height, width = small.shape[:2]
    original = torch.tensor([image.shape[:2]])
    with torch.no_grad():
        if not padding_is_image:
            with graph.on_canvas(SIZE):
                return graph.reference(pixels, original)['labels'][0].numpy()
        padded = F.pad(pixels, (0, SIZE[1] - width, 0, SIZE[0] - height))
        logits = graph.model.test_step(
            {
                'inputs': [padded[0].flip(0)],
                'data_samples': [verification_sample(SIZE)],
            }
        )[0].seg_logits.data
        whole = F.interpolate(
            logits[None, :, :height, :width], tuple(image.shape[:2]), mode='bilinear'
        )
    return whole[0].argmax(0).numpy()


def verification_sample(size: tuple[int, int]) -> object:

    return data_sample(True, size)


def test_a_backbone_of_one_size_is_compared_on_smaller_images():
    """Told the true sizes, its maps are those of the image alone; else those with the padding."""
    arch = Arch(dims=(8, 16), depths=(1, 1), heads=(1, 2), mlp_ratios=(2, 2), sr_ratios=(2, 1))
    model = exportable(randomize(CPVTPyramid(arch, out_indices=(0, 1)), seed=1).eval())
    for has_valid in (True, False):
        assert not differences(model, has_valid)


class Fixed:
    """A session of a file of one size that is not told the true sizes."""

    shapes = {'images': [None, 3, *SIZE]}
    names = ['boxes', 'scores', 'labels']

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert inputs.keys() == {'images'} and inputs['images'].shape == (1, 3, *SIZE)
        boxes = [[0, 0, 20, 10], [30, 20, 90, 60], [0, 42, 20, 60], [50, 0, 90, 20]]
        scores = np.array([[0.9, 0.8, 0.7, 0.6]], np.float32)
        labels = np.zeros((1, 4), np.int64)
        return {'boxes': np.array([boxes], np.float32), 'scores': scores, 'labels': labels}


def test_no_box_is_in_the_padding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    predictor = Predictor(write_model('detection', resize=None, score_thr=0.0))
    predictor.model.session = Fixed()
    found = predictor(draw(0, 40, 50))
    assert found.boxes.tolist() == [[0, 0, 20, 10], [30, 20, 50, 40]]
    (tile,) = predictor.model.predict_tiles([draw(0, 40, 50)])
    assert tile.boxes.tolist() == found.boxes.tolist()
    assert len(predictor(draw(0, *SIZE))) == 4
    larger = predictor(draw(0, 80, 100))  # is reduced by 0.8
    assert larger.boxes.tolist() == [
        [0, 0, 25, 12.5],
        [37.5, 25, 100, 75],
        [0, 52.5, 25, 75],
        [62.5, 0, 100, 25],
    ]
