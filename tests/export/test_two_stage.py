"""Mask R-CNN as it is exported finds what MMDetection's own finds, alone and in padded batches."""

import pytest
import torch
import torchvision
from mmengine.config import Config
from mmengine.registry import init_default_scope
from support import ROOT
from tiny_export import CHECKS, SIZES, TINY, assert_each_alone, built, padded
from torch import Tensor, nn

from cpvt_pyramid.export.two_stage import TwoStage
from cpvt_pyramid.tooling.command import UserError


def small_mask_rcnn(levels: int = 4, extractor: str = 'ValidRegionSingleRoIExtractor') -> nn.Module:
    """Of the config that is shipped, with maps of the first stages."""
    cfg = Config.fromfile(ROOT / 'configs/mask_rcnn_cpvt_s.py')
    init_default_scope('mmdet')
    import cpvt_pyramid.mm.detection  # noqa: F401 registers the classes

    model = cfg.model
    strides = [4, 8, 16, 32, 64]
    model.backbone.update(arch=TINY, init_cfg=None, out_indices=range(levels))
    model.neck.update(in_channels=TINY['dims'][:levels], out_channels=16, num_outs=levels + 1)
    model.rpn_head.update(in_channels=16, feat_channels=16)
    model.rpn_head.anchor_generator.strides = strides[: levels + 1]
    for part in ('bbox_roi_extractor', 'mask_roi_extractor'):
        options = dict(type=extractor, out_channels=16, featmap_strides=strides[:levels])
        model.roi_head[part].update(options)
    model.roi_head.bbox_head.update(in_channels=16, fc_out_channels=32, num_classes=5)
    model.roi_head.mask_head.update(
        in_channels=16, conv_out_channels=16, num_convs=1, num_classes=5
    )
    model.test_cfg.rpn.update(nms_pre=100, max_per_img=60)
    model.test_cfg.rcnn.update(max_per_img=20, score_thr=0.1)
    return built(model)


def assert_found(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The results of one image; rows after the last box are unused."""
    assert list(expected) == ['boxes', 'scores', 'labels', 'masks']
    count = len(expected['scores'])
    assert count > 5
    for name, x in expected.items():
        atol = 0.02 if name == 'boxes' else 2e-4  # boxes in pixels
        torch.testing.assert_close(found[name][:count], x, rtol=0, atol=atol)
    assert (found['labels'][count:] == -1).all() and not found['scores'][count:].any()


@pytest.mark.parametrize('extractor', ['SingleRoIExtractor', 'ValidRegionSingleRoIExtractor'])
def test_each_image_of_a_padded_batch_has_the_result_of_mmdet_alone(extractor):
    model = TwoStage(small_mask_rcnn(extractor=extractor))
    assert_each_alone(model, padded(SIZES), assert_found)


def test_results_of_empty_rois_are_not_used(monkeypatch):
    """OpenVINO gives NaN for them."""
    model = TwoStage(small_mask_rcnn()).eval()
    images, valid, _ = padded(SIZES)
    expected = model(images, valid)
    original, emptied = torchvision.ops.roi_align, []

    def roi_align(x: Tensor, rois: Tensor, *options: object) -> Tensor:
        empty = (rois[:, 3:] <= rois[:, 1:3]).any(1)
        emptied.append(int(empty.sum()))
        return original(x, rois, *options).masked_fill(empty[:, None, None, None], torch.nan)

    monkeypatch.setattr(torchvision.ops, 'roi_align', roi_align)
    for found, x in zip(model(images, valid), expected):
        torch.testing.assert_close(found, x, rtol=0, atol=0)
    assert sum(emptied)


@CHECKS
def test_graphs(check):
    check(TwoStage(small_mask_rcnn(levels=2)).eval(), assert_found)


def test_what_cannot_be_exported():
    with pytest.raises(UserError, match='--raw needs a detector with one stage'):
        TwoStage(small_mask_rcnn(), raw=True)
    model = small_mask_rcnn()
    model.roi_head.bbox_roi_extractor = nn.Identity()
    with pytest.raises(UserError, match='got Identity, RPNHead, RoIAlign'):
        TwoStage(model)


def scores_in(model: TwoStage, image: Tensor) -> Tensor:
    """The first anchor's scores on the largest map, padding included."""
    found = []
    hook = model.model.rpn_head.register_forward_hook(lambda *call: found.append(call[2][0][0]))
    with torch.no_grad():
        model.reference(image)
    hook.remove()
    return found[0][0, 0]


def test_noise_reaches_the_padding():
    model = TwoStage(small_mask_rcnn()).eval()
    image = padded(SIZES)[2][-1]
    clean = scores_in(model, image)
    with model.with_noise(1e-4, torch.Generator().manual_seed(0)):
        noisy = scores_in(model, image)
    after = scores_in(model, image)
    outside = torch.ones_like(clean, dtype=torch.bool)
    outside[: -(-image.shape[2] // 4), : -(-image.shape[3] // 4)] = False
    assert len(clean[outside].unique()) < outside.sum() / 2  # cells with equal scores
    assert len(noisy[outside].unique()) == outside.sum()
    torch.testing.assert_close(noisy, clean, rtol=0, atol=1e-3 * clean.abs().max().item())
    torch.testing.assert_close(after, clean, rtol=0, atol=0)
