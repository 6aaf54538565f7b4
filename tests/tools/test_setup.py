"""The set-up script, as far as it can be tried without setting anything up."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support import ROOT


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the script reads, where it can do no harm."""
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
    """A stand-in for an interpreter that can tell its version and nothing else."""
    path = checkout / 'python'
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {version} || exit 1\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    'arguments, environment, complaint',
    [
        (('--fast',), {}, 'unknown argument --fast'),
        ((), {'PYTHON': 'python-of-yore'}, 'no python-of-yore here; name a Python 3.11'),
        ((), {'PYTHON': '3.9'}, 'is Python 3.9; the pinned packages are for 3.11'),
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


def test_nothing_to_do_is_done_at_once_and_a_broken_environment_is_noticed(checkout):
    files = [*sorted((checkout / 'requirements').glob('*.txt')), checkout / 'tools/setup_env.sh',
             checkout / 'setup.py']  # fmt: skip
    content = b''.join(file.read_bytes() for file in files)
    stamp = subprocess.run(['sha256sum'], input=content, capture_output=True).stdout
    (checkout / '.venv/bin').mkdir(parents=True)
    (checkout / '.venv/complete').write_bytes(stamp)
    shutil.copy(python(checkout, ''), checkout / '.venv/bin/python')
    assert run(checkout, PYTHON='not needed').returncode == 0
    (checkout / '.venv/bin/python').unlink()
    assert 'no not needed here' in run(checkout, PYTHON='not needed').stderr


def test_no_host_of_an_index_is_pinned():
    for file in (ROOT / 'requirements').iterdir():
        assert '://' not in file.read_text(), file
