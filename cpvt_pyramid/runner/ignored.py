"""Settings that mm ignores, or takes for something else, without a word.

mm checks the arguments of what it builds, but neither the keys of plain dicts nor most values. With
these, for example, a training runs to its end in another way than its config says:

    train_dataloder=...                  nothing reads a misspelled name
    paramwise_cfg.norm_decay_multi=0.    nor this one: the weights of norms decay
    param_scheduler.0.milestones='a'     the learning rate never decays
    param_scheduler.0.by_epoch=True      nor does it here, if the training counts iterations
    metainfo.CLASSES=('cat',)            the classes are those of COCO

What nobody can mean is a `UserError`. The rest is a warning: what configs of mm have as well, and
what is left in a config whose training is made shorter.
"""

import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Optional

from mmengine.config import Config
from mmengine.optim.scheduler.param_scheduler import INF
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from torch import nn

from ..tooling.command import UserError, rank
from .configs import (
    OTHER_KEYS,
    RUNNER_KEYS,
    as_list,
    class_in_registry,
    closest,
    dataset_class,
    dicts_in,
    did_you_mean,
    is_list,
    is_real,
    is_whole,
    kind_of,
    leaves,
)
from .mistakes import REFUSING

# What mmengine reads of plain dicts.
DICTS = {
    'auto_scale_lr': ('base_batch_size', 'enable'),
    'env_cfg': ('cudnn_benchmark', 'dist_cfg', 'mp_cfg', 'resource_limit'),
}
METAINFO = 'classes', 'palette'
FILTERS = 'bbox_min_size', 'filter_empty_gt', 'min_size'  # in configs of mm for all data sets
# The hooks that mmengine adds itself, and that of mmdet and mmseg.
HOOKS = (
    'checkpoint', 'logger', 'param_scheduler', 'runtime_info', 'sampler_seed', 'timer',
    'visualization',
)  # fmt: skip
MM = {*REFUSING, 'torch'}
PART = re.compile(r'(^model|backbone|neck|head)(\.\d+)?$')
# The train_cfg and test_cfg of a model, and those of its stages in them.
OF_PARTS = re.compile(r'\.(train|test)_cfg(\.(rcnn|rpn|rpn_proposal))?(\.\d+)?$')
# What configs of mm have in train_cfg for models that do not read it.
LEFTOVERS = 'allowed_border', 'assigner', 'debug', 'mask_size'
# Settings of MMDetection 2 and MMSegmentation 0, and what they are now.
FORMER = {
    'checkpoint_config': 'default_hooks.checkpoint',
    'data': 'train_dataloader, val_dataloader and test_dataloader',
    'evaluation': 'val_evaluator and train_cfg.val_interval',
    'fp16': 'optim_wrapper.type',
    'log_config': 'default_hooks.logger',
    'lr_config': 'param_scheduler',
    'optimizer_config': 'optim_wrapper',
    'runner': 'train_cfg',
    'total_epochs': 'train_cfg.max_epochs',
}
# Whole numbers, with the lowest of each.
COUNTS = {
    'train_cfg.val_begin': 0,
    'train_cfg.val_interval': 1,
    'optim_wrapper.accumulative_counts': 1,
    'default_hooks.checkpoint.interval': -1,
    'default_hooks.checkpoint.max_keep_ckpts': -1,
}
POSITIVE = 'optim_wrapper.clip_grad.clip_value', 'optim_wrapper.clip_grad.max_norm'


def check_ignored(cfg: Config, *splits: str) -> None:
    """Check that the settings of a run have an effect; print a line for those that may have none.

    Args:
        cfg: the config.
        *splits: of train, val and test.
    """
    check_top_level(cfg)
    for key, known in DICTS.items():
        check_keys(cfg.get(key) or {}, known, key)
    check_data_settings(cfg, *splits)
    check_model_settings(cfg)
    if 'train' in splits:
        check_numbers(cfg)
        check_hooks(cfg)
        check_paramwise(cfg)
        check_schedules(cfg)
        for text in (*warnings_of_names(cfg), *warnings_of_schedules(cfg)):
            warn(text)


def warn(text: str) -> None:
    if rank() == 0:
        print(f'warning: {text}')


# Names


def check_top_level(cfg: Config) -> None:
    """Check that no setting is misspelled.

    A variable with a similar name is one whose value a setting has, or one of several: a plural, or
    with a number or an underscore. New-style configs have classes as variables.
    """
    known = [key for key in (*RUNNER_KEYS, *OTHER_KEYS) if len(key) > 6]  # not model, mode
    for key, value in cfg.items():
        meant = closest(key, known, 0.885)  # test_pipeline, tta_pipeline: 0.88
        if key in known or not meant or abs(len(key) - len(meant)) > 1 or callable(value):
            continue
        is_one_of_several = key == f'{meant}s' or re.search('^_|[_0-9]$', key)
        can_be_found = isinstance(value, (dict, list, str, tuple))
        is_used = can_be_found and any(value in nested_values(cfg.get(name)) for name in known)
        if not is_one_of_several and not is_used:
            raise UserError(f'nothing reads the setting {key!r}; did you mean {meant!r}?')


def check_data_settings(cfg: Config, *splits: str) -> None:
    """Check the keys of dicts of which a data set reads some."""
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        for dataset in leaves(loader.dataset) if loader else ():
            for key in map(str, dataset.get('metainfo') or ()):
                if key not in METAINFO and (meant := closest(key.lower(), METAINFO, 0.8)):
                    raise UserError(
                        f'nothing reads {key!r} in the metainfo of the {split} data; did you mean '
                        f'{meant!r}?'
                    )
            if isinstance(dataset.get('filter_cfg'), dict):
                words = words_of(dataset_class(dataset, cfg.default_scope))
                known = words and words.union(FILTERS)
                check_keys(dataset.filter_cfg, known, f'the filter_cfg of the {split} data')


def check_model_settings(cfg: Config) -> None:
    """Check the keys of train_cfg and test_cfg in a model of mm, whose parts read some."""
    model, kinds = cfg.to_dict()['model'], []
    for path, part in dicts_in(model, 'model'):
        kind = class_in_registry(part.get('type'), MODELS, cfg.default_scope)
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            kinds.append(kind)
        elif PART.search(path):
            return  # a mistake that mmengine names
    words = [words_of(kind) for kind in kinds]
    if None in words or not {kind.__module__.partition('.')[0] for kind in kinds} <= MM:
        return  # other code may hand the settings on to anything
    known = frozenset().union(*words)
    for path, settings in dicts_in(model, 'model'):
        if 'type' not in settings and (found := OF_PARTS.search(path)):
            check_keys(settings, known.union(LEFTOVERS if found[1] == 'train' else ()), path)


def check_hooks(cfg: Config) -> None:
    """Check that the names in default_hooks are not misspelled, and that checkpoints are written
    before the end."""
    hooks = cfg.get('default_hooks') or {}
    for name in hooks:
        meant = closest(name, HOOKS, 0.85)
        if meant and name not in HOOKS and not name[-1].isdigit():
            raise UserError(
                f'default_hooks.{name} adds a hook and leaves {meant!r} as it is; did you mean '
                f'default_hooks.{meant}?'
            )
    hook = hooks.get('checkpoint') or {}
    saves = kind_of(hook) == 'CheckpointHook' and hook.get('interval', -1) > 0
    if saves and hook.get('by_epoch', True) and never_ends_an_epoch(cfg):
        raise UserError(
            'default_hooks.checkpoint.by_epoch must be False in a training that counts '
            'iterations; else MMEngine saves only at its end'
        )


def check_paramwise(cfg: Config) -> None:
    """Check the keys of paramwise_cfg, of which the optimizer's constructor reads some."""
    check_keys(paramwise(cfg), constructor_words(cfg), 'optim_wrapper.paramwise_cfg')


def check_keys(settings: dict, known: Optional[Iterable[str]], where: str) -> None:
    for key in settings if known is not None else ():
        if key not in known:
            raise UserError(
                f'nothing reads {key!r} in {where}{did_you_mean(str(key), known, 0.75)}'
            )


def warnings_of_names(cfg: Config) -> Iterator[str]:
    for key, now in FORMER.items():
        if isinstance(cfg.get(key), (dict, int)):
            yield f'nothing reads {key}, a setting of MMDetection 2; it is {now} now'
    inner, outer = cfg.model.get('data_preprocessor'), cfg.get('data_preprocessor')
    if inner and outer and inner != outer:
        yield 'nothing reads data_preprocessor, since model.data_preprocessor is set'
    kind, words = value_at(cfg, 'optim_wrapper.optimizer.type'), constructor_words(cfg)
    optimizer = class_in_registry(kind, OPTIMIZERS, cfg.default_scope)
    if optimizer is None or words is None:
        return
    known = words.union(inspect.signature(optimizer).parameters)
    for name, settings in custom_keys(cfg).items():
        for key in settings if isinstance(settings, dict) else ():
            if key not in known:
                where = f'optim_wrapper.paramwise_cfg.custom_keys.{name}'
                yield f'nothing reads {key!r} in {where}{did_you_mean(key, known, 0.75)}'


def warn_of_custom_keys(cfg: Config, model: nn.Module) -> None:
    """Print a line for the `custom_keys` that are in no parameter's name."""
    names = [f'.{re.sub("^module[.]", "", name)}' for name, _ in model.named_parameters()]
    unused = [key for key in custom_keys(cfg) if not any(key in name for name in names)]
    if unused:
        warn(
            'no parameter has a name with these custom_keys of optim_wrapper.paramwise_cfg: '
            + ', '.join(unused)
        )


def paramwise(cfg: Config) -> dict:
    settings = cfg.optim_wrapper.get('paramwise_cfg')
    return settings if isinstance(settings, dict) else {}


def custom_keys(cfg: Config) -> dict:
    settings = paramwise(cfg).get('custom_keys')
    return settings if isinstance(settings, dict) else {}


def constructor_words(cfg: Config) -> Optional[frozenset[str]]:
    kind = cfg.optim_wrapper.get('constructor') or 'DefaultOptimWrapperConstructor'
    return words_of(class_in_registry(kind, OPTIM_WRAPPER_CONSTRUCTORS, cfg.default_scope))


def nested_values(value: Any) -> Iterator[Any]:
    """A value and all that is inside."""
    yield value
    children = list(value.values()) if isinstance(value, dict) else value
    for child in children if isinstance(children, (list, tuple)) else ():
        yield from nested_values(child)


@cache
def words_of(kind: Any) -> Optional[frozenset[str]]:
    """The words in the modules of a class and its bases, among them all keys that it reads, or None
    if it is no class or has no source."""
    if not isinstance(kind, type):
        return None
    modules = {base.__module__ for base in kind.__mro__}
    modules = [name for name in modules if name.partition('.')[0] not in ('builtins', 'torch')]
    try:
        sources = [inspect.getsource(sys.modules[name]) for name in modules]
    except (KeyError, OSError, TypeError):
        return None
    return frozenset(re.findall(r'\w+', '\n'.join(sources)))


# Values


def check_numbers(cfg: Config) -> None:
    """Check numbers that mm compares and divides by without a look at them."""
    for path, least in COUNTS.items():
        value = value_at(cfg, path)
        if value not in (None, math.inf) and not (is_whole(value) and value >= least):
            raise UserError(f'{path} must be a whole number, at least {least}, got {value!r}')
    for path in POSITIVE:  # else gradients are turned around
        value = value_at(cfg, path)
        if is_real(value) and not value > 0:
            raise UserError(f'{path} must be positive, got {value!r}')


def check_schedules(cfg: Config) -> None:
    """Check numbers of parameter schedulers that mm compares with the epoch or the iteration."""
    for path, settings in schedules(cfg):
        kind, unit = kind_of(settings), unit_of(settings)
        # Whether mmengine multiplies the numbers by the iterations of an epoch.
        converted = settings.get('convert_to_iter_based', False)
        whole = is_real if converted else is_whole
        if unit == 'epochs' and never_ends_an_epoch(cfg) and not converted:
            raise UserError(
                f'{path}.by_epoch must be False in a training that counts iterations; else {kind} '
                'never changes anything'
            )
        marks = settings.get('milestones')
        if kind.startswith('MultiStep') and not (is_list(marks, whole) and min([0, *marks]) == 0):
            raise UserError(
                f'{path}.milestones must be a list of whole numbers, at least 0, got {marks!r}'
            )
        size = settings.get('step_size')
        if kind.startswith('Step') and not (whole(size) and size > 0):
            raise UserError(f'{path}.step_size must be a whole number, at least 1, got {size!r}')
        gamma = settings.get('gamma', 0.1)
        has_gamma = kind.startswith(('Exponential', 'MultiStep', 'Step'))
        if has_gamma and not (is_real(gamma) and gamma >= 0):
            raise UserError(f'{path}.gamma must be a number, at least 0, got {gamma!r}')
        total, needed = settings.get('total_steps'), duration(cfg, settings)
        if kind.startswith('OneCycle') and is_real(total) and total < needed - 1 < math.inf:
            raise UserError(f'{path}.total_steps must be at least {needed} {unit}, got {total}')


def warnings_of_schedules(cfg: Config) -> Iterator[str]:
    if value_at(cfg, 'default_hooks.checkpoint.max_keep_ckpts') == 0:
        yield 'default_hooks.checkpoint.max_keep_ckpts=0 keeps all checkpoints, as -1 does'
    for path, settings in schedules(cfg):
        unit, steps, length = unit_of(settings), duration(cfg, settings), length_for(cfg, settings)
        marks = [n for n in as_list(settings.get('milestones')) if is_real(n) and n >= steps]
        if marks:
            marks = ', '.join(map(str, marks))
            yield f'{path} ends after {steps} {unit}, before its milestones {marks}'
        numbers = [settings.get(key) for key in ('begin', 'end', 'T_max', 'total_steps')]
        if not marks and any(is_real(n) and length < n < INF for n in numbers):
            yield f'{path} is longer than the training of {length} {unit}'
        if is_real(settings.get('T_max')) and 0 < settings['T_max'] < steps < math.inf:
            yield f'{path}: the values rise again after T_max={settings["T_max"]} {unit}'


def schedules(cfg: Config) -> Iterator[tuple[str, dict]]:
    """The parameter schedulers of a config, with their paths."""
    for path, settings in dicts_in(cfg.to_dict().get('param_scheduler'), 'param_scheduler'):
        if 'type' in settings:
            yield path, settings


def unit_of(scheduler: dict) -> str:
    return 'epochs' if scheduler.get('by_epoch', True) else 'iterations'


def length_for(cfg: Config, scheduler: dict) -> float:
    """The length of the training in the unit of a scheduler; infinity if it is not known."""
    key = {'epochs': 'max_epochs', 'iterations': 'max_iters'}[unit_of(scheduler)]
    length = cfg.train_cfg.get(key)
    return length if is_real(length) else math.inf


def duration(cfg: Config, scheduler: dict) -> float:
    """How long a scheduler is active in the training."""
    begin, end = scheduler.get('begin', 0), scheduler.get('end', math.inf)
    if not (is_real(begin) and is_real(end)):
        return math.inf
    return min(end, length_for(cfg, scheduler)) - begin


def never_ends_an_epoch(cfg: Config) -> bool:
    """Whether a training is one long epoch for hooks and schedulers."""
    kind = kind_of(cfg.train_cfg)
    return kind == 'IterBasedTrainLoop' or not kind and cfg.train_cfg.get('by_epoch') is False


def value_at(cfg: Config, path: str) -> Any:
    """The value of a setting, or None."""
    value = cfg
    for key in path.split('.'):
        value = value.get(key) if isinstance(value, (Config, dict)) else None
    return value
