"""Settings without an effect: warnings, and an error for a misspelled one of mmengine's Runner.

mm checks the arguments of what it builds, but not the names at the top level of a config.
"""

import re
from collections.abc import Iterator, Sequence

from mmengine.config import Config
from torch import nn

from ...tooling.command import UserError, rank
from .load import RUNNER_KEYS, SETTINGS, closest
from .parts import as_list, dicts_in, kind_of


def check_unread(cfg: Config, *splits: str, options: Sequence[str] = ()) -> None:
    """Print a line for each setting of a run that has no effect; `options` are --cfg-options.

    Raises:
        UserError: an argument of mmengine's Runner is misspelled.
    """
    lines = list(unread_at_top(cfg))
    if 'train' in splits:
        lines += schedules_in_epochs(cfg)
        lines += overridden_learning_rate(cfg, options)
    for line in lines:
        warn(line)


def warn(text: str) -> None:
    if rank() == 0:
        print(f'warning: {text}')


def unread_at_top(cfg: Config) -> Iterator[str]:
    """Lines for variables of the config's files that no later line of them reads."""
    text = re.sub('#.*', '', cfg.text)  # of the base configs first
    for key, value in cfg.items():
        *_, after = re.split(rf'^{re.escape(key)}\s*=(?!=)', text, flags=re.M)
        if key in SETTINGS or callable(value) or key[0] == '_' or after == text:
            continue
        if re.search(rf'(?<![\w\'"]){key}\b(?!\s*=(?!=))', after):
            continue
        if meant := closest(key, [name for name in RUNNER_KEYS if len(name) > 6], 0.8):
            raise UserError(f'nothing reads the setting {key!r}; did you mean {meant!r}?')
        yield f'nothing reads {key}'
    inner, outer = cfg.model.get('data_preprocessor'), cfg.get('data_preprocessor')
    if inner and outer and inner != outer:
        yield 'nothing reads data_preprocessor, since model.data_preprocessor is set'


def schedules_in_epochs(cfg: Config) -> Iterator[str]:
    """Lines for what counts epochs in a training that counts iterations, and has only one."""
    kind = kind_of(cfg.train_cfg)
    if kind != 'IterBasedTrainLoop' and (kind or cfg.train_cfg.get('by_epoch', True)):
        return
    hook = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    if hook.get('interval', -1) > 0 and hook.get('by_epoch', True):
        yield 'default_hooks.checkpoint counts epochs: it saves only at the end; set by_epoch=False'
    for path, settings in dicts_in(cfg.to_dict().get('param_scheduler'), 'param_scheduler'):
        if settings.get('by_epoch', True) and not settings.get('convert_to_iter_based'):
            yield f'{path} counts epochs: it changes nothing; set by_epoch=False'


def overridden_learning_rate(cfg: Config, options: Sequence[str]) -> Iterator[str]:
    """A line for a learning rate in --cfg-options that a one-cycle schedule replaces by its own."""
    key = 'optim_wrapper.optimizer.lr'
    schedules = as_list(cfg.get('param_scheduler'))
    is_given = any(option.partition('=')[0] == key for option in options)
    if is_given and [kind_of(schedule) for schedule in schedules] == ['OneCycleLR']:
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
