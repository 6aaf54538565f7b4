"""Models without values: the names and shapes of tensors, from the models that have them."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .archs import ARCHS, COLUMNAR_ARCHS

Layout = dict[str, torch.Size]  # the shapes of a model's tensors, by name


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


@functools.cache
def layout_of(build: Callable[[Any], nn.Module], arch: Any) -> Layout:
    """The tensors of the model that a function builds of an `Arch` or a `ColumnarArch`."""
    with without_values():
        model = build(arch)
    return {name: value.shape for name, value in nn.Module.state_dict(model).items()}


def layout_of_row(name: str) -> Layout:
    """The tensors of the model of a row of `ARCHS` or `COLUMNAR_ARCHS`, as it is published."""
    if name in ARCHS:
        return layout_of(model_class('CPVTPyramid'), ARCHS[name])
    return layout_of(model_class('DenseCPVT'), COLUMNAR_ARCHS[name])


@functools.cache
def names_of_rows() -> dict[str, tuple[str, ...]]:
    """For each row of `ARCHS` and `COLUMNAR_ARCHS`, the names of the tensors that published files
    of its kind may have, but of the first blocks alone: one of each kind of attention."""
    found = {}
    for name, arch in ARCHS.items():
        ones = (1,) * len(arch.dims)
        kinds = len(arch.attentions)
        small = arch._replace(
            dims=ones,
            heads=ones,
            mlp_ratios=ones,
            depths=tuple(min(depth, kinds) for depth in arch.depths),
            position='none',
        )
        found[name] = tuple(layout_of(model_class('CPVTPyramid').with_all_parts, small))
    for name, column in COLUMNAR_ARCHS.items():
        tiny = column._replace(dim=4, heads=1, depth=1)
        found[name] = tuple(layout_of(model_class('DenseCPVT').with_all_parts, tiny))
    return found


def model_class(name: str) -> Any:
    """A class of backbones, imported when a file is read: their modules import its reading."""
    module = import_module(dict(CPVTPyramid='.model', DenseCPVT='.columnar')[name], __package__)
    return getattr(module, name)
