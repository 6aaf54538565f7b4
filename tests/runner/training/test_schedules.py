"""A recipe for other numbers of images a step."""

import re

import pytest
from mmengine.config import Config

from cpvt_pyramid.config.plan import apply
from cpvt_pyramid.runner.training.schedules import plan_scaling, what_is_not_scaled
from cpvt_pyramid.tooling.command import UserError

END = float('inf')  # mmengine's default


def training(**changes) -> Config:
    cfg = dict(
        train_cfg=dict(max_iters=100, dynamic_intervals=[(0, 5), (90, 1)]),
        train_dataloader=dict(batch_size=4),
        optim_wrapper=dict(type='OptimWrapper'),
        auto_scale_lr=dict(base_batch_size=8),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=10, by_epoch=True)),
        param_scheduler=[
            dict(type='LinearLR', begin=0, end=3, by_epoch=False),
            dict(type='MultiStepLR', begin=3, end=END, milestones=[60, 90], by_epoch=False),
            dict(type='CosineAnnealingLR', T_max=7, by_epoch=True),
        ],
    )
    return Config({**cfg, **changes})


def test_what_counts_in_iterations_is_scaled():
    cfg = training()
    apply(cfg, plan_scaling(cfg, 1, scale_lr=True, scale_iters=True))
    assert cfg.auto_scale_lr.enable
    assert cfg.train_cfg.max_iters == 200
    assert cfg.train_cfg.dynamic_intervals == [(0, 10), (180, 2)]
    assert cfg.default_hooks.checkpoint.interval == 10  # epochs
    linear, steps, cosine = cfg.param_scheduler
    assert (linear.begin, linear.end) == (0, 6)
    assert (steps.begin, steps.end, steps.milestones) == (6, END, [120, 180])
    assert cosine.T_max == 7
    never = dict(checkpoint=dict(type='CheckpointHook', interval=-1, save_begin=0, by_epoch=False))
    cfg = training(train_dataloader=dict(batch_size=80), default_hooks=never)
    apply(cfg, plan_scaling(cfg, 1, scale_lr=False, scale_iters=True))
    assert cfg.train_cfg.max_iters == 10 and cfg.param_scheduler[0].end == 1  # at least one
    assert cfg.default_hooks == never


@pytest.mark.parametrize(
    'changes, said',
    [
        ({}, ['a step has 4 images', 'the learning rate is for 8', '0.5 times the images']),
        ({'optim_wrapper': {'accumulative_counts': 2}}, ['a step has 8 images', '0.5 times the']),
        ({'train_cfg': {'max_epochs': 2}}, ['a step has 4 images', 'the learning rate is for 8']),
        ({'train_dataloader': {'batch_size': 8}}, []),
        ({'auto_scale_lr': None}, []),
    ],
)
def test_a_run_says_what_is_not_scaled(changes, said):
    cfg = training(**changes)
    assert plan_scaling(cfg, 1, scale_lr=False, scale_iters=False) == []
    line = what_is_not_scaled(cfg, 1, scale_lr=False, scale_iters=False) or ''
    parts = [part for part in re.split(': |, and ', line) if part]
    assert len(parts) == len(said) and all(map(str.__contains__, parts, said))


@pytest.mark.parametrize(
    'changes, message',
    [
        (
            {'auto_scale_lr': None},
            'must set auto_scale_lr.base_batch_size to a number of images, got',
        ),
        ({'train_cfg': {'max_epochs': 2}}, 'epochs have the same images'),
        ({'param_scheduler': {'type': 'ExponentialLR', 'gamma': 0.9, 'by_epoch': False}}, 'gamma'),
    ],
)
def test_what_cannot_be_scaled_is_an_error(changes, message):
    with pytest.raises(UserError, match=message):
        plan_scaling(training(**changes), 1, scale_lr=False, scale_iters=True)


def test_accumulated_iterations_and_processes_count():
    """2 processes, 4 images each, 3 iterations a step."""
    cfg = training(optim_wrapper={'accumulative_counts': 3})
    said = what_is_not_scaled(cfg, 2, scale_lr=False, scale_iters=False)
    assert said == 'a step has 24 images: the learning rate is for 8 (--auto-scale-lr changes it)'
    changes = plan_scaling(cfg, 2, scale_lr=True, scale_iters=True)
    assert [change.path for change in changes] == [
        'auto_scale_lr.enable',
        'auto_scale_lr.base_batch_size',  # a note
    ]
