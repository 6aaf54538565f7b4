"""How far a training or its evaluation is, on a terminal: a bar below the lines of the log."""

import logging
import sys
from typing import Any, Optional

from mmengine.hooks import Hook
from mmengine.runner import Runner
from tqdm import tqdm

from ...tooling.command import rank
from ...tooling.progress import terminal_bar


def show_progress(runner: Runner) -> None:
    """Show bars, in the first process and on a terminal only; a log has the remaining time in its
    lines."""
    if rank() or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return
    runner.register_hook(ProgressBarHook(), 'LOWEST')
    for handler in runner.logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(AboveBar())


class AboveBar:
    """A stream whose lines appear above the bar, which would break them otherwise."""

    def write(self, text: str) -> None:
        tqdm.write(text, sys.stdout, end='')

    def flush(self) -> None:
        sys.stdout.flush()


class ProgressBarHook(Hook):
    """Shows how far the training is, and during an evaluation, how far that is."""

    def __init__(self) -> None:
        self.bar: Optional[tqdm] = None

    def start(self, name: str, total: int, done: int = 0) -> None:
        self.bar = terminal_bar(desc=name, total=total, initial=done, leave=False)

    def stop(self) -> None:
        if self.bar:
            self.bar.close()
        self.bar = None

    def before_train_iter(self, runner: Runner, **_: Any) -> None:
        if self.bar is None:
            self.start('training', runner.max_iters, runner.iter)

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def after_train_iter(self, runner: Runner, **_: Any) -> None:
        self.advance()

    def before_val_epoch(self, runner: Runner) -> None:
        self.stop()
        self.start('evaluation', len(runner.val_dataloader))

    def after_val_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        self.advance()
        if batch_idx + 1 == len(runner.val_dataloader):  # metrics print their tables
            self.stop()

    def after_run(self, runner: Runner) -> None:
        self.stop()
