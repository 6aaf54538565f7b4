"""The check of a data set in memory, for all layouts: what training and evaluation cannot use."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from pycocotools import mask as coco_mask

from ..tooling.command import UserError
from . import defects
from .data import (
    ROUNDING,
    UNREAD,
    DataImage,
    DataSet,
    ImageObject,
    MaskValues,
    Split,
    objects_by_class,
    packed,
    place_in,
)
from .defects import Defects, Kind
from .description import IGNORED, in_one_line
from .images import Finding, Reading, Size, in_threads, inspect
from .mask_values import Values, value_findings, values_in

SHIFTED, FURTHER = 3, 0.05  # pixels and share of a box by which it may differ from its polygons


def checked_data(data: DataSet, how: Reading, found: Defects) -> DataSet:
    """Check a data set; returns it without what has errors.

    Args:
        data: as a reader returns it.
        how: how far images are read, and how training reads them.
        found: gets what is wrong.

    Raises:
        UserError: masks of objects are used, and no object has one.
    """
    every = [item for split in data.splits.values() for item in split.objects]
    if found.masks and all(map(lacks_mask, every)):
        source, layout = data.description.source, data.description.format
        raise UserError(
            f'masks are trained, but {source} has boxes only ({layout}); choose a base such as '
            'retinanet_cpvt_s.py'
        )
    splits = {}
    for key, split in data.splits.items():
        if split.images:
            splits[key] = checked_split(
                key, split, data.classes, data.masks, how, found, may_be_empty=key == 'test'
            )
        else:
            found.add(defects.NO_IMAGES, key)
    checked = data._replace(splits=splits)
    warn_about_masks_of_some(data, found)
    warn_about_classes(checked, found)
    warn_about_same_images(checked, found)
    check_that_255_is_declared(checked, found)
    return checked


def checked_split(
    key: str,
    split: Split,
    classes: Sequence[str],
    masks: Optional[MaskValues],
    how: Reading,
    found: Defects,
    may_be_empty: bool = False,
) -> Split:
    """Check the images of a split and their annotations; returns it without what has errors.

    Args:
        key: train, val or test.
        split: its images.
        classes: their names.
        masks: what the pixels of masks mean; None: images have objects.
        how: see `checked_data`.
        found: gets what is wrong.
        may_be_empty: images need no annotations, as in a list of images for a test.
    """
    for name, count in Counter(image.name for image in split.images).items():
        if count > 1:
            found.add(defects.LISTED_TWICE, place_in(split, name))
    reads_masks = masks is not None and (split.is_annotated or not may_be_empty)

    def inspected(image: DataImage) -> Inspected:
        result = inspected_file(image, split, how)
        if reads_masks:
            assert masks is not None
            result = inspected_mask(result, split, masks, how)
        return result

    images = [usable_image(image, split, found) for image in split.images]
    good = []
    for image, seen in in_threads(inspected, images, 'checking images'):
        for kind, more in seen:
            found.add(kind, place_in(split, f'{image.name}{more}'))
        if not any(found.is_error(kind) for kind, _ in seen):
            good.append(image)
    checked = split._replace(images=good)
    if masks is None:
        check_objects(key, checked, found, may_be_empty)
    elif checked.pixels:
        check_pixels(key, checked, classes, masks, found)
    is_same = len(good) == len(split.images) and len(checked.objects) == len(split.objects)
    return checked if is_same else checked._replace(path=None)


class Inspected(NamedTuple):
    """An image with what was read of it, and what is wrong with it."""

    image: DataImage
    seen: list[Finding]


def inspected_file(image: DataImage, split: Split, how: Reading) -> Inspected:
    size, seen = inspect(split.folder / image.name, how)
    if image.size == UNREAD:
        return Inspected(image._replace(size=size or UNREAD), seen)
    if size and size != image.size:
        height, width = image.size
        seen.append((defects.OTHER_SIZE, f' ({size[1]} x {size[0]}, not {width} x {height})'))
    return Inspected(image, seen)


def inspected_mask(result: Inspected, split: Split, masks: MaskValues, how: Reading) -> Inspected:
    """An image that has been inspected, with the pixels of its mask."""
    image, seen = result
    if image.mask is None:
        return Inspected(image, [*seen, (defects.WITHOUT_MASK, '')])
    if not how.files:
        return result
    values = values_in(split.folder / image.mask, masks.are_colors, how.masks_by_pillow)
    if not isinstance(values, Values):
        return Inspected(image, [*seen, values])
    size = None if image.size == UNREAD else image.size
    seen = seen + value_findings(values, masks, size)
    return Inspected(image._replace(pixels=values.counts), seen)


# Objects


def check_objects(key: str, split: Split, found: Defects, may_be_empty: bool) -> None:
    """Check that a split has objects that count, and warn about images that have none."""
    name = split.name or f'the {key} data'
    if not split.objects:
        if not may_be_empty:
            found.add(defects.NOTHING_COUNTS, name, 'no objects')
        return
    if all(item.is_ignored for item in split.objects):
        found.add(defects.NOTHING_COUNTS, name, 'all objects are crowds or difficult')
    for image in split.images:
        if not image.objects:
            found.add(defects.EMPTY_IMAGE, place_in(split, image.name))


def usable_image(image: DataImage, split: Split, found: Defects) -> DataImage:
    """An image without objects that cannot be used; its file is not looked at."""
    objects = []
    boxes: set[tuple] = set()
    for item in image.objects:
        kinds = object_findings(item, image.size, boxes)
        if found.masks and lacks_mask(item):
            kinds.append(defects.NO_MASK)
        for kind in kinds:
            found.add(kind, place_in(split, f'{item.at} of {image.name}'))
        if not any(kind.left_out == defects.OBJECT and found.is_error(kind) for kind in kinds):
            objects.append(item)
    return image._replace(objects=objects)


def lacks_mask(item: ImageObject) -> bool:
    return not item.has_mask and not item.has_bad_mask


def object_findings(item: ImageObject, size: Size, boxes: set) -> list[Kind]:
    """What is suspicious about an object in an image of a size. `boxes` are those before it."""
    found = []
    left, top, width, height = item.box
    right, bottom = left + width, top + height
    is_outside = left >= size[1] or top >= size[0] or right <= 0 or bottom <= 0
    if is_outside or item.area <= 0:
        found.append(defects.OUTSIDE)
    elif width < 1 or height < 1:
        found.append(defects.NARROW)
    elif max(-left, -top, right - size[1], bottom - size[0]) > ROUNDING:
        found.append(defects.BEYOND)
    if (item.label, item.box) in boxes:
        found.append(defects.TWICE)
    boxes.add((item.label, item.box))
    if item.has_mask and is_box_elsewhere(item):
        found.append(defects.ELSEWHERE)
    return found


def is_box_elsewhere(item: ImageObject) -> bool:
    """Whether the box of an object differs from that around its mask by more than rounding."""
    around = box_of_runs(item.runs) if item.runs else box_of_polygons(item.polygons)
    left, top, width, height = item.box
    box = left, top, left + width, top + height
    most = SHIFTED + FURTHER * max(width, height)
    return any(abs(own - given) > most for own, given in zip(around, box))


def box_of_polygons(polygons: Sequence[list[float]]) -> tuple[float, float, float, float]:
    """The left, top, right and bottom of polygons x1 y1 x2 y2 ..."""
    every = sum(polygons, []) if len(polygons) > 1 else polygons[0]
    x = every[::2]
    y = every[1::2]
    return min(x), min(y), max(x), max(y)


def box_of_runs(runs: dict[str, Any]) -> tuple[float, float, float, float]:
    """The left, top, right and bottom of the pixels of run lengths; all 0 without pixels."""
    if isinstance(runs['counts'], list):
        runs = coco_mask.frPyObjects(runs, *runs['size'])
    left, top, width, height = coco_mask.toBbox(runs).tolist()
    return left, top, left + width, top + height


# Segmentation masks


def check_pixels(
    key: str, split: Split, classes: Sequence[str], masks: MaskValues, found: Defects
) -> None:
    """Check that the masks of a split have labels that count, and more than one."""
    name = f'the masks of the {key} data'
    known = {*masks.classes}
    labelled = known & {*split.pixels}
    unknown = {*split.pixels} - known - {*masks.ignored}
    if not labelled:
        found.add(defects.NOTHING_COUNTS, name, 'all labels are ignored')
    elif masks.are_colors and unknown and labelled <= {packed((0, 0, 0))}:
        # Black alone, which is in most tables and in most masks, is no sign that they belong
        # together.
        found.add(defects.NOTHING_COUNTS, name, 'all colours but black are ignored')
    elif len(labelled) == 1:
        found.add(defects.ONE_LABEL, f'{name}: {classes[masks.classes.index(labelled.pop())]}')


# The splits together


def warn_about_masks_of_some(data: DataSet, found: Defects) -> None:
    """Warn about objects without a mask where others have one. Where masks are used, each split
    was checked for it."""
    every = [item for split in data.splits.values() for item in split.objects]
    if found.masks or all(map(lacks_mask, every)):
        return
    for split in data.splits.values():
        for image in split.images:
            for item in filter(lacks_mask, image.objects):
                found.add(defects.NO_MASK, place_in(split, f'{item.at} of {image.name}'))


def warn_about_same_images(data: DataSet, found: Defects) -> None:
    """Warn about images of validation and test data that are trained on."""
    places = {
        key: {str(split.folder / image.name) for image in split.images}
        for key, split in data.splits.items()
    }
    for key in ('val', 'test'):
        for name in sorted(places.get(key, set()) & places.get('train', set())):
            found.add(defects.SAME_IMAGE, f'{name} ({key})')


def warn_about_classes(data: DataSet, found: Defects) -> None:
    """Warn about classes that have no object in the training data, and about names that differ only
    in case, spaces, hyphens and underscores."""
    counts = {
        key: objects_by_class(split.objects, data.classes) for key, split in data.splits.items()
    }
    alike = defaultdict(list)
    for name in dict.fromkeys(name for of_split in counts.values() for name in of_split):
        alike[re.sub(r'[\s_-]+', ' ', name.strip().casefold())].append(name)
    for names in alike.values():
        if len(names) > 1:
            found.add(defects.ALIKE, ' and '.join(map(repr, names)))
    trained = counts.pop('train', None)
    if not trained:
        return
    for key, of_split in counts.items():
        for name, count in of_split.items():
            if not trained[name]:
                found.add(defects.UNTRAINED, f'{name} ({count} in the {key} data)')


def check_that_255_is_declared(data: DataSet, found: Defects) -> None:
    """Check that a file says what 255 is, if it is the only value besides 0: by convention it is
    ignored, but in masks of one object it is often the object."""
    values = {value for split in data.splits.values() for value in split.pixels}
    if data.masks is None or data.masks.declares_255 or values != {0, IGNORED}:
        return
    first, *others = data.classes
    names = {0: first, IGNORED: others[0]} if others else {0: 'background', IGNORED: first}
    found.add(defects.UNDECLARED_255, f'names: {in_one_line(names)}, or ignored: [{IGNORED}]')
