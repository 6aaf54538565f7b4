"""Random numbers that depend on the seed of a training and the iteration alone."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner


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
        batches = getattr(runner.train_loop, 'dataloader_iterator', None)
        if batches is not None and runner.iter and not hasattr(batches, 'skip_iter'):
            # mmengine 0.10.7 now loads all earlier batches, which draws random numbers.
            seed = functools.partial(self.seed_loading, runner)
            runner.train_loop.dataloader_iterator = SeededBatches(batches, seed)

    def before_train_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        seed_generators(runner.seed, runner.rank, runner.iter, 1)

    def after_train_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        self.seed_loading(runner, runner.iter + 1)

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        self.seed_loading(runner, runner.iter)

    def seed_loading(self, runner: Runner, iteration: int) -> None:
        """Before the batch of an iteration is loaded."""
        seed_generators(runner.seed, runner.rank, iteration, 0)


class SeededBatches:
    """Batches from the first iteration on; `seed` is called with the iteration before each one is
    loaded."""

    def __init__(self, batches: Iterator[Any], seed: Callable[[int], None]) -> None:
        self.batches = batches
        self.seed = seed
        self.iteration = 0

    def __iter__(self) -> 'SeededBatches':
        return self

    def __next__(self) -> Any:
        self.seed(self.iteration)
        self.iteration += 1
        return next(self.batches)


def seed_generators(*numbers: int) -> None:
    """Seed all global random generators with these numbers."""
    seeds = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
    torch.manual_seed(int(seeds[2]))
