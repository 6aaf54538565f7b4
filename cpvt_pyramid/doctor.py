"""Show what is installed and whether it works, and how to fix what does not.

    python -m cpvt_pyramid.doctor

With names of rows as arguments, it shows only those. The exit status is 1 if something is broken.
Packages are found by their metadata and tested by running them, in a second process, because an
operator library built for another torch can crash. This module imports only the standard library.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or site-packages
OLDEST_TORCH = (2, 1)
NO_MMCV_FROM = (2, 14)  # this torch needs C++20, and mmcv's setup.py asks for C++17
MARK = 'finding '  # prefix of the second process's lines for the first
TIMEOUT = 600  # seconds of the second process; the first import from a cold disk is slow

PACKAGES = {  # by import name: distributions, purpose; of mm, the maintained fork's comes first
    'timm': (('timm',), 'the models registered in timm'),
    'onnx': (('onnx',), 'export to ONNX'),
    'onnxruntime': (('onnxruntime', 'onnxruntime-gpu'), 'running exported models'),
    'openvino': (('openvino',), 'running exported models in OpenVINO'),
    'mmengine': (('onedl-mmengine', 'mmengine', 'mmengine-lite'), 'mmdet and mmseg'),
    'mmcv': (('onedl-mmcv', 'mmcv', 'mmcv-full', 'mmcv-lite'), 'mmdet and mmseg'),
    'mmdet': (('onedl-mmdetection', 'mmdet'), 'detection'),
    'mmseg': (('onedl-mmsegmentation', 'mmsegmentation'), 'segmentation'),
}
MM = {name: distributions for name, (distributions, _) in PACKAGES.items() if name[:2] == 'mm'}
# Versions that this project is tested with, as in requirements/; the original family last.
TESTED = {
    'torch': '2.13.0', 'torchvision': '0.28.0',
    'onedl-mmengine': '0.10.12', 'onedl-mmcv': '2.3.6', 'onedl-mmdetection': '3.5.1',
    'onedl-mmsegmentation': '1.4.2',
    'mmengine': '0.10.7', 'mmcv': '2.1.0', 'mmdet': '3.3.0', 'mmsegmentation': '1.2.2',
}  # fmt: skip


class Finding(NamedTuple):
    """What a row of the table says."""

    state: str  # 'ok', 'note' (optional and missing), 'warn' (may cause problems), 'FAIL' (broken)
    detail: str
    fix: str = ''  # a command


def python() -> Finding:
    place = '' if sys.prefix == sys.base_prefix else f', environment {sys.prefix}'
    return Finding('ok', f'{platform.python_version()} on {platform.platform()}{place}')


def torch() -> Finding:
    # A failed uninstall leaves a copy, and a folder of the user may have another.
    copies = {(str(d.locate_file('')), d.version) for d in metadata.distributions(name='torch')}
    if len(copies) > 1:
        builds = ', '.join(sorted(version for _, version in copies))
        removal = f'{pip("uninstall")} torch torchvision'  # pip removes one build at a time
        fix = f'{removal} && {removal} && {torch_pair()}'
        return Finding('FAIL', f'{len(copies)} builds over each other: {builds}', fix)
    if not present('torch'):
        state = 'note' if present('onnxruntime') or present('openvino') else 'FAIL'
        detail = 'not installed; only exported models run without it'
        return Finding(state, detail, f'{pip("install")} torch torchvision')
    version = installed('torch').get('torch', 'unknown version')
    if release(version) and release(version) < OLDEST_TORCH:
        wanted = '.'.join(map(str, OLDEST_TORCH))
        return Finding('FAIL', f'{version}; at least {wanted} is required', torch_pair())
    return Finding('ok', version)


def torchvision() -> Finding:
    if not present('torchvision'):
        state = 'FAIL' if any(map(present, (*MM, 'timm'))) else 'note'
        return Finding(state, 'not installed; the mm packages and timm need it', torch_pair())
    found = installed('torch', 'torchvision')
    version = found.get('torchvision', 'unknown version')
    if len({text.partition('+')[2] for text in found.values() if '+' in text}) > 1:
        detail = f'{version}; another build than torch {found["torch"]}'
        return Finding('warn', detail, torch_pair())
    return Finding('ok', version)


def package(name: str) -> Finding | None:
    distributions, purpose = PACKAGES[name]
    if found := installed(*distributions):
        return Finding('ok', ', '.join(map(' '.join, found.items())))
    detail = f'not installed; for {purpose}'
    if name in MM and not any(map(present, MM)):
        return None  # `mm_family` reports all four
    needed = name in ('mmengine', 'mmcv') and (present('mmdet') or present('mmseg'))
    return Finding('FAIL' if needed else 'note', detail, command_for(name))


def mm_family() -> Finding:
    """The fork and the original install the same files, so they overwrite each other, as do mmcv,
    mmcv-full and mmcv-lite. Only mmcv-lite has no operators."""
    found = {name: list(installed(*MM[name])) for name in MM}
    is_fork = any(MM[name][0] in names for name, names in found.items())
    clash = [name for name in MM if len(found[name]) > 1 or found[name] == ['mmcv-lite']]
    wrong = [name for name in MM if name in clash or is_fork and {*found[name]} & {*MM[name][1:]}]
    if wrong:
        names = ', '.join(distribution for name in wrong for distribution in found[name])
        reason = 'mixed families, twice the same files, or no operators'
        return Finding('FAIL' if clash else 'warn', f'{reason}: {names}', mm_command(*wrong))
    if any(map(present, MM)):
        return Finding('ok', 'the maintained fork (onedl-*)' if is_fork else 'the original')
    fix = mm_command(*MM)
    if (ROOT / 'tools/setup_env.sh').exists() and not set_up():
        fix = f'make -C {os.path.relpath(ROOT)} setup  # installs everything into .venv there'
    return Finding('note', 'not installed; required for MMDetection and MMSegmentation only', fix)


def device() -> Finding:
    import torch

    built = torch.version.cuda
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    x = torch.ones(1, 1, 2, 4, device='cuda' if gpus else 'cpu')
    torch.nn.functional.scaled_dot_product_attention(x, x @ x.mT @ x, x, scale=0.5).sum().item()
    if gpus:
        found = map(torch.cuda.get_device_properties, gpus)
        names = ', '.join(f'{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)' for gpu in found)
        return Finding('ok', f'CUDA {built}: {names}')
    detail = (
        f'CPU, {torch.get_num_threads()} threads on {os.cpu_count()} cores; torch is built for '
        f'{f"CUDA {built}" if built else "the CPU only"}'
    )
    hidden = os.environ.get('CUDA_VISIBLE_DEVICES') is not None
    if hidden or not said('nvidia-smi', '-L').startswith('GPU '):
        return Finding('ok', detail)
    return Finding('warn', f'{detail} and cannot use the GPU', torch_pair(for_gpu=True))


def torchvision_operators() -> Finding:
    from torchvision.ops import nms

    return suppress(nms)


def opencv() -> Finding:
    import cv2
    import numpy

    cv2.resize(numpy.zeros((4, 4, 3), numpy.uint8), (2, 2))
    return Finding('ok', f'{cv2.__version__}, NumPy {numpy.__version__}')


def mmcv_operators() -> Finding:
    import torch
    from mmcv.ops import get_compiling_cuda_version, nms

    finding = suppress(lambda *args: nms(*args)[1])
    if not torch.cuda.is_available():
        return finding
    if get_compiling_cuda_version() == 'not available':
        raise RuntimeError(
            'built for the CPU only, but there is a GPU; compile it with nvcc of CUDA '
            f'{torch.version.cuda} installed, or hide the GPU: export CUDA_VISIBLE_DEVICES='
        )
    return suppress(lambda *args: nms(*args)[1], 'cuda')


def suppress(nms: Callable, device: str = 'cpu') -> Finding:
    """Of two boxes with an overlap of 90%, non-maximum suppression keeps only the better one."""
    import torch

    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9]], device=device)
    kept = nms(boxes, torch.tensor([0.1, 0.9], device=device), 0.5).tolist()
    if kept != [1]:
        raise RuntimeError(f'non-maximum suppression on {device} kept {kept}, not [1]')
    return Finding('ok', f'non-maximum suppression is correct on {device}')


def imports(*modules: str) -> Finding:
    for module in modules:
        import_module(module)
    return Finding('ok', ' and '.join(modules))


def backbone() -> Finding:
    import torch

    from cpvt_pyramid import CPVTPyramid

    with torch.no_grad():
        maps = CPVTPyramid('pcpvt_nano').eval()(torch.zeros(1, 3, 64, 96))
    sizes = [tuple(x.shape[-2:]) for x in maps]
    if sizes != [(16, 24), (8, 12), (4, 6), (2, 3)]:
        raise RuntimeError(f'wrong maps of a 64x96 image: {sizes}')
    return Finding('ok', 'CPVTPyramid gives maps at strides 4, 8, 16, 32')


def said(*command: str | Path) -> str:
    """What a program prints; nothing if it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ''


def mmcv_built_for() -> str:
    """What mmcv's operators have to be compiled for here: torch, Python and the device, which is
    'cuda-' and the GPU's architectures if torch can use a GPU and there is nvcc, or with
    FORCE_CUDA=1; otherwise 'cpu'. tools/setup_env.sh names the folder of a compiled wheel so.

    Raises:
        ValueError: an operator library for CUDA cannot be compiled with this torch and this nvcc.
    """
    import torch

    logging.getLogger('torch.utils.cpp_extension').setLevel(logging.ERROR)  # "No CUDA runtime"
    from torch.utils.cpp_extension import CUDA_HOME

    name = f'torch{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}'
    nvcc, built = Path(CUDA_HOME or '') / 'bin' / 'nvcc', torch.version.cuda
    usable = torch.cuda.is_available() and built and nvcc.exists()
    if not usable and os.environ.get('FORCE_CUDA') != '1':
        return f'{name}-cpu'
    version = said(nvcc, '--version').partition('release ')[2].partition(',')[0]
    gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    found = ';'.join(sorted({'{}.{}'.format(*gpu) for gpu in gpus}))
    found = os.environ.get('TORCH_CUDA_ARCH_LIST') or found
    if not (built and version and found) or release(version)[0] != release(built)[0]:
        raise ValueError(
            'compiling for CUDA needs a torch for CUDA, an nvcc of the same major version (see '
            'CUDA_HOME), and a GPU or architectures in TORCH_CUDA_ARCH_LIST, such as 8.0;9.0; got '
            f'torch for CUDA {built}, nvcc {version or None} in {nvcc.parent}, and architectures '
            f'{found or None}; see tools/setup_env.sh --help, or set CUDA_VISIBLE_DEVICES='
        )
    return f'{name}-cuda-{re.sub("[^0-9A-Za-z.+]+", "_", found)}'


# Fixes


def pip(action: str) -> str:
    """With uv if installed: pip may take incompatible torch and torchvision from two indexes."""
    python = 'python' if shutil.which('python') == sys.executable else sys.executable
    tool = f'uv pip {action}' if present('uv') else f'pip {action}{" -y" * (action == "uninstall")}'
    return f'{python} -m {tool}'


def reinstall(*packages: str) -> str:
    return f'{pip("install")} --force-reinstall {" ".join(packages)}'


def set_up(torch: str = '') -> str:
    """The command that completes this environment if tools/setup_env.sh made it, else ''; with
    another build of torch, as the variable TORCH of that script."""
    prefix = Path(sys.prefix)
    if prefix.parent != ROOT or not (prefix / 'torch').is_file():  # which the script writes
        return ''
    choice = f'TORCH={torch} ' if torch else ''
    script = f'tools/setup_env.sh {prefix.name[len(".venv-") :]}'.strip()
    return f'cd {ROOT} && rm -f {prefix.name}/complete && {choice}{script}'


def torch_pair(for_gpu: bool = False) -> str:
    """Install matching versions of torch and torchvision from one index; `for_gpu` in the build
    that the driver of the NVIDIA GPU supports, which only uv can choose."""
    backend = ['--torch-backend auto'] if for_gpu and present('uv') else []
    pair = [f'{name}=={TESTED[name]}' for name in ('torch', 'torchvision')]
    return set_up('auto' if for_gpu else '') or reinstall(*backend, *pair)


def command_for(package: str) -> str:
    """Install a package, by its import name, in a version that works."""
    if package in ('torch', 'torchvision'):
        return torch_pair()
    if package == 'cv2':
        return reinstall('--no-deps', 'opencv-python-headless')
    if package == 'cpvt_pyramid':
        return set_up() or reinstall('--no-deps', str(ROOT))
    if package in ('mmdet', 'mmseg') and present(package) and present('mmpretrain'):
        # They import mmpretrain, which does not work with transformers 5.
        if release(installed('transformers').get('transformers', '')) >= (5,):
            return f'{pip("install")} "transformers<5"'
    return mm_command(package) if package in MM else f'{pip("install")} {package}'


def mm_command(*names: str) -> str:
    """Install mm packages of the family that is kept: the original if nothing of the fork is
    installed. What has the same files goes first, and what it leaves is incomplete."""
    everything = installed(*(d for names in MM.values() for d in names))
    fork = not everything or any(names[0] in everything for names in MM.values())
    wanted = {name: MM[name][0 if fork else 1] for name in names}
    removed, steps = [], []
    for name in names:
        found = [d for d in MM[name] if d in everything]
        removed += found if {*found} - {wanted[name]} else []
    if removed:
        steps.append(f'{pip("uninstall")} {" ".join(removed)}')
    if set_up():
        return ' && '.join([*steps, set_up()])
    for name in names:
        pin = f'{wanted[name]}=={TESTED[wanted[name]]}'
        if name == 'mmcv':  # in an isolated build it finds no torch and leaves the operators out
            too_new = release(installed('torch').get('torch', '')) >= NO_MMCV_FROM
            steps += [torch_pair()] if too_new else []
            steps.append(f'{pip("install")} "setuptools<81" wheel ninja packaging psutil')
            build = reinstall('--no-build-isolation --no-deps --no-cache-dir', pin)
            steps.append(f'MMCV_WITH_OPS=1 {build}')
        else:
            steps.append(reinstall('--no-deps', pin))
    return ' && '.join(steps)


def known_fix(message: str) -> str:
    """The fix for an error whose message names the cause, else ''."""
    causes = {
        'pkg_resources': f'{pip("install")} "setuptools<81"',  # mmengine 0.10.7 uses it
        'libGL|libgthread|libSM|cv2': command_for('cv2'),  # no X11
        # A package was compiled for another major version of NumPy.
        '_ARRAY_API|multiarray|numpy.dtype': reinstall('numpy opencv-python-headless pycocotools'),
        "torchvision::|No module named 'torchvision": torch_pair(),
        r"mmcv\._ext|/mmcv/|MMCV==|No module named 'mmcv\.ops": mm_command('mmcv'),
    }
    missing = re.search(r"No module named '(?!cpvt_pyramid)(\w+)'", message)
    found = (fix for pattern, fix in causes.items() if re.search(pattern, message))
    return next(found, command_for(missing[1]) if missing else '')


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


LOOKS: dict[str, Callable[[], Finding | None]] = {
    'Python': python,
    'torch': torch,
    'torchvision': torchvision,
    'mm family': mm_family,
    **{name: partial(package, name) for name in PACKAGES},
}


# What is run if torch and this package are installed.
TRIALS: dict[str, tuple[Callable[[], Finding], str]] = {
    'device': (device, 'torch'),
    'torchvision operators': (torchvision_operators, 'torchvision'),
    'OpenCV': (opencv, 'cv2'),
    'mmcv operators': (mmcv_operators, 'mmcv'),
    'mmdet imports': (partial(imports, 'mmdet.apis', 'mmdet.models'), 'mmdet'),
    'mmseg imports': (partial(imports, 'mmseg.apis', 'mmseg.models'), 'mmseg'),
    'backbone': (backbone, 'cpvt_pyramid'),
    'backbone in mm': (partial(imports, 'cpvt_pyramid.mm'), 'mmengine'),
}


def attempted(probe: Callable, package: str) -> Finding | None:
    """The probe's finding, or one about the error that it raised."""
    try:
        return probe()
    except (Exception, SystemExit) as error:  # a package may call sys.exit on import
        text = f'{type(error).__name__}: {error}'
        fix = known_fix(text) or command_for(package)
        return Finding('FAIL', text.partition('\n')[0][:200], fix)


def tried_apart(names: Sequence[str]) -> Iterator[tuple[str, Finding]]:
    """Run the trials in a second process, and in a new one after each crash."""
    while names:
        code = (
            f'import sys; sys.path[:] = {[*sys.path, str(ROOT)]!r}; '
            f'from cpvt_pyramid import doctor; doctor.report_trials({list(names)!r})'
        )
        with tempfile.TemporaryFile('w+', errors='replace') as file:
            try:
                status = subprocess.call(
                    [sys.executable, '-c', code],
                    stdout=file, stderr=file, stdin=subprocess.DEVNULL, timeout=TIMEOUT,
                )  # fmt: skip
                end = f'crashed ({signal.strsignal(-status) if status < 0 else f"status {status}"})'
            except subprocess.TimeoutExpired:
                end = f'timed out after {TIMEOUT} seconds'
            file.seek(0)
            lines = [line[len(MARK) :] for line in file if line.startswith(MARK)]
        found = [Finding(*json.loads(line)) for line in lines]
        if len(found) < len(names):
            found.append(Finding('FAIL', end, command_for(TRIALS[names[len(found)]][1])))
        yield from zip(names, found)
        if names[0] == 'device' and found[0].state == 'FAIL':
            return  # nothing else can work without torch
        names = names[len(found) :]


def report_trials(names: Sequence[str]) -> None:
    """Run trials in the second process; print a line of JSON for each, on a line of its own."""
    for name in names:
        print(f'\n{MARK}{json.dumps(attempted(*TRIALS[name]))}', flush=True)


def main(argv: list[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        'python -m cpvt_pyramid.doctor', description=__doc__, formatter_class=plain
    )
    names = [*LOOKS, *TRIALS]
    parser.add_argument('rows', nargs='*', metavar='ROW', help=', '.join(names))
    rows = parser.parse_args(argv).rows or names
    if unknown := set(rows) - set(names):
        parser.error(f'no row {", ".join(map(repr, sorted(unknown)))}; see --help')
    width = max(map(len, rows))
    looks = ((name, LOOKS[name]()) for name in LOOKS if name in rows)
    tried = [name for name, (_, package) in TRIALS.items() if name in rows and present(package)]
    trials = tried_apart(tried if present('torch') else [])
    broken = 0
    for name, finding in itertools.chain(looks, trials):
        if not finding:
            continue
        broken += finding.state == 'FAIL'
        print(f'{finding.state:>4}  {name:<{width}}  {finding.detail}', flush=True)
        if finding.fix:
            print(f'{"":>4}  {"":<{width}}  -> {finding.fix}', flush=True)
    commands = 'run the commands below the FAIL rows, in order'
    print(f'\n{broken} broken; {commands}' if broken else '\nnothing is broken')
    return int(broken > 0)


if __name__ == '__main__':
    sys.exit(main())
