"""Show what is installed and whether it works, and how to fix what does not.

    python -m cpvt_pyramid.doctor

With names of rows as arguments, it shows only those. The exit status is 1 if something is broken.
Packages are found by their metadata and tested by running them, in a second process, because an
operator library built for another torch can crash. This module imports only the standard library.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or site-packages
OLDEST_TORCH = (2, 1)
FAST_TORCH = (2, 7)  # ops/dispatch.py
NO_MMCV_FROM = (2, 14)  # this torch needs C++20, and mmcv's setup.py asks for C++17
NO_METADATA = 'found on the path, without metadata'
MARK = 'finding '  # prefix of the second process's lines for the first
TIMEOUT = 600  # seconds of the second process; the first import from a cold disk is slow

# Distributions by import name, of the maintained fork and of the original OpenMMLab.
FORK = {
    'mmengine': 'onedl-mmengine', 'mmcv': 'onedl-mmcv', 'mmdet': 'onedl-mmdetection',
    'mmseg': 'onedl-mmsegmentation',
}  # fmt: skip
ORIGINAL = {
    'mmengine': ('mmengine', 'mmengine-lite'), 'mmcv': ('mmcv', 'mmcv-full', 'mmcv-lite'),
    'mmdet': ('mmdet',), 'mmseg': ('mmsegmentation',),
}  # fmt: skip
# Versions that this project is tested with, as in requirements/; the original family last.
TESTED = {
    'torch': '2.13.0', 'torchvision': '0.28.0',
    'onedl-mmengine': '0.10.12', 'onedl-mmcv': '2.3.6', 'onedl-mmdetection': '3.5.1',
    'onedl-mmsegmentation': '1.4.2',
    'mmengine': '0.10.7', 'mmcv': '2.1.0', 'mmdet': '3.3.0', 'mmsegmentation': '1.2.2',
}  # fmt: skip
# The environments of tools/setup_env.sh and the commands that complete them.
ENVIRONMENTS = {
    '.venv': 'make setup',
    '.venv-original-mm': 'tools/setup_env.sh original-mm',
    '.venv-oldest-torch': 'tools/setup_env.sh oldest-torch',
}
OPTIONAL = {  # by import name: distributions, purpose
    'timm': (('timm',), 'the models registered in timm'),
    'onnx': (('onnx',), 'export to ONNX'),
    'onnxruntime': (('onnxruntime', 'onnxruntime-gpu'), 'running exported models'),
    'openvino': (('openvino',), 'running exported models in OpenVINO'),
    'gradio': (('gradio',), 'the web page of an exported model'),
}


class Finding(NamedTuple):
    """What a row of the table says."""

    state: str  # 'ok', 'note' (optional and missing), 'warn' (may cause problems), 'FAIL' (broken)
    detail: str
    fix: str = ''  # a command


def python() -> Finding:
    place = '' if sys.prefix == sys.base_prefix else f', environment {sys.prefix}'
    return Finding('ok', f'{platform.python_version()} on {platform.platform()}{place}')


def torch() -> Finding:
    version = installed('torch').get('torch')
    if len(found := copies('torch')) > 1:
        detail = f'{len(found)} builds over each other: {", ".join(found)}'
        removal = f'{pip("uninstall")} torch torchvision'  # pip removes one build at a time
        return Finding('FAIL', detail, f'{removal} && {removal} && {torch_pair()}')
    if version is None and not present('torch'):
        fix = f'{pip("install")} torch torchvision'
        if present('onnxruntime') or present('openvino'):
            return Finding('note', 'not installed; exported models run without it', fix)
        return Finding('FAIL', 'not installed', fix)
    if version and release(version) < OLDEST_TORCH:
        wanted = '.'.join(map(str, OLDEST_TORCH))
        return Finding('FAIL', f'{version}; at least {wanted} is required', torch_pair())
    if version and release(version) >= NO_MMCV_FROM and not present('mmcv'):
        detail = f'{version}; mmcv, which uses C++17, does not compile with 2.14 or later'
        return Finding('note', f'{detail}; only for the mm packages', torch_pair())
    if version and release(version) < FAST_TORCH:
        needed = '.'.join(map(str, FAST_TORCH))
        return Finding('ok', f'{version}; plain operations run, faster ones need torch {needed}')
    return Finding('ok', version or NO_METADATA)


def torchvision() -> Finding:
    found = installed('torch', 'torchvision')
    version = found.get('torchvision')
    if version or present('torchvision'):
        builds = {text.partition('+')[2] for text in found.values() if '+' in text}
        if len(builds) > 1:
            return Finding('warn', f'{version}; another build than torch {found["torch"]}',
                           torch_pair())  # fmt: skip
        return Finding('ok', version or NO_METADATA)
    users = ', '.join(name for name in (*FORK, 'timm') if present(name))
    if users:
        return Finding('FAIL', f'not installed; required by {users}', torch_pair())
    return Finding('note', 'not installed; the mm packages and timm require it')


def optional(name: str) -> Finding:
    distributions, purpose = OPTIONAL[name]
    if found := installed(*distributions):
        return Finding('ok', ', '.join(found.values()))
    return Finding('note', f'not installed; for {purpose}', f'{pip("install")} {name}')


def mm_package(name: str) -> Finding | None:
    """The installed distribution of mmengine, mmcv, mmdet or mmseg, if any."""
    if found := installed(*mm_distributions(name)):
        return Finding('ok', versions_text(found))
    if present(name):
        return Finding('warn', NO_METADATA)
    if not any(map(present, FORK)):
        return None  # `mm_family` reports all four
    if name in ('mmengine', 'mmcv') and (present('mmdet') or present('mmseg')):
        detail = 'not installed; mmdet and mmseg require it but do not install it'
        return Finding('FAIL', detail, mm_command(name))
    purpose = {'mmdet': 'detection', 'mmseg': 'segmentation'}.get(name, 'mmdet and mmseg')
    return Finding('note', f'not installed; for {purpose}', mm_command(name))


def mm_family() -> Finding:
    """The fork and the original install the same files, so they overwrite each other, as do mmcv,
    mmcv-full and mmcv-lite. Only mmcv-lite has no operators."""
    found = {name: list(installed(*mm_distributions(name))) for name in FORK}
    forks = [name for name in FORK if FORK[name] in found[name]]
    originals = [name for name in FORK if {*found[name]} & {*ORIGINAL[name]}]
    twice = [name for name in FORK if len(found[name]) > 1]
    if twice:
        wrong = [name for name in FORK if name in twice or forks and name in originals]
        names = ', '.join(distribution for name in wrong for distribution in found[name])
        return Finding('FAIL', f'overwrite each other: {names}', mm_command(*wrong))
    if found['mmcv'] == ['mmcv-lite']:
        return Finding('FAIL', 'mmcv-lite has no operators', mm_command('mmcv'))
    if forks and originals:
        detail = f'mixed: {", ".join(forks)} (the fork), {", ".join(originals)} (the original)'
        return Finding('warn', detail, mm_command(*originals))
    if forks or originals:
        return Finding('ok', 'the maintained fork (onedl-*)' if forks else 'the original')
    if any(map(present, FORK)):
        return Finding('warn', NO_METADATA)
    fix = mm_command(*FORK)
    if (ROOT / 'tools/setup_env.sh').exists() and not set_up():
        fix = f'make -C {os.path.relpath(ROOT)} setup  # installs everything into .venv there'
    return Finding('note', 'not installed; required for MMDetection and MMSegmentation only', fix)


def torch_works() -> Finding:
    import torch

    (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()
    x = torch.ones(1, 1, 2, 4)
    torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=0.5)
    return Finding('ok', 'matrix product and fused attention')


def device() -> Finding:
    import torch

    built = torch.version.cuda
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        names = ', '.join(f'{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)' for gpu in gpus)
        torch.ones(1, device='cuda').add(1).item()
        return Finding('ok', f'CUDA {built}: {names}')
    detail = (
        f'CPU, {torch.get_num_threads()} threads on {os.cpu_count()} cores; torch is built for '
        f'{f"CUDA {built}" if built else "the CPU only"}'
    )
    if not nvidia_gpu() or os.environ.get('CUDA_VISIBLE_DEVICES') is not None:
        return Finding('ok', detail)
    detail += ' and cannot use the NVIDIA GPU'
    if built is not None:
        try:
            torch.cuda.init()
        except RuntimeError as error:
            detail += f': {first_line(error)}'
    return Finding('warn', detail, torch_pair(for_gpu=True))


def torchvision_operators() -> Finding | None:
    if not present('torchvision'):
        return None
    from torchvision.ops import nms

    return two_kept(nms(*two_boxes(), 0.5).tolist(), torch_pair())


def opencv() -> Finding | None:
    names = ('opencv-python', 'opencv-contrib-python')
    found = installed(*names, *(f'{name}-headless' for name in names))
    if not found and not any(map(present, FORK)):
        return None
    import cv2
    import numpy

    cv2.resize(numpy.zeros((4, 4, 3), numpy.uint8), (2, 2))
    detail = f'{versions_text(found)}, NumPy {numpy.__version__}'
    if len(set(found.values())) > 1:
        return Finding('warn', f'{detail}: overwrite each other', opencv_command())
    return Finding('ok', detail)


def mmcv_operators() -> Finding | None:
    if not present('mmcv'):
        return None
    import torch
    from mmcv.ops import get_compiling_cuda_version, nms

    finding = two_kept(nms(*two_boxes(), 0.5)[1].tolist(), mm_command('mmcv'))
    if finding.state != 'ok' or not torch.cuda.is_available():
        return finding
    if get_compiling_cuda_version() == 'not available':
        hidden = 'or hide the GPU: export CUDA_VISIBLE_DEVICES='
        if mmcv_built_for().endswith('-cpu'):
            hidden = f'after installing the CUDA {torch.version.cuda} toolkit with nvcc; {hidden}'
        fix = f'{mm_command("mmcv")}  # {hidden}'
        return Finding('FAIL', 'built for the CPU only, but there is a GPU', fix)
    kept = nms(*(x.cuda() for x in two_boxes()), 0.5)[1].tolist()
    return two_kept(kept, mm_command('mmcv'), f' on CUDA {get_compiling_cuda_version()}')


def imports(package: str) -> Finding | None:
    if not present(package):
        return None
    modules = [f'{package}.apis', f'{package}.models']
    for module in modules:
        import_module(module)
    return Finding('ok', ' and '.join(modules))


def backbone() -> Finding:
    from cpvt_pyramid import CPVTPyramid

    return forwards(CPVTPyramid('pcpvt_nano'))


def registered() -> Finding | None:
    if not present('mmengine'):
        return None
    from mmengine.registry import MODELS

    import_module('cpvt_pyramid.mm')
    return forwards(MODELS.build({'type': 'CPVTPyramid', 'arch': 'pcpvt_nano'}))


def two_boxes() -> tuple:
    """Two boxes with an overlap of 90% and their scores: suppression keeps only the second."""
    import torch

    return torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9]]), torch.tensor([0.1, 0.9])


def two_kept(kept: list[int], fix: str, where: str = '') -> Finding:
    if kept != [1]:
        return Finding('FAIL', f'non-maximum suppression{where} kept {kept}, not [1]', fix)
    return Finding('ok', f'non-maximum suppression is correct{where}')


def forwards(model: Any) -> Finding:
    import torch

    with torch.no_grad():
        maps = model.eval()(torch.zeros(1, 3, 64, 96))
    sizes = [tuple(x.shape[-2:]) for x in maps]
    if sizes != [(16, 24), (8, 12), (4, 6), (2, 3)]:
        return Finding('FAIL', f'wrong maps of a 64x96 image: {sizes}', reinstall_self())
    return Finding('ok', 'CPVTPyramid gives maps at strides 4, 8, 16, 32')


def nvidia_gpu() -> bool:
    """True if there is an NVIDIA GPU, even one that torch cannot use."""
    if list(Path('/dev').glob('nvidia[0-9]*')):
        return True
    try:
        return said('nvidia-smi', '-L').startswith('GPU ')
    except (OSError, subprocess.TimeoutExpired):
        return False


def said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def mmcv_built_for() -> str:
    """What mmcv's operators have to be compiled for here: torch, Python and the device.

    The device is 'cuda-' and the GPU's architectures if torch can use a GPU and there is nvcc, or
    with FORCE_CUDA=1; otherwise 'cpu'. tools/setup_env.sh names the folder of a compiled wheel so.

    Raises:
        ValueError: an operator library for CUDA cannot be compiled with this torch and this nvcc.
    """
    import torch

    logging.getLogger('torch.utils.cpp_extension').setLevel(logging.ERROR)  # "No CUDA runtime"
    from torch.utils.cpp_extension import CUDA_HOME

    name = f'torch{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}'
    nvcc, built = Path(CUDA_HOME or '') / 'bin' / 'nvcc', torch.version.cuda
    forced = os.environ.get('FORCE_CUDA') == '1'
    if not forced and not (torch.cuda.is_available() and built and nvcc.exists()):
        return f'{name}-cpu'
    if not built:
        raise ValueError(f'FORCE_CUDA=1 requires a torch for CUDA, got {torch.__version__}')
    if not nvcc.exists():
        raise ValueError('FORCE_CUDA=1 requires nvcc; install it or set CUDA_HOME')
    version = said(nvcc, '--version').partition('release ')[2].partition(',')[0]
    if release(version)[0] != release(built)[0]:
        raise ValueError(
            f'nvcc is CUDA {version} and torch is built for CUDA {built}, but both must have the '
            'same major version; set TORCH (see tools/setup_env.sh --help) or CUDA_HOME, or hide '
            'the GPU with CUDA_VISIBLE_DEVICES='
        )
    gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    found = ';'.join(sorted({'{}.{}'.format(*gpu) for gpu in gpus}))
    if not (found := os.environ.get('TORCH_CUDA_ARCH_LIST') or found):
        raise ValueError(
            "FORCE_CUDA=1 without a GPU requires TORCH_CUDA_ARCH_LIST, for example '8.0;9.0'"
        )
    return f'{name}-cuda-{re.sub("[^0-9A-Za-z.+]+", "_", found)}'


# Fixes


def python_command() -> str:
    """The command of this interpreter, so that the fixes can be copied and run."""
    # Not resolved: the link belongs to an environment, its target does not.
    if shutil.which('python') == sys.executable:
        return 'python'
    here = os.path.relpath(sys.executable)
    return sys.executable if here.startswith('..') else here


def pip(action: str) -> str:
    """With uv if installed: pip may take incompatible torch and torchvision from two indexes."""
    tool = f'uv pip {action}' if present('uv') else f'pip {action}{" -y" * (action == "uninstall")}'
    return f'{python_command()} -m {tool}'


def reinstall(*packages: str) -> str:
    return f'{pip("install")} --force-reinstall {" ".join(packages)}'


def set_up(torch: str = '') -> str:
    """The command that completes this environment if tools/setup_env.sh made it, else ''.

    torch: another build of torch, as the variable TORCH of that script.
    """
    prefix = Path(sys.prefix)
    command = ENVIRONMENTS.get(prefix.name)
    if prefix.parent != ROOT or command is None or not (ROOT / 'tools/setup_env.sh').exists():
        return ''
    go = '' if Path.cwd() == ROOT else f'cd {ROOT} && '
    choice = f'TORCH={torch} ' if torch else ''
    return f'{go}rm -f {prefix.name}/complete && {choice}{command}'


def torch_pair(for_gpu: bool = False) -> str:
    """Install matching versions of torch and torchvision from one index.

    for_gpu: the build that the driver of the NVIDIA GPU supports, which only uv can choose.
    """
    backend = ['--torch-backend auto'] if for_gpu and present('uv') else []
    pair = [f'{name}=={TESTED[name]}' for name in ('torch', 'torchvision')]
    return set_up('auto' if for_gpu else '') or reinstall(*backend, *pair)


def opencv_command() -> str:
    return reinstall('--no-deps', 'opencv-python-headless')


def mm_command(*names: str) -> str:
    """Install mm packages of the family that is kept: the original if nothing of the fork is
    installed. What has the same files goes first, and what it leaves is incomplete."""
    fork = any(installed(d) for d in FORK.values())
    fork = fork or not any(installed(*d) for d in ORIGINAL.values())
    wanted = {name: FORK[name] if fork else ORIGINAL[name][0] for name in names}
    found = {name: list(installed(*mm_distributions(name))) for name in names}
    removed = [d for name in names if {*found[name]} - {wanted[name]} for d in found[name]]
    steps = [f'{pip("uninstall")} {" ".join(removed)}'] if removed else []
    if set_up():
        return ' && '.join([*steps, set_up()])
    for name in names:
        pin = f'{wanted[name]}=={TESTED[wanted[name]]}'
        if name == 'mmcv':  # in an isolated build it finds no torch and leaves the operators out
            version = installed('torch').get('torch', '')
            steps += [torch_pair()] if version and release(version) >= NO_MMCV_FROM else []
            steps.append(f'{pip("install")} "setuptools<81" wheel ninja packaging psutil')
            build = reinstall('--no-build-isolation --no-deps --no-cache-dir', pin)
            steps.append(f'MMCV_WITH_OPS=1 {build}')
        else:
            steps.append(reinstall('--no-deps', pin))
    return ' && '.join(steps)


def import_command(name: str) -> str:
    """Install an mm package, or a transformers with which mmpretrain, which it imports, works."""
    version = installed('transformers').get('transformers', '0')
    if present('mmpretrain') and release(version) >= (5,):
        return f'{pip("install")} "transformers<5"'
    return mm_command(name)


def reinstall_self() -> str:
    return set_up() or reinstall('--no-deps', str(ROOT))


def known_fix(message: str) -> str:
    """The fix for an error whose message names the cause, else ''."""
    missing = message.partition("No module named '")[2].partition("'")[0]
    causes = (
        # Used by mmengine 0.10.7, removed in setuptools 81.
        (('pkg_resources',), lambda: f'{pip("install")} "setuptools<81"'),
        (('libGL', 'libgthread', 'libSM', 'cv2'), opencv_command),  # no X11
        # A package was compiled for another major version of NumPy.
        (('_ARRAY_API', 'multiarray', 'numpy.dtype size'),
         lambda: reinstall('numpy opencv-python-headless pycocotools')),
        (('torchvision::', "No module named 'torchvision"), torch_pair),
        (('mmcv._ext', '/mmcv/', 'MMCV==', "No module named 'mmcv.ops"),
         lambda: mm_command('mmcv')),
    )  # fmt: skip
    for parts, fix in causes:
        if any(part in message for part in parts):
            return fix()
    if missing in FORK:
        return mm_command(missing)
    if missing and '.' not in missing and missing != 'cpvt_pyramid':
        return f'{pip("install")} {missing}'
    return ''


def installed(*distributions: str) -> dict[str, str]:
    """The installed distributions and their versions."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name) or 'unknown version'
        except (metadata.PackageNotFoundError, KeyError, ValueError, OSError):
            continue  # damaged metadata
    return found


def copies(name: str) -> list[str]:
    """The versions of all copies of a distribution: a failed uninstall leaves one, and a folder of
    the user may have another."""
    found = {(str(d.locate_file('')), d.version) for d in metadata.distributions(name=name)}
    return sorted(version for _, version in found)


def mm_distributions(name: str) -> tuple[str, ...]:
    return FORK[name], *ORIGINAL[name]


def present(name: str) -> bool:
    """Whether the package can be imported; a folder without __init__.py does not count."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # imported already, without a spec
        return name in sys.modules
    return spec is not None and spec.origin is not None


def versions_text(found: dict[str, str]) -> str:
    return ', '.join(f'{name} {version}' for name, version in found.items())


def release(version: str) -> tuple[int, ...]:
    """'2.13.0+cu130' to (2, 13)."""
    digits = [''.join(c for c in part if c.isdigit()) for part in version.split('.')[:2]]
    return tuple(int(d or 0) for d in digits)


Probe = Callable[[], 'Finding | None']
LOOKS: dict[str, Probe] = {
    'Python': python,
    'torch': torch,
    'torchvision': torchvision,
    **{name: partial(optional, name) for name in OPTIONAL},
    'mm family': mm_family,
    **{name: partial(mm_package, name) for name in FORK},
}
# What is run, and the fix if no error message names the cause.
TRIALS: dict[str, tuple[Probe, Callable[[], str]]] = {
    'torch runs': (torch_works, torch_pair),
    'device': (device, torch_pair),
    'torchvision operators': (torchvision_operators, torch_pair),
    'OpenCV': (opencv, opencv_command),
    'mmcv operators': (mmcv_operators, partial(mm_command, 'mmcv')),
    'mmdet imports': (partial(imports, 'mmdet'), partial(import_command, 'mmdet')),
    'mmseg imports': (partial(imports, 'mmseg'), partial(import_command, 'mmseg')),
    'backbone': (backbone, reinstall_self),
    'backbone in mm': (registered, reinstall_self),
}


def examine(rows: Collection[str]) -> Iterator[tuple[str, Finding]]:
    """Yield the findings of these rows as they arrive."""
    for name in LOOKS:
        if name in rows and (finding := attempted(LOOKS[name], lambda: '')):
            yield name, finding
    if present('torch'):
        yield from tried_apart([name for name in TRIALS if name in rows])


def attempted(probe: Probe, fix: Callable[[], str]) -> Finding | None:
    """The probe's finding, or one about the error that it raised."""
    try:
        return probe()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  a package may call sys.exit on import
        command = known_fix(f'{type(error).__name__}: {error}') or fix()
        return Finding('FAIL', f'{type(error).__name__}: {first_line(error)}'[:200], command)


def first_line(error: BaseException) -> str:
    """Of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
                name = signal.Signals(-status).name if status < 0 else f'status {status}'
                end = f'crashed ({name})'
            except subprocess.TimeoutExpired:
                end = f'timed out after {TIMEOUT} seconds'
            file.seek(0)
            lines = file.read().splitlines()
        answers = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
        found = [answer and Finding(*answer) for answer in answers]
        if len(found) < len(names):
            _, fix = TRIALS[names[len(found)]]
            last = '' if not lines or lines[-1].startswith(MARK) else lines[-1].strip()
            detail = f'{end}: {last}' if last else end
            found.append(Finding('FAIL', detail[:200], known_fix(last) or fix()))
        if names[0] == 'torch runs' and found[0].state == 'FAIL':
            names, found = names[:1], found[:1]  # nothing else can work without torch
        yield from ((name, finding) for name, finding in zip(names, found) if finding)
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
    broken, shown = 0, set()
    for name, (state, detail, fix) in examine(rows):
        broken += state == 'FAIL'
        print(f'{state:>4}  {name:<{width}}  {detail}', flush=True)
        if fix:
            again = fix in shown  # one cause often breaks several things
            print(f'{"":>4}  {"":<{width}}  -> {"as above" if again else fix}', flush=True)
            shown.add(fix)
    if broken:
        print(f'\n{broken} broken; run the commands below the FAIL rows, in order')
    else:
        print('\nnothing is broken')
    return 1 if broken else 0


if __name__ == '__main__':
    sys.exit(main())
