"""Trainings whose weights become NaN."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from support import load_tool
from torch import nn

from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.training import hooks
from cpvt_pyramid.tasks.trained import load_whole

train = load_tool('train')


@HOOKS.register_module()
class Diverging(Hook):
    """Makes a weight NaN in an iteration, after which the loss is still finite."""

    priority = 'VERY_HIGH'

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.iteration:
            with torch.no_grad():
                next(runner.model.parameters()).fill_(torch.nan)


BY_EPOCHS = ['train_cfg.val_interval=1', 'train_dataloader.dataset.indices=4']
BY_EPOCHS += ['default_hooks.checkpoint.max_keep_ckpts=1']
BY_ITERATIONS = ['train_cfg.val_interval=3', 'default_hooks.checkpoint.interval=3']
BY_ITERATIONS += ['default_hooks.checkpoint.max_keep_ckpts=1']


@pytest.mark.parametrize(
    'name, options, iteration, left',
    [
        ('detector', BY_EPOCHS, 3, 'epoch_1.pth'),  # the loss tells
        ('detector', BY_EPOCHS, 4, 'epoch_1.pth'),  # the last iteration of an epoch
        ('segmentor', BY_ITERATIONS, 5, 'iter_3.pth'),
        ('segmentor', BY_ITERATIONS, 6, 'iter_3.pth'),  # after which a checkpoint is written
    ],
)
def test_a_training_that_diverges(name, options, iteration, left, configs, capsys):
    """It ends with one line, and its last checkpoint and the best one stay and are finite."""
    Path('mine.py').write_text(
        f"_base_ = '{configs[name]}'\n"
        f"custom_hooks = [dict(type='Diverging', iteration={iteration})]\n"
        'val_dataloader = dict(dataset=dict(indices=2))\n'
    )
    command = ['mine.py', '--work-dir', 'work', '--cfg-options', *options]
    assert (
        train.main([*command, 'train_cfg.val_interval=1' * (name == 'detector') or options[0]]) == 2
    )
    line = capsys.readouterr().err.splitlines()[-1]
    is_seen_later = (name, iteration) in (('detector', 3), ('segmentor', 5))
    seen = iteration + is_seen_later
    assert line.startswith(f'cpvt train: diverged at iteration {seen}: weights are not finite. Try')
    files = sorted(path.name for path in Path('work').glob('*.pth'))
    assert left in files and len(files) == 1 + any(file.startswith('best') for file in files)
    for file in files:
        state = torch.load(Path('work', file), weights_only=False)['state_dict']
        assert all(tensor.isfinite().all() for tensor in state.values()), file


def runner_of(iteration: int, **others: object) -> SimpleNamespace:
    model = nn.Linear(2, 2)
    return SimpleNamespace(iter=iteration, hooks=[], model=model, work_dir='work', **others)


def test_a_step_that_mixed_precision_skips_is_no_divergence():
    hook = hooks.StopOnDivergenceHook()
    runner = runner_of(5)
    hook.after_train_iter(runner, 5, outputs={'loss': torch.tensor(torch.inf)})
    with pytest.raises(UserError, match='the first loss must be finite, got inf'):
        hook.after_train_iter(runner_of(0), 0, outputs={'loss': torch.tensor(torch.inf)})
    nn.init.constant_(runner.model.bias, torch.nan)
    hook.after_train_iter(runner, 5, outputs={'loss': torch.tensor(1.0)})  # it does not look
    with pytest.raises(UserError, match='diverged at iteration 6'):
        hook.after_train_iter(runner, 5, outputs={'loss': torch.tensor(torch.nan)})


@pytest.mark.parametrize('by_epoch, iteration, looks', [(False, 9, True), (False, 8, False)])
def test_weights_are_read_where_a_checkpoint_is_written(by_epoch, iteration, looks):
    runner = runner_of(iteration, max_iters=50)
    runner.hooks = [CheckpointHook(interval=10, by_epoch=by_epoch)]
    with mock.patch.object(hooks, 'check_weights_are_finite') as check:
        hooks.StopOnDivergenceHook().after_train_iter(runner, 0, outputs={'loss': 1.0})
    assert check.called == looks


def test_a_config_without_our_hooks_is_checked_by_the_command(configs, capsys):
    Path('mine.py').write_text(
        f"_base_ = '{configs['detector']}'\n"
        "default_hooks = dict(_delete_=True, checkpoint=dict(type='CheckpointHook', interval=1))\n"
        "custom_hooks = [dict(type='Diverging', iteration=2)]\n"
        'val_cfg = val_dataloader = val_evaluator = None\n'
    )
    assert train.main(['mine.py', '--work-dir', 'work']) == 2
    assert 'cpvt train: diverged at iteration 3' in capsys.readouterr().err


class WithNorm(nn.Sequential):
    """With a buffer that is infinite by intention."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        self.register_buffer('mask', torch.tensor([0, -torch.inf]))


@pytest.mark.parametrize('kind', ['checkpoint', 'evaluation'])
def test_statistics_that_are_not_finite(kind):
    """As after a step that a GradScaler skips, whose forward pass was infinite: the weights stay
    finite."""
    runner = runner_of(9, max_iters=50)
    runner.model = WithNorm()
    runner.hooks = [CheckpointHook(interval=10, by_epoch=False)]
    hook = hooks.StopOnDivergenceHook()
    hook.before_train(runner)

    def look() -> None:
        if kind == 'evaluation':
            hook.before_val_epoch(runner)
        else:
            hook.after_train_iter(runner, 9, outputs={'loss': torch.tensor(1.0)})

    look()
    runner.model(torch.full((1, 2, 4, 4), torch.inf))
    with pytest.raises(UserError, match='the statistics of batch norms .* are not finite'):
        look()


def test_a_checkpoint_with_such_statistics_is_not_loaded():
    model = WithNorm()
    load_whole(model, model.state_dict(), 'a.pth')
    broken = {**model.state_dict(), '1.running_var': torch.full((2,), torch.nan)}
    with pytest.raises(ValueError, match='a.pth is damaged: 1.running_var has values that are not'):
        load_whole(model, broken, 'a.pth')
