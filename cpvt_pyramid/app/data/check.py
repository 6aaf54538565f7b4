"""The check of a data set in memory, for all formats: what training and evaluation cannot use."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple, Optional

import numpy as np

from . import defects
from .data import (
    ROUNDING,
    Data,
    ImageObject,
    Masks,
    ObjectImage,
    Objects,
    Pair,
    Split,
    objects_by_class,
    packed,
    place_in,
)
from .defects import Defects, Kind
from .description import IGNORED, in_one_line
from .images import Finding, Reading, Size, flat_findings, in_threads, inspect
from .layouts.coco import lengths_of_runs
from .layouts.masks import value_findings, values_in

SHIFTED, FURTHER = 3, 0.05  # pixels and share of a box by which it may differ from its polygons


class Checked(NamedTuple):
    """A data set after its check.

    Attributes:
        data: without what has errors.
        sizes: of masks: the size of each image.
        counts: of masks: pixels by value or colour.
    """

    data: Data
    sizes: dict[str, Size] = {}
    counts: Counter = Counter()


def checked_data(data: Data, how: Reading, found: Defects) -> Checked:
    """Check a data set.

    Args:
        data: as a reader returns it.
        how: how far images are read, and how training reads them.
        found: gets what is wrong.
    """
    if isinstance(data, Masks):
        return check_masks(data, how, found)
    return check_objects(data, how, found)


# Objects


def check_objects(data: Objects, how: Reading, found: Defects) -> Checked:
    every = [item for split in data.splits.values() for item in split.objects]
    some_have_masks = any(item.has_mask or item.has_bad_mask for item in every)
    splits = {}
    for key, split in data.splits.items():
        if not split.images:
            found.add(defects.NO_IMAGES, key)
            continue
        splits[key] = check_split(split, how, found, some_have_masks, key == 'test')
    warn_about_classes(splits, data.classes, found)
    places = {
        key: {str(split.folder / image.name) for image in split.images}
        for key, split in splits.items()
    }
    warn_about_same_images(places, found)
    return Checked(data._replace(splits=splits))


def warn_about_same_images(images: dict[str, set[str]], found: Defects) -> None:
    """Warn about images of validation and test data that are trained on."""
    for key in ('val', 'test'):
        for name in sorted(images.get(key, set()) & images.get('train', set())):
            found.add(defects.SAME_IMAGE, f'{name} ({key})')


def check_split(
    split: Split,
    how: Reading,
    found: Defects,
    some_have_masks: bool = False,
    may_be_empty: bool = False,
) -> Split:
    """Check a split of objects; returns it without what has errors.

    Args:
        split: its images and objects.
        how: see `checked_data`.
        found: gets what is wrong.
        some_have_masks: those without are worth a warning.
        may_be_empty: images need no objects, as in a list of images for a test.
    """
    for name, count in Counter(image.name for image in split.images).items():
        if count > 1:
            found.add(defects.LISTED_TWICE, place_in(split, name))
    images = [usable_image(image, split, found, some_have_masks) for image in split.images]

    def findings(image: ObjectImage) -> list[Finding]:
        size, seen = inspect(split.folder / image.name, how)
        if size and size != image.size:
            height, width = image.size
            seen.append((defects.OTHER_SIZE, f' ({size[1]} x {size[0]}, not {width} x {height})'))
        if not how.files:
            seen += flat_findings(image.size, how.scales)
        return seen

    is_good = []
    readings = in_threads(findings, images, 'checking images')
    for image, seen in zip(images, readings):
        for kind, more in seen:
            found.add(kind, place_in(split, f'{image.name}{more}'))
        is_good.append(not any(found.is_error(kind) for kind, _ in seen))
    good = split._replace(images=list(compress(images, is_good)))
    check_labels(good, found, may_be_empty)
    is_same = all(is_good) and len(good.objects) == len(split.objects)
    return good if is_same else good._replace(path=None)


def check_labels(split: Split, found: Defects, may_be_empty: bool) -> None:
    """Check that a split has objects that count, and warn about images that have none."""
    name = split.name or str(split.folder)
    if not split.objects:
        if not may_be_empty:
            found.add(defects.NO_ANNOTATIONS, name)
        return
    if all(item.is_ignored for item in split.objects):
        found.add(defects.ALL_IGNORED, f'{name} (all objects are crowds or difficult)')
    for image in split.images:
        if not image.objects:
            found.add(defects.EMPTY_IMAGE, place_in(split, image.name))


def usable_image(
    image: ObjectImage, split: Split, found: Defects, some_have_masks: bool
) -> ObjectImage:
    """An image without objects that cannot be used; its file is not looked at."""
    objects = []
    boxes: set[tuple] = set()
    for item in image.objects:
        kinds = object_findings(item, image.size, boxes)
        if item.has_mask and is_box_elsewhere(item):
            kinds.append(defects.ELSEWHERE)
        if not item.has_mask and not item.has_bad_mask and (some_have_masks or found.masks):
            kinds.append(defects.NO_MASK)
        for kind in kinds:
            found.add(kind, place_in(split, f'{item.at} of {image.name}'))
        if not any(kind.left_out == defects.OBJECT and found.is_error(kind) for kind in kinds):
            objects.append(item)
    return image._replace(objects=objects)


def object_findings(item: ImageObject, size: Size, boxes: set) -> list[Kind]:
    """What is suspicious about an object in an image of a size. `boxes` are those before it."""
    found = []
    left, top, width, height = item.box
    right, bottom = left + width, top + height
    if width < 1 or height < 1:
        found.append(defects.NARROW)
    elif left >= size[1] or top >= size[0] or right <= 0 or bottom <= 0:
        found.append(defects.OUTSIDE)
    elif max(-left, -top, right - size[1], bottom - size[0]) > ROUNDING:
        found.append(defects.BEYOND)
    if (item.label, item.box) in boxes:
        found.append(defects.TWICE)
    boxes.add((item.label, item.box))
    if item.area <= 0:
        found.append(defects.AREA_0)
    return found


def is_box_elsewhere(item: ImageObject) -> bool:
    """Whether the box of an object differs from that around its mask by more than rounding."""
    around = box_of_runs(item.runs) if item.runs else box_of_polygons(item.polygons)
    if around is None:  # a mask of no pixels
        return True
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


def box_of_runs(mask: dict) -> Optional[tuple[float, float, float, float]]:
    """The left, top, right and bottom of the pixels of run lengths, which go down the columns; None
    without pixels."""
    height = mask['size'][0]
    ends = np.cumsum(lengths_of_runs(mask))
    starts, stops = ends[:-1:2], ends[1::2]  # of the runs of ones
    is_run = stops > starts
    if not is_run.any():
        return None
    first, last = starts[is_run], stops[is_run] - 1
    left, right = first // height, last // height
    top, bottom = (first % height).min(), (last % height).max()
    if (left < right).any():  # a run from one column into the next
        top, bottom = 0, height - 1
    return float(left.min()), float(top), float(right.max() + 1), float(bottom + 1)


def warn_about_classes(splits: dict[str, Split], classes: Sequence[str], found: Defects) -> None:
    """Warn about classes that have no object in the training data, and about names that differ only
    in case, spaces, hyphens and underscores."""
    counts = {key: objects_by_class(split.objects, classes) for key, split in splits.items()}
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


# Masks


def check_masks(data: Masks, how: Reading, found: Defects) -> Checked:
    splits: dict[str, list[Pair]] = {}
    sizes: dict[str, Size] = {}
    every: Counter = Counter()
    for key, pairs in data.splits.items():
        if key == 'test' and not any(pair.mask for pair in pairs):
            splits[key] = []  # images to be predicted
            continue
        checked = check_pairs(pairs, data, how, found)
        splits[key] = [pair for pair, _, _ in checked]
        counts: Counter = Counter()
        for pair, size, values in checked:
            sizes[pair.image] = size
            counts.update(values)
        every.update(counts)
        if counts:
            check_counts(key, counts, data, found)
    check_that_255_is_declared(every, data, found)
    warn_about_same_images(
        {key: {pair.image for pair in pairs} for key, pairs in splits.items()}, found
    )
    return Checked(data._replace(splits=splits), sizes, every)


def check_that_255_is_declared(counts: Counter, data: Masks, found: Defects) -> None:
    """Check that a file says what 255 is, if it is the only value besides 0: by convention it is
    ignored, but in masks of one object it is often the object."""
    description = data.description
    if description.declares_255 or description.colors or {*counts} != {0, IGNORED}:
        return
    first, *others = data.classes
    names = {0: first, IGNORED: others[0]} if others else {0: 'background', IGNORED: first}
    found.add(defects.UNDECLARED_255, f'names: {in_one_line(names)}, or ignored: [{IGNORED}]')


def check_pairs(
    pairs: Sequence[Pair], data: Masks, how: Reading, found: Defects
) -> list[tuple[Pair, Size, Counter]]:
    """The pairs without errors, each with the size of its image and the pixels of its values."""
    root = data.description.root

    def read(pair: Pair) -> tuple[Optional[Size], list[Finding], Counter]:
        size, seen = inspect(root / pair.image, how)
        if pair.mask is None:
            return size, [*seen, (defects.NO_LABELS, '')], Counter()
        if not how.files:
            return size, seen, Counter()
        in_colors = bool(data.description.colors)
        values = values_in(root / pair.mask, in_colors, how.masks_by_pillow)
        if isinstance(values, Kind):
            return size, [*seen, (values, '')], Counter()
        return size, seen + value_findings(values, data, size), Counter(values.counts)

    good = []
    readings = in_threads(read, pairs, 'checking images and masks')
    for pair, (size, seen, counts) in zip(pairs, readings):
        for kind, more in seen:
            found.add(kind, f'{pair.image}{more}')
        if not any(found.is_error(kind) for kind, _ in seen):
            good.append((pair, size or (0, 0), counts))
    return good


def check_counts(key: str, counts: Counter, data: Masks, found: Defects) -> None:
    """Check that the masks of a split have labels that count, and more than one."""
    known = {*data.values}
    labelled = known & {*counts}
    unknown = {*counts} - known - {*data.description.ignored}
    colors = data.description.colors
    if not labelled:
        found.add(defects.ALL_IGNORED, f'the masks of the {key} data')
    elif colors and unknown and labelled <= {packed((0, 0, 0))}:
        # Black alone, which is in most tables and in most masks, is no sign that they belong
        # together.
        found.add(defects.ALL_IGNORED, f'the masks of the {key} data (but for black)')
    elif len(labelled) == 1:
        name = data.classes[data.values.index(labelled.pop())]
        found.add(defects.ONE_LABEL, f'the {key} data: {name}')
