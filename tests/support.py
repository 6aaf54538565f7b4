"""Where the tests find the checkout and its tools."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_tool(name: str) -> ModuleType:
    """The module of a tool, as in `load_tool('demo/curves')`, loaded afresh."""
    path = ROOT / 'tools' / f'{name}.py'
    spec = importlib.util.spec_from_file_location(f'{path.stem}_tool', path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
