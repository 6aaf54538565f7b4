"""Hooks of the trainings of this package; configs/_base_/runtime_*.py name them.

A checkpoint is complete, finite, and enough to go on from:

- the file backend `atomic` writes a file as a whole or not at all;
- `StopOnDivergenceHook` ends a training before NaN reaches a checkpoint;
- `StopOnSignalHook` writes a checkpoint when the process is told to end;
- `IterationSeedHook` and `EvaluateOnResumeHook` let a training that resumes at a checkpoint end as
  one that was not interrupted.
"""

import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Optional, Union

import numpy as np
import torch
from mmengine.dist import all_reduce, barrier, is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import Tensor
from torch.utils.data import DataLoader

from ..tooling.command import Preempted, UserError, exit_on_signal
from ..tooling.files import atomic_write
from . import pictures  # noqa: F401 (it registers the hook that draws)

PREEMPTED = 'preempted.pth'  # the checkpoint of StopOnSignalHook in the work dir
EVALUATED = 'evaluated_iter'  # in the message hub: the iteration of the last evaluation


@register_backend('atomic')
class AtomicBackend(LocalBackend):
    """mmengine's local files, written as a whole or not at all.

    Examples:
        >>> default_hooks = dict(
        ...     checkpoint=dict(type='CheckpointHook', backend_args=dict(backend='atomic'))
        ... )
    """

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(filepath) as partial:
            partial.write_bytes(obj)


# Divergence


@HOOKS.register_module()
class StopOnDivergenceHook(Hook):
    """Ends a training whose weights are no longer finite, before they are written.

    The loss is read in each iteration, as mmengine does for its log. The weights are read where the
    loss is not finite, before each checkpoint and before each evaluation. A loss that is not finite
    while the weights stay finite is no error after the first iteration: mixed precision in float16
    skips such steps.

    Examples:
        >>> default_hooks = dict(divergence=dict(type='StopOnDivergenceHook'))
    """

    priority = 'NORMAL'  # before CheckpointHook

    def after_train_iter(
        self, runner: Runner, batch_idx: int, outputs: Optional[dict] = None, **_: Any
    ) -> None:
        loss = torch.as_tensor((outputs or {}).get('loss', 0.0)).item()
        if not math.isfinite(loss):
            if runner.iter == 0:
                raise UserError(
                    f'the first loss must be finite, got {loss}: check what the model divides by, '
                    'such as data_preprocessor.std and bbox_coder.target_stds, the data, and the '
                    'weights that training starts from'
                )
            check_weights_are_finite(runner, runner.iter + 1)
        if any(writes_after_this_iteration(hook, runner) for hook in runner.hooks):
            check_weights_are_finite(runner, runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        check_weights_are_finite(runner, runner.iter)

    def before_val_epoch(self, runner: Runner) -> None:
        if runner.iter > 0:
            check_weights_are_finite(runner, runner.iter)


def writes_after_this_iteration(hook: Hook, runner: Runner) -> bool:
    """Whether a hook is one for checkpoints that counts iterations and writes one now."""
    if not isinstance(hook, CheckpointHook) or hook.by_epoch:
        return False
    is_last = hook.save_last and hook.is_last_train_iter(runner)
    return is_last or hook.every_n_train_iters(runner, hook.interval, hook.save_begin)


def check_weights_are_finite(runner: Runner, iterations: int) -> None:
    tensors = [parameter.detach() for parameter in runner.model.parameters()]
    if all_finite(tensors):
        return
    raise UserError(
        f'diverged at iteration {iterations}: weights are not finite. Try a lower learning rate, a '
        'longer warm-up, optim_wrapper.clip_grad=dict(max_norm=1.0), or training without --amp. '
        f'They are in no checkpoint of {runner.work_dir}'
    )


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether all values of all tensors are finite; waits for the device once."""
    flags = [tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point()]
    return not flags or bool(torch.stack(flags).all())


# Signals


PATIENCE = 30  # seconds that a data worker goes on after a signal, for the last iteration
# Seconds in which signals are one: Slurm, torchrun and timeout(1) can each deliver the same.
TOGETHER = 1


def outlive(numbers: Sequence[int], start: Optional[Callable], worker: int) -> None:
    """Start a data worker that goes on for a while after these signals, which clusters send to all
    processes of a job. By PyTorch's own handler it would end at once, and the training with it."""
    since: Optional[float] = None

    def end(number: int, frame: Optional[FrameType]) -> None:
        os._exit(0)

    def go_on(number: int, frame: Optional[FrameType]) -> None:
        nonlocal since
        if since is None:
            since = time.monotonic()
            signal.signal(signal.SIGALRM, end)  # not what the training's process would do
            signal.alarm(PATIENCE)
        elif time.monotonic() - since > TOGETHER:
            end(number, frame)  # the training ends its workers

    for number in numbers:
        signal.signal(number, go_on)
    if start is not None:
        start(worker)


@HOOKS.register_module()
class StopOnSignalHook(Hook):
    """Writes a checkpoint and ends the training after SIGTERM or SIGUSR1 to any of its processes.

    Clusters announce the end of a job by such a signal. The training finishes the iteration, or the
    evaluation, writes `preempted.pth` into the work dir and ends with exit status 75. A training
    that counts epochs repeats the epoch that was broken off. A second signal ends the training at
    once.

    Examples:
        >>> default_hooks = dict(signals=dict(type='StopOnSignalHook'))
    """

    priority = 'LOWEST'  # after schedulers, averaged weights and other checkpoints

    def __init__(self) -> None:
        self.signals = [signal.SIGTERM]
        if hasattr(signal, 'SIGUSR1'):  # not on Windows
            self.signals.append(signal.SIGUSR1)
        self.trains = False
        self.received: Optional[signal.Signals] = None
        self.since = 0.0

    def before_train(self, runner: Runner) -> None:
        self.trains = True
        for loop in (runner.train_loop, runner.val_loop):
            loader = getattr(loop, 'dataloader', None)  # there may be no evaluation
            if isinstance(loader, DataLoader):
                loader.worker_init_fn = partial(outlive, self.signals, loader.worker_init_fn)
        for number in self.signals:
            signal.signal(number, self.receive)

    def after_train(self, runner: Runner) -> None:
        self.trains = False
        for number in self.signals:
            signal.signal(number, exit_on_signal)
        if is_main_process():  # the training is complete
            Path(runner.work_dir, PREEMPTED).unlink(missing_ok=True)

    def receive(self, number: int, frame: Optional[FrameType]) -> None:
        """Called by Python on a signal."""
        if self.received is None:
            self.received = signal.Signals(number)
            self.since = time.monotonic()
        elif time.monotonic() - self.since > TOGETHER:
            exit_on_signal(number, frame)

    def after_train_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        iterations = runner.iter + 1
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            if self.end_of_epoch(runner.train_dataloader, batch_idx):
                return  # it stops after the epoch
            iterations = runner.epoch * len(runner.train_dataloader)  # resumed at its beginning
        self.stop_if_told(runner, runner.epoch, iterations)

    def after_train_epoch(self, runner: Runner) -> None:
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            self.stop_if_told(runner, runner.epoch + 1, runner.iter)

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        if self.trains:
            self.stop_if_told(runner, runner.epoch, runner.iter)

    def stop_if_told(self, runner: Runner, epoch: int, iterations: int) -> None:
        """Write a checkpoint that resumes after these epochs and iterations, and end the training,
        if any process has received a signal; all processes must call it."""
        received = torch.tensor([self.received or 0])
        all_reduce(received, 'max')
        if not received:
            return
        path = Path(runner.work_dir, PREEMPTED)
        runner.save_checkpoint(
            runner.work_dir,
            PREEMPTED,
            meta={'epoch': epoch, 'iter': iterations},
            by_epoch=False,
            backend_args={'backend': 'atomic'},
        )
        if is_main_process():
            Path(runner.work_dir, 'last_checkpoint').write_text(str(path))  # for mmengine's resume
        barrier()  # until the checkpoint is written
        raise Preempted(
            f'{signal.Signals(int(received)).name} received; {path} resumes after iteration '
            f'{iterations}: continue with the same command and --resume'
        )


# Resuming


@HOOKS.register_module()
class EvaluateOnResumeHook(Hook):
    """Evaluates a resumed model first, if its checkpoint is from before an evaluation.

    mmengine writes a checkpoint before it evaluates the model. A training that ends in between
    would lose the result, and maybe the best model.

    Examples:
        >>> default_hooks = dict(resume=dict(type='EvaluateOnResumeHook'))
    """

    priority = 'LOWEST'  # the evaluation needs what other hooks do before the training

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        if runner.iter == 0 or runner.val_loop is None:
            return
        if runner.message_hub.runtime_info.get(EVALUATED) == runner.iter:
            return
        if isinstance(loop, EpochBasedTrainLoop):
            step = loop.epoch
            last = loop.max_epochs
        else:
            step = loop.iter
            last = loop.max_iters
        is_due = step % loop.val_interval == 0 or step == last
        if is_due and step >= loop.val_begin:
            runner.logger.info('evaluating the model of the checkpoint first')
            runner.val_loop.run()

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        runner.message_hub.update_info(EVALUATED, runner.iter)


@HOOKS.register_module()
class IterationSeedHook(Hook):
    """Seeds the random generators in each iteration, with its number and the seed of the run.

    Random draws of the model, and augmentations if `num_workers=0`, are then the same in a training
    that resumes at a checkpoint. Data workers have generators of their own.

    Examples:
        >>> default_hooks = dict(seed=dict(type='IterationSeedHook'))
    """

    priority = 'LOWEST'

    def before_train_epoch(self, runner: Runner) -> None:
        self.seed_loading(runner, runner.iter)

    def before_train_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        seed_generators(runner.seed, runner.rank, runner.iter, 1)

    def after_train_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        self.seed_loading(runner, runner.iter + 1)

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        self.seed_loading(runner, runner.iter)

    def seed_loading(self, runner: Runner, iteration: int) -> None:
        """Before the batch of an iteration is loaded."""
        seed_generators(runner.seed, runner.rank, iteration, 0)


def seed_generators(*numbers: int) -> None:
    """Seed all global random generators with these numbers."""
    seeds = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
    torch.manual_seed(int(seeds[2]))
