"""Models of other libraries, for the benchmarks and the tests: ports of our architectures.

`build` returns a model whose output is four maps, with our weights if given; the `of_*` functions
return the libraries' own classes. All are in evaluation mode, without stochastic depth, and with
the library's default initialization. A library is imported when one of its models is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cpvt_pyramid import ARCHS, Arch
from cpvt_pyramid.checkpoints.formats import to_format

STAGES = (0, 1, 2, 3)


class Maps(nn.Module):
    """A model and a function that gets its maps from an image."""

    def __init__(self, model: nn.Module, maps: Callable[[nn.Module, Tensor], Sequence]) -> None:
        super().__init__()
        self.model = model
        self.maps = maps

    def forward(self, image: Tensor) -> list[Tensor]:
        return list(self.maps(self.model, image))


def ports_of(arch: str | Arch) -> tuple[str, ...]:
    """The libraries that have a port of an architecture, or whose PVTv2 can have its shape."""
    a = find(arch)
    if a.position == 'learned':
        return ('mmdet',)
    if a.mlp != 'ConvMLP':
        return ('timm', 'mmseg')
    if a.attention == 'LinearAttention':
        return ('timm',)
    return ('timm', 'mmdet' if len(set(a.mlp_ratios)) > 1 else 'mmseg')


def build(
    name: str,
    arch: str | Arch = 'pcpvt_small',
    tensors: dict[str, Tensor] | None = None,
    stage_norm: bool | None = None,
) -> nn.Module:
    """A library's port of `arch`, whose output is four maps.

    timm's SVT has no stage norms. `tensors` are the state dict of our model.
    """
    if name not in ports_of(arch):
        raise ValueError(f'{name} has no {arch}; available in: {", ".join(ports_of(arch))}')
    if name == 'timm':
        model = of_timm(arch, num_classes=0)
        if find(arch).mlp != 'ConvMLP':
            model.norm = nn.Identity()  # the classifier's
    else:
        model = of_mmseg(arch, stage_norm) if name == 'mmseg' else of_mmdet(arch)
    if tensors:
        model.load_state_dict(tensors_of(name, arch, tensors))
    if name == 'timm':
        model = Maps(model, lambda m, x: m.forward_intermediates(x, intermediates_only=True))
    return model.eval()


def tensors_of(name: str, arch: str | Arch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under a library's names."""
    if find(arch).mlp == 'ConvMLP':
        return to_format(tensors, 'timm_pvt_v2' if name == 'timm' else 'mm_pvt_v2')
    if name == 'timm':  # whose SVT has no stage norms
        return {k: v for k, v in tensors.items() if not k.startswith('norm_list')}
    return to_format(tensors, name)


def find(arch: str | Arch) -> Arch:
    return ARCHS[arch] if isinstance(arch, str) else arch


def shape(arch: str | Arch) -> dict:
    """The arguments that Twins have in timm, mmseg and mmpretrain."""
    a = find(arch)
    return dict(
        embed_dims=list(a.dims),
        num_heads=list(a.heads),
        mlp_ratios=list(a.mlp_ratios),
        depths=list(a.depths),
        sr_ratios=list(a.sr_ratios),
    )


def of_timm(arch: str | Arch, num_classes: int) -> nn.Module:
    """timm's Twins or PVTv2; without a classifier if `num_classes` is 0."""
    from timm.models.pvt_v2 import PyramidVisionTransformerV2
    from timm.models.twins import Twins

    if find(arch).mlp == 'ConvMLP':
        linear = find(arch).attention == 'LinearAttention'
        return PyramidVisionTransformerV2(
            num_classes=num_classes, linear=linear, **shape(arch)
        ).eval()
    window = find(arch).window
    windows = (window,) * 4 if window else None
    return Twins(num_classes=num_classes, wss=windows, **shape(arch)).eval()


def of_mmseg(arch: str | Arch, stage_norm: bool | None = None) -> nn.Module:
    """mmsegmentation's PCPVT, SVT or MiT."""
    from mmseg.models import backbones

    if find(arch).mlp == 'ConvMLP':
        a = find(arch)
        return backbones.MixVisionTransformer(
            embed_dims=a.dims[0] // a.heads[0],
            num_layers=list(a.depths),
            num_heads=list(a.heads),
            mlp_ratio=a.mlp_ratios[0],  # of all stages
            sr_ratios=list(a.sr_ratios),
            qkv_bias=True,
            drop_path_rate=0.0,
        ).eval()
    options = config_of_mmseg(arch, stage_norm)
    return getattr(backbones, options.pop('type'))(**options).eval()


def config_of_mmseg(arch: str | Arch, stage_norm: bool | None = None) -> dict:
    a = find(arch)
    norm = a.stage_norm if stage_norm is None else stage_norm
    kind = dict(type='SVT', windiow_sizes=[a.window] * 4) if a.window else dict(type='PCPVT')
    return dict(**kind, **shape(a), norm_after_stage=norm, qkv_bias=True, drop_path_rate=0.0)


def of_mmpretrain(
    arch: str | Arch, stage_norms: Sequence[bool], out_indices: Sequence[int] = STAGES
) -> nn.Module:
    """mmpretrain's PCPVT or SVT, with a norm after the given stages."""
    from mmpretrain.models import PCPVT, SVT

    a = find(arch)
    numbers = dict(**shape(a), patch_sizes=[4, 2, 2, 2], strides=[4, 2, 2, 2])
    if a.window:
        numbers['window_sizes'] = [a.window] * 4
    options = dict(qkv_bias=True, norm_after_stage=list(stage_norms), out_indices=out_indices)
    return (SVT if a.window else PCPVT)(numbers, **options).eval()


def classifier_of_mmpretrain(arch: str | Arch, num_classes: int) -> nn.Module:
    """mmpretrain's classifier with a Twins backbone."""
    from mmengine.registry import DefaultScope
    from mmpretrain.models import ImageClassifier

    backbone = of_mmpretrain(arch, [False, False, False, True], (3,))
    head = dict(type='LinearClsHead', num_classes=num_classes, in_channels=find(arch).dims[-1])
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = ImageClassifier(backbone, neck=dict(type='GlobalAveragePooling'), head=head)
    return model.eval()


def of_mmdet(arch: str | Arch) -> nn.Module:
    """mmdetection's PVT or PVTv2."""
    from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2

    a = find(arch)
    kind = PyramidVisionTransformerV2 if a.mlp == 'ConvMLP' else PyramidVisionTransformer
    return kind(
        embed_dims=a.dims[0] // a.heads[0],
        num_layers=list(a.depths),
        num_heads=list(a.heads),
        mlp_ratios=list(a.mlp_ratios),
        sr_ratios=list(a.sr_ratios),
        drop_path_rate=0.0,
    ).eval()


# Weights


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Set all parameters to random values that depend on their names' order and `seed` alone.

    The values are large enough that every one affects the output, biases and norms included. In a
    backbone (a model without a `backbone` is one), matrices have half of the standard deviation
    that keeps the variance, so that residual branches add up to order one in the deepest variant.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            value *= 0.5 if 'backbone' in name or not hasattr(model, 'backbone') else 1.0
            if len(parameter) > 1:  # not a position table or a class token
                value /= math.sqrt(parameter[0].numel())
        else:
            value = 0.1 * value + name.endswith('weight')  # of a norm
        parameter.data.copy_(value)
    return model


def with_eps(model: nn.Module) -> nn.Module:
    """Set the eps of all LayerNorms to 1e-6: the published code has two values, mm's models one."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    return model
