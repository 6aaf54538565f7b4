"""Settings that have no effect are named when a run starts."""

from pathlib import Path

import mmdet.datasets
import pytest
from support import load_tool
from torch import nn

from cpvt_pyramid.runner.config import parts
from cpvt_pyramid.runner.config.hints import warn_of_custom_keys, warn_of_settings
from cpvt_pyramid.runner.config.load import load_config, merge_options
from cpvt_pyramid.runner.config.parts import dataset_class


@pytest.mark.parametrize(
    'settings, warning',
    [
        (
            {'data_preprocessor': {'size': (32, 32)}},
            'data_preprocessor has no effect, since model.data_preprocessor is set',
        ),
        ({'default_hooks.checkpoint.by_epoch': True}, 'default_hooks.checkpoint counts epochs'),
        ({'param_scheduler.0.by_epoch': True}, 'param_scheduler.0 counts epochs'),
        (
            {
                'param_scheduler': [
                    {'type': 'CosineAnnealingLR', 'T_max': 2, 'convert_to_iter_based': True}
                ]
            },
            '',
        ),
    ],
)
def test_warnings(settings, warning, configs, capsys):
    cfg = load_config(configs['segmentor'])
    cfg.merge_from_dict(settings)
    warn_of_settings(cfg, 'train', 'val')
    out = capsys.readouterr().out
    assert out.startswith(f'warning: {warning}') if warning else not out
    assert out.count('\n') == bool(warning)


def test_a_learning_rate_that_a_schedule_replaces(configs, capsys):
    one_cycle = {'type': 'OneCycleLR', 'eta_max': 1e-3, 'total_steps': 9}
    lr, eta_max = 'optim_wrapper.optimizer.lr=1e30', 'param_scheduler.0.eta_max=0.1'
    for schedules, options, is_replaced in (
        ([one_cycle], [lr], True),
        (one_cycle, [lr], True),
        ([one_cycle], [], False),
        ([one_cycle], [eta_max], False),
        ([{'type': 'LinearLR', 'end': 5}, {**one_cycle, 'begin': 5}], [lr], False),
        ([{'type': 'MultiStepLR', 'milestones': [2]}], [lr], False),
    ):
        cfg = load_config(configs['detector'])
        cfg.param_scheduler = schedules
        merge_options(cfg, options)
        warn_of_settings(cfg, 'train', options=options)
        said = (
            'warning: optim_wrapper.optimizer.lr has no effect: OneCycleLR sets the learning rate'
        )
        assert capsys.readouterr().out.startswith(said) == is_replaced


@pytest.mark.parametrize(
    'text, warning',
    [
        (
            'train_dataloder = dict(batch_size=4)',
            'train_dataloder is not a setting; did you mean train_dataloader?',
        ),
        ('conv_cfg = 1\nmodels = 3\nval_evaluator_dice = 2\n_private = 1\nimport os', ''),
        ('lr = 1\noptim_wrapper = dict(optimizer=dict(lr=lr))', ''),
    ],
)
def test_top_level(text, warning, configs, capsys):
    Path('mine.py').write_text(f"_base_ = '{configs['detector']}'\n{text}\n")
    warn_of_settings(load_config('mine.py'), 'train')
    assert capsys.readouterr().out == (f'warning: {warning}\n' if warning else '')


def test_a_config_of_mm(capsys):
    config = 'rtmdet/rtmdet_l_convnext_b_4xb32-100e_coco.py'
    cfg = load_config(Path(mmdet.__file__).parent / '.mim/configs' / config)
    warn_of_settings(cfg, 'train', 'val', 'test')
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    'option, meant',
    [
        ('max_epochs=5', 'train_cfg.max_epochs'),
        ('optimizer.lr=1', 'optim_wrapper.optimizer.lr'),
    ],
)
def test_options_that_change_a_variable(option, meant, configs, tmp_path, capsys):
    variables = 'max_epochs = 3\noptimizer = dict(lr=1e-3)\n'
    (tmp_path / 'mine.py').write_text(f"_base_ = '{configs['detector']}'\n{variables}")
    assert load_tool('train').main(['mine.py', '--cfg-options', option]) == 2
    assert capsys.readouterr().err.endswith(f'; did you mean {meant!r}?\n')


def test_custom_keys(configs, capsys):
    cfg = load_config(configs['detector'])
    keys = {'0.weight': {}, '.bias': {}, 'absolute_pos_embed': {}, 'nrom': {}}
    cfg.optim_wrapper.paramwise_cfg = {'custom_keys': keys}
    for model in (nn.Sequential(nn.Linear(1, 1)), nn.DataParallel(nn.Linear(1, 1))):
        warn_of_custom_keys(cfg, model)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith('custom_keys of optim_wrapper.paramwise_cfg: absolute_pos_embed, nrom')
    assert second.endswith(': 0.weight, absolute_pos_embed, nrom')


def test_data_sets_are_imported_without_what_they_print(monkeypatch, capsys):
    """The maintained fork of mmdet prints "Could not import OneDL" twice."""
    monkeypatch.setattr(parts, 'import_module', print)
    assert dataset_class({'type': 'CocoDataset'}, 'mmdet') is mmdet.datasets.CocoDataset
    assert capsys.readouterr().out == ''
