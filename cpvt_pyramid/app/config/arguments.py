"""--cfg-options that set an argument which the class of a part of the config does not have.

mmengine builds most parts by their class, with their settings as arguments, and some of them only
after the data were read. The parts are told by their places in the config.
"""

import inspect
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple, Optional

from mmengine import registry
from mmengine.config import Config
from mmengine.registry import Registry
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
MODEL = r'model(\..+)?'
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
    BuiltPart(MODEL, registry.MODELS),
    BuiltPart(MODEL, registry.TASK_UTILS),
)
LOADER = r'\w+_dataloader'
OF_LOADER = 'dataset', 'num_batch_per_epoch'  # settings of a loader that DataLoader does not take


class NewSetting(NamedTuple):
    """A setting that a config has got from an option."""

    option: str  # its key
    place: str  # of the part that it was added to
    name: str


ABSENT = object()  # what `value_at` returns for places that a config does not have


def new_settings(cfg: Config, options: Iterable[str]) -> Iterator[NewSetting]:
    """The settings that options will add to parts of a config."""
    for option in options:
        names = option.split('.')
        for depth, name in enumerate(names):
            if value_at(cfg, names[: depth + 1]) is ABSENT:
                if isinstance(value_at(cfg, names[:depth]), dict):
                    yield NewSetting(option, '.'.join(names[:depth]), name)
                break


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


def check_arguments(cfg: Config, settings: Iterable[NewSetting]) -> None:
    """Raise a UserError if an option has set an argument that its class does not have; warn if it
    may be one that the class passes on without naming it, or that a model takes out of the settings
    of a part."""
    for setting in settings:
        kind, others = class_at(cfg, setting.place)
        if kind is None or setting.name in (*others, 'type', '_scope_', '_delete_'):
            continue
        named = named_arguments(kind)
        if setting.name in named.names:
            continue
        line = f'--cfg-options {setting.option}: {kind.__name__} has no argument {setting.name}'
        line += did_you_mean(setting.name, [*named.names, *others])
        if named.are_all and not re.fullmatch(MODEL, setting.place):
            raise UserError(line)
        warnings.warn(line.replace('has no argument', 'names no argument'), stacklevel=2)


def class_at(cfg: Config, place: str) -> tuple[Optional[type], Collection[str]]:
    """The class that is called with the settings at a place in a config, and further settings that
    may be there; None if that is not known."""
    settings = value_at(cfg, place.split('.') if place else ())
    if not isinstance(settings, dict):  # a later option has replaced it
        return None, ()
    if re.fullmatch(LOADER, place):
        return DataLoader, OF_LOADER
    if place == 'optim_wrapper' and 'constructor' in settings:  # which may read others
        return None, ()
    for part in PARTS:
        if not re.fullmatch(part.places, place):
            continue
        kind = settings.get('type') or part.default
        if not kind and place == 'train_cfg':
            kind = 'EpochBasedTrainLoop' if settings.get('by_epoch') else 'IterBasedTrainLoop'
        found = registered_class(part.registry, kind, cfg.default_scope)
        if found:
            return found, part.others
    return None, ()


class Arguments(NamedTuple):
    """The arguments of a class."""

    names: set[str]
    are_all: bool  # it passes no others on


def named_arguments(kind: type) -> Arguments:
    """The arguments that a class names, and the classes to which it may pass others on."""
    names: set[str] = set()
    are_all = True
    for base in kind.__mro__[:-1]:
        if '__init__' not in vars(base):
            continue
        parameters = inspect.signature(vars(base)['__init__']).parameters
        names |= parameters.keys() - {'self'}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
        are_all = False
    return Arguments(names, are_all)
