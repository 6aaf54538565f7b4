"""Position encodings: the PEG of CPVT (arXiv 2102.10882) and those it is compared with.

There are two kinds of encodings, each with one interface:
- added to tokens: a module takes tokens (B, H, W, C) and their mask (see `padding.mask`), and
  returns the tokens with their position added (`PosCNN`, `LearnedPosition`, `SinCosPosition`);
- inside every attention (`AttentionPosition`): queries and keys are rotated (`RoPE`), or a bias is
  added to their scores (`RelativePosition`, `FIRE`, `ALiBi`, `LookHere`).
"""

from .added import LearnedPosition, NoPosition, SinCosPosition, position_table
from .attention import (
    FIRE,
    ALiBi,
    AttentionPosition,
    LookHere,
    RelativePosition,
    RoPE,
    attention_position,
)
from .grid import Grid
from .peg import PEGConfig, PosCNN
from .settings import COLUMNAR_POSITIONS, POSITIONS, PositionSettings, parse_position

__all__ = [
    'ALiBi',
    'AttentionPosition',
    'COLUMNAR_POSITIONS',
    'FIRE',
    'Grid',
    'LearnedPosition',
    'LookHere',
    'NoPosition',
    'PEGConfig',
    'POSITIONS',
    'PosCNN',
    'PositionSettings',
    'RelativePosition',
    'RoPE',
    'SinCosPosition',
    'attention_position',
    'parse_position',
    'position_table',
]
