"""The arguments of a model that set its position encoding, read and checked."""

from typing import Optional, Union

from .peg import PEGConfig

# The encodings of a model, each with its options; a PEG's are in `PEGConfig`.
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


def parse_position(
    position: str, peg: Union[PEGConfig, dict, None], options: Optional[dict], columnar: bool
) -> tuple[str, Optional[PEGConfig], dict]:
    """The encoding without its PEG, the PEG, and the encoding's options.

    Arguments are those of `CPVTPyramid`, and whether the model is columnar.

    Raises:
        ValueError: an unknown name, an encoding that the model cannot have, or settings that
            nothing reads.
    """
    before, _, after = position.partition('+')
    known = [name for name in POSITIONS if columnar or name not in COLUMNAR_POSITIONS]
    if before not in known or after not in ('', 'peg') or (after and before in ('peg', 'none')):
        others = '' if columnar else f'; columnar models also have {", ".join(COLUMNAR_POSITIONS)}'
        raise ValueError(
            f'unknown position {position!r}; one of {", ".join(known)}, or one of them and a PEG, '
            f"as in 'learned+peg'{others}"
        )
    options = dict(options or {})
    if not options.keys() <= set(POSITIONS[before]):
        allowed = ', '.join(POSITIONS[before]) or 'nothing'
        raise ValueError(
            f'position_options of position={position!r} can hold {allowed}, got {options}'
        )
    if 'peg' not in (before, after):
        if peg:
            raise ValueError(f'peg={peg} needs a position with a PEG, got position={position!r}')
        return before, None, options
    peg = peg if isinstance(peg, PEGConfig) else PEGConfig(**(peg or {}))
    return 'none' if before == 'peg' else before, peg, options
