"""A checkpoint when a training is told to stop.

Clusters announce the end of a job by a signal: SIGTERM, or SIGUSR1 with Slurm's `--signal`. After
the first one, the training finishes the current iteration, writes the checkpoint `preempted.pth`
and ends with exit status 75. An evaluation is broken off; the resumed training repeats it. A second
signal ends the training at once.
"""

import os
import signal
import time
from types import FrameType
from typing import Any, Optional

import torch
from mmengine.dist import all_reduce, barrier
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ...tooling.command import Preempted, exit_on_signal
from .resume import PREEMPTED, optimizers

SIGNALS = signal.SIGTERM, signal.SIGUSR1
# Seconds. Slurm, torchrun and timeout(1) can each deliver the same signal.
TOGETHER = 1
DATA_WORKER = 30  # how long a data worker that got the signal goes on, for the last iteration


@HOOKS.register_module()
class PreemptionHook(Hook):
    """Writes a checkpoint and ends the training after a signal to any of its processes."""

    priority = 'LOWEST'  # after schedulers, averaged weights and other checkpoints

    def __init__(self) -> None:
        self.signal: Optional[signal.Signals] = None
        self.since = 0.0

    def before_train(self, runner: Runner) -> None:
        self.process = os.getpid()
        for number in SIGNALS:
            signal.signal(number, self.receive)

    def after_train(self, runner: Runner) -> None:
        for number in SIGNALS:
            signal.signal(number, exit_on_signal)

    def receive(self, number: int, frame: Optional[FrameType]) -> None:
        """Called by Python on a signal."""
        if os.getpid() != self.process:
            signal.alarm(DATA_WORKER)  # ends this process later
        elif self.signal is None:
            self.signal = signal.Signals(number)
            self.since = time.monotonic()
        elif time.monotonic() - self.since > TOGETHER:
            exit_on_signal(number, frame)

    def after_train_iter(self, runner: Runner, **_: Any) -> None:
        if not all(wrapper.should_update() for wrapper in optimizers(runner)):
            return  # gradients are being accumulated
        self.stop_if_told(runner, runner.iter + 1)

    def before_val_epoch(self, runner: Runner) -> None:
        batches = torch.tensor([len(runner.val_dataloader)])
        all_reduce(batches, 'min')  # other processes may have one batch less
        self.shared_batches = int(batches)

    def after_val_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        if batch_idx < self.shared_batches:
            self.stop_if_told(runner, runner.iter, evaluating=True)

    def stop_if_told(self, runner: Runner, iterations: int, evaluating: bool = False) -> None:
        """Write a checkpoint after this many iterations, and end the training, if any process has
        received a signal; all processes must call it."""
        received = torch.tensor([self.signal or 0])
        all_reduce(received, 'max')
        if not received:
            return
        name = signal.Signals(received.item()).name
        for hook in runner.hooks:
            if evaluating and isinstance(hook, EMAHook):
                hook._swap_ema_parameters()  # as at the end of the evaluation
        runner.save_checkpoint(
            runner.work_dir,
            PREEMPTED,
            meta={'epoch': runner.epoch, 'iter': iterations},
            by_epoch=False,
            backend_args={'backend': 'atomic'},
        )
        barrier()  # until the checkpoint is written
        raise Preempted(
            f'{name} received; {runner.work_dir}/{PREEMPTED} is the state after iteration '
            f'{iterations}: continue with the same command and --resume'
        )
