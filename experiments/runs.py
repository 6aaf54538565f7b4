"""Trainings, each run once: its result is a file that is named by all its settings.

A part of the experiments derives from `Settings` what it trains and how it tests it. `run_all`
trains what is missing in several processes. A run depends on its settings alone, so that an
interrupted command continues where it was, with the same results.
"""

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from joblib import Parallel, delayed
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics.functional.classification import multiclass_jaccard_index
from tqdm import tqdm

from cpvt_pyramid.app.tooling.files import write_text

FORMAT = 3  # increased when the same settings give other results
TUNING_SEEDS = 500_000  # first seed of the runs that choose a learning rate; no table has them


@dataclass(frozen=True)
class Settings:
    """All that determines a run.

    Args:
        lr: the peak learning rate.
        seed: of the weights, the training pictures and the pictures of the evaluation.
        split: whose pictures the model is evaluated on: 'tuning' to choose the learning rate, or
            'test'.
        steps: of training.
        batch: pictures in a step.
        pictures: number of pictures of the evaluation.
    """

    warm_up: ClassVar[float] = 0.1  # share of the steps before the peak of the learning rate
    clip: ClassVar[float] = 1.0  # largest norm of the gradients

    lr: float = 3e-3
    seed: int = 0
    split: str = 'test'
    steps: int = 400
    batch: int = 32
    pictures: int = 1000

    @property
    def label(self) -> str:
        """What the name of the run's file begins with."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        """The untrained model."""
        raise NotImplementedError

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """The optimizers of a model's parameters, with the peak learning rate."""
        raise NotImplementedError

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of a training step, from 0."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """The metrics of a trained model in evaluation mode, for JSON."""
        raise NotImplementedError


class Result(NamedTuple):
    """A finished run."""

    settings: Settings
    metrics: dict[str, Any]  # as its settings' `evaluate` returns them
    losses: list[float]  # means over tenths of the training
    failure: str  # why the run does not count as trained, or ''
    seconds: float

    @property
    def failed(self) -> bool:
        return bool(self.failure)

    def data(self) -> dict[str, Any]:
        """For JSON, without the time that it took: only what the settings determine."""
        found = self._asdict() | {'settings': determined(self.settings)}
        found.pop('seconds')
        return found


def run(settings: Settings, folder: Path) -> Result:
    """Read the result of a run, or train if there is none yet."""
    path = path_of(settings, folder)
    if path.exists():
        found = json.loads(path.read_text())
        return Result(settings, *(found[name] for name in Result._fields[1:]))
    start = time.perf_counter()
    with one_thread():
        model, losses = train(settings)
        metrics = settings.evaluate(model)
    seconds = time.perf_counter() - start
    result = Result(settings, metrics, losses, failure_of(losses), seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = result.data() | {'seconds': seconds, 'versions': versions()}
    write_text(path, json.dumps(content, indent=1))
    return result


def path_of(settings: Settings, folder: Path) -> Path:
    """The file of a run's result."""
    text = json.dumps({'format': FORMAT, **determined(settings)}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Path(folder) / f'{settings.label}-{digest}.json'


def determined(settings: Settings) -> dict[str, Any]:
    """The fields that determine a run: all that settings compare."""
    compared = {one.name for one in fields(settings) if one.compare}
    return {name: value for name, value in asdict(settings).items() if name in compared}


def run_all(
    todo: Sequence[Settings], folder: Path, workers: int = 1, label: str = 'training'
) -> list[Result]:
    """The results of several runs, in `workers` processes of one thread each, with a progress bar;
    an interrupt ends them all."""
    unique = list(dict.fromkeys(todo))
    calls = [delayed(run)(settings, folder) for settings in unique]
    found = Parallel(n_jobs=workers, return_as='generator')(calls)
    results = dict(zip(unique, tqdm(found, label, len(calls), disable=None)))
    return [results[settings] for settings in todo]


def tuned(
    variants: Sequence[Settings],
    rates: Sequence[float],
    folder: Path,
    workers: int,
    score: Callable[[dict[str, Any]], float],
) -> list[float]:
    """The learning rate of each variant: of one small grid, the one whose metrics have the highest
    score, on the tuning split and with a seed that no table uses. The first of equals."""
    todo = []
    for variant in variants:
        for lr in rates:
            seed = variant.seed + TUNING_SEEDS
            todo.append(replace(variant, lr=lr, split='tuning', seed=seed))
    results = run_all(todo, folder, workers, 'tuning')
    chosen = []
    for start in range(0, len(results), len(rates)):
        scores = [score(result.metrics) for result in results[start : start + len(rates)]]
        chosen.append(rates[int(np.argmax(scores))])
    return chosen


# Training


def train(settings: Settings) -> tuple[nn.Module, list[float]]:
    """The trained model, in evaluation mode, and its losses: means over tenths of the training.

    One cycle of the learning rate; a loss that is not finite ends the training.
    """
    model = settings.build().train()
    optimizers = settings.optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group['params']]
    schedules = []
    for optimizer in optimizers:
        peaks = [group['lr'] for group in optimizer.param_groups]
        schedules.append(OneCycleLR(optimizer, peaks, settings.steps, pct_start=settings.warm_up))
    losses = []
    for step in range(settings.steps):
        loss = settings.loss(model, step)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, settings.clip)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
    tenths = np.array_split(losses, min(10, len(losses)))
    return model.eval(), [float(np.mean(tenth)) for tenth in tenths]


def muon_and_adamw(
    matrices: Sequence[nn.Parameter], model: nn.Module, lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the given matrices of a model, if any, AdamW for the others.

    Muon's steps are scaled to the size of AdamW's (arXiv 2502.16982), so that both have one
    learning rate. Vectors have no weight decay.
    """
    by_muon = set(matrices)
    others = [p for p in model.parameters() if p.requires_grad and p not in by_muon]
    groups = [
        dict(params=[p for p in others if p.ndim > 1]),
        dict(params=[p for p in others if p.ndim <= 1], weight_decay=0.0),
    ]
    decay = dict(lr=lr, weight_decay=weight_decay)
    adamw = torch.optim.AdamW(groups, **decay)
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, adjust_lr_fn='match_rms_adamw', **decay), adamw]


@contextmanager
def one_thread() -> Iterator[None]:
    """Make sums independent of the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def failure_of(losses: Sequence[float]) -> str:
    """Why a run counts as failed, or ''. Its metrics enter the tables all the same."""
    if not all(map(math.isfinite, losses)):
        return 'the loss is not finite'
    if losses[-1] >= losses[0]:
        return 'the loss did not fall'
    return ''


def mean_iou(predicted: Tensor, pixels: Tensor, classes: int) -> float:
    """The mean over the classes of intersection over union, of all pixels together."""
    return float(multiclass_jaccard_index(predicted, pixels, classes))


def versions() -> dict[str, str]:
    """What a result was computed with."""
    import skimage
    import sklearn

    from cpvt_pyramid import __version__

    return {
        'python': platform.python_version(),
        'cpvt_pyramid': __version__,
        'torch': torch.__version__,
        'numpy': np.__version__,
        'scikit-image': skimage.__version__,
        'scikit-learn': sklearn.__version__,
    }
