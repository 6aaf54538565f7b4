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
from .images import Size

ROUNDING = 1  # pixels by which a box may reach beyond its image
ENOUGH = 8  # boxes beyond their images that tell a whole file's boxes to be corners
Color = tuple[int, int, int]


class ImageObject(NamedTuple):
    """An object in an image.

    Attributes:
        label: the index of its class.
        box: left, top, width and height in pixels.
        area: in pixels.
        at: its place in the annotations, for messages.
        is_ignored: training and evaluation leave it out, as crowds.
        polygons: of its parts, each x1 y1 x2 y2 and so on.
        runs: its pixels as run lengths of COCO, where polygons do not tell them, as with holes.
        has_bad_mask: the annotations have a mask that cannot be read, which was reported.
    """

    label: int
    box: tuple[float, float, float, float]
    area: float
    at: str
    is_ignored: bool = False
    polygons: Sequence[list[float]] = ()
    runs: Optional[dict[str, Any]] = None
    has_bad_mask: bool = False

    @property
    def has_mask(self) -> bool:
        return bool(self.polygons or self.runs)


class ObjectImage(NamedTuple):
    """An image and the objects in it."""

    name: str  # relative to the folder of its split
    size: Size  # as the annotations have it
    objects: list[ImageObject]


class Split(NamedTuple):
    """The images and objects for training, validation or testing.

    Attributes:
        images: all of them.
        folder: that the images' names are relative to.
        path: the COCO file that OpenMMLab can read instead; None if there is none.
        name: of the file with the annotations of all images, for messages.
    """

    images: list[ObjectImage]
    folder: Path
    path: Optional[Path] = None
    name: str = ''

    @property
    def objects(self) -> list[ImageObject]:
        return [item for image in self.images for item in image.objects]


def place_in(split: Split, item: str) -> str:
    """An item with its file of annotations, if there is one for all images."""
    return f'{item} ({split.name})' if split.name else item


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


def images_with_objects(
    outlines: dict[str, list[Outline]], sizes: dict[str, Size], found: Defects
) -> list[ObjectImage]:
    """Images with their objects, from the outlines in them and their sizes. What reaches beyond an
    image is cut off."""
    images = []
    for name, of_image in outlines.items():
        objects = [object_inside(outline, sizes[name], found) for outline in of_image]
        images.append(ObjectImage(name, sizes[name], [item for item in objects if item]))
    return images


def object_inside(outline: Outline, size: Size, found: Defects) -> Optional[ImageObject]:
    """The part of an object that is inside an image; None if there is none."""
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
        return None
    if is_cut:
        found.add(defects.CUT, outline.at)
    corners = np.concatenate(parts)
    low, sides = corners.min(0), np.ptp(corners, axis=0)
    area = float(sides.prod())
    polygons = []
    if outline.is_polygon:
        area = sum(map(area_of_polygon, parts)) or area
        polygons = [rounded(part.ravel()) for part in parts]
    if outline.runs:
        area = float(mask_of(outline.runs).sum())
    left, top, width, height = rounded([*low, *sides])
    box = left, top, width, height
    is_ignored = outline.is_ignored
    return ImageObject(
        outline.label, box, round(area, 2), outline.at, is_ignored, polygons, outline.runs
    )


def area_of_polygon(points: np.ndarray) -> float:
    x, y = points.T
    return 0.5 * abs(float(x @ np.roll(y, 1) - y @ np.roll(x, 1)))


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 2) for value in values]


def coco_of_split(split: Split, classes: Sequence[str]) -> dict[str, Any]:
    """The content of a COCO file with the images and objects of a split."""
    images = []
    for image in split.images:
        annotations = []
        for item in image.objects:
            annotation = {
                'category_id': item.label + 1,
                'bbox': list(item.box),
                'area': item.area,
                'iscrowd': int(item.is_ignored),
            }
            if item.has_mask:
                annotation['segmentation'] = item.runs or list(item.polygons)
            annotations.append(annotation)
        images.append(CocoImage(image.name, image.size, annotations))
    return coco_of(images, classes)


def objects_by_class(objects: Iterable[ImageObject], classes: Sequence[str]) -> Counter:
    """The number of objects of each class that has any."""
    return Counter(classes[item.label] for item in objects)


def divided(items: Sequence, chosen: np.ndarray) -> tuple[list, list]:
    """The items that are not chosen, and those that are."""
    return list(compress(items, ~chosen)), list(compress(items, chosen))


def are_corners(boxes: np.ndarray, sides: np.ndarray) -> bool:
    """Whether (N, 2, 2) numbers are all upper left and lower right corners in images of some (N, 2)
    widths and heights."""
    low, high = boxes[:, 0], boxes[:, 1]
    return bool((low <= high).all() and (high <= sides + ROUNDING).all())
