"""The shell launchers, and the time that --help takes."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT, run

TOOLS = ROOT / 'tools'

FAKE = '#!/bin/sh\necho "$0" "$@"\n'


def program(name: str, text: str = FAKE) -> Path:
    """A program, by default one that says how it was called."""
    path = Path('bin', name).absolute()
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_slurm(configs):
    path = f'{program("srun").parent}:{os.environ["PATH"]}'
    command = [TOOLS / 'slurm_train.sh', 'gpu', 'a job', configs['detector'], '--resume']
    said = run(*command, PATH=path, PYTHON='py', GPUS='4', SRUN_ARGS='--time=9 --qos=high').stdout
    assert said.split(maxsplit=1)[1].strip() == (
        '--partition=gpu --job-name=a job --gres=gpu:4 --ntasks=4 --ntasks-per-node=4 '
        '--cpus-per-task=5 --kill-on-bad-exit=1 --time=9 --qos=high '
        f'py -u {TOOLS}/train.py {configs["detector"]} --resume --launcher slurm'
    )
    command = [TOOLS / 'slurm_infer.sh', 'gpu', 'a job', 'model.onnx', 'in folder', '--tile', '64']
    said = run(*command, PATH=path, PYTHON='py', GPUS='2').stdout
    assert ' --kill-on-bad-exit=0 --no-kill ' in said
    assert said.endswith(f'{TOOLS}/infer.py model.onnx in folder --tile 64 --launcher slurm\n')


LOSES_ONE = """
import os, signal, sys, time
if os.environ['RANK'] == '2':
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.2)  # until the other has ended
print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], *sys.argv[2:])
sys.exit(1)
"""


def test_processes_that_share_work_outlive_each_other():
    """The second machine of two; the tool's exit status is that of a process that finished."""
    python = program('py', f'#!{sys.executable}\n{LOSES_ONE}')
    command = [TOOLS / 'dist_infer.sh', '2', 'model.onnx', 'in folder', '--tile', '64']
    ended = run(*command, PYTHON=str(python), NNODES='2', NODE_RANK='1')
    assert ended.returncode == 1
    assert ended.stdout == '3 4 1 model.onnx in folder --tile 64 --launcher pytorch\n'
    assert ended.stderr == 'dist_infer.sh: a process ended with exit status 137\n'
    assert run(*command, PYTHON='false').returncode == 1


@pytest.mark.parametrize('active, interpreter', [
    # Conda activates its base environment in every shell.
    ({'CONDA_DEFAULT_ENV': 'base', 'CONDA_PREFIX': '/conda'}, '.venv/bin/python'),
    ({'CONDA_DEFAULT_ENV': 'mine', 'CONDA_PREFIX': '/conda/envs/mine'}, 'bin/python'),
    ({'VIRTUAL_ENV': '/mine'}, 'bin/python'),
    ({'PYTHON': 'bin/py'}, 'bin/py'),
])  # fmt: skip
def test_interpreter_of_the_shell_launchers(active, interpreter):
    for name in ('dist_test.sh', 'launchers.sh'):
        Path('tools').mkdir(exist_ok=True)
        shutil.copy(TOOLS / name, 'tools')
    folder = program('python').parent
    program('py')
    shutil.copytree(folder, '.venv/bin')
    environment = {'VIRTUAL_ENV': '', 'CONDA_DEFAULT_ENV': '', 'CONDA_PREFIX': '', 'PYTHON': ''}
    path = f'{folder}:{os.environ["PATH"]}'
    command = ['tools/dist_test.sh', 'tools/launchers.sh', 'weights.pth', '2', '--tta']
    lines = run(*command, **environment | active, PATH=path).stdout.splitlines()
    test = Path('cpvt test').absolute()
    called = f'{test} tools/launchers.sh weights.pth --tta --launcher pytorch'
    assert [line.split(maxsplit=1)[1] for line in lines] == [called] * 2
    assert Path(lines[0].split()[0]).resolve() == Path(interpreter).resolve()


@pytest.mark.parametrize('command, complaint', [
    (f'dist_train.sh {__file__} two', 'NPROC must be a number of processes, got two'),
    (f'dist_test.sh {__file__} weights.pth', 'needs CONFIG, CHECKPOINT and NPROC'),
    ('slurm_train.sh gpu job nowhere.py', 'no config at nowhere.py'),
    (f'slurm_train.sh gpu job {__file__}', 'srun not found'),
    ('launchers.sh', 'nothing to run'),
])  # fmt: skip
def test_mistakes_with_the_launchers(command, complaint):
    ended = run('bash', *f'{TOOLS}/{command}'.split())
    assert ended.returncode == 2 and complaint in ended.stderr.splitlines()[-1]
    assert 'Traceback' not in ended.stderr


# An interpreter that runs another script in place of train.py.
RUNS = """#!/bin/sh
for argument; do
  shift
  case "$argument" in
    */train.py) argument={script} ;;
  esac
  set -- "$@" "$argument"
done
exec {python} "$@"
"""


def test_two_machines(configs, tmp_path):
    """Two launchers on this machine meet; one of them gets its variables from Slurm."""
    names = 'RANK', 'LOCAL_RANK', 'GROUP_RANK', 'WORLD_SIZE'
    Path('ranks.py').write_text(f'import os\nprint(*(os.environ[name] for name in {names}))\n')
    python = program('py', RUNS.format(python=sys.executable, script='ranks.py'))
    hosts = '#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "127.0.0.1\\nn2"'
    path = f'{program("scontrol", hosts).parent}:{os.environ["PATH"]}'
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    first = {'NNODES': '2', 'NODE_RANK': '0', 'MASTER_ADDR': '127.0.0.1', 'PORT': str(port)}
    second = dict(SLURM_STEP_NUM_NODES='2', SLURM_NODEID='1', SLURM_STEP_NODELIST='n[1-2]')
    second |= dict(PATH=path, PORT=str(port))
    started = [
        subprocess.Popen(
            [TOOLS / 'dist_train.sh', configs['detector'], '1'],
            env=os.environ | {'PYTHON': str(python)} | node, stdout=subprocess.PIPE, text=True,
        )
        for node in (first, second)
    ]  # fmt: skip
    assert [node.communicate()[0] for node in started] == ['0 0 0 2\n', '1 0 1 2\n']
    assert [node.returncode for node in started] == [0, 0]


def test_signals_are_passed_on(configs):
    """Also SIGUSR1; the processes take their time."""
    Path('waits.py').write_text(
        'import os, signal, sys, time\n'
        "name = os.environ['RANK']\n"
        'def stop(*_):\n'
        '    time.sleep(0.5)\n'
        "    open('checkpoint' + name, 'w').close()\n"
        '    sys.exit(75)\n'
        'signal.signal(signal.SIGUSR1, stop)\n'
        "open('ready' + name, 'w').close()\n"
        'while True:\n'
        '    time.sleep(60)\n'
    )
    python = program('py', RUNS.format(python=sys.executable, script='waits.py'))
    started = subprocess.Popen(
        [TOOLS / 'dist_train.sh', configs['detector'], '2'],
        env=os.environ | {'PYTHON': str(python)},
        stderr=subprocess.PIPE,
    )
    while not (Path('ready0').exists() and Path('ready1').exists()):
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGUSR1)
    started.communicate(timeout=60)
    assert Path('checkpoint0').exists() and Path('checkpoint1').exists()


def test_outside_of_the_environment():
    """-S leaves out site-packages."""
    ended = run(sys.executable, '-S', TOOLS / 'train.py', 'mine.py')
    assert ended.returncode == 2 and ended.stderr.count('\n') == 1
    assert 'is not installed for' in ended.stderr
    assert f'run this tool with {ROOT}/.venv/bin/python' in ended.stderr


def test_help_is_quick():
    for tool in ('train', 'test', 'infer'):
        ended = run(sys.executable, '-X', 'importtime', TOOLS / f'{tool}.py', '--help')
        assert ended.returncode == 0 and ended.stdout.startswith(f'usage: {tool} ')
        imported = set(re.findall(r'(\w+)\S*$', ended.stderr, re.M))
        assert 'argparse' in imported and not imported & {'torch', 'mmengine', 'numpy'}
    for path in (*TOOLS.glob('dist_*.sh'), *TOOLS.glob('slurm_*.sh')):
        ended = run(path, '--help')
        assert ended.returncode == 0 and ended.stdout.startswith(f'usage: {path.name} ')
