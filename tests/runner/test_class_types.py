"""Configs in mm's new style: types are classes, bases are imported, default_scope is None."""

import json
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from support import ORIGINAL_MM, load_tool
from tiny_mm import DIGITS

from cpvt_pyramid.runner.config.check import check_checkpoints
from cpvt_pyramid.runner.config.load import kind_of, load_config
from cpvt_pyramid.runner.distributed import replace_sync_batch_norms
from cpvt_pyramid.tooling.command import UserError

TOOLS = {name: load_tool(name) for name in ('train', 'test', 'infer', 'get_flops')}

RUNTIME = """
from mmengine.hooks import (
    CheckpointHook, DistSamplerSeedHook, IterTimerHook, LoggerHook, ParamSchedulerHook)
from mmengine.optim import AmpOptimWrapper, MultiStepLR, OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, LogProcessor, TestLoop, ValLoop
from mmengine.visualization import LocalVisBackend, Visualizer
from torch.optim import AdamW

default_scope = None
default_hooks = dict(
    timer=dict(type=IterTimerHook), logger=dict(type=LoggerHook, interval=1),
    param_scheduler=dict(type=ParamSchedulerHook), sampler_seed=dict(type=DistSamplerSeedHook),
    checkpoint=dict(type=CheckpointHook, interval=1))
visualizer = dict(
    type=Visualizer, name='visualizer', vis_backends=[dict(type=LocalVisBackend)])
log_processor = dict(type=LogProcessor, window_size=50)
train_cfg = dict(type=EpochBasedTrainLoop, max_epochs=2, val_interval=1)
test_cfg = dict(type=TestLoop)
param_scheduler = [dict(type=MultiStepLR, milestones=[1])]
optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=AdamW, lr=1e-3))
randomness = dict(seed=3)
"""
DETECTOR = """
from mmengine.config import read_base

with read_base():
    from .runtime import *

from mmcv.transforms import LoadImageFromFile
from mmdet.datasets import CocoDataset
from mmdet.datasets.transforms import LoadAnnotations, PackDetInputs, Resize
from mmdet.evaluation import CocoMetric
from mmdet.models import FPN, L1Loss, FocalLoss, RetinaHead, RetinaNet
from mmdet.models.task_modules import AnchorGenerator, DeltaXYWHBBoxCoder, MaxIoUAssigner
from mmdet.models.task_modules import PseudoSampler
from mmengine.dataset import DefaultSampler

from cpvt_pyramid.mm import CPVTPyramid
from cpvt_pyramid.mm.detection import ValidRegionDetDataPreprocessor

model = dict(
    type=RetinaNet,
    data_preprocessor=dict(
        type=ValidRegionDetDataPreprocessor, mean=[0, 0, 0], std=[255, 255, 255],
        pad_size_divisor=32),
    backbone=dict(type=CPVTPyramid, arch='pcpvt_nano'),
    neck=dict(
        type=FPN, in_channels=[32, 64, 128, 192], out_channels=16, start_level=1,
        add_extra_convs='on_input', num_outs=5),
    bbox_head=dict(
        type=RetinaHead, num_classes=10, in_channels=16, feat_channels=16, stacked_convs=1,
        anchor_generator=dict(
            type=AnchorGenerator, octave_base_scale=4, scales_per_octave=3, ratios=[1.0],
            strides=[8, 16, 32, 64, 128]),
        bbox_coder=dict(type=DeltaXYWHBBoxCoder),
        loss_cls=dict(type=FocalLoss, use_sigmoid=True), loss_bbox=dict(type=L1Loss)),
    train_cfg=dict(
        assigner=dict(
            type=MaxIoUAssigner, pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0,
            ignore_iof_thr=-1),
        sampler=dict(type=PseudoSampler), allowed_border=-1, pos_weight=-1, debug=False),
    test_cfg=dict(
        nms_pre=100, min_bbox_size=0, score_thr=0.001, nms=dict(type='nms', iou_threshold=0.5),
        max_per_img=10))
pipeline = [
    dict(type=LoadImageFromFile), dict(type=Resize, scale=(96, 96), keep_ratio=False),
    dict(type=LoadAnnotations, with_bbox=True), dict(type=PackDetInputs)]
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type=DefaultSampler, shuffle=True),
    dataset=dict(
        type=CocoDataset, data_root='{data}/coco', metainfo=dict(classes={classes}),
        ann_file='annotations/instances_train2017.json', data_prefix=dict(img='train2017/'),
        pipeline=pipeline, indices=2))
test_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type=DefaultSampler, shuffle=False),
    dataset=dict(
        type=CocoDataset, data_root='{data}/coco', metainfo=dict(classes={classes}),
        ann_file='annotations/instances_val2017.json', data_prefix=dict(img='val2017/'),
        pipeline=pipeline, test_mode=True, indices=1))
test_evaluator = dict(
    type=CocoMetric, metric='bbox', ann_file='{data}/coco/annotations/instances_val2017.json')
"""
SEGMENTOR = """
from mmengine.config import read_base

with read_base():
    from .runtime import *

from mmseg.models import EncoderDecoder, FPNHead
from torch.nn import SyncBatchNorm

from cpvt_pyramid.mm import CPVTPyramid
from cpvt_pyramid.mm.segmentation import ValidRegionSegDataPreProcessor
from mmengine.model import PretrainedInit

model = dict(
    type=EncoderDecoder,
    data_preprocessor=dict(type=ValidRegionSegDataPreProcessor),
    backbone=dict(
        type=CPVTPyramid, arch='pcpvt_nano',
        init_cfg=dict(type=PretrainedInit, checkpoint='nowhere.pth')),
    decode_head=dict(
        type=FPNHead, in_channels=[32, 64, 128, 192], in_index=[0, 1, 2, 3], channels=16,
        feature_strides=[4, 8, 16, 32], num_classes=11, norm_cfg=dict(type=SyncBatchNorm)),
    test_cfg=dict(mode='whole'))
"""


@pytest.fixture
def detector(sample_dataset: Path) -> str:
    Path('runtime.py').write_text(RUNTIME)
    text = DETECTOR.replace('{data}', str(sample_dataset)).replace('{classes}', repr(DIGITS))
    Path('detector.py').write_text(text)
    return 'detector.py'


@pytest.fixture
def segmentor() -> str:
    Path('runtime.py').write_text(RUNTIME)
    Path('segmentor.py').write_text(SEGMENTOR)
    return 'segmentor.py'


def test_a_detector_trains_resumes_and_is_tested(detector, sample_dataset, capsys):
    command = [detector, '--work-dir', 'work']
    one_epoch = 'train_cfg.max_epochs=1'
    assert TOOLS['train'].main([*command, '--amp', '--cfg-options', one_epoch]) == 0
    ran = Config.fromfile('work/detector.py')
    assert kind_of(ran.optim_wrapper) == 'BFloat16OptimWrapper'
    assert ran.default_hooks.checkpoint.type == 'WholeCheckpointHook'
    assert kind_of(ran.train_dataloader.sampler) == 'SeededSampler'
    assert ran.default_scope == 'mmdet'

    assert TOOLS['train'].main([*command, '--resume']) == 0
    first, second = (
        torch.load(f'work/epoch_{epoch}.pth', weights_only=False)['state_dict'] for epoch in (1, 2)
    )
    assert not torch.equal(
        first['neck.fpn_convs.0.conv.weight'], second['neck.fpn_convs.0.conv.weight']
    )

    command = [detector, 'work/epoch_2.pth']
    tta = [] if ORIGINAL_MM else ['--tta']  # its configs with classes in lists cannot be printed
    assert TOOLS['test'].main([*command, *tta]) == 0
    assert 'coco/bbox_mAP_50' in capsys.readouterr().out
    image = next((sample_dataset / 'coco/val2017').glob('*.jpg'))
    assert TOOLS['infer'].main([*command, str(image)]) == 0
    found = json.loads(Path(f'predictions/{image.stem}.detections.json').read_text())
    assert all(box['class'] in DIGITS for box in found['detections'])


def test_a_segmentor_is_counted(segmentor, capsys):
    assert TOOLS['get_flops'].main([segmentor, '--size', '64', '64']) == 0
    assert 'EncoderDecoder' in capsys.readouterr().out


def test_names_are_those_of_the_classes(segmentor):
    cfg = load_config(segmentor)
    assert cfg.default_scope == 'mmseg'
    with pytest.raises(UserError, match='no checkpoint at nowhere.pth'):
        check_checkpoints(cfg)
    replace_sync_batch_norms(cfg.model)
    assert cfg.model.decode_head.norm_cfg.type == 'BN'


@pytest.mark.parametrize('kind', ['RetinaNet', 'mmdet.RetinaNet', 'mmdet.models.RetinaNet'])
def test_a_string_may_have_a_scope_or_a_module(kind):
    assert kind_of({'type': kind}) == 'RetinaNet'
