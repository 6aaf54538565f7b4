"""YOLO: a text file with a class and a box or polygon in each line, for each image.

Read here and not with supervision, which skips or raises where a file has errors.
"""

import math
import os
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional

import numpy as np
import yaml

from ..config.parts import as_list
from ..images.formats import IMAGE_ENDINGS
from ..tooling.command import UserError, one_line
from ..tooling.files import files_below
from .coco import ENOUGH, Objects, Outline, Split, are_corners, coco_content
from .defects import Defects
from .folder import (
    NAME_FILES,
    SPLITS,
    Files,
    distinct,
    lines_of,
    named_classes,
    names_in,
    text_of,
)
from .images import sizes_of

MOST_CLASSES = 100_000
ROUNDING = 0.01  # share of an image by which a box may reach beyond it


def read_yolo(files: Files, defects: Defects, masks: bool = False) -> Optional[Objects]:
    """The objects of a folder with a list of images or with label files, None if it has neither;
    with `masks` every object must be a polygon."""
    settings, path = yolo_settings(files)
    label_files = LabelFiles(files)
    by_name: dict[str, str] = {}
    is_listed = bool(settings.get('train'))
    if is_listed:
        images = listed_images(files, settings, path)
    else:
        images, by_name = labelled_images(files, label_files)
    if not images:
        return None
    labels = {name: label_files.find(name) for names in images.values() for name in names}
    sizes = sizes_of(files.root, labels, defects)
    rows = {image: rows_of(files.root, labels[image], defects) for image in sizes}
    notes = []
    boxes_only = 'kpt_shape' in settings
    if boxes_only:
        notes.append('the lines have keypoints after a box: only the boxes are used')
    objects = {
        image: parse_outlines(rows[image], size, boxes_only, defects)
        for image, size in sizes.items()
        if rows[image] is not None
    }
    check_that_boxes_have_centers(files.root, objects, sizes)
    highest = max((o.label for found in objects.values() for o in found), default=-1)
    classes, about_names = yolo_classes(files, settings, path, highest, defects)
    warn_of_labels(files, labels, label_files, defects)
    if is_listed:
        unlisted = [n for n in files.images if n not in labels and label_files.find(n)]
        if unlisted:
            notes.append(f'{len(unlisted)} labelled images are left out: no list has them')
    splits = {}
    for split, names in images.items():
        good = {name: objects[name] for name in names if name in objects}
        splits[split] = Split(coco_content(good, sizes, classes, defects, masks), files.root)
    return Objects('YOLO', splits, classes, [*notes, *about_names], by_name)


def yolo_settings(files: Files) -> tuple[dict, Optional[Path]]:
    """The content of the YAML file or Darknet's obj.data that lists the images, or else of a
    data.yaml that only names the classes, and its path; {} and None without one."""
    of_classes: tuple[dict, Optional[Path]] = ({}, None)
    for name in files.with_suffix('.yaml', '.yml'):
        path = files.root / name
        is_expected = path.stem in ('data', 'dataset')
        try:
            settings = yaml.safe_load(path.read_text(encoding='utf-8-sig'))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            if is_expected:
                raise UserError(f'{path} is not YAML: {one_line(error, 120)}') from error
            continue
        if not isinstance(settings, dict):
            continue
        if is_list_of_texts(settings.get('train')):
            check_settings_of_yaml(settings, path)
            return settings, path
        if is_expected and settings.get('names') and not of_classes[0]:
            check_settings_of_yaml(settings, path)
            of_classes = settings, path
    for name in files.with_suffix('.data'):
        settings = {}
        for line in lines_of(files.root / name):
            key, _, value = line.partition('=')
            settings[key.strip()] = value.strip()
        if settings.get('train'):
            return darknet_settings(settings, files.root / name), files.root / name
    return of_classes


def is_list_of_texts(value: Any) -> bool:
    """Whether a setting is a text, or a list of texts that is not empty."""
    values = as_list(value)
    return bool(values) and all(isinstance(item, str) for item in values)


def check_settings_of_yaml(settings: dict, path: Path) -> None:
    """Check the types of what is used of data.yaml. Messages show no values: a YAML file of a few
    lines can hold gigabytes."""
    for key in sorted(set.union(*SPLITS.values())):
        if settings.get(key) and not is_list_of_texts(settings[key]):
            raise UserError(f'{path}: {key} must be a path or a list of paths')
    if not isinstance(settings.get('path') or '', str):
        raise UserError(f'{path}: path must be a path')
    names = settings.get('names')
    if isinstance(names, dict):
        names = [*names, *names.values()]
    if names and not (
        isinstance(names, list) and all(isinstance(name, (str, int, float)) for name in names)
    ):
        raise UserError(f'{path}: names must be a list of names, or number them')


def darknet_settings(settings: dict[str, str], path: Path) -> dict[str, Any]:
    """The settings of Darknet's obj.data, as data.yaml has them."""
    converted = dict(settings)
    named = settings.pop('names', '')
    for place in (path.parent / named, path.parent / PurePosixPath(named).name):
        if place.is_file():
            converted['names'] = names_in(place)
            break
    if settings.get('classes', '').isdigit():
        converted['nc'] = int(settings['classes'])
    return converted


def listed_images(files: Files, settings: dict, path: Path) -> dict[str, list[str]]:
    """The images of each split, relative to the root, that data.yaml or obj.data names."""
    base = path.parent / (settings.get('path') or '')
    found = defaultdict(list)
    for split, keys in SPLITS.items():
        entries = [entry for key in sorted(keys) for entry in as_list(settings.get(key))]
        for entry in entries:
            entry = entry.replace('\\', '/')
            inside = entry
            while inside.startswith('../'):  # Roboflow writes one too many
                inside = inside.removeprefix('../')
            # Darknet's are relative to wherever it is started.
            candidates = [
                base / entry,
                path.parent / entry,
                path.parent / inside,
                path.parent / PurePosixPath(entry).name,
            ]
            sources = [candidate for candidate in candidates if candidate.exists()]
            if sources:
                found[split] += images_at(sources[0], files)
            elif split != 'test':
                raise UserError(f'{path}: {split} is {entry}, which does not exist'[:300])
    if not any(found.values()):
        raise UserError(f'{path} names no images')
    return as_assigned(files, found)


def as_assigned(files: Files, images: dict[str, list[Path]]) -> dict[str, list[str]]:
    """Images of each split, each once and relative to the root, in the splits that are assigned."""
    found = defaultdict(dict)
    for split, paths in images.items():
        for path in paths:
            name = Path(os.path.relpath(path, files.root)).as_posix()
            found[files.assigned_split(name) or split][name] = None
    return {split: list(found[split]) for split in SPLITS if split in found}


def images_at(source: Path, files: Files) -> list[Path]:
    """The images of a folder, or those that a text file lists."""
    if source.is_dir():
        return [path for path in files_below(source) if path.suffix.lower() in IMAGE_ENDINGS]
    lines = lines_of(source)
    here = Path(os.path.relpath(source, files.root)).as_posix()
    if here.startswith('../'):
        return [source.parent / line for line in lines]
    places = files.find_images(lines, here)
    return [files.root / (place or line) for place, line in zip(places, lines)]


def labelled_images(
    files: Files, label_files: 'LabelFiles'
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The images of each split by the names of folders, of folders with labelled images only; and
    the splits of folders whose names say it."""
    folders = {os.path.dirname(name) for name in files.images if label_files.find(name)}
    found = defaultdict(list)
    for name in files.images:
        folder = os.path.dirname(name)
        if folder in folders:
            split = files.assigned_split(name) or files.split_of(folder)
            found[split or 'train'].append(name)
    images = {split: found[split] for split in SPLITS if split in found}
    return images, files.splits_by_name(sorted(folders))


class LabelFiles:
    """The label files of a folder, by their images."""

    def __init__(self, files: Files) -> None:
        self.root = files.root
        names = files.with_suffix('.txt')
        self.names = {name for name in names if PurePosixPath(name).name not in NAME_FILES}

    def find(self, image: str) -> Optional[str]:
        """The label file of an image, both relative to the root, or None: in the folder `labels`
        instead of the last `images` of its path, or next to it."""
        path = PurePosixPath(image).with_suffix('.txt')
        folders = list(path.parent.parts)
        if 'images' in folders:
            last = len(folders) - 1 - folders[::-1].index('images')
            folders[last] = 'labels'
            name = str(PurePosixPath(*folders, path.name))
            if self._has(name):
                return name
        return str(path) if self._has(str(path)) else None

    def _has(self, name: str) -> bool:
        is_elsewhere = name.startswith('../')  # data.yaml can name other folders
        return name in self.names or is_elsewhere and (self.root / name).is_file()


def warn_of_labels(
    files: Files, labels: dict[str, Optional[str]], label_files: LabelFiles, defects: Defects
) -> None:
    """Warn about label files without an image, and with several of those with `labels`."""
    for name, count in Counter(labels.values()).items():
        if name and count > 1:
            defects.warn('label files of several images', name)
    used = {label_files.find(name) for name in files.images}
    for name in sorted(label_files.names - used):
        if 'labels' in PurePosixPath(name).parts[:-1]:
            defects.warn('label files without an image', name)


class Row(NamedTuple):
    """A line of a label file."""

    values: list[float]  # the class and a box, polygon or pose; empty if it is not numbers
    at: str  # its place, for messages


def rows_of(root: Path, name: Optional[str], defects: Defects) -> Optional[list[Row]]:
    """The lines of a label file; none without one, and None if it is not text."""
    if name is None:
        return []
    try:
        lines = text_of(root / name).splitlines()
    except UserError:
        defects.add('label files that are not text', name)
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


def parse_outlines(
    rows: list[Row], size: tuple[int, int], boxes_only: bool, defects: Defects
) -> list[Outline]:
    """The objects in the lines of a label file, for an image of a (height, width)."""
    objects = []
    for row in rows:
        values = row.values[:5] if boxes_only else row.values
        is_polygon = len(values) >= 7 and len(values) % 2 == 1
        is_finite = all(map(math.isfinite, values))
        is_whole = len(values) == 5 or is_polygon
        if not is_whole or not is_finite or values[0] < 0 or values[0] % 1:
            kind = 'lines that are neither a class and a box nor a class and a polygon'
            defects.add(kind, row.at)
        elif min(values[1:]) < -ROUNDING or max(values[1:]) > 1 + ROUNDING:
            kind = 'objects beyond the image; values must be shares of its width and height'
            defects.add(kind, row.at)
        else:
            points = np.reshape(values[1:], (-1, 2))
            if not is_polygon:
                center, sides = points
                points = np.stack([center - sides / 2, center + sides / 2])
            objects.append(Outline(int(values[0]), points * size[::-1], row.at, is_polygon))
    return objects


def check_that_boxes_have_centers(
    root: Path, objects: dict[str, list[Outline]], sizes: dict[str, tuple[int, int]]
) -> None:
    """Raise a UserError if all boxes are x1 y1 x2 y2, and many do not fit their images as a center
    with width and height."""
    boxes = []
    sides = []
    for image, found in objects.items():
        for outline in found:
            if not outline.is_polygon:
                boxes.append(outline.points)
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
            f'{root}: each line must be a class and the center x, center y, width and height of a '
            f'box, but these are x1, y1, x2, y2: {beyond} of {len(boxes)} would reach beyond their '
            'image'
        )


def yolo_classes(
    files: Files, settings: dict, path: Optional[Path], highest: int, defects: Defects
) -> tuple[list[str], list[str]]:
    """The names of the classes, and notes about them."""
    names = settings.get('names')
    declared = settings.get('nc')
    if isinstance(names, dict):
        try:
            names = {int(key): str(name) for key, name in names.items()}
        except (TypeError, ValueError) as error:
            raise UserError(f'{path}: names must number the classes') from error
        if max(names, default=0) >= MOST_CLASSES:
            raise UserError(f'{path}: names must number the classes from 0, got {max(names)}'[:300])
        names = [names.get(i, f'class_{i}') for i in range(max(names, default=-1) + 1)]
    if isinstance(names, list) and names:
        if isinstance(declared, int) and declared != len(names):
            kind = f'{path.name} declares another number of classes than it names; the names count'
            defects.warn(kind, f'nc is {declared}, and there are {len(names)} names')
        names = distinct(list(map(str, names)))
        for name in files.names:
            if PurePosixPath(name).name in NAME_FILES:
                listed = lines_of(files.root / name)
                if listed != names and sorted(listed) == sorted(names):
                    defects.warn(f'files with the classes in another order than {path.name}', name)
        return names, []
    listed = named_classes(files)
    if listed:
        return listed, []
    count = max(highest + 1, declared if isinstance(declared, int) else 0)
    if not count:
        raise UserError(f'{files.root} has no objects and no names of classes')
    if count > MOST_CLASSES:
        raise UserError(f'{files.root} has labels or an nc beyond {MOST_CLASSES} classes')
    return [f'class_{i}' for i in range(count)], [
        'no file names the classes; add a classes.txt with a name in each line and repeat this'
    ]
