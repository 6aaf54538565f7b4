"""The check of a data set in memory, for all formats: what training and evaluation cannot use."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple, Optional

import numpy as np

from ..tooling.command import UserError
from . import defects
from .data import (
    ENOUGH,
    ROUNDING,
    Data,
    Masks,
    Objects,
    Pair,
    Split,
    are_corners,
    content_of_images,
    objects_by_class,
    packed,
)
from .defects import Defects, Kind
from .description import IGNORED, in_one_line
from .images import Finding, Reading, Size, flat_findings, in_threads, inspect
from .layouts.coco import has_box, is_key, is_number
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

    Raises:
        UserError: all boxes of a file have another form.
    """
    if isinstance(data, Masks):
        return check_masks(data, how, found)
    return check_objects(data, how, found)


# Objects


def check_objects(data: Objects, how: Reading, found: Defects) -> Checked:
    every = [a for split in data.splits.values() for a in split.content['annotations']]
    some_have_masks = any(annotation.get('segmentation') for annotation in every)
    splits = {}
    for key, split in data.splits.items():
        if not split.content['images']:
            found.add(defects.NO_IMAGES, key)
            continue
        splits[key] = check_split(split, how, found, some_have_masks, key == 'test')
    warn_about_classes(splits, found)
    places = {
        key: {str(split.folder / image['file_name']) for image in split.content['images']}
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
    content = usable_content(split, found, some_have_masks)

    def findings(image: dict) -> list[Finding]:
        size, seen = inspect(split.folder / image['file_name'], how)
        if size and size != (image['height'], image['width']):
            record = f'{image["width"]} x {image["height"]}'
            seen.append((defects.OTHER_SIZE, f' ({size[1]} x {size[0]}, not {record})'))
        if not how.files:
            seen += flat_findings((image['height'], image['width']), how.scales)
        return seen

    is_good = []
    readings = in_threads(findings, content['images'], 'checking images')
    for image, seen in zip(content['images'], readings):
        for kind, more in seen:
            found.add(kind, place_in(split, f'{image["file_name"]}{more}'))
        is_good.append(not any(found.is_error(kind) for kind, _ in seen))
    images = list(compress(content['images'], is_good))
    good = content if all(is_good) else content_of_images(content, images)
    check_labels(split, good, found, may_be_empty)
    is_changed = len(good['images']) < len(split.content['images']) or any(
        before is not after
        for before, after in zip(split.content['annotations'], good['annotations'])
    )
    is_changed |= len(good['annotations']) < len(split.content['annotations'])
    return split._replace(content=good, path=None if is_changed else split.path)


def place_in(split: Split, item: str) -> str:
    """An item with its file of annotations, if there is one for all images."""
    return f'{item} ({split.name})' if split.name else item


def check_labels(split: Split, content: dict[str, Any], found: Defects, may_be_empty: bool) -> None:
    """Check that a split has objects that count, and warn about images that have none."""
    annotations = content['annotations']
    name = split.name or str(split.folder)
    if not annotations:
        if not may_be_empty:
            found.add(defects.NO_ANNOTATIONS, name)
        return
    if all(annotation['iscrowd'] for annotation in annotations):
        found.add(defects.ALL_IGNORED, f'{name} (all objects are crowds or difficult)')
    annotated = {annotation['image_id'] for annotation in annotations}
    for image in content['images']:
        if image['id'] not in annotated:
            found.add(defects.EMPTY_IMAGE, place_in(split, image['file_name']))


def usable_content(split: Split, found: Defects, some_have_masks: bool = False) -> dict[str, Any]:
    """The content of a split without records that cannot be used; files are not looked at."""
    content = split.content
    images: dict[Any, dict] = {}
    key_kind = str if isinstance(content['images'][0].get('id'), str) else int
    for index, image in enumerate(content['images']):
        problem = image_record_problem(image, key_kind, images)
        if problem:
            name = image.get('file_name')
            is_named = isinstance(name, str) and name
            found.add(problem, place_in(split, name if is_named else f'image {index}'))
        else:
            images[image['id']] = image
    for name, count in Counter(image['file_name'] for image in images.values()).items():
        if count > 1:
            found.add(defects.LISTED_TWICE, place_in(split, name))
    categories = {category['id'] for category in content['categories']}
    annotations = []
    seen: set[int] = set()
    boxes: set[tuple] = set()
    for index, annotation in enumerate(content['annotations']):
        key = annotation.get('image_id')
        image = images.get(key) if isinstance(key, (int, str)) else None
        problem = annotation_problem(annotation, image, categories, seen, images)
        if problem is None and image is not None:
            usable = repaired(annotation)
            kinds = [*repairs(annotation), *object_findings(usable, image, boxes)]
            mask = mask_problem(usable.get('segmentation'), image)
            if mask is None:
                if is_box_elsewhere(usable):
                    kinds.append(defects.ELSEWHERE)
            elif mask != defects.NO_MASK or some_have_masks or found.masks:
                kinds.append(mask)
            seen.add(annotation['id'])
        else:
            kinds = [problem] if problem else []
        if kinds:
            place = f' of {image["file_name"]}' if image else ''
            item = place_in(split, f'annotation {annotation.get("id", index)}{place}')
            for kind in kinds:
                found.add(kind, item)
        is_left_out = any(k.left_out == defects.OBJECT and found.is_error(k) for k in kinds)
        if problem is None and not is_left_out:
            annotations.append(usable)
    content = {**content, 'images': list(images.values()), 'annotations': annotations}
    check_that_boxes_are_no_corners(split, annotations, images)
    check_that_boxes_are_pixels(split, annotations)
    return content


def image_record_problem(image: dict, key_kind: type, known: dict) -> Optional[Kind]:
    if not isinstance(image.get('file_name'), str) or not image['file_name']:
        return defects.NO_FILE_NAME
    if not is_key(image, 'id', key_kind):
        return defects.NO_IMAGE_ID
    sides: list[Any] = [image.get('width'), image.get('height')]
    if not all(is_number(side) and side >= 1 for side in sides):
        return defects.NO_SIZE
    return defects.SAME_IMAGE_ID if image['id'] in known else None


def annotation_problem(
    annotation: dict, image: Optional[dict], categories: set, seen: set, images: dict
) -> Optional[Kind]:
    """What makes an annotation unusable, or None. `image` is its image, and `seen` are the ids of
    annotations before it."""
    if not is_key(annotation, 'id'):
        return defects.NO_ID
    if image is None:
        is_other_type = other_type(annotation.get('image_id')) in images
        return defects.ID_OF_OTHER_TYPE if is_other_type else defects.UNKNOWN_IMAGE
    if not is_key(annotation, 'category_id') or annotation['category_id'] not in categories:
        return defects.UNKNOWN_CATEGORY
    if not has_box(annotation):
        return defects.NO_BOX
    return defects.SAME_ID if annotation['id'] in seen else None


def other_type(key: Any) -> Any:
    """A number as a string, or a string as a number; None if that is not possible."""
    if isinstance(key, str):
        return int(key) if key.isdecimal() and len(key) < 20 else None
    return str(key) if isinstance(key, int) else None


def repairs(annotation: dict) -> list[Kind]:
    """What an annotation lacks that can be completed."""
    found = []
    if not is_number(annotation.get('area')):
        found.append(defects.NO_AREA)
    if annotation.get('iscrowd') not in (0, 1):
        found.append(defects.NO_CROWD)
    return found


def repaired(annotation: dict) -> dict:
    """An annotation with what it lacks: the same one, if it lacks nothing."""
    missing = repairs(annotation)
    if not missing:
        return annotation
    annotation = dict(annotation)
    if defects.NO_AREA in missing:
        width, height = annotation['bbox'][2:]
        annotation['area'] = width * height
    if defects.NO_CROWD in missing:
        annotation['iscrowd'] = int(is_number(annotation.get('iscrowd')))  # as mmdet reads it
    return annotation


def object_findings(annotation: dict, image: dict, boxes: set) -> list[Kind]:
    """What is suspicious about an object. `boxes` are those before it."""
    found = []
    left, top, width, height = annotation['bbox']
    right, bottom = left + width, top + height
    if width < 1 or height < 1:
        found.append(defects.NARROW)
    elif left >= image['width'] or top >= image['height'] or right <= 0 or bottom <= 0:
        found.append(defects.OUTSIDE)
    elif max(-left, -top, right - image['width'], bottom - image['height']) > ROUNDING:
        found.append(defects.BEYOND)
    box = (annotation['image_id'], annotation['category_id'], left, top, width, height)
    if box in boxes:
        found.append(defects.TWICE)
    boxes.add(box)
    if annotation['id'] == 0:
        found.append(defects.ID_0)
    if annotation['area'] <= 0:
        found.append(defects.AREA_0)
    if annotation.get('ignore'):
        found.append(defects.IGNORED_OBJECT)
    return found


def is_box_elsewhere(annotation: dict) -> bool:
    """Whether a box differs from that around its mask by more than rounding; the mask is valid."""
    mask = annotation['segmentation']
    around = box_of_polygons(mask) if isinstance(mask, list) else box_of_runs(mask)
    if around is None:  # a mask of no pixels
        return True
    left, top, width, height = annotation['bbox']
    box = left, top, left + width, top + height
    most = SHIFTED + FURTHER * max(width, height)
    return any(abs(own - given) > most for own, given in zip(around, box))


def box_of_polygons(polygons: list[list[float]]) -> tuple[float, float, float, float]:
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


def lengths_of_runs(mask: dict) -> Any:
    """The run lengths of a mask, of zeros first."""
    counts = mask.get('counts')
    return counts_of(counts) if isinstance(counts, str) else counts


def mask_problem(mask: Any, image: dict) -> Optional[Kind]:
    """What is wrong with a mask as pycocotools reads it, or None."""
    if not isinstance(mask, (list, dict)) or not mask:
        return defects.NO_MASK
    if isinstance(mask, list):
        points = [p for p in mask if isinstance(p, list) and len(p) % 2 == 0]
        if len(points) < len(mask) or not all(is_number(n) for p in points for n in p):
            return defects.BAD_POLYGON
        # mmdet leaves short polygons out, and pycocotools if they are not the first.
        if len(mask[0]) < 6:
            return defects.SHORT_POLYGON
        return defects.SHORT_PART if any(len(polygon) < 6 for polygon in mask) else None
    if mask.get('size') != [image['height'], image['width']]:
        return defects.MASK_SIZE
    counts = lengths_of_runs(mask)
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
        return defects.BAD_RUNS
    return None if sum(counts) == math.prod(mask['size']) else defects.BAD_RUNS


def counts_of(text: str) -> list[int]:
    """The run lengths, of zeros first, in COCO's compressed encoding."""
    counts: list[int] = []
    value = 0
    shift = 0
    for character in text.encode():
        code = character - 48
        value |= (code & 31) << shift
        shift += 5
        is_last_group = not code & 32
        if is_last_group:
            value -= (code & 16) << shift - 4
            if len(counts) > 2:
                value += counts[-2]
            counts.append(value)
            value = 0
            shift = 0
    return counts


def check_that_boxes_are_no_corners(
    split: Split, annotations: Sequence[dict], images: dict[Any, dict]
) -> None:
    """Raise a UserError if all boxes of a file fit their images as x1 y1 x2 y2, and many do not as
    x y width height."""
    found = [images[annotation['image_id']] for annotation in annotations]
    sides = np.array([(image['width'], image['height']) for image in found], float).reshape(-1, 2)
    boxes = np.array([a['bbox'] for a in annotations], float).reshape(-1, 2, 2)
    beyond = (boxes.sum(1) > 1.05 * sides).any(1).sum()
    if beyond >= ENOUGH and are_corners(boxes, sides):
        raise UserError(
            f'{split.name or split.folder}: each bbox must be x, y, width and height, but these '
            f'are x1, y1, x2, y2: {beyond} of {len(annotations)} would reach beyond their image'
        )


def check_that_boxes_are_pixels(split: Split, annotations: Sequence[dict]) -> None:
    """Raise a UserError if no box of many has a number above 1."""
    most = max((max(annotation['bbox']) for annotation in annotations), default=0)
    if len(annotations) >= ENOUGH and most <= 1:
        raise UserError(
            f'{split.name or split.folder}: each bbox must be x, y, width and height in pixels, '
            'but no number is above 1; multiply them by the width and height of the image'
        )


def warn_about_classes(splits: dict[str, Split], found: Defects) -> None:
    """Warn about classes that have no object in the training data, and about names that differ only
    in case, spaces, hyphens and underscores."""
    counts = {key: objects_by_class(split.content) for key, split in splits.items()}
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
