"""Options that set an argument which a class does not have."""

import warnings

import pytest
import torch
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
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
        (
            DETECTOR,
            'visualizer.line_widths',
            'DetLocalVisualizer has no argument line_widths; did you mean line_width?',
        ),
        (
            SEGMENTOR,
            'visualizer.vis_backends.0.savedir',
            'LocalVisBackend has no argument savedir; did you mean',
        ),
        (DETECTOR, 'log_processor.windowsize', 'did you mean window_size?'),
        (DETECTOR, 'randomness.sed', 'set_randomness has no argument sed; did you mean seed?'),
        (
            DETECTOR,
            'env_cfg.cudnn_benchmarks',
            'env_cfg has no argument cudnn_benchmarks; did you mean cudnn_benchmark?',
        ),
        (DETECTOR, 'env_cfg.mp_cfg.start_method', 'did you mean mp_start_method?'),
        (DETECTOR, 'auto_scale_lr.enabled', 'did you mean enable?'),
        (DETECTOR, 'compile.modes', 'compile has no argument modes; did you mean mode'),
        (
            DETECTOR,
            'optim_wrapper.paramwise_cfg.bias_lr_mul',
            'optim_wrapper.paramwise_cfg has no argument bias_lr_mul; did you mean bias_lr_mult',
        ),
    ],
)
def test_a_class_without_the_argument(config, option, complaint):
    with pytest.raises(UserError) as caught:
        load_config(config, [f'{option}=1'])
    assert str(caught.value).startswith(f'--cfg-options {option}: ')
    assert complaint in str(caught.value)


def test_custom_imports():
    with pytest.raises(
        UserError, match="^custom_imports of .*unexpected keyword argument 'import'"
    ):
        load_config(DETECTOR, ['custom_imports.import=a'])


def test_a_function_without_the_argument():
    options = ['train_dataloader.collate_fn.type=pseudo_collate', 'train_dataloader.collate_fn.a=1']
    with pytest.raises(UserError, match='collate_fn.a: pseudo_collate has no argument a'):
        load_config(DETECTOR, options)


def test_a_setting_that_does_not_exist():
    with pytest.raises(UserError, match='is no setting; did you mean train_dataloader?'):
        load_config(DETECTOR, ['train_dataloaders.batch_size=1'])


# What builds an optimizer, and whether it can take settings of its own out of the others.
CONSTRUCTORS = {'LayerDecayConstructor': True, 'BuildsAnything': False}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class BuildsAnything(DefaultOptimWrapperConstructor):
    def __call__(self, model):
        raise NotImplementedError


@pytest.mark.parametrize('constructor', CONSTRUCTORS)
def test_constructors_of_optimizers(constructor):
    """Of one that builds as mmengine does, it is a warning: it may read further settings."""
    options = [f'optim_wrapper.constructor={constructor}', 'optim_wrapper.clip_grads=1']
    options += ['optim_wrapper.paramwise_cfg.layer_decay=0.8']
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        load_config(DETECTOR, options)
    lines = [str(warning.message) for warning in caught if 'clip_grads' in str(warning.message)]
    assert len(lines) == CONSTRUCTORS[constructor]
    for line in lines:
        assert 'OptimWrapper names no argument clip_grads; did you mean clip_grad?' in line


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
        (
            DETECTOR,
            'model_wrapper_cfg.bucket_cap',
            'MMDistributedDataParallel names no argument bucket_cap; did you mean bucket_cap_mb?',
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
        'visualizer.save_dir=a',
        'env_cfg.resource_limit=4096',
        'env_cfg.dist_cfg.timeout=1800',
        'optim_wrapper.paramwise_cfg.custom_keys.mine.lr_mult=0.1',
        'compile.mode=default',
        'auto_scale_lr.base_batch_size=16',
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
