"""Everything that exists for speed or for a version of PyTorch, a file for each operation.

The layers call these functions as they would call `torch.nn.functional`, and use the module
`LayerNorm` as they would use that of `torch.nn`. `plain` selects the plain version of
all of them, which is also what runs below PyTorch 2.7.

Names that are private to PyTorch, and why nothing public serves:
- `torch.ops.mkldnn._linear_pointwise` (products): oneDNN's product with a GELU. `F.linear` takes
  MKL.
- `torch.ops.aten._softmax_backward_data` (attention): the gradient of a softmax in one pass.
- `torch.nn.modules.module._global_*_hooks` and `Module._*_hooks` (products): whether calling a
  layer has another effect. Hooks can be registered publicly, not looked for.
- `forward_ad._current_level` and `torch._C._functorch.peek_interpreter_stack` (dispatch): whether a
  transform of `torch.func` or forward-mode AD is active.
- `torch.utils._python_dispatch._get_current_dispatch_mode` (dispatch): whether a dispatch mode must
  see ATen operations. Modes themselves are documented.
- `torch.fx._symbolic_trace._is_fx_tracing_flag` (dispatch): whether torch.fx traces. There are
  public functions for torch.compile, torch.export and TorchScript, not for torch.fx.
- `torch._utils.is_compiling` (dispatch): that of `torch.compiler` in PyTorch 2.1 and 2.2.
"""

from .attention import attend
from .checkpointing import checkpoint
from .conv import convolve
from .dispatch import plain
from .norm import LayerNorm
from .patches import ceil_div, map_windows, pad_to_multiple, patch_conv
from .products import apply_linear, autocast, mlp
from .resize import resize_table, resize_table_each
from .winograd import use_winograd
