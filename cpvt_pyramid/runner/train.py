"""A training, from its config to its end."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from mmengine.config import Config
from mmengine.dist import get_world_size

from ..config import check
from ..config.load import load_config, work_dir_of
from ..config.plan import Plan, apply, save_plan, show_plan
from ..data.checks import check_before_run, plan_good_parts
from ..predict.openmmlab.grouping import divide_batches
from ..predict.openmmlab.models import load_whole_model
from ..tooling.command import Preempted, UserError, check_at_least, exit_on_signal, rank
from ..tooling.explain import explained
from ..tooling.files import locked, make_folder
from ..training.processes import all_or_none, connect, leave_processes, of_first_process
from .tool_runner import SHARDED, ToolRunner
from .training.from_folder import config_of_data
from .training.plan import TrainingOptions, plan_training
from .training.progress import show_progress
from .training.schedules import what_is_not_scaled
from .training.start import Start, check_weights, find_start

if TYPE_CHECKING:
    from filelock import BaseFileLock

SPLITS = 'train', 'val'
LOCK_TIMEOUT = 15  # seconds


def run_training(config: str, options: TrainingOptions) -> None:
    """Train the model of a config, or that of a folder with data, for which a config is written."""
    signal.signal(signal.SIGUSR1, exit_on_signal)  # until the training starts
    config = config_file(config, options)
    with all_or_none(options.launcher):
        cfg = load_config(config, options.cfg_options)
        with explained():
            check_training(cfg, options)
        work_dir = Path(options.work_dir or work_dir_of(cfg, config))
        connect(options.launcher, cfg.get('env_cfg') or {})
    if options.dry_run:
        with all_or_none(options.launcher):
            show_only(cfg, config, options, work_dir)
        leave_processes()
        return
    with all_or_none(options.launcher):
        make_folder(work_dir)
        lock = lock_work_dir(work_dir)
        start = find_start(cfg, work_dir, options.resume)
    with all_or_none(options.launcher), explained(work_dir):
        plan = complete_plan(cfg, options, work_dir, start)
        if rank() == 0:
            show_plan(plan, config)
            save_plan(plan, config, work_dir / 'train.plan.txt')
        apply(cfg, plan)
    with explained(work_dir):
        runner = build_runner(cfg, options.launcher, start)
        try:
            runner.train()
        except Preempted:  # in all processes
            leave_processes()
            raise
        finally:
            runner.visualizer.close()
            if lock:
                lock.release()
    leave_processes()


def show_only(cfg: Config, config: str, options: TrainingOptions, work_dir: Path) -> None:
    """Print the plan of a training, but for parts of the data, which are not read."""
    start = find_start(cfg, work_dir, options.resume)
    with explained():
        plan = plan_training(cfg, options, work_dir, start, get_world_size())
    if rank() == 0:
        show_plan(plan, config)


def config_file(config: str, options: TrainingOptions) -> str:
    """The path of the config; that of a folder with data is written first."""
    if not Path(config).is_dir():
        if options.base or options.assign:
            raise UserError(
                f'--base and --assign are for a folder with data, got the file {config}'
            )
        return config
    if options.dry_run:
        raise UserError('--dry-run needs a config; cpvt new-config writes that of a folder')
    with all_or_none(options.launcher):
        pass  # the processes are connected now
    with all_or_none(options.launcher):
        return of_first_process(
            lambda: config_of_data(
                Path(config),
                options.base,
                options.work_dir,
                options.assign,
                bool(options.resume),
                options.skip_bad,
            )
        )


def check_training(cfg: Config, options: TrainingOptions) -> None:
    """Check what can be checked before the data are read and the model is built."""
    check.check_settings(cfg, 'train_cfg', 'train_dataloader', 'optim_wrapper')
    if options.early_stop is not None:
        check_at_least('--early-stop', options.early_stop, 1)
        check.check_settings(cfg, 'val_cfg', 'val_dataloader', 'val_evaluator')
    check.check_samplers(cfg, *SPLITS)
    check.check_data(cfg, *SPLITS)
    check.check_checkpoints(cfg)


def lock_work_dir(work_dir: Path) -> Optional['BaseFileLock']:
    """Keep other trainings from this work dir, until this process ends. The data workers of a
    killed training hold its lock for some seconds."""
    if rank() != 0:
        return None
    try:
        return locked(work_dir / '.lock', timeout=LOCK_TIMEOUT)
    except BlockingIOError:
        raise UserError(
            f'another training is running in {work_dir}; choose another --work-dir'
        ) from None


def complete_plan(
    cfg: Config, options: TrainingOptions, work_dir: Path, start: Optional[Start]
) -> Plan:
    """The plan of a training, after its data have been read."""
    processes = get_world_size()
    plan = plan_training(cfg, options, work_dir, start, processes)
    scaling = options.auto_scale_lr, options.auto_scale_iters
    if (line := what_is_not_scaled(cfg, processes, *scaling)) and rank() == 0:
        print(line)
    good_parts = check_before_run(cfg, *SPLITS, folder=work_dir, skip_bad=options.skip_bad)
    return (*plan_good_parts(cfg, good_parts), *plan)


def build_runner(cfg: Config, launcher: str, start: Optional[Start]) -> ToolRunner:
    """The runner of a training, with its weights checked or loaded."""
    runner = ToolRunner.from_cfg(cfg)
    with all_or_none(launcher):
        if start:
            load_whole_model(runner.model, start.checkpoint, start.path)
        else:
            check_weights(runner)
        check.check_classes(cfg, runner.model, *SPLITS)
    if not isinstance(runner.model, SHARDED):  # all of whose processes take part in each pass
        divide_batches(runner.model)  # of the validation
    show_progress(runner)
    return runner
