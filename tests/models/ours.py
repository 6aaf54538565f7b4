"""Our models, small enough to try many sizes on, and with every mechanism in them."""

from collections.abc import Sequence
from typing import Optional

import torch
from reference import TINY_SVT, reference_levels, reference_maps, reference_tokens
from torch import Tensor, nn

from cpvt_pyramid import ARCHS, CPVT, Arch, ColumnarArch, CPVTPyramid, DenseCPVT, PEGConfig
from tests.models.ports import randomize

TINY_COLUMN = ColumnarArch(dim=16, heads=2, depth=3, mlp_ratio=2, patch_size=4)
TINY_PVT_V2 = Arch(
    (8, 16, 24, 32),
    (1, 2, 3, 4),
    (2, 2, 2, 2),
    (2, 1, 2, 1),
    stage_norm=True,
    position='none',
    mlp='ConvMLP',
    patch_embed='OverlapPatchEmbed',
    classifier_norm=False,
)
TINY_LINEAR = TINY_PVT_V2._replace(attention='LinearAttention', mlp_relu=True)
# The encodings that are compared in the CPVT paper's study, and later ones.
POSITIONS: dict[str, dict] = {
    'peg': dict(),
    'none': dict(position='none'),
    'learned': dict(position='learned', pretrain_img_size=20),
    'learned+peg': dict(position='learned+peg', pretrain_img_size=20),
    'sincos': dict(position='sincos'),
    'large peg before': dict(peg=PEGConfig(after=-1, kernel_size=5)),
    'pegs before and after': dict(peg=PEGConfig(after=(-1, 0, 1))),
    'peg after each': dict(peg=PEGConfig(after='all')),
    'separable pegs': dict(peg=PEGConfig(conv='separable', layers=4)),
    'dense 1x1': dict(peg=PEGConfig(after='all', conv='dense', kernel_size=1)),
    'border repeated': dict(peg=PEGConfig(zero_padding=False, kernel_size=5, layers=2)),
    'rope': dict(position='rope'),
    'rope+peg': dict(position='rope+peg'),
}
NORMALIZED = {
    'rope, normalized': dict(position='rope', position_options=dict(normalized=True)),
}
# Patches of 4 pixels make maps on which distances are clipped.
COLUMN_POSITIONS = {
    **POSITIONS,
    **NORMALIZED,
    'peg of queries and keys': dict(peg=PEGConfig(after=(-1, 1), qk_only=True)),
    'relative': dict(position='relative'),
    'relative+peg': dict(position='relative+peg'),
}


def pcpvt(**options: object) -> nn.Module:
    return randomize(CPVTPyramid('pcpvt_nano', **options))


def svt(**options: object) -> nn.Module:
    return randomize(CPVTPyramid(TINY_SVT, **options))


def pvt_v2(**options: object) -> nn.Module:
    return randomize(CPVTPyramid(TINY_PVT_V2, **options))


def linear(**options: object) -> nn.Module:
    return randomize(CPVTPyramid(TINY_LINEAR, **options))


def classifier(**options: object) -> nn.Module:
    return randomize(CPVT(TINY_COLUMN, num_classes=7, **options))


def dense(**options: object) -> nn.Module:
    return randomize(DenseCPVT(TINY_COLUMN, out_channels=12, **options))


# Each model with each encoding. The windows of SVT have no normalized coordinates.
CASES = {
    f'{build.__name__}, {name}': (build, options)
    for build, positions in (
        (pcpvt, POSITIONS | NORMALIZED),
        (svt, POSITIONS),
        (classifier, COLUMN_POSITIONS),
        (dense, COLUMN_POSITIONS),
    )
    for name, options in positions.items()
}
CASES['pvt_v2, none'] = (pvt_v2, {})
CASES['linear, none'] = (linear, {})
# Borders as other ports treat them; the slow version does not.
BORDERS = {
    'pcpvt, border dropped': (pcpvt, dict(drop_border=True)),
    'pvt_v2, border dropped': (pvt_v2, dict(drop_border=True)),
    'svt, zeros attended to': (svt, dict(window_padding='zero')),
    'svt, as in mmseg': (svt, dict(window_padding='mmseg', drop_border=True)),
}
BACKBONES = {
    'pcpvt': pcpvt,
    'svt': svt,
    'pvt_v2': pvt_v2,
    'linear': linear,
    'columnar': lambda **o: randomize(DenseCPVT(ColumnarArch(16, 2, 2), out_channels=8, **o)),
}
SIZE = (100, 75)  # pixels; every patch embedding, window and sub-sampling is padded
VALID = torch.tensor([(100, 40), (61, 75)])


def shallow(name: str) -> Arch:
    """The first two blocks of each stage: one with windows, if there are any, and one without."""
    return ARCHS[name]._replace(depths=(2, 2, 2, 2))


# What differs in more than depth, with the name of the first such row.
SHALLOW = {arch: name for name in reversed(ARCHS) for arch in [shallow(name)]}


def images(batch: int = 2, size: Sequence[int] = SIZE) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0))


def outputs(model: nn.Module, *inputs: object) -> list[Tensor]:
    """The maps of a backbone, or the logits of a classifier."""
    found = model(*inputs)
    return [found] if isinstance(found, Tensor) else list(found)


def slow_outputs(
    model: nn.Module,
    image: Tensor,
    position: str = 'peg',
    position_options: Optional[dict] = None,
    peg: Optional[PEGConfig] = None,
    **_: object,
) -> list[Tensor]:
    """The outputs for one image (1, 3, H, W), by the slow version of a model with these options."""
    kind = position.partition('+')[0]
    options: dict = dict(sincos=kind == 'sincos', zero_padding=(peg or PEGConfig()).zero_padding)
    if kind == 'rope':
        options['inside'] = position_options or {}
    if isinstance(model, CPVTPyramid):
        maps = reference_maps(model, model.arch, image[0], **options)
    elif isinstance(model, DenseCPVT):
        maps = reference_levels(model, image[0], **options)
    else:
        first, x = reference_tokens(model, image[0], **options)
        x = first[:, 0] if first.numel() else model.norm(x.permute(1, 2, 0)).mean((0, 1))
        return [model.head(model.norm(x) if first.numel() else x)[None]]
    return [x[None] for x in maps]


def maps_and_gradients(
    model: nn.Module, image: Tensor, valid: Optional[Tensor] = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and the gradients of the image and all weights for random gradients of them."""
    leaf = image.clone().requires_grad_()
    found = outputs(model, leaf, *(() if valid is None else (valid,)))
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(x.shape, generator=generator).to(x) for x in found]
    leaves = [leaf, *(p for p in model.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(found, leaves, noise)
    return [x.detach() for x in found], list(grads)


def cropped(x: Tensor, like: Tensor) -> Tensor:
    """The top left part of maps (B, C, H, W) that is as large as another; logits as they are."""
    return x[..., : like.shape[2], : like.shape[3]] if x.dim() == 4 else x
