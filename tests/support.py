"""The checkout and its tools, child processes, and loading with a report."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import nn

from cpvt_pyramid.weights import LoadReport

ROOT = Path(__file__).parents[1]
# The shipped configs, relative to configs/.
CONFIGS = sorted(
    path.relative_to(ROOT / 'configs').as_posix()
    for path in (ROOT / 'configs').rglob('*.py')
    if '_base_' not in path.parts
)
# False in `make test-torch`, which tests the oldest supported PyTorch.
PINNED_TORCH = (
    f'torch=={torch.__version__.partition("+")[0]}'
    in (ROOT / 'requirements/requirements.txt').read_text()
)

# mmengine's classes with global instances, such as loggers that hold a captured stdout.
GLOBAL_INSTANCES = {
    'mmengine.logging': ('MessageHub', 'MMLogger'),
    'mmengine.registry': ('DefaultScope',),
    'mmengine.visualization': ('Visualizer',),
}


def clear_global_instances() -> None:
    """Clear the global state of mmengine, as in a fresh process."""
    for module, names in GLOBAL_INSTANCES.items():
        if module in sys.modules:
            for name in names:
                getattr(sys.modules[module], name)._instance_dict.clear()


def load_tool(name: str) -> ModuleType:
    """The module of a tool, as in `load_tool('demo/curves')`, loaded afresh."""
    path = ROOT / 'tools' / f'{name}.py'
    spec = importlib.util.spec_from_file_location(f'{path.stem}_tool', path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    """Run a command with further environment variables; its output is captured as text."""
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=os.environ | environment
    )


def load(model: nn.Module, tensors: dict, strict: bool = True) -> LoadReport:
    """Load tensors into a model of this package and return the report that it logs."""
    reports = []
    with mock.patch.object(model, 'log_load_report', reports.append):
        model.load_state_dict(tensors, strict=strict)
    (report,) = reports
    return report
