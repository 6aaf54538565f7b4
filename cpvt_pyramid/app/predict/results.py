"""The files of results in a folder."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from ..images.formats import open_image
from ..images.inputs import (
    COCO,
    GEOJSON,
    OVERLAY,
    RESULTS_OF_IMAGES,
    RESULTS_OF_VIDEOS,
    TILED_LABELS,
    VIDEO_OVERLAY,
    NamedInput,
    is_video,
)
from ..images.large import LargeImage, overview_step
from ..images.rasters import import_rasterio
from ..predictions.drawing import font, label_counts
from ..predictions.formats import (
    ImageObjects,
    features_of_label_file,
    features_of_labels,
    features_of_objects,
    may_be_located,
    objects_of_labels,
    write_coco,
    write_geojson,
)
from ..predictions.kinds import Detections, Kind, LabelMap, Prediction, save_overlay
from ..predictions.records import write_records
from ..tooling.command import UserError
from ..tooling.files import atomic_write
from .large_images import (
    Reduced,
    boxes_in_tiles,
    draw_large_boxes,
    draw_large_labels,
    label_lines,
    label_map_writer,
)
from .options import InferOptions
from .protocol import Model
from .tiles import TileGrid


class Results:
    """Writes what a model finds, and counts it. Threads may share it.

    Args:
        options: what is written, and the folder, which exists.
        kind: of the results.
        classes: names.
        most_boxes: that the model returns for an image; None: no limit is known.

    Attributes:
        full: images and videos in which the model found `most_boxes`; others may be missing.
    """

    def __init__(
        self,
        options: InferOptions,
        kind: Kind,
        classes: Sequence[str],
        most_boxes: Optional[int] = None,
    ) -> None:
        self.folder = Path(options.out_dir)
        self.kind = kind
        self.classes = classes
        self.pictures = not options.no_pictures
        self.format = options.format
        self.is_tiled = bool(options.tile)
        self.most_boxes = most_boxes
        self.full: set[Path] = set()
        self.counts: Counter[str] = Counter()  # objects, or pixels, of each class
        self.objects: dict[str, ImageObjects] = {}  # by name, for coco.json
        self.lock = threading.Lock()
        if self.pictures:
            # Fonts import matplotlib, which catches warnings. In one of the threads that draw it
            # would also catch those of the others.
            font(12)

    def check(self, named: Sequence[NamedInput]) -> None:
        """Check, before a run, that the results of inputs can be written."""
        videos = [path for path, _ in named if is_video(path)]
        if self.format == 'coco' and self.kind == 'labels' and self.is_tiled:
            raise UserError(
                'with --tile, segmentation masks can be written as geojson, got --format coco'
            )
        if self.kind == 'labels' and self.is_tiled:
            import_rasterio('--tile with a segmentor, which writes GeoTIFFs,')
        if videos and not self.pictures and self.kind == 'labels':
            raise UserError('of a video, a segmentor writes a picture only; drop --no-pictures')
        if not self.format:
            return
        if videos:
            raise UserError(f'--format is for images, but {videos[0]} is a video; run it without')
        if self.format == 'geojson':
            if self.kind != 'detections' or any(may_be_located(path) for path, _ in named):
                import_rasterio('--format geojson')

    def exist(self, entry: NamedInput) -> bool:
        """Whether the results of an image or a video are there. Each file of them is complete."""
        path, name = entry
        if is_video(path):
            endings = [*RESULTS_OF_VIDEOS[self.kind]]
            overlay = VIDEO_OVERLAY
        else:
            endings = [*RESULTS_OF_IMAGES[self.kind]]
            overlay = OVERLAY
            if self.is_tiled and self.kind == 'labels':
                endings = [TILED_LABELS]
            if self.format == 'geojson':
                endings.append(GEOJSON)
        if self.pictures:
            endings.append(overlay)
        return all((self.folder / f'{name}{ending}').exists() for ending in endings)

    def write(self, entry: NamedInput, prediction: Prediction) -> None:
        """Write the results of an image."""
        path, name = entry
        size = prediction.image.shape[:2]
        self.look_at_number(path, prediction)
        if self.pictures:
            save_overlay(prediction.draw(), self.folder / f'{name}{OVERLAY}')
        if self.kind != 'detections':
            with atomic_write(self.folder / f'{name}.{self.kind}.png') as file:
                file.write_bytes(prediction.png())
        if isinstance(prediction, LabelMap):
            counts = count_pixels(prediction.labels, self.classes)
            features = features_of_labels(prediction.labels, self.classes)
            objects = []
            if self.format == 'coco':
                objects = objects_of_labels(prediction.labels, self.classes)
        else:
            objects = prediction.records()
            write_records(self.folder / f'{name}.{self.kind}.json', path, size, self.kind, objects)
            counts = Counter(item['class'] for item in objects)
            features = features_of_objects(objects)
        self._add(entry, size, objects, counts)
        if self.format == 'geojson':
            write_geojson(self.folder / f'{name}{GEOJSON}', path, features)

    def write_in_tiles(
        self,
        entry: NamedInput,
        model: Model,
        image: LargeImage,
        grid: TileGrid,
        batch_size: int,
        done: Callable[[int], object],
    ) -> None:
        """Predict from an image in tiles, and write its results.

        Args:
            entry: the image, and the name of its results.
            model: predicts from tiles.
            image: opened.
            grid: its tiles.
            batch_size: tiles that the model gets at a time.
            done: called with the number of tiles that are finished since the last call.

        Raises:
            ReadError: not a complete image, or of an unsupported kind.
            UserError: they cannot be written.
        """
        path, name = entry
        overlay = self.folder / f'{name}{OVERLAY}'
        objects: list[dict[str, Any]] = []
        if self.kind == 'detections':
            boxes, fullest = boxes_in_tiles(model, image, grid, batch_size, done)
            empty = np.zeros((1, 1, 3), np.uint8)  # which is not drawn
            prediction = Detections(
                empty,
                self.classes,
                model.palette,
                *boxes,
                limit=model.most_boxes,
                fullest=fullest,
            )
            self.look_at_number(path, prediction)
            if self.pictures:
                draw_large_boxes(image, model, boxes, overlay)
            objects = prediction.records()
            file = self.folder / f'{name}.detections.json'
            write_records(file, path, image.shape, self.kind, objects)
            counts = Counter(item['class'] for item in objects)
            features = features_of_objects(objects)
        else:
            file = self.folder / f'{name}{TILED_LABELS}'
            counts = Counter()
            shown = Reduced(overview_step(image.shape))
            with label_map_writer(file, image, model) as write:
                for lines in label_lines(model, image, grid, batch_size, file.parent, done):
                    write(lines)
                    shown.add(lines)
                    counts += count_pixels(lines, self.classes)
            if self.pictures:
                draw_large_labels(image, model, shown, overlay)
            features = features_of_label_file(file, self.classes)
        self._add(entry, image.shape, objects, counts)
        if self.format == 'geojson':
            write_geojson(self.folder / f'{name}{GEOJSON}', path, features)

    def look_at_number(self, path: Path, prediction: Prediction) -> None:
        """Note an image or a video if a prediction for it has as many boxes as there can be."""
        if isinstance(prediction, Detections) and prediction.is_full:
            self.full.add(path)

    def _add(
        self, entry: NamedInput, size: tuple[int, int], objects: list[dict], counts: Counter[str]
    ) -> None:
        path, name = entry
        with self.lock:
            self.counts += counts
            if self.format == 'coco':
                self.objects[name] = ImageObjects(path, size, objects)

    def finish(self, done: Sequence[NamedInput]) -> None:
        """Write what is one file for all images; those that an earlier run has written are read."""
        if self.format != 'coco':
            return
        found = []
        for entry in done:
            _, name = entry
            found.append(self.objects[name] if name in self.objects else self.read(entry))
        write_coco(self.folder / COCO, found, self.classes)

    def read(self, entry: NamedInput) -> ImageObjects:
        """What an earlier run, or another process, has written for an image."""
        path, name = entry
        if self.kind == 'labels':
            labels = pixels_of(self.folder / f'{name}.labels.png')
            height, width = labels.shape
            return ImageObjects(path, (height, width), objects_of_labels(labels, self.classes))
        file = self.folder / f'{name}.{self.kind}.json'
        content = json.loads(file.read_text(encoding='utf-8'))
        objects = content[self.kind]
        return ImageObjects(path, (content['height'], content['width']), objects)

    def summary(self) -> str:
        """What was found in images: the number of objects of each class, or the share of pixels."""
        total = sum(self.counts.values())
        found = []
        for name, count in self.counts.most_common():
            share = f'{name} {count / total:.1%}'
            found.append(share if self.kind == 'labels' else f'{count} {name}')
        return ', '.join(found) or 'nothing'


def count_pixels(labels: np.ndarray, classes: Sequence[str]) -> Counter[str]:
    """The number of pixels of each class in a label map."""
    counts: Counter[str] = Counter()
    for label, pixels in zip(*label_counts(labels)):
        if label < len(classes):
            counts[str(classes[label])] += int(pixels)
    return counts


def pixels_of(path: Path) -> np.ndarray:
    with open_image(path) as image:
        return np.asarray(image)
