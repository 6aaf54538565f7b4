"""The presets, what is compared, and the training of all that a question compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.runs import Result, Settings, run_all, tuned

from .tasks import metric_of


class Preset(NamedTuple):
    """How much work an answer is worth."""

    steps: int  # of each training
    seeds: int
    rates: tuple[float, ...]  # learning rates, of which the best is chosen
    scales: tuple[float, ...]  # sizes of the tests, as shares of the training side
    pictures: int  # of the test at the training size
    scaled_pictures: int  # of the test at each other size
    batch: int = 32


SMOKE = Preset(2, 2, (2e-3, 5e-3), (1, 2), pictures=8, scaled_pictures=4, batch=4)
PRESETS = {
    'smoke': SMOKE,
    'default': Preset(400, 3, (2e-3, 5e-3), (0.5, 1, 2, 4), 1000, 200),
    'full': Preset(1000, 5, (2e-3, 5e-3, 1e-2), (0.5, 1, 1.5, 2, 3, 4), 2000, 500),
}
# Of the question `paper`, which resizes photographs of 28 pixels.
PAPER_SCALES = tuple(side / 28 for side in (28, 36, 42, 48, 56, 64))
PAPER_PRESETS = {
    'smoke': SMOKE._replace(scales=(1, *PAPER_SCALES[3:])),
    'default': Preset(800, 5, (2e-3, 5e-3, 1e-2), PAPER_SCALES, 10_000, 1000),
    'full': Preset(4000, 5, (2e-3, 5e-3, 1e-2), PAPER_SCALES, 10_000, 2000),
}


class Variant(NamedTuple):
    """One of several that are compared."""

    position: str
    peg: tuple = ()  # fields of the PEG that differ from the defaults
    options: tuple = ()  # of the encoding
    class_token: bool = True
    paper: str = ''  # what the CPVT paper reports, top-1 of DeiT-tiny on ImageNet

    @property
    def of_model(self) -> dict[str, Any]:
        """The fields that settings of a training have, too."""
        names = 'position', 'peg', 'options', 'class_token'
        return {name: getattr(self, name) for name in names}


REPLICATED = (('zero_padding', False),)
NORMALIZED = (('normalized', True),)


class Trained(NamedTuple):
    """A variant's runs in the tables, one for each seed."""

    name: str
    variant: Variant
    runs: list[Result]

    @property
    def lr(self) -> float:
        return self.runs[0].settings.lr

    def scores(self, metric: str = 'position') -> np.ndarray:
        """A metric of each run, see `metric_of`."""
        return np.array([metric_of(run.metrics, metric) for run in self.runs])

    def data(self) -> dict[str, Any]:
        """Every run, for JSON."""
        runs = [run.data() for run in self.runs]
        return {'name': self.name, 'paper': self.variant.paper, 'runs': runs}


@dataclass
class Lab:
    """What the questions have in common.

    Args:
        preset: the amount of work.
        folder: of all files.
        seed: the first seed of the tables; the others follow.
        seeds: their number.
        workers: processes that train.
        data: folder of the photographs of the question `paper`.
    """

    preset: Preset
    folder: Path
    seed: int = 0
    seeds: int = 3
    workers: int = 1
    data: str = ''

    @property
    def used_seeds(self) -> range:
        return range(self.seed, self.seed + self.seeds)

    def tune(
        self, settings: Sequence[Settings], score: Callable[[dict[str, Any]], float]
    ) -> list[float]:
        """The learning rate of each of these, see `tuned`."""
        return tuned(settings, self.preset.rates, self.folder / 'runs', self.workers, score)

    def train(
        self, variants: dict[str, Variant], settings: Sequence[Settings], rates: Sequence[float]
    ) -> list[Trained]:
        """Train variants with every seed.

        Args:
            variants: by name.
            settings: of each variant, but for seed and learning rate.
            rates: learning rate of each variant.
        """
        todo = []
        for seed in self.used_seeds:
            for one, lr in zip(settings, rates):
                todo.append(replace(one, lr=lr, seed=seed))
        done = run_all(todo, self.folder / 'runs', self.workers)
        trained = []
        for i, (name, variant) in enumerate(variants.items()):
            of_seeds = done[i :: len(variants)]
            trained.append(Trained(name, variant, of_seeds))
        return trained
