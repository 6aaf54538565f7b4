"""How good predictions are: next to those of another model, and next to annotations.

Shapes: N boxes, H x W image in pixels.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..images.label_maps import IGNORED, ious_of_classes, pixel_confusion, read_label_map
from ..images.rasters import ReadError
from ..images.reading import size_of
from ..predictions.average_precision import coco_with_index, evaluate_coco
from ..predictions.kinds import Detections, LabelMap, Prediction
from ..predictions.matching import box_ious, greedy_pairs
from ..tooling.command import UserError
from .annotations import (
    complete_object,
    labels_of_categories,
    match_names,
    read_coco_file,
    sides_of,
)

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
    overlaps = box_ious(expected.boxes, found.boxes)
    may_be_one = (overlaps >= IOU) & (expected.labels[:, None] == found.labels)
    pairs = greedy_pairs(np.where(may_be_one, overlaps, -np.inf))
    return [(ours, theirs) for theirs, ours in pairs]


class Truth:
    """Annotations of images, and how good predictions for them are.

    Attributes:
        name: of the measure, such as 'AP'.
        images: that are annotated, of those given.
    """

    name: str
    images: Sequence[Path]

    def measure(self, predictions: Mapping[Path, Any]) -> float:
        """The accuracy, in percent, of what `summary` made of the predictions for images."""
        raise NotImplementedError

    def summary(self, path: Path, prediction: Prediction) -> Any:
        """What `measure` needs of a prediction, so that images need not be kept."""
        raise NotImplementedError


class CocoTruth(Truth):
    """Objects in COCO's format, or the masks of instances.

    Args:
        file: of JSON.
        classes: of the model. Objects of other categories do not count.
        images: that are compared. Those in the file are found by `match_names`.
        metric: see `evaluate_coco`.

    Raises:
        UserError: what is wrong with the file, as far as these images and classes need it.
    """

    name = 'AP'

    def __init__(
        self, file: Path, classes: Sequence[str], images: Sequence[Path], metric: str = 'bbox'
    ) -> None:
        content = read_coco_file(file)
        labels = labels_of_categories(content['categories'], classes, file)
        records = match_names(
            images, [str(image['file_name']) for image in content['images']], file
        )
        self.images = [path for path in images if path in records]
        self.metric = metric
        self.image_ids = {path: number for number, path in enumerate(self.images, 1)}
        self.category_ids = list(range(1, len(classes) + 1))
        annotations_of = defaultdict(list)
        for annotation in content['annotations']:
            if annotation.get('category_id') in labels:
                annotations_of[annotation.get('image_id')].append(annotation)
        image_records = []
        objects: list[dict[str, Any]] = []
        for path in self.images:
            record = content['images'][records[path]]
            image = {'id': self.image_ids[path], **sides_of(record, path, file)}
            image_records.append(image)
            for annotation in annotations_of[record['id']]:
                label = labels[annotation['category_id']]
                number = len(objects) + 1  # pycocotools takes an object with the id 0 for none
                given = {**annotation, 'id': number, 'category_id': self.category_ids[label]}
                at = f'{file}: annotation {annotation.get("id", "")} of {record["file_name"]}'
                objects.append(complete_object(given, image, metric, at))
        if self.images and not objects:
            raise UserError(
                f'{file} has no object of the model in the images to compare on '
                f'({len(self.images)}); --compare gives others'
            )
        self.content = {
            'images': image_records,
            'categories': [{'id': number} for number in self.category_ids],
            'annotations': objects,
        }

    def summary(self, path: Path, prediction: Prediction) -> Any:
        return prediction.to_coco(self.image_ids[path], self.category_ids)

    def measure(self, predictions: Mapping[Path, Any]) -> float:
        ids = {self.image_ids[path] for path in predictions}
        truth = coco_with_index(
            self.content
            | {'images': [image for image in self.content['images'] if image['id'] in ids]}
            | {'annotations': [a for a in self.content['annotations'] if a['image_id'] in ids]}
        )
        results = [item for items in predictions.values() for item in items]
        return 100 * evaluate_coco(truth, results, self.category_ids, self.metric).ap


class LabelTruth(Truth):
    """A folder of label maps, which are named as their images.

    Args:
        folder: of PNG files of class indices; 255 is ignored.
        classes: of the model.
        images: that are compared. Their maps are found by `match_names`.
        zero_is_ignored: 0 is ignored, too, and 1 is the first class.

    Raises:
        UserError: what is wrong with a map.
    """

    name = 'mIoU'

    def __init__(
        self,
        folder: Path,
        classes: Sequence[str],
        images: Sequence[Path],
        zero_is_ignored: bool = False,
    ) -> None:
        files = sorted(folder.rglob('*.png'))
        if not files:
            raise UserError(f'no segmentation masks (*.png) in {folder}')
        self.classes = len(classes)
        self.first = int(zero_is_ignored)
        names = [str(file.relative_to(folder).with_suffix('')) for file in files]
        places = match_names(images, names, folder, with_endings=False)
        self.maps = {path: files[place] for path, place in places.items()}
        self.images = [path for path in images if path in self.maps]
        annotated_pixels = 0
        for path in self.images:
            truth = self.read(path)
            size = size_of(path)  # None of a file that cannot be read, and is left out later
            if size is not None and size != truth.shape:
                raise UserError(
                    f'{self.maps[path]} must have the size of its image, {size[0]} x {size[1]} '
                    f'(height x width), got {truth.shape[0]} x {truth.shape[1]}'
                )
            annotated_pixels += int((truth != IGNORED).sum())
        if self.images and not annotated_pixels:
            raise UserError(f'{folder} ignores all pixels of the images to compare on')

    def read(self, path: Path) -> np.ndarray:
        """The class (H, W) of each pixel of an image, or `IGNORED`."""
        file = self.maps[path]
        try:
            stored = read_label_map(file)
        except ReadError as error:
            raise UserError(f'{file}: {error}') from error
        if stored.is_color or not stored.is_whole:
            raise UserError(f'{file} must have one channel of class indices')
        labels = stored.values.astype(np.int64) - self.first
        known = (stored.values != IGNORED) & (labels >= 0)
        if labels[known].max(initial=0) >= self.classes:
            raise UserError(
                f'{file} has the label {labels[known].max() + self.first}, but the model '
                f'{self.classes} classes; if 1 is the first class, add --zero-is-ignored'
            )
        return np.where(known, labels, IGNORED)

    def summary(self, path: Path, prediction: Prediction) -> Any:
        """Pixels by annotated and predicted class."""
        assert isinstance(prediction, LabelMap)
        return pixel_confusion(self.read(path), prediction.labels, self.classes)

    def measure(self, predictions: Mapping[Path, Any]) -> float:
        confusion = np.sum(list(predictions.values()), axis=0)
        return float(np.nanmean(ious_of_classes(confusion))) * 100
