"""Training of the lab's models, each run once: its result is a file named by all its settings."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Optional, Union

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou

from cpvt_pyramid.tooling.files import atomic_write, write_text
from experiments.parallel import in_parallel
from experiments.training import (
    determined,
    digest,
    failure_of,
    mean_iou,
    one_thread,
    optimize,
    versions,
)

from .models import CELLS, PIXEL_CLASSES, READINGS, Answers, LabModel
from .scenes import Scenes, draw_scenes
from .tasks import TASKS, answers_of

BOX_OVERLAP = 0.5  # of a detection that counts
LEAST_SCORE = 0.01  # of a detection
BATCH_TOKENS = 64 * 1024  # in evaluation
WEIGHT_DECAY = 0.02


@dataclass(frozen=True)
class Settings:
    """All that determines a run, whatever its pictures and its model are.

    Args:
        model: the kind of model.
        position: as in `Column`.
        peg: fields of the `PEGConfig` that differ from the defaults, as (name, value) pairs.
        options: of the encoding, as (name, value) pairs.
        class_token: whether the classifiers read a class token instead of the mean of the map.
        lr: the peak learning rate.
        seed: of the weights, the training pictures and the pictures of the evaluation.
        split: whose pictures the model is evaluated on: 'tuning' to choose the learning rate, or
            'test'.
        steps: of training.
        batch: pictures in a step.
        pictures: number of pictures of the evaluation.
    """

    model: str = 'column'
    position: str = 'peg'
    peg: tuple = ()
    options: tuple = ()
    class_token: bool = True
    lr: float = 3e-3
    seed: int = 0
    split: str = 'test'
    steps: int = 400
    batch: int = 32
    pictures: int = 1000

    def build(self) -> nn.Module:
        """The untrained model."""
        raise NotImplementedError

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """The optimizers of a model's parameters, with the peak learning rate."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(
            parameters, self.lr, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY, fused=True
        )
        return [adamw]

    def loss(self, model: nn.Module, step: int, device: str) -> Tensor:
        """The loss of a training step, from 0."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The metrics of a trained model in evaluation mode."""
        raise NotImplementedError


@dataclass(frozen=True)
class RunSettings(Settings):
    """All that determines a run with the pictures of `scenes`.

    Args:
        model: 'column' or 'pyramid'.
        grid: side of the training pictures in cells; or several, of which each step draws one, and
            the first is that of the evaluation.
    """

    grid: Union[int, tuple[int, ...]] = 6

    def build(self) -> LabModel:
        """The untrained model."""
        torch.manual_seed(self.seed)
        return LabModel(
            self.model,
            self.position,
            peg=dict(self.peg) or None,
            position_options=dict(self.options) or None,
            class_token=self.class_token,
            side=self.grids[0] * CELLS[self.model],
        )

    @property
    def grids(self) -> tuple[int, ...]:
        return (self.grid,) if isinstance(self.grid, int) else self.grid

    def draw(
        self,
        split: str,
        count: int,
        stream: int,
        grid: Optional[tuple[int, int]] = None,
        inset: int = 0,
    ) -> Scenes:
        """Pictures of this run.

        Args:
            split: 'train', 'tuning' or 'test'.
            count: number of pictures.
            stream: counts the batches; 0 for the pictures of the evaluation.
            grid: height and width in cells; by default those of the run.
            inset: cells between every edge and the digits.
        """
        seed = self.seed * 1_000_003 + stream
        if grid is None:
            side = self.grids[0]
            if stream:
                side = int(np.random.default_rng(seed).choice(self.grids))
            grid = (side, side)
        return draw_scenes(split, count, seed, grid, CELLS[self.model], inset)

    def loss(self, model: LabModel, step: int, device: str) -> Tensor:
        """The loss of a training step, from 0."""
        scenes = self.draw('train', self.batch, stream=1 + step)
        return loss_of(model(scenes.image.to(device)), scenes, model.cell)

    def evaluate(self, model: LabModel) -> dict[str, float]:
        """As `evaluate_answers`, on pictures of the size of the training."""
        return evaluate_answers(model, self.draw(self.split, self.pictures, stream=0))


class Result(NamedTuple):
    """A finished run."""

    settings: Settings
    metrics: dict[str, float]  # as its settings' `evaluate` returns them
    losses: list[float]  # means over tenths of the training
    failure: str  # why the run does not count as trained, or ''
    seconds: float
    path: Path  # the file of this result

    @property
    def failed(self) -> bool:
        return bool(self.failure)

    def load(self) -> nn.Module:
        """The trained model, in evaluation mode."""
        model = self.settings.build()
        model.load_state_dict(torch.load(self.path.with_suffix('.pt'), weights_only=True))
        return model.eval()


def path_of(settings: Settings, folder: Path) -> Path:
    """The file of a run's result."""
    label = f'{settings.model}-{settings.position}'
    return Path(folder) / f'{digest(settings, label)}.json'


def run(settings: Settings, folder: Path, device: str = 'cpu') -> Result:
    """Read the result of a run, or train if there is none yet.

    A run that was killed starts again and gives what it would have given: it depends on its
    settings alone. The file of the result is written last and at once.
    """
    path = path_of(settings, folder)
    if path.exists():
        found = json.loads(path.read_text())
        keys = ('metrics', 'losses', 'failure', 'seconds')
        return Result(settings, *(found[key] for key in keys), path)
    start = time.perf_counter()
    with one_thread():
        model, losses = train(settings, device)
        metrics = settings.evaluate(model)
    seconds = time.perf_counter() - start
    result = Result(settings, metrics, losses, failure_of(losses), seconds, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path.with_suffix('.pt')) as partial:
        torch.save(model.state_dict(), partial)
    content = {**result._asdict(), 'settings': determined(settings), 'path': path.name}
    content |= versions()
    write_text(path, json.dumps(content, indent=1))
    return result


def run_all(
    todo: Sequence[Settings],
    folder: Path,
    workers: int = 1,
    device: str = 'cpu',
    label: str = '',
) -> list[Result]:
    """The results of several runs, trained in `workers` processes of one thread each."""
    unique = list(dict.fromkeys(todo))
    jobs = [(run, (settings, folder, device)) for settings in unique]
    results = dict(zip(unique, in_parallel(jobs, workers, label)))
    return [results[settings] for settings in todo]


def train(settings: Settings, device: str = 'cpu') -> tuple[nn.Module, list[float]]:
    """The trained model, in evaluation mode, and its losses: means over tenths of the training."""
    model = settings.build().to(device)

    def loss_at(step: int) -> Tensor:
        return settings.loss(model, step, device)

    optimizers = settings.optimizers(model)
    losses = optimize(optimizers, loss_at, settings.steps, warm_up=0.1, clip=1.0)
    return model.cpu().eval(), losses


def loss_of(answers: Answers, scenes: Scenes, cell: int) -> Tensor:
    """The sum of the losses of all heads; a classifier that guesses has about 1."""
    device = answers.readings.device
    labels = answers_of(scenes)
    loss = answers.readings.new_zeros(())
    for name, logits in answers.logits.items():
        target = torch.from_numpy(labels[name]).to(device)
        loss = loss + F.cross_entropy(logits, target) / math.log(TASKS[name].classes)

    readings = torch.zeros(answers.readings.shape[:3], dtype=torch.long)
    picture = torch.arange(len(readings))[:, None]
    readings[picture, scenes.rows, scenes.columns] = scenes.digits + 1
    weight = torch.tensor([0.1] + [1.0] * (READINGS - 1), device=device)  # most tokens show none
    loss = loss + F.cross_entropy(
        answers.readings.flatten(0, 2), readings.flatten().to(device), weight
    )
    boxes = answers.boxes[picture, scenes.rows, scenes.columns]
    corner = torch.stack([scenes.columns, scenes.rows] * 2, dim=2)
    loss = loss + F.l1_loss(boxes, (scenes.boxes / cell - corner).to(device))

    pixels = at_size(scenes.pixels, answers.pixels.shape[2:]).to(device)
    weight = torch.tensor([0.1, 1.0, 1.0], device=device)
    return loss + F.cross_entropy(answers.pixels, pixels, weight)


def at_size(pixels: Tensor, size: Sequence[int]) -> Tensor:
    """A label map (B, H, W) of another size, by the nearest pixel."""
    if pixels.shape[1:] == tuple(size):
        return pixels
    return F.interpolate(pixels[:, None].float(), tuple(size), mode='nearest-exact')[:, 0].long()


@torch.no_grad()
def answer(model: LabModel, image: Tensor, valid: Optional[Tensor] = None) -> Answers:
    """The answers to many pictures, batch by batch."""
    tokens = math.prod(math.ceil(side / model.cell) for side in image.shape[2:])
    fitting_attention = BATCH_TOKENS // tokens**2 * 8
    fitting_features = BATCH_TOKENS // tokens // 16
    count = max(1, min(len(image), fitting_attention, fitting_features))
    parts = []
    for start in range(0, len(image), count):
        sizes = None if valid is None else valid[start : start + count]
        parts.append(model(image[start : start + count], sizes))
    return Answers(
        logits={name: torch.cat([part.logits[name] for part in parts]) for name in TASKS},
        readings=torch.cat([part.readings for part in parts]),
        boxes=torch.cat([part.boxes for part in parts]),
        pixels=torch.cat([part.pixels for part in parts]),
    )


def evaluate_answers(
    model: LabModel,
    scenes: Scenes,
    size: Optional[tuple[int, int]] = None,
    pad: Optional[tuple[int, int]] = None,
    masked: bool = True,
) -> dict[str, float]:
    """Accuracy of every task, of the tokens' readings, mIoU of the segmentor, AP of the detector.

    Args:
        model: in evaluation mode.
        scenes: the pictures.
        size: height and width in pixels that the pictures are resized to.
        pad: height and width in pixels that the batch is then padded to, at the right and bottom.
        masked: whether the model is told the pictures' sizes in a padded batch.
    """
    image = scenes.image
    drawn = tuple(image.shape[2:])
    inside = size or drawn
    if inside != drawn:
        image = F.interpolate(image, inside, mode='bilinear', antialias=True)
    valid = None
    if pad is not None:
        image = F.pad(image, (0, pad[1] - inside[1], 0, pad[0] - inside[0]))
        if masked:
            valid = torch.tensor([inside] * len(image))
    answers = answer(model, image, valid)

    labels = answers_of(scenes)
    metrics = {}
    for name, logits in answers.logits.items():
        is_right = logits.argmax(1).numpy() == labels[name]
        metrics[name] = float(np.mean(is_right))

    whole = [model.cell * tokens for tokens in answers.readings.shape[1:3]]
    predicted = at_size(answers.pixels.argmax(1), whole)[:, : inside[0], : inside[1]]
    metrics['mIoU'] = mean_iou(predicted, at_size(scenes.pixels, inside), PIXEL_CLASSES)

    # What a model finds in the padding is no answer: detectors clip boxes to the image.
    rows, columns = (math.ceil(side / model.cell) for side in inside)
    answers = answers._replace(
        readings=answers.readings[:, :rows, :columns], boxes=answers.boxes[:, :rows, :columns]
    )
    scale_y, scale_x = (new / old for new, old in zip(inside, drawn))
    truth = scenes.boxes * torch.tensor([scale_x, scale_y, scale_x, scale_y])
    scores, boxes = token_detections(answers, model.cell)
    metrics['AP'] = digit_precision(scores, boxes, truth, scenes.digits)
    return metrics


def token_detections(answers: Answers, cell: int) -> tuple[Tensor, Tensor]:
    """Scores (B, 10, h * w) and boxes (B, h * w, 4) in pixels. As in CenterNet (arXiv 1904.07850),
    a token keeps its score where no neighbour has a higher one."""
    scores = answers.readings.softmax(-1)[..., 1:].permute(0, 3, 1, 2)
    scores = scores * (scores == F.max_pool2d(scores, 3, 1, 1))
    h, w = answers.readings.shape[1:3]
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing='ij')
    corner = torch.stack([columns, rows] * 2, dim=-1)
    return scores.flatten(2), ((answers.boxes + corner) * cell).flatten(1, 2)


def digit_precision(scores: Tensor, boxes: Tensor, truth: Tensor, digits: Tensor) -> float:
    """AP at an overlap of 0.5, averaged over the ten digits: the area under the precision curve,
    made non-increasing, as in PASCAL VOC since 2010.

    torchmetrics has COCO's sum over 101 recalls instead, which differs by about 0.1 points and
    takes a hundred times as long; with 2001 recalls it agrees, see the tests.

    Args:
        scores: (B, 10, N) of each digit and candidate.
        boxes: (B, N, 4) of the candidates.
        truth: (B, 3, 4), the boxes that are there; a picture shows a digit at most once.
        digits: (B, 3), what is in them.
    """
    found = []
    for digit in range(10):
        here = digits == digit
        present = here.any(1)
        if not present.any():
            continue
        target = torch.where(here[..., None], truth, 0).sum(1)  # (B, 4)
        overlap = box_iou(boxes, target[:, None])[..., 0]
        match = (overlap >= BOX_OVERLAP) & present[:, None]
        score = scores[:, digit]
        # The match with the highest score counts, others are false.
        best = torch.where(match, score, -1).argmax(1, keepdim=True)
        correct = torch.zeros_like(match).scatter(1, best, match.gather(1, best))
        kept = score > LEAST_SCORE
        order = score[kept].argsort(descending=True, stable=True)
        found.append(area_under_precision(correct[kept][order].double(), int(present.sum())))
    return float(np.mean(found))


def area_under_precision(correct: Tensor, objects: int) -> float:
    """The average precision of detections, from the highest score to the lowest.

    Args:
        correct: (N,) 1 where a detection is right, else 0.
        objects: number of objects that could be found.
    """
    if not len(correct):
        return 0.0
    precision = correct.cumsum(0) / torch.arange(1, len(correct) + 1)
    non_increasing = precision.flip(0).cummax(0)[0].flip(0)
    return float((non_increasing * correct).sum() / objects)


# The tuning protocol


def mean_accuracy(metrics: dict[str, float]) -> float:
    """Over all tasks."""
    return float(np.mean([metrics[task] for task in TASKS]))


def tuned(
    variants: Sequence[Settings],
    rates: Sequence[float],
    folder: Path,
    workers: int = 1,
    device: str = 'cpu',
    score: Callable[[dict[str, float]], float] = mean_accuracy,
) -> list[float]:
    """The learning rate of each variant: of one small grid, the one whose metrics have the highest
    score, on the tuning split and with a seed that no table uses. The first of equals."""
    todo = [one for variant in variants for one in tuning_runs(variant, rates)]
    results = run_all(todo, folder, workers, device, 'tuning')
    chosen = []
    for start in range(0, len(results), len(rates)):
        scores = [score(result.metrics) for result in results[start : start + len(rates)]]
        chosen.append(rates[int(np.argmax(scores))])
    return chosen


def tuning_runs(variant: Settings, rates: Sequence[float]) -> list[Settings]:
    """The runs that a variant's learning rate is chosen by, one for each rate."""
    seed = tuning_seed(variant.seed)
    return [replace(variant, lr=lr, split='tuning', seed=seed) for lr in rates]


def tuning_seed(seed: int) -> int:
    """A seed that differs from those of the tables."""
    return seed + 500_000
