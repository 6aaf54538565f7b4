"""The table of layouts: a file each, which declares its row as `LAYOUT`."""

from functools import cache
from importlib import import_module
from pathlib import Path

from ...tooling.command import UserError
from ..layout import Holds, Layout


@cache
def every_layout() -> dict[str, Layout]:
    """The layouts by their names, those of their files."""
    names = sorted(path.stem for path in Path(__file__).parent.glob('[!_]*.py'))
    return {name: import_module(f'.{name}', __package__).LAYOUT for name in names}


def formats_with(holds: Holds) -> list[str]:
    """The names of the layouts that hold objects or masks."""
    return [name for name, layout in every_layout().items() if layout.holds == holds]


def layout_named(name: str, source: str) -> Layout:
    """The layout that a source, which the error names, asks for.

    Raises:
        UserError: there is no such layout.
    """
    known = every_layout()
    if name not in known:
        what = source if source.startswith('--') else f'{source}: format'
        raise UserError(f'{what} must be one of {", ".join(known)}, got {name[:40]}')
    return known[name]
