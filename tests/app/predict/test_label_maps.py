"""Label maps and masks are those of mm."""

from functools import partial
from math import nan
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mmdet.structures import DetDataSample
from mmengine.dataset import pseudo_collate
from mmseg.models import EncoderDecoder, FPNHead
from mmseg.structures import SegDataSample
from torch import nn

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.predict.openmmlab.label_maps import predict_labels
from cpvt_pyramid.app.predict.openmmlab.loading import build_model
from cpvt_pyramid.app.predict.openmmlab.model import leave_out_low_scores
from cpvt_pyramid.app.predict.pytorch.best_labels import best_labels
from cpvt_pyramid.app.predict.pytorch.possible_classes import possible_classes
from tests.models.small import mask_rcnn


def predictions(model: nn.Module, Sample: type, size: tuple, **meta: object) -> list:
    """For three images of a size and their `metainfo`, those of odd indices flipped."""
    with torch.no_grad():
        return model.test_step(batch_of(Sample, size, **meta))


def batch_of(Sample: type, size: tuple, **meta: object) -> dict:
    meta = {'img_shape': size, 'pad_shape': size, 'scale_factor': (1.0, 1.0), **meta}
    flips = [{'flip': True, 'flip_direction': 'vertical'} if i == 1 else {} for i in range(3)]
    noise = torch.randint(256, (3, 3, *size), generator=torch.Generator().manual_seed(1))
    samples = [Sample(metainfo=meta | flip) for flip in flips]
    data = [{'inputs': x.byte(), 'data_samples': y} for x, y in zip(noise, samples)]
    return pseudo_collate(data)


def segmentor(configs: dict, **options: object) -> EncoderDecoder:
    cfg = load_config(configs['segmentor'])
    cfg.merge_from_dict({f'model.{name}': value for name, value in options.items()})
    model = build_model(cfg, 'cpu')
    nn.init.normal_(model.decode_head.conv_seg.weight, std=0.3)
    return model


def assert_same_labels(model: EncoderDecoder, skipped: bool = True) -> None:
    for size, original in (((96, 127), (200, 311)), ((64, 64), (64, 64)), ((65, 97), (50, 31))):
        with torch.no_grad():
            found = predict_labels(model, batch_of(SegDataSample, size, ori_shape=original))
        expected = predictions(model, SegDataSample, size, ori_shape=original)
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
    assert_same_labels(segmentor(configs, **options))


def test_classes_that_are_best_nowhere_are_left_out():
    left_out = 0
    for _ in range(100):
        h, w, *sizes = torch.randint(1, 14, (6,)).tolist()
        first, last = (sizes[0] + h // 2, sizes[1] + w), (3 * sizes[2], sizes[3])
        scores = torch.randn(1, 20, h, w) + 2 * torch.randn(1, 20, 1, 1)
        resize = partial(F.interpolate, size=first, mode='bilinear')
        found = best_labels(scores, resize, {'ori_shape': last}, align_corners=False)
        labels = F.interpolate(resize(scores), last, mode='bilinear').argmax(1)
        assert torch.equal(found.long(), labels)
        left_out += 20 - int(possible_classes(scores).sum())
    assert left_out > 500
    for score in (0.0, nan):  # of equal scores the first is best
        scores = torch.full((1, 3, 4, 4), score)
        assert not best_labels(scores, lambda x: x, {'ori_shape': (4, 4)}, False).any()


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
    model = segmentor(configs)
    (model if kind is Masked else model.decode_head).__class__ = kind
    assert_same_labels(model, skipped=kind is Sharpened)


def test_masks_of_boxes_with_a_low_score_are_not_computed():
    model = mask_rcnn().eval()
    sizes = {'ori_shape': (173, 259), 'batch_input_shape': (96, 128)}
    expected = predictions(model, DetDataSample, (96, 128), **sizes)
    scores = torch.cat([sample.pred_instances.scores for sample in expected]).sort().values
    with mock.patch.object(model.roi_head, 'predict_mask', wraps=model.roi_head.predict_mask) as f:
        for threshold in (0, scores[len(scores) // 2].item(), 2):
            leave_out_low_scores(model, threshold)
            found = predictions(model, DetDataSample, (96, 128), score_thr=threshold, **sizes)
            given = f.call_args.args[2]
            assert all((each.scores >= threshold).all() for each in given)
            for x, y in zip(found, expected):
                x, y = x.pred_instances, y.pred_instances[y.pred_instances.scores >= threshold]
                for name in ('bboxes', 'scores', 'labels'):
                    torch.testing.assert_close(x[name], y[name], rtol=0, atol=0)
                assert x.masks.shape == (len(y), *sizes['ori_shape'])
                assert (x.masks != y.masks).sum() < 1e-4 * y.masks.numel() + 1
    assert y.masks.numel() == 0 and sum(map(len, given)) == 0
