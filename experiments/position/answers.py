"""Training and tests of the models that answer questions about pictures of `scenes`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou

from experiments.runs import Settings, mean_iou

from .models import CELL, PIXEL_CLASSES, READINGS, Answers, LabModel
from .scenes import Scenes, draw_scenes
from .sizes import SIDE, sizes_of
from .tasks import TASKS, answers_of

BOX_OVERLAP = 0.5  # of a detection that counts
LEAST_SCORE = 0.01  # of a detection
BATCH_TOKENS = 64 * 1024  # in evaluation
WEIGHT_DECAY = 0.02


@dataclass(frozen=True)
class PositionSettings(Settings):
    """What the runs of both questions have in common.

    Args:
        position: as in `LabModel`, or in `CPVT`.
        peg: fields of the `PEGConfig` that differ from the defaults, as (name, value) pairs.
        options: of the encoding, as (name, value) pairs.
        class_token: whether the classifiers read a class token instead of the mean of the map.
    """

    position: str = 'peg'
    peg: tuple = ()
    options: tuple = ()
    class_token: bool = True


@dataclass(frozen=True)
class RunSettings(PositionSettings):
    """All that determines a run with the pictures of `scenes`.

    Args:
        scales: sizes of other tests, as shares of the training side, see `sizes_of`.
        scaled_pictures: of each of these tests.
    """

    scales: tuple[float, ...] = ()
    scaled_pictures: int = 200

    @property
    def label(self) -> str:
        return f'pictures-{self.position}'

    def build(self) -> LabModel:
        torch.manual_seed(self.seed)
        return LabModel(
            self.position,
            peg=dict(self.peg) or None,
            position_options=dict(self.options) or None,
            class_token=self.class_token,
            side=SIDE * CELL,
        )

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(
            parameters, self.lr, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY, fused=True
        )
        return [adamw]

    def draw(
        self, split: str, count: int, stream: int, grid: tuple[int, int] = (SIDE, SIDE)
    ) -> Scenes:
        """Pictures of this run.

        Args:
            split: 'train', 'tuning' or 'test'.
            count: number of pictures.
            stream: counts the batches; 0 for the pictures of the evaluation.
            grid: height and width in cells.
        """
        return draw_scenes(split, count, self.seed * 1_000_003 + stream, grid, CELL)

    def loss(self, model: LabModel, step: int) -> Tensor:
        scenes = self.draw('train', self.batch, stream=1 + step)
        return loss_of(model(scenes.image), scenes)

    def evaluate(self, model: LabModel) -> dict[str, Any]:
        """As `evaluate_answers`, on pictures of the size of the training; and under 'sizes' the
        same for each other size."""
        metrics: dict[str, Any] = evaluate_answers(
            model, self.draw(self.split, self.pictures, stream=0)
        )
        metrics['sizes'] = {}
        for name, test in sizes_of(self.scales).items():
            scenes = self.draw(self.split, self.scaled_pictures, 0, test.grid)
            metrics['sizes'][name] = evaluate_answers(model, scenes, test.size)
        return metrics


def mean_accuracy(metrics: dict[str, float]) -> float:
    """Over all tasks."""
    return float(np.mean([metrics[task] for task in TASKS]))


def loss_of(answers: Answers, scenes: Scenes) -> Tensor:
    """The sum of the losses of all heads; a classifier that guesses has about 1."""
    labels = answers_of(scenes)
    loss = answers.readings.new_zeros(())
    for name, logits in answers.logits.items():
        target = torch.from_numpy(labels[name])
        loss = loss + F.cross_entropy(logits, target) / math.log(TASKS[name].classes)

    readings = torch.zeros(answers.readings.shape[:3], dtype=torch.long)
    picture = torch.arange(len(readings))[:, None]
    readings[picture, scenes.rows, scenes.columns] = scenes.digits + 1
    weight = torch.tensor([0.1] + [1.0] * (READINGS - 1))  # most tokens show none
    loss = loss + F.cross_entropy(answers.readings.flatten(0, 2), readings.flatten(), weight)
    boxes = answers.boxes[picture, scenes.rows, scenes.columns]
    corner = torch.stack([scenes.columns, scenes.rows] * 2, dim=2)
    loss = loss + F.l1_loss(boxes, scenes.boxes / CELL - corner)

    pixels = at_size(scenes.pixels, answers.pixels.shape[2:])
    weight = torch.tensor([0.1, 1.0, 1.0])
    return loss + F.cross_entropy(answers.pixels, pixels, weight)


def at_size(pixels: Tensor, size: Sequence[int]) -> Tensor:
    """A label map (B, H, W) of another size, by the nearest pixel."""
    if pixels.shape[1:] == tuple(size):
        return pixels
    return F.interpolate(pixels[:, None].float(), tuple(size), mode='nearest-exact')[:, 0].long()


@torch.no_grad()
def answer(model: LabModel, image: Tensor) -> Answers:
    """The answers to many pictures, batch by batch."""
    tokens = math.prod(math.ceil(side / CELL) for side in image.shape[2:])
    fitting_attention = BATCH_TOKENS // tokens**2 * 8
    fitting_features = BATCH_TOKENS // tokens // 16
    count = max(1, min(len(image), fitting_attention, fitting_features))
    parts = [model(some) for some in image.split(count)]
    return Answers(
        logits={name: torch.cat([part.logits[name] for part in parts]) for name in TASKS},
        readings=torch.cat([part.readings for part in parts]),
        boxes=torch.cat([part.boxes for part in parts]),
        pixels=torch.cat([part.pixels for part in parts]),
    )


def evaluate_answers(
    model: LabModel, scenes: Scenes, size: Optional[tuple[int, int]] = None
) -> dict[str, float]:
    """Accuracy of every task, of the tokens' readings, mIoU of the segmentor, AP of the detector.

    Args:
        model: in evaluation mode.
        scenes: the pictures.
        size: height and width in pixels that the pictures are resized to.
    """
    image = scenes.image
    drawn = tuple(image.shape[2:])
    inside = size or drawn
    if inside != drawn:
        image = F.interpolate(image, inside, mode='bilinear', antialias=True)
    answers = answer(model, image)

    labels = answers_of(scenes)
    metrics = {}
    for name, logits in answers.logits.items():
        is_right = logits.argmax(1).numpy() == labels[name]
        metrics[name] = float(np.mean(is_right))

    whole = [CELL * tokens for tokens in answers.readings.shape[1:3]]
    predicted = at_size(answers.pixels.argmax(1), whole)[:, : inside[0], : inside[1]]
    metrics['mIoU'] = mean_iou(predicted, at_size(scenes.pixels, inside), PIXEL_CLASSES)

    scale_y, scale_x = (new / old for new, old in zip(inside, drawn))
    truth = scenes.boxes * torch.tensor([scale_x, scale_y, scale_x, scale_y])
    scores, boxes = token_detections(answers)
    metrics['AP'] = digit_precision(scores, boxes, truth, scenes.digits)
    return metrics


def token_detections(answers: Answers) -> tuple[Tensor, Tensor]:
    """Scores (B, 10, h * w) and boxes (B, h * w, 4) in pixels. As in CenterNet (arXiv 1904.07850),
    a token keeps its score where no neighbour has a higher one."""
    scores = answers.readings.softmax(-1)[..., 1:].permute(0, 3, 1, 2)
    scores = scores * (scores == F.max_pool2d(scores, 3, 1, 1))
    h, w = answers.readings.shape[1:3]
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing='ij')
    corner = torch.stack([columns, rows] * 2, dim=-1)
    return scores.flatten(2), ((answers.boxes + corner) * CELL).flatten(1, 2)


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
