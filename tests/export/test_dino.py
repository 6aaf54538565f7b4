"""DINO as it is exported finds what MMDetection's own finds, alone and in padded batches."""

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from support import ROOT
from tiny_export import CHECKS, SIZES, TINY, assert_each_alone, built, padded
from torch import Tensor, nn

from cpvt_pyramid.export.detectors import Detector
from cpvt_pyramid.export.dino import DINO
from cpvt_pyramid.tooling.command import UserError


def small_dino(kind: str, levels: int = 4) -> nn.Module:
    """Of the config that is shipped, with maps of the last stages and one more."""
    cfg = Config.fromfile(ROOT / 'configs/dino_cpvt_s.py')
    init_default_scope('mmdet')
    import cpvt_pyramid.mm.detection  # noqa: F401 registers the classes

    model = cfg.model
    model.type, model.num_queries, model.bbox_head.num_classes = kind, 30, 7
    stages = range(5 - levels, 4)
    model.num_feature_levels = levels
    model.backbone.update(arch=TINY, init_cfg=None, out_indices=stages)
    model.neck.update(in_channels=[TINY['dims'][i] for i in stages], out_channels=32)
    model.neck.update(norm_cfg=dict(type='GN', num_groups=4), num_outs=levels)
    model.encoder.layer_cfg.self_attn_cfg.num_levels = levels
    model.decoder.layer_cfg.cross_attn_cfg.num_levels = levels
    model.positional_encoding.num_feats = 16
    for part, layers in ((model.encoder, 1), (model.decoder, levels // 2)):
        part.num_layers, part.layer_cfg.ffn_cfg.feedforward_channels = layers, 32
        for name in ('self_attn_cfg', 'cross_attn_cfg', 'ffn_cfg'):
            if name in part.layer_cfg:
                part.layer_cfg[name].embed_dims = 32
    model.bbox_head.embed_dims = 32
    model.test_cfg.max_per_img = 50
    return built(model)


def assert_found(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(expected) == ['boxes', 'scores', 'labels']
    for name, x in expected.items():
        atol = 0.02 if name == 'boxes' else 2e-4  # boxes in pixels
        torch.testing.assert_close(found[name], x, rtol=0, atol=atol)


@pytest.mark.parametrize('kind', ['ValidRegionDINO', 'DINO'])
def test_each_image_of_a_padded_batch_has_the_result_of_mmdet_alone(kind):
    model = DINO(small_dino(kind))
    assert_each_alone(model, padded(SIZES), assert_found)


def test_an_image_with_fewer_tokens_than_queries():
    """MMDetection raises an error; here it has fewer queries, alone and in a batch."""
    model = DINO(small_dino('ValidRegionDINO')).eval()
    batch = padded(((31, 32), (96, 200)))
    with torch.no_grad(), pytest.raises(RuntimeError, match='out of range'):
        Detector.reference(model, batch[2][0])
    assert_each_alone(model, batch, assert_found)
    assert model.model.num_queries == len(model.model.query_embedding.weight) == 30


@CHECKS
def test_graphs(check):
    check(DINO(small_dino('ValidRegionDINO', levels=2)).eval(), assert_found)


def test_its_kin_cannot_be_exported():
    kin = small_dino('DINO')
    kin.__class__ = type('DDQDETR', (type(kin),), {})
    with pytest.raises(UserError, match='only DINO and ValidRegionDINO .* got a DDQDETR'):
        DINO(kin)
