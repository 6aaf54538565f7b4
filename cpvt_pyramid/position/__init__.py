"""Position encodings that the PEG of CPVT (arXiv 2102.10882) is compared with.

There are three kinds:
- added to tokens (B, H, W, C) by a module that takes them and their `Grid`: `LearnedPosition`,
  `SinCosPosition`, and the PEG itself, which is in `model.py`;
- rotations of queries and keys, the same for all blocks of a stage: `RoPE`;
- a bias of the scores of one attention, by a module that takes queries, keys and their `Grid`:
  `RelativePosition`. Set `position` of an attention to add one of your own.
"""

from .added import LearnedPosition, NoPosition, SinCosPosition
from .attention import RelativePosition, RoPE, rotate
from .settings import POSITIONS, Encoding, PEGConfig, PositionSettings, parse_position
from .site import Site, check_image_size

__all__ = [
    'Encoding',
    'LearnedPosition',
    'NoPosition',
    'PEGConfig',
    'POSITIONS',
    'PositionSettings',
    'RelativePosition',
    'RoPE',
    'SinCosPosition',
    'Site',
    'check_image_size',
    'parse_position',
    'rotate',
]
