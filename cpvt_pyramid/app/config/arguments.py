"""--cfg-options that set an argument which a part of the config does not have.

mmengine builds most parts by their class, with their settings as arguments, and some of them only
after the data were read. Others it passes to a function, or reads by their names and ignores the
rest. The parts are told by their places in the config.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from mmengine import registry
from mmengine.config import Config
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import Registry
from mmengine.runner import Runner
from mmengine.utils.dl_utils import set_multi_processing
from torch.utils.data import DataLoader

from ..tooling.command import UserError
from ..tooling.names import did_you_mean
from .parts import registered_class


class BuiltPart(NamedTuple):
    """The parts of a config in some places."""

    places: str  # a regular expression
    registry: Registry  # of their classes
    default: str = ''  # their class, where they name none
    # Settings that mmengine takes out before it calls the class.
    others: Collection[str] = ()


DATASET = r'\w+_dataloader\.dataset(\.datasets?(\.\d+)?)*'
MODEL = r'(model|tta_model|data_preprocessor)(\..+)?'
PARTS = (
    BuiltPart('train_cfg', registry.LOOPS, others=('by_epoch',)),
    BuiltPart('val_cfg', registry.LOOPS, 'ValLoop'),
    BuiltPart('test_cfg', registry.LOOPS, 'TestLoop'),
    BuiltPart(
        'optim_wrapper',
        registry.OPTIM_WRAPPERS,
        'OptimWrapper',
        ('constructor', 'paramwise_cfg'),
    ),
    BuiltPart(r'optim_wrapper\.optimizer', registry.OPTIMIZERS),
    BuiltPart(
        r'param_scheduler(\.\d+)?', registry.PARAM_SCHEDULERS, others=('convert_to_iter_based',)
    ),
    BuiltPart(r'default_hooks\.\w+|custom_hooks\.\d+', registry.HOOKS, others=('priority',)),
    BuiltPart(DATASET, registry.DATASETS),
    BuiltPart(rf'{DATASET}\.pipeline\.\d+', registry.TRANSFORMS),
    BuiltPart(r'\w+_dataloader\.(batch_)?sampler', registry.DATA_SAMPLERS),
    BuiltPart(r'\w+_evaluator(\.\d+)?', registry.METRICS),
    BuiltPart(r'\w+_dataloader\.collate_fn', registry.FUNCTIONS),
    BuiltPart('visualizer', registry.VISUALIZERS),
    BuiltPart(r'visualizer\.vis_backends(\.\d+)?', registry.VISBACKENDS),
    BuiltPart('log_processor', registry.LOG_PROCESSORS, 'LogProcessor'),
    BuiltPart('model_wrapper_cfg', registry.MODEL_WRAPPERS, 'MMDistributedDataParallel'),
    BuiltPart(MODEL, registry.MODELS),
    BuiltPart(MODEL, registry.TASK_UTILS),
)
LOADER = r'\w+_dataloader'
OF_LOADER = 'dataset', 'num_batch_per_epoch'  # settings of a loader that DataLoader does not take
# The functions that are called with the settings of a part.
FUNCTIONS: dict[str, Callable] = {
    'randomness': Runner.set_randomness,
    'env_cfg.mp_cfg': set_multi_processing,
    'compile': torch.compile,
}
# The settings of a part that mmengine reads; it ignores others.
READ = {
    'env_cfg': ('cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit'),
    'auto_scale_lr': ('enable', 'base_batch_size'),
}
READ_BY_DEFAULT_CONSTRUCTOR = (
    'custom_keys',
    'bias_lr_mult',
    'bias_decay_mult',
    'norm_decay_mult',
    'flat_decay_mult',
    'dwconv_decay_mult',
    'dcn_offset_lr_mult',
    'bypass_duplicate',
)


class NewSetting(NamedTuple):
    """A setting that a config gets from an option."""

    option: str  # its key
    place: str  # of the part that it was added to
    name: str


ABSENT = object()  # what `value_at` returns for places that a config does not have


def new_settings(cfg: Config, options: Iterable[str]) -> Iterator[NewSetting]:
    """The settings that options will add to parts of a config, or to parts that are new, too."""
    for option in options:
        names = option.split('.')
        for depth, name in enumerate(names):
            parent = value_at(cfg, names[:depth])
            if parent is ABSENT or isinstance(parent, dict) and name not in parent:
                yield NewSetting(option, '.'.join(names[:depth]), name)


def value_at(cfg: Config, names: Iterable[str]) -> Any:
    """What a config has at a place, given by the keys and indices on the way; else `ABSENT`."""
    value: Any = cfg._cfg_dict
    for name in names:
        if isinstance(value, (list, tuple)) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return ABSENT
    return value


class KnownArguments(NamedTuple):
    """The arguments of a part of a config.

    Attributes:
        part: its class or function, or its place.
        names: of the arguments.
        are_all: whether it has no others.
    """

    part: str
    names: Collection[str]
    are_all: bool = True


def check_arguments(cfg: Config, settings: Iterable[NewSetting]) -> None:
    """Raise a UserError if an option has set an argument that its part does not have; warn if it
    may be one that a class passes on without naming it, or that is taken out of the settings before
    the class is called."""
    for setting in settings:
        known = known_arguments(cfg, setting.place)
        if known is None or setting.name in (*known.names, '_delete_'):
            continue
        verb = 'has' if known.are_all else 'names'
        line = f'--cfg-options {setting.option}: {known.part} {verb} no argument {setting.name}'
        line += did_you_mean(setting.name, known.names)
        if known.are_all:
            raise UserError(line)
        warnings.warn(line, stacklevel=2)


def known_arguments(cfg: Config, place: str) -> Optional[KnownArguments]:
    """The arguments of the part at a place in a config; None if they are not known."""
    settings = value_at(cfg, place.split('.') if place else ())
    if not isinstance(settings, dict):  # a later option has replaced it
        return None
    if place in READ:
        return KnownArguments(place, READ[place])
    if place in FUNCTIONS:
        return named_arguments(FUNCTIONS[place])
    if re.fullmatch(LOADER, place):
        return named_arguments(DataLoader, OF_LOADER)
    if place == 'optim_wrapper.paramwise_cfg':
        is_default = constructor_of(cfg) is DefaultOptimWrapperConstructor
        return KnownArguments(place, READ_BY_DEFAULT_CONSTRUCTOR) if is_default else None
    for part in PARTS:
        if not re.fullmatch(part.places, place):
            continue
        kind = settings.get('type') or part.default
        if not kind and place == 'train_cfg':
            kind = 'EpochBasedTrainLoop' if settings.get('by_epoch') else 'IterBasedTrainLoop'
        found = registered_class(part.registry, kind, cfg.default_scope)
        if not found:
            continue
        known = named_arguments(found, (*part.others, 'type', '_scope_'))
        if re.fullmatch(MODEL, place):
            return known._replace(are_all=False)
        if place == 'optim_wrapper':
            return known_to_constructor(constructor_of(cfg), known)
        return known
    return None


def constructor_of(cfg: Config) -> Any:
    """The class that builds the optimizer of a config; None if there is none of its name."""
    kind = cfg.optim_wrapper.get('constructor') or 'DefaultOptimWrapperConstructor'
    return registered_class(registry.OPTIM_WRAPPER_CONSTRUCTORS, kind, cfg.default_scope)


def known_to_constructor(constructor: Any, known: KnownArguments) -> Optional[KnownArguments]:
    """The settings of an `optim_wrapper` that its constructor takes, given those of the class; None
    if they are not known."""
    default = DefaultOptimWrapperConstructor
    if constructor is default:
        return known
    if isinstance(constructor, type) and constructor.__call__ is default.__call__:
        return known._replace(are_all=False)  # it may take out some that are its own
    return None  # it may build anything


def named_arguments(function: Callable, others: Collection[str] = ()) -> KnownArguments:
    """The arguments that a function names, or a class and those to which it may pass others on;
    `others` are taken out before it is called."""
    calls: list[Callable] = [function]
    if isinstance(function, type):
        calls = [vars(k)['__init__'] for k in function.__mro__[:-1] if '__init__' in vars(k)]
    names = set(others)
    are_all = True
    for call in calls:
        parameters = inspect.signature(call).parameters.values()
        names |= {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
        are_all = False
    return KnownArguments(function.__name__, names - {'self'}, are_all)
