"""The position encodings, a row each, and the arguments of a model that choose one."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

from torch import nn

from .added import LearnedPosition, NoPosition, SinCosPosition
from .attention import RelativePosition, RoPE
from .site import Site


class Encoding(NamedTuple):
    """A position encoding.

    Attributes:
        place: 'tokens': added to the tokens before the first block of a stage; 'rotations': of the
            queries and keys of all attentions of a stage; 'scores': a module inside of each
            attention, its `position`.
        build: its class, whose method `at` builds it for a `Site`, or raises a ValueError.
        options: the names of its options.
        class_token: whether a class token gets an embedding of its own.
    """

    place: str
    build: Any
    options: tuple[str, ...] = ()
    class_token: bool = False


# By the names that `position` takes. With 'peg' PEGs are the only encoding, whose options are the
# fields of `PEGConfig`; with 'none' there is none.
POSITIONS: dict[str, Optional[Encoding]] = {
    'peg': None,
    'none': None,
    'learned': Encoding('tokens', LearnedPosition, class_token=True),
    'sincos': Encoding('tokens', SinCosPosition),
    'rope': Encoding('rotations', RoPE, ('base', 'normalized')),
    'relative': Encoding('scores', RelativePosition, ('reach',)),
}


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
    """Where a model gets position from.

    Attributes:
        encoding: of `POSITIONS`. None: PEGs alone, or nothing.
        options: of the encoding.
        peg: the PEGs. None: there are none.
    """

    encoding: Optional[Encoding]
    options: dict[str, Any]
    peg: Optional[PEGConfig]

    @property
    def has_class_token(self) -> bool:
        """Whether a class token gets an embedding of its own."""
        return self.encoding is not None and self.encoding.class_token

    def on_tokens(self, site: Site) -> nn.Module:
        """What is added to the tokens before the first block."""
        return self.build('tokens', site) or NoPosition()

    def rotation(self, site: Site) -> Optional[RoPE]:
        """The rotation of queries and keys; None: there is none."""
        return self.build('rotations', site)

    def add_to_scores(self, blocks: Any, site: Site) -> None:
        """Give the attention of each of some blocks its encoding, if there is one."""
        for block in blocks:
            position = self.build('scores', site)
            if position is not None:
                block.attn.position = position

    def build(self, place: str, site: Site) -> Any:
        """The encoding, if this is its place."""
        if self.encoding is None or self.encoding.place != place:
            return None
        return self.encoding.build.at(site, **self.options)


def parse_position(
    position: str, peg: Union[PEGConfig, dict, None], options: Optional[dict]
) -> PositionSettings:
    """Read the arguments `position`, `peg` and `position_options` of a model.

    Raises:
        ValueError: an unknown name, or settings that nothing reads.
    """
    kind, _, second = position.partition('+')
    is_pair = second == 'peg' and POSITIONS.get(kind) is not None
    if kind not in POSITIONS or (second and not is_pair):
        raise ValueError(
            f'unknown position {position!r}; one of {", ".join(POSITIONS)}, or one of them and a '
            f"PEG, as in 'learned+peg'"
        )
    encoding = POSITIONS[kind]
    options = dict(options or {})
    known = encoding.options if encoding else ()
    if not options.keys() <= set(known):
        allowed = ', '.join(known) or 'nothing'
        raise ValueError(
            f'position_options of position={position!r} can hold {allowed}, got {options}'
        )
    if kind != 'peg' and not is_pair:
        if peg:
            raise ValueError(f'peg={peg} needs a position with a PEG, got position={position!r}')
        return PositionSettings(encoding, options, None)
    if not isinstance(peg, PEGConfig):
        peg = PEGConfig(**(peg or {}))
    return PositionSettings(encoding, options, peg)
