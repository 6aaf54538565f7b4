"""The set-up script, without installing anything: the interpreter is a fake."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import ROOT

# An interpreter for the script: it logs its arguments and makes empty environments. It runs the
# command $PACKAGES before it installs the packages.
FAKE = r"""#!/bin/sh
echo "$@" >> log
after() { shift; while [ "$1" != "$flag" ]; do shift; done; echo "$2"; }
flag=--constraint
case "$*" in *" $flag "*) echo "$flag" $(grep -o '^[^ #]*' "$(after - "$@")") >> log ;; esac
case "$*" in
  *"--group all") eval "$PACKAGES" ;;
  "-c "*version_info*) echo 3.11 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that the script reads, and programs in bin/."""
    for folder in ('requirements', 'tools'):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns('__pyc*'))
    shutil.copy(ROOT / 'pyproject.toml', tmp_path)
    program(tmp_path / 'bin/python3.11', FAKE)
    return tmp_path


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = f'{checkout}/bin:/usr/bin:/bin'
    return subprocess.run(
        ['tools/setup_env.sh', *arguments],
        cwd=checkout,
        env={'PATH': path, 'HOME': str(checkout), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def complete(checkout: Path, *arguments: str, **environment: str) -> list[str]:
    """Run the script successfully; returns the calls of the interpreter."""
    log = checkout / 'log'
    log.unlink(missing_ok=True)
    done = run(checkout, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.parametrize(
    'arguments, environment, complaint',
    [
        (('--fast',), {}, 'unknown argument --fast'),
        ((), {'PYTHON': 'python-of-yore'}, 'python-of-yore not found; set PYTHON=... to'),
        ((), {'PYTHON': 'bin/python3.9'}, 'is Python 3.9; set PYTHON=... to a Python of 3.11'),
        ((), {'TORCH': 'cuda'}, 'TORCH must be cpu, a CUDA version such as cu126'),
        ((), {'PATH': 'mac:/usr/bin:/bin'}, 'works on Linux only (x86-64, or aarch64'),
    ],
)
def test_mistakes(checkout, arguments, environment, complaint):
    program(checkout / 'bin/python3.9', '#!/bin/sh\necho 3.9')
    program(checkout / 'mac/uname', '#!/bin/sh\necho Darwin')
    done = run(checkout, *arguments, **environment)
    assert done.returncode == 1 and done.stdout == ''
    (line,) = done.stderr.splitlines()
    assert line.startswith('setup: ') and complaint in line


def test_an_environment_is_kept_unless_it_is_broken_or_of_another_build(checkout):
    default = complete(checkout)
    assert complete(checkout) == ['-c ']  # only whether Python starts
    (checkout / '.venv/bin/python').unlink()
    assert '-m venv .venv' in complete(checkout)
    assert not any('--torch-backend' in call for call in default)
    assert any(' nvidia-cublas==' in call for call in default)
    cpu = complete(checkout, TORCH='cpu')
    assert '-m venv .venv' in cpu  # the other build satisfies the requirements
    assert any('--torch-backend cpu' in call and '--group all' in call for call in cpu)
    assert any(' torch==' in call for call in cpu) and not any(' nvidia-' in call for call in cpu)
    # The choice is remembered, also when a requirement changes.
    assert complete(checkout) == complete(checkout, TORCH='cpu') == ['-c ']
    with (checkout / 'requirements/requirements.txt').open('a') as pins:
        pins.write('another==1.0\n')
    assert any('--torch-backend cpu' in call for call in complete(checkout))
    assert '-m venv .venv' in complete(checkout, TORCH='default')


def test_nothing_is_compiled(checkout):
    """There is no compiler, and mmcv is built apart from the environment, which has torch."""
    calls = complete(checkout)
    assert any('--group all' in call for call in calls)
    assert not any('--no-build-isolation' in call for call in calls)
    assert any(' onedl-mmcv==' in call for call in calls if call.startswith('--constraint '))


def test_a_second_set_up_waits_for_the_first(checkout):
    started = {'PACKAGES': 'touch started; until [ -e go ]; do sleep 0.02; done'}
    first = start(checkout, **started)
    while not (checkout / 'started').exists():
        time.sleep(0.02)
    second = start(checkout)
    assert second.stdout.readline() == 'setup: waiting for another set-up of .venv\n'
    (checkout / 'go').touch()
    assert first.wait(30) == second.wait(30) == 0
    assert second.stdout.read() == ''  # nothing was left to do


def start(checkout: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        ['tools/setup_env.sh'],
        cwd=checkout,
        env={'PATH': f'{checkout}/bin:/usr/bin:/bin', 'HOME': str(checkout), **environment},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_failure_ends_the_set_up(checkout):
    done = run(checkout, PACKAGES='exit 1')
    assert done.returncode == 1 and 'cannot install the packages' in done.stderr
    assert not (checkout / '.venv/complete').exists()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_what_is_interrupted_is_done_again(checkout, number):
    """Like Ctrl-C, the signal reaches the script and what runs in its foreground."""
    script = start(checkout, PACKAGES='touch started; exec sleep 100')
    while not (checkout / 'started').exists():
        time.sleep(0.02)
    os.killpg(script.pid, number)
    assert script.wait(10) != 0 and not (checkout / '.venv/complete').exists()
    assert any('--group all' in call for call in complete(checkout))


def test_other_environments(checkout):
    calls = complete(checkout, 'original-mm')
    assert any(call.endswith('--group original-mm') for call in calls)
    assert not any('--constraint' in call for call in calls)  # those are for newer Pythons
    calls = complete(checkout, 'original-mm-new-torch')
    assert '-m venv .venv-original-mm-new-torch' in calls and not (checkout / '.venv').exists()
    assert any(call.endswith('--group original-mm-new-torch') for call in calls)
    (constraints,) = [call for call in calls if call.startswith('--constraint ')]
    assert ' numpy==' in constraints
    calls = complete(checkout, 'oldest-torch')
    assert any(call.endswith('--group oldest-torch') for call in calls)
    for file in (ROOT / 'requirements').iterdir():
        assert '://' not in file.read_text(), f'{file} pins the host of an index'
