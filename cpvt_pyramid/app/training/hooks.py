"""Hooks of the trainings of this package; configs/_base_/runtime_*.py name them.

A checkpoint is complete, finite, and enough to go on from:

- the file backend `atomic` writes a file as a whole or not at all;
- `SafeCheckpointHook` writes a checkpoint before it deletes the one before;
- `StopOnDivergenceHook` ends a training before NaN reaches a checkpoint;
- `StopOnSignalHook` writes a checkpoint when the process is told to end;
- `ResumeHook` and `IterationSeedHook` let a training that resumes at a checkpoint end as one that
  was not interrupted.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Optional

import torch
from mmengine.dist import all_reduce, barrier, is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import Tensor
from torch.utils.data import DataLoader

from ..tooling.command import Preempted, UserError, exit_on_signal
from ..tooling.files import write_text
from . import keeping, pictures, resuming, seeds  # noqa: F401 (they register their hooks)

PREEMPTED = 'preempted.pth'  # the checkpoint of StopOnSignalHook in the work dir

# Divergence


@HOOKS.register_module()
class StopOnDivergenceHook(Hook):
    """Ends a training whose weights are no longer finite, before they are written.

    The loss is read in each iteration, as mmengine does for its log. The weights, and buffers such
    as the statistics of batch norms, are read where the loss is not finite, before each checkpoint
    and before each evaluation. A loss that is not finite while they stay finite is no error after
    the first iteration: mixed precision in float16 skips such steps.

    Examples:
        >>> default_hooks = dict(divergence=dict(type='StopOnDivergenceHook'))
    """

    priority = 'NORMAL'  # before CheckpointHook

    def __init__(self) -> None:
        self.infinite: set[str] = set()  # buffers that have infinite values from the beginning

    def before_train(self, runner: Runner) -> None:
        self.infinite = {
            name for name, buffer in runner.model.named_buffers() if not all_finite([buffer])
        }

    def check(self, runner: Runner, iterations: int) -> None:
        buffers = [b for name, b in runner.model.named_buffers() if name not in self.infinite]
        check_weights_are_finite(runner, iterations, buffers)

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
            self.check(runner, runner.iter + 1)
        if any(writes_after_this_iteration(hook, runner) for hook in runner.hooks):
            self.check(runner, runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        self.check(runner, runner.iter)

    def before_val_epoch(self, runner: Runner) -> None:
        if runner.iter > 0:
            self.check(runner, runner.iter)


def writes_after_this_iteration(hook: Hook, runner: Runner) -> bool:
    """Whether a hook is one for checkpoints that counts iterations and writes one now."""
    if not isinstance(hook, CheckpointHook) or hook.by_epoch:
        return False
    is_last = hook.save_last and hook.is_last_train_iter(runner)
    return is_last or hook.every_n_train_iters(runner, hook.interval, hook.save_begin)


def check_weights_are_finite(
    runner: Runner, iterations: int, buffers: Sequence[Tensor] = ()
) -> None:
    weights = [parameter.detach() for parameter in runner.model.parameters()]
    if not all_finite(weights):
        what = 'weights'
    elif not all_finite(buffers):
        what = 'the statistics of batch norms or other buffers'
    else:
        return
    raise UserError(
        f'diverged at iteration {iterations}: {what} are not finite. Try a lower learning rate, a '
        'longer warm-up, optim_wrapper.clip_grad=dict(max_norm=1.0), or training without --amp. '
        f'They are in no checkpoint of {runner.work_dir}'
    )


def all_finite(tensors: Sequence[Tensor]) -> bool:
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
    evaluation, writes `preempted.pth` into the work dir and ends with exit status 75; see
    `ResumeHook`. A second signal ends the training at once.

    Examples:
        >>> default_hooks = dict(signals=dict(type='StopOnSignalHook'))
    """

    priority = 'LOWEST'  # after schedulers, averaged weights and other checkpoints

    def __init__(self) -> None:
        self.signals = [signal.SIGTERM]
        if hasattr(signal, 'SIGUSR1'):  # not on Windows
            self.signals.append(signal.SIGUSR1)
        self.has_evaluated = False
        self.received: Optional[signal.Signals] = None
        self.since = 0.0

    def before_train(self, runner: Runner) -> None:
        for loop in (runner.train_loop, runner.val_loop):
            loader = getattr(loop, 'dataloader', None)  # there may be no evaluation
            if isinstance(loader, DataLoader):
                loader.worker_init_fn = partial(outlive, self.signals, loader.worker_init_fn)
        for number in self.signals:
            signal.signal(number, self.receive)

    def after_train(self, runner: Runner) -> None:
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
        is_last_of_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop) and self.end_of_epoch(
            runner.train_dataloader, batch_idx
        )
        if not is_last_of_epoch:  # else it stops after the epoch
            self.stop_if_told(runner, runner.epoch, runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            self.stop_if_told(runner, runner.epoch + 1, runner.iter)

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        self.has_evaluated = True

    def before_train_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        """Stop after an evaluation: now all hooks have seen its metrics."""
        if self.has_evaluated:
            self.has_evaluated = False
            self.stop_if_told(runner, runner.epoch, runner.iter)

    def stop_if_told(self, runner: Runner, epoch: int, iterations: int) -> None:
        """Write a checkpoint that resumes after these epochs and iterations, and end the training,
        if any process has received a signal; all processes must call it. They go on to the next
        update of the weights: no checkpoint has the gradients of a sum that is not complete."""
        if is_within_sum(runner):
            return
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
            write_text(Path(runner.work_dir, 'last_checkpoint'), str(path))  # for mmengine's resume
        barrier()  # until the checkpoint is written
        raise Preempted(
            f'{signal.Signals(int(received)).name} received; {path} resumes after iteration '
            f'{iterations}: continue with the same command and --resume'
        )


def is_within_sum(runner: Runner) -> bool:
    """Whether gradients are summed that have not changed the weights (`accumulative_counts`)."""
    wrapper = runner.optim_wrapper
    return isinstance(wrapper, OptimWrapper) and not wrapper.should_update()
