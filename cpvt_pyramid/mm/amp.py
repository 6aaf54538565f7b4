"""Mixed precision that mmengine's `AmpOptimWrapper` does not have: bfloat16, on any device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Runs the model in bfloat16, on a CPU or a GPU.

    bfloat16 has the range of float32, so gradients do not vanish and losses need no scaling.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        device = next(model.parameters()).device.type
        with super().optim_context(model), torch.autocast(device, torch.bfloat16):
            yield
