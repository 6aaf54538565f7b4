"""Activation checkpointing."""

from collections.abc import Callable

import torch.utils.checkpoint
from torch import Tensor

from .dispatch import graph_is_captured, plain, plain_selected, transform_is_active


def checkpoint(function: Callable[..., Tensor], *args: object) -> Tensor:
    """Call a function; its intermediate results are recomputed in the backward pass.

    The recomputation runs the same version of the operations, plain or fast, as the forward pass.
    """
    selected = plain_selected() or transform_is_active()

    def run(*args: object) -> Tensor:
        with plain(selected):
            return function(*args)

    called = function if graph_is_captured() else run
    return torch.utils.checkpoint.checkpoint(called, *args, use_reentrant=False)
