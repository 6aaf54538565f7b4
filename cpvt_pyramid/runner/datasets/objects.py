"""Boxes and polygons of a folder as COCO records, whatever its layout."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from ...tooling.command import UserError
from .defects import Defects

SEED = 0  # of the validation split
BEYOND = 1  # pixels by which a box may reach beyond its image: rounding


class Split(NamedTuple):
    """The images and objects for training, validation or testing."""

    content: dict[str, Any]  # as in a COCO file
    folder: Path  # that the images' names are relative to
    path: Optional[Path] = None  # the COCO file, if it has this content

    def of_images(self, images: list[dict]) -> 'Split':
        """The part with some of the images."""
        ids = {image['id'] for image in images}
        annotations = [a for a in self.content['annotations'] if a['image_id'] in ids]
        content = {**self.content, 'images': images, 'annotations': annotations}
        return Split(content, self.folder)


class Objects(NamedTuple):
    """What was found in a folder with boxes or polygons."""

    layout: str  # for people
    splits: dict[str, Split]  # by train, val and test
    classes: list[str]
    notes: list[str]  # what a person should know, one line each


class Outline(NamedTuple):
    """An object as YOLO and VOC files have it."""

    label: int
    points: np.ndarray  # (N, 2) corners of the box or polygon, in pixels
    at: str  # its place, for messages
    is_polygon: bool = False
    is_ignored: bool = False


def coco_content(
    records: Iterable[tuple[str, tuple[int, int], list[Outline]]],
    classes: Sequence[str],
    defects: Defects,
) -> dict[str, Any]:
    """The content of a COCO file: of each image its name, (height, width) and objects. What
    reaches beyond an image is cut off."""
    images, annotations = [], []
    for name, (height, width), outlines in records:
        images.append({'id': len(images) + 1, 'file_name': name, 'width': width, 'height': height})
        for outline in outlines:
            points = outline.points.clip(0, (width, height))
            low, high = points.min(0), points.max(0)
            if not (high > low).all():
                outside = (outline.points.max(0) > outline.points.min(0)).all()
                kind = 'boxes outside their image' if outside else 'objects without width or height'
                defects.add(kind, outline.at, is_error=outside)
                continue
            if np.abs(points - outline.points).max() > BEYOND:
                defects.warn('objects that reach beyond their image: cut off', outline.at)
            box = [*low, *(high - low)]
            x, y = points.T
            area = 0.5 * abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) if outline.is_polygon else 0
            annotation = {
                'id': len(annotations) + 1,
                'image_id': len(images),
                'category_id': outline.label + 1,
                'bbox': rounded(box),
                'area': round(float(area or box[2] * box[3]), 2),
                'iscrowd': int(outline.is_ignored),
            }
            if outline.is_polygon:
                annotation['segmentation'] = [rounded(points.ravel())]
            annotations.append(annotation)
    return {'images': images, 'annotations': annotations, 'categories': categories_of(classes)}


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 2) for value in values]


def categories_of(classes: Sequence[str]) -> list[dict]:
    return [{'id': i, 'name': name} for i, name in enumerate(classes, 1)]


def divided(items: Sequence) -> tuple[list, list]:
    """Training and validation items where there are no validation data: of these a fifth, at most
    2,000."""
    if len(items) < 2:
        raise UserError('there must be at least 2 training images, one of them for validation')
    count = min(max(len(items) // 5, 1), 2000)
    chosen = {*np.random.default_rng(SEED).permutation(len(items))[:count].tolist()}
    train, val = [], []
    for index, item in enumerate(items):
        (val if index in chosen else train).append(item)
    return train, val


def with_masks(found: Objects, defects: Defects) -> Objects:
    """Report objects that have no mask, and leave them out."""
    splits, masks = {}, 0
    for name, split in found.splits.items():
        good = []
        for annotation in split.content['annotations']:
            if annotation.get('segmentation') or annotation.get('iscrowd'):
                good.append(annotation)
            else:
                at = f'annotation {annotation["id"]} of the {name} data'
                defects.error('objects without a mask', at)
        masks += len(good)
        if len(good) < len(split.content['annotations']):
            split = split._replace(content={**split.content, 'annotations': good}, path=None)
        splits[name] = split
    if not masks:
        raise UserError(
            f'the base trains masks, but the {found.layout} data have boxes only; choose a base '
            'such as retinanet_cpvt_s.py'
        )
    return found._replace(splits=splits)
