"""Small random models of other packages, from the builders in models/ports.py."""

import torch
from torch import nn

from cpvt_pyramid import ARCHS, Arch
from tests.models import ports
from tests.models.ports import randomize, with_eps

_TINY = dict(dims=(8, 16, 32, 64), heads=(1, 2, 4, 8), mlp_ratios=(2, 2, 2, 2), depths=(2, 1, 1, 2))
_CONV = dict(
    _TINY,
    stage_norm=True,
    position='none',
    mlp='ConvMLP',
    patch_embed='OverlapPatchEmbed',
    classifier_norm=False,
)
_SVT = dict(stage_norm=True, attention=('WindowAttention', 'GlobalAttention'), window=7)
_PVT_V2 = Arch(**_CONV)._replace(mlp_ratios=(4, 4, 2, 2))
TINY = {
    'pcpvt': Arch(**_TINY),
    'svt': Arch(**_TINY, **_SVT),
    'pvt': Arch(**_TINY, position='learned'),
    'pvt_v2': _PVT_V2,
    'pvt_v2_li': _PVT_V2._replace(attention='LinearAttention', mlp_relu=True),
    'mit': Arch(**_CONV),
}


def find(arch: str) -> Arch:
    return TINY.get(arch) or ARCHS[arch]


def of_timm(arch: str, num_classes: int = 5) -> nn.Module:
    return randomize(ports.of_timm(find(arch), num_classes), seed=1)


def of_mmseg(arch: str) -> nn.Module:
    return with_eps(randomize(ports.of_mmseg(find(arch)), seed=2))


def of_mmpretrain(arch: str, stage_norms: list[bool]) -> nn.Module:
    return with_eps(randomize(ports.of_mmpretrain(find(arch), stage_norms), seed=3))


def classifier_of_mmpretrain(arch: str, num_classes: int = 5) -> nn.Module:
    return with_eps(randomize(ports.classifier_of_mmpretrain(find(arch), num_classes), seed=4))


def of_mmdet(arch: str) -> nn.Module:
    return with_eps(randomize(ports.of_mmdet(find(arch)), seed=5))


def maps_of(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        return list(model(image))
