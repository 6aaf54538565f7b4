"""YOLO: a text file with a class and a box or polygon in each line, for each image.

Read here and not with supervision, which flattens subfolders, refuses images that are not RGB or L,
breaks on polygons of several parts, and skips or raises where a file has errors.
"""

import math
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Optional

import numpy as np

from ...tooling.command import UserError
from .. import defects
from ..annotation_files import OutlinedImages, data_of_outlines, outlines_in_files
from ..class_files import classes_from_files
from ..data import DataSet, Outline, check_that_boxes_are_no_corners
from ..defects import Defects
from ..description import MOST_CLASSES, Description
from ..files import text_of
from ..folders import recognized_files
from ..images import Size
from ..layout import EXAMPLE_OF_FILES, Layout, Recognized
from ..listing import Listing

ENDING = '.txt'
ROUNDING = 0.01  # share of an image by which a box may reach beyond it


def recognize_yolo(listing: Listing) -> Optional[Recognized]:
    found = recognized_files(listing, ENDING, has_label_line, may_lack_files=True)
    if found is None:
        return None
    classes = classes_from_files(listing.root, listing.names)
    return Recognized({**found.settings, **classes.settings}, found.notes + classes.notes)


def has_label_line(listing: Listing, name: str) -> bool:
    """Whether a text begins with a class and at least four numbers."""
    lines = listing.head(name).decode('utf-8-sig', 'replace').split('\n')
    values = lines[0].split()
    return len(values) >= 5 and all(re.fullmatch(r'[-+0-9.eE]+|nan|inf', v) for v in values[:5])


def read_yolo(description: Description, found: Defects) -> DataSet:
    """The objects of the label files of a description's images."""
    parse = partial(parse_labels, boxes_only=description.has_keypoints)
    outlined = outlines_in_files(description, ENDING, parse, found, may_lack_files=True)
    check_boxes_of_lines(description, outlined)
    notes = []
    if description.has_keypoints:
        notes.append('the lines have keypoints after a box: only the boxes are used')
    names = description.names
    if not names:
        names = numbered_classes(description, outlined)
        notes.append('nothing names the classes: write their names in data.yaml')
    return data_of_outlines(description, outlined, found, names)._replace(notes=notes)


def parse_labels(
    path: Path, name: str, size: Size, found: Defects, boxes_only: bool
) -> Optional[list[Outline]]:
    """The objects in the lines of a label file."""
    try:
        lines = text_of(path).splitlines()
    except UserError:
        found.add(defects.TORN_FILE, name, 'not text in UTF-8')
        return None
    objects = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        at = f'{name} line {number}'
        values = []
        with suppress(ValueError):
            values = [float(value) for value in line.split()]
        if boxes_only:
            values = values[:5]
        is_polygon = len(values) >= 7 and len(values) % 2 == 1
        is_finite = all(map(math.isfinite, values))
        if not is_finite or not (len(values) == 5 or is_polygon) or values[0] < 0 or values[0] % 1:
            found.add(
                defects.BAD_OBJECT,
                at,
                'neither a class and a box nor a polygon',
            )
        elif min(values[1:]) < -ROUNDING or max(values[1:]) > 1 + ROUNDING:
            found.add(
                defects.BAD_OBJECT,
                at,
                'beyond the image; values must be shares of its sides',
            )
        else:
            points = np.reshape(values[1:], (-1, 2))
            if not is_polygon:
                center, sides = points
                points = np.stack([center - sides / 2, center + sides / 2])
            objects.append(Outline(int(values[0]), [points * size[::-1]], at, is_polygon))
    return objects


def check_boxes_of_lines(description: Description, outlined: OutlinedImages) -> None:
    """Raise a UserError if all boxes are x1 y1 x2 y2."""
    boxes = [
        (outline.parts[0], outlined.sizes[image])
        for image, outlines in outlined.outlines.items()
        for outline in outlines
        if not outline.is_polygon
    ]
    corners = np.array([box for box, _ in boxes]).reshape(-1, 2, 2)
    as_written = np.stack([corners.mean(1), corners[:, 1] - corners[:, 0]], 1)
    check_that_boxes_are_no_corners(
        as_written,
        corners,
        [size for _, size in boxes],
        f'{description.root}: each line must be a class and the center x, center y, width and '
        'height of a box',
    )


def numbered_classes(description: Description, outlined: OutlinedImages) -> dict[int, str]:
    """A name for each label up to the highest, where nothing names them."""
    labels = [label for label in (o.label for o in outlined.objects) if isinstance(label, int)]
    highest = max(labels, default=-1)
    if highest >= MOST_CLASSES:
        raise UserError(f'{description.root} has labels beyond {MOST_CLASSES} classes')
    return {label: f'class_{label}' for label in range(highest + 1)}


LAYOUT = Layout(
    what='a text file of boxes or polygons for each image',
    holds='objects',
    recognize=recognize_yolo,
    read=read_yolo,
    example={**EXAMPLE_OF_FILES, 'names': ['FIRST', 'SECOND']},
    is_declared=lambda settings: 'masks_dir' not in settings,
)
