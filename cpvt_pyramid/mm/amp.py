"""Mixed precision where mmengine's `AmpOptimWrapper` has none: on CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Runs the model in bfloat16 on the CPU.

    bfloat16 has the range of float32, so gradients do not vanish and losses need no scaling.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), torch.autocast('cpu', torch.bfloat16):
            yield
