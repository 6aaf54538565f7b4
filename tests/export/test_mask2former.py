"""Mask2Former as it is exported gives what mm's own gives, alone and in padded batches."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import init_default_scope
from support import ROOT
from tiny_export import CHECKS, SIZES, TINY, assert_each_alone, built, padded
from torch import Tensor, nn

from cpvt_pyramid.export.mask2former import Mask2Former, Mask2FormerSegmentor
from cpvt_pyramid.tooling.command import UserError


def make_small(head: dict, layers: int) -> None:
    head.update(in_channels=TINY['dims'], feat_channels=32, out_channels=32, num_queries=10)
    head.pixel_decoder.update(norm_cfg=dict(type='GN', num_groups=4))
    head.pixel_decoder.positional_encoding.num_feats = 16
    head.positional_encoding.num_feats = 16
    for part, count in ((head.pixel_decoder.encoder, 1), (head.transformer_decoder, layers)):
        part.num_layers, part.layer_cfg.ffn_cfg.feedforward_channels = count, 32
        for name in ('self_attn_cfg', 'cross_attn_cfg', 'ffn_cfg'):
            if name in part.layer_cfg:
                part.layer_cfg[name].embed_dims = 32


def small_segmentor(layers: int = 3) -> nn.Module:
    cfg = Config.fromfile(ROOT / 'configs/mask2former_cpvt_s.py')
    init_default_scope('mmseg')
    import mmdet.models  # noqa: F401 registers the pixel decoder

    import cpvt_pyramid.mm.segmentation  # noqa: F401 registers the data preprocessor

    model = cfg.model
    model.backbone.update(arch=TINY, init_cfg=None)
    make_small(model.decode_head, layers)
    model.decode_head.num_classes = 7
    model.decode_head.loss_cls.class_weight = [1.0] * 8
    return built(model)


def small_detector(name: str = '', layers: int = 3) -> nn.Module:
    """MMDetection's own config with our backbone."""
    import mmdet

    import cpvt_pyramid.mm.detection  # noqa: F401 registers the classes

    configs = Path(mmdet.__file__).parent / '.mim/configs/mask2former'
    model = Config.fromfile(configs / f'mask2former_r50_8xb2-lsj-50e_coco{name}.py').model
    init_default_scope('mmdet')
    model.data_preprocessor.update(type='ValidRegionDetDataPreprocessor', batch_augments=None)
    model.backbone = dict(type='CPVTPyramid', arch=TINY)
    make_small(model.panoptic_head, layers)
    model.test_cfg.max_per_image = 20
    return built(model)


@pytest.mark.parametrize('name', ['probabilities', 'labels'])
def test_segmentor_gives_each_image_of_a_padded_batch_the_result_of_mmseg_alone(name):
    model = Mask2FormerSegmentor(small_segmentor(), probabilities=name == 'probabilities')
    assert model.details == {'resized': 'probabilities'}

    def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        height, width = expected[name].shape[-2:]
        ours = found[name][..., :height, :width].to(expected[name].dtype)
        torch.testing.assert_close(ours, expected[name], rtol=0, atol=1e-5)

    assert_each_alone(model, padded(SIZES), compare)
    if name == 'labels':
        images, valid, alone = padded(SIZES)
        original = torch.tensor([(201, 250), (101, 66), (75, 191)])
        with torch.no_grad():
            (found,) = model(images, valid, original)
            for labels, image, size in zip(found, alone, original):
                expected = model.reference(image, size[None])['labels'][0]
                wrong = labels[: size[0], : size[1]] != expected
                assert wrong.double().mean() < 1e-4  # ties


def test_detector_gives_each_image_of_a_padded_batch_the_result_of_mmdet_alone():
    batch = padded(SIZES)
    sizes = iter(batch[1].tolist())

    def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert list(expected) == ['boxes', 'scores', 'labels']
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-5)
        # The masks have the boxes that MMDetection has found in the masks of the pixels.
        height, width = next(sizes)
        masks = F.interpolate(found['masks'][None], scale_factor=4, mode='bilinear')[0]
        for mask, box in zip(masks[:, :height, :width] > 0.5, expected['boxes']):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            if len(rows):
                ends = torch.stack([columns.min(), rows.min(), columns.max(), rows.max()])
                assert (ends - box).abs().max() <= 4

    assert_each_alone(Mask2Former(small_detector()), batch, compare)


def assert_same_instances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        atol = 0 if name == 'labels' else 1.0 if name == 'boxes' else 1e-3
        torch.testing.assert_close(found[name], x, rtol=0, atol=atol)


def assert_same_pixels(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    found, expected = found['probabilities'], expected['probabilities']
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@CHECKS
def test_graphs_of_a_segmentor(check):
    model = Mask2FormerSegmentor(small_segmentor(layers=1), probabilities=True)
    check(model.eval(), assert_same_pixels)


@CHECKS
def test_graphs_of_a_detector(check):
    check(Mask2Former(small_detector(layers=1)).eval(), assert_same_instances)


def test_what_cannot_be_exported():
    model = small_segmentor()
    model.data_preprocessor.test_cfg = None
    with pytest.raises(UserError, match='multiple of 32 to be exported, got 1; set data_prep'):
        Mask2FormerSegmentor(model)
    model = small_detector('-panoptic')
    model.test_cfg.instance_on = False
    with pytest.raises(UserError, match='set test_cfg.instance_on=True'):
        Mask2Former(model)
