"""What a training changes in a config."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

from mmengine.config import Config
from mmengine.device import get_device

from ...config.common import plan_compilation, plan_scope, plan_work_dir
from ...config.parts import items_of, kind_of
from ...config.plan import Change, Plan, append, note, set_value
from ...tooling.command import UserError
from ...training.processes import plan_processes
from .logs import plan_logs
from .pictures import plan_pictures
from .resume import plan_resuming
from .schedules import plan_scaling
from .start import Start


class TrainingOptions(NamedTuple):
    """Options of `cpvt train`, which describes them."""

    base: Optional[str] = None
    assign: Sequence[str] = ()
    work_dir: Optional[str] = None
    amp: bool = False
    resume: Union[bool, str] = False
    auto_scale_lr: bool = False
    auto_scale_iters: bool = False
    early_stop: Optional[int] = None
    log_to: Sequence[str] = ()
    skip_bad: bool = False
    pictures: bool = True
    cfg_options: Sequence[str] = ()
    launcher: str = 'none'
    dry_run: bool = False


def plan_training(
    cfg: Config,
    options: TrainingOptions,
    work_dir: Path,
    start: Optional[Start] = None,
    processes: int = 1,
) -> Plan:
    """Everything that a training changes in a config, but for parts of the data.

    Args:
        cfg: the config, which is not changed.
        options: of the command.
        work_dir: folder for checkpoints and logs.
        start: the checkpoint to resume, if any.
        processes: number of processes.
    """
    changes = plan_work_dir(cfg, work_dir, options.work_dir)
    changes += plan_scope(cfg)
    changes += plan_start(cfg, start)
    if options.amp:
        changes += plan_mixed_precision(cfg)
    if options.early_stop:
        changes += plan_early_stop(options.early_stop)
    changes += plan_scaling(cfg, processes, options.auto_scale_lr, options.auto_scale_iters)
    changes += plan_peaks(cfg)
    changes += plan_compilation(cfg)
    changes += plan_logs(cfg, options.log_to, str(work_dir))
    if options.pictures:
        changes += plan_pictures(cfg)
    changes += plan_resuming(cfg)
    changes += plan_processes(cfg, options.launcher)
    return tuple(changes)


def plan_start(cfg: Config, start: Optional[Start]) -> list[Change]:
    if start is None:
        changes = []
        if cfg.get('resume'):
            changes.append(set_value('resume', False, 'there is no checkpoint yet'))
        if cfg.get('load_from'):
            reason = 'if it holds only a backbone, it is loaded into that'
            changes.append(note('load_from', reason))
        return changes
    # mmengine restores the seed only after it has made the order of the samples.
    reason = 'that of the checkpoint'
    return [
        set_value('resume', True, 'the training continues'),
        set_value('load_from', str(start.path), 'the checkpoint to resume'),
        set_value('randomness.seed', start.seed, reason),
    ]


def plan_mixed_precision(cfg: Config) -> list[Change]:
    """float16 with a dynamic loss scale on a GPU, bfloat16 on a CPU, unless the config itself names
    an optimizer wrapper for mixed precision."""
    kind = kind_of(cfg.optim_wrapper) or 'OptimWrapper'
    if kind in ('AmpOptimWrapper', 'BFloat16OptimWrapper'):
        return []
    if kind != 'OptimWrapper':
        raise UserError(f'--amp needs an OptimWrapper in the config, got {kind}')
    if get_device() == 'cpu':
        return [set_value('optim_wrapper.type', 'BFloat16OptimWrapper', '--amp, on a CPU')]
    return [set_value('optim_wrapper.type', 'AmpOptimWrapper', '--amp')]


def plan_early_stop(evaluations: int) -> list[Change]:
    hook = {'type': 'StoppingHook', 'patience': evaluations, 'min_delta': 1e-9}
    return [append('custom_hooks', hook, f'--early-stop {evaluations}')]


def plan_peaks(cfg: Config) -> list[Change]:
    reason = 'scaled by the learning rate of each parameter group'
    return [
        note(f'{path}.eta_max', reason)
        for path, scheduler in items_of(cfg, 'param_scheduler', '')
        if kind_of(scheduler).startswith('OneCycle')
    ]
