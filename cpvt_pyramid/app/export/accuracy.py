"""How good predictions are: next to those of another model, and next to annotations.

Shapes: N boxes, H x W image in pixels.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ..images.label_maps import IGNORED, ious_of_classes, pixel_confusion, read_label_map
from ..images.rasters import ReadError
from ..predictions.kinds import Detections, LabelMap, Prediction
from ..tooling.command import UserError, one_line

IOU = 0.5  # of two boxes that are the same object
SCORES = 0.1  # largest difference of the scores of a pair that agrees


class Agreement(NamedTuple):
    """How much of the predictions of two models is the same; sums over images."""

    same: float = 0  # boxes of both models, or pixels, on which they agree
    all: float = 0  # boxes of both models, or pixels

    @property
    def share(self) -> float:
        """From 0 to 1; 1 if there is nothing to disagree on."""
        return self.same / self.all if self.all else 1.0

    def __add__(self, other: Any) -> 'Agreement':
        return Agreement(self.same + other.same, self.all + other.all)


def agreement_of(found: Prediction, expected: Prediction) -> Agreement:
    """Compare two predictions for one image.

    Pixels agree if they have one label. Boxes agree if they have one label, an IoU of at least
    `IOU`, and scores that differ by at most `SCORES`. Each box counts, so that a missing one and
    one too many cost the same.
    """
    if isinstance(found, LabelMap) and isinstance(expected, LabelMap):
        return Agreement(float((found.labels == expected.labels).sum()), found.labels.size)
    assert isinstance(found, Detections) and isinstance(expected, Detections)
    pairs = pairs_of(found, expected)
    same = 0
    for ours, theirs in pairs:
        if abs(found.scores[ours] - expected.scores[theirs]) <= SCORES:
            same += 2
    return Agreement(same, len(found) + len(expected))


def pairs_of(found: Detections, expected: Detections) -> list[tuple[int, int]]:
    """Boxes of two predictions that are one object: each of `expected`, which is sorted by score,
    takes the free one with the largest IoU."""
    if not len(found) or not len(expected):
        return []
    crowds = [0] * len(expected)  # none of them is one
    overlap = mask_utils.iou(as_xywh(found.boxes), as_xywh(expected.boxes), crowds)
    overlap[found.labels[:, None] != expected.labels] = 0
    pairs = []
    for theirs in range(len(expected)):
        ours = int(overlap[:, theirs].argmax())
        if overlap[ours, theirs] >= IOU:
            pairs.append((ours, theirs))
            overlap[ours] = 0
    return pairs


def as_xywh(boxes: np.ndarray) -> np.ndarray:
    """Boxes (N, 4) of corners with their width and height instead of the second corner."""
    sides = boxes[:, 2:] - boxes[:, :2]
    return np.concatenate([boxes[:, :2], sides], axis=1).astype(np.float64)


class Truth:
    """Annotations of images, and how good predictions for them are.

    Attributes:
        name: of the measure, such as 'AP'.
    """

    name: str

    def has(self, path: Path) -> bool:
        """Whether an image is annotated."""
        raise NotImplementedError

    def measure(self, predictions: Mapping[Path, Any]) -> float:
        """The accuracy, in percent, of what `summary` made of the predictions for images."""
        raise NotImplementedError

    def summary(self, path: Path, prediction: Prediction) -> Any:
        """What `measure` needs of a prediction, so that images need not be kept."""
        raise NotImplementedError


class CocoTruth(Truth):
    """Objects in COCO's format, with the masks of instances for a model that predicts them. Its
    images are found by their names."""

    name = 'AP'

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.coco = COCO(str(path))
            names = {c['name']: c['id'] for c in self.coco.dataset['categories']}
            self.image_ids = {}
            for image in self.coco.dataset['images']:
                self.image_ids[Path(image['file_name']).name] = image['id']
        except (ValueError, KeyError, TypeError, AssertionError) as error:  # of pycocotools
            raise UserError(f'{path} is not in COCO format: {one_line(error)}') from error
        unknown = [name for name in classes if name not in names]
        if unknown:
            raise UserError(
                f'{path} must have the categories of the model; it lacks {", ".join(unknown[:5])}'
            )
        self.category_ids = [names[name] for name in classes]

    def has(self, path: Path) -> bool:
        return path.name in self.image_ids

    def summary(self, path: Path, prediction: Prediction) -> Any:
        return prediction.to_coco(self.image_ids[path.name], self.category_ids)

    def measure(self, predictions: Mapping[Path, Any]) -> float:
        found = [item for items in predictions.values() for item in items]
        if not found:
            return 0.0
        with contextlib.redirect_stdout(io.StringIO()):
            kind = 'segm' if 'segmentation' in found[0] else 'bbox'
            results = COCOeval(self.coco, self.coco.loadRes(found), kind)
            results.params.imgIds = [self.image_ids[path.name] for path in predictions]
            results.evaluate()
            results.accumulate()
            results.summarize()
        return float(results.stats[0]) * 100


class LabelTruth(Truth):
    """A folder of label maps, which are named as their images.

    Args:
        folder: of PNG files of class indices; 255 is ignored.
        classes: of the model.
        zero_is_ignored: 0 is ignored, too, and 1 is the first class.
    """

    name = 'mIoU'

    def __init__(self, folder: Path, classes: Sequence[str], zero_is_ignored: bool) -> None:
        self.maps = {path.stem: path for path in sorted(folder.glob('*.png'))}
        if not self.maps:
            raise UserError(f'no segmentation masks (*.png) in {folder}')
        self.classes = len(classes)
        self.first = int(zero_is_ignored)

    def has(self, path: Path) -> bool:
        return path.stem in self.maps

    def summary(self, path: Path, prediction: Prediction) -> Any:
        """Pixels by annotated and predicted class."""
        assert isinstance(prediction, LabelMap)
        file = self.maps[path.stem]
        try:
            stored = read_label_map(file)
        except ReadError as error:
            raise UserError(f'{file}: {error}') from error
        if stored.is_color or not stored.is_whole:
            raise UserError(f'{file} must have one channel of class indices')
        annotated = stored.values
        if annotated.shape != prediction.labels.shape:
            sizes = f'{annotated.shape}, its image {prediction.labels.shape}'
            raise UserError(f'{file} must have the size of its image; it has {sizes}')
        known = annotated != IGNORED
        labels = annotated.astype(np.int64) - self.first
        known &= labels >= 0
        if labels[known].max(initial=0) >= self.classes:
            raise UserError(
                f'{file} has the label {labels[known].max() + self.first}, but the model '
                f'{self.classes} classes; if 1 is the first class, add --zero-is-ignored'
            )
        truth = np.where(known, labels, IGNORED)
        return pixel_confusion(truth, prediction.labels, self.classes)

    def measure(self, predictions: Mapping[Path, Any]) -> float:
        confusion = np.sum(list(predictions.values()), axis=0)
        return float(np.nanmean(ious_of_classes(confusion))) * 100
