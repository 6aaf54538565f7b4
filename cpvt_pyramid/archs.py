"""The published variants, a row each, with only what differs between them.

Sources: PVT (arXiv 2102.12122), table 1; Twins (arXiv 2104.13840), tables 1 and 2; PVTv2 (arXiv
2106.13797), table 1; SegFormer (arXiv 2105.15203), table 6; the published code of all. PCPVT is the
pyramid that the CPVT paper (arXiv 2102.10882) calls CPVTv2: PVT with PEG instead of learned
position embeddings.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from numbers import Integral
from operator import mul
from typing import Any, NamedTuple, Optional, TypeVar, Union

PATCH_SIZES = (4, 2, 2, 2)  # of each stage, in pixels or in tokens of the stage before


# A class of `model.py` by its name, or a class of your own with the same methods.
Part = Union[str, type]


class StageShape(NamedTuple):
    """A stage of an `Arch`: what its parts are built for. Fields that are not explained have the
    meaning of those of `Arch`.

    Attributes:
        number: of the stage, from 0.
        in_channels: channels of the image, or of the tokens of the stage before.
        mlp_width: channels between the layers of the MLP.
        first_block: index of its first block among those of the whole pyramid.
        patch_size: side of a patch, in pixels or in tokens of the stage before.
        stride: from one token to the next, in pixels.
        finer_stride: that of the stage before; 1 in the first.
    """

    number: int
    in_channels: int
    dim: int
    heads: int
    mlp_width: int
    depth: int
    first_block: int
    patch_size: int
    stride: int
    finer_stride: int
    sr_ratio: int
    window: Optional[int]
    mlp_relu: bool


class Arch(NamedTuple):
    """The shape of a pyramid. Every tuple has one entry per stage, of which there are at most four;
    that of `attention` has one for each block, in turn.

    Attributes:
        dims: channels of the tokens.
        heads: attention heads; they must divide the channels.
        mlp_ratios: channels between the layers of the MLP / channels of the tokens.
        depths: blocks.
        sr_ratios: sides of the patches that have one key each in global attention.
        stage_norm: a LayerNorm on each stage's output.
        position: where position comes from, see `CPVTPyramid`.
        attention: the attention of the blocks 0, 1, ... of a stage; from the first again where
            there are more blocks.
        mlp: the MLP of all blocks.
        patch_embed: the patch embedding of all stages.
        window: side of the windows of `WindowAttention`, in tokens.
        mlp_relu: a ReLU before the convolution of `ConvMLP`, as in PVTv2's code of linear
            attention.
        classifier_norm: the classifier has a norm of its own; else it reads the normed output of
            the last stage.

    Examples:
        >>> shallow = ARCHS['pcpvt_small']._replace(depths=(1, 1, 2, 1))
        >>> model = CPVTPyramid(shallow)
    """

    dims: tuple[int, ...]
    heads: tuple[int, ...]
    mlp_ratios: tuple[float, ...]
    depths: tuple[int, ...]
    sr_ratios: tuple[int, ...] = (8, 4, 2, 1)
    stage_norm: bool = False
    position: str = 'peg'
    attention: Union[Part, Sequence[Part]] = 'GlobalAttention'
    mlp: Part = 'MLP'
    patch_embed: Part = 'PatchEmbed'
    window: Optional[int] = None
    mlp_relu: bool = False
    classifier_norm: bool = True

    @property
    def patch_sizes(self) -> tuple[int, ...]:
        """Side of the patches of each stage: in pixels, then in tokens of the stage before."""
        return PATCH_SIZES[: len(self.dims)]

    @property
    def strides(self) -> tuple[int, ...]:
        """Stride of the map of each stage, in pixels."""
        return tuple(accumulate(self.patch_sizes, mul))

    @property
    def attentions(self) -> tuple[Part, ...]:
        """The attentions of a stage's blocks, in turn."""
        attention = self.attention
        return (attention,) if isinstance(attention, (str, type)) else tuple(attention)

    def stages(self, in_channels: int) -> list[StageShape]:
        """The shapes of all stages of a pyramid for images with these channels."""
        return [
            StageShape(
                number=i,
                in_channels=self.dims[i - 1] if i else in_channels,
                dim=self.dims[i],
                heads=self.heads[i],
                mlp_width=int(self.dims[i] * self.mlp_ratios[i]),
                depth=self.depths[i],
                first_block=sum(self.depths[:i]),
                patch_size=self.patch_sizes[i],
                stride=self.strides[i],
                finer_stride=self.strides[i - 1] if i else 1,
                sr_ratio=self.sr_ratios[i],
                window=self.window,
                mlp_relu=self.mlp_relu,
            )
            for i in range(len(self.dims))
        ]


_PCPVT: dict[str, Any] = dict(dims=(64, 128, 320, 512), heads=(1, 2, 5, 8), mlp_ratios=(8, 8, 4, 4))
_PVT: dict[str, Any] = dict(**_PCPVT, position='learned')
_SVT: dict[str, Any] = dict(
    mlp_ratios=(4, 4, 4, 4),
    stage_norm=True,
    attention=('WindowAttention', 'GlobalAttention'),
    window=7,
)
_CONV: dict[str, Any] = dict(
    heads=(1, 2, 5, 8),
    stage_norm=True,
    position='none',
    mlp='ConvMLP',
    patch_embed='OverlapPatchEmbed',
    classifier_norm=False,
)
_LINEAR: dict[str, Any] = dict(attention='LinearAttention', mlp_relu=True)
_SMALL: dict[str, Any] = dict(dims=(32, 64, 160, 256), **_CONV)  # of the smallest variant
_LARGE: dict[str, Any] = dict(dims=(64, 128, 320, 512), **_CONV)  # of all others
_NARROW = (4, 4, 4, 4)  # MLP ratios
_WIDE = (8, 8, 4, 4)

ARCHS = {
    # ours, for the demo and the tests
    'pcpvt_nano': Arch((32, 64, 128, 192), (1, 2, 4, 6), (4, 4, 4, 4), (2, 2, 2, 2)),
    # CPVTv2 = Twins-PCPVT
    'pcpvt_small': Arch(**_PCPVT, depths=(3, 4, 6, 3)),
    'pcpvt_base': Arch(**_PCPVT, depths=(3, 4, 18, 3)),
    'pcpvt_large': Arch(**_PCPVT, depths=(3, 8, 27, 3)),
    # PVT, the first version
    'pvt_tiny': Arch(**_PVT, depths=(2, 2, 2, 2)),
    'pvt_small': Arch(**_PVT, depths=(3, 4, 6, 3)),
    'pvt_medium': Arch(**_PVT, depths=(3, 4, 18, 3)),
    'pvt_large': Arch(**_PVT, depths=(3, 8, 27, 3)),
    # Twins-SVT
    'svt_small': Arch((64, 128, 256, 512), (2, 4, 8, 16), depths=(2, 2, 10, 4), **_SVT),
    'svt_base': Arch((96, 192, 384, 768), (3, 6, 12, 24), depths=(2, 2, 18, 2), **_SVT),
    'svt_large': Arch((128, 256, 512, 1024), (4, 8, 16, 32), depths=(2, 2, 18, 2), **_SVT),
    # PVTv2
    'pvt_v2_b0': Arch(mlp_ratios=_WIDE, depths=(2, 2, 2, 2), **_SMALL),
    'pvt_v2_b1': Arch(mlp_ratios=_WIDE, depths=(2, 2, 2, 2), **_LARGE),
    'pvt_v2_b2': Arch(mlp_ratios=_WIDE, depths=(3, 4, 6, 3), **_LARGE),
    'pvt_v2_b2_li': Arch(mlp_ratios=_WIDE, depths=(3, 4, 6, 3), **_LARGE, **_LINEAR),
    'pvt_v2_b3': Arch(mlp_ratios=_WIDE, depths=(3, 4, 18, 3), **_LARGE),
    'pvt_v2_b4': Arch(mlp_ratios=_WIDE, depths=(3, 8, 27, 3), **_LARGE),
    'pvt_v2_b5': Arch(mlp_ratios=_NARROW, depths=(3, 6, 40, 3), **_LARGE),
    # MiT, the backbone of SegFormer
    'mit_b0': Arch(mlp_ratios=_NARROW, depths=(2, 2, 2, 2), **_SMALL),
    'mit_b1': Arch(mlp_ratios=_NARROW, depths=(2, 2, 2, 2), **_LARGE),
    'mit_b2': Arch(mlp_ratios=_NARROW, depths=(3, 4, 6, 3), **_LARGE),
    'mit_b3': Arch(mlp_ratios=_NARROW, depths=(3, 4, 18, 3), **_LARGE),
    'mit_b4': Arch(mlp_ratios=_NARROW, depths=(3, 8, 27, 3), **_LARGE),
    'mit_b5': Arch(mlp_ratios=_NARROW, depths=(3, 6, 40, 3), **_LARGE),
}


class ColumnarArch(NamedTuple):
    """The shape of a columnar model: one map from the first block to the last.

    Attributes:
        dim: channels of the tokens.
        heads: attention heads; they must divide the channels.
        depth: blocks.
        mlp_ratio: channels between the layers of the MLP / channels of the tokens.
        patch_size: side of a patch, in pixels.

    Examples:
        >>> model = CPVT(ColumnarArch(dim=96, heads=2, depth=4), num_classes=10)
    """

    dim: int
    heads: int
    depth: int = 12
    mlp_ratio: float = 4
    patch_size: int = 16


# CPVT (arXiv 2102.10882), table 2: the shapes of DeiT (arXiv 2012.12877)
COLUMNAR_ARCHS = {
    'cpvt_tiny': ColumnarArch(192, 3),
    'cpvt_small': ColumnarArch(384, 6),
    'cpvt_base': ColumnarArch(768, 12),
}

Row = TypeVar('Row', Arch, ColumnarArch)


def find_arch(arch: Union[str, Row, dict], kind: type[Row]) -> Row:
    """The shape of a variant.

    Args:
        arch: a name, a row of your own, or a dict of its fields.
        kind: `Arch` or `ColumnarArch`.

    Raises:
        ValueError: the name is unknown, or is that of the other kind of model.
    """
    if isinstance(arch, dict):
        arch = kind(**arch)
    if isinstance(arch, kind):
        # Lists, of a config or of JSON, become tuples.
        return kind._make(tuple(value) if isinstance(value, list) else value for value in arch)
    if not isinstance(arch, str):
        raise ValueError(
            f'arch must be a name, a row of the class {kind.__name__} or a dict of its fields, got '
            f'{arch!r}'
        )
    if kind is Arch and arch in COLUMNAR_ARCHS:
        raise ValueError(
            f'arch {arch!r} is a columnar model; use the class CPVT, a classifier, or DenseCPVT, '
            f'a backbone'
        )
    if kind is ColumnarArch and arch in ARCHS:
        raise ValueError(f'arch {arch!r} is a pyramid; use the class CPVTPyramid')
    archs: Mapping[Any, Any] = ARCHS if kind is Arch else COLUMNAR_ARCHS
    if arch not in archs:
        raise ValueError(f'unknown arch {arch!r}; one of {", ".join(archs)}')
    return archs[arch]


def check_stages(
    arch: Arch, out_indices: Sequence[int], frozen_stages: int, window_padding: str
) -> None:
    """Raise a ValueError unless the options of a pyramid fit its arch."""
    stages = len(arch.dims)
    if not 1 <= stages <= len(PATCH_SIZES):
        raise ValueError(f'a pyramid has 1 to {len(PATCH_SIZES)} stages, got {stages} dims')
    for field in ('heads', 'mlp_ratios', 'depths', 'sr_ratios'):
        entries = len(getattr(arch, field))
        if entries != stages:
            raise ValueError(f'arch must have one {field} per stage, got {stages} dims, {entries}')
    for dim, heads in zip(arch.dims, arch.heads):
        check_heads(dim, heads)
    check_out_indices(out_indices, 'stages', stages)
    if not isinstance(frozen_stages, Integral) or not -1 <= frozen_stages <= stages:
        raise ValueError(f'frozen_stages must be from -1 to {stages}, got {frozen_stages}')
    paddings = ('mask', 'zero', 'mmseg')
    if window_padding not in paddings:
        raise ValueError(
            f'window_padding must be one of {", ".join(paddings)}, got {window_padding!r}'
        )


def check_out_indices(out_indices: Sequence[int], what: str, count: int) -> None:
    """Raise a ValueError unless these are indices of the stages or levels."""
    if not out_indices or not all(isinstance(i, Integral) and 0 <= i < count for i in out_indices):
        raise ValueError(
            f'out_indices must be {what} from 0 to {count - 1}, got {tuple(out_indices)}'
        )


def check_heads(dim: int, heads: int) -> None:
    """Raise a ValueError unless the heads divide the channels."""
    if dim % heads:
        raise ValueError(f'dim={dim} must be divisible by heads={heads}')


def check_rates(*rates: float) -> None:
    """Raise a ValueError unless these are dropout rates."""
    if not all(0 <= rate < 1 for rate in rates):
        raise ValueError(f'drop rates must be in [0, 1), got {rates}')
