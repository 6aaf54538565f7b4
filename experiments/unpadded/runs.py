"""Training without padding, tests in padded batches; each run is a file, named by its settings."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import PixelData
from torch import Tensor, nn

from cpvt_pyramid.tooling.files import write_text
from experiments.ports.runs import (
    CHANGES,
    KEPT,
    Prediction,
    Sample,
    average_precision,
    changes,
    data_sample,
    draw,
    random_size,
)
from experiments.ports.settings import RunSettings as PictureSettings
from experiments.training import (
    digest,
    failure_of,
    mean_iou,
    muon_and_adamw,
    one_thread,
    optimize,
    versions,
)

from .arms import BATCHES, FOLDERS
from .models import DETECTORS, build


@dataclass(frozen=True)
class RunSettings:
    """All that determines a run.

    Args:
        model: of `DETECTORS` or `SEGMENTORS`.
        backbone: as in `build`.
        lr: the peak learning rate.
        seed: of the weights and all pictures.
        split: 'tuning' or 'test'. The photographs of the test appear in nothing else.
        steps: of training.
        batch: pictures in a step, all of one size.
        pictures: of each folder.
    """

    model: str
    backbone: str = 'cpvt'
    lr: float = 3e-3
    seed: int = 0
    split: str = 'test'
    steps: int = 400
    batch: int = 8
    pictures: int = 104


# Pictures


def training_batch(settings: RunSettings, step: int) -> list[Sample]:
    """Pictures of one size: none is padded."""
    rng = np.random.default_rng((settings.seed, 4, step))
    landscape = rng.random() < 0.5
    size = random_size(rng)
    wanted = PictureSettings(seed=settings.seed)
    return [draw(wanted, 'train', step, i, landscape, size) for i in range(settings.batch)]


def images_of(settings: RunSettings, name: str) -> list[Sample]:
    """The pictures of a folder."""
    folder = FOLDERS[name]
    stream = list(FOLDERS).index(name)
    rng = np.random.default_rng((settings.seed, 5, stream))
    wanted = PictureSettings(seed=settings.seed, split=settings.split)
    samples = []
    for i in range(settings.pictures):
        landscape = rng.random() >= folder.portrait
        size = random_size(rng, folder.sizes, folder.shares)
        samples.append(draw(wanted, settings.split, stream, i, landscape, size))
    return samples


# Training and prediction


def preprocess(model: nn.Module, samples: Sequence[Sample]) -> tuple[Tensor, list[DetDataSample]]:
    """A padded batch, and what detectors and segmentors ask for."""
    data = []
    for sample in samples:
        one = data_sample(sample)
        one.gt_instances.masks = BitmapMasks(sample.masks.astype(np.uint8), *one.img_shape)
        one.gt_sem_seg = PixelData(data=sample.classes[None])
        data.append(one)
    images = [sample.image for sample in samples]
    batch = model.data_preprocessor(dict(inputs=images, data_samples=data), model.training)
    return batch['inputs'], batch['data_samples']


def train(settings: RunSettings) -> tuple[nn.Module, list[float]]:
    """The trained model, in evaluation mode, and its losses: means over tenths of the training.

    Muon trains the matrices of transformers, AdamW the rest, as in the distillation: so few steps
    are enough for DINO.
    """
    model = build(settings.model, settings.backbone, settings.seed).train()
    matrices = []
    for name, parameter in model.named_parameters():
        in_transformer = '.blocks.' in name or '.layers.' in name
        if in_transformer and parameter.ndim == 2:
            matrices.append(parameter)
    optimizers = muon_and_adamw(matrices, model, settings.lr, weight_decay=0.01)

    def loss_at(step: int) -> Tensor:
        images, data = preprocess(model, training_batch(settings, step))
        loss, _ = model.parse_losses(model.loss(images, data))
        return loss

    losses = optimize(optimizers, loss_at, settings.steps, warm_up=0.2, clip=1.0)
    return model.eval(), losses


def in_batches(samples: Sequence[Sample], count: int) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), count):
        yield samples[start : start + count]


@torch.no_grad()
def detect(model: nn.Module, samples: Sequence[Sample], count: int) -> list[Prediction]:
    """The boxes of a detector, in batches of `count` images; the predictions have no class map."""
    found = []
    for some in in_batches(samples, count):
        images, data = preprocess(model, some)
        for predicted in model.predict(images, data):
            instances = predicted.pred_instances
            prediction = Prediction(
                boxes=instances.bboxes,
                scores=instances.scores,
                labels=instances.labels,
                classes=torch.empty(0),
                padding=0.0,
            )
            found.append(prediction)
    return found


@torch.no_grad()
def segment(model: nn.Module, samples: Sequence[Sample], count: int) -> list[Tensor]:
    """The classes (H, W) of a segmentor, in batches of `count` images."""
    found = []
    for some in in_batches(samples, count):
        images, data = preprocess(model, some)
        about = dict(img_shape=tuple(images.shape[2:]))
        logits = model.encode_decode(images, [about] * len(some))
        for sample, of_image in zip(some, logits):
            height, width = sample.image.shape[1:]
            found.append(of_image[:, :height, :width].argmax(0))
    return found


# Measures


def miou(samples: Sequence[Sample], found: Sequence[Tensor]) -> float:
    pixels = torch.cat([sample.classes.flatten() for sample in samples])
    return mean_iou(torch.cat([one.flatten() for one in found]), pixels, 1 + len(KEPT))


def changed_boxes(alone: Sequence[Prediction], batched: Sequence[Prediction]) -> float:
    """The share of the boxes that differ, as in `changes`."""
    boxes = 0
    changed = 0
    for one, other in zip(alone, batched):
        found = changes(one, other)
        boxes += found['boxes']
        changed += sum(found[kind] for kind in CHANGES)
    return changed / max(boxes, 1)


def changed_pixels(alone: Sequence[Tensor], batched: Sequence[Tensor]) -> float:
    """The share of the pixels whose class differs."""
    differ = torch.cat([(one != other).flatten() for one, other in zip(alone, batched)])
    return float(differ.double().mean())


def padding_of(samples: Sequence[Sample], count: int) -> float:
    """The mean share of an image in a batch of `count` that is padding."""
    shares = []
    for some in in_batches(samples, count):
        sizes = np.array([sample.image.shape[1:] for sample in some])
        shares += list(1 - sizes.prod(axis=1) / sizes.max(axis=0).prod())
    return float(np.mean(shares))


def measure(settings: RunSettings, model: nn.Module) -> list[dict]:
    """The fields of `Test`, of every test of a trained model."""
    if settings.model in DETECTORS:
        predict, accuracy, changed = detect, average_precision, changed_boxes
    else:
        predict, accuracy, changed = segment, miou, changed_pixels
    tests = []
    for folder in FOLDERS:
        samples = images_of(settings, folder)
        alone = predict(model, samples, 1)
        tests.append(Test(folder, 1, None, accuracy(samples, alone), 0.0, 0.0))
        for region in (True, False):
            if region and settings.backbone == 'resnet':
                continue
            model.data_preprocessor.valid_region = region
            for count in BATCHES:
                found = predict(model, samples, count)
                test = Test(
                    folder=folder,
                    batch=count,
                    region=region,
                    accuracy=accuracy(samples, found),
                    changed=changed(alone, found),
                    padding=padding_of(samples, count),
                )
                tests.append(test)
    return [test._asdict() for test in tests]


# Runs


class Test(NamedTuple):
    """What a model answers to the images of a folder.

    Attributes:
        folder: of `FOLDERS`.
        batch: images in a batch.
        region: whether the backbone is told the region of each image; None if there is no padding.
        accuracy: COCO's box AP (arXiv 1405.0312) or mIoU.
        changed: share of the boxes or pixels that are not those of the image alone.
        padding: mean share of an image in its batch that is padding.
    """

    folder: str
    batch: int
    region: Optional[bool]
    accuracy: float
    changed: float
    padding: float


class Result(NamedTuple):
    """A finished run, in JSON."""

    settings: dict
    tests: list[dict]  # the fields of `Test`
    losses: list[float]  # means over tenths of the training
    failure: str  # why the run does not count as trained, or ''


def path_of(settings: RunSettings, folder: Path) -> Path:
    label = settings.model.lower().replace(' ', '_')
    return folder / f'{digest(settings, f"{label}-{settings.backbone}")}.json'


def run(settings: RunSettings, folder: Path) -> Result:
    """Read the result of a run, or train and test if there is none yet."""
    path = path_of(settings, folder)
    if path.exists():
        found = json.loads(path.read_text())
        return Result(*(found[key] for key in Result._fields))
    with one_thread(), warnings.catch_warnings():
        # They are on purpose.
        warnings.filterwarnings('ignore', 'images of different sizes are in one batch')
        model, losses = train(settings)
        tests = measure(settings, model)
    result = Result(asdict(settings), tests, losses, failure_of(losses))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**result._asdict(), **versions()}, indent=1))
    return result
