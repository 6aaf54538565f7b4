"""The published variants, a row each: what differs between them and nothing else.

Sources: PVT (arXiv 2102.12122), table 1; Twins (arXiv 2104.13840), tables 1 and 2; the published
code of both. PCPVT is the pyramid that the CPVT paper (arXiv 2102.10882) calls CPVTv2: PVT with
PEG in the place of the learned tables.
"""

from typing import NamedTuple, Optional


class Arch(NamedTuple):
    """The shape of a pyramid. Every tuple has one entry per stage."""

    dims: tuple[int, ...]  # channels of the tokens
    heads: tuple[int, ...]  # attention heads
    mlp_ratios: tuple[int, ...]  # hidden channels of the MLP / channels of the tokens
    depths: tuple[int, ...]  # blocks
    sr_ratios: tuple[int, ...] = (8, 4, 2, 1)  # sub-sampling of the keys of global attention
    window: Optional[int] = None  # side of the windows of blocks 0, 2, 4, ...; None: all global
    stage_norm: bool = False  # a LayerNorm on each stage's output
    position: str = 'peg'  # where position comes from, see `CPVTPyramid`


_PCPVT = dict(dims=(64, 128, 320, 512), heads=(1, 2, 5, 8), mlp_ratios=(8, 8, 4, 4))
_PVT = dict(**_PCPVT, position='learned')
_SVT = dict(mlp_ratios=(4, 4, 4, 4), window=7, stage_norm=True)

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
}


class PlainArch(NamedTuple):
    """The shape of a columnar model: one map from the first block to the last."""

    dim: int  # channels of the tokens
    heads: int  # attention heads
    depth: int = 12  # blocks
    mlp_ratio: int = 4  # hidden channels of the MLP / channels of the tokens
    patch_size: int = 16  # side of a patch, in pixels


# CPVT (arXiv 2102.10882), table 2: the shapes of DeiT (arXiv 2012.12877)
PLAIN_ARCHS = {
    'cpvt_tiny': PlainArch(192, 3),
    'cpvt_small': PlainArch(384, 6),
    'cpvt_base': PlainArch(768, 12),
}
