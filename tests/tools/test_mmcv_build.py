"""What the set-up compiles mmcv's operators for."""

import runpy
import sys
from typing import Optional

import pytest
import torch
from support import ROOT
from torch.utils import cpp_extension

from tools.mmcv_build import mmcv_built_for

LIST = {'TORCH_CUDA_ARCH_LIST': '8.0; 9.0+PTX'}
FORCE = {'FORCE_CUDA': '1'}
NAME = f'torch{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}'


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """Pretends that torch is built for a version of CUDA and can or cannot use a GPU, and that
    there is an nvcc."""

    def pretend(built: Optional[str], available: bool, nvcc: Optional[str]) -> None:
        monkeypatch.setattr(torch.version, 'cuda', built)
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: available)
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: int(available))
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda i: (9, 0))
        if nvcc:
            (tmp_path / 'bin').mkdir()
            program = tmp_path / 'bin/nvcc'
            program.write_text(f'#!/bin/sh\necho "tools, release {nvcc}, V{nvcc}.88"')
            program.chmod(0o755)

    monkeypatch.setattr(cpp_extension, 'CUDA_HOME', str(tmp_path))
    for name in ('FORCE_CUDA', 'TORCH_CUDA_ARCH_LIST'):
        monkeypatch.delenv(name, raising=False)
    return pretend


@pytest.mark.parametrize(
    'built, available, nvcc, environment, result',
    [
        ('13.0', True, None, {}, 'cpu'),
        ('13.0', True, '13.1', {}, 'cuda-9.0'),
        ('13.0', False, '13.1', LIST, 'cpu'),
        ('13.0', False, '13.1', LIST | FORCE, 'cuda-8.0_9.0+PTX'),
    ],
)
def test_the_name_of_a_wheels_folder(
    built, available, nvcc, environment, result, cuda, monkeypatch
):
    cuda(built, available, nvcc)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert mmcv_built_for() == f'{NAME}-{result}'


@pytest.mark.parametrize(
    'built, available, nvcc, environment, reason',
    [
        ('13.0', False, None, LIST | FORCE, 'nvcc None'),
        ('13.0', False, '13.0', FORCE, 'architectures None'),
        ('12.6', True, '13.0', FORCE, 'torch for CUDA 12.6, nvcc 13.0'),
        (None, False, '13.0', FORCE, 'torch for CUDA None'),
    ],
)
def test_what_cannot_be_compiled(built, available, nvcc, environment, reason, cuda, monkeypatch):
    cuda(built, available, nvcc)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f'an nvcc of the same major version .*{reason}'):
        mmcv_built_for()


def test_the_script(cuda, capsys):
    cuda(None, False, None)
    runpy.run_path(str(ROOT / 'tools/mmcv_build.py'), run_name='__main__')
    assert capsys.readouterr() == (f'{NAME}-cpu\n', '')
