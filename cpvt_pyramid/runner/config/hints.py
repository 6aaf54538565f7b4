"""Warnings about settings that have no effect in a run.

mm checks the arguments of what it builds, but not the names at the top level of a config, where
variables stand beside settings.
"""

from collections.abc import Iterator, Sequence

from mmengine.config import Config
from torch import nn

from ...tooling.command import rank
from .load import RUNNER_KEYS, SETTINGS, closest
from .parts import as_list, dicts_in, kind_of

# Of a misspelled name; that of variables in configs of mm, such as conv_cfg, is up to 0.85. Short
# names are like others.
SIMILARITY = 0.9
LONG_KEYS = [key for key in RUNNER_KEYS if len(key) > 6]


def warn_of_settings(cfg: Config, *splits: str, options: Sequence[str] = ()) -> None:
    """Print a line for each setting of a run that has no effect; `options` are --cfg-options."""
    for line in misspelled(cfg):
        warn(line)
    for line in ignored_preprocessor(cfg):
        warn(line)
    if 'train' in splits:
        for line in schedules_in_epochs(cfg):
            warn(line)
        for line in overridden_learning_rate(cfg, options):
            warn(line)


def warn(text: str) -> None:
    if rank() == 0:
        print(f'warning: {text}')


def misspelled(cfg: Config) -> Iterator[str]:
    """Lines for names at the top level that are nearly those of mmengine's settings."""
    for name in cfg.keys():
        meant = closest(name, LONG_KEYS, SIMILARITY)
        if meant and name not in SETTINGS:
            yield f'{name} is not a setting; did you mean {meant}?'


def ignored_preprocessor(cfg: Config) -> Iterator[str]:
    inner = cfg.model.get('data_preprocessor')
    outer = cfg.get('data_preprocessor')
    if inner and outer and inner != outer:
        yield 'data_preprocessor has no effect, since model.data_preprocessor is set'


def schedules_in_epochs(cfg: Config) -> Iterator[str]:
    """Lines for what counts epochs in a training that counts iterations, and has only one."""
    if not is_iteration_based(cfg):
        return
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    if hook.get('interval', -1) > 0 and hook.get('by_epoch', True):
        yield 'default_hooks.checkpoint counts epochs: it saves only at the end; set by_epoch=False'
    for path, settings in dicts_in(cfg.to_dict().get('param_scheduler'), 'param_scheduler'):
        if settings.get('by_epoch', True) and not settings.get('convert_to_iter_based'):
            yield f'{path} counts epochs: it changes nothing; set by_epoch=False'


def is_iteration_based(cfg: Config) -> bool:
    kind = kind_of(cfg.train_cfg)
    return kind == 'IterBasedTrainLoop' or (not kind and not cfg.train_cfg.get('by_epoch', True))


def overridden_learning_rate(cfg: Config, options: Sequence[str]) -> Iterator[str]:
    """A line for a learning rate in --cfg-options that a one-cycle schedule replaces by its own."""
    key = 'optim_wrapper.optimizer.lr'
    is_given = any(option.partition('=')[0] == key for option in options)
    kinds = [kind_of(schedule) for schedule in as_list(cfg.get('param_scheduler'))]
    if is_given and kinds == ['OneCycleLR']:
        yield f'{key} has no effect: OneCycleLR sets the learning rate; set its eta_max'


def warn_of_custom_keys(cfg: Config, model: nn.Module) -> None:
    """Print a line for the `custom_keys` that are in no parameter's name."""
    names = [f'.{name.removeprefix("module.")}' for name, _ in model.named_parameters()]
    custom_keys = (cfg.optim_wrapper.get('paramwise_cfg') or {}).get('custom_keys') or {}
    unused = [key for key in custom_keys if not any(key in name for name in names)]
    if unused:
        warn(
            'no parameter has a name with these custom_keys of optim_wrapper.paramwise_cfg: '
            + ', '.join(unused)
        )
