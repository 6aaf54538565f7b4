"""The arguments of a model that choose its position encoding."""

from typing import NamedTuple, Optional, Union

from .peg import PEGConfig

# The encodings, each with the names of its options. Those of a PEG are the fields of `PEGConfig`.
ROPE_OPTIONS = ('base', 'normalized')
POSITIONS = {
    'peg': (),
    'learned': (),
    'sincos': (),
    'none': (),
    'rope': ROPE_OPTIONS,
    'rope-mixed': ROPE_OPTIONS,
    'alibi': (),
    'relative': ('reach',),
    'fire': (),
    'lookhere': ('view',),
}
# Queries and keys must be the same tokens: distances are whole, and no view is empty.
COLUMNAR_POSITIONS = ('relative', 'fire', 'lookhere')


class PositionSettings(NamedTuple):
    """Where a model gets position from."""

    kind: str  # a key of `POSITIONS`; 'none' if PEGs are the only encoding
    peg: Optional[PEGConfig]
    options: dict  # of the encoding of this kind


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
    if kind != 'peg' and not is_pair:
        if peg:
            raise ValueError(f'peg={peg} needs a position with a PEG, got position={position!r}')
        return PositionSettings(kind, None, options)
    if not isinstance(peg, PEGConfig):
        peg = PEGConfig(**(peg or {}))
    return PositionSettings('none' if kind == 'peg' else kind, peg, options)
