"""Training without padding, tests in padded batches."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Optional

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import InstanceData, PixelData
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchvision.ops import box_iou

from experiments.runs import Settings, mean_iou, muon_and_adamw

from .arms import BATCHES, FOLDERS
from .models import DETECTORS, build
from .pictures import KEPT, Sample, draw, random_size

SHOWN = 0.3  # score of a box that a user sees
# Two boxes are at the same place from this overlap on, unmoved from the next on, and have the same
# score up to a difference.
SAME_PLACE = 0.5
UNMOVED = 0.9
SAME_SCORE = 0.05


@dataclass(frozen=True)
class RunSettings(Settings):
    """All that determines a run. A batch has pictures of one size; `pictures` are those of each
    folder of the test.

    Args:
        model: of `DETECTORS` or `SEGMENTORS`.
        backbone: as in `build`.
    """

    warm_up: ClassVar[float] = 0.2

    batch: int = 8
    pictures: int = 104
    model: str = 'RetinaNet'
    backbone: str = 'cpvt'

    @property
    def label(self) -> str:
        return f'{self.model.lower().replace(" ", "_")}-{self.backbone}'

    def build(self) -> nn.Module:
        return build(self.model, self.backbone, self.seed)

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Muon trains the matrices of transformers, AdamW the rest: so few steps are enough for
        DINO."""
        matrices = []
        for name, parameter in model.named_parameters():
            in_transformer = '.blocks.' in name or '.layers.' in name
            if in_transformer and parameter.ndim == 2:
                matrices.append(parameter)
        return muon_and_adamw(matrices, model, self.lr, weight_decay=0.01)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        images, data = preprocess(model, training_batch(self, step))
        loss, _ = model.parse_losses(model.loss(images, data))
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """Under 'tests', the fields of `Test` of every test."""
        with warnings.catch_warnings():
            # They are on purpose.
            warnings.filterwarnings('ignore', 'images of different sizes are in one batch')
            return {'tests': measure(self, model)}


# Pictures


def training_batch(settings: RunSettings, step: int) -> list[Sample]:
    """Pictures of one size: none is padded."""
    rng = np.random.default_rng((settings.seed, 4, step))
    landscape = rng.random() < 0.5
    size = random_size(rng)
    return [draw(settings.seed, 'train', step, i, landscape, size) for i in range(settings.batch)]


def images_of(settings: RunSettings, name: str) -> list[Sample]:
    """The pictures of a folder."""
    folder = FOLDERS[name]
    stream = list(FOLDERS).index(name)
    rng = np.random.default_rng((settings.seed, 5, stream))
    samples = []
    for i in range(settings.pictures):
        landscape = rng.random() >= folder.portrait
        size = random_size(rng, folder.sizes, folder.shares)
        samples.append(draw(settings.seed, settings.split, stream, i, landscape, size))
    return samples


# Prediction


class Prediction(NamedTuple):
    """What a detector says about an image."""

    boxes: Tensor  # (n, 4), with scores of at least 0.05
    scores: Tensor
    labels: Tensor


def preprocess(model: nn.Module, samples: Sequence[Sample]) -> tuple[Tensor, list[DetDataSample]]:
    """A padded batch, and what detectors and segmentors ask for."""
    data = []
    for sample in samples:
        shape = tuple(sample.image.shape[1:])
        about = dict(img_shape=shape, ori_shape=shape, scale_factor=(1.0, 1.0))
        one = DetDataSample(metainfo=about)
        masks = BitmapMasks(sample.masks.astype(np.uint8), *shape)
        one.gt_instances = InstanceData(bboxes=sample.boxes, labels=sample.labels, masks=masks)
        one.gt_sem_seg = PixelData(data=sample.classes[None])
        data.append(one)
    images = [sample.image for sample in samples]
    batch = model.data_preprocessor(dict(inputs=images, data_samples=data), model.training)
    return batch['inputs'], batch['data_samples']


def in_batches(samples: Sequence[Sample], count: int) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), count):
        yield samples[start : start + count]


@torch.no_grad()
def detect(model: nn.Module, samples: Sequence[Sample], count: int) -> list[Prediction]:
    """The boxes of a detector, in batches of `count` images."""
    found = []
    for some in in_batches(samples, count):
        images, data = preprocess(model, some)
        for predicted in model.predict(images, data):
            instances = predicted.pred_instances
            prediction = Prediction(
                boxes=instances.bboxes,
                scores=instances.scores,
                labels=instances.labels,
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


def average_precision(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> float:
    # torchmetrics' own thresholds are rounded to float32: a recall of exactly 0.3 misses its own.
    metric = MeanAveragePrecision(
        backend='pycocotools',
        iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
        rec_thresholds=np.linspace(0, 1, 101).tolist(),
    )
    found = [dict(boxes=p.boxes, scores=p.scores, labels=p.labels) for p in predictions]
    truth = [dict(boxes=s.boxes, labels=s.labels, area=torch.tensor(s.areas)) for s in samples]
    metric.update(found, truth)
    return float(metric.compute()['map'])


def changed_boxes(alone: Sequence[Prediction], batched: Sequence[Prediction]) -> float:
    """The share of the boxes that differ."""
    changed = 0
    boxes = 0
    for one, other in zip(alone, batched):
        of_image, all_of_image = changes(one, other)
        changed += of_image
        boxes += all_of_image
    return changed / max(boxes, 1)


def changes(alone: Prediction, batched: Prediction) -> tuple[int, int]:
    """How many boxes of an image differ between two predictions, and of how many.

    Boxes are paired so that overlap and class agree best. Of the pairs and single boxes of which
    one has a score of at least `SHOWN`, those differ whose partner is missing, has another class,
    overlaps by less than `UNMOVED`, or has another score.
    """
    overlap = box_iou(alone.boxes, batched.boxes)
    same_class = alone.labels[:, None] == batched.labels
    near = overlap >= SAME_PLACE
    rows, columns = linear_sum_assignment(near * (overlap + same_class), maximize=True)
    is_pair = near[rows, columns].numpy()
    rows, columns = rows[is_pair], columns[is_pair]

    shown_alone = (alone.scores >= SHOWN).numpy()
    shown_batched = (batched.scores >= SHOWN).numpy()
    vanished = shown_alone.copy()
    vanished[rows] = False
    appeared = shown_batched.copy()
    appeared[columns] = False
    single = int(vanished.sum() + appeared.sum())

    is_shown = shown_alone[rows] | shown_batched[columns]
    rows, columns = rows[is_shown], columns[is_shown]
    scores = (alone.scores[rows] - batched.scores[columns]).abs()
    differs = ~same_class[rows, columns]
    differs |= overlap[rows, columns] < UNMOVED
    differs |= scores > SAME_SCORE
    return single + int(differs.sum()), single + len(rows)


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
