"""Activation checkpointing that skips what the backward pass does not need."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch.utils.checkpoint
from torch import Tensor

from .dispatch import graph_is_captured, plain, plain_selected
from .products import skip_mlp_output


def checkpoint(function: Callable[..., Tensor], *args: object, ends_in_mlp: bool = False) -> Tensor:
    """function(*args), whose intermediates are recomputed in the backward pass.

    Args:
        function: what to call.
        args: of the function.
        ends_in_mlp: the function does nothing with the output of its `mlp` but return it, after
            additions and dropout. It is then not recomputed.
    """
    if graph_is_captured():
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
    selected = plain_selected()

    @contextmanager
    def recomputation() -> Iterator[None]:
        with plain(selected), skip_mlp_output() if ends_in_mlp else nullcontext():
            yield

    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), recomputation()),
    )
