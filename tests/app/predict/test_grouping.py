"""Batches in which no image is padded by another: an image's results are those that it has alone.

Results are compared with a tolerance for rounding, because a matrix product of a batch is rounded
otherwise than one of an image. Families are those of tests/models/families.py that
drift in padded batches.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseDataPreprocessor, BaseTTAModel
from mmengine.registry import MODEL_WRAPPERS
from support import photograph
from torch import nn

from cpvt_pyramid.app.predict.openmmlab import model as model_module
from cpvt_pyramid.app.predict.openmmlab.grouping import divide_batches, size_in_batch
from cpvt_pyramid.app.predict.openmmlab.model import OpenMMLabModel
from cpvt_pyramid.app.predictions.kinds import Detections, Prediction
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.padding.batching import map_in_batches
from tests.models.families import CLASSES, FAMILIES, build
from tests.models.samples import random_data
from tests.models.small import retinanet

# Deformable convolution, coordinates of the padded batch, and attention without a mask.
DETECTORS = ('VFNet', 'DyHead', 'SOLO', 'Mask2Former')
SEGMENTORS = ('DANet', 'CCNet', 'ANN')
# Heights and widths. For detectors the fourth is padded to the size of the first.
SIZES = ((75, 128), (130, 180), (64, 90), (90, 120), (130, 180), (64, 90), (75, 128))
IMAGES = [photograph(*size, seed=i)[..., ::-1] for i, size in enumerate(SIZES)]


def predictor(name: str) -> OpenMMLabModel:
    family = FAMILIES[name]
    scope, pack = 'mmseg', 'PackSegInputs'
    if family.config.startswith('mmdet'):
        scope, pack = 'mmdet', 'PackDetInputs'
    resize = dict(type='Resize', scale_factor=1.0, keep_ratio=True)
    pipeline = [dict(type='LoadImageFromFile'), resize, dict(type=pack)]
    loader = dict(dataset=dict(pipeline=pipeline))
    cfg = Config(dict(default_scope=scope, test_dataloader=loader))
    meta = dict(classes=[str(i) for i in range(CLASSES)], palette=None)
    return OpenMMLabModel(build(family), cfg, meta, 0.0)


def predictions(ready: OpenMMLabModel, batch_size: int) -> list[Prediction]:
    prepared = [ready.prepare(image) for image in IMAGES]
    return list(map_in_batches(ready.predict, prepared, lambda x: x.padded_size, batch_size))


def assert_same(found: Prediction, alone: Prediction) -> None:
    if isinstance(found, Detections):
        assert len(found)
        found, alone = by_class(found), by_class(alone)
    np.testing.assert_array_equal(found.labels, alone.labels)
    if isinstance(found, Detections):
        np.testing.assert_allclose(found.scores, alone.scores, atol=1e-4)
        np.testing.assert_allclose(found.boxes, alone.boxes, atol=1e-2)
        if found.masks is not None:
            assert (found.masks == alone.masks).mean() > 0.9999
    else:
        assert len(np.unique(found.labels)) > 1


def by_class(found: Detections) -> Detections:
    """Objects of two classes whose scores differ by rounding can come in another order."""
    return found[np.lexsort([-found.scores, found.labels])]


@pytest.mark.parametrize('name', [*DETECTORS, *SEGMENTORS])
def test_results_in_batches_are_those_alone(name, monkeypatch):
    """And are not if all images count as equally large, which mmseg refuses."""
    ready = predictor(name)
    alone = predictions(ready, 1)
    for found, expected in zip(predictions(ready, 4), alone):
        assert_same(found, expected)
    monkeypatch.setattr(model_module, 'size_in_batch', lambda model, image: None)
    with pytest.raises((AssertionError, UserError), match='should be the same|not equal'):
        for found, expected in zip(predictions(ready, 4), alone):
            assert_same(found, expected)


def boxes(step: Callable, batch: dict) -> list[np.ndarray]:
    with torch.no_grad():
        samples = step(batch)
    return [sample.pred_instances.bboxes.numpy() for sample in samples]


def test_a_batch_of_a_test_is_divided():
    """Scores are high everywhere, so that cells in the padding are among the candidates."""
    model = retinanet()
    model.bbox_head.retina_cls.bias.data.fill_(4.0)
    model.test_cfg.update(score_thr=0.05, nms_pre=100)
    data = random_data(False, [(75, 128), (256, 320), (64, 90), (90, 120)])
    alone = []
    for image, sample in zip(data['inputs'], data['data_samples']):
        alone += boxes(model.test_step, dict(inputs=[image], data_samples=[sample]))
    assert max(np.abs(a - b).max() for a, b in zip(boxes(model.test_step, data), alone)) > 10
    divide_batches(model)
    for step in (model.test_step, model.val_step):
        for found, expected in zip(boxes(step, data), alone):
            assert len(found)
            np.testing.assert_allclose(found, expected, atol=1e-2)


class Merged(BaseTTAModel):
    def merge_preds(self, data_samples_list: list) -> list:
        return data_samples_list


def test_batches_of_augmentations_are_divided():
    """The model for test-time augmentation passes them on. Stacked images have one size."""

    model, batches = retinanet(), []

    def test_step(data: dict) -> list:
        batches.append([tuple(image.shape[1:]) for image in data['inputs']])
        return list(data['inputs'])

    model.test_step = test_step
    merged = Merged(model)
    divide_batches(merged)
    first, second, third = (torch.ones(3, *size) for size in ((64, 96), (50, 96), (32, 64)))
    results = merged.test_step(dict(inputs=[(first, third, second), [third] * 3]))
    for found, expected in zip(results, [(first, third), (third, third), (second, third)]):
        assert all(a is b for a, b in zip(found, expected))
    assert batches == [[(64, 96), (50, 96)], [(32, 64)], [(32, 64)] * 3]
    assert len(model.test_step(dict(inputs=torch.ones(2, 3, 64, 96)))) == 2


def test_a_wrapper_of_a_model_for_augmentation(monkeypatch):
    """As mmengine's, where several processes share a test."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setitem(MODEL_WRAPPERS.module_dict, 'Wrapper', Wrapper)
    model = retinanet()
    divide_batches(Wrapper(Merged(model)))
    assert 'test_step' in vars(model)


def test_what_other_data_preprocessors_pad_is_not_known():
    """A setting of the same name may be for the training, as mmseg's is."""

    class Preprocessor(BaseDataPreprocessor):
        pad_size_divisor = 32

    model = retinanet()
    assert size_in_batch(model, torch.ones(3, 75, 90)) == (96, 96)
    model.data_preprocessor = Preprocessor()
    assert size_in_batch(model, torch.ones(3, 75, 90)) == (75, 90)


def test_what_a_data_loader_gives_besides(monkeypatch):
    """Values for each image are divided, others cannot be."""
    model, batches = retinanet(), []

    def test_step(data: dict) -> list:
        batches.append(data.get('names'))
        return list(data['inputs'])

    monkeypatch.setattr(model, 'test_step', test_step)
    divide_batches(model)
    images = [torch.ones(3, *size) for size in ((64, 96), (32, 64), (64, 96))]
    found = model.test_step(dict(inputs=images, names=['a', 'b', 'c']))
    assert all(a is b for a, b in zip(found, images)) and batches == [['a', 'c'], ['b']]
    transposed = dict(inputs=images, scales=[[1.0] * 3, [2.0] * 3])  # pairs, collated by mmengine
    with pytest.raises(ValueError, match='needs a list of 3 values as its scales'):
        model.test_step(transposed)
    assert len(model.test_step({**transposed, 'inputs': images[:1] * 2})) == 2


def test_models_that_return_other_than_a_result_for_each_image(monkeypatch):
    """As mmdet's TridentNet with all of its branches does, which merges those of several images."""
    ready = predictor('SOLO')
    test_step = ready.model.test_step
    monkeypatch.setattr(ready.model, 'test_step', lambda data: test_step(data) * 3)
    with pytest.raises(UserError, match='returned 3 results for a batch of 1'):
        predictions(ready, 1)
    divide_batches(ready.model)
    image = ready.prepare(IMAGES[0]).data
    with pytest.raises(ValueError, match='a batch of 1 needs as many results, got 3'):
        ready.model.test_step(dict(inputs=[image['inputs']], data_samples=[image['data_samples']]))
