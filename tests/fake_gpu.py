"""Models on fake and meta tensors, which have no values."""

import torch
from torch import nn


def place(model: nn.Module, device: str) -> None:
    """Give a model empty parameters and buffers on a device."""
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.empty(x.shape, device=device)))
        for name, x in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(x.shape, dtype=x.dtype, device=device))
