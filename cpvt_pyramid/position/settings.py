"""The arguments of a model that choose its position encoding."""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

from ..archs import Arch
from .attention import REACH, RoPE

# The encodings, each with the names of its options. Those of a PEG are the fields of `PEGConfig`.
POSITIONS = {
    'peg': (),
    'learned': (),
    'sincos': (),
    'none': (),
    'rope': ('base', 'normalized'),
    'relative': ('reach',),
}
COLUMNAR_POSITIONS = ('relative',)  # whole distances: queries and keys must be the same tokens


class PEGConfig(NamedTuple):
    """Placement and structure of PEGs; the defaults are those of CPVTv2 and Twins.

    The figures are the CPVT paper's, top-1 of DeiT-tiny on ImageNet in percent (sections 4.2 to 4.5
    and appendix): 68.2 without position, 72.2 with a learned position embedding.

    Attributes:
        after: indices of the blocks that a PEG follows; -1: before the first; 'all': after each.
            -1: 70.6; 0: 72.4; 3: about 72.4; (0, 1, 2, 3, 4, 5), the paper's main model: 73.4.
        kernel_size: side of the kernel, odd. 27 at -1: 72.5.
        conv: 'depthwise'; 'separable', followed by a 1x1 convolution; or 'dense', over all
            channels. The control, dense and kernel_size 1 after each of the twelve blocks: 68.6.
        layers: PEGs in a row. Four of them, separable: 72.9.
        zero_padding: False: replicate the border, which hides it. 70.5.
        frozen: random weights that are never trained. 71.3.
        qk_only: apply PEGs only to queries and keys (columnar model). 71.3.
        zero_init: start at zero, so that PEGs added to a pretrained model change nothing before
            training.

    Examples:
        >>> before_the_blocks = CPVTPyramid('pcpvt_nano', peg=PEGConfig(after=-1, kernel_size=5))
        >>> replicated = CPVTPyramid('pcpvt_nano', peg=dict(zero_padding=False))
    """

    after: Union[int, str, Sequence[int]] = (0,)
    kernel_size: int = 3
    conv: str = 'depthwise'
    layers: int = 1
    zero_padding: bool = True
    frozen: bool = False
    qk_only: bool = False
    zero_init: bool = False

    def indices(self, depth: int, most: int) -> list[int]:
        """The blocks that a PEG follows, in a sequence of `depth` blocks; -1: before the first.

        Args:
            depth: blocks of this sequence.
            most: blocks of the longest sequence of the model, which `after` may name.

        Raises:
            ValueError: `after` names other blocks.
        """
        if self.after == 'all':
            return list(range(depth))
        after = {self.after} if isinstance(self.after, int) else {*self.after}
        if not after or not after <= {*range(-1, most)}:
            raise ValueError(
                f"peg.after must be blocks from -1 to {most - 1} or 'all', got {self.after!r}"
            )
        return [i for i in range(-1, depth) if i in after]


class PositionSettings(NamedTuple):
    """Where a model gets position from."""

    kind: str  # a key of `POSITIONS`; 'none' if PEGs are the only encoding
    peg: Optional[PEGConfig]
    rope: Optional[RoPE]
    reach: int = REACH  # of 'relative'


def parse_position(
    position: str, peg: Union[PEGConfig, dict, None], options: Optional[dict], columnar: bool
) -> PositionSettings:
    """Read the arguments `position`, `peg` and `position_options` of a model.

    Raises:
        ValueError: an unknown name, an encoding that the model cannot have, or settings that
            nothing reads.
    """
    kind, _, second = position.partition('+')
    known = [name for name in POSITIONS if columnar or name not in COLUMNAR_POSITIONS]
    is_pair = second == 'peg' and kind not in ('peg', 'none')
    if kind not in known or (second and not is_pair):
        others = '' if columnar else f'; columnar models also have {", ".join(COLUMNAR_POSITIONS)}'
        raise ValueError(
            f'unknown position {position!r}; one of {", ".join(known)}, or one of them and a PEG, '
            f"as in 'learned+peg'{others}"
        )
    options = dict(options or {})
    if not options.keys() <= set(POSITIONS[kind]):
        allowed = ', '.join(POSITIONS[kind]) or 'nothing'
        raise ValueError(
            f'position_options of position={position!r} can hold {allowed}, got {options}'
        )
    rope = RoPE(**options) if kind == 'rope' else None
    reach = options.get('reach', REACH)
    if kind != 'peg' and not is_pair:
        if peg:
            raise ValueError(f'peg={peg} needs a position with a PEG, got position={position!r}')
        return PositionSettings(kind, None, rope, reach)
    if not isinstance(peg, PEGConfig):
        peg = PEGConfig(**(peg or {}))
    if peg.qk_only and not columnar:
        raise ValueError('peg.qk_only needs the columnar model (CPVT, DenseCPVT)')
    return PositionSettings('none' if kind == 'peg' else kind, peg, rope, reach)


def check_rope(rope: Optional[RoPE], arch: Arch, drop_border: bool) -> None:
    """Raise a ValueError if the attentions of a pyramid cannot have this encoding."""
    if rope is None:
        return
    if arch.linear:
        raise ValueError('rope needs keys at places, which linear attention does not have')
    if drop_border:
        raise ValueError('rope needs keys for the whole map, which drop_border leaves out')
    if arch.window and rope.normalized:
        raise ValueError(
            f'normalized coordinates need attention over the whole map, got an arch with '
            f'window={arch.window}'
        )
    for dim, heads in zip(arch.dims, arch.heads):
        rope.check(dim // heads)
