"""`cpvt train`: load a config, apply the options, check what is certain, train."""

import copy
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Optional, Union

from mmengine.config import Config
from mmengine.device import get_device

from ...acceleration.processor import line_about_bfloat16
from ..config import check
from ..config.load import load_config, work_dir_of
from ..config.parts import kind_of
from ..config.schedules import check_schedules
from ..data.config_data import check_before_run
from ..predict.openmmlab.loading import load_whole_model, trusted_checkpoints
from ..tooling.command import Preempted, UserError, rank
from ..tooling.files import locked, make_folder
from ..tooling.memory import address_limit
from .duration import DurationHook
from .hooks import StopOnDivergenceHook
from .processes import connect, leave_processes, use_launcher
from .resuming import ResumeHook
from .runner import CommandRunner, write_config
from .start import Start, check_weights, find_start, resume_from
from .trial import TrialHook

SPLITS = 'train', 'val'
LOCK_TIMEOUT = 15  # seconds


def run_training(
    config: str,
    *,
    work_dir: Optional[str] = None,
    amp: bool = False,
    resume: Union[bool, str] = False,
    auto_scale_lr: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: str = 'none',
) -> None:
    """Train the model of a config; see `cpvt train` for the arguments."""
    limit = address_limit()
    if limit and rank() == 0:
        print(
            f'the address space is limited to {limit / 2**30:.1f} GiB (ulimit -v): if that is not '
            'enough, the training can end without a message'
        )
    cfg = load_config(config, cfg_options)
    check_training(cfg)
    cfg.work_dir = work_dir or str(work_dir_of(cfg, config))
    if amp:
        use_mixed_precision(cfg)
    if rank() == 0 and kind_of(cfg.optim_wrapper) == 'BFloat16OptimWrapper':
        if line := line_about_bfloat16(get_device()):
            print(line)
    if auto_scale_lr:
        scale_learning_rate(cfg)
    own = copy.deepcopy(cfg)  # without what belongs to this run alone
    use_launcher(cfg, launcher)
    folder = make_folder(cfg.work_dir)
    with work_dir_for_one(folder):
        start = find_start(cfg, folder, resume)
        resume_from(cfg, start)
        connect(launcher, cfg.get('env_cfg') or {})
        with trusted_checkpoints():
            leave_out = 'cpvt new-config --skip-bad'
            check_before_run(cfg, *SPLITS, folder=folder, leave_out=leave_out)
            runner = build_runner(cfg, start)
            if rank() == 0:
                write_config(own, config, folder)
            try:
                runner.train()
            except Preempted:  # in all processes
                leave_processes()
                raise
            except UserError:
                raise
            except Exception:
                runner.logger.error(traceback.format_exc())  # in the log file alone
                raise
            finally:
                runner.visualizer.close()
    leave_processes()


def check_training(cfg: Config) -> None:
    """Check what can be checked before the data are read and the model is built."""
    check.check_settings(cfg, 'train_cfg', 'train_dataloader', 'optim_wrapper')
    check.check_optimizer(cfg)
    check_precision(cfg)
    check.check_data(cfg, *SPLITS)
    check.check_checkpoints(cfg)
    check_schedules(cfg)


def check_precision(cfg: Config) -> None:
    """Check that there is a GPU if the config names mmengine's wrapper for mixed precision."""
    if kind_of(cfg.optim_wrapper) == 'AmpOptimWrapper' and get_device() == 'cpu':
        raise UserError(
            'the AmpOptimWrapper of the config needs a GPU, and there is none; to train in '
            'bfloat16 on the CPU: --cfg-options optim_wrapper.type=BFloat16OptimWrapper'
        )


def use_mixed_precision(cfg: Config) -> None:
    """float16 with a dynamic loss scale on a GPU, bfloat16 on a CPU, unless the config itself names
    an optimizer wrapper for mixed precision."""
    kind = kind_of(cfg.optim_wrapper) or 'OptimWrapper'
    if kind in ('AmpOptimWrapper', 'BFloat16OptimWrapper'):
        return
    if kind != 'OptimWrapper':
        raise UserError(f'--amp needs an OptimWrapper in the config, got {kind}')
    is_on_cpu = get_device() == 'cpu'
    cfg.optim_wrapper.type = 'BFloat16OptimWrapper' if is_on_cpu else 'AmpOptimWrapper'


def scale_learning_rate(cfg: Config) -> None:
    """Let mmengine scale the learning rate by the images in an iteration."""
    settings = cfg.get('auto_scale_lr') or {}
    if not settings.get('base_batch_size'):
        raise UserError(
            '--auto-scale-lr needs auto_scale_lr.base_batch_size in the config, the number of '
            'images in an iteration of its recipe'
        )
    cfg.auto_scale_lr.enable = True


@contextmanager
def work_dir_for_one(work_dir: Path) -> Iterator[None]:
    """Inside this context other trainings are kept from this work dir. The data workers of a killed
    training hold its lock for some seconds."""
    if rank() != 0:
        yield
        return
    try:
        lock = locked(work_dir / '.lock', timeout=LOCK_TIMEOUT)
    except BlockingIOError:
        raise UserError(
            f'another training is running in {work_dir}; choose another --work-dir'
        ) from None
    try:
        yield
    finally:
        if lock:
            lock.release()


def build_runner(cfg: Config, start: Optional[Start]) -> CommandRunner:
    """The runner of a training, after it has been checked that weights and classes fit."""
    runner = CommandRunner.from_cfg(cfg)
    if start:
        load_whole_model(runner.model, start.checkpoint, start.path)
    else:
        check_weights(runner.model, cfg.get('load_from'))
    check.check_classes(cfg, runner.model, *SPLITS)
    add_hooks(runner)
    if cfg.get('trial', True):
        runner.register_hook(TrialHook())
    runner.register_hook(DurationHook())
    return runner


def add_hooks(runner: CommandRunner) -> None:
    """Add our hooks that check a training or resume it as it was, if the config lacks them."""
    missing = [
        hook
        for hook in (StopOnDivergenceHook(), ResumeHook())
        if not any(isinstance(other, type(hook)) for other in runner.hooks)
    ]
    for hook in missing:
        runner.register_hook(hook)
    if missing:
        names = ' and '.join(type(hook).__name__ for hook in missing)
        runner.logger.info(f'cpvt train adds to the hooks of the config: {names}')
