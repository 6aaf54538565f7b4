"""A data set in memory: one record, whatever its layout."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from ..images.coco import CocoImage, coco_of
from ..predictions.records import mask_of
from ..tooling.command import UserError
from . import defects
from .defects import Defects
from .description import IGNORED, Description
from .images import Size

ROUNDING = 1  # pixels by which a box may reach beyond its image
ENOUGH = 8  # boxes beyond their images that tell a whole file's boxes to be corners
BEYOND = 0.05  # share of an image by which such boxes reach beyond it
UNREAD = 0, 0  # size of an image that has not been read
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


class DataImage(NamedTuple):
    """An image with its objects or its segmentation mask.

    Attributes:
        name: of its file, relative to the folder of its split.
        size: as the annotations have it; `UNREAD` until the check reads the image.
        objects: in it.
        mask: the file of its mask, relative to the folder of its split.
        pixels: of the mask, how many of each value, or colour as 0xRRGGBB. None until the check
            reads it.
    """

    name: str
    size: Size
    objects: list[ImageObject]
    mask: Optional[str] = None
    pixels: Optional[dict[int, int]] = None


class Split(NamedTuple):
    """The images for training, validation or testing.

    Attributes:
        images: all of them.
        folder: that the images' names are relative to.
        path: the COCO file that OpenMMLab can read instead; None if there is none.
        name: of the file with the annotations of all images, for messages.
    """

    images: list[DataImage]
    folder: Path
    path: Optional[Path] = None
    name: str = ''

    @property
    def objects(self) -> list[ImageObject]:
        return [item for image in self.images for item in image.objects]

    @property
    def is_annotated(self) -> bool:
        """Whether any image has an object or a mask. Test images may have none."""
        return any(image.objects or image.mask for image in self.images)

    @property
    def pixels(self) -> Counter:
        """The pixels of all masks, as in `DataImage.pixels`."""
        counts: Counter = Counter()
        for image in self.images:
            counts.update(image.pixels or {})
        return counts


def place_in(split: Split, item: str) -> str:
    """An item with its file of annotations, if there is one for all images."""
    return f'{item} ({split.name})' if split.name else item


class MaskValues(NamedTuple):
    """What the pixels of segmentation masks mean.

    Attributes:
        classes: the value of each class, or its colour as 0xRRGGBB.
        ignored: values that do not count. Of colours, all others do not.
        are_colors: masks are in colours.
        declares_255: someone has said what 255 is: a class, or ignored.
    """

    classes: list[int]
    ignored: tuple[int, ...] = (IGNORED,)
    are_colors: bool = False
    declares_255: bool = True

    @property
    def colors(self) -> Optional[list[Color]]:
        return [unpacked(code) for code in self.classes] if self.are_colors else None


class DataSet(NamedTuple):
    """A data set: images with objects, or with segmentation masks.

    Attributes:
        description: what declares it.
        splits: by train, val and test.
        classes: their names.
        notes: what a person should know, one line each.
        masks: what the pixels of the masks mean; None: the images have objects.
    """

    description: Description
    splits: dict[str, Split]
    classes: list[str]
    notes: list[str]
    masks: Optional[MaskValues] = None


def packed(color: Color) -> int:
    return color[0] << 16 | color[1] << 8 | color[2]


def unpacked(code: int) -> Color:
    return code >> 16, code >> 8 & 255, code & 255


class Outline(NamedTuple):
    """An object, as files with annotations of one image have it.

    Attributes:
        label: its class as the file has it: a number, or a name.
        parts: (N, 2) corners of each polygon, or the two of a box, in pixels.
        at: its place, for messages.
        is_polygon: the parts are polygons, and not boxes.
        is_ignored: training and evaluation leave it out.
        runs: its pixels in an image, as run lengths of COCO, if polygons do not tell them because
            it has holes; `parts` are then boxes around it.
    """

    label: Union[int, str]
    parts: list[np.ndarray]
    at: str
    is_polygon: bool = False
    is_ignored: bool = False
    runs: Optional[dict[str, Any]] = None


def object_inside(
    outline: Outline, label: int, size: Size, found: Defects
) -> Optional[ImageObject]:
    """The part of an object that is inside an image; None if there is none. `label` is the index of
    its class."""
    parts = []
    is_cut = False
    for part in outline.parts:
        points = part.clip(0, size[::-1])
        if np.abs(points - part).max() > ROUNDING:
            is_cut = True
            if outline.is_polygon:
                points = polygon_inside(part, size)
        if len(points) and (points.max(0) > points.min(0)).all():
            parts.append(points)
    if not parts:
        found.add(defects.OUTSIDE, outline.at)
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
    return ImageObject(label, box, round(area, 2), outline.at, is_ignored, polygons, outline.runs)


def polygon_inside(points: np.ndarray, size: Size) -> np.ndarray:
    """The part of a polygon (N, 2) that is inside an image; it may have no corners. Each border of
    the image cuts off what is beyond it (Sutherland and Hodgman, 1974)."""
    height, width = size
    for axis, border, inwards in ((0, 0, 1), (1, 0, 1), (0, width, -1), (1, height, -1)):
        kept = []
        for start, stop in zip(np.roll(points, 1, axis=0), points):
            before = inwards * (start[axis] - border)
            after = inwards * (stop[axis] - border)
            if (before < 0) != (after < 0):
                kept.append(start + before / (before - after) * (stop - start))
            if after >= 0:
                kept.append(stop)
        points = np.reshape(kept, (-1, 2))
    return points


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


def check_that_boxes_are_no_corners(
    given: np.ndarray, corners: np.ndarray, sizes: Sequence[Size], where: str
) -> None:
    """Raise a UserError if all boxes fit their images as x1 y1 x2 y2, and many do not as what they
    must be.

    Args:
        given: (N, 2, 2) the four numbers of each box, in pixels.
        corners: (N, 2, 2) its upper left and lower right corners, if they are what they must be.
        sizes: of the image of each box.
        where: begins the message with a place and what a box must be.
    """
    if not len(given):
        return
    sides = np.array(sizes, float)[:, ::-1]
    (low, high), (first, second) = corners.swapaxes(0, 1), given.swapaxes(0, 1)
    beyond = ((low < -BEYOND * sides) | (high > (1 + BEYOND) * sides)).any(1).sum()
    are_corners = (first <= second).all() and (second <= sides + ROUNDING).all()
    if beyond >= ENOUGH and are_corners:
        raise UserError(
            f'{where}, but these are x1, y1, x2, y2: {beyond} of {len(given)} would reach beyond '
            'their image'
        )
