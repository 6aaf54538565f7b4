"""The shell launchers, and the time that --help takes."""

import os
import re
import sys
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


def test_slurm():
    path = f'{program("srun").parent}:{os.environ["PATH"]}'
    command = [TOOLS / 'slurm_train.sh', 'gpu', 'a job', 'my.py', '--resume']
    environment = dict(PATH=path, PYTHON='py', GPUS='4', SRUN_ARGS='--time=9 --qos=high')
    said = run(*command, **environment).stdout
    resources = (
        '-p gpu --job-name=a job --gres=gpu:8 --ntasks=4 --ntasks-per-node=8 --cpus-per-task=5 '
        '--kill-on-bad-exit=1 --time=9 --qos=high '
    )
    assert said.split(maxsplit=1)[1].strip() == (
        f'{resources}py -u {TOOLS}/train.py my.py --launcher slurm --resume'
    )
    command = [TOOLS / 'slurm_test.sh', 'gpu', 'a job', 'my.py', 'a b.pth', '--tta']
    said = run(*command, **environment).stdout
    assert said.split(maxsplit=1)[1].strip() == (
        f'{resources}py -u {TOOLS}/test.py my.py a b.pth --launcher slurm --tta'
    )


def test_torchrun():
    python = program('py')
    command = [TOOLS / 'dist_test.sh', 'my.py', 'a b.pth', '2', '--tta']
    said = run(*command, PYTHON=str(python), NNODES='2', NODE_RANK='1').stdout
    assert said.split(maxsplit=1)[1].strip() == (
        '-m torch.distributed.run --nnodes=2 --node_rank=1 --nproc_per_node=2 '
        f'--master_addr=127.0.0.1 --master_port=29500 {TOOLS}/test.py my.py a b.pth '
        '--launcher pytorch --tta'
    )


@pytest.mark.parametrize('name', ['dist_train', 'dist_test', 'slurm_train', 'slurm_test'])
def test_too_few_arguments(name):
    ended = run(TOOLS / f'{name}.sh', 'gpu')
    assert ended.returncode == 2 and f'{name}.sh ' in ended.stderr and not ended.stdout


def test_outside_of_the_environment():
    """-S leaves out site-packages."""
    ended = run(sys.executable, '-S', TOOLS / 'train.py', 'mine.py')
    assert ended.returncode == 2 and ended.stderr.count('\n') == 1
    assert 'is not installed for' in ended.stderr
    assert f'run this tool with {ROOT}/.venv/bin/python' in ended.stderr


def test_help_is_quick():
    for tool in ('train', 'test', 'infer'):
        ended = run(sys.executable, '-X', 'importtime', TOOLS / f'{tool}.py', '--help')
        assert ended.returncode == 0 and ended.stdout.startswith(f'usage: cpvt {tool} ')
        imported = set(re.findall(r'(\w+)\S*$', ended.stderr, re.M))
        assert 'argparse' in imported and not imported & {'torch', 'mmengine'}
