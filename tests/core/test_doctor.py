"""The doctor finds every kind of defect, names the fix, and never crashes."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from torch.utils import cpp_extension

from cpvt_pyramid import doctor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretends that just these distributions are installed, outside the checkout's own .venv."""
    modules = {d: m for m, names in doctor.MM.items() for d in names}

    def pretend(**versions: str) -> None:
        versions = {name.replace('_', '-'): version for name, version in versions.items()}

        def installed(*names: str) -> dict[str, str]:
            return {name: versions[name] for name in names if name in versions}

        found = {modules.get(name, name) for name in versions}
        monkeypatch.setattr(doctor, 'installed', installed)
        monkeypatch.setattr(metadata, 'distributions', lambda name: ())
        monkeypatch.setattr(doctor, 'present', found.__contains__)
        monkeypatch.setattr(doctor, 'set_up', lambda torch='': '')

    return pretend


FORK = {'onedl_mmengine': '0.10.12', 'onedl_mmcv': '2.3.6', 'onedl_mmdetection': '3.5.1'}
ORIGINAL = {'mmengine': '0.10.7', 'mmcv': '2.1.0', 'mmdet': '3.3.0'}


@pytest.mark.parametrize(
    'versions, state, removed, installed',
    [  # removing one of two removes files of the other: both go, and one is installed again
        ({**FORK, 'mmdet': '3.3.0'}, 'FAIL', 'onedl-mmdetection mmdet', ['onedl-mmdetection']),
        ({**FORK, 'mmcv': '2.1.0'}, 'FAIL', 'onedl-mmcv mmcv', ['onedl-mmcv']),
        ({**FORK, 'onedl_mmcv': None, 'mmcv_lite': '2.1.0'}, 'FAIL', 'mmcv-lite', ['onedl-mmcv']),
        ({**FORK, 'onedl_mmcv': None, 'mmcv': '2.1.0'}, 'warn', 'mmcv', ['onedl-mmcv']),
        ({**ORIGINAL, 'mmcv_full': '1.7.2'}, 'FAIL', 'mmcv mmcv-full', ['mmcv']),
        ({**ORIGINAL, 'mmcv': None, 'mmcv_lite': '2.1.0'}, 'FAIL', 'mmcv-lite', ['mmcv']),
        ({**ORIGINAL, 'onedl_mmengine': '1'}, 'FAIL', 'onedl-mmengine mmengine mmcv mmdet',
         ['onedl-mmengine', 'onedl-mmcv', 'onedl-mmdetection']),
    ],
)  # fmt: skip
def test_mixed_families(machine, versions, state, removed, installed) -> None:
    """Everything of the wrong files is removed first; then packages in the order of their need."""
    machine(**{name: version for name, version in versions.items() if version})
    found = doctor.mm_family()
    assert found.state == state
    removal, *steps = found.fix.split(' && ')
    assert re.search(rf'pip uninstall (-y )?{removed}$', removal)
    pinned = [step.rpartition(' ')[2] for step in steps if '==' in step]
    assert pinned == [f'{name}=={doctor.TESTED[name]}' for name in installed]
    if removed == 'mmcv-lite':
        assert doctor.known_fix("No module named 'mmcv.ops'").startswith(removal)


ABSENT = {'onedl_mmengine': '0.10.12', 'onedl_mmsegmentation': '1.4.2'}  # mmcv and mmdet
LOOKS = [  # what is installed, the row, its state, and a pattern in its detail and fix
    ({'torch': '2.13.0'}, 'mm family', 'note', '-> make .* there$'),
    (FORK, 'mm family', 'ok', 'fork'),
    (ORIGINAL, 'mm family', 'ok', 'the original'),
    (ABSENT, 'mmcv', 'FAIL', '--no-build-isolation .* onedl-mmcv==2.3.6$'),
    (ABSENT, 'mmdet', 'note', ' install .*onedl-mmdetection==3.5.1$'),
    (ABSENT, 'mmseg', 'ok', '1.4.2'),
    (ORIGINAL, 'mmseg', 'note', ' mmsegmentation==1.2.2$'),
    ({}, 'torch', 'FAIL', 'install torch torchvision$'),
    ({'onnxruntime': '1.31'}, 'torch', 'note', 'install torch torchvision$'),
    ({'torch': '2.0.1+cpu'}, 'torch', 'FAIL', 'at least 2.1'),
    ({'torch': '2.1.0'}, 'torch', 'ok', '2.1.0 -> $'),
    ({'torch': '2.13.0+cpu', 'torchvision': '0.28.0+cu130'}, 'torchvision', 'warn', '0.28.0'),
    ({'timm': '1.0'}, 'torchvision', 'FAIL', 'torchvision==0.28.0'),
    ({'timm': '1.0', 'torchvision': '0.28.0'}, 'torchvision', 'ok', '0.28.0'),
    ({'onnxruntime_gpu': '1.31'}, 'onnxruntime', 'ok', '1.31'),
    *(({}, name, 'note', f'pip install {name}$') for name in ('timm', 'openvino')),
]


def test_packages(machine, monkeypatch) -> None:
    for versions, row, state, text in LOOKS:
        machine(**versions)
        found = doctor.LOOKS[row]()
        assert found.state == state and re.search(text, f'{found.detail} -> {found.fix}'), row
    machine(torch='2.13.0')
    assert [doctor.package(name) for name in doctor.MM] == [None] * 4  # 'mm family' reports all
    # mmdet.models imports mmpretrain if it is installed.
    for version, fix in (('5.23.0', '"transformers<5"'), ('4.57.6', 'onedl-mmdetection==3.5.1')):
        machine(**FORK, mmpretrain='1.3.6', transformers=version)
        assert doctor.command_for('mmdet').endswith(fix)
    builds = [SimpleNamespace(version=v, locate_file=str) for v in ('2.13.0+cpu', '2.1.2+cu118')]
    monkeypatch.setattr(metadata, 'distributions', lambda name: builds)
    found = doctor.torch()
    assert found.state == 'FAIL' and '2.1.2+cu118, 2.13.0+cpu' in found.detail
    removal, again, pair = found.fix.split(' && ')
    assert removal == again and 'uninstall' in removal and 'torchvision==0.28.0' in pair


def test_versions_are_those_of_the_requirements() -> None:
    names = ('pyproject.toml', 'tools/setup_env.sh', 'requirements/requirements.txt')
    text = ''.join((ROOT / name).read_text() for name in names)
    pinned = dict(re.findall(r'\b(?<!-)([\w-]+)==([\w.]+)', text))  # the newest torch comes last
    assert doctor.TESTED == {name: pinned.get(name) for name in doctor.TESTED}
    oldest = '.'.join(map(str, doctor.OLDEST_TORCH))
    assert f'"torch>={oldest}"' in (ROOT / 'pyproject.toml').read_text()
    assert f'torch {oldest} or newer' in (ROOT / 'README.md').read_text()
    assert f'"torch=={oldest}.' in (ROOT / 'pyproject.toml').read_text()


def test_errors_that_name_their_cause(machine) -> None:
    machine(torch='2.13.0', onedl_mmcv='2.3.6')
    for message, command in (
        ("ModuleNotFoundError: No module named 'pkg_resources'", '"setuptools<81"'),
        ("ModuleNotFoundError: No module named 'ftfy'", 'install ftfy'),
        ('ImportError: /x/mmcv/_ext.so: undefined symbol: _ZN3c10', '--no-build-isolation'),
        ('AssertionError: MMCV==2.2.0 is used but incompatible', '--no-build-isolation'),
        ('ImportError: libGL.so.1: cannot open shared object file', 'opencv-python-headless'),
        ('RuntimeError: operator torchvision::nms does not exist', 'torchvision==0.28.0'),
        ('ImportError: numpy.core.multiarray failed to import', 'reinstall numpy'),
        ("ModuleNotFoundError: No module named 'mmdet'", 'onedl-mmdetection==3.5.1'),
        ("ModuleNotFoundError: No module named 'cpvt_pyramid.x'", ''),
    ):
        fix = doctor.known_fix(message)
        assert command in fix and bool(command) == bool(fix)


def test_commands_can_be_pasted(machine) -> None:
    machine(torch='2.14.0', **FORK, **ORIGINAL)
    commands = doctor.mm_command('mmcv'), doctor.mm_command(*doctor.MM), doctor.mm_family().fix
    for command in commands:
        assert '#' not in command.rpartition('&&')[0]  # it would hide the commands after it
        assert subprocess.run(['bash', '-n', '-c', command]).returncode == 0
    assert 'torch==2.13.0' in commands[0]  # with which mmcv compiles
    machine(torch='2.13.0', **FORK)
    assert 'torch==' not in doctor.mm_command('mmcv')


@pytest.mark.parametrize('name, argument', [('.venv', ''), ('.venv-original-mm', ' original-mm')])
def test_environment_of_a_checkout_is_fixed_by_its_script(name, argument, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, 'ROOT', tmp_path)
    monkeypatch.setattr(sys, 'prefix', str(tmp_path / name))
    assert doctor.set_up() == ''
    (tmp_path / name).mkdir()
    (tmp_path / name / 'torch').touch()
    # Without the stamp, or the script would do nothing.
    begin, script = f'cd {tmp_path} && rm -f {name}/complete', f'tools/setup_env.sh{argument}'
    assert doctor.mm_command('mmcv') == f'{begin} && {script}'
    assert doctor.torch_pair(for_gpu=True) == f'{begin} && TORCH=auto {script}'


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """Pretends that torch is built for a version of CUDA and can or cannot use a GPU, and that
    programs print something."""

    def pretend(built, available: bool, **programs: str) -> None:
        monkeypatch.setattr(torch.version, 'cuda', built)
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: available)
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: int(available))
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda i: (9, 0))
        (tmp_path / 'bin').mkdir()
        for name, text in programs.items():
            program = tmp_path / 'bin' / name.replace('_', '-')
            program.write_text(f'#!/bin/sh\necho "{text}"')
            program.chmod(0o755)

    monkeypatch.setattr(cpp_extension, 'CUDA_HOME', str(tmp_path))
    monkeypatch.setenv('PATH', f'{tmp_path}/bin:{os.environ["PATH"]}')
    for name in ('FORCE_CUDA', 'TORCH_CUDA_ARCH_LIST', 'CUDA_VISIBLE_DEVICES'):
        monkeypatch.delenv(name, raising=False)
    return pretend


def test_a_gpu_that_torch_cannot_use(cuda, machine, monkeypatch) -> None:
    machine(uv='0.13')
    cuda(None, available=False, nvidia_smi='GPU 0: NVIDIA H100 (UUID: GPU-1)')
    found = doctor.device()
    assert found.state == 'warn' and 'cannot use the GPU' in found.detail
    assert '--torch-backend auto torch==' in found.fix
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')  # hidden on purpose
    assert doctor.device().state == 'ok'


LIST = {'TORCH_CUDA_ARCH_LIST': '8.0; 9.0+PTX'}
FORCE = {'FORCE_CUDA': '1'}


@pytest.mark.parametrize(
    'built, available, nvcc, environment, result',
    [
        ('13.0', True, None, {}, 'cpu'),
        ('13.0', True, '13.1', {}, 'cuda-9.0'),
        ('13.0', False, '13.1', LIST, 'cpu'),
        ('13.0', False, '13.1', LIST | FORCE, 'cuda-8.0_9.0+PTX'),
        ('13.0', False, None, LIST | FORCE, 'nvcc None'),
        ('13.0', False, '13.0', FORCE, 'architectures None'),
        ('12.6', True, '13.0', FORCE, 'torch for CUDA 12.6, nvcc 13.0'),
        (None, False, '13.0', FORCE, 'torch for CUDA None'),
    ],
)
def test_what_mmcv_is_built_for(built, available, nvcc, environment, result, cuda, monkeypatch):
    cuda(built, available, **({'nvcc': f'tools, release {nvcc}, V{nvcc}.88'} if nvcc else {}))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if result.startswith('c'):
        name = f'torch{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}'
        assert doctor.mmcv_built_for() == f'{name}-{result}'
        return
    with pytest.raises(ValueError, match=f'an nvcc of the same major version .*{result}'):
        doctor.mmcv_built_for()


def test_operators_that_do_not_work(cuda, monkeypatch) -> None:
    from mmcv import ops

    monkeypatch.setattr(ops, 'get_compiling_cuda_version', lambda: 'not available')
    cuda('13.0', available=True)
    found = doctor.attempted(*doctor.TRIALS['mmcv operators'])
    assert found.state == 'FAIL' and 'nvcc of CUDA 13.0' in found.detail and found.fix
    with pytest.raises(RuntimeError, match=r'cpu kept \[1, 0\], not \[1\]'):
        doctor.suppress(lambda *args: torch.tensor([1, 0]))


def test_here_everything_works() -> None:
    found = {name: finding for name, look in doctor.LOOKS.items() if (finding := look())}
    assert {finding.state for finding in found.values()} <= {'ok', 'note'}, found
    assert found['mmdet'].state == found['mmseg'].state == found['mmcv'].state == 'ok'
    tried = {name: doctor.attempted(*trial) for name, trial in doctor.TRIALS.items()}
    assert {finding.state for finding in tried.values()} <= {'ok', 'warn'}, tried


def run_doctor(folder: Path, modules: dict[str, str]) -> str:
    """What the doctor prints with only these modules: -S leaves out site-packages."""
    shutil.copytree(ROOT / 'cpvt_pyramid', folder / 'cpvt_pyramid')
    for name, text in modules.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, '-S', '-m', 'cpvt_pyramid.doctor'], cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, '')
    return done.stdout


def test_bare_python_and_a_torch_that_crashes(tmp_path) -> None:
    table = run_doctor(tmp_path / 'bare', {})
    assert re.search(r'FAIL  torch  .*\n +-> .* install torch torchvision\n', table)
    assert 'note  mm family' in table and table.count('FAIL') == 2
    assert table.splitlines()[-1].startswith('1 broken')
    table = run_doctor(tmp_path / 'crash', {'torch/__init__.py': 'import os; os.abort()'})
    assert re.search(r'FAIL  device  .*Aborted.*\n.*torch==2.13.0', table)
    assert 'backbone' not in table  # the trials end


def test_each_broken_package_is_reported(tmp_path) -> None:
    table = run_doctor(tmp_path, {
        'torch/__init__.py': 'import sys; from unittest.mock import MagicMock\n'
        'torch = sys.modules["torch"] = MagicMock(); torch.cuda.is_available.return_value = False\n'
        'torch.get_num_threads.return_value = 3; torch.version.cuda = None\n'
        'print("noise without an end", end="")',
        'torchvision/__init__.py': '',
        'torchvision/ops.py': 'import os, signal; os.kill(os.getpid(), signal.SIGSEGV)',
        'cv2/__init__.py': 'raise ImportError("libGL.so.1: cannot open shared object file")',
        'mmcv/__init__.py': '',
        'mmcv/ops.py': 'import mmcv._ext',
        'mmdet/__init__.py': 'assert False, "MMCV==9.9.9 is used but incompatible"',
        'mmseg/__init__.py': '',
        'mmseg/apis.py': 'import sys; sys.exit("leaving")',
        'mmengine/__init__.py': 'import pkg_resources_gone',
    })  # fmt: skip
    assert re.search('ok  device +CPU, 3 threads', table)
    for name, cause, command in [
        ('torchvision operators', 'Segmentation fault', 'torchvision==0.28.0'),
        ('OpenCV', 'libGL', 'opencv-python-headless'),
        ('mmcv operators', 'mmcv._ext', 'MMCV_WITH_OPS=1'),
        ('mmdet imports', 'MMCV==9.9.9', 'MMCV_WITH_OPS=1'),
        ('mmseg imports', 'leaving', 'onedl-mmsegmentation==1.4.2'),
        ('backbone in mm', 'pkg_resources_gone', 'setuptools<81'),
    ]:
        assert re.search(f'FAIL  {name} .*{cause}.*\n +-> .*{command}', table), (name, table)


def test_rows_can_be_chosen_and_a_trial_that_hangs_times_out(capsys, monkeypatch) -> None:
    assert doctor.main(['Python', 'timm']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ['Python', 'timm'] and len(lines) == 4
    monkeypatch.setattr(doctor, 'TIMEOUT', 0.02)  # less than any import of torch
    assert doctor.main(['device']) == 1
    assert re.match('FAIL  device  timed out after', capsys.readouterr().out)
    with pytest.raises(SystemExit):
        doctor.main(['mmcv', 'no such'])
    assert "no row 'no such'" in capsys.readouterr().err
