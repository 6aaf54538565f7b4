"""Settings without an effect are warnings, misspelled ones at the top level errors; configs that mm
ships are never refused."""

from copy import deepcopy
from pathlib import Path

import mmdet.datasets  # which prints a line when it is imported
import mmseg.datasets
import pytest
from mmengine.config import Config
from support import load_tool
from torch import nn

from cpvt_pyramid.runner.config.load import load_config
from cpvt_pyramid.runner.config.unread import check_unread, warn_of_custom_keys
from cpvt_pyramid.tooling.command import UserError


class NeckOfAUser(nn.Module): ...


@pytest.fixture(scope='module')
def trainings(configs: dict[str, Path]) -> dict[str, Config]:
    """A detector, trained for 3 epochs, and a segmentor, trained for 12 iterations."""
    return {name: load_config(path) for name, path in configs.items()}


@pytest.mark.parametrize(
    'name, settings, warning',
    [
        ('detector', {}, ''),
        ('segmentor', {}, ''),
        ('detector', {'optim_wrapper.paramwise_cfg.norm_decay_multi': 0.0},
         "nothing reads 'norm_decay_multi' in optim_wrapper.paramwise_cfg; did you mean "
         "'norm_decay_mult'?"),
        ('detector', {'auto_scale_lr.enabled': True}, "nothing reads 'enabled' in auto_scale_lr; "),
        ('detector', {'env_cfg.cudnn': True}, "nothing reads 'cudnn' in env_cfg"),
        ('detector', {'train_dataloader.dataset.metainfo.CLASSES': ('cat',)},
         "nothing reads 'CLASSES' in the metainfo of the train data"),
        ('detector', {'train_dataloader.dataset.filter_cfg.filter_emty_gt': True},
         "nothing reads 'filter_emty_gt' in the filter_cfg of the train data; did you mean "
         "'filter_empty_gt'?"),
        ('detector', {'model.test_cfg.score_threshold': 0.5}, "nothing reads 'score_threshold' in"),
        ('detector', {'model.train_cfg.pos_weigth': -1},
         "nothing reads 'pos_weigth' in model.train_cfg; did you mean 'pos_weight'?"),
        ('detector', {'default_hooks.chekpoint': {'type': 'CheckpointHook', 'interval': 5}},
         "nothing reads 'chekpoint' in default_hooks; did you mean 'checkpoint'?"),
        ('segmentor', {'data_preprocessor': {'size': (32, 32)}},
         'nothing reads data_preprocessor, since model.data_preprocessor is set'),
        ('detector', {'optim_wrapper.paramwise_cfg': {'custom_keys': {'neck': {'lr_mul': 0.1}}}},
         "nothing reads 'lr_mul' in optim_wrapper.paramwise_cfg.custom_keys.neck; did you mean "
         "'lr_mult'?"),
        ('segmentor', {'default_hooks.checkpoint.by_epoch': True},
         'default_hooks.checkpoint counts epochs in a training that counts iterations'),
        ('segmentor', {'param_scheduler.0.by_epoch': True},
         'param_scheduler.0 counts epochs in a training that counts iterations: it changes noth'),
        ('detector', {'param_scheduler.0.milestones': [1, 3, 4]},
         'param_scheduler.0 ends after 3 epochs, before its milestones 3, 4'),
        # No mistakes
        ('segmentor',
         {'param_scheduler': [
             {'type': 'CosineAnnealingLR', 'T_max': 2, 'convert_to_iter_based': True}]}, ''),
        ('detector', {'default_hooks.checkpoint_2': {'type': 'CheckpointHook'}}, ''),
    ],
)  # fmt: skip
def test_warnings(name, settings, warning, trainings, capsys):
    cfg = deepcopy(trainings[name])
    cfg.merge_from_dict(settings)
    check_unread(cfg, 'train', 'val')
    out = capsys.readouterr().out
    assert out.startswith(f'warning: {warning}') if warning else not out
    assert out.count('\n') == bool(warning)


def test_settings_of_stages(capsys):
    cfg = load_config(shipped('mmdet/cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py'))
    for path in ('model.test_cfg.rcnn', 'model.train_cfg.rpn', 'model.train_cfg.rcnn.1'):
        changed = deepcopy(cfg)
        changed.merge_from_dict({f'{path}.typo': 1})
        check_unread(changed, 'train')
        assert f"nothing reads 'typo' in {path}" in capsys.readouterr().out


# The top level


@pytest.mark.parametrize(
    'text, complaint',
    [
        ('train_dataloder = dict(batch_size=4)', "'train_dataloder'; did you mean 'train_datalo"),
        ('find_unused_parameter = True', 'nothing reads find_unused_parameter\n'),
        ('train_config = dict(max_epochs=1)', "'train_config'; did you mean 'train_cfg'?"),
        ('custom_hook = [dict(type="A")]', "'custom_hook'; did you mean 'custom_hooks'?"),
        ('optimizer = dict(lr=1)',
         'optimizer, a setting of MMDetection 2; it is optim_wrapper.opt'),
        ('lr_config = {}', 'lr_config, a setting of MMDetection 2; it is param_scheduler now'),
        ('fp16 = dict(loss_scale=512.)  # fp16', 'fp16, a setting of MMDetection 2; it is optim'),
        ('img_scale = 3\nx = 4\ny = dict(img_scale=x)', 'img_scale\nwarning: nothing reads y\n'),
        # A base config has read it before.
        ('early = dict(lr=2)', 'nothing reads early\n'),
        # Read
        ('lr = 1\noptim_wrapper = dict(optimizer=dict(lr=lr))', ''),
        ('optim_wrapper = dict(optimizer={{_base_.early}})', ''),
        ('_private = 1', ''),
        ('import os', ''),
        ('def kind(): ...', ''),
    ],
)  # fmt: skip
def test_top_level(text, complaint, configs, tmp_path, capsys):
    base = 'early = dict(lr=1)\noptim_wrapper = dict(optimizer=early)\n'
    (tmp_path / 'base.py').write_text(f"_base_ = '{configs['detector']}'\n{base}")
    (tmp_path / 'mine.py').write_text(f"_base_ = 'base.py'\n{text}\n")
    cfg = load_config(tmp_path / 'mine.py')
    error = ''
    try:
        check_unread(cfg, 'train')
    except UserError as raised:
        error = str(raised)
    said = error + capsys.readouterr().out
    assert complaint in said if complaint else not said
    assert bool(error) == ('did you mean' in complaint)


# Configs that mm ships, with settings that nothing reads or that are named like one


@pytest.mark.parametrize(
    'config, warning',
    [
        ('mmdet/retinanet/retinanet_r18_fpn_1x_coco.py', ''),
        ('mmdet/detr/detr_r50_8xb2-150e_coco.py', ''),
        ('mmdet/faster_rcnn/faster-rcnn_r50_fpn_fcos-rpn_1x_coco.py', ''),
        ('mmdet/rtmdet/rtmdet_l_convnext_b_4xb32-100e_coco.py', ''),
        ('mmdet/faster_rcnn/faster-rcnn_r50-caffe_fpn_ms-2x_coco.py',
         'param_scheduler.1 ends after 12 epochs, before its milestones 16, 23'),
        ('mmseg/bisenetv2/bisenetv2_fcn_4xb4-ohem-160k_cityscapes-1024x1024.py',
         'nothing reads models'),
        ('mmseg/dnlnet/dnl_r101-d8_4xb2-80k_cityscapes-769x769.py',
         "nothing reads 'wd_mult' in optim_wrapper.paramwise_cfg.custom_keys.theta"),
    ],
)  # fmt: skip
def test_configs_of_mm(config, warning, capsys):
    check_unread(load_config(shipped(config)), 'train', 'val', 'test')
    out = capsys.readouterr().out
    assert out.startswith(f'warning: {warning}') if warning else not out


def shipped(config: str) -> Path:
    family, _, name = config.partition('/')
    return Path({'mmdet': mmdet, 'mmseg': mmseg}[family].__file__).parent / '.mim/configs' / name


# Tools


@pytest.mark.parametrize(
    'command, complaint',
    [
        ('train DETECTOR --cfg-options max_epochs=5',
         '--cfg-options max_epochs changes a variable of the config file, and not the settings '
         'that have its value, such as train_cfg.max_epochs\n'),
        ('train DETECTOR --cfg-options optimizer.lr=1',
         '--cfg-options optimizer.lr changes a variable of the config file, and not the '
         'settings that have its value, such as optim_wrapper.optimizer.lr\n'),
        ('train DETECTOR --cfg-options auto_scale_lr.enable=1 auto_scale_lr.base_batch_size=-1',
         'auto_scale_lr.enable needs auto_scale_lr.base_batch_size in the config, a number of'),
    ],
)  # fmt: skip
def test_tools(command, complaint, configs, tmp_path, capsys):
    variables = 'max_epochs = 3\noptimizer = dict(lr=1e-3)\n'
    (tmp_path / 'mine.py').write_text(f"_base_ = '{configs['detector']}'\n{variables}")
    tool, *arguments = command.replace('DETECTOR', 'mine.py').split()
    assert load_tool(tool).main(arguments) == 2
    assert capsys.readouterr().err.startswith(f'{tool}: {complaint}')


def test_custom_keys(trainings, capsys):
    cfg = deepcopy(trainings['detector'])
    keys = {'0.weight': {}, '.bias': {}, 'absolute_pos_embed': {}, 'nrom': {}}
    cfg.optim_wrapper.paramwise_cfg = {'custom_keys': keys}
    for model in (nn.Sequential(nn.Linear(1, 1)), nn.DataParallel(nn.Linear(1, 1))):
        warn_of_custom_keys(cfg, model)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith('custom_keys of optim_wrapper.paramwise_cfg: absolute_pos_embed, nrom')
    assert second.endswith(': 0.weight, absolute_pos_embed, nrom')
