"""cpvt train: its options, and that it changes nothing else."""

import gc
import os
import sys
from pathlib import Path
from unittest import mock
from urllib.error import URLError

import mmdet
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from support import ROOT, assert_same, clear_global_instances, load_tool
from support import run as run_process
from tiny_mm import variables_of_programs

from cpvt_pyramid.acceleration.patches import PatchConv
from cpvt_pyramid.acceleration.processor import multiplies_bfloat16
from cpvt_pyramid.acceleration.products import FusedMLP, OneDNNLinear
from cpvt_pyramid.app.tooling.command import BROKEN_PIPE
from cpvt_pyramid.app.tooling.files import make_folder
from cpvt_pyramid.app.training import train as run
from cpvt_pyramid.app.training.runner import CommandRunner

train = load_tool('train')
NO_VALIDATION = 'val_cfg=None', 'val_dataloader=None', 'val_evaluator=None'


def logged(checkpoint: Path, name: str) -> np.ndarray:
    """What the training logged under this name, iteration by iteration."""
    hub = torch.load(checkpoint, weights_only=False)['message_hub']
    return hub['log_scalars'][f'train/{name}'].data[0]


def test_a_work_dir_is_for_one_training_at_a_time(configs, monkeypatch, capsys):
    monkeypatch.setattr(run, 'LOCK_TIMEOUT', 0.1)
    command = [str(configs['detector']), '--work-dir', 'work']
    with run.work_dir_for_one(make_folder('work')):
        assert train.main(command) == 2
        assert 'another training is running in work;' in capsys.readouterr().err
        assert [path.name for path in Path('work').iterdir()] == ['.lock']
    gc.disable()  # a training that fails gives it back, also while its error is kept
    try:
        for _ in range(2):
            assert train.main([*command, '--resume=nowhere.pth']) == 2
            assert 'no checkpoint at nowhere.pth' in capsys.readouterr().err
    finally:
        gc.enable()


def test_mixed_precision_on_the_cpu_and_auto_scale_lr(configs, capsys):
    """Iterations of 2 images, where the config says 16."""
    command = [str(configs['detector']), '--work-dir', 'work', '--amp', '--auto-scale-lr']
    options = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=4', *NO_VALIDATION
    assert train.main([*command, '--cfg-options', *options]) == 0
    is_slow = not multiplies_bfloat16()
    assert ('does not multiply bfloat16' in capsys.readouterr().out) == is_slow
    cfg = Config.fromfile('work/detector.py')
    assert cfg.optim_wrapper.type == 'BFloat16OptimWrapper'
    losses = logged(Path('work/epoch_1.pth'), 'loss')
    assert np.isfinite(losses).all() and losses[0] != losses[-1]
    assert logged(Path('work/epoch_1.pth'), 'lr')[0] == pytest.approx(1e-3 * 2 / 16)


@pytest.mark.parametrize(
    'setting, what',
    [
        ('model.backbone.init_cfg.checkpoint', 'https://a.invalid/b.pth'),
        ('load_from', 'https://a.invalid/b.pth'),
    ],
)
def test_an_address_that_cannot_be_reached(setting, what, configs, monkeypatch, capsys):
    offline = mock.Mock(side_effect=URLError('no route'))
    monkeypatch.setattr('mmengine.runner.checkpoint.load_url', offline)
    monkeypatch.setattr('cpvt_pyramid.checkpoints.downloads.urlopen', offline)
    options = [f'{setting}=https://a.invalid/b.pth']
    if setting != 'load_from':
        options.append(setting.replace('checkpoint', 'type=Pretrained'))
    assert train.main([str(configs['detector']), '--cfg-options', *options]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f'cpvt train: cannot download {what} (URLError: ')
    assert said.endswith('with model.backbone.init_cfg=None') == ('init_cfg' in setting)


def trained(folder: str, name: str) -> dict:
    checkpoint = torch.load(Path(folder, name), weights_only=False)
    return {key: checkpoint[key] for key in ('state_dict', 'optimizer', 'param_schedulers')}


# MMDetection's scripts, one after the other: importing takes longer than what they do.
TRAIN_AND_TEST = """
import runpy, sys
from yapf.yapflib import yapf_api
yapf_api.FormatCode = lambda text, **_: (text, True)  # as in conftest.py
scripts, ours, theirs = sys.argv[1:]
sys.argv[1:] = f'{ours}/mine.py', '--work-dir', theirs
runpy.run_path(f'{scripts}/train.py', run_name='__main__')
sys.argv[1:] = f'{ours}/mine.py', f'{ours}/epoch_2.pth'
runpy.run_path(f'{scripts}/test.py', run_name='__main__')
"""


def test_a_config_trains_the_same_way_everywhere(configs, monkeypatch):
    """By our command; by mmengine's Runner; and by MMDetection's scripts, in a process that knows
    of this package only what the config says that our training has saved. Without what makes a
    model faster on a CPU, which rounds otherwise."""
    monkeypatch.setattr('cpvt_pyramid.app.training.runner.accelerate', lambda model: None)
    Path('mine.py').write_text(
        f"_base_ = '{configs['detector']}'\n"
        'train_cfg = dict(max_epochs=2, val_interval=1)\n'
        'train_dataloader = dict(dataset=dict(indices=4))\n'
        'val_dataloader = dict(dataset=dict(indices=2))\n'
        'test_dataloader = val_dataloader\n'
        "work_dir = 'plain'\n"
    )
    Runner.from_cfg(Config.fromfile('mine.py')).train()
    clear_global_instances()
    assert train.main(['mine.py', '--work-dir', 'ours']) == 0
    assert_same(trained('ours', 'epoch_2.pth'), trained('plain', 'epoch_2.pth'))
    before = Config.fromfile('mine.py')
    saved = Config.fromfile('ours/mine.py')
    changed = [key for key in saved if saved[key] != before.get(key)]
    assert set(changed) <= {'launcher', 'resume', 'work_dir'}

    scripts = Path(mmdet.__file__).parent / '.mim/tools'
    command = [sys.executable, '-c', TRAIN_AND_TEST, scripts, 'ours', 'theirs']
    ended = run_process(*command, PYTHONPATH=str(ROOT), **variables_of_programs())
    assert ended.returncode == 0 and 'coco/bbox_mAP' in ended.stdout, ended.stderr
    assert_same(trained('ours', 'epoch_2.pth'), trained('theirs', 'epoch_2.pth'))


def test_a_segmentor_trains_the_same_way(configs, monkeypatch):
    monkeypatch.setattr('cpvt_pyramid.app.training.runner.accelerate', lambda model: None)
    cfg = Config.fromfile(configs['segmentor'])
    cfg.merge_from_dict({'work_dir': 'plain', 'train_cfg.max_iters': 4})
    Runner.from_cfg(cfg).train()
    clear_global_instances()
    command = [str(configs['segmentor']), '--work-dir', 'ours']
    assert train.main([*command, '--cfg-options', 'train_cfg.max_iters=4']) == 0
    assert_same(trained('ours', 'iter_4.pth'), trained('plain', 'iter_4.pth'))


def test_a_training_on_a_cpu_is_accelerated(configs, monkeypatch):
    """And its checkpoints are those of plain layers."""
    kinds = set()
    run = CommandRunner.train

    def recorded(runner):
        kinds.update(type(module) for module in runner.model.modules())
        return run(runner)

    monkeypatch.setattr(CommandRunner, 'train', recorded)
    command = [str(configs['segmentor']), '--work-dir', 'ours']
    assert train.main([*command, '--cfg-options', 'train_cfg.max_iters=1']) == 0
    assert {FusedMLP, OneDNNLinear, PatchConv} <= kinds
    assert trained('ours', 'iter_1.pth')['state_dict']


def test_nothing_is_said_where_a_training_cannot_be_accelerated(configs, monkeypatch, capsys):
    monkeypatch.setattr('cpvt_pyramid.acceleration.accelerate.VERSION', (2, 1))
    command = [str(configs['segmentor']), '--work-dir', 'ours']
    assert train.main([*command, '--cfg-options', 'train_cfg.max_iters=1']) == 0
    assert 'accelerated' not in capsys.readouterr().err


SHORT = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=4', *NO_VALIDATION


def test_nothing_reads_the_output(configs, capfd, monkeypatch):
    """As in `cpvt train ... | head -1`: it ends as other commands do, without a traceback for each
    line of the log."""
    read, write = os.pipe()
    os.close(read)
    with open(write, 'w', buffering=1) as closed:
        monkeypatch.setattr(sys, 'stdout', closed)
        command = [str(configs['detector']), '--work-dir', 'work', '--cfg-options', *SHORT]
        assert train.main(command) == BROKEN_PIPE
    assert 'Traceback' not in capfd.readouterr().err


def test_hooks_that_a_config_lacks_are_told(configs, capsys):
    Path('mine.py').write_text(
        f"_base_ = '{configs['detector']}'\n"
        "default_hooks = dict(_delete_=True, checkpoint=dict(type='CheckpointHook'))\n"
    )
    assert train.main(['mine.py', '--work-dir', 'work', '--cfg-options', *SHORT]) == 0
    said = capsys.readouterr().out
    assert 'adds to the hooks of the config: StopOnDivergenceHook and ResumeHook' in said
    assert list(Config.fromfile('work/mine.py').default_hooks) == ['checkpoint']


def test_a_limit_of_the_address_space_is_told(configs, monkeypatch, capsys):
    monkeypatch.setattr(run, 'address_limit', lambda: 3 * 2**30)
    assert train.main(['nowhere.py']) == 2
    assert capsys.readouterr().out.startswith('the address space is limited to 3.0 GiB (ulimit -v)')
