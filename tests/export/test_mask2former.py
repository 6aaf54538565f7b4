"""Mask2Former as it is exported gives what mm's own gives, alone and in padded batches."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from ports import randomize
from support import ROOT
from torch import Tensor, nn

from cpvt_pyramid.export.mask2former import Mask2Former, Mask2FormerSegmentor
from cpvt_pyramid.export.onnx_file import capture, onnxruntime_runner, translate
from cpvt_pyramid.runner.command import UserError

TINY = dict(dims=[8, 16, 32, 32], heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2), depths=(1, 1, 1, 1))
SIZES = ((96, 128), (130, 70), (75, 190))


def make_small(head: dict) -> None:
    head.update(in_channels=TINY['dims'], feat_channels=32, out_channels=32, num_queries=10)
    head.pixel_decoder.update(norm_cfg=dict(type='GN', num_groups=4))
    head.pixel_decoder.positional_encoding.num_feats = 16
    head.positional_encoding.num_feats = 16
    for part, layers in ((head.pixel_decoder.encoder, 1), (head.transformer_decoder, 3)):
        part.num_layers, part.layer_cfg.ffn_cfg.feedforward_channels = layers, 32
        for name in ('self_attn_cfg', 'cross_attn_cfg', 'ffn_cfg'):
            if name in part.layer_cfg:
                part.layer_cfg[name].embed_dims = 32


def built(model: dict) -> nn.Module:
    return randomize(MODELS.build(model), seed=1).eval()


def small_segmentor() -> nn.Module:
    cfg = Config.fromfile(ROOT / 'configs/mask2former_cpvt_s.py')
    init_default_scope('mmseg')
    import mmdet.models  # noqa: F401 registers the pixel decoder

    import cpvt_pyramid.mm.segmentation  # noqa: F401 registers the data preprocessor

    model = cfg.model
    model.backbone.update(arch=TINY, init_cfg=None)
    make_small(model.decode_head)
    model.decode_head.num_classes = 7
    model.decode_head.loss_cls.class_weight = [1.0] * 8
    return built(model)


def padded(sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A batch of images of these sizes, its `valid`, and each image alone."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *s), generator=generator).float() for s in sizes]
    batch = torch.zeros(len(sizes), 3, *map(max, zip(*sizes)))
    for row, image in zip(batch, images):
        row[:, : image.shape[1], : image.shape[2]] = image
    return batch, torch.tensor(sizes), [image[None] for image in images]
