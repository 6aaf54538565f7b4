"""A data set in memory: one form for objects, whatever their format, and one for masks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from ..images.coco import CocoImage, coco_of
from ..predictions.records import mask_of
from . import defects
from .defects import Defects
from .description import Description

ROUNDING = 1  # pixels by which a box may reach beyond its image
ENOUGH = 8  # boxes beyond their images that tell a whole file's boxes to be corners
Color = tuple[int, int, int]


class Split(NamedTuple):
    """The images and objects for training, validation or testing."""

    content: dict[str, Any]  # as in a COCO file
    folder: Path  # that the images' names are relative to
    path: Optional[Path] = None  # the COCO file, if it has this content
    name: str = ''  # of that file, for messages


class Objects(NamedTuple):
    """A data set of boxes or polygons."""

    description: Description
    splits: dict[str, Split]  # by train, val and test
    classes: list[str]
    notes: list[str]  # what a person should know, one line each


class Pair(NamedTuple):
    """An image and its segmentation mask, relative to the folder of the data."""

    image: str
    mask: Optional[str]


class Masks(NamedTuple):
    """A data set of images and segmentation masks."""

    description: Description
    splits: dict[str, list[Pair]]
    classes: list[str]
    notes: list[str]

    @property
    def values(self) -> list[int]:
        """The value of each class in the masks, or its colour as 0xRRGGBB."""
        colors = self.description.colors
        if colors:
            return [packed(colors[name]) for name in self.classes]
        return list(self.description.names or {})


Data = Union[Objects, Masks]


def packed(color: Color) -> int:
    return color[0] << 16 | color[1] << 8 | color[2]


class Outline(NamedTuple):
    """An object, as files with annotations of one image have it.

    Attributes:
        label: the index of its class.
        parts: (N, 2) corners of each polygon, or the two of a box, in pixels.
        at: its place, for messages.
        is_polygon: the parts are polygons, and not boxes.
        is_ignored: training and evaluation leave it out.
        runs: its pixels in an image, as run lengths of COCO, if polygons do not tell them because
            it has holes; `parts` are then boxes around it.
    """

    label: int
    parts: list[np.ndarray]
    at: str
    is_polygon: bool = False
    is_ignored: bool = False
    runs: Optional[dict[str, Any]] = None


def coco_content(
    objects: dict[str, list[Outline]],
    sizes: dict[str, tuple[int, int]],
    classes: Sequence[str],
    found: Defects,
) -> dict[str, Any]:
    """The content of a COCO file, from the objects and the (height, width) of each image. What
    reaches beyond an image is cut off."""
    images = []
    for name, outlines in objects.items():
        annotations = [annotation_of(outline, sizes[name], found) for outline in outlines]
        images.append(CocoImage(name, sizes[name], [a for a in annotations if a]))
    return coco_of(images, classes)


def annotation_of(outline: Outline, size: tuple[int, int], found: Defects) -> dict[str, Any]:
    """The annotation of an object in an image of a (height, width); nothing if nothing of it is
    inside."""
    parts = []
    is_cut = False
    for part in outline.parts:
        points = part.clip(0, size[::-1])
        if (points.max(0) > points.min(0)).all():
            parts.append(points)
        is_cut = is_cut or bool(np.abs(points - part).max() > ROUNDING)
    if not parts:
        has_area = any((part.max(0) > part.min(0)).all() for part in outline.parts)
        found.add(defects.OUTSIDE_CUT if has_area else defects.WITHOUT_AREA, outline.at)
        return {}
    if is_cut:
        found.add(defects.CUT, outline.at)
    corners = np.concatenate(parts)
    low, sides = corners.min(0), np.ptp(corners, axis=0)
    area = float(sides.prod())
    if outline.is_polygon:
        area = sum(map(area_of_polygon, parts)) or area
    if outline.runs:
        area = float(mask_of(outline.runs).sum())
    annotation = {
        'category_id': outline.label + 1,
        'bbox': rounded([*low, *sides]),
        'area': round(area, 2),
        'iscrowd': int(outline.is_ignored),
    }
    if outline.is_polygon:
        annotation['segmentation'] = [rounded(part.ravel()) for part in parts]
    if outline.runs:
        annotation['segmentation'] = outline.runs
    return annotation


def area_of_polygon(points: np.ndarray) -> float:
    x, y = points.T
    return 0.5 * abs(float(x @ np.roll(y, 1) - y @ np.roll(x, 1)))


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 2) for value in values]


def content_of_images(content: dict[str, Any], images: list[dict]) -> dict[str, Any]:
    """The part of a COCO file with some of its images; their ids may be of any type."""
    ids = {repr(image.get('id')) for image in images}
    annotations = [a for a in content['annotations'] if repr(a.get('image_id')) in ids]
    return {**content, 'images': images, 'annotations': annotations}


def objects_by_class(content: dict[str, Any]) -> Counter:
    """The number of objects of each class that has any."""
    names = {category['id']: category['name'] for category in content['categories']}
    return Counter(names[annotation['category_id']] for annotation in content['annotations'])


def divided(items: Sequence, chosen: np.ndarray) -> tuple[list, list]:
    """The items that are not chosen, and those that are."""
    return list(compress(items, ~chosen)), list(compress(items, chosen))


def are_corners(boxes: np.ndarray, sides: np.ndarray) -> bool:
    """Whether (N, 2, 2) numbers are all upper left and lower right corners in images of some (N, 2)
    widths and heights."""
    low, high = boxes[:, 0], boxes[:, 1]
    return bool((low <= high).all() and (high <= sides + ROUNDING).all())
