"""Options that set an argument which a class does not have."""

import pytest
import torch
from support import ROOT

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.predict.openmmlab.model import load_from_config
from cpvt_pyramid.app.tooling.command import UserError

DETECTOR = ROOT / 'configs/retinanet_cpvt_s.py'
SEGMENTOR = ROOT / 'configs/semantic_fpn_cpvt_s.py'


@pytest.mark.parametrize(
    'config, option, complaint',
    [
        (DETECTOR, 'train_cfg.max_epoch', 'EpochBasedTrainLoop has no argument max_epoch; did you'),
        (SEGMENTOR, 'train_cfg.max_iter', 'IterBasedTrainLoop has no argument max_iter; did you'),
        (DETECTOR, 'val_cfg.fp_16', 'ValLoop has no argument fp_16; did you mean fp16?'),
        (
            DETECTOR,
            'optim_wrapper.clip_grads.max_norm',
            'OptimWrapper has no argument clip_grads; did you mean clip_grad?',
        ),
        (DETECTOR, 'optim_wrapper.optimizer.rate', 'AdamW has no argument rate'),
        (DETECTOR, 'default_hooks.logger.steps', 'LoggerHook has no argument steps'),
        (DETECTOR, 'train_dataloader.sampler.size', 'DefaultSampler has no argument size'),
        (
            DETECTOR,
            'train_dataloader.batchsize',
            'DataLoader has no argument batchsize; did you mean batch_size?',
        ),
        (
            DETECTOR,
            'train_dataloader.dataset.pipeline.2.scal',
            'has no argument scal; did you mean scale?',
        ),
        (DETECTOR, 'test_evaluator.metrics', 'CocoMetric has no argument metrics; did you mean'),
    ],
)
def test_a_class_without_the_argument(config, option, complaint):
    with pytest.raises(UserError) as caught:
        load_config(config, [f'{option}=1'])
    assert str(caught.value).startswith(f'--cfg-options {option}: ')
    assert complaint in str(caught.value)


def test_the_config_in_a_checkpoint(tmp_path):
    meta = {'cfg': load_config(DETECTOR).pretty_text}
    torch.save({'meta': meta, 'state_dict': {}}, tmp_path / 'a.pth')
    with pytest.raises(UserError, match='^--cfg-options val_cfg.fp_16: ValLoop has no argument'):
        load_from_config(str(tmp_path / 'a.pth'), None, ['val_cfg.fp_16=1'], 'cpu')


@pytest.mark.parametrize(
    'config, option, complaint',
    [
        (DETECTOR, 'train_dataloader.dataset.indexes', 'CocoDataset names no argument indexes'),
        (DETECTOR, 'model.bbox_head.stacks', 'RetinaHead names no argument stacks'),
        (
            DETECTOR,
            'model.bbox_head.anchor_generator.scale',
            'AnchorGenerator names no argument scale; did you mean scales?',
        ),
        (DETECTOR, 'param_scheduler.0.last', 'LinearLR names no argument last'),
    ],
)
def test_a_class_that_may_pass_the_argument_on(config, option, complaint):
    """It is only a warning: what takes the argument is not known."""
    with pytest.warns(UserWarning, match=f'^--cfg-options {option}: {complaint}'):
        load_config(config, [f'{option}=1'])


@pytest.mark.parametrize(
    'option',
    [
        'train_cfg.val_interval=2',
        'optim_wrapper.clip_grad.max_norm=1',
        'optim_wrapper.paramwise_cfg.bias_lr_mult=2',
        'optim_wrapper.optimizer.eps=1e-7',
        'default_hooks.logger.priority=LOW',
        'default_hooks.mine.type=EMAHook',
        'train_dataloader.pin_memory=True',
        'train_dataloader.num_batch_per_epoch=3',
        'train_dataloader.dataset.indices=2',
        'train_dataloader.dataset.metainfo.classes=("a",)',
        'model.backbone.with_cp=True',
        'model.test_cfg.mine=1',
        'param_scheduler.0.convert_to_iter_based=True',
        'randomness.seed=1',
    ],
)
@pytest.mark.filterwarnings('error:--cfg-options')
def test_valid_options(option):
    load_config(DETECTOR, [option])


@pytest.mark.parametrize(
    'options',
    [
        ['val_dataloader.prefetch_factor=2', 'val_dataloader=None', 'val_cfg=None'],
        ['default_hooks.logger.steps=1', 'default_hooks.logger=None'],
        ['param_scheduler.1.rate=1', 'param_scheduler=[]'],
    ],
)
def test_a_part_that_a_later_option_replaces(options):
    assert load_config(DETECTOR, options)
