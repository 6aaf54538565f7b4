"""Everything that exists for speed or for a version of PyTorch, a file for each operation.

The layers call these functions as they would call `torch.nn.functional`, and use the module
`LayerNorm` as they would use that of `torch.nn`. `plain` selects the plain version of
all of them, which is also what runs below PyTorch 2.7.
"""

from .attention import attend
from .checkpointing import checkpoint
from .conv import convolve
from .dispatch import plain
from .norm import LayerNorm
from .patches import ceil_div, map_windows, pad_to_multiple, patch_conv
from .products import apply_linear, autocast, mlp
from .resize import resize_table, resize_table_each
