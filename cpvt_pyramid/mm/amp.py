"""Training in bfloat16 on any device, which mmengine's `AmpOptimWrapper` does not offer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Run the model in bfloat16 autocast, on a CPU or a GPU.

    bfloat16 has the range of float32, so gradients do not vanish and losses need no scaling.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        device = next(model.parameters()).device.type
        with super().optim_context(model), torch.autocast(device, torch.bfloat16):
            yield
