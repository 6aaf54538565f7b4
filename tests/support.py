"""The checkout and its tools, child processes, and loading with a report."""

import importlib
import importlib.util
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Union

import numpy as np
import torch
from torch import nn

from cpvt_pyramid.app.doctor import installed
from cpvt_pyramid.checkpoints.fit import LoadReport
from cpvt_pyramid.checkpoints.loading import fit_checkpoint

ROOT = Path(__file__).parents[1]
ORIGINAL_MM = bool(installed('mmcv', 'mmcv-lite'))  # not the maintained fork, which is onedl-mmcv
# The shipped configs, relative to configs/; those of other bands than RGB have tests of their own.
CONFIGS = sorted(
    path.relative_to(ROOT / 'configs').as_posix()
    for path in (ROOT / 'configs').rglob('*.py')
    if not {'_base_', 'bands'} & {*path.parts}
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


def pyproject() -> dict[str, Any]:
    """What pyproject.toml says."""
    if sys.version_info < (3, 11):
        import tomli as tomllib
    else:
        import tomllib
    return tomllib.loads((ROOT / 'pyproject.toml').read_text())


def clear_global_instances() -> None:
    """Clear the global state of mmengine, as in a fresh process."""
    for module, names in GLOBAL_INSTANCES.items():
        if module in sys.modules:
            for name in names:
                kind = getattr(sys.modules[module], name)
                for each in (kind, *kind.__subclasses__()):  # each class has its own
                    each._instance_dict.clear()


def load_tool(name: str) -> ModuleType:
    """The module of a command, as in `load_tool('train')`, or of a file in tools/."""
    if (ROOT / f'cpvt_pyramid/app/commands/{name}.py').exists():
        return importlib.import_module(f'cpvt_pyramid.app.commands.{name}')
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
    """Load tensors into a model of this package, and return what they have for it."""
    model.load_state_dict(tensors, strict=strict)
    return fit_checkpoint(model, tensors)[1]


def assert_loaded(model: nn.Module, tensors: dict) -> None:
    """Assert that each tensor of a model is that of its name."""
    for name, value in model.state_dict().items():
        assert torch.equal(value, tensors[name]), name


def photograph(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth noise, (H, W, 3) RGB."""
    import cv2

    small = np.random.default_rng(seed).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3))
    return cv2.resize(small.astype(np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)


def film(path: str, frames: Iterable[np.ndarray], rate: int = 10) -> None:
    """Write a video of frames (H, W, 3)."""
    import cv2

    writer = None
    for frame in frames:
        size = frame.shape[1], frame.shape[0]
        writer = writer or cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*'mp4v'), rate, size)
        writer.write(np.ascontiguousarray(frame))
    writer.release()


def save_tiff(path: Union[Path, str], image: np.ndarray, **options: Any) -> Path:
    """Write an image (H, W) or (H, W, C), with options of rasterio."""
    import rasterio

    bands = np.moveaxis(np.atleast_3d(image), -1, 0)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    profile = dict(zip(('count', 'height', 'width'), bands.shape), dtype=bands.dtype)
    with rasterio.open(path, 'w', 'GTiff', **profile, **options) as file:
        file.write(bands)
    return Path(path)


def in_processes(count: int, function: Callable[[int], int]) -> list[tuple[int, str]]:
    """Exit status and stderr of `function(rank)` in each of several processes, which are forks of
    this one and find each other as if torchrun had started them; it also ends the others if one
    fails."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]

    def work(rank: int) -> int:
        os.environ |= {'RANK': str(rank), 'WORLD_SIZE': str(count), 'LOCAL_RANK': str(rank)}
        os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
        sys.stderr = Path(f'stderr{rank}').open('w', buffering=1)
        os._exit(function(rank))  # without the exit handlers of pytest

    fork = multiprocessing.get_context('fork')
    processes = [fork.Process(target=work, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    end = time.monotonic() + 300
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + 3)
        time.sleep(0.02)
    for process in processes:
        process.terminate()
        process.join(30)
        process.kill()
        process.join()
    return [(p.exitcode, Path(f'stderr{rank}').read_text()) for rank, p in enumerate(processes)]


def assert_same(a: Any, b: Any) -> None:
    """Assert that nested dicts and lists of tensors, arrays and numbers are equal, bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), list(b.values())
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    else:
        assert a == b or callable(a) or np.isnan(a) and np.isnan(b)


def poison_memory():
    """Fill freed memory by NaN, so that what reads it is seen."""
    junk = [torch.full((2**power,), torch.nan) for power in range(8, 20) for _ in range(2)]
    del junk
