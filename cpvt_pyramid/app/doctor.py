"""Show what is installed, whether it works, and a command that fixes the rest.

    cpvt doctor
    cpvt doctor --link-operators         for programs that do not import cpvt_pyramid.mm
    python -m cpvt_pyramid.app.doctor    in a clone, before anything is installed

MMCV needs operators, which it has only if it was compiled. The commands of cpvt and programs that
import cpvt_pyramid.mm take cpvt_pyramid's own instead. With `--link-operators`, all programs of the
environment do: it writes a file, mmcv/_ext.py, which has no effect once compiled operators are
there. `--unlink-operators` removes the file.

The exit status is 1 if something is broken. Packages are found by their metadata and tested by
importing them, in a second process, because an operator library built for another torch can crash.
"""

# This module imports only the standard library.

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

from ..mmcv_operators import LINK, found, link_file
from .tooling.command import UserError, run_command
from .tooling.report import amount

ROOT = Path(__file__).resolve().parents[2]  # the checkout, or site-packages
OLDEST_TORCH = (2, 1)
TIMEOUT = 600  # seconds of a trial; the first import from a cold disk is slow

# What is tested together.
TORCH = ('torch==2.13.0', 'torchvision==0.28.0')


# What installs the files of an mm package: first the one that is advised and tested, with its
# version, then others.
MM = {
    'mmengine': ('onedl-mmengine==0.10.12', 'mmengine', 'mmengine-lite'),
    'mmcv': ('onedl-mmcv==2.3.6', 'mmcv-lite', 'mmcv', 'mmcv-full'),
    'mmdet': ('onedl-mmdetection==3.5.1', 'mmdet'),
    'mmseg': ('onedl-mmsegmentation==1.4.2', 'mmsegmentation'),
}
OPTIONAL = ('timm', 'onnx', 'onnxruntime', 'onnxruntime-gpu', 'openvino', 'av', 'pillow-heif')


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
        again = [*MM] if present('torch') else []
        return Finding('note', 'not installed; for MMDetection and MMSegmentation', again)
    here = {name: versions for name in MM if (versions := installed(*names_of(name)))}
    of_fork = [name for name in here if installed(names_of(name)[0])]
    names = ', '.join(f'{name} {v}' for versions in here.values() for name, v in versions.items())
    if any(len(versions) > 1 for versions in here.values()):
        return Finding('FAIL', f'twice the same files: {names}', [*here])
    if 0 < len(of_fork) < len(here):
        return Finding('warn', f'two families: {names}', [*here])
    missing = [name for name in ('mmengine', 'mmcv') if name not in here]
    if missing and ('mmdet' in here or 'mmseg' in here):
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
    from ..acceleration.library import NoKernels, load_library
    from ..acceleration.processor import line_about_bfloat16

    if reason := what_is_missing():
        return Finding('note', f'models cannot be accelerated: {reason}')
    try:
        load_library()
    except NoKernels as error:
        return Finding('note', f'inference on a CPU is slower without them: {error}')
    if line := line_about_bfloat16():
        return Finding('ok', f'compiled, for accelerated models in float32; {line}')
    return Finding('ok', 'compiled, for accelerated models')


def mmcv_operators() -> Finding:
    import torch
    from mmcv.ops import get_compiling_cuda_version, nms

    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    built = get_compiling_cuda_version()
    file = found()
    is_compiled = file is not None and file != link_file()
    if is_compiled and built == 'not available' and device == 'cuda':
        raise RuntimeError(
            "compiled for the CPU only, but there is a GPU; cpvt_pyramid's operators run on both"
        )
    nms(torch.ones(1, 4, device=device), torch.ones(1, device=device), 0.5)
    if is_compiled:
        return Finding('ok', f'compiled; CUDA {built}')
    whose = "cpvt_pyramid's, for the commands of cpvt and programs that import cpvt_pyramid.mm"
    if file:
        whose = f"cpvt_pyramid's, for all programs: {file}"
    return Finding('ok', whose)


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
    mm = []
    if any(name in MM for name in again):  # mmdet and mmseg refuse other versions of mmcv
        mm = [name for name in MM if name in again or is_untested(name)]
    pins = [MM[name][0] for name in mm]
    steps = []
    if removed := [name for package in mm for name in installed(*names_of(package))]:
        steps.append(f'{pip("uninstall")} {" ".join(removed)}')
    if for_gpu or {'torch', 'torchvision'} & {*again}:
        if old := [name for name in ('torch', 'torchvision') if installed(name)]:
            steps.append(f'{pip("uninstall")} {" ".join(old)}')
        backend = '--torch-backend auto ' if for_gpu and present('uv') else ''
        steps.append(f'{pip("install")} {backend}{" ".join(TORCH)}')
    if pins:  # mmcv without operators: not what pip compiled once, and kept
        no_cache = '--no-cache-dir ' if 'mmcv' in mm else ''
        steps.append(f'{pip("install")} {no_cache}{" ".join(pins)}')
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


def names_of(package: str) -> list[str]:
    """The distributions of an mm package."""
    return [pin.partition('==')[0] for pin in MM[package]]


def is_untested(package: str) -> bool:
    """Whether an mm package is installed from elsewhere or in another version than the tested."""
    name, _, version = MM[package][0].partition('==')
    return installed(*names_of(package)) not in ({}, {name: version})


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


def write_link() -> None:
    """Write `mmcv/_ext.py`."""
    file = found()
    target = mmcv_file()
    if file not in (None, target):
        raise UserError(f'mmcv has compiled operators, which Python prefers: {file}')
    if target.exists() and target.read_text() != LINK:
        raise UserError(f'{target} is not of cpvt_pyramid; remove it to write another')
    target.write_text(LINK)
    print(f"wrote {target}: all programs of this environment find cpvt_pyramid's operators")


def remove_link() -> None:
    """Remove what `write_link` wrote."""
    target = mmcv_file()
    if not target.exists():
        raise UserError(f'there is no {target}')
    if target.read_text() != LINK:
        raise UserError(f'{target} is not of cpvt_pyramid, and stays')
    target.unlink()
    print(f'removed {target}')


def mmcv_file() -> Path:
    try:
        return link_file()
    except ModuleNotFoundError:
        raise UserError("mmcv is not installed; pip install '.[mm]'") from None


def doctor(*, link_operators: bool = False, unlink_operators: bool = False) -> int:
    """
    Args:
        link_operators: let all programs of the environment find cpvt_pyramid's operators of mmcv.
        unlink_operators: remove what --link-operators wrote.
    """
    if link_operators and unlink_operators:
        raise UserError('give --link-operators or --unlink-operators, not both')
    if link_operators:
        write_link()
        return 0
    if unlink_operators:
        remove_link()
        return 0
    return show_table()


def show_table() -> int:
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
