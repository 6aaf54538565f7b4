"""Training of the lab's models, each run once: its result is a file named by all its settings."""

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Union

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou

from cpvt_pyramid.tooling.files import atomic_write, write_text

from .models import CELLS, READINGS, Answers, LabModel
from .parallel import in_parallel
from .scenes import Scenes, draw_scenes
from .tasks import TASKS, answers_of

FORMAT = 2  # increased when the same settings give other results
BOX_OVERLAP = 0.5  # of a detection that counts
BATCH_TOKENS = 64 * 1024  # in evaluation


@dataclass(frozen=True)
class RunSettings:
    """All that determines a run.

    Args:
        model: 'column' or 'pyramid'.
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
        grid: side of the training pictures in cells; or several, of which each step draws one, and
            the first is that of the evaluation.
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
    grid: Union[int, tuple[int, ...]] = 6
    pictures: int = 1000

    def build(self) -> LabModel:
        """The untrained model."""
        torch.manual_seed(self.seed)
        side = self.grids[0] * CELLS[self.model]
        peg, options = dict(self.peg) or None, dict(self.options) or None
        return LabModel(self.model, self.position, peg, options, self.class_token, side)

    @property
    def grids(self) -> tuple[int, ...]:
        return (self.grid,) if isinstance(self.grid, int) else self.grid

    def draw(self, split: str, count: int, stream: int, grid: Any = None, inset: int = 0) -> Scenes:
        """Pictures of this run; `stream` counts the batches, 0 for those of the evaluation."""
        seed = self.seed * 1_000_003 + stream
        side = np.random.default_rng(seed).choice(self.grids) if stream else self.grids[0]
        grid = grid or (int(side), int(side))
        return draw_scenes(split, count, seed, grid, CELLS[self.model], inset)


class Result(NamedTuple):
    """A finished run."""

    settings: RunSettings
    metrics: dict[str, float]  # accuracy of each task and 'reading', 'mIoU', 'AP'
    losses: list[float]  # means over tenths of the training
    failure: str  # why the run does not count as trained, or ''
    seconds: float
    path: Path  # the file of this result

    @property
    def failed(self) -> bool:
        return bool(self.failure)

    def load(self) -> LabModel:
        """The trained model, in evaluation mode."""
        model = self.settings.build()
        model.load_state_dict(torch.load(self.path.with_suffix('.pt'), weights_only=True))
        return model.eval()


def run(settings: RunSettings, folder: Path, device: str = 'cpu') -> Result:
    """Read the result of a run, or train if there is none yet.

    A run that was killed starts again and gives what it would have given: it depends on its
    settings alone. The file of the result is written last and at once.
    """
    path = Path(folder) / f'{digest(settings)}.json'
    if path.exists():
        found = json.loads(path.read_text())
        keys = ('metrics', 'losses', 'failure', 'seconds')
        return Result(settings, *(found[key] for key in keys), path)
    start = time.perf_counter()
    with one_thread():
        model, losses = train(settings, device)
        scenes = settings.draw(settings.split, settings.pictures, stream=0)
        metrics = evaluate_answers(model, scenes)
    result = Result(
        settings, metrics, losses, failure_of(losses), time.perf_counter() - start, path
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path.with_suffix('.pt')) as partial:
        torch.save(model.state_dict(), partial)
    text = json.dumps(
        {**result._asdict(), 'settings': asdict(settings), 'path': path.name, **versions()},
        indent=1,
    )
    write_text(path, text)
    return result


def run_all(
    todo: Sequence[RunSettings],
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(settings: RunSettings, device: str = 'cpu') -> tuple[LabModel, list[float]]:
    """The trained model, in evaluation mode, and its losses: means over tenths of the training."""
    model = settings.build().to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, settings.lr, betas=(0.9, 0.99), weight_decay=0.02, fused=True
    )

    def loss_at(step: int) -> Tensor:
        scenes = settings.draw('train', settings.batch, stream=1 + step)
        return loss_of(model(scenes.image.to(device)), scenes, model.cell)

    losses = optimize(optimizer, loss_at, settings.steps, warm_up=0.1, clip=1.0)
    return model.cpu().eval(), losses


def optimize(
    optimizer: torch.optim.Optimizer,
    loss_at: Callable[[int], Tensor],
    steps: int,
    warm_up: float,
    clip: float,
) -> list[float]:
    """Train for one cycle of the learning rate; returns the losses, means over tenths of the steps.

    Args:
        optimizer: with the peak learning rate.
        loss_at: the loss of a step, from 0.
        steps: their number; a loss that is not finite ends the training.
        warm_up: share of the steps before the peak.
        clip: largest norm of the gradients.
    """
    (group,) = optimizer.param_groups
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, group['lr'], steps, pct_start=warm_up)
    losses = []
    for step in range(steps):
        loss = loss_at(step)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(group['params'], clip)
        optimizer.step()
        schedule.step()
    return [float(np.mean(part)) for part in np.array_split(losses, min(10, len(losses)))]


def failure_of(losses: Sequence[float]) -> str:
    """Why a run counts as failed. Its metrics enter the tables all the same."""
    if not all(map(math.isfinite, losses)):
        return 'the loss is not finite'
    return '' if losses[-1] < losses[0] else 'the loss did not fall'


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
    tokens = math.prod(-(-side // model.cell) for side in image.shape[2:])
    count = max(1, min(len(image), BATCH_TOKENS // tokens**2 * 8, BATCH_TOKENS // tokens // 16))
    parts = [
        model(image[i : i + count], None if valid is None else valid[i : i + count])
        for i in range(0, len(image), count)
    ]
    tasks = {name: torch.cat([part.logits[name] for part in parts]) for name in TASKS}
    return Answers(tasks, *(torch.cat(p) for p in zip(*(part[1:] for part in parts))))


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
    image, scale = scenes.image, (1.0, 1.0)
    if size is not None and size != tuple(image.shape[2:]):
        scale = tuple(new / old for new, old in zip(size, image.shape[2:]))
        image = F.interpolate(image, size, mode='bilinear', antialias=True)
    inside = tuple(image.shape[2:])
    valid = None
    if pad is not None:
        image = F.pad(image, (0, pad[1] - inside[1], 0, pad[0] - inside[0]))
        valid = torch.tensor([inside] * len(image)) if masked else None
    answers = answer(model, image, valid)
    # What a model finds in the padding is no answer: detectors clip boxes to the image.
    tokens = [slice(-(-side // model.cell)) for side in inside]
    whole = [model.cell * n for n in answers.readings.shape[1:3]]
    answers = answers._replace(
        readings=answers.readings[:, tokens[0], tokens[1]],
        boxes=answers.boxes[:, tokens[0], tokens[1]],
    )
    labels = answers_of(scenes)
    metrics = {
        name: float(np.mean(logits.argmax(1).numpy() == labels[name]))
        for name, logits in answers.logits.items()
    }
    pixels = answers.pixels.argmax(1)
    pixels = at_size(pixels, whole)[:, : inside[0], : inside[1]]
    metrics['mIoU'] = mean_iou(pixels, at_size(scenes.pixels, inside))
    boxes = scenes.boxes * torch.tensor([scale[1], scale[0]] * 2)
    metrics['AP'] = digit_precision(*token_detections(answers, model.cell), boxes, scenes.digits)
    return metrics


def mean_iou(predicted: Tensor, pixels: Tensor, classes: Optional[int] = None) -> float:
    """The mean over the classes of intersection over union, of all pixels together.

    Args:
        predicted: classes of pixels.
        pixels: their true classes.
        classes: their number; None: up to the largest in `pixels`.
    """
    classes = classes or int(pixels.max()) + 1
    pairs = torch.bincount((pixels * classes + predicted).flatten(), minlength=classes**2)
    matrix = pairs.view(classes, classes).double()
    union = matrix.sum(0) + matrix.sum(1) - matrix.diag()
    return float((matrix.diag() / union.clamp(min=1)).mean())


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
        kept = score > 0.01
        order = score[kept].argsort(descending=True, stable=True)
        correct = correct[kept][order].double()
        precision = correct.cumsum(0) / torch.arange(1, len(correct) + 1)
        precision = precision.flip(0).cummax(0)[0].flip(0) if len(precision) else precision
        found.append(float((precision * correct).sum() / present.sum()))
    return float(np.mean(found))


# Files


def digest(settings: Any, **more: Any) -> str:
    """A file name for what settings determine."""
    text = json.dumps({'format': FORMAT, **asdict(settings), **more}, sort_keys=True)
    return f'{settings.model}-{settings.position}-{hashlib.sha256(text.encode()).hexdigest()[:16]}'


def versions() -> dict[str, dict[str, str]]:
    """What a result was computed with."""
    import skimage
    import sklearn

    from cpvt_pyramid import __version__

    packages = {
        'cpvt_pyramid': __version__, 'torch': torch.__version__, 'numpy': np.__version__,
        'scikit-image': skimage.__version__, 'scikit-learn': sklearn.__version__,
    }  # fmt: skip
    return {'versions': {'python': platform.python_version(), **packages}}


# The tuning protocol


def tuned(
    variants: Sequence[RunSettings],
    rates: Sequence[float],
    folder: Path,
    workers: int = 1,
    device: str = 'cpu',
) -> list[float]:
    """The learning rate of each variant: of one small grid, the one with the highest mean accuracy
    over all tasks, on the tuning split and with a seed that no table uses. The first of equals."""
    todo = [
        replace(variant, lr=lr, split='tuning', seed=tuning_seed(variant.seed))
        for variant in variants
        for lr in rates
    ]
    results = iter(run_all(todo, folder, workers, device, 'tuning'))
    chosen = []
    for _ in variants:
        scores = [np.mean([next_.metrics[task] for task in TASKS]) for next_ in
                  (next(results) for _ in rates)]  # fmt: skip
        chosen.append(rates[int(np.argmax(scores))])
    return chosen


def tuning_seed(seed: int) -> int:
    """A seed that differs from those of the tables."""
    return seed + 500_000
