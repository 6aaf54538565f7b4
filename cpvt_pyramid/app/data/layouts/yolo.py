"""YOLO: a text file with a class and a box or polygon in each line, for each image.

Read here and not with supervision, which flattens subfolders, refuses images that are not RGB or L,
breaks on polygons of several parts, and skips or raises where a file has errors.
"""

import math
import posixpath
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Optional

import numpy as np

from ...tooling.command import UserError
from ...tooling.report import amount
from .. import defects
from ..class_files import classes_from_files
from ..data import ENOUGH, Objects, Outline, Split, are_corners, images_with_objects
from ..declared import declared_data
from ..defects import Defects
from ..description import MOST_CLASSES, Description, SplitPart
from ..files import (
    Folder,
    comparable,
    join,
    lines_of,
    report_shared,
    stem_of,
    text_of,
    without_ending,
)
from ..folders import (
    Group,
    check_that_folders_are_apart,
    partner_of,
    settings_of_groups,
    splits_of_folders,
)
from ..images import Size, sizes_of
from ..layout import Layout, Recognized
from ..listing import Listing, by_folder
from ..lists import images_of_part

ROUNDING = 0.01  # share of an image by which a box may reach beyond it
SHOWN_LABELS = 8  # in a message
LABELS = {'images': 'labels', 'Images': 'Labels', 'IMAGES': 'LABELS'}
TRIED = 20  # label files of a folder whose first lines are looked at


def recognize_yolo(listing: Listing) -> Optional[Recognized]:
    """A file that declares the images, or label files where Ultralytics expects them, or in a
    folder that `partner_of` finds."""
    if listing.declared and 'masks_dir' not in listing.declared.settings:
        declared = declared_data(listing, listing.declared)
        note_unlisted(listing, declared)
        return declared
    folder = Folder(listing.root)
    texts = {
        place: set(map(stem_of, names))
        for place, names in by_folder(listing.ending('.txt')).items()
        if any(has_label_line(listing, name) for name in names[:TRIED])
    }
    is_alone = len(listing.image_folders) == 1
    groups = []
    unlabelled = []
    for images, names in listing.image_folders.items():
        labels = [label_file(folder, name, SplitPart(images)) for name in names]
        found = [label for label in labels if label]
        if any(has_label_line(listing, label) for label in found[:TRIED]):
            groups.append(Group(images, None))
        elif found:
            continue
        elif place := partner_of(images, set(map(stem_of, names)), texts, or_only=is_alone):
            groups.append(Group(images, place))
        else:
            unlabelled.append(
                f'{images} is left out, {amount(len(names), "image")}: no label files'
            )
    if not groups:
        return None
    settings, notes = settings_of_groups(groups, listing)
    check_that_folders_are_apart(settings, listing.image_folders)
    classes = classes_from_files(listing.root, listing.names)
    return Recognized({**settings, **classes.settings}, notes + unlabelled + classes.notes)


def has_label_line(listing: Listing, name: str) -> bool:
    """Whether a text begins with a class and at least four numbers."""
    lines = listing.head(name).decode('utf-8-sig', 'replace').split('\n')
    values = lines[0].split()
    return len(values) >= 5 and all(re.fullmatch(r'[-+0-9.eE]+|nan|inf', v) for v in values[:5])


def note_unlisted(listing: Listing, declared: Recognized) -> None:
    """Note images with labels that are in none of the lists of images, if all splits are lists."""
    paths = list(splits_of_folders(declared.settings))
    if not paths or not all((listing.root / path).is_file() for path in paths):
        return
    lines = [line for path in paths for line in lines_of(listing.root / path)]
    listed = {posixpath.basename(comparable(line)) for line in lines}
    folder = Folder(listing.root)
    unlisted = [n for n in listing.images if posixpath.basename(comparable(n)) not in listed]
    count = sum(label_file(folder, name, SplitPart('.')) is not None for name in unlisted)
    if count:
        declared.notes.append(f'{amount(count, "image")} with labels left out: not in any list')


def read_yolo(description: Description, found: Defects) -> Objects:
    """The objects of the label files of a description's images."""
    folder = Folder(description.root)
    images: dict[str, dict[str, Optional[str]]] = {}  # by split: label files by image
    for split, parts in description.splits.items():
        images[split] = {}
        for part in parts:
            for image in images_of_part(folder, part, description, found):
                images[split][image] = label_file(folder, image, part)
    folder.report(found)
    labels = {image: label for of_split in images.values() for image, label in of_split.items()}
    report_shared(labels.items(), found)
    if not any(labels.values()):
        raise UserError(
            f'{description.source}: no image has a label file; labels must be in the folder '
            'labels in place of images, next to the images, or in the folder that annotations names'
        )
    sizes = sizes_of(description.root, list(labels), found)
    objects = {}
    for image, size in sizes.items():
        rows = rows_of(description, labels[image], found)
        if rows is not None:
            objects[image] = parse_outlines(rows, size, description.has_keypoints, found)
    check_that_boxes_have_centers(description, objects, sizes)
    notes = []
    if description.has_keypoints:
        notes.append('the lines have keypoints after a box: only the boxes are used')
    highest = max((o.label for outlines in objects.values() for o in outlines), default=-1)
    names = names_of_labels(description, highest, notes)
    warn_about_labels(folder, description, labels, found)
    named = {image: with_named_labels(o, names, found) for image, o in objects.items()}
    classes = list(names.values())
    splits = {}
    for split, of_split in images.items():
        good = {image: named[image] for image in of_split if image in named}
        splits[split] = Split(images_with_objects(good, sizes, found), description.root)
    return Objects(description, splits, classes, notes)


def label_file(folder: Folder, image: str, part: SplitPart) -> Optional[str]:
    """The label file of an image: in the folder that the description names, or else where
    Ultralytics expects it, in the folder `labels` in place of the last `images`; or next to it."""
    name = f'{without_ending(image)}.txt'
    if part.annotations is not None:
        inside = posixpath.relpath(name, part.images)
        return folder.find(join(part.annotations, inside))
    parts = name.split('/')
    for index in reversed(range(len(parts) - 1)):
        if parts[index].lower() == 'images':
            for word in dict.fromkeys([LABELS.get(parts[index], 'labels'), *LABELS.values()]):
                found = folder.find('/'.join([*parts[:index], word, *parts[index + 1 :]]))
                if found:
                    return found
            break
    return folder.find(name)


def warn_about_labels(
    folder: Folder, description: Description, labels: dict[str, Optional[str]], found: Defects
) -> None:
    """Warn about label files without an image."""
    used = {label for label in labels.values() if label}
    folders = {posixpath.dirname(label) for label in used}
    images = {without_ending(image) for image in labels}
    for place in sorted(folders):
        if not place.split('/')[-1].lower() == 'labels' and '/labels/' not in f'/{place.lower()}/':
            continue
        for name in sorted(p.name for p in (description.root / place).iterdir()):
            path = join(place, name)
            if comparable(name).endswith('.txt') and path not in used and name not in NO_LABELS:
                if without_ending(path) not in images:
                    found.add(defects.LONELY_LABELS, path)


NO_LABELS = 'classes.txt', 'labels.txt', 'names.txt', 'README.txt'


class Row(NamedTuple):
    """A line of a label file."""

    values: list[float]  # the class and a box, polygon or pose; empty if it is not numbers
    at: str  # its place, for messages


def rows_of(description: Description, name: Optional[str], found: Defects) -> Optional[list[Row]]:
    """The lines of a label file; none without one, and None if it is not text."""
    if name is None:
        return []
    try:
        lines = text_of(description.root / name).splitlines()
    except UserError:
        found.add(defects.NO_LABEL_TEXT, name)
        return None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        values = []
        with suppress(ValueError):
            values = [float(value) for value in line.split()]
        rows.append(Row(values, f'{name} line {number}'))
    return rows


def parse_outlines(rows: list[Row], size: Size, boxes_only: bool, found: Defects) -> list[Outline]:
    """The objects in the lines of a label file, for an image of a (height, width)."""
    objects = []
    for row in rows:
        values = row.values[:5] if boxes_only else row.values
        is_polygon = len(values) >= 7 and len(values) % 2 == 1
        is_finite = all(map(math.isfinite, values))
        is_whole = len(values) == 5 or is_polygon
        if not is_whole or not is_finite or values[0] < 0 or values[0] % 1:
            found.add(defects.BAD_LINE, row.at)
        elif min(values[1:]) < -ROUNDING or max(values[1:]) > 1 + ROUNDING:
            found.add(defects.BEYOND_SHARES, row.at)
        else:
            points = np.reshape(values[1:], (-1, 2))
            if not is_polygon:
                center, sides = points
                points = np.stack([center - sides / 2, center + sides / 2])
            objects.append(Outline(int(values[0]), [points * size[::-1]], row.at, is_polygon))
    return objects


def check_that_boxes_have_centers(
    description: Description, objects: dict[str, list[Outline]], sizes: dict[str, Size]
) -> None:
    """Raise a UserError if all boxes are x1 y1 x2 y2, and many do not fit their images as a center
    with width and height."""
    boxes = []
    sides = []
    for image, outlines in objects.items():
        for outline in outlines:
            if not outline.is_polygon:
                boxes.append(outline.parts[0])
                sides.append(sizes[image][::-1])
    if not boxes:
        return
    corners = np.array(boxes)
    limits = np.array(sides, float)
    tolerance = 0.05 * limits
    low, high = corners[:, 0], corners[:, 1]
    beyond = ((low < -tolerance) | (high > limits + tolerance)).any(1).sum()
    as_written = np.stack([(low + high) / 2, high - low], 1)
    if beyond >= ENOUGH and are_corners(as_written, limits):
        raise UserError(
            f'{description.root}: each line must be a class and the center x, center y, width and '
            f'height of a box, but these are x1, y1, x2, y2: {beyond} of {len(boxes)} would reach '
            'beyond their image'
        )


def names_of_labels(description: Description, highest: int, notes: list[str]) -> dict[int, str]:
    """The classes by label, in the order of the labels; those that are declared may have gaps.
    Without declared names, each label up to the highest gets one, which `notes` says."""
    if description.names:
        return description.names
    if highest < 0:
        raise UserError(f'{description.root} has no objects and no names of classes')
    if highest >= MOST_CLASSES:
        raise UserError(f'{description.root} has labels beyond {MOST_CLASSES} classes')
    notes.append('nothing names the classes: write their names in data.yaml')
    return {label: f'class_{label}' for label in range(highest + 1)}


def with_named_labels(
    outlines: Sequence[Outline], names: dict[int, str], found: Defects
) -> list[Outline]:
    """The outlines whose labels have a name, with the index of the class as the label."""
    indices = {label: index for index, label in enumerate(names)}
    named = []
    for outline in outlines:
        if outline.label in indices:
            named.append(outline._replace(label=indices[outline.label]))
        else:
            item = f'class {outline.label} in {outline.at} (the names are {labels_text(names)})'
            found.add(defects.UNNAMED_LABEL, item)
    return named


def labels_text(names: dict[int, str]) -> str:
    """The labels that have a name, for messages."""
    labels = list(names)
    if labels == list(range(len(labels))):
        return f'0 to {len(labels) - 1}'
    more = ', ...' if len(labels) > SHOWN_LABELS else ''
    return ', '.join(map(str, labels[:SHOWN_LABELS])) + more


LAYOUT = Layout(
    what='a text file of boxes or polygons for each image',
    holds='objects',
    recognize=recognize_yolo,
    read=read_yolo,
    example={
        'train': 'FOLDER',
        'val': 'FOLDER',
        'annotations': {'train': 'FOLDER', 'val': 'FOLDER'},
        'names': ['FIRST', 'SECOND'],
    },
)
