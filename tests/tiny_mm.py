"""A tiny detector and a tiny segmentor in mm, as config files, for the sample data set; and a hook
that interrupts their training."""

import os
from pathlib import Path
from typing import Any

import mmengine
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.utils import digit_version
from small_data import CLASSES
from support import ROOT

# All images have 96 x 96 pixels, so that no batch is padded.
DETECTOR = """
_base_ = [
    '{configs}/models/retinanet.py', '{configs}/datasets/coco_detection.py',
    '{configs}/schedules/detection_1x.py', '{configs}/runtime_detection.py']
model = dict(
    backbone=dict(arch='pcpvt_nano', drop_path_rate=0.3),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=16),
    bbox_head=dict(num_classes=10, in_channels=16, feat_channels=16, stacked_convs=1),
    test_cfg=dict(score_thr=0.001))
load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)]
resize = [dict(type='Resize', scale=(96, 96), keep_ratio=False)]
pack = [dict(type='PackDetInputs')]
common = dict(
    serialize_data=False, data_root='{data}/coco', metainfo=dict(classes={classes}))
augment = [dict(type='RandomFlip', prob=0.5)]
batches = dict(batch_sampler=None)
val_evaluator = dict(ann_file='{data}/coco/annotations/instances_val2017.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=3, val_interval=100)
param_scheduler = [dict(type='MultiStepLR', milestones=[2])]
default_hooks = dict(logger=dict(interval=1))
"""
SEGMENTOR = """
_base_ = [
    '{configs}/models/semantic_fpn.py', '{configs}/datasets/ade20k.py',
    '{configs}/schedules/segmentation_80k.py', '{configs}/runtime_segmentation.py']
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(arch='pcpvt_nano', drop_path_rate=0.3),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=16),
    decode_head=dict(in_channels=[16, 16, 16, 16], channels=16, num_classes=11))
load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)]
resize = [dict(type='Resize', scale=(96, 96), keep_ratio=True)]
augment = [
    dict(type='RandomCrop', crop_size=(64, 64)), dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion')]
pack = [dict(type='PackSegInputs')]
common = dict(
    type='BaseSegDataset', reduce_zero_label=True, serialize_data=False,
    data_root='{data}/ade/ADEChallengeData2016',
    metainfo=dict(classes=('background',) + {classes}))
batches = dict(batch_size=2)
train_cfg = dict(max_iters=12, val_interval=100)
param_scheduler = [dict(type='PolyLR', power=0.9, by_epoch=False, end=12)]
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=5))
"""
OF_BOTH = """
train_dataloader = dict(
    **batches, num_workers=0, persistent_workers=False,
    dataset=dict(**common, pipeline=load + resize + augment + pack))
val_dataloader = dict(
    num_workers=0, persistent_workers=False,
    dataset=dict(**common, pipeline=load[:1] + resize + load[1:] + pack))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=1e-3))
tta_pipeline = _base_.tta_pipeline
tta_pipeline[1]['transforms'][0] = [
    dict(type='Resize', scale=(side, side), keep_ratio=True) for side in (64, 96)]
randomness = dict(seed=3)
"""

# One block in each stage: to write a checkpoint takes longer than to train an iteration.
SMALL = """
model = dict(
    backbone=dict(arch=dict(
        _delete_=True, dims=[32, 32, 32, 32], heads=[1, 1, 1, 1],
        mlp_ratios=[1, 1, 1, 1], depths=[1, 1, 1, 1])),
    neck=dict(in_channels=[32, 32, 32, 32]))
"""


def write_configs(folder: Path, data: Path) -> dict[str, Path]:
    """Write detector.py and segmentor.py for a sample data set; returns their paths by name."""
    paths = {}
    for name, text in (('detector', DETECTOR), ('segmentor', SEGMENTOR)):
        text = (text + OF_BOTH).replace('{configs}', str(ROOT / 'configs/_base_'))
        text = text.replace('{data}', str(data)).replace('{classes}', repr(CLASSES))
        paths[name] = folder / f'{name}.py'
        paths[name].write_text(text)
    return paths


@HOOKS.register_module()
class Interruptions(Hook):
    """Sends signals to this process.

    Args:
        moments: (moment, finished iterations, signal), in order; each happens once. A signal of 0
            raises a KeyboardInterrupt, as a kill that the test survives.
    """

    priority = 'HIGHEST'

    def __init__(self, moments: list[tuple[str, int, int]]) -> None:
        self.moments = moments

    def reach(self, moment: str, iterations: int) -> None:
        log = Path('moments')
        past = log.read_text().splitlines() if log.exists() else []
        for entry in self.moments:
            if tuple(entry[:2]) == (moment, iterations) and str(entry) not in past:
                log.write_text('\n'.join([*past, str(entry)]))
                if not entry[2]:
                    raise KeyboardInterrupt
                os.kill(os.getpid(), entry[2])

    def after_train_iter(self, runner: Any, batch_idx: int, *_: Any, **__: Any) -> None:
        self.reach('iteration', runner.iter + 1)

    def after_val_iter(self, runner: Any, batch_idx: int, *_: Any, **__: Any) -> None:
        self.reach('evaluation', runner.iter)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self.reach('checkpoint', checkpoint['meta']['iter'])


def contents(path: Path) -> dict:
    """What of a checkpoint a training depends on, or a user reads."""
    checkpoint = torch.load(path, weights_only=False)
    hub = checkpoint['message_hub']['runtime_info']
    kept = {key: hub[key] for key in ('best_score',) if key in hub}
    names = 'state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers'
    logs = checkpoint['message_hub']['log_scalars']
    kept['best_ckpt'] = Path(hub.get('best_ckpt', '')).name
    kept['losses'] = torch.from_numpy(logs['train/loss'].data[0])
    return kept | {name: checkpoint[name] for name in names if name in checkpoint}


def variables_of_programs() -> dict[str, str]:
    """Environment variables with which OpenMMLab's own programs load what they have saved.

    mmengine 0.10.7 does not without, with torch 2.6 or newer.
    """
    if digit_version(mmengine.__version__) > digit_version('0.10.7'):
        return {}
    return {'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1'}
