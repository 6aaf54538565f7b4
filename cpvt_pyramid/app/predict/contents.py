"""What a model found in an image, in the forms in which it is written. Each is made once, when it
is first asked for."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ..images.large import overview_step
from ..predictions.drawing import draw_frames, draw_segmentation, label_counts
from ..predictions.formats import (
    Feature,
    features_of_label_file,
    features_of_labels,
    features_of_objects,
    objects_of_labels,
)
from ..predictions.kinds import Detections, LabelMap, Prediction
from ..tooling.files import atomic_write
from .large_images import Reduced, TiledImage, boxes_in_tiles, label_lines, label_map_writer


class Contents(Protocol):
    """What was found in an image."""

    size: tuple[int, int]  # of the image, height and width
    is_full: bool  # whether the model returned as many boxes as it can

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The objects, or the classes in a label map, as JSON values."""

    @property
    def counts(self) -> Counter[str]:
        """The number of objects, or of pixels, of each class."""

    def save(self, file: Path) -> None:
        """Write a label map: a PNG, or in tiles a GeoTIFF."""

    def draw(self) -> Image.Image:
        """The image, or an overview of it, with what was found."""

    def features(self) -> Iterator[Feature]:
        """A feature for each object or region; see `formats`."""


class DetectionContents:
    """Of detections; see `Contents`."""

    def __init__(self, found: Detections) -> None:
        height, width = found.image.shape[:2]
        self.found = found
        self.size = height, width
        self.is_full = found.is_full

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        return self.found.records()

    @property
    def counts(self) -> Counter[str]:
        return Counter(item['class'] for item in self.objects)

    def save(self, file: Path) -> None:
        raise NotImplementedError('detections are written as records')

    def draw(self) -> Image.Image:
        return self.found.draw()

    def features(self) -> Iterator[Feature]:
        return features_of_objects(self.objects)


class LabelContents:
    """Of a label map; see `Contents`."""

    is_full = False

    def __init__(self, found: LabelMap) -> None:
        height, width = found.labels.shape
        self.found = found
        self.size = height, width

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        return objects_of_labels(self.found.labels, self.found.classes)

    @cached_property
    def counts(self) -> Counter[str]:
        return count_pixels(self.found.labels, self.found.classes)

    def draw(self) -> Image.Image:
        return self.found.draw()

    def features(self) -> Iterator[Feature]:
        return features_of_labels(self.found.labels, self.found.classes)

    def save(self, file: Path) -> None:
        """Write the label map as a PNG."""
        with atomic_write(file) as draft:
            draft.write_bytes(self.found.png())


class DetectionsInTiles(DetectionContents):
    """Of detections in an image that need not fit into memory, which `draw` reduces."""

    def __init__(self, tiled: TiledImage) -> None:
        model = tiled.model
        boxes, fullest = boxes_in_tiles(tiled)
        nothing = np.zeros((1, 1, 3), np.uint8)  # which is not drawn
        found = Detections(
            nothing,
            model.classes,
            model.palette,
            *boxes,
            limit=model.most_boxes,
            fullest=fullest,
        )
        super().__init__(found)
        self.image = tiled.image
        self.size = tiled.image.shape

    def draw(self) -> Image.Image:
        found = self.found
        frames = found.boxes / overview_step(self.size)
        return draw_frames(
            self.image.overview(), frames, found.labels, found.classes, found.palette
        )


class LabelsInTiles:
    """Of a label map that need not fit into memory, and is predicted while it is saved; see
    `Contents`."""

    is_full = False

    def __init__(self, tiled: TiledImage) -> None:
        self.tiled = tiled
        self.size = tiled.image.shape
        self.classes = tiled.model.classes
        self.counts: Counter[str] = Counter()
        self.reduced = Reduced(overview_step(self.size))

    @property
    def objects(self) -> list[dict[str, Any]]:
        raise NotImplementedError('they do not fit into memory')

    def save(self, file: Path) -> None:
        """Write the label map as a GeoTIFF, while its lines come."""
        with label_map_writer(file, self.tiled) as write:
            for lines in label_lines(self.tiled, file.parent):
                write(lines)
                self.reduced.add(lines)
                self.counts += count_pixels(lines, self.classes)
        self.file = file

    def draw(self) -> Image.Image:
        small, labels = self.tiled.image.overview(), self.reduced.labels()
        return draw_segmentation(small, labels, self.classes, self.tiled.model.palette)

    def features(self) -> Iterator[Feature]:
        return features_of_label_file(self.file, self.classes)


def contents_for(found: Prediction) -> Contents:
    return DetectionContents(found) if isinstance(found, Detections) else LabelContents(found)


def contents_in_tiles(tiled: TiledImage) -> Contents:
    has_boxes = tiled.model.kind == 'detections'
    return DetectionsInTiles(tiled) if has_boxes else LabelsInTiles(tiled)


def count_pixels(labels: np.ndarray, classes: Sequence[str]) -> Counter[str]:
    """The number of pixels of each class in a label map."""
    counts: Counter[str] = Counter()
    for label, pixels in zip(*label_counts(labels)):
        if label < len(classes):
            counts[str(classes[label])] += int(pixels)
    return counts
