"""Settings that nothing reads: warnings, and an error for a misspelled one of mmengine's Runner.

mm checks the arguments of what it builds, but not the keys of plain dicts. With these, for example,
a training runs to its end in another way than its config says:

    train_dataloder=...                  nothing reads it
    optimizer=...                        nor this, in a config that sets optim_wrapper
    paramwise_cfg.norm_decay_multi=0.    nor this: the weights of norms decay
    param_scheduler.0.by_epoch=True      the learning rate never changes, in iterations
"""

import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Optional

from mmengine.config import Config
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from torch import nn

from ...tooling.command import UserError, rank
from .load import (
    OTHER_KEYS,
    RUNNER_KEYS,
    as_list,
    class_in_registry,
    closest,
    dataset_class,
    dicts_in,
    did_you_mean,
    is_real,
    kind_of,
    leaves,
)

# What mmengine reads of plain dicts, and the hooks that it adds itself.
DICTS = {
    'auto_scale_lr': ('base_batch_size', 'enable'),
    'env_cfg': ('cudnn_benchmark', 'dist_cfg', 'mp_cfg', 'resource_limit'),
}
HOOKS = (
    'checkpoint', 'logger', 'param_scheduler', 'runtime_info', 'sampler_seed', 'timer',
    'visualization',
)  # fmt: skip
METAINFO = 'classes', 'palette'
# What configs of mm have for all data sets and models, read or not.
SHARED = {
    'bbox_min_size', 'filter_empty_gt', 'min_size', 'allowed_border', 'assigner', 'debug',
    'mask_size',
}  # fmt: skip
# Settings of MMDetection 2 and MMSegmentation 0, and what they are now.
FORMER = {
    'checkpoint_config': 'default_hooks.checkpoint',
    'data': 'train_dataloader, val_dataloader and test_dataloader',
    'evaluation': 'val_evaluator and train_cfg.val_interval',
    'fp16': 'optim_wrapper.type',
    'log_config': 'default_hooks.logger',
    'lr_config': 'param_scheduler',
    'optimizer': 'optim_wrapper.optimizer',
    'optimizer_config': 'optim_wrapper',
    'runner': 'train_cfg',
    'total_epochs': 'train_cfg.max_epochs',
}


def check_unread(cfg: Config, *splits: str) -> None:
    """Print a line for each setting of a run that has no effect.

    Raises:
        UserError: an argument of mmengine's Runner is misspelled.
    """
    for line in unread_at_top(cfg):
        warn(line)
    for path, settings, known in read_dicts(cfg, *splits):
        for key in settings if known else ():
            if key not in known:
                warn(f'nothing reads {key!r} in {path}{did_you_mean(str(key), known, 0.75)}')
    for line in ineffective_schedules(cfg) if 'train' in splits else ():
        warn(line)


def warn(text: str) -> None:
    if rank() == 0:
        print(f'warning: {text}')


# Names


def unread_at_top(cfg: Config) -> Iterator[str]:
    """Lines for variables of the config's files that no later line of them reads."""
    text = re.sub('#.*', '', cfg.text)  # of the base configs first
    for key, value in cfg.items():
        assigned = [*re.finditer(rf'^{re.escape(key)}\s*=(?!=)', text, re.M)]
        if key in (*RUNNER_KEYS, *OTHER_KEYS) or callable(value) or key[0] == '_' or not assigned:
            continue
        if re.search(rf'(?<![\w\'"]){key}\b(?!\s*=(?!=))', text[assigned[-1].end() :]):
            continue
        meant = closest(key, [name for name in RUNNER_KEYS if len(name) > 6], 0.8)
        if meant:
            raise UserError(f'nothing reads the setting {key!r}; did you mean {meant!r}?')
        former = f', a setting of MMDetection 2; it is {FORMER[key]} now' if key in FORMER else ''
        yield f'nothing reads {key}{former or did_you_mean(key, RUNNER_KEYS, 0.7)}'
    inner, outer = cfg.model.get('data_preprocessor'), cfg.get('data_preprocessor')
    if inner and outer and inner != outer:
        yield 'nothing reads data_preprocessor, since model.data_preprocessor is set'


def read_dicts(cfg: Config, *splits: str) -> Iterator[tuple[str, dict, Optional[Iterable[str]]]]:
    """Plain dicts of a config, with their paths and all keys that can be read, if known."""
    for key, known in DICTS.items():
        yield key, cfg.get(key) or {}, known
    hooks = [key for key in cfg.get('default_hooks') or () if key[-1].isalpha()]
    yield 'default_hooks', dict.fromkeys(key for key in hooks if closest(key, HOOKS, 0.85)), HOOKS
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        for dataset in leaves(loader.dataset) if loader else ():
            names = [key for key in dataset.get('metainfo') or () if key.lower() in METAINFO]
            yield f'the metainfo of the {split} data', dict.fromkeys(names), METAINFO
            if isinstance(dataset.get('filter_cfg'), dict):
                known = words_of(dataset_class(dataset, cfg.default_scope))
                yield f'the filter_cfg of the {split} data', dataset.filter_cfg, known
    model = cfg.to_dict()['model']
    kinds = [part.get('type') for _, part in dicts_in(model)]
    kinds = [class_in_registry(kind, MODELS, cfg.default_scope) for kind in kinds]
    known = words_of(*(kind for kind in kinds if isinstance(kind, type)))
    for path, part in dicts_in(model, 'model'):
        if 'type' not in part and re.search(r'\.(train|test)_cfg(\.\w+)?(\.\d+)?$', path):
            yield path, part, known
    if 'train' in splits:
        wrapper = cfg.optim_wrapper
        kind = wrapper.get('constructor') or 'DefaultOptimWrapperConstructor'
        kind = class_in_registry(kind, OPTIM_WRAPPER_CONSTRUCTORS, cfg.default_scope)
        paramwise, path = wrapper.get('paramwise_cfg') or {}, 'optim_wrapper.paramwise_cfg'
        yield path, paramwise, words_of(kind)
        optimizer = (wrapper.get('optimizer') or {}).get('type')
        optimizer = class_in_registry(optimizer, OPTIMIZERS, cfg.default_scope)
        for name, settings in (paramwise.get('custom_keys') or {}).items():
            yield f'{path}.custom_keys.{name}', settings, words_of(kind, optimizer)


@cache
def words_of(*kinds: Any) -> Optional[frozenset[str]]:
    """The words in the modules of some classes and their bases, among them all keys that these
    read, or None if one is no class or has no source."""
    if not all(isinstance(kind, type) for kind in kinds):
        return None
    modules = {base.__module__ for kind in kinds for base in kind.__mro__}
    modules -= {'builtins', 'torch.nn.modules.module'}
    try:
        sources = [inspect.getsource(sys.modules[name]) for name in modules]
    except (KeyError, OSError, TypeError):
        return None
    return SHARED.union(re.findall(r'\w+', '\n'.join(sources)))


def warn_of_custom_keys(cfg: Config, model: nn.Module) -> None:
    """Print a line for the `custom_keys` that are in no parameter's name."""
    names = [f'.{re.sub("^module[.]", "", name)}' for name, _ in model.named_parameters()]
    custom_keys = (cfg.optim_wrapper.get('paramwise_cfg') or {}).get('custom_keys') or {}
    unused = [key for key in custom_keys if not any(key in name for name in names)]
    if unused:
        warn(
            'no parameter has a name with these custom_keys of optim_wrapper.paramwise_cfg: '
            + ', '.join(unused)
        )


# Schedules


def ineffective_schedules(cfg: Config) -> Iterator[str]:
    """Lines for schedules and checkpoints at epochs or iterations that a training never reaches."""
    kind = kind_of(cfg.train_cfg)
    one_epoch = kind == 'IterBasedTrainLoop' or not kind and cfg.train_cfg.get('by_epoch') is False
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    if one_epoch and hook.get('interval', -1) > 0 and hook.get('by_epoch', True):
        yield (
            'default_hooks.checkpoint counts epochs in a training that counts iterations: it saves '
            'only at the end; set by_epoch=False'
        )
    for path, settings in dicts_in(cfg.to_dict().get('param_scheduler'), 'param_scheduler'):
        by_epoch = settings.get('by_epoch', True)
        ends = cfg.train_cfg.get('max_epochs' if by_epoch else 'max_iters'), settings.get('end')
        length = min(filter(is_real, ends), default=math.inf)
        marks = [n for n in as_list(settings.get('milestones')) if is_real(n, length)]
        if one_epoch and by_epoch and not settings.get('convert_to_iter_based'):
            yield (
                f'{path} counts epochs in a training that counts iterations: it changes nothing; '
                'set by_epoch=False'
            )
        elif marks:
            unit, marks = 'epochs' if by_epoch else 'iterations', ', '.join(map(str, marks))
            yield f'{path} ends after {length} {unit}, before its milestones {marks}'
