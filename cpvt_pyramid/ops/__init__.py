"""Everything that exists for speed, a file for each operation.

The layers call these functions as they would call `torch.nn.functional`. `plain` selects the plain
version of all of them.
"""

from .attention import attend
from .checkpointing import checkpoint
from .conv import convolve
from .dispatch import plain
from .norm import layer_norm
from .patches import (
    ceil_div,
    cuts_border_windows,
    map_windows,
    merge_windows,
    patch_conv,
    split_windows,
)
from .products import cast_once, linear, mlp
from .resize import resize_table, resize_table_each
from .threads import throttle_spinning

__all__ = [
    'attend',
    'cast_once',
    'ceil_div',
    'checkpoint',
    'convolve',
    'cuts_border_windows',
    'layer_norm',
    'linear',
    'map_windows',
    'merge_windows',
    'mlp',
    'patch_conv',
    'plain',
    'resize_table',
    'resize_table_each',
    'split_windows',
    'throttle_spinning',
]
