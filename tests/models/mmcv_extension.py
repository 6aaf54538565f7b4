"""The module of operators that mmcv's functions call: compiled, or ours."""

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from mmcv import ops

from cpvt_pyramid.mmcv_operators import ext


def both_extensions() -> tuple[ModuleType, ModuleType]:
    """mmcv's compiled operators, and ours."""
    return import_module('mmcv._ext'), ext


@contextmanager
def operators(extension: ModuleType) -> Iterator[None]:
    """Let mmcv's functions call the operators of this module."""
    names = [module.name for module in pkgutil.iter_modules(ops.__path__)]
    modules = [import_module(f'mmcv.ops.{name}') for name in names]
    modules = [module for module in modules if hasattr(module, 'ext_module')]
    before = [module.ext_module for module in modules]
    try:
        for module in modules:
            module.ext_module = extension
        yield
    finally:
        for module, old in zip(modules, before):
            module.ext_module = old
