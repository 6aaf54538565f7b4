"""Adapts the config of a training to other data: data sets, classes, metrics."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config

from ..config.parts import as_list, data_of, dataset_class, items_of, kind_of, leaves
from ..config.pipelines import loads_annotations, pipeline_of, transforms_in
from ..tooling.command import UserError
from .recipes import Scales

HERE = '{{ fileDirname }}'
IGNORING = 'MaxIoUAssigner', 'ATSSAssigner', 'ApproxMaxIoUAssigner'  # with `ignore_iof_thr`
IGNORED_FROM = 0.5  # share of an anchor or proposal on objects to be ignored
# Data sets around others that work with any data
WRAPPERS = 'RepeatDataset', 'ClassBalancedDataset', 'MultiImageMixDataset'


class Code:
    """A piece of Python in a config, where a value is expected."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def task_of(cfg: Config, base: Path) -> str:
    """detection, instance or segmentation.

    Raises:
        UserError: the config is none of a training for one of them.
    """
    parts = [f'{split}_dataloader' for split in ('train', 'val', 'test')]
    for key in ('train_cfg', 'optim_wrapper', *parts, 'val_evaluator', 'test_evaluator'):
        if not cfg.get(key):
            raise UserError(f'{base} must be the config of a training; it has no {key}')
    if cfg.default_scope == 'mmseg':
        return 'segmentation'
    transforms = list(transforms_in(pipeline_of(cfg, 'train')))
    loads = list(filter(loads_annotations, transforms))
    if any(step.get('with_seg') for step in loads) or 'Panoptic' in kind_of(cfg.model):
        raise UserError(f'{base} is panoptic; the base must detect objects or segment images')
    if any(kind_of(step) == 'LoadProposals' for step in transforms):
        raise UserError(f'{base} trains on proposals in files; choose a base that makes its own')
    for dataset in data_of(cfg, 'train'):
        bases = {base.__name__ for base in dataset_class(dataset, cfg.default_scope).__mro__}
        if 'BaseDetDataset' not in bases or not any(step.get('with_bbox') for step in loads):
            raise UserError(
                f'{base} trains on {kind_of(dataset)}; the base must train on images with boxes'
            )
    return 'instance' if any(step.get('with_mask') for step in loads) else 'detection'


# Data sets around that of the data


def wrapped(cfg: Config, leaf: dict[str, Any], base: Path) -> dict[str, Any]:
    """The training data of a base with another innermost data set, in the same data sets around it.

    Raises:
        UserError: they are of a kind that does not fit one data set.
    """
    return wrapped_in(cfg.train_dataloader.dataset, leaf, base)


def wrapped_in(dataset: dict, leaf: dict[str, Any], base: Path) -> dict[str, Any]:
    children = [*items_of(dataset, 'dataset', ''), *items_of(dataset, 'datasets', '')]
    if not children:
        return leaf
    kind = kind_of(dataset)
    if kind == 'ConcatDataset':  # all of them become one
        pipelines = [inner.get('pipeline') for inner in leaves(dataset)]
        if any(pipeline != pipelines[0] for pipeline in pipelines):
            raise UserError(
                f'{base} trains on {len(pipelines)} data sets with pipelines of their own, as with '
                'unlabelled images; choose a base that trains on one'
            )
        return wrapped_in(children[0][1], leaf, base)
    if kind not in WRAPPERS:
        raise UserError(
            f'{base} trains on a {kind}; the base must train on a data set itself, or on one in '
            f'{", ".join(WRAPPERS)} or ConcatDataset'
        )
    outer = {key: value for key, value in dataset.items() if key != 'dataset'}
    return {**deepcopy(outer), 'dataset': wrapped_in(children[0][1], leaf, base)}


def repetitions(dataset: dict) -> int:
    """How often a data set in others has an image in an epoch, but for rare classes."""
    children = [*items_of(dataset, 'dataset', ''), *items_of(dataset, 'datasets', '')]
    times = int(dataset.get('times', 1)) if kind_of(dataset) == 'RepeatDataset' else 1
    return times * repetitions(children[0][1]) if children else 1


# The model


def model_changes(model: Any, classes: int, scaled: Scales, has_ignored: bool = False) -> dict:
    """What changes in a model for another number of classes and size of crops, and for data with
    objects to be ignored."""
    changed = deepcopy(model.to_dict())
    count = set_classes(changed, classes)
    if not count:
        raise UserError('the model of the base has no num_classes')
    size = changed.get('data_preprocessor', {}).get('size')
    if size and scaled.scale < 1:
        changed['data_preprocessor']['size'] = scaled.crops(size)
    if has_ignored:
        ignore_objects(changed)
    return difference(model.to_dict(), changed)


def ignore_objects(config: Any) -> bool:
    """Let all assigners of a model's config that can leave out anchors and proposals on objects to
    be ignored do so; by default they are background. Returns whether there is such an assigner."""
    if isinstance(config, (list, tuple)):
        return any([ignore_objects(child) for child in config])
    if not isinstance(config, dict):
        return False
    is_able = config.get('type') in IGNORING
    if is_able and config.get('ignore_iof_thr', -1) <= 0:
        config['ignore_iof_thr'] = IGNORED_FROM
    return any([is_able, *map(ignore_objects, config.values())])


def set_classes(config: Any, classes: int) -> int:
    """Set the number of classes in all heads of a model's config; returns how many there were."""
    if isinstance(config, list):
        return sum(set_classes(child, classes) for child in config)
    if not isinstance(config, dict):
        return 0
    before = config.get('num_classes')
    if 'num_things_classes' in config:
        before = config['num_things_classes'] + config.get('num_stuff_classes', 0)
        config.update(num_things_classes=classes, num_stuff_classes=0)
    elif isinstance(before, int):
        config['num_classes'] = classes
    if before is not None:
        losses = [loss for value in config.values() for loss in as_list(value)]
        for loss in losses:
            weights = loss.get('class_weight') if isinstance(loss, dict) else None
            if isinstance(weights, list) and len(weights) == before + 1:  # the last: no object
                loss['class_weight'] = Code(f'[{weights[0]}] * {classes} + [{weights[-1]}]')
            elif isinstance(weights, list):  # those of the base's classes
                loss['class_weight'] = None
    others = ('rpn_head', 'backbone', 'neck', 'data_preprocessor')
    return (before is not None) + sum(
        set_classes(value, classes) for key, value in config.items() if key not in others
    )


def difference(before: dict, after: dict) -> dict:
    """The settings that turn one config into another."""
    changes = {key: value for key, value in after.items() if value != before.get(key)}
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            changes[key] = difference(before[key], value)
    return changes


# Text


def text_of_settings(settings: dict[str, Any], comments: Optional[dict[str, str]] = None) -> str:
    """The text of a config, as mmengine writes it, with comments above some settings."""
    lines = []
    for key, value in settings.items():
        check_value(value)
        if comments and key in comments:
            lines.append(f'\n# {comments[key]}')
        lines.append(Config({key: value}).pretty_text.rstrip('\n'))
    return '\n'.join(lines) + '\n'


def check_value(value: Any) -> None:
    """Check that mmengine reads a setting as it is written."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            check_value(item)
    elif isinstance(value, type):
        raise UserError(f'the base must name types with strings, got {repr(value)[:300]}')
    elif isinstance(value, str) and '{{' in value.removeprefix(f'{HERE}/'):
        raise UserError(f'names of classes and folders must not have {{{{, got {value!r}')


def relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()
