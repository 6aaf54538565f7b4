"""The doctor finds every kind of defect, names one command, and never crashes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest
import torch
from support import ROOT

from cpvt_pyramid.acceleration import library, processor
from cpvt_pyramid.app import doctor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretends that just these distributions are installed."""
    modules = {name: package for package in doctor.MM for name in doctor.names_of(package)}

    def pretend(**versions: Optional[str]) -> None:
        found = {name.replace('_', '-'): version for name, version in versions.items() if version}

        def installed(*names: str) -> dict[str, str]:
            return {name: found[name] for name in names if name in found}

        present = {'pip', *(modules.get(name, name) for name in found)}
        monkeypatch.setattr(doctor, 'installed', installed)
        monkeypatch.setattr(doctor, 'present', present.__contains__)

    return pretend


def test_an_environment_without_pip(machine, monkeypatch):
    """As `uv venv` makes them."""
    machine(torch='2.13.0')
    monkeypatch.setattr(doctor, 'present', {'torch'}.__contains__)
    monkeypatch.setattr(doctor.shutil, 'which', {'uv': '/bin/uv'}.get)
    command = doctor.command_for(['mmcv'])
    assert command.startswith('uv pip install --python /') and sys.executable in command


FORK = {'onedl_mmengine': '0.10.12', 'onedl_mmcv': '2.3.6', 'onedl_mmdetection': '3.5.1'}
ORIGINAL = {'mmengine': '0.10.7', 'mmcv': '2.1.0', 'mmdet': '3.3.0'}
LITE = {'mmengine': '0.10.7', 'mmcv_lite': '2.1.0', 'mmdet': '3.3.0'}
ABSENT = {'onedl_mmengine': '0.10.12', 'onedl_mmsegmentation': '1.4.2'}  # mmcv


@pytest.mark.parametrize(
    'versions, state, removed, pins',
    [
        # Removing one of two removes files of the other: both go, and one is installed again.
        ({**FORK, 'mmdet': '3.3.0'}, 'FAIL', 'onedl-mmdetection mmdet', 'onedl-mmdetection'),
        ({**FORK, 'mmcv': '2.1.0'}, 'FAIL', 'onedl-mmcv mmcv', 'onedl-mmcv'),
        ({**FORK, 'onedl_mmcv': None, 'mmcv_lite': '2.1.0'}, 'warn', 'mmcv-lite', 'onedl-mmcv'),
        ({**FORK, 'onedl_mmcv': None, 'mmcv': '2.1.0'}, 'warn', 'mmcv', 'onedl-mmcv'),
        (
            {**ORIGINAL, 'mmcv_full': '1.7.2'},
            'FAIL',
            'mmengine mmcv mmcv-full mmdet',
            'onedl-mmengine onedl-mmcv onedl-mmdetection',
        ),
        (
            {**ORIGINAL, 'onedl_mmengine': '1'},
            'FAIL',
            'onedl-mmengine mmengine mmcv mmdet',
            'onedl-mmengine onedl-mmcv onedl-mmdetection',
        ),
        (ABSENT, 'FAIL', '', 'onedl-mmcv'),
        # mmdet refuses another version of mmcv.
        (
            {**FORK, 'onedl_mmcv': None, 'mmengine': '0.1'},
            'FAIL',
            'onedl-mmengine mmengine',
            'onedl-mmengine',
        ),
    ],
)
def test_mixed_families(machine, versions, state, removed, pins) -> None:
    """Everything of the wrong files is removed first; then packages in the order of their need."""
    machine(torch='2.13.0', **versions)
    found = doctor.mm_family()
    assert found.state == state and found.again
    command = doctor.command_for(found.again)
    assert 'mmsegmentation' not in command or 'onedl_mmsegmentation' in versions
    removal = re.match(r'\S+ -m pip uninstall -y ([^&]*) && ', command)
    removed_here = removal[1] if removal else ''
    assert {*removed.split()} <= {*removed_here.split()}
    named = [pin.partition('==')[0] for pin in re.findall(r'\S+==\S+', command)]
    assert [name for name in named if name in pins.split()] == pins.split()


def test_a_package_that_fails_is_installed_with_all_of_other_versions(machine) -> None:
    """mmdet fails on import if mmcv has another version."""
    machine(torch='2.13.0', **{**FORK, 'onedl_mmcv': '2.2.0'})
    command = doctor.command_for(['mmdet'])
    assert 'uninstall -y onedl-mmcv onedl-mmdetection && ' in command
    assert command.endswith(' --no-cache-dir onedl-mmcv==2.3.6 onedl-mmdetection==3.5.1')
    machine(torch='2.13.0', **FORK)
    assert 'mmcv' not in doctor.command_for(['mmdet'])


LOOKS = [  # what is installed, the row, its state, and a pattern in its detail
    ({'torch': '2.13.0'}, 'mm family', 'note', 'not installed'),
    (FORK, 'mm family', 'ok', 'onedl-mmcv 2.3.6'),
    (ORIGINAL, 'mm family', 'ok', '^mmengine 0.10.7, mmcv 2.1.0'),
    (LITE, 'mm family', 'ok', '^mmengine 0.10.7, mmcv-lite 2.1.0'),
    ({}, 'torch', 'FAIL', 'only exported models run without it'),
    ({'onnxruntime': '1.31'}, 'torch', 'note', 'only exported models run without it'),
    ({'torch': '2.0.1+cpu'}, 'torch', 'FAIL', 'at least 2.1'),
    ({'torch': '2.1.0'}, 'torch', 'ok', '2.1.0$'),
    ({'torch': '2.13.0', 'timm': '1.0'}, 'torchvision', 'FAIL', 'timm need it'),
    ({'timm': '1.0'}, 'torchvision', 'note', 'not installed'),
    ({'timm': '1.0', 'torchvision': '0.28.0'}, 'torchvision', 'ok', '0.28.0'),
    ({'onnxruntime_gpu': '1.31'}, 'others', 'ok', '^onnxruntime-gpu 1.31$'),
    ({}, 'others', 'note', 'none of timm, '),
]


def test_packages(machine) -> None:
    for versions, row, state, text in LOOKS:
        machine(**versions)
        found = doctor.LOOKS[row]()
        assert found.state == state and re.search(text, found.detail), row


def test_versions_are_those_of_the_requirements() -> None:
    names = ('pyproject.toml', 'tools/setup_env.sh', 'requirements/requirements.txt')
    text = ''.join((ROOT / name).read_text() for name in names)
    pinned = dict(re.findall(r'\b(?<!-)([\w-]+)==([\w.]+)', text))  # the newest torch comes last
    pins = [*doctor.TORCH, *(distributions[0] for distributions in doctor.MM.values())]
    assert len(pins) == 6
    for pin in pins:
        name, _, version = pin.partition('==')
        assert pinned[name] == version
    oldest = '.'.join(map(str, doctor.OLDEST_TORCH))
    assert f'"torch>={oldest}"' in (ROOT / 'pyproject.toml').read_text()
    assert f'torch {oldest}, or newer' in (ROOT / 'docs/install.md').read_text()
    assert f'"torch=={oldest}.' in (ROOT / 'pyproject.toml').read_text()


def test_the_command_can_be_pasted(machine) -> None:
    machine(torch='2.14.0', uv='1', **FORK, **ORIGINAL)
    everything = [*doctor.MM, 'torch', 'cv2']
    for again in (everything, ['mmcv'], ['torch for the GPU'], ['cv2']):
        command = doctor.command_for(again)
        assert '#' not in command and '\n' not in command
        assert subprocess.run(['bash', '-n', '-c', command]).returncode == 0
    assert '--torch-backend auto torch==' in doctor.command_for(['torch for the GPU'])
    machine(torch='2.13.0', **FORK)
    assert 'torch==' not in doctor.command_for(['mmcv'])


def test_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path) -> None:
    program = tmp_path / 'nvidia-smi'
    program.write_text('#!/bin/sh\necho "GPU 0: NVIDIA H100 (UUID: GPU-1)"')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    found = doctor.device()
    assert found.state == 'warn' and 'cannot use the GPU' in found.detail
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')  # hidden on purpose
    assert doctor.device().state == 'ok'


def test_the_row_says_whose_operators_are_used(monkeypatch) -> None:
    file = doctor.link_file()
    for place, words in [
        (None, "cpvt_pyramid's, for the commands of cpvt and programs that import"),
        (file, f"cpvt_pyramid's, for all programs: {file}"),
        (file.with_suffix('.so'), 'compiled; CUDA not available'),
    ]:
        monkeypatch.setattr(doctor, 'found', lambda place=place: place)
        finding = doctor.mmcv_operators()
        assert finding.state == 'ok' and finding.detail.startswith(words)


def test_operators_that_were_compiled_without_cuda(monkeypatch) -> None:
    monkeypatch.setattr(doctor, 'found', lambda: Path('_ext.so'))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    with pytest.raises(RuntimeError, match="cpvt_pyramid's operators run on both"):
        doctor.mmcv_operators()
    assert 'mmcv' in doctor.command_for(['mmcv']) and 'WITH_OPS' not in doctor.command_for(['mmcv'])


def test_nothing_is_uninstalled_that_is_not_there(machine) -> None:
    machine(pip='1')
    assert 'uninstall' not in doctor.command_for(['torch', 'torchvision'])
    machine(torch='2.0')
    assert 'uninstall -y torch && ' in doctor.command_for(['torch'])


def test_here_everything_works() -> None:
    found = {name: look() for name, look in doctor.LOOKS.items()}
    assert {finding.state for finding in found.values()} <= {'ok', 'note'}, found
    assert found['mm family'].state == 'ok'
    states = {name: function().state for name, (function, _) in doctor.TRIALS.items()}
    assert states.pop('CPU kernels') in ('ok', 'note')  # some processors have none
    assert {*states.values()} <= {'ok', 'warn'}, states


def run_doctor(folder: Path, modules: dict[str, str]) -> str:
    """What the doctor prints with only these modules: -S leaves out site-packages."""
    shutil.copytree(ROOT / 'cpvt_pyramid', folder / 'cpvt_pyramid')
    for name, text in modules.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, '-S', '-m', 'cpvt_pyramid.app.doctor'],
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(folder)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, '')
    return done.stdout


def test_bare_python_and_a_torch_that_crashes(tmp_path) -> None:
    table = run_doctor(tmp_path / 'bare', {})
    assert re.search(r'FAIL  torch  ', table) and table.count('FAIL') == 1
    assert 'note  mm family' in table and '1 broken' in table
    last = table.splitlines()[-1]
    end = r' install( --python \S+)? torch==2[.]13[.]0 torchvision==0[.]28[.]0$'
    assert re.search(end, last) and 'mmcv' not in table
    table = run_doctor(tmp_path / 'crash', {'torch/__init__.py': 'import os; os.abort()'})
    assert re.search(r'FAIL  device  .*Aborted', table)
    assert table.count('FAIL') == 1  # the trials end


def test_each_broken_package_is_reported(tmp_path) -> None:
    table = run_doctor(
        tmp_path,
        {
            'torch/__init__.py': 'import sys; from unittest.mock import MagicMock\n'
            'torch = sys.modules["torch"] = MagicMock(); '
            'torch.cuda.is_available.return_value = False\n'
            'torch.get_num_threads.return_value = 1; torch.version.cuda = None\n'
            'print("noise without an end", end="")',
            'torchvision/__init__.py': '',
            'torchvision/ops.py': 'import os, signal; os.kill(os.getpid(), signal.SIGSEGV)',
            'cv2/__init__.py': 'raise ImportError("libGL.so.1: cannot open shared object file")',
            'mmcv/__init__.py': '',
            'mmcv/ops.py': 'raise ImportError("_ext.so: undefined symbol")',
            'mmdet/__init__.py': 'assert False, "MMCV==9.9.9 is used but incompatible"',
            'mmseg/__init__.py': '',
            'mmseg/apis.py': 'import sys; sys.exit("leaving")',
        },
    )
    assert re.search('ok  device +CPU, 1 thread on ', table)
    for name, cause in [
        ('torchvision operators', 'Segmentation fault'),
        ('OpenCV', 'libGL'),
        ('mmcv operators', 'undefined symbol'),
        ('mmdet imports', 'MMCV==9.9.9'),
        ('mmseg imports', 'leaving'),
    ]:
        assert re.search(f'FAIL  {name} .*{cause}', table), (name, table)
    command = table.splitlines()[-1]
    for part in (
        'torchvision==0.28.0',
        'opencv-python-headless',
        ' --no-cache-dir onedl-mmcv==',
    ):
        assert part in command
    assert 'mmdet' not in command and 'mmseg' not in command  # they may be sound


@pytest.mark.parametrize('lacks_mmcv', [True, False])
def test_what_imports_mmcv_is_not_installed_again_for_its_sake(
    machine, monkeypatch, lacks_mmcv
) -> None:
    versions = {**FORK, 'onedl_mmsegmentation': '1.4.2'}
    if lacks_mmcv:
        del versions['onedl_mmcv']
    machine(torch='2.13.0', torchvision='0.28.0', **versions)

    def tried(names: list[str]) -> list[doctor.Finding]:
        fails = ('mmcv operators', 'mmdet imports')
        return [
            doctor.Finding('FAIL', '', [doctor.TRIALS[name][1]])
            if name in fails
            else doctor.Finding('ok', '')
            for name in names
        ]

    monkeypatch.setattr(doctor, 'tried', tried)
    again = [name for _, found in doctor.examined() for name in found.again]
    assert again == ['mmcv']


def test_a_trial_that_hangs_times_out(monkeypatch) -> None:
    monkeypatch.setattr(doctor, 'TIMEOUT', 0.02)  # less than any import of torch
    (found,) = doctor.tried(['device'])
    assert found.state == 'FAIL' and found.detail == 'timed out after 0.02 seconds'


def test_without_torch_nothing_of_openmmlab_is_named(machine, monkeypatch, capsys) -> None:
    """An environment that runs exported models is in order, and nothing has to be compiled."""
    machine(onnxruntime='1.31')
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert 'note  torch' in shown and shown.endswith('nothing is broken\n')
    machine()
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert 'mmcv' not in shown and ' install torch==' in shown
    machine(torch='2.13.0')
    monkeypatch.setattr(doctor, 'tried', lambda names: [doctor.Finding('ok', '')] * len(names))
    assert doctor.main([]) == 0
    assert 'onedl-mmcv==' in capsys.readouterr().out


@pytest.mark.parametrize('multiplies', [False, True])
def test_kernels_without_bfloat16(multiplies, monkeypatch):
    monkeypatch.setattr(processor, 'multiplies_bfloat16', lambda: multiplies)
    monkeypatch.setattr(library, 'load_library', lambda: None)
    finding = doctor.kernels()
    assert finding.state == 'ok'
    assert ('this processor does not multiply bfloat16' in finding.detail) != multiplies


def test_why_there_are_no_kernels(monkeypatch, tmp_path):
    """The row is a note: models work without them."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setenv('CXX', '/nowhere/c++')
    finding = doctor.kernels()
    assert finding.state == 'note'
    assert 'without them: they ' in finding.detail  # the rest depends on the processor
