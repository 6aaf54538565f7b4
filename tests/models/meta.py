"""Models to count parameters and operations of."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, Optional

import torch
from torch.overrides import TorchFunctionMode


class SkipInitialization(TorchFunctionMode):
    """Skips the functions that change a tensor in place: on the meta device, too, the random
    numbers of a model take longer than the rest of it."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__.endswith('_') and not func.__name__.endswith('__'):
            return args[0] if args else kwargs['tensor']
        return func(*args, **kwargs)


@contextmanager
def without_values() -> Iterator[None]:
    """Build models on the meta device, without initializing them."""
    with torch.device('meta'), SkipInitialization():
        yield
