"""Settings without an effect are errors; those of configs that mm ships are warnings at most."""

from copy import deepcopy
from pathlib import Path

import mmdet
import mmseg
import pytest
from mmengine.config import Config
from support import load_tool
from torch import nn

from cpvt_pyramid.runner.configs import load_config
from cpvt_pyramid.runner.ignored import check_ignored, warn_of_custom_keys
from cpvt_pyramid.tooling.command import UserError

COSINE = {'type': 'CosineAnnealingLR', 'by_epoch': True}


class NeckOfAUser(nn.Module): ...


@pytest.fixture(scope='module')
def trainings(configs: dict[str, Path]) -> dict[str, Config]:
    """A detector, trained for 3 epochs, and a segmentor, trained for 12 iterations."""
    return {name: load_config(path) for name, path in configs.items()}


@pytest.mark.parametrize(
    'name, settings, complaint',
    [
        # Names
        ('detector', {'train_dataloder': {'batch_size': 4}}, "nothing reads the setting 'train_d"),
        ('detector', {'find_unused_parameter': True}, "nothing reads the setting 'find_unused_p"),
        (
            'detector',
            {'optim_wrapper.paramwise_cfg.norm_decay_multi': 0.0},
            "nothing reads 'norm_decay_multi' in optim_wrapper.paramwise_cfg; did you mean "
            "'norm_decay_mult'?",
        ),
        ('detector', {'auto_scale_lr.enabled': True}, "nothing reads 'enabled' in auto_scale_lr; "),
        ('detector', {'env_cfg.cudnn': True}, "nothing reads 'cudnn' in env_cfg"),
        (
            'detector',
            {'train_dataloader.dataset.metainfo.CLASSES': ('cat',)},
            "nothing reads 'CLASSES' in the metainfo of the train data; did you mean 'classes'?",
        ),
        (
            'detector',
            {'train_dataloader.dataset.filter_cfg.filter_emty_gt': True},
            "nothing reads 'filter_emty_gt' in the filter_cfg of the train data; did you mean "
            "'filter_empty_gt'?",
        ),
        (
            'detector',
            {'model.test_cfg.score_threshold': 0.5},
            "nothing reads 'score_threshold' in model.test_cfg",
        ),
        (
            'detector',
            {'model.train_cfg.pos_weigth': -1},
            "nothing reads 'pos_weigth' in model.train_cfg; did you mean 'pos_weight'?",
        ),
        (
            'detector',
            {'default_hooks.chekpoint': {'type': 'CheckpointHook', 'interval': 5}},
            "default_hooks.chekpoint adds a hook and leaves 'checkpoint' as it is; did you mean "
            'default_hooks.checkpoint?',
        ),
        # Values
        (
            'detector',
            {'optim_wrapper.accumulative_counts': 1.5},
            'optim_wrapper.accumulative_counts must be a whole number, at least 1, got 1.5',
        ),
        ('detector', {'optim_wrapper.accumulative_counts': 0}, 'optim_wrapper.accumulative_counts'),
        ('detector', {'train_cfg.val_interval': 'a'}, 'train_cfg.val_interval must be a whole num'),
        (
            'detector',
            {'optim_wrapper.clip_grad': {'max_norm': -1}},
            'optim_wrapper.clip_grad.max_norm must be positive, got -1',
        ),
        (
            'segmentor',
            {'default_hooks.checkpoint.by_epoch': True},
            'default_hooks.checkpoint.by_epoch must be False in a training that counts iterations',
        ),
        (
            'segmentor',
            {'param_scheduler.0.by_epoch': True},
            'param_scheduler.0.by_epoch must be False in a training that counts iterations; else '
            'PolyLR never changes anything',
        ),
        *(
            (
                'detector',
                {'param_scheduler.0.milestones': value},
                'param_scheduler.0.milestones must be a list of whole numbers, at least 0, got ',
            )
            for value in ('a', [1.5], [-1], ['a'], 2)
        ),
        ('detector', {'param_scheduler.0.gamma': -0.1}, 'param_scheduler.0.gamma must be a number'),
        (
            'detector',
            {'param_scheduler': [{'type': 'StepLR', 'step_size': 0.5}]},
            'param_scheduler.0.step_size must be a whole number, at least 1, got 0.5',
        ),
        (
            'detector',
            {'param_scheduler': [{'type': 'OneCycleLR', 'eta_max': 1, 'total_steps': 1}]},
            'param_scheduler.0.total_steps must be at least 3 epochs, got 1',
        ),
    ],
)
def test_mistakes(name, settings, complaint, trainings):
    cfg = deepcopy(trainings[name])
    cfg.merge_from_dict(settings)
    with pytest.raises(UserError) as raised:
        check_ignored(cfg, 'train', 'val')
    assert str(raised.value).startswith(complaint)


@pytest.mark.parametrize(
    'name, settings, warning',
    [
        ('detector', {}, ''),
        ('segmentor', {}, ''),
        ('detector', {'lr_config': {}}, 'nothing reads lr_config, a setting of MMDetection 2; it '),
        (
            'segmentor',
            {'data_preprocessor': {'size': (32, 32)}},
            'nothing reads data_preprocessor, since model.data_preprocessor is set',
        ),
        (
            'detector',
            {'optim_wrapper.paramwise_cfg': {'custom_keys': {'neck': {'lr_mul': 0.1}}}},
            "nothing reads 'lr_mul' in optim_wrapper.paramwise_cfg.custom_keys.neck; did you mean "
            "'lr_mult'?",
        ),
        (
            'detector',
            {'default_hooks.checkpoint.max_keep_ckpts': 0},
            'default_hooks.checkpoint.max_keep_ckpts=0 keeps all checkpoints',
        ),
        (
            'detector',
            {'param_scheduler.0.milestones': [1, 3, 4]},
            'param_scheduler.0 ends after 3 epochs, before its milestones 3, 4',
        ),
        (
            'segmentor',
            {'train_cfg.max_iters': 6},
            'param_scheduler.0 is longer than the training of 6 iterations',
        ),
        (
            'detector',
            {'param_scheduler': [{**COSINE, 'T_max': 2}]},
            'param_scheduler.0: the values rise again after T_max=2 epochs',
        ),
        # No mistakes
        ('detector', {'param_scheduler': [{**COSINE, 'T_max': 3, 'end': 10**9}]}, ''),
        (  # in an epoch are more iterations than epochs in the training
            'detector',
            {'param_scheduler': [{'type': 'LinearLR', 'by_epoch': False, 'end': 500}]},
            '',
        ),
        (
            'segmentor',
            {'param_scheduler': [{**COSINE, 'T_max': 2, 'convert_to_iter_based': True}]},
            '',
        ),
        ('detector', {'model.bbox_head.type': 'RetinaHed', 'model.test_cfg.mine': 1}, ''),
        ('detector', {'mode': 'fast', 'train_dataloaders': {}, 'test_pipeline': []}, ''),
        ('detector', {'custom_hook': {'type': 'A'}, 'custom_hooks': [{'type': 'A'}]}, ''),
        ('detector', {'default_hooks.checkpoint_2': {'type': 'CheckpointHook'}}, ''),
        ('detector', {'model.test_cfg.mine': 1, 'model.neck.type': NeckOfAUser}, ''),
    ],
)
def test_warnings(name, settings, warning, trainings, capsys):
    cfg = deepcopy(trainings[name])
    cfg.merge_from_dict(settings)
    check_ignored(cfg, 'train', 'val')
    out = capsys.readouterr().out
    assert out.startswith(f'warning: {warning}') if warning else not out
    assert out.count('\n') == bool(warning)


# Configs that mm ships, with settings that nothing reads or that are named like one


@pytest.mark.parametrize(
    'config, warning',
    [
        ('mmdet/retinanet/retinanet_r18_fpn_1x_coco.py', ''),
        ('mmdet/detr/detr_r50_8xb2-150e_coco.py', ''),
        ('mmdet/faster_rcnn/faster-rcnn_r50_fpn_fcos-rpn_1x_coco.py', ''),
        ('mmdet/dsdl/voc07.py', ''),
        ('mmdet/rtmdet/rtmdet_l_convnext_b_4xb32-100e_coco.py', ''),
        (
            'mmdet/faster_rcnn/faster-rcnn_r50-caffe_fpn_ms-2x_coco.py',
            'param_scheduler.1 ends after 12 epochs, before its milestones 16, 23',
        ),
        (
            'mmseg/bisenetv2/bisenetv2_fcn_4xb4-ohem-160k_cityscapes-1024x1024.py',
            'nothing reads data_preprocessor, since model.data_preprocessor is set',
        ),
        (
            'mmseg/dnlnet/dnl_r101-d8_4xb2-80k_cityscapes-769x769.py',
            "nothing reads 'wd_mult' in optim_wrapper.paramwise_cfg.custom_keys.theta",
        ),
    ],
)
def test_configs_of_mm(config, warning, capsys):
    check_ignored(load_config(shipped(config)), 'train', 'val', 'test')
    out = capsys.readouterr().out
    assert out.startswith(f'warning: {warning}') if warning else not out


def shipped(config: str) -> Path:
    family, _, name = config.partition('/')
    return Path({'mmdet': mmdet, 'mmseg': mmseg}[family].__file__).parent / '.mim/configs' / name


def test_settings_of_stages():
    cascade = load_config(shipped('mmdet/cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py'))
    for path in ('model.test_cfg.rcnn', 'model.train_cfg.rpn', 'model.train_cfg.rcnn.1'):
        cfg = deepcopy(cascade)
        cfg.merge_from_dict({f'{path}.typo': 1})
        with pytest.raises(UserError, match=f"nothing reads 'typo' in {path}"):
            check_ignored(cfg, 'train')


# Tools


@pytest.mark.parametrize(
    'command, complaint',
    [
        (
            'train DETECTOR --cfg-options optim_wrapper.accumulative_counts=1.5',
            'optim_wrapper.accumulative_counts must be',
        ),
        (
            'train DETECTOR --cfg-options max_epochs=5',
            '--cfg-options max_epochs changes a variable of the config file, and not the settings '
            'that have its value, such as train_cfg.max_epochs\n',
        ),
        (
            'train DETECTOR --cfg-options optimizer.lr=1',
            '--cfg-options optimizer.lr changes a variable of the config file, and not the '
            'settings that have its value, such as optim_wrapper.optimizer.lr\n',
        ),
        (
            'train DETECTOR --cfg-options auto_scale_lr.enable=1 auto_scale_lr.base_batch_size=-1',
            'auto_scale_lr.enable needs auto_scale_lr.base_batch_size in the config, a number of',
        ),
        ('test DETECTOR x.pth --cfg-options model.test_cfg.score_th=1', "nothing reads 'score_th'"),
        ('infer DETECTOR x.pth x.jpg --cfg-options model.test_cfg.max_img=1', 'nothing reads'),
    ],
)
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
