#!/usr/bin/env python
"""Train a detector or a segmentor, whichever the config describes."""

# Imports wait until the arguments are read: --help is quick, and mm's take seconds.
import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from mmengine.config import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed


def train(
    config: str,
    work_dir: Optional[str] = None,
    amp: bool = False,
    resume: Optional[str] = None,
    auto_scale_lr: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: str = 'none',
) -> None:
    """Train what a config describes.

    Args:
        config: the config file.
        work_dir: folder for checkpoints and logs; by default the config's own, or
            work_dirs/<name of the config>.
        amp: train in mixed precision.
        resume: checkpoint to go on from; 'auto' takes the last whole one in the work dir, and
            starts from the beginning if there is none.
        auto_scale_lr: scale the learning rate with the total batch size.
        cfg_options: `key=value` settings that override the config's.
        launcher: what started the processes: none (there is one), pytorch, slurm or mpi.
    """
    from cpvt_pyramid.runner import checks, launch
    from cpvt_pyramid.runner.resume import make_resumable

    cfg = launch.load_config(config, cfg_options)
    launch.check_data(cfg, 'train', 'val')
    launch.check_checkpoints(cfg)
    if amp:
        use_mixed_precision(cfg)
    if auto_scale_lr:
        if not cfg.get('auto_scale_lr', {}).get('base_batch_size'):
            raise launch.UserError(
                '--auto-scale-lr: the config has no auto_scale_lr.base_batch_size'
            )
        cfg.auto_scale_lr.enable = True
    cfg.work_dir = str(launch.make_folder(work_dir or launch.work_dir_of(cfg, config)))
    choose_start(cfg, resume)
    make_resumable(cfg)
    launch.join_processes(cfg, launcher)
    runner = launch.QuietRunner.from_cfg(cfg)
    if cfg.get('resume'):
        launch.load_weights(runner.model, launch.read_checkpoint(cfg.load_from), cfg.load_from)
    else:
        checks.check_weights(runner)
    checks.check_classes(cfg, runner.model, 'train', 'val')
    runner.train()
    launch.leave_processes()


def use_mixed_precision(cfg: 'Config') -> None:
    """float16 with a dynamic loss scale on a GPU, bfloat16 on a CPU."""
    from mmengine.device import get_device

    from cpvt_pyramid.runner.launch import UserError

    wrapper = cfg.optim_wrapper
    kind = wrapper.get('type', 'OptimWrapper')
    if kind not in ('OptimWrapper', 'AmpOptimWrapper', 'BFloat16OptimWrapper'):
        raise UserError(f'--amp replaces an OptimWrapper, and the config has a {kind}')
    if get_device() == 'cpu':
        plain = {k: v for k, v in wrapper.items() if k not in ('loss_scale', 'dtype', 'use_fsdp')}
        cfg.optim_wrapper = {**plain, 'type': 'BFloat16OptimWrapper'}
    else:
        cfg.optim_wrapper = {**wrapper, 'type': 'AmpOptimWrapper', 'loss_scale': 'dynamic'}


def choose_start(cfg: 'Config', resume: Optional[str]) -> None:
    """Set where a training begins: `cfg.resume`, `cfg.load_from` and the seed of the run."""
    from cpvt_pyramid.runner.launch import UserError, rank
    from cpvt_pyramid.runner.resume import last_checkpoint, read_training

    work_dir = Path(cfg.work_dir)
    if cfg.get('resume') and not resume:
        resume = cfg.get('load_from') or 'auto'
    if not resume:
        if any(work_dir.glob('*.pth')):
            raise UserError(
                f'{work_dir} holds the checkpoints of a training. Go on with it by --resume, or '
                f'choose another --work-dir'
            )
        return
    path = last_checkpoint(work_dir) if resume == 'auto' else Path(resume)
    cfg.resume = path is not None
    if path is None:
        if rank() == 0:
            print(f'no whole checkpoint in {work_dir}: training from the beginning')
        return
    if not path.is_file():
        raise UserError(f'no checkpoint at {path}')
    checkpoint = read_training(path)
    if checkpoint is None:
        raise UserError(f'{path} is not a whole checkpoint of a training')
    cfg.load_from = str(path)
    # The order of the samples hangs on it, and mmengine restores it after the order is made.
    cfg.randomness = {**cfg.get('randomness', {}), 'seed': checkpoint['meta']['seed']}


def main(argv: Optional[Sequence[str]] = None) -> int:
    from cpvt_pyramid.runner.options import add_cfg_options, add_launcher

    parser = argparse.ArgumentParser(
        prog='train', description=__doc__, epilog='Several GPUs or processes: dist_train.sh.'
    )
    add = parser.add_argument
    add('config', metavar='CONFIG', help='config file, for example configs/retinanet_cpvt_s.py')
    add('--work-dir', metavar='DIR', help='folder for checkpoints and logs (work_dirs/NAME)')
    add('--amp', action='store_true', help='train in mixed precision')
    add(
        '--resume',
        nargs='?',
        const='auto',
        metavar='PATH',
        help='go on from a checkpoint; without PATH from the last whole one in the work dir',
    )
    add(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate with the total batch size',
    )
    add_cfg_options(parser, 'randomness.seed=0')
    add_launcher(parser)
    arguments = vars(parser.parse_args(argv))
    os.environ.setdefault('LOCAL_RANK', arguments.pop('local_rank'))

    from cpvt_pyramid.runner.launch import run_tool

    return run_tool('train', train, arguments, 'the same command with --resume goes on')


if __name__ == '__main__':
    sys.exit(main())
