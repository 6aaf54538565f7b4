"""MMCV's operators without a compiler: made of those of torchvision and PyTorch.

MMCV's Python code asks one compiled module, `mmcv._ext`, for its operators, by name. An ordinary
installation of mmcv has no such module. `provide()` makes Python find `ext` of this folder under
that name if, and only if, it finds no other. What `ext` does not have raises an error when it is
called.

This file needs neither torch nor mmcv.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Optional

EXTENSION = 'mmcv._ext'
EXT_FILE = Path(__file__).with_name('ext.py')


class Operators:
    """Finds `mmcv._ext`. Python asks it last, and so only where mmcv has no operators."""

    @staticmethod
    def find_spec(
        name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name != EXTENSION:
            return None
        return importlib.util.spec_from_file_location(EXTENSION, EXT_FILE)


def provide() -> None:
    """Let mmcv find operators. Nothing changes where it has compiled ones."""
    if Operators not in sys.meta_path:
        sys.meta_path.append(Operators)  # type: ignore[arg-type]


def found() -> Optional[Path]:
    """The file in mmcv's folder that Python takes as `mmcv._ext`: compiled operators, or the file
    of `link_file`; None if it has none."""
    spec = importlib.util.find_spec('mmcv')
    if spec is None or not spec.submodule_search_locations:
        return None
    extension = PathFinder.find_spec(EXTENSION, spec.submodule_search_locations)
    return Path(extension.origin) if extension and extension.origin else None


def link_file() -> Path:
    """Where `_ext.py` is written, which gives these operators to programs that do not import
    `cpvt_pyramid.mm`."""
    spec = importlib.util.find_spec('mmcv')
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'mmcv'", name='mmcv')
    return Path(spec.origin).with_name('_ext.py')


LINK = (
    'from cpvt_pyramid.mmcv_operators.ext import *  # written by `cpvt doctor --link-operators`\n'
)


def compile_command(pip: str = 'pip install') -> str:
    """The command that compiles the operators of the installed mmcv.

    Args:
        pip: how pip is called, up to `install`.
    """
    package = 'onedl-mmcv'
    try:
        package += f'=={version(package)}'
    except PackageNotFoundError:
        for name in ('mmcv', 'mmcv-lite'):
            try:
                package = f'mmcv=={version(name)}'
                break
            except PackageNotFoundError:
                continue
    options = '--no-build-isolation --no-deps --no-cache-dir --force-reinstall'
    return f'MMCV_WITH_OPS=1 {pip} {options} {package}'
