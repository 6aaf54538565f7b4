"""The set-up script, without installing anything."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support import ROOT


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that the script reads."""
    for folder in ('requirements', 'tools'):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns('__pyc*'))
    shutil.copy(ROOT / 'setup.py', tmp_path)
    return tmp_path


def run(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ['tools/setup_env.sh', *arguments],
        cwd=checkout,
        env={'PATH': '/usr/bin:/bin', 'HOME': str(checkout), **environment},
        capture_output=True,
        text=True,
    )


def python(checkout: Path, version: str) -> str:
    """A program that prints a Python version and can do nothing else."""
    path = checkout / 'python'
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {version} || exit 1\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    'arguments, environment, complaint',
    [
        (('--fast',), {}, 'unknown argument --fast'),
        ((), {'PYTHON': 'python-of-yore'}, 'python-of-yore not found; set PYTHON=... to'),
        ((), {'PYTHON': '3.9'}, 'is Python 3.9; set PYTHON=... to a Python 3.11'),
    ],
)
def test_mistakes(checkout, arguments, environment, complaint):
    if environment.get('PYTHON') == '3.9':
        environment = {'PYTHON': python(checkout, '3.9')}
    done = run(checkout, *arguments, **environment)
    assert done.returncode == 1 and done.stdout == ''
    (line,) = done.stderr.splitlines()
    assert line.startswith('setup: ') and complaint in line


def test_help(checkout):
    done = run(checkout, '--help')
    assert done.returncode == 0 and 'MMCV_WHEEL=path/to/mmcv.whl' in done.stdout


def test_a_complete_environment_is_kept_and_a_broken_one_is_noticed(checkout):
    files = [*sorted((checkout / 'requirements').glob('*.txt')), checkout / 'tools/setup_env.sh',
             checkout / 'setup.py']  # fmt: skip
    content = b''.join(file.read_bytes() for file in files)
    stamp = subprocess.run(['sha256sum'], input=content, capture_output=True).stdout
    (checkout / '.venv/bin').mkdir(parents=True)
    (checkout / '.venv/complete').write_bytes(stamp)
    shutil.copy(python(checkout, ''), checkout / '.venv/bin/python')
    assert run(checkout, PYTHON='not needed').returncode == 0
    (checkout / '.venv/bin/python').unlink()
    assert 'not needed not found' in run(checkout, PYTHON='not needed').stderr


def test_no_host_of_an_index_is_pinned():
    for file in (ROOT / 'requirements').iterdir():
        assert '://' not in file.read_text(), file
