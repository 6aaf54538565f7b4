"""Boxes and polygons of a folder as COCO records, whatever its layout."""

from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from ...results.drawing import Color, class_palette
from ...tooling.command import UserError
from .defects import Defects

SEED = 0  # of the validation split
BEYOND = 1  # pixels by which a box may reach beyond its image: rounding


class Split(NamedTuple):
    """The images and objects for training, validation or testing."""

    content: dict[str, Any]  # as in a COCO file
    folder: Path  # that the images' names are relative to
    path: Optional[Path] = None  # the COCO file, if it has this content


class Objects(NamedTuple):
    """What was found in a folder with boxes or polygons."""

    layout: str  # for people
    splits: dict[str, Split]  # by train, val and test
    classes: list[str]
    notes: list[str]  # what a person should know, one line each

    @property
    def palette(self) -> list[Color]:
        return class_palette(self.classes)


class Outline(NamedTuple):
    """An object as YOLO and VOC files have it."""

    label: int
    points: np.ndarray  # (N, 2) corners of the box or polygon, in pixels
    at: str  # its place, for messages
    is_polygon: bool = False
    is_ignored: bool = False


def coco_content(
    objects: dict[str, list[Outline]],
    sizes: dict[str, tuple[int, int]],
    classes: Sequence[str],
    defects: Defects,
) -> dict[str, Any]:
    """The content of a COCO file, from the objects and the (height, width) of each image. What
    reaches beyond an image is cut off."""
    images, annotations = [], []
    for name, outlines in objects.items():
        height, width = sizes[name]
        images.append({'id': len(images) + 1, 'file_name': name, 'width': width, 'height': height})
        for outline in outlines:
            if outline.label >= len(classes):
                kind = f'objects of classes beyond the names, 0 to {len(classes) - 1}'
                defects.add(kind, f'class {outline.label} in {outline.at}')
                continue
            points = outline.points.clip(0, (width, height))
            low, high = points.min(0), points.max(0)
            if not (high > low).all():
                outside = (outline.points.max(0) > outline.points.min(0)).all()
                kind = 'boxes outside their image' if outside else 'objects without width or height'
                defects.add(kind, outline.at, is_error=outside)
                continue
            if np.abs(points - outline.points).max() > BEYOND:
                defects.warn('objects that reach beyond their image: cut off', outline.at)
            x, y = points.T
            area = 0.5 * abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) if outline.is_polygon else 0
            annotation = {
                'id': len(annotations) + 1,
                'image_id': len(images),
                'category_id': outline.label + 1,
                'bbox': rounded([*low, *(high - low)]),
                'area': round(float(area or (high - low).prod()), 2),
                'iscrowd': int(outline.is_ignored),
            }
            if outline.is_polygon:
                annotation['segmentation'] = [rounded(points.ravel())]
            annotations.append(annotation)
    return {'images': images, 'annotations': annotations, 'categories': categories_of(classes)}


def content_of_images(content: dict[str, Any], images: list[dict]) -> dict[str, Any]:
    """The part of a COCO file with some of its images; their ids may be of any type."""
    ids = {repr(image.get('id')) for image in images}
    annotations = [a for a in content['annotations'] if repr(a.get('image_id')) in ids]
    return {**content, 'images': images, 'annotations': annotations}


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
    chosen = np.zeros(len(items), bool)
    chosen[np.random.default_rng(SEED).permutation(len(items))[:count]] = True
    return list(compress(items, ~chosen)), list(compress(items, chosen))


def with_masks(found: Objects, defects: Defects) -> Objects:
    """Report objects that have no mask, and leave them out."""
    splits = {}
    for name, split in found.splits.items():
        annotations, good = split.content['annotations'], []
        for annotation in annotations:
            if annotation.get('segmentation') or annotation.get('iscrowd'):
                good.append(annotation)
            else:
                at = f'annotation {annotation["id"]} of the {name} data'
                defects.add('objects without a mask', at)
        content = {**split.content, 'annotations': good}
        splits[name] = split if len(good) == len(annotations) else Split(content, split.folder)
    if not any(split.content['annotations'] for split in splits.values()):
        raise UserError(
            f'the base trains masks, but the {found.layout} data have boxes only; choose a base '
            'such as retinanet_cpvt_s.py'
        )
    return found._replace(splits=splits)
