"""The one place that knows versions of PyTorch."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Optional

import torch
from torch import nn

VERSION = tuple(int(number) for number in re.findall(r'\d+', torch.__version__)[:2])


def require_torch(version: tuple[int, int], what: str) -> None:
    """Raise an ImportError if PyTorch is older than a version that something needs."""
    if version > VERSION:
        needed = '.'.join(map(str, version))
        raise ImportError(
            f'{what} needs torch {needed} or newer, found {torch.__version__}; '
            f"pip install --upgrade 'torch>={needed}'"
        )


require_torch((2, 1), 'cpvt_pyramid')

if VERSION >= (2, 3):
    is_compiling = torch.compiler.is_compiling
else:
    is_compiling = torch.jit.is_tracing


if VERSION >= (2, 4):  # the other function takes ten times as long there
    is_cpu_autocast: Callable[[], bool] = partial(torch.is_autocast_enabled, 'cpu')
else:
    is_cpu_autocast = torch.is_autocast_cpu_enabled


def cpu_autocast_dtype() -> Optional[torch.dtype]:
    """The dtype in which autocast computes on a CPU; None: it is off."""
    if not is_cpu_autocast():
        return None
    return torch.get_autocast_dtype('cpu') if VERSION >= (2, 4) else torch.get_autocast_cpu_dtype()


def is_autocast(device: str) -> bool:
    """True if autocast is on for a type of device; also in a graph."""
    if VERSION < (2, 4):
        return torch.is_autocast_cpu_enabled() if device == 'cpu' else torch.is_autocast_enabled()
    if is_compiling():  # PyTorch 2.7 cannot trace the function that says what is available
        can_be = device != 'meta'
    else:
        can_be = torch.amp.is_autocast_available(device)
    return can_be and torch.is_autocast_enabled(device)


def autocast_dtype(device: str) -> Optional[torch.dtype]:
    """The dtype in which autocast computes on a type of device; None: it is off."""
    if not is_autocast(device):
        return None
    if VERSION >= (2, 4):
        return torch.get_autocast_dtype(device)
    return torch.get_autocast_cpu_dtype() if device == 'cpu' else torch.get_autocast_gpu_dtype()


def without_autocast(device: str) -> AbstractContextManager:
    """Autocast switched off for a type of device; where it is off, nothing, also in a graph."""
    return torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext()


def statically_known_true(condition: bool) -> bool:
    """True if a condition on sizes holds at all sizes that a captured graph serves."""
    if VERSION < (2, 8):  # torch.compile cannot ask
        return False
    from torch.fx.experimental import symbolic_shapes  # slow to import, and only for graphs

    return symbolic_shapes.statically_known_true(condition)


# Below PyTorch 2.7 there is no way to tell exports from compilation.
is_exporting = torch.compiler.is_exporting if VERSION >= (2, 7) else is_compiling


def add_load_hook(module: nn.Module, hook: Callable) -> None:
    """Call a function before a module loads a state dict; see
    `nn.Module.register_load_state_dict_pre_hook`, which older versions of PyTorch do not have."""
    if hasattr(module, 'register_load_state_dict_pre_hook'):
        module.register_load_state_dict_pre_hook(hook)
    else:
        module._register_load_state_dict_pre_hook(hook, with_module=True)
