"""How long a training takes, while it can still be changed at little cost."""

import time
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import Runner

from ..tooling.report import amount, duration

MEASURED = 20  # seconds of iterations that an estimate needs
LONG = 3600  # seconds
TIME = 'train/time'  # of an iteration in seconds, as mmengine's IterTimerHook logs it


class DurationHook(Hook):
    """Logs once, after the first iterations, how long the training takes. It leaves out the first
    iteration, which prepares much, and the evaluations."""

    priority = 'LOWEST'  # after IterTimerHook

    def __init__(self) -> None:
        self.iterations = 0
        self.seconds = 0.0
        self.is_done = False

    def after_train_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        self.iterations += 1
        if self.is_done or self.iterations == 1 or TIME not in runner.message_hub.log_scalars:
            return
        self.seconds += runner.message_hub.get_scalar(TIME).current()
        if self.seconds < MEASURED:
            return
        self.is_done = True
        each = self.seconds / (self.iterations - 1)
        left = runner.max_iters - runner.iter - 1
        end = time.strftime('%d %b %H:%M', time.localtime(time.time() + each * left))
        line = (
            f'this training ends in about {duration(each * left)}, {end}, without the evaluations: '
            f'{amount(left, "iteration")} of {each:.2g} s are left'
        )
        if each * left > LONG:
            line += (
                '. If that is too long: a smaller model or smaller images, or fewer epochs (cpvt '
                'new-config --base, --epochs)'
            )
        runner.logger.info(line)
