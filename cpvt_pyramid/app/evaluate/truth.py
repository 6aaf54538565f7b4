"""What is true of images: objects, or the class of each pixel. From data in any layout, as
`cpvt check-data` reads them, by the names of a model's classes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from ..data.data import DataSet, MaskValues, Split, coco_of_split
from ..data.defects import Defects
from ..data.description import SPLITS
from ..data.images import HEADERS
from ..data.layouts import formats_with
from ..data.mask_values import indices_of
from ..data.read import checked_source
from ..images.label_maps import IGNORED, ious_of_classes, pixel_confusion
from ..predictions.average_precision import coco_with_index, evaluate_coco
from ..predictions.kinds import Detections, Kind, LabelMap, Prediction
from ..tooling.command import UserError
from ..tooling.report import amount
from .report.common import Analysis
from .report.detections import analyse_detections
from .report.label_maps import ComparedImage, analyse_label_maps, compared_label_map

PREFERRED = 'test', 'val', 'train'  # which split is evaluated, if none is named


class Truth:
    """The annotations of images, and how good predictions for them are.

    Attributes:
        name: of the measure, AP or mIoU.
        images: that are annotated.
        about: lines for people: what is evaluated, and what is not.
    """

    name: str
    images: Sequence[Path]
    about: Sequence[str]

    def summary(self, path: Path, prediction: Prediction) -> Any:
        """What `measure` needs of a prediction, so that images need not be kept."""
        raise NotImplementedError

    def measure(self, summaries: Mapping[Path, Any]) -> float:
        """The measure in percent, from the summaries of predictions."""
        raise NotImplementedError

    def analyse(self, predictions: Iterator[tuple[Path, Prediction]], worst: int) -> Analysis:
        """Analyse the predictions for images; `worst` of them are shown."""
        raise NotImplementedError


class ObjectTruth(Truth):
    """Objects, with boxes and maybe masks.

    Args:
        content: as in a COCO file.
        folder: of the images.
        classes: of the model. Objects of other categories do not count.
        about: see `Truth`.
    """

    name = 'AP'

    def __init__(
        self, content: dict[str, Any], folder: Path, classes: Sequence[str], about: Sequence[str]
    ) -> None:
        self.content = content
        self.folder = folder
        self.about = about
        ids = {category['name']: category['id'] for category in content['categories']}
        self.categories = {name: ids[name] for name in classes if name in ids}
        # A category that no object has, of classes that do not occur in the data
        self.category_ids = [ids.get(name, -1) for name in classes]
        self.image_ids = {folder / image['file_name']: image['id'] for image in content['images']}
        self.images = list(self.image_ids)
        objects = content['annotations']
        self.has_masks = bool(objects) and all(a.get('segmentation') for a in objects)

    def summary(self, path: Path, prediction: Prediction) -> list[dict[str, Any]]:
        """The detections of known categories, in COCO's format."""
        results = prediction.to_coco(self.image_ids[path], self.category_ids)
        return [result for result in results if result['category_id'] != -1]

    def metrics_for(self, prediction: Prediction) -> list[str]:
        """bbox, and segm if a prediction and all objects have masks."""
        has_masks = isinstance(prediction, Detections) and prediction.masks is not None
        return ['bbox', 'segm'] if has_masks and self.has_masks else ['bbox']

    def measure(self, summaries: Mapping[Path, Any]) -> float:
        ids = {self.image_ids[path] for path in summaries}
        content = {
            **self.content,
            'images': [image for image in self.content['images'] if image['id'] in ids],
            'annotations': [a for a in self.content['annotations'] if a['image_id'] in ids],
        }
        results = [result for of_image in summaries.values() for result in of_image]
        have_masks = all('segmentation' in result for result in results)
        metric = 'segm' if self.has_masks and results and have_masks else 'bbox'
        categories = list(self.categories.values())
        return 100 * evaluate_coco(coco_with_index(content), results, categories, metric).ap

    def analyse(self, predictions: Iterator[tuple[Path, Prediction]], worst: int) -> Analysis:
        results: list[dict[str, Any]] = []
        metrics = ['bbox']
        for path, prediction in predictions:
            results += self.summary(path, prediction)
            metrics = self.metrics_for(prediction)
        truth = coco_with_index(self.content)
        return analyse_detections(truth, results, self.categories, metrics, self.folder, worst)


class MaskTruth(Truth):
    """The class of each pixel.

    Args:
        split: images with segmentation masks.
        masks: what their pixels mean.
        known: the classes of the data.
        classes: of the model. Pixels of other classes do not count.
        palette: the colours of the classes.
        about: see `Truth`.
    """

    name = 'mIoU'

    def __init__(
        self,
        split: Split,
        masks: MaskValues,
        known: Sequence[str],
        classes: Sequence[str],
        palette: Sequence[tuple[int, int, int]],
        about: Sequence[str],
    ) -> None:
        self.values = masks
        self.classes = list(classes)
        self.palette = palette
        self.about = about
        folder = split.folder
        self.masks = {folder / image.name: folder / str(image.mask) for image in split.images}
        self.images = list(self.masks)
        # The label of the model for each class of the data
        self.labels = np.full(IGNORED + 1, IGNORED)
        for index, name in enumerate(known):
            if name in self.classes:
                self.labels[index] = self.classes.index(name)
        self.known = sorted(label for label in self.labels.tolist() if label != IGNORED)

    def truth_of(self, path: Path) -> np.ndarray:
        """The label (H, W) of each pixel of an image, or `IGNORED`."""
        return self.labels[indices_of(self.masks[path], self.values)]

    def summary(self, path: Path, prediction: Prediction) -> np.ndarray:
        """Pixels by true and predicted class."""
        assert isinstance(prediction, LabelMap)
        return pixel_confusion(self.truth_of(path), prediction.labels, len(self.classes))

    def measure(self, summaries: Mapping[Path, Any]) -> float:
        ious = ious_of_classes(np.sum(list(summaries.values()), axis=0))
        return 100 * float(np.nanmean(ious[self.known]))

    def analyse(self, predictions: Iterator[tuple[Path, Prediction]], worst: int) -> Analysis:
        def compared() -> Iterator[ComparedImage]:
            for path, prediction in predictions:
                assert isinstance(prediction, LabelMap)
                labels, truth = prediction.labels, self.truth_of(path)
                yield compared_label_map(path, labels, truth, len(self.classes))

        return analyse_label_maps(
            compared(), len(self.images), self.classes, self.palette, worst, self.known
        )


class SharedClasses(NamedTuple):
    """The classes of a model and of data."""

    common: list[str]
    lines: list[str]  # about the others


def read_truth(
    source: Path,
    kind: Kind,
    classes: Sequence[str],
    palette: Sequence[tuple[int, int, int]],
    split: Optional[str] = None,
) -> Truth:
    """Read what is true of a data set's images, and print what is odd about it.

    Args:
        source: a data.yaml, or a folder whose layout is recognized.
        kind: of the model's results.
        classes: of the model.
        palette: their colours.
        split: train, val or test; None: the first of test, val and train that has annotations.

    Raises:
        UserError: there are none, or the data have errors.
    """
    found = Defects()
    formats = formats_with('masks' if kind == 'labels' else 'objects')
    data = checked_source(source, formats, HEADERS, found).data
    found.stop()
    key = chosen_split(data, split, source)
    chosen = data.splits[key]
    shared = classes_in_common(classes, data.classes, source)
    about = [f'{source}: the {key} data, {amount(len(chosen.images), "image")}', *shared.lines]
    if data.masks:
        return MaskTruth(chosen, data.masks, data.classes, classes, palette, about)
    content = coco_of_split(chosen, data.classes)
    return ObjectTruth(content, chosen.folder, classes, about)


def chosen_split(data: DataSet, split: Optional[str], source: Path) -> str:
    """The split that is evaluated."""
    usable = [name for name in PREFERRED if name in data.splits and data.splits[name].is_annotated]
    if split is None and usable:
        return usable[0]
    if split in usable:
        return str(split)
    wanted = split or ' or '.join(SPLITS)
    raise UserError(
        f'{source} has no {wanted} data with annotations; it has {" and ".join(usable) or "none"}'
    )


def classes_in_common(ours: Sequence[str], theirs: Sequence[str], source: Path) -> SharedClasses:
    """The classes of a model that data have, and lines about the others."""
    common = [name for name in ours if name in theirs]
    if not common:
        raise UserError(
            f'{source} and the model have no class in common: the data have '
            f'{", ".join(theirs[:8])}, the model {", ".join(ours[:8])}'
        )
    lines = []
    if unknown := [name for name in theirs if name not in common]:
        lines.append(f'classes that the model lacks do not count: {", ".join(unknown[:8])}')
    if unused := [name for name in ours if name not in common]:
        lines.append(f'classes of the model that the data lack: {", ".join(unused[:8])}')
    return SharedClasses(common, lines)
