"""Checks before a run: its files exist, and data and heads fit together."""

import re
import shlex
from collections.abc import Iterator
from os.path import abspath
from pathlib import Path
from typing import Any

from mmengine.config import Config
from torch import nn

from ...checkpoints.files import missing_file
from ...tasks.trained import TRAINED
from ..tooling.command import UserError
from .parts import (
    SPLITS,
    as_list,
    classes_of,
    data_of,
    dicts_in,
    is_local,
    kind_of,
)

BACKBONES = 'CPVTPyramid', 'DenseCPVT'


def check_settings(cfg: Config, *required: str) -> None:
    """Check that a config has a model and these keys."""
    for key in ('model', *required):
        if not cfg.get(key):
            raise UserError(f'the config must set {key}')


def check_optimizer(cfg: Config) -> None:
    """Check that layer-wise decay of the learning rate is by a class that knows our backbones."""
    name = 'LearningRateDecayOptimizerConstructor'
    constructor = cfg.optim_wrapper.get('constructor') or ''
    backbone = kind_of(cfg.model.get('backbone') or {})
    if kind_of({'type': constructor}) == name and backbone in BACKBONES:
        raise UserError(
            f'{name} does not know the layers of {backbone}: set optim_wrapper.constructor='
            "'LayerDecayConstructor' and paramwise_cfg=dict(layer_decay=0.8)"
        )


# Files


def check_data(cfg: Config, *splits: str) -> None:
    """Check that the files and folders exist that the data sets of some splits name; the error
    names the first missing path and the expected layout."""
    for split in splits:
        for root, name in named_paths(cfg, split):
            if not Path(root, name).exists():
                layout = dict.fromkeys(
                    other for s in SPLITS for folder, other in named_paths(cfg, s) if folder == root
                )
                raise UserError(
                    f'no {split} data at {abspath(Path(root, name))}. Expected in {abspath(root)}: '
                    + ', '.join(layout)
                    + advice_for(Path(abspath(root)).as_posix())
                )
    for split in splits:
        for metric in as_list(cfg.get(f'{split}_evaluator')):
            path = metric.get('ann_file')
            if path and is_local(path) and not Path(path).exists():
                raise UserError(f'no annotations at {abspath(path)}, which {kind_of(metric)} reads')


def advice_for(root: str) -> str:
    """How to point a shipped config at data elsewhere, or how to create them."""
    if root.endswith('data/coco'):
        return '. If it is elsewhere: COCO_ROOT=/path/to/coco'
    if root.endswith('data/ade/ADEChallengeData2016'):
        return '. If it is elsewhere: ADE_ROOT=/path/to/ADEChallengeData2016'
    if root.endswith('data/cityscapes'):
        return '. If it is elsewhere: CITYSCAPES_ROOT=/path/to/cityscapes'
    for data in ('pages', 'trees'):
        if root.endswith(f'/{data}'):
            return f'. Create it with: cpvt demo-data {data} --root {shlex.quote(root)}'
    return ''


def named_paths(cfg: Config, split: str) -> Iterator[tuple[str, str]]:
    """The local paths that the data sets of a split name, each with the `data_root` that it is
    relative to."""
    for dataset in data_of(cfg, split):
        root = dataset.get('data_root') or ''
        prefixes = dataset.get('data_prefix') or {}
        for name in (dataset.get('ann_file'), *prefixes.values()):
            if name and not dataset.get('backend_args') and is_local(root) and is_local(name):
                yield root, name


def check_checkpoints(cfg: Config) -> None:
    """Check that the checkpoint files exist that a training starts from."""
    named = {
        f'model.{place}.checkpoint': part.get('checkpoint')
        for place, part in dicts_in(cfg.model)
        if is_pretrained(part)
    }
    for setting, path in {'load_from': cfg.get('load_from') or '', **named}.items():
        if not isinstance(path, str):
            raise UserError(f'{setting} must be a path or an address, got {path!r}')
        if path in TRAINED or not is_local(path):
            continue
        if path and not Path(path).expanduser().is_file():
            raise UserError(f'{setting}: {missing_file(path)}')


def is_pretrained(init_cfg: Any) -> bool:
    """Whether an `init_cfg` is one of mmengine's PretrainedInit, registered as Pretrained."""
    return isinstance(init_cfg, dict) and kind_of(init_cfg) in ('Pretrained', 'PretrainedInit')


# Classes


def check_classes(cfg: Config, model: nn.Module, *splits: str) -> None:
    """Check that heads and data sets agree about the classes.

    `check_classes = False` in the config leaves this out, for example for a head that has more
    classes than the data.
    """
    if not cfg.get('check_classes', True):
        return
    for split in splits:
        for dataset in data_of(cfg, split):
            classes = classes_of(dataset, cfg.default_scope)
            if classes and 'Panoptic' not in kind_of(dataset):
                check_head_classes(model, len(classes), split)


def check_head_classes(model: nn.Module, classes: int, split: str) -> None:
    for name, module in model.named_modules():
        name = name.removeprefix('module.')
        is_head = re.search(r'(?<!rpn_)(?<!semantic_)head(\.\d+)?$', name)
        if not is_head or getattr(module, 'class_agnostic', False):  # one mask for all classes
            continue
        count = getattr(module, 'num_classes', None)
        if isinstance(count, int) and count != classes:
            key = 'num_things_classes' if hasattr(module, 'num_things_classes') else 'num_classes'
            raise UserError(
                f'model.{name} has {count} classes but the {split} data have {classes}: set '
                f'model.{name}.{key}={classes}, or change the classes of the data. If both are '
                'right, set check_classes=False'
            )
