"""What a terminal shows of a training: a bar below the lines of the log."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest

from cpvt_pyramid.runner.training import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Let stdout and stderr be one terminal from here on; returns what it shows."""
    shown = Terminal()
    monkeypatch.setattr(sys, 'stdout', shown)
    monkeypatch.setattr(sys, 'stderr', shown)
    return shown


def runner(hooks: list) -> SimpleNamespace:
    logger = logging.Logger('training')
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return SimpleNamespace(
        logger=logger,
        register_hook=lambda hook, priority: hooks.append(hook),
        max_iters=6,
        iter=2,
        val_dataloader=range(2),
    )


def test_a_bar_with_the_remaining_time(monkeypatch):
    screen, hooks = terminal(monkeypatch), []
    run = runner(hooks)
    progress.show_progress(run)
    (hook,) = hooks
    for run.iter in range(2, 6):  # resumed after 2 of 6
        hook.before_train_iter(run)
        hook.after_train_iter(run)
        if run.iter == 3:
            run.logger.warning('a line')
    hook.before_val_epoch(run)
    for batch in range(2):
        hook.after_val_iter(run, batch)
    assert hook.bar is None  # when metrics print their tables
    hook.after_run(run)
    shown = screen.getvalue()
    assert 'training:  33%' in shown and '2/6 [00:00<' in shown and 'evaluation:   0%' in shown
    (line,) = [line for line in shown.splitlines() if 'a line' in line]
    assert line.split('\r')[-1] == 'a line'  # on a line of its own


def test_a_log_gets_no_bar():
    hooks = []
    progress.show_progress(runner(hooks))  # pytest captures what is printed
    assert hooks == []


def test_other_processes_show_none(monkeypatch):
    terminal(monkeypatch)
    monkeypatch.setenv('RANK', '1')
    hooks = []
    progress.show_progress(runner(hooks))
    assert hooks == []
