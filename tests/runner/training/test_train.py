"""The options of train.py."""

from pathlib import Path
from unittest import mock
from urllib.error import URLError

import numpy as np
import pytest
import torch
from mmengine.config import Config
from support import ROOT, in_processes, load_tool

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.runner import train as run
from cpvt_pyramid.runner.tool_runner import ToolRunner
from cpvt_pyramid.tooling.files import make_folder

train = load_tool('train')
NO_VALIDATION = 'val_cfg=None', 'val_dataloader=None', 'val_evaluator=None'


def logged(checkpoint: Path, name: str) -> np.ndarray:
    """What the training logged under this name, iteration by iteration."""
    hub = torch.load(checkpoint, weights_only=False)['message_hub']
    return hub['log_scalars'][f'train/{name}'].data[0]


def test_a_work_dir_is_for_one_training_at_a_time(configs, monkeypatch, capsys):
    monkeypatch.setattr(run, 'LOCK_TIMEOUT', 0.1)
    lock = run.lock_work_dir(make_folder('work'))
    assert train.main([str(configs['detector']), '--work-dir', 'work']) == 2
    assert 'another training is running in work;' in capsys.readouterr().err
    assert [path.name for path in Path('work').iterdir()] == ['.lock']
    lock.release()
    assert run.lock_work_dir(Path('work'))


def test_mixed_precision_on_the_cpu_and_auto_scale_lr(configs):
    """Steps of 4 images, in two batches, where the config says 16."""
    command = [str(configs['detector']), '--work-dir', 'work', '--amp', '--auto-scale-lr']
    options = 'train_cfg.max_epochs=1', 'optim_wrapper.accumulative_counts=2', *NO_VALIDATION
    assert train.main([*command, '--cfg-options', *options]) == 0
    cfg = Config.fromfile('work/detector.py')
    assert cfg.optim_wrapper.type == 'BFloat16OptimWrapper'
    assert '# --amp' in Path('work/train.plan.txt').read_text()
    losses = logged(Path('work/epoch_1.pth'), 'loss')
    assert np.isfinite(losses).all() and losses[0] != losses[-1]
    assert logged(Path('work/epoch_1.pth'), 'lr')[0] == pytest.approx(1e-3 * 4 / 16)


def test_a_one_cycle_schedule_respects_layer_decay_and_auto_scale_lr(configs):
    Path('one_cycle.py').write_text(
        f"_base_ = '{configs['detector']}'\n"
        "param_scheduler = [dict(type='OneCycleLR', eta_max=2e-3, by_epoch=False, total_steps=4)]\n"
        'optim_wrapper = dict(\n'
        "    constructor='LayerDecayConstructor', paramwise_cfg=dict(layer_decay=0.5))\n"
        'val_cfg = val_dataloader = val_evaluator = None\n'
    )
    command = ['one_cycle.py', '--work-dir', 'work', '--auto-scale-lr', '--cfg-options']
    one_step = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=2'
    assert train.main([*command, *one_step]) == 0
    groups = torch.load('work/epoch_1.pth', weights_only=False)['optimizer']['param_groups']
    peaks = {group['max_lr'] for group in groups}
    top = 2e-3 * 2 / 16  # twice the lr of the config, for batches of 2 instead of 16
    assert max(peaks) == pytest.approx(top)
    assert sorted(peaks)[-3:] == pytest.approx([top / 4, top / 2, top])  # a factor for each layer
    for group in groups:
        assert group['initial_lr'] == pytest.approx(group['max_lr'] / 25)
    log = next(Path('work').rglob('*.log')).read_text()
    assert 'eta_max is scaled by the learning rate of each parameter group' in log


@pytest.mark.parametrize(
    'setting, what',
    [
        ('model.backbone.init_cfg.checkpoint', 'https://a.invalid/b.pth'),
        ('model.init_cfg.checkpoint', 'the weights in an init_cfg'),
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


def test_two_processes_are_one_with_twice_the_batch(pages_dataset):
    """Augmentations depend on the sample and not on the process.

    The losses are equal under these conditions: TotalBatchHook, images of one size, no random draws
    in the model (drop path, dropout), no statistics of batches (BatchNorm), and no batch sampler
    that groups images.
    """
    Path('demo.py').write_text(
        f"_base_ = '{ROOT}/configs/demo/pages_retinanet_cpvt_nano.py'\n"
        "custom_hooks = [dict(type='TotalBatchHook')]\n"
        'pipeline = _base_.train_pipeline\n'
        "pipeline[2] = dict(type='Resize', scale=(160, 128), keep_ratio=False)\n"
        "pipeline.insert(3, dict(type='RandomFlip', prob=0.5))\n"
        'train_dataloader = dict(batch_sampler=None, num_workers=0, persistent_workers=False,\n'
        f"    dataset=dict(data_root='{pages_dataset}', pipeline=pipeline))\n"
        'train_cfg = dict(max_epochs=2)\n'
        # AdamW would divide small gradients by their magnitude, which amplifies their rounding.
        "optim_wrapper = dict(optimizer=dict(_delete_=True, type='SGD', lr=0.01))\n"
        'param_scheduler = []\n'
        'default_hooks = dict(logger=dict(interval=1))\n'
        'randomness = dict(seed=3)\n'
    )
    command = ['demo.py', '--launcher', 'pytorch', '--cfg-options', *NO_VALIDATION]
    load_config('demo.py')  # imports mm once, and not in each process
    two = in_processes(2, lambda _: train.main([*command, 'train_dataloader.batch_size=2']))
    assert [status for status, _ in two] == [0, 0], two
    command[1:3] = ['--work-dir', 'one']
    assert train.main([*command, 'train_dataloader.batch_size=4']) == 0
    for name in ('loss', 'loss_cls', 'loss_bbox'):
        one, two = (logged(Path(f, 'epoch_2.pth'), name) for f in ('one', 'work_dirs/demo'))
        assert len(one) == 4 and len(set(one)) == 4
        np.testing.assert_allclose(one, two, rtol=1e-5)  # of float32 sums in another order


def test_batches_of_the_validation_are_divided(configs, monkeypatch):
    """mmseg refuses images of several sizes in a batch."""
    batches = []

    def validate(runner: ToolRunner) -> None:
        runner.model.eval()
        for batch in runner.val_dataloader:
            batches.append({tuple(image.shape[1:]) for image in batch['inputs']})
            assert len(runner.model.val_step(batch)) == len(batch['inputs'])

    monkeypatch.setattr(ToolRunner, 'train', validate)
    options = ['val_dataloader.batch_size=4', 'val_dataloader.dataset.pipeline.1.keep_ratio=True']
    assert train.main([str(configs['segmentor']), '--cfg-options', *options]) == 0
    assert len(batches[0]) > 1
