"""Show what is installed, whether it works, and a command that fixes the rest.

    cpvt doctor
    python -m cpvt_pyramid.app.doctor    in a clone, before anything is installed

The exit status is 1 if something is broken. Packages are found by their metadata and tested by
importing them, in a second process, because an operator library built for another torch can crash.
This module imports only the standard library.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .tooling.command import run_command
from .tooling.report import amount

ROOT = Path(__file__).resolve().parents[2]  # the checkout, or site-packages
OLDEST_TORCH = (2, 1)
NO_MMCV_FROM = (2, 14)  # this torch needs C++20, and mmcv's setup.py asks for C++17
TIMEOUT = 600  # seconds of a trial; the first import from a cold disk is slow

# What is tested together. Of the mm packages, by import name, all that install the same files: that
# of the maintained fork, that of the original, and others.
TORCH = ('torch==2.13.0', 'torchvision==0.28.0')
MM = {
    'mmengine': ('onedl-mmengine==0.10.12', 'mmengine==0.10.7', 'mmengine-lite'),
    'mmcv': ('onedl-mmcv==2.3.6', 'mmcv==2.1.0', 'mmcv-full', 'mmcv-lite'),
    'mmdet': ('onedl-mmdetection==3.5.1', 'mmdet==3.3.0'),
    'mmseg': ('onedl-mmsegmentation==1.4.2', 'mmsegmentation==1.2.2'),
}
OPTIONAL = ('timm', 'onnx', 'onnxruntime', 'onnxruntime-gpu', 'openvino')


class Finding(NamedTuple):
    """What a row of the table says."""

    state: str  # 'ok', 'note' (optional and missing), 'warn' (may cause problems), 'FAIL' (broken)
    detail: str
    again: Sequence[str] = ()  # import names of what has to be installed again


# What is installed, and what contradicts


def python() -> Finding:
    place = '' if sys.prefix == sys.base_prefix else f', environment {sys.prefix}'
    return Finding('ok', f'{platform.python_version()} on {platform.platform()}{place}')


def torch() -> Finding:
    if not present('torch'):
        detail = 'not installed; only exported models run without it'
        if present('onnxruntime') or present('openvino'):
            return Finding('note', detail)
        return Finding('FAIL', detail, ['torch'])
    version = installed('torch').get('torch', 'unknown version')
    if release(version) and release(version) < OLDEST_TORCH:
        oldest = '.'.join(map(str, OLDEST_TORCH))
        return Finding('FAIL', f'{version}; at least {oldest} is required', ['torch'])
    return Finding('ok', version)


def torchvision() -> Finding:
    if present('torchvision'):
        return Finding('ok', installed('torchvision').get('torchvision', 'unknown version'))
    if present('torch') and any(map(present, (*MM, 'timm'))):
        return Finding('FAIL', 'not installed; OpenMMLab and timm need it', ['torchvision'])
    return Finding('note', 'not installed; for its detectors')


def mm_family() -> Finding:
    """The fork and the original install the same files, so they overwrite each other."""
    if not any(map(present, MM)):
        # Without torch, mmcv cannot be compiled.
        again = [*MM] if present('torch') else []
        return Finding('note', 'not installed; for MMDetection and MMSegmentation', again)
    found = {name: installed(*map(name_of, MM[name])) for name in MM}
    names = ', '.join(f'{name} {v}' for versions in found.values() for name, v in versions.items())
    here = [name for name in MM if found[name]]
    if any(len(versions) > 1 for versions in found.values()):
        return Finding('FAIL', f'twice the same files: {names}', here)
    if any(name_of(pin(name)) not in found[name] for name in here):
        return Finding('warn', f'two families: {names}', here)
    missing = [name for name in ('mmengine', 'mmcv') if not found[name]]
    if missing and (found['mmdet'] or found['mmseg']):
        return Finding('FAIL', f'{" and ".join(missing)} missing: {names}', missing)
    return Finding('ok', names)


def others() -> Finding:
    found = installed(*OPTIONAL)
    versions = ', '.join(f'{name} {version}' for name, version in found.items())
    return Finding('ok' if found else 'note', versions or f'none of {", ".join(OPTIONAL)}')


# What is run in a second process


def device() -> Finding:
    import torch

    built = torch.version.cuda
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    x = torch.ones(2, 2, device='cuda' if gpus else 'cpu')
    (x @ x).sum().item()
    if gpus:
        found = map(torch.cuda.get_device_properties, gpus)
        names = ', '.join(f'{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)' for gpu in found)
        return Finding('ok', f'CUDA {built}: {names}')
    cores = amount(os.cpu_count() or 1, 'core')
    threads = f'{amount(torch.get_num_threads(), "thread")} on {cores}'
    detail = f'CPU, {threads}; torch is built for {f"CUDA {built}" if built else "the CPU only"}'
    is_hidden = os.environ.get('CUDA_VISIBLE_DEVICES') is not None
    if has_nvidia_gpu() and not is_hidden:
        return Finding('warn', f'{detail} and cannot use the GPU', ['torch for the GPU'])
    return Finding('ok', detail)


def has_nvidia_gpu() -> bool:
    try:
        done = subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.startswith('GPU ')


def kernels() -> Finding:
    """What `accelerate` compiles; this may be the first time."""
    from ..acceleration.accelerate import what_is_missing
    from ..acceleration.kernels import has_tiles
    from ..acceleration.library import NoKernels, load_library

    if reason := what_is_missing():
        return Finding('note', f'models cannot be accelerated: {reason}')
    try:
        load_library()
    except NoKernels as error:
        return Finding('note', f'inference on a CPU is slower without them: {error}')
    found = 'compiled, for accelerated models'
    if has_tiles():
        found += '; attention in bfloat16 uses AMX'
    return Finding('ok', found)


def mmcv_operators() -> Finding:
    import torch
    from mmcv.ops import get_compiling_cuda_version

    built = get_compiling_cuda_version()
    if built == 'not available' and torch.cuda.is_available():
        raise RuntimeError(
            'built for the CPU only, but there is a GPU; compile it with nvcc of CUDA '
            f'{torch.version.cuda} installed, or hide the GPU: export CUDA_VISIBLE_DEVICES='
        )
    return Finding('ok', f'compiled; CUDA {built}')


def imports(*modules: str) -> Finding:
    for module in modules:
        import_module(module)
    return Finding('ok', ' and '.join(modules))


def tried(names: Sequence[str]) -> list[Finding]:
    """Run trials in a second process; if it fails, each in one of its own."""
    code = (
        f'import sys; sys.path[:] = {[*sys.path, str(ROOT)]!r}\n'
        f'import json; from cpvt_pyramid.app import doctor\n'
        f'found = [doctor.TRIALS[name][0]() for name in {list(names)!r}]\n'
        f'print(); print(json.dumps(found))'
    )
    try:
        done = subprocess.run([sys.executable, '-c', code], capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        done = None
    if done and done.returncode == 0:
        return [Finding(*finding) for finding in json.loads(done.stdout.splitlines()[-1])]
    if len(names) > 1:
        return [finding for name in names for finding in tried([name])]
    return [Finding('FAIL', reason_of(done)[:200], [TRIALS[names[0]][1]])]


def reason_of(done: subprocess.CompletedProcess | None) -> str:
    """Why a trial failed; None is one that did not end."""
    if done is None:
        return f'timed out after {TIMEOUT} seconds'
    if done.returncode < 0:
        return f'crashed ({signal.strsignal(-done.returncode)})'
    lines = done.stderr.decode(errors='replace').splitlines()
    return lines[-1] if lines else f'status {done.returncode}'


LOOKS: dict[str, Callable[[], Finding]] = {
    'Python': python,
    'torch': torch,
    'torchvision': torchvision,
    'mm family': mm_family,
    'others': others,
}
# A function, and the package that it needs, which is installed again if it fails.
TRIALS: dict[str, tuple[Callable[[], Finding], str]] = {
    'device': (device, 'torch'),
    'CPU kernels': (kernels, 'torch'),
    'torchvision operators': (partial(imports, 'torchvision.ops'), 'torchvision'),
    'OpenCV': (partial(imports, 'cv2'), 'cv2'),
    'mmcv operators': (mmcv_operators, 'mmcv'),
    'mmdet imports': (partial(imports, 'mmdet.apis', 'mmdet.models'), 'mmdet'),
    'mmseg imports': (partial(imports, 'mmseg.apis', 'mmseg.models'), 'mmseg'),
}
# Trials of packages that import mmcv.
NEED_MMCV = ('mmdet imports', 'mmseg imports')


def examined() -> Iterator[tuple[str, Finding]]:
    """The rows of the table, one by one."""
    for name, look in LOOKS.items():
        yield name, look()
    if not present('torch'):
        return
    (found,) = tried(['device'])
    yield 'device', found
    if found.state == 'FAIL':  # nothing else can work without torch
        return
    names = [name for name, (_, package) in TRIALS.items() if present(package)]
    names.remove('device')
    if not names:
        return
    mmcv_fails = not present('mmcv')
    for name, found in zip(names, tried(names)):
        if name == 'mmcv operators' and found.state == 'FAIL':
            mmcv_fails = True
        if name in NEED_MMCV and mmcv_fails:
            found = found._replace(again=())  # it may be sound
        yield name, found


# The command


def command_for(again: Sequence[str]) -> str:
    """One command that installs packages, by their import names, in versions that fit together."""
    for_gpu = 'torch for the GPU' in again
    mm = [name for name in MM if name in again]
    if mm:  # mmdet and mmseg refuse other versions of mmcv
        mm = [name for name in MM if name in again or is_untested(name)]
    pins = {name: pin(name) for name in mm}
    steps = []
    removed = [distribution for name in mm for distribution in installed(*map(name_of, MM[name]))]
    if removed:
        steps.append(f'{pip("uninstall")} {" ".join(removed)}')
    has_new_torch = release(installed('torch').get('torch', '')) >= NO_MMCV_FROM
    if for_gpu or {'torch', 'torchvision'} & {*again} or ('mmcv' in mm and has_new_torch):
        steps.append(f'{pip("uninstall")} torch torchvision')
        backend = '--torch-backend auto ' if for_gpu and present('uv') else ''
        steps.append(f'{pip("install")} {backend}{" ".join(TORCH)}')
    if mm:  # mmengine 0.10.7 uses pkg_resources
        steps.append(f'{pip("install")} "setuptools<81" wheel ninja packaging psutil')
    if 'mmcv' in mm:  # in an isolated build it finds no torch and leaves the operators out
        options = '--no-build-isolation --no-deps --no-cache-dir'
        steps.append(f'MMCV_WITH_OPS=1 {pip("install")} {options} {pins.pop("mmcv")}')
    if pins:
        steps.append(f'{pip("install")} {" ".join(pins.values())}')
    if 'cv2' in again:
        steps.append(f'{pip("install")} --force-reinstall opencv-python-headless numpy')
    return ' && '.join(steps)


def pip(action: str) -> str:
    """With uv if installed: pip may take incompatible torch and torchvision from two indexes.

    An environment that uv has made may have neither of them; then uv is on the PATH.
    """
    python = 'python' if shutil.which('python') == sys.executable else sys.executable
    if not present('uv') and not present('pip') and shutil.which('uv'):
        return f'uv pip {action} --python {sys.executable}'
    tool = 'uv pip' if present('uv') else 'pip'
    no_question = ' -y' if action == 'uninstall' and tool == 'pip' else ''
    return f'{python} -m {tool} {action}{no_question}'


# Packages


def pin(name: str) -> str:
    """The pin of an mm package, in the family that is kept: the original if nothing of the fork is
    installed."""
    has_fork = bool(installed(*(name_of(pins[0]) for pins in MM.values())))
    has_original = bool(installed(*(name_of(pins[1]) for pins in MM.values())))
    return MM[name][1 if has_original and not has_fork else 0]


def name_of(pin: str) -> str:
    return pin.partition('==')[0]


def is_untested(name: str) -> bool:
    """Whether an mm package is installed from elsewhere or in another version than the tested."""
    found = installed(*map(name_of, MM[name]))
    return bool(found) and [f'{name}=={version}' for name, version in found.items()] != [pin(name)]


def installed(*distributions: str) -> dict[str, str]:
    """The installed distributions and their versions."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name) or 'unknown version'
        except (metadata.PackageNotFoundError, KeyError, ValueError, OSError):
            continue  # damaged metadata
    return found


def present(name: str) -> bool:
    """Whether the package can be imported; a folder without __init__.py does not count."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # imported already, without a spec
        return name in sys.modules
    return spec is not None and spec.origin is not None


def release(version: str) -> tuple[int, ...]:
    """'2.13.0+cu130' to (2, 13)."""
    return tuple(map(int, re.findall(r'\d+', version)[:2]))


def doctor() -> int:
    """Print a table, and the command that fixes what is broken."""
    width = max(map(len, (*LOOKS, *TRIALS)))
    broken = 0
    again: list[str] = []
    for name, finding in examined():
        print(f'{finding.state:>4}  {name:<{width}}  {finding.detail}', flush=True)
        broken += finding.state == 'FAIL'
        again += finding.again
    print(f'\n{broken} broken' if broken else '\nnothing is broken')
    if again:
        what = 'The command for it' if broken else 'To install what is missing'
        print(f'{what}:\n\n    {command_for(again)}')
    return int(broken > 0)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(doctor, argv)


if __name__ == '__main__':
    sys.exit(main())
