"""The set-up script, without installing anything: the interpreter is a fake."""

import fcntl
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support import ROOT

from cpvt_pyramid.caches import cache_folder

# An interpreter for the script: it logs its arguments, makes empty environments and wheels that
# name the device that they were compiled for, and reports that device as $DEVICE. It runs the
# command $PACKAGES before it installs the packages, and $COMPILER before it compiles.
FAKE = r"""#!/bin/sh
echo "$@" >> log
venv=$(dirname "$(dirname "$0")")
after() { shift; while [ "$1" != "$flag" ]; do shift; done; echo "$2"; }
flag=--constraint
case "$*" in *" $flag "*) echo "$flag" $(grep -o '^[^ #]*' "$(after - "$@")") >> log ;; esac
case "$*" in
  *"--group all") eval "$PACKAGES" ;;
  "-c "*version_info*) echo 3.11 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip download "*) flag=--dest; folder=$(after "$@")
    mkdir "$folder" && tar -czf "$folder/mmcv.tar.gz" --files-from /dev/null ;;
  "-m pip wheel "*) flag=--wheel-dir; folder=$(after "$@"); eval "$COMPILER"
    mkdir "$folder" && echo "${CUDA_VISIBLE_DEVICES-$DEVICE}" > "$folder/mmcv_$(uname -m).whl"
    echo "CFLAGS $CFLAGS" >> log
    echo "[1/1]" ;;
  *.whl) for wheel; do :; done; cp "$wheel" "$venv/wheel" ;;
  "tools/mmcv_build.py") echo "torch-cp311-${DEVICE:-cpu}" ;;
  "- "*-cpu) [ -e "$venv/wheel" ] ;;
  "- "*) [ -e "$venv/wheel" ] && [ "torch-cp311-$(cat "$venv/wheel")" = "$3" ] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that the script reads, and programs in bin/."""
    for folder in ('requirements', 'tools'):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns('__pyc*'))
    shutil.copy(ROOT / 'pyproject.toml', tmp_path)
    program(tmp_path / 'bin/g++', '#!/bin/sh\n')
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


def compiled(calls: list[str]) -> bool:
    return any(call.startswith('-m pip wheel') for call in calls)


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


def test_operators_are_compiled_for_the_gpu_that_appears(checkout):
    wheel, smi = checkout / '.venv/wheel', checkout / 'bin/nvidia-smi'
    complete(checkout, DEVICE='cpu')
    assert wheel.read_text() == '\n'
    program(smi, '#!/bin/sh\necho "GPU 0: H100 (UUID: $RANDOM)"')
    assert compiled(complete(checkout, DEVICE='cuda-9.0')) and wheel.read_text() == 'cuda-9.0\n'
    assert complete(checkout, DEVICE='cuda-9.0') == ['-c ']
    # For another GPU too, but not for a machine without one.
    program(smi, '#!/bin/sh\necho "GPU 0: A100 (UUID: 1)"')
    assert compiled(complete(checkout, DEVICE='cuda-8.0')) and wheel.read_text() == 'cuda-8.0\n'
    smi.unlink()
    assert not compiled(complete(checkout, DEVICE='cpu')) and wheel.read_text() == 'cuda-8.0\n'
    # Asked for without a GPU; it is cached as what it is.
    assert compiled(complete(checkout, FORCE_CUDA='1', DEVICE='cuda-7.5'))
    shutil.rmtree(checkout / '.venv')
    assert not compiled(complete(checkout)) and wheel.read_text() == '\n'
    assert not compiled(complete(checkout, FORCE_CUDA='1', DEVICE='cuda-7.5'))
    assert wheel.read_text() == 'cuda-7.5\n'


@pytest.mark.parametrize('caches', ['', 'relative', '{}/absolute'])
def test_wheels_are_kept_in_the_cache_folder(checkout, monkeypatch, caches):
    """The same folder as of the package."""
    caches = caches.format(checkout)
    complete(checkout, XDG_CACHE_HOME=caches)
    monkeypatch.setenv('XDG_CACHE_HOME', caches)
    monkeypatch.setenv('HOME', str(checkout))
    assert len(list(cache_folder().glob('*/*.whl'))) == 1


def test_an_environment_is_kept_unless_it_is_broken_or_of_another_build(checkout):
    default = complete(checkout)
    assert compiled(default) and complete(checkout) == ['-c ']  # only whether Python starts
    (checkout / '.venv/bin/python').unlink()
    calls = complete(checkout)
    assert '-m venv .venv' in calls and not compiled(calls)  # the wheel is in the cache
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


def test_the_packages_come_before_the_operators_and_are_enough(checkout):
    calls = complete(checkout, 'packages')
    assert not compiled(calls) and not (checkout / '.venv/wheel').exists()
    assert complete(checkout, 'packages') == ['-c ']
    assert compiled(complete(checkout)) and complete(checkout) == ['-c ']
    assert complete(checkout, 'packages') == ['-c ']  # also those of a complete environment
    # While another set-up compiles.
    stamp = (checkout / '.venv/packages').rename(checkout / 'stamp')
    with (checkout / '.venv.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            ['tools/setup_env.sh', 'packages'],
            cwd=checkout,
            env={'PATH': f'{checkout}/bin:/usr/bin:/bin', 'HOME': str(checkout)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert waiting.stdout.readline() == 'setup: waiting for another set-up of .venv\n'
        shutil.copy(stamp, checkout / '.venv/packages')
        assert waiting.wait(30) == 0


def test_mmcv_compiles_while_packages_are_installed(checkout):
    started = {'COMPILER': 'touch started', 'PACKAGES': 'until [ -e started ]; do sleep 0.02; done'}
    calls = complete(checkout, **started)
    torch = next(i for i, call in enumerate(calls) if '--group newest-torch' in call)
    assert torch < next(i for i, call in enumerate(calls) if '-m pip wheel' in call)
    assert (checkout / '.venv/wheel').exists()


def test_a_failure_ends_the_set_up(checkout):
    waits = 'echo $$ > compiler; exec sleep 100'
    fails = 'until [ -s compiler ]; do sleep 0.02; done; exit 1'
    done = run(checkout, COMPILER=waits, PACKAGES=fails)
    assert done.returncode == 1 and 'cannot install the packages' in done.stderr
    assert_ended(checkout / 'compiler')

    done = run(checkout, COMPILER='exit 1')
    assert done.returncode == 1 and 'cannot compile mmcv; see ' in done.stderr
    assert (checkout / '.venv/packages').exists() and not (checkout / '.venv/complete').exists()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_compiler_too(checkout, number):
    """Like Ctrl-C, it reaches the script and what runs in its foreground."""
    script = subprocess.Popen(
        ['tools/setup_env.sh'],
        cwd=checkout,
        env={
            'PATH': f'{checkout}/bin:/usr/bin:/bin',
            'HOME': str(checkout),
            'COMPILER': 'echo $$ > compiler; exec sleep 100',
            'PACKAGES': 'until [ -s compiler ]; do sleep 0.02; done; touch both; exec sleep 100',
        },
        start_new_session=True,
    )
    while not (checkout / 'both').exists():
        time.sleep(0.02)
    os.killpg(script.pid, number)
    assert script.wait(10) != 0
    assert_ended(checkout / 'compiler')


def assert_ended(file: Path) -> None:
    """Wait for the end of the process whose id is in a file."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(file.read_text())).wait(10)


def test_operators_are_compiled_without_debugging_information(checkout):
    assert 'CFLAGS -g0 -O1' in complete(checkout, CFLAGS='-O1')


def test_other_environments(checkout):
    calls = complete(checkout, 'original-mm')
    assert any(call.endswith('--group original-mm') for call in calls) and compiled(calls)
    assert not any('--constraint' in call for call in calls)  # those are for newer Pythons
    calls = complete(checkout, 'original-mm-new-torch')
    assert '-m venv .venv-original-mm-new-torch' in calls and not (checkout / '.venv').exists()
    assert any(call.endswith('--group original-mm-new-torch') for call in calls)
    (constraints,) = [call for call in calls if call.startswith('--constraint ')]
    assert ' numpy==' in constraints
    assert any(call.startswith('- mmcv==2.1.0 ') for call in calls)
    calls = complete(checkout, 'oldest-torch')
    assert any(call.endswith('--group oldest-torch') for call in calls) and not compiled(calls)
    for file in (ROOT / 'requirements').iterdir():
        assert '://' not in file.read_text(), f'{file} pins the host of an index'
