"""Training and evaluation of one model; each run is a file named by all its settings."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from mmdet.registry import MODELS as DETECTION
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.structures import InstanceData, PixelData
from mmseg.registry import MODELS as SEGMENTATION
from scipy.optimize import linear_sum_assignment
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchvision.ops import box_iou

from benchmarks.models import ports
from cpvt_pyramid import ARCHS
from cpvt_pyramid.demo.photographs import photographs_of
from cpvt_pyramid.mm import CPVTPyramid
from cpvt_pyramid.mm.detection import ValidRegionDetDataPreprocessor
from cpvt_pyramid.tooling.files import atomic_write, write_text
from experiments.training import digest, failure_of, mean_iou, one_thread, optimize, versions

from . import digits
from .settings import BATCHES, CHANGES, PADDING, SHARES, SIZES, RunSettings

CONFIGS = Path(__file__).parent / 'configs'
ARCH = 'pcpvt_nano'
SVT = ARCHS[ARCH]._replace(window=7, stage_norm=True)
SIDE = 128  # the image for which a learned table has an entry for each token
STRIDES = (8, 16, 32)  # of the detector
ANCHOR = 3  # sides of anchors, in strides: the smallest have 24 pixels
KEPT = (0, 1, 4, 7)  # digits; all ten would take several times as many steps
SHOWN = 0.3  # score of a box that a user sees
# Two boxes are at the same place from this overlap on, unmoved from the next on, and have the same
# score up to a difference.
SAME_PLACE = 0.5
UNMOVED = 0.9
SAME_SCORE = 0.05


# Pictures


class Sample(NamedTuple):
    """An image with its digits."""

    image: Tensor  # (3, H, W), BGR, 0 to 255
    boxes: Tensor  # (n, 4), left, top, right, bottom
    labels: Tensor  # (n,)
    areas: list[int]  # visible pixels
    masks: np.ndarray  # (n, H, W), those pixels
    classes: Tensor  # (H, W), 0 is background, 1 + c class c


def draw(
    settings: RunSettings,
    split: str,
    stream: int,
    index: int,
    landscape: bool,
    size: Optional[tuple[int, int]] = None,
) -> Sample:
    """A picture of the demo's data set, of one of `SIZES` or of this one; its split is 'train' or
    that of the settings."""
    in_training = split == 'train'
    rng = np.random.default_rng((settings.seed, in_training, stream, index))
    width, height = size or random_size(rng)
    drawn = (width, height) if landscape else (height, width)
    photographs = photographs_of('val' if split == 'test' else 'train')
    training_scans, other_scans = scans_of(settings.seed)
    scans = training_scans if in_training else other_scans
    picture = digits.draw_picture(rng, photographs, scans, drawn)
    boxes = []
    labels = []
    areas = []
    classes = np.zeros(picture.pixels.shape[:2], int)
    for instance in picture.instances:
        label = KEPT.index(instance.label)
        classes[instance.visible] = 1 + label
        rows = np.flatnonzero(instance.visible.any(axis=1))
        columns = np.flatnonzero(instance.visible.any(axis=0))
        boxes.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        labels.append(label)
        areas.append(int(instance.visible.sum()))
    bgr = picture.pixels[..., ::-1].copy()
    return Sample(
        image=torch.from_numpy(bgr).permute(2, 0, 1),
        boxes=torch.tensor(boxes, dtype=torch.float32),
        labels=torch.tensor(labels),
        areas=areas,
        masks=np.stack([instance.visible for instance in picture.instances]),
        classes=torch.from_numpy(classes),
    )


def random_size(
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, int]] = SIZES,
    shares: Sequence[float] = SHARES,
) -> tuple[int, int]:
    """Width and height of a landscape picture."""
    return sizes[rng.choice(len(sizes), p=shares)]


@cache
def scans_of(seed: int) -> list[np.ndarray]:
    """The digits of the training and of the evaluation."""
    labels = digits.load_digits().target
    kept = np.flatnonzero(np.isin(labels, KEPT))
    return train_test_split(
        kept, test_size=digits.VAL_SCANS, random_state=seed, stratify=labels[kept]
    )


def training_batch(settings: RunSettings, step: int) -> list[Sample]:
    """All portrait or all landscape, as mmdetection groups training images."""
    rng = np.random.default_rng((settings.seed, 2, step))
    landscape = rng.random() < 0.5
    return [draw(settings, 'train', step, i, landscape) for i in range(settings.batch)]


def evaluation(settings: RunSettings) -> list[Sample]:
    """Portrait and landscape in random order, as a server gets them."""
    landscape = np.random.default_rng((settings.seed, 3)).random(settings.pictures) < 0.5
    return [draw(settings, settings.split, 0, i, turned) for i, turned in enumerate(landscape)]


def data_sample(sample: Sample) -> DetDataSample:
    """The size and the objects of a picture, for mm's models."""
    shape = tuple(sample.image.shape[1:])
    about = dict(img_shape=shape, ori_shape=shape, scale_factor=(1.0, 1.0))
    found = DetDataSample(metainfo=about)
    found.gt_instances = InstanceData(bboxes=sample.boxes, labels=sample.labels)
    return found


# The model


class DigitReader(nn.Module):
    """A detector (RetinaNet) and a segmentor (Semantic FPN) on one backbone and one FPN, as in
    Panoptic FPN (arXiv 1901.02446), which halves the cost of the comparison."""

    def __init__(self, backbone: nn.Module, channels: Sequence[int], region: bool) -> None:
        super().__init__()
        detector = Config.fromfile(CONFIGS / 'retinanet.py').model
        head = Config.fromfile(CONFIGS / 'semantic_fpn.py').model.decode_head
        detector.neck.update(in_channels=channels, start_level=0, add_extra_convs=False)
        detector.bbox_head.update(stacked_convs=1, num_classes=len(KEPT))
        detector.bbox_head.anchor_generator.update(strides=STRIDES, octave_base_scale=ANCHOR)
        options = dict(train_cfg=detector.train_cfg, test_cfg=detector.test_cfg)
        head.update(channels=32, dropout_ratio=0.0, num_classes=1 + len(KEPT))
        head.loss_decode.class_weight = [0.25] + [1.0] * len(KEPT)
        normalize = dict(detector.data_preprocessor, valid_region=region)
        normalize.pop('type')
        self.preprocess = ValidRegionDetDataPreprocessor(**normalize)
        self.neck = DETECTION.build(detector.neck)
        self.detector = DETECTION.build(dict(**detector.bbox_head, **options))
        self.segmentor = SEGMENTATION.build(head)
        MMLogger.get_current_instance().setLevel('WARNING')  # not each parameter that it sets
        for part in (self.neck, self.detector, self.segmentor):
            part.init_weights()
        self.backbone = backbone

    def maps(self, samples: Sequence[Sample]) -> tuple[tuple, list[DetDataSample]]:
        """Maps at strides 4, 8, 16 and 32 of a padded batch, and what mm's heads ask for."""
        data = [data_sample(sample) for sample in samples]
        images = [sample.image for sample in samples]
        batch = self.preprocess(dict(inputs=images, data_samples=data), self.training)
        return self.neck(self.backbone(batch['inputs'])), batch['data_samples']

    def loss(self, samples: Sequence[Sample]) -> Tensor:
        maps, data = self.maps(samples)
        height, width = data[0].batch_input_shape
        for one, sample in zip(data, samples):
            classes = sample.classes
            room = (0, width - classes.shape[1], 0, height - classes.shape[0])
            one.gt_sem_seg = PixelData(data=F.pad(classes, room, value=255)[None])
        total = 0
        for losses_of_maps in self.detector.loss(maps[1:], data).values():
            total = total + sum(losses_of_maps)
        return total + self.segmentor.loss(maps, data, None)['loss_ce']

    @torch.no_grad()
    def predict(self, samples: Sequence[Sample]) -> Iterator[tuple[InstanceData, Tensor]]:
        """Boxes and logits (1, classes, H, W) of each image, at its own size."""
        maps, data = self.maps(samples)
        boxes = self.detector.predict(maps[1:], data)
        logits = F.interpolate(self.segmentor(maps), data[0].batch_input_shape, mode='bilinear')
        for i, sample in enumerate(samples):
            height, width = sample.image.shape[1:]
            yield boxes[i], logits[i : i + 1, :, :height, :width]


def build(settings: RunSettings) -> DigitReader:
    """The untrained model. Weights depend on the seed alone: those of the heads are the same in all
    models, those of the backbone in all PCPVTs."""
    torch.manual_seed(settings.seed)
    channels = list(ARCHS[ARCH].dims)
    if settings.model == 'resnet':
        channels = [32, 64, 128, 256]  # half of ResNet-18's
        config = dict(type='ResNet', depth=18, base_channels=channels[0], norm_eval=False)
        model = DigitReader(DETECTION.build(config), channels, settings.region)
        model.backbone.init_weights()
        return model
    model = DigitReader(nn.Identity(), channels, settings.region)
    model.backbone = ours = CPVTPyramid(ARCH)
    if settings.model == 'svt':
        model.backbone = CPVTPyramid(SVT, window_padding=settings.window_padding)
    elif settings.position != 'peg':
        model.backbone = CPVTPyramid(ARCH, position=settings.position, pretrain_img_size=SIDE)
        found = model.backbone.load_state_dict(without_peg(ours.state_dict()), strict=False)
        assert not found.unexpected_keys and all('pos' in key for key in found.missing_keys)
    elif settings.model != 'cpvt_pyramid':
        model.backbone = ports.build(settings.model, ARCH, ours.state_dict())
        image = torch.randn(2, 3, 64, 128)
        with torch.no_grad():
            for found, expected in zip(model.backbone(image), ours.eval()(image)):
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    return model


def without_peg(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if not key.startswith('pos_block')}


def train(settings: RunSettings) -> tuple[DigitReader, list[float]]:
    """The trained model, in evaluation mode, and its losses: means over tenths of the training."""
    model = build(settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=0.05, fused=True)

    def loss_at(step: int) -> Tensor:
        return model.loss(training_batch(settings, step))

    losses = optimize([optimizer], loss_at, settings.steps, warm_up=0.2, clip=5.0)
    return model.eval(), losses


# Evaluation


class Prediction(NamedTuple):
    """What a model says about one image, at the image's own size."""

    boxes: Tensor  # (n, 4), with scores of at least 0.05
    scores: Tensor
    labels: Tensor
    classes: Tensor  # (H, W)
    padding: float  # share of the image in its batch that is padding


def predict(
    model: DigitReader, samples: Sequence[Sample], batch: int, scale: float = 1
) -> list[Prediction]:
    """Predictions for images in batches of `batch`, resized by `scale`."""
    found = []
    for start in range(0, len(samples), batch):
        originals = samples[start : start + batch]
        resized = [one._replace(image=zoom(one.image, scale)) for one in originals]
        height = max(one.image.shape[1] for one in resized)
        width = max(one.image.shape[2] for one in resized)
        for sample, image, (boxes, logits) in zip(originals, resized, model.predict(resized)):
            logits = F.interpolate(logits, sample.classes.shape, mode='bilinear')
            own_pixels = math.prod(image.image.shape[1:])
            prediction = Prediction(
                boxes=boxes.bboxes / scale,
                scores=boxes.scores,
                labels=boxes.labels,
                classes=logits[0].argmax(0),
                padding=1 - own_pixels / (height * width),
            )
            found.append(prediction)
    return found


def zoom(image: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return image
    height, width = (round(side * scale) for side in image.shape[1:])
    image = F.interpolate(image[None].float(), (height, width), mode='bilinear', antialias=True)
    return image[0].round().clamp(0, 255)


def accuracy(samples: Sequence[Sample], predictions: Sequence[Prediction]) -> dict[str, float]:
    """COCO's box AP (arXiv 1405.0312), and mIoU."""
    predicted = torch.cat([one.classes.flatten() for one in predictions])
    pixels = torch.cat([one.classes.flatten() for one in samples])
    return {
        'AP': average_precision(samples, predictions),
        'mIoU': mean_iou(predicted, pixels, 1 + len(KEPT)),
    }


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


def changes(alone: Prediction, batched: Prediction) -> dict[str, float]:
    """How the boxes of an image differ between two predictions.

    Boxes are paired so that overlap and class agree best. Of the pairs and single boxes of which
    one has a score of at least `SHOWN`, each counts once, under the first that applies: its partner
    is missing, has another class, overlaps by less than `UNMOVED`, or has another score.
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

    is_shown = shown_alone[rows] | shown_batched[columns]
    rows, columns = rows[is_shown], columns[is_shown]
    scores = (alone.scores[rows] - batched.scores[columns]).abs()
    corners = (alone.boxes[rows] - batched.boxes[columns]).abs()
    other_class = ~same_class[rows, columns]
    moved = ~other_class & (overlap[rows, columns] < UNMOVED)
    other_score = ~other_class & ~moved & (scores > SAME_SCORE)
    kinds = (vanished, appeared, other_class, moved, other_score)
    counts = {name: int(kind.sum()) for name, kind in zip(CHANGES, kinds)}
    return {
        **counts,
        'boxes': len(rows) + counts['vanished'] + counts['appeared'],
        'largest_move': float(corners.max()) if len(rows) else 0.0,
        'largest_score': float(scores.max()) if len(rows) else 0.0,
    }


def changes_by_padding(
    alone: Sequence[Prediction], batched: Sequence[Prediction]
) -> list[dict[str, float]]:
    """`changes`, added up over the images in each bin of `PADDING`."""
    largest = ('largest_move', 'largest_score')
    bins = []
    for _ in PADDING[1:]:
        bins.append(dict.fromkeys((*CHANGES, 'boxes', 'images'), 0) | dict.fromkeys(largest, 0.0))
    for one, other in zip(alone, batched):
        bin_ = bins[int(np.searchsorted(PADDING, other.padding, 'right')) - 1]
        bin_['images'] += 1
        found = changes(one, other)
        for key in (*CHANGES, 'boxes'):
            bin_[key] += found[key]
        for key in largest:
            bin_[key] = max(bin_[key], found[key])
    return bins


class Result(NamedTuple):
    """A finished run."""

    settings: dict
    metrics: dict[str, float]  # such as 'AP, batch 8, size 1.5'
    changes: list[dict[str, float]]  # between batches of 1 and 8, for each bin of padding
    losses: list[float]  # means over tenths of the training
    failure: str  # why the run does not count as trained, or ''
    minutes: float  # of one core


def path_of(settings: RunSettings, folder: Path) -> Path:
    label = f'{settings.model}-{settings.position}'
    return folder / f'{digest(settings, label)}.json'


def run(settings: RunSettings, folder: Path) -> Result:
    """Read the result of a run, or train and evaluate if there is none yet."""
    path = path_of(settings, folder)
    if path.exists():
        found = json.loads(path.read_text())
        return Result(*(found[key] for key in Result._fields))
    start = time.process_time()
    with one_thread():
        model, losses = train(settings)
        samples = evaluation(settings)
        metrics = {}
        predictions = {}  # by images in a batch and scale
        for scale in settings.scales:
            for count in BATCHES:
                found = predict(model, samples, count, scale)
                predictions[count, scale] = found
                for name, value in accuracy(samples, found).items():
                    metrics[f'{name}, batch {count}, size {scale:g}'] = value
    alone, batched = (predictions[count, 1] for count in BATCHES)
    changed = changes_by_padding(alone, batched)
    minutes = (time.process_time() - start) / 60
    result = Result(asdict(settings), metrics, changed, losses, failure_of(losses), minutes)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path.with_suffix('.pt')) as partial:
        torch.save(model.state_dict(), partial)
    write_text(path, json.dumps({**result._asdict(), **versions()}, indent=1))
    return result
