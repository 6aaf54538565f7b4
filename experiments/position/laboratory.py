"""The presets, what is compared, and the training of all that a question compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Union

import numpy as np

from cpvt_pyramid.position import COLUMNAR_POSITIONS, POSITIONS
from experiments.parallel import groups_in_parallel

from .models import COLUMN
from .runs import Result, RunSettings, Settings, mean_accuracy, run_all, tuned
from .tasks import POSITION_TASKS

RESCALE = 2.0  # as in DINOv3 (arXiv 2508.10104)


class Preset(NamedTuple):
    """How much work an answer is worth."""

    steps: int  # of each training
    seeds: int
    rates: tuple[float, ...]  # learning rates, of which each variant gets its best
    models: tuple[str, ...] = ('column',)
    batch: int = 32
    pictures: int = 1000  # of the test at the training size
    scales: tuple[float, ...] = (0.5, 1, 2, 4)
    scaled_pictures: int = 200  # of the test at each other size
    images: int = 24  # of each measurement of features
    encodings: tuple[str, ...] = ()  # all if empty
    placements: tuple[str, ...] = ()  # all if empty
    canvases: tuple[str, ...] = ()  # all if empty
    coordinates: tuple[str, ...] = ()  # all if empty
    rescales: tuple[float, ...] = (1.0, RESCALE)  # of coordinates in training


PRESETS = {
    'smoke': Preset(
        steps=2,
        seeds=2,
        rates=(2e-3, 5e-3),
        batch=4,
        pictures=8,
        scales=(1, 2),
        scaled_pictures=4,
        images=4,
        encodings=('none', 'peg'),
        placements=('after block 0', 'random and frozen'),
        canvases=('peg', 'peg, random canvas'),
        coordinates=('learned table', 'FIRE'),
    ),
    'default': Preset(steps=400, seeds=3, rates=(2e-3, 5e-3)),
    'full': Preset(
        steps=1000,
        seeds=5,
        rates=(2e-3, 5e-3, 1e-2),
        pictures=2000,
        scales=(0.5, 1, 1.5, 2, 3, 4),
        scaled_pictures=500,
        coordinates=('RoPE', 'FIRE'),
        rescales=(1.0,),
    ),
    'pyramid': Preset(
        steps=400,
        seeds=5,
        rates=(2e-3, 5e-3),
        models=('pyramid',),
        encodings=(
            'none',
            'learned',
            'peg',
            'peg, replicated border',
            'rope, normalized',
            'learned+peg',
        ),
        coordinates=('learned table', 'RoPE', 'RoPE and PEG'),
        rescales=(1.0,),
    ),
}

# Of the questions about photographs; `paper` resizes those of 28 pixels
PAPER_SCALES = tuple(side / 28 for side in (28, 36, 42, 48, 56, 64))
PHOTO_PRESETS = {
    'smoke': Preset(
        steps=2,
        seeds=2,
        rates=(2e-3, 5e-3),
        batch=4,
        pictures=8,
        scales=(1, *PAPER_SCALES[3:]),
        scaled_pictures=4,
    ),
    'default': Preset(
        steps=800,
        seeds=5,
        rates=(2e-3, 5e-3, 1e-2),
        pictures=10_000,
        scales=PAPER_SCALES,
        scaled_pictures=1000,
    ),
    'full': Preset(
        steps=4000,
        seeds=5,
        rates=(2e-3, 5e-3, 1e-2),
        pictures=10_000,
        scales=PAPER_SCALES,
        scaled_pictures=2000,
    ),
}


class Variant(NamedTuple):
    """One of several that are compared."""

    position: str
    peg: tuple = ()  # fields of the PEG that differ from the defaults
    options: tuple = ()  # of the encoding
    class_token: bool = True
    grid: Union[int, tuple[int, ...]] = 6  # of the training, see `RunSettings`
    paper: str = ''  # what the CPVT paper reports, top-1 of DeiT-tiny on ImageNet

    @property
    def of_model(self) -> dict[str, Any]:
        """The fields that settings of a training have, too."""
        names = 'position', 'peg', 'options', 'class_token'
        return {name: getattr(self, name) for name in names}


# CPVT (arXiv 2102.10882), as in `PEGConfig` and experiments/position/findings/protocol.md
PAPER = {'none': '68.2', 'learned': '72.2', 'sincos': '72.3', 'relative': '70.5', 'peg': '72.4'}
REPLICATED = (('zero_padding', False),)
NORMALIZED = (('normalized', True),)
# No position first, then what the paper compares, then the others.
ORDER = dict.fromkeys(('none', *PAPER, *POSITIONS))
ENCODINGS = {
    **{name: Variant(name, paper=PAPER.get(name, '')) for name in ORDER if name in POSITIONS},
    'peg, replicated border': Variant('peg', REPLICATED, paper='70.5'),
    'rope, normalized': Variant('rope', options=NORMALIZED),
    'rope+peg': Variant('rope+peg'),
    'learned+peg': Variant('learned+peg', paper='72.9'),
}

# What might carry a PEG's position over to larger canvases
EVERY_BLOCK = (('after', 'all'),)
RANDOM = (6, 3, 4, 5, 7, 8, 9)  # sides of training pictures, in cells
CANVASES = {
    'peg': Variant('peg'),
    'peg after every block': Variant('peg', EVERY_BLOCK),
    'peg of 11x11': Variant('peg', (('kernel_size', 11),)),
    'peg, random canvas': Variant('peg', grid=RANDOM),
    'peg after every block, random canvas': Variant('peg', EVERY_BLOCK, grid=RANDOM),
    'rope, normalized': Variant('rope', options=NORMALIZED),
    'rope+peg, normalized': Variant('rope+peg', options=NORMALIZED),
    'fire': Variant('fire'),
    'fire+peg': Variant('fire+peg'),
}


def placements(depth: int) -> dict[str, Variant]:
    """CPVT's ablations of the PEG, for a columnar model with fewer blocks than the paper's 12.

    Args:
        depth: number of blocks. "Blocks 0 to 5", the first half, are the first half here, and block
            3, after a third, is the one after a third, at least block 1.
    """
    third = max(1, depth // 3)
    half = tuple(range(depth // 2))
    separable = (('conv', 'separable'), ('layers', 4))
    pointwise = (('after', 'all'), ('conv', 'dense'), ('kernel_size', 1))
    return {
        'no position': Variant('none', paper='68.2'),
        'learned table': Variant('learned', paper='72.2'),
        'before block 0': Variant('peg', (('after', -1),), paper='70.6'),
        'before block 0, kernel covers the map': Variant(
            'peg', (('after', -1), ('kernel_size', 11)), paper='72.5 (27x27)'
        ),
        'after block 0': Variant('peg', paper='72.4'),
        f'after block {third}': Variant('peg', (('after', third),), paper='about 72.4 (3)'),
        'after each of the first half': Variant('peg', (('after', half),), paper='73.4 (0 to 5)'),
        'four separable after block 0': Variant('peg', separable, paper='72.9'),
        'learned table and PEG': Variant('learned+peg', paper='72.9'),
        'replicated border': Variant('peg', REPLICATED, paper='70.5'),
        'queries and keys only': Variant('peg', (('qk_only', True),), paper='71.3'),
        'random and frozen': Variant('peg', (('frozen', True),), paper='71.3'),
        '1x1 after every block (control)': Variant('peg', pointwise, paper='68.6'),
        'first half, GAP': Variant(
            'peg', (('after', half),), class_token=False, paper='74.9 (0 to 5)'
        ),
        'no position, GAP': Variant('none', class_token=False),
        'learned table, GAP': Variant('learned', class_token=False),
    }


class Trained(NamedTuple):
    """A variant's runs in the tables, one for each seed."""

    name: str
    variant: Variant
    runs: list[Result]

    @property
    def lr(self) -> float:
        return self.runs[0].settings.lr

    def scores(self, metric: str = 'position') -> np.ndarray:
        """A metric of each run; 'position' is the mean accuracy of all tasks that need position."""
        return np.array([metric_of(run.metrics, metric) for run in self.runs])


def metric_of(metrics: dict[str, float], name: str) -> float:
    if name == 'position':
        return float(np.mean([metrics[task] for task in POSITION_TASKS]))
    return metrics[name]


@dataclass
class Lab:
    """What the questions have in common.

    Args:
        preset: the amount of work.
        folder: of all files.
        seed: the first seed of the tables; the others follow.
        seeds: their number.
        workers: processes that train.
        device: of the training, 'cpu' or 'cuda'.
        data: folder of the photographs of the questions about them.
        finished: whether the question `paper` only reads the runs that there are.
    """

    preset: Preset
    folder: Path
    seed: int = 0
    seeds: int = 3
    workers: int = 1
    device: str = 'cpu'
    data: str = ''
    finished: bool = False

    @property
    def runs_folder(self) -> Path:
        return self.folder / 'runs'

    def settings(self, variant: Variant, model: str = 'column') -> RunSettings:
        """The settings of a variant's training, but for seed and learning rate."""
        preset = self.preset
        return RunSettings(
            model=model,
            **variant.of_model,
            seed=self.seed,
            steps=preset.steps,
            batch=preset.batch,
            grid=variant.grid,
            pictures=preset.pictures,
        )

    def train(self, variants: dict[str, Variant], model: str = 'column') -> list[Trained]:
        """Tune and train variants, each in the same way."""
        settings = [self.settings(variant, model) for variant in variants.values()]
        return self.train_with(variants, settings)

    def train_with(
        self,
        variants: dict[str, Variant],
        settings: Sequence[Settings],
        score: Callable[[dict[str, float]], float] = mean_accuracy,
    ) -> list[Trained]:
        """As `train`, with settings of each variant, but for seed and learning rate, which gets
        the metrics of the highest score."""
        rates = tuned(
            settings, self.preset.rates, self.runs_folder, self.workers, self.device, score
        )
        todo = []
        for seed in range(self.seed, self.seed + self.seeds):
            for one, lr in zip(settings, rates):
                todo.append(replace(one, lr=lr, seed=seed))
        done = run_all(todo, self.runs_folder, self.workers, self.device)
        trained = []
        for i, (name, variant) in enumerate(variants.items()):
            of_seeds = done[i :: len(variants)]
            trained.append(Trained(name, variant, of_seeds))
        return trained

    def measure(
        self, trained: Sequence[Trained], label: str, function: Callable, *arguments: Any
    ) -> dict[str, list]:
        """What a function returns for each run and these arguments, by variant and seed."""
        jobs = {}
        for one in trained:
            jobs[one.name] = [(function, (run, *arguments)) for run in one.runs]
        return groups_in_parallel(jobs, self.workers, label)

    def encodings(self, model: str = 'column') -> dict[str, Variant]:
        """The encodings to compare; the pyramid lacks those of equal queries and keys."""
        chosen = self.preset.encodings or ENCODINGS
        found = {}
        for name, variant in ENCODINGS.items():
            is_possible = model == 'column' or variant.position not in COLUMNAR_POSITIONS
            if is_possible and name in chosen:
                found[name] = variant
        return found

    def canvases(self) -> dict[str, Variant]:
        """The variants to test on larger canvases."""
        names = self.preset.canvases or CANVASES
        return {name: CANVASES[name] for name in names}

    def placements(self) -> dict[str, Variant]:
        """The placements of a PEG to compare."""
        found = placements(COLUMN.depth)
        chosen: Sequence[str] = self.preset.placements or list(found)
        return {name: found[name] for name in chosen}
