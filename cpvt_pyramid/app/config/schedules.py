"""Schedules of learning rates in a config, compared with the length of the training."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from mmengine.config import Config

from ..tooling.command import UserError
from .parts import as_list, kind_of

# What raises a learning rate to that of the config, at which the training can go on.
WARM_UPS = 'LinearLR', 'ConstantLR', 'QuadraticWarmupLR'


class End(NamedTuple):
    """Where a schedule ends, and with it the change of learning rates."""

    kind: str  # of the schedule
    setting: str  # that sets the end
    at: float  # epochs or iterations
    length: float  # of the training, in the same unit
    unit: str


def schedule_problems(cfg: Config, epoch_length: Optional[int] = None) -> list[str]:
    """What is odd about the schedules of a config, a line each: the last one that lowers the
    learning rate ends before the training does, counts epochs in a training that counts
    iterations, or ends at a learning rate that is higher than that of the config.

    Args:
        cfg: the config.
        epoch_length: iterations of an epoch, if known. Without it, what counts iterations in a
            training by epochs is not compared.
    """
    problems = []
    counts_epochs = 'max_epochs' in (cfg.get('train_cfg') or {})
    for schedule in learning_rates(cfg):
        converted = schedule.get('convert_to_iter_based')
        if not counts_epochs and schedule.get('by_epoch', True) and not converted:
            problems.append(
                f'{kind_of(schedule)} counts epochs, and the training iterations, so that it has '
                'no effect: set by_epoch=False, and its numbers in iterations'
            )
        rate, lowest = learning_rate(cfg), schedule.get('eta_min') or 0
        if rate is not None and lowest > rate:
            problems.append(
                f'{kind_of(schedule)} raises the learning rate from {rate:g} to its eta_min of '
                f'{lowest:g}: set eta_min to less than {rate:g}'
            )
    ends = list(schedule_ends(cfg, epoch_length))
    if not ends or problems:
        return problems
    last = max(ends, key=lambda end: end.at / end.length)
    if last.at < last.length:
        after = 'rises again' if last.setting == 'T_max' else 'stays at its last value'
        problems.append(
            f'{last.kind} ends after {last.at:g} of {last.length:g} {last.unit}, and the learning '
            f'rate {after}: set its {last.setting} to {last.length:g}, or train for {last.at:g}'
        )
    return problems


def check_schedules(cfg: Config) -> None:
    """Check that no schedule ends with an error before the training does, as OneCycleLR does."""
    for end in schedule_ends(cfg):
        if end.setting == 'total_steps' and end.at < end.length:
            raise UserError(
                f'{end.kind} must have total_steps={end.length:g}, the {end.unit} of the training, '
                f'got {end.at:g}: MMEngine ends there with an error'
            )


def learning_rates(cfg: Config) -> list[dict]:
    """The schedules of the learning rate; none without a training, or for several optimizers."""
    value: Any = cfg.get('param_scheduler')
    if not cfg.get('train_cfg') or (isinstance(value, dict) and 'type' not in value):
        return []
    return [s for s in as_list(value) if isinstance(s, dict) and kind_of(s).endswith('LR')]


def learning_rate(cfg: Config) -> Optional[float]:
    """That of the optimizer, if the config sets one."""
    return ((cfg.get('optim_wrapper') or {}).get('optimizer') or {}).get('lr')


def schedule_ends(cfg: Config, epoch_length: Optional[int] = None) -> Iterator[End]:
    """The ends of the schedules that lower the learning rate, as far as they can be compared with
    the length of the training; see `schedule_problems`."""
    loop = cfg.get('train_cfg') or {}
    epochs = loop.get('max_epochs')
    iterations = loop.get('max_iters')
    if epochs and epoch_length:
        iterations = epochs * epoch_length
    for schedule in learning_rates(cfg):
        by_epoch = schedule.get('by_epoch', True)
        unit = 'epochs' if by_epoch else 'iterations'
        length = epochs if by_epoch else iterations
        if length and kind_of(schedule) not in (*WARM_UPS, 'ReduceOnPlateauLR'):
            setting, at = end_of(schedule, length)
            yield End(kind_of(schedule), setting, at, length, unit)


def end_of(schedule: dict, length: float) -> tuple[str, float]:
    """The setting with which a schedule ends first, and where; by default with the training."""
    begin = schedule.get('begin', 0)
    ends = [('end', schedule.get('end', length))]
    if schedule.get('T_max') is not None:
        ends.append(('T_max', begin + schedule['T_max']))
    if schedule.get('total_steps') is not None:
        ends.append(('total_steps', begin + schedule['total_steps']))
    if schedule.get('periods') is not None:
        ends.append(('periods', begin + sum(schedule['periods'])))
    return min(ends, key=lambda end: end[1])
