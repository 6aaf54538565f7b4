"""Train a detector or a segmentor. For several GPUs or processes, see dist_train.sh.

    cpvt train configs/retinanet_cpvt_s.py
    cpvt train FOLDER_WITH_DATA

For a folder with images and annotations, it writes a config next to the work dir, as cpvt
new-config does, and trains with it.

After SIGTERM or SIGUSR1 it writes a checkpoint and ends with exit status 75; --resume continues. A
second signal ends it at once.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional, Union

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from mmengine.config import Config

from ..tooling.command import Preempted, UserError, exit_on_signal, rank, run_command

LOCK_TIMEOUT = 15  # seconds


def train(
    config: str,
    *,
    base: Optional[str] = None,
    assign: Sequence[str] = (),
    work_dir: Optional[str] = None,
    amp: bool = False,
    resume: Union[bool, str] = False,
    auto_scale_lr: bool = False,
    auto_scale_iters: bool = False,
    early_stop: Optional[int] = None,
    log_to: Sequence[Literal['tensorboard', 'wandb', 'mlflow']] = (),
    skip_bad: bool = False,
    no_pictures: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
) -> None:
    """Train the model of a config.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py; or a folder with data.
        base: for a folder with data, config with the model and the recipe; by default a
            RetinaNet, or for label maps a Semantic FPN.
        assign: for a folder with data, what folders or files in it are for, where
            their names say something else; see cpvt new-config.
        work_dir: folder for checkpoints and logs; by default the config's own, or
            work_dirs/NAME.
        amp: train in mixed precision.
        resume: resume from this checkpoint; without a value from the last complete one in the work
            dir, or from the start if there is none.
        auto_scale_lr: scale the learning rate with the images in a step.
        auto_scale_iters: scale the iterations so that training sees as many images as the recipe.
        early_stop: stop after N evaluations without a better model.
        log_to: log to these, too, in folders of the work dir; see docs/logging.md.
        skip_bad: train without images and annotations that have errors; see cpvt check-data.
        no_pictures: draw neither validation images nor, at the end, the curves.
        cfg_options: override settings of the config, for example randomness.seed=0.
        launcher: what started the processes.
    """
    from ..runner.config import check
    from ..runner.config.explain import explained
    from ..runner.config.load import load_config, work_dir_of
    from ..runner.config.unread import check_unread, warn_of_custom_keys
    from ..runner.datasets.checks import check_before_run
    from ..runner.distributed import (
        all_or_none,
        join_processes,
        leave_processes,
        of_first_process,
    )
    from ..runner.inference.grouping import divide_batches
    from ..runner.models import load_whole_model
    from ..runner.tool_runner import SHARDED, ToolRunner
    from ..runner.training.from_folder import config_of_data
    from ..runner.training.logs import set_up_logs
    from ..runner.training.pictures import draw_results
    from ..runner.training.progress import show_progress
    from ..runner.training.resume import make_resumable, read_training
    from ..runner.training.schedules import fit_to_batch
    from ..runner.training.start import check_weights
    from ..tooling.files import make_folder

    signal.signal(signal.SIGUSR1, exit_on_signal)  # until the training starts
    if early_stop is not None and early_stop < 1:
        raise UserError(f'--early-stop must be at least 1, got {early_stop}')
    splits = 'train', 'val'
    if Path(config).is_dir():
        with all_or_none(launcher):
            pass  # the processes are connected now
        with all_or_none(launcher):
            config = of_first_process(
                lambda: config_of_data(Path(config), base, work_dir, assign, bool(resume), skip_bad)
            )
    elif base or assign:
        raise UserError(f'--base and --assign are for a folder with data, got the file {config}')
    with all_or_none(launcher):
        cfg = load_config(config, cfg_options)
        with explained(cfg, splits):
            check.check_settings(cfg, 'train_cfg', 'train_dataloader', 'optim_wrapper')
            check_unread(cfg, *splits, options=cfg_options)
            check.check_samplers(cfg, *splits)
            check.check_data(cfg, *splits)
            check.check_checkpoints(cfg)
            if amp:
                use_mixed_precision(cfg)
            cfg.work_dir = str(make_folder(work_dir or work_dir_of(cfg, config)))
            lock = lock_work_dir(cfg.work_dir)
            choose_start(cfg, resume)
            if early_stop:
                check.check_settings(cfg, 'val_cfg', 'val_dataloader', 'val_evaluator')
                hook = {'type': 'StoppingHook', 'patience': early_stop, 'min_delta': 1e-9}
                cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), hook]
            set_up_logs(cfg, log_to)
            if not no_pictures:
                draw_results(cfg)
            make_resumable(cfg)
            join_processes(cfg, launcher)
    with all_or_none(launcher), explained(cfg, splits):
        fit_to_batch(cfg, auto_scale_lr, auto_scale_iters)
        check_before_run(cfg, *splits, skip_bad=skip_bad)
    with explained(cfg, splits):
        runner = ToolRunner.from_cfg(cfg)
        with all_or_none(launcher):
            if cfg.get('resume'):
                load_whole_model(runner.model, read_training(cfg.load_from), cfg.load_from)
            else:
                check_weights(runner)
            check.check_classes(cfg, runner.model, *splits)
        if not isinstance(runner.model, SHARDED):  # all of whose processes take part in each pass
            divide_batches(runner.model)  # of the validation
        show_progress(runner)
        warn_of_custom_keys(cfg, runner.model)
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


def use_mixed_precision(cfg: 'Config') -> None:
    """float16 with a dynamic loss scale on a GPU, bfloat16 on a CPU, unless the config itself names
    an optimizer wrapper for mixed precision."""
    from mmengine.device import get_device

    from ..runner.config.parts import kind_of

    kind = kind_of(cfg.optim_wrapper) or 'OptimWrapper'
    if kind in ('AmpOptimWrapper', 'BFloat16OptimWrapper'):
        return
    if kind != 'OptimWrapper':
        raise UserError(f'--amp needs an OptimWrapper in the config, got {kind}')
    cfg.optim_wrapper.type = 'BFloat16OptimWrapper' if get_device() == 'cpu' else 'AmpOptimWrapper'


def lock_work_dir(work_dir: str) -> Optional['BaseFileLock']:
    """Keep other trainings from this work dir, until this process ends. The data workers of a
    killed training hold its lock for some seconds."""
    from ..tooling.files import locked

    try:
        return locked(Path(work_dir, '.lock'), timeout=LOCK_TIMEOUT) if rank() == 0 else None
    except BlockingIOError:
        raise UserError(
            f'another training is running in {work_dir}; choose another --work-dir'
        ) from None


def choose_start(cfg: 'Config', resume: Union[bool, str]) -> None:
    """Set where a training starts: `cfg.resume`, `cfg.load_from` and the seed of the run."""
    from ..runner.training.resume import last_checkpoint, read_training

    work_dir = Path(cfg.work_dir)
    if cfg.get('resume') and not resume:
        resume = cfg.get('load_from') or True
    if not resume:
        if any(work_dir.glob('*.pth')):
            raise UserError(
                f'{work_dir} already has checkpoints of a training; continue it with --resume or '
                f'choose another --work-dir'
            )
        return
    path = last_checkpoint(work_dir) if resume is True else Path(resume)
    cfg.resume = path is not None
    if path is None:
        if rank() == 0:
            print(f'no complete checkpoint in {work_dir}: training from the start')
        return
    if not path.is_file():
        raise UserError(f'no checkpoint at {path}')
    checkpoint = read_training(path)
    if checkpoint is None:
        raise UserError(f'{path} is not a complete checkpoint of a training')
    cfg.load_from = str(path)
    # The order of the samples depends on the seed, which mmengine restores only after making it.
    cfg.randomness = {**cfg.get('randomness', {}), 'seed': checkpoint['meta']['seed']}


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(train, argv, 'continue with the same command and --resume')
