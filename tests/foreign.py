"""Models of other packages, small and random, and what they make of an image."""

import timm.models.twins
import torch
from mmdet.models.backbones import PyramidVisionTransformer
from mmengine.registry import DefaultScope
from mmpretrain.models import PCPVT as PretrainPCPVT
from mmpretrain.models import SVT as PretrainSVT
from mmpretrain.models import ImageClassifier
from mmseg.models.backbones import PCPVT, SVT
from reference import randomize
from torch import nn

from cpvt_pyramid import ARCHS, Arch

_TINY = dict(dims=(8, 16, 32, 64), heads=(1, 2, 4, 8), mlp_ratios=(2, 2, 2, 2), depths=(2, 1, 1, 2))
TINY = {
    'pcpvt': Arch(**_TINY),
    'svt': Arch(**_TINY, window=7, stage_norm=True),
    'pvt': Arch(**_TINY, position='learned'),
}


def find(arch: str) -> Arch:
    return TINY.get(arch) or ARCHS[arch]


def of_timm(arch: str, num_classes: int = 5) -> nn.Module:
    a = find(arch)
    return randomize(
        timm.models.twins.Twins(
            embed_dims=a.dims,
            num_heads=a.heads,
            mlp_ratios=a.mlp_ratios,
            depths=a.depths,
            sr_ratios=a.sr_ratios,
            wss=(a.window,) * 4 if a.window else None,
            num_classes=num_classes,
        ),
        seed=1,
    ).eval()


def of_mmseg(arch: str) -> nn.Module:
    a = find(arch)
    options = dict(
        embed_dims=list(a.dims),
        num_heads=list(a.heads),
        mlp_ratios=list(a.mlp_ratios),
        depths=list(a.depths),
        sr_ratios=list(a.sr_ratios),
        norm_after_stage=a.stage_norm,
        qkv_bias=True,
    )
    model = SVT(windiow_sizes=[a.window] * 4, **options) if a.window else PCPVT(**options)
    return with_eps(randomize(model, seed=2))


def of_mmpretrain(arch: str, norms: list[bool], out_indices: tuple = (0, 1, 2, 3)) -> nn.Module:
    """A backbone, with a norm after those stages."""
    a = find(arch)
    numbers = dict(
        embed_dims=list(a.dims),
        num_heads=list(a.heads),
        mlp_ratios=list(a.mlp_ratios),
        depths=list(a.depths),
        sr_ratios=list(a.sr_ratios),
        patch_sizes=[4, 2, 2, 2],
        strides=[4, 2, 2, 2],
    )
    options = dict(qkv_bias=True, norm_after_stage=norms, out_indices=out_indices)
    if a.window:
        model = PretrainSVT(numbers | dict(window_sizes=[a.window] * 4), **options)
    else:
        model = PretrainPCPVT(numbers, **options)
    return with_eps(randomize(model, seed=3))


def classifier_of_mmpretrain(arch: str, num_classes: int = 5) -> nn.Module:
    backbone = of_mmpretrain(arch, [False, False, False, True], (3,))
    head = dict(type='LinearClsHead', num_classes=num_classes, in_channels=find(arch).dims[-1])
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = ImageClassifier(backbone, neck=dict(type='GlobalAveragePooling'), head=head)
    return with_eps(randomize(model, seed=4))


def of_mmdet(arch: str) -> nn.Module:
    a = find(arch)
    model = PyramidVisionTransformer(
        embed_dims=a.dims[0],
        num_layers=a.depths,
        num_heads=a.heads,
        mlp_ratios=a.mlp_ratios,
        sr_ratios=a.sr_ratios,
    )
    return with_eps(randomize(model, seed=5))


def with_eps(model: nn.Module) -> nn.Module:
    """In evaluation, its LayerNorms with one eps: the published code has two, mm's models one."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    return model.eval()


def maps_of(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        return list(model(image))
