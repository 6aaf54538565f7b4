"""Post-processing finds what mm's finds."""

import copy
from functools import partial
from math import nan
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.structures import DetDataSample
from mmengine.dataset import pseudo_collate
from mmengine.registry import METRICS
from mmengine.structures import BaseDataElement
from mmseg.evaluation import IoUMetric
from mmseg.models import EncoderDecoder, FPNHead
from mmseg.structures import SegDataSample
from models.small import mask_rcnn
from support import load_tool
from torch import nn

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.export.possible_classes import possible_classes
from cpvt_pyramid.predict.openmmlab.models import build_model
from cpvt_pyramid.predict.openmmlab.postprocessing import (
    Unresized,
    best_labels,
    skip_class_scores,
    skip_masks,
)

test_tool = load_tool('test')


def predictions(model: nn.Module, Sample: type, size: tuple, **meta: object) -> list:
    """For three images of a size and their `metainfo`, those of odd indices flipped."""
    meta = {'img_shape': size, 'pad_shape': size, 'scale_factor': (1.0, 1.0), **meta}
    flips = [{'flip': True, 'flip_direction': 'vertical'} if i == 1 else {} for i in range(3)]
    noise = torch.randint(256, (3, 3, *size), generator=torch.Generator().manual_seed(1))
    samples = [Sample(metainfo=meta | flip) for flip in flips]
    data = [{'inputs': x.byte(), 'data_samples': y} for x, y in zip(noise, samples)]
    with torch.no_grad():
        return model.test_step(pseudo_collate(data))


def segmentor(configs: dict, **options: object) -> EncoderDecoder:
    cfg = load_config(configs['segmentor'])
    cfg.merge_from_dict({f'model.{name}': value for name, value in options.items()})
    model = build_model(cfg, 'cpu')
    nn.init.normal_(model.decode_head.conv_seg.weight, std=0.3)
    return model


def assert_same_labels(
    model: EncoderDecoder, as_in_mm: EncoderDecoder, skipped: bool = True
) -> None:
    for size, original in (((96, 127), (200, 311)), ((64, 64), (64, 64)), ((65, 97), (50, 31))):
        found, expected = (
            predictions(each, SegDataSample, size, ori_shape=original) for each in (model, as_in_mm)
        )
        for x, y in zip(found, expected):
            assert 'seg_logits' in y and ('seg_logits' in x) is not skipped
            torch.testing.assert_close(x.pred_sem_seg.data, y.pred_sem_seg.data, rtol=0, atol=0)
            assert len(y.pred_sem_seg.data.unique()) > 2


OPTIONS = {
    'whole': {},
    'aligned corners': {'decode_head.align_corners': True},
    'padded': {'data_preprocessor.test_cfg.size_divisor': 128},
    'slide': {'test_cfg': {'mode': 'slide', 'crop_size': (64, 64), 'stride': (48, 48)}},
}


@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS.keys())
def test_labels(configs, options):
    as_in_mm = segmentor(configs, **options)
    model = copy.deepcopy(as_in_mm)
    skip_class_scores(model)
    assert_same_labels(model, as_in_mm)


def test_classes_that_are_best_nowhere_are_left_out():
    model, left_out = SimpleNamespace(align_corners=False), 0
    for _ in range(100):
        h, w, *sizes = torch.randint(1, 14, (6,)).tolist()
        first, last = (sizes[0] + h // 2, sizes[1] + w), (3 * sizes[2], sizes[3])
        scores = torch.randn(1, 20, h, w) + 2 * torch.randn(1, 20, 1, 1)
        resize = partial(F.interpolate, size=first, mode='bilinear')
        sample = SegDataSample(metainfo={'ori_shape': last})
        best_labels(model, None, Unresized(scores, resize), [sample])
        labels = F.interpolate(resize(scores), last, mode='bilinear').argmax(1)
        assert torch.equal(sample.pred_sem_seg.data, labels)
        left_out += 20 - int(possible_classes(scores).sum())
    assert left_out > 500
    sample = SegDataSample(metainfo={'ori_shape': (4, 4)})
    for score in (0.0, nan):  # of equal scores the first is best
        best_labels(model, None, torch.full((1, 3, 4, 4), score), [sample])
        assert not sample.pred_sem_seg.data.any()


class Sharpened(FPNHead):
    def predict_by_feat(self, *args: object) -> torch.Tensor:
        return super().predict_by_feat(*args).softmax(1) - 0.5


class Masked(EncoderDecoder):
    def postprocess_result(self, *args: object) -> list:
        samples = super().postprocess_result(*args)
        for sample in samples:
            sample.pred_sem_seg.data[:, ::2] = 0
        return samples


@pytest.mark.parametrize('kind', [Sharpened, Masked])
def test_overridden_methods_are_left_alone(configs, kind):
    as_in_mm = segmentor(configs)
    (as_in_mm if kind is Masked else as_in_mm.decode_head).__class__ = kind
    model = copy.deepcopy(as_in_mm)
    skip_class_scores(model)
    assert_same_labels(model, as_in_mm, skipped=kind is Sharpened)


class ReadsScores(IoUMetric):
    def process(self, data_batch: dict, data_samples: list) -> None:
        assert all(sample['seg_logits']['data'].shape[0] == 11 for sample in data_samples)
        super().process(data_batch, data_samples)


def test_a_metric_of_the_user_gets_the_scores(untrained, monkeypatch):
    monkeypatch.setitem(METRICS.module_dict, 'ReadsScores', ReadsScores)
    metric = 'test_evaluator.type=ReadsScores'
    assert test_tool.main([*untrained['segmentor'], '--cfg-options', metric]) == 0


class ScoresMasks(StandardRoIHead):
    def predict_mask(self, *args: object, **options: object) -> list[BaseDataElement]:
        found = super().predict_mask(*args, **options)
        for each in found:
            each.scores += 1
        return found


def test_masks_of_boxes_with_a_low_score_are_not_computed():
    as_in_mm = mask_rcnn().eval()
    model = copy.deepcopy(as_in_mm)
    skip_masks(model)
    sizes = {'ori_shape': (173, 259), 'batch_input_shape': (96, 128)}
    expected = predictions(as_in_mm, DetDataSample, (96, 128), **sizes)
    scores = torch.cat([sample.pred_instances.scores for sample in expected]).sort().values
    for threshold in (0, scores[len(scores) // 2].item(), 2):
        found = predictions(model, DetDataSample, (96, 128), score_thr=threshold, **sizes)
        for x, y in zip(found, expected):
            x, y = x.pred_instances, y.pred_instances[y.pred_instances.scores >= threshold]
            for name in ('bboxes', 'scores', 'labels'):
                torch.testing.assert_close(x[name], y[name], rtol=0, atol=0)
            assert x.masks.shape == (len(y), *sizes['ori_shape'])
            assert (x.masks != y.masks).sum() < 1e-4 * y.masks.numel() + 1
    assert y.masks.numel() == 0

    as_in_mm.roi_head.__class__ = ScoresMasks
    skip_masks(as_in_mm)
    found = predictions(as_in_mm, DetDataSample, (96, 128), score_thr=2, **sizes)
    assert [len(x.pred_instances) for x in found] == [len(y.pred_instances) for y in expected]
