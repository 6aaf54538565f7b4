"""Detectors find the same with fewer multiplications."""

import copy
from unittest import mock

import pytest
import torch
from mmdet.structures import DetDataSample

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import accelerate as acceleration
from cpvt_pyramid.acceleration import winograd
from cpvt_pyramid.acceleration.winograd import winograd_conv
from tests.app.predict.test_label_maps import predictions
from tests.models.small import mask_rcnn


@pytest.mark.parametrize('size', [(96, 128), (90, 101)])
def test_a_whole_model(size):
    """Boxes and masks of a detector whose operators read memory, with and without padding."""
    model = mask_rcnn()
    fast = copy.deepcopy(model)
    with mock.patch.object(acceleration, 'FEWEST_CHANNELS', 1):
        accelerate(fast)
    with mock.patch.object(winograd, 'winograd_conv', wraps=winograd_conv) as call:
        found, expected = (
            predictions(each, DetDataSample, size, ori_shape=size) for each in (fast, model)
        )
    assert call.call_count > 8
    for x, y in zip(found, expected):
        x, y = x.pred_instances, y.pred_instances
        assert len(y) > 5 and torch.equal(x.labels, y.labels)
        torch.testing.assert_close(x.bboxes, y.bboxes, rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(x.scores, y.scores, rtol=1e-4, atol=1e-4)
        assert (x.masks == y.masks).float().mean() > 0.999
