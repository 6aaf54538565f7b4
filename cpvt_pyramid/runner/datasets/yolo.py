"""YOLO: a text file with a class and a box or polygon in each line, for each image.

Read here and not with supervision, which skips or raises where a file has errors.
"""

import math
import os
import re
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Optional

import numpy as np
import yaml

from ...tooling.command import UserError, one_line
from ...tooling.files import files_below
from ..config.load import as_list
from .coco import Objects, Outline, Split, coco_content
from .defects import Defects
from .folder import (
    IMAGE_SUFFIXES,
    NAME_FILES,
    SPLITS,
    Files,
    distinct,
    lines_of,
    named_classes,
    split_of,
    text_of,
)
from .images import sizes_of

IMAGE_FOLDERS = ('images', 'jpegimages', 'img', 'imgs')


def read_yolo(files: Files, defects: Defects) -> Optional[Objects]:
    """The objects of a folder in this layout, or None."""
    settings, path = yolo_settings(files)
    images = listed_images(files, settings, path) if path else labelled_images(files)
    if not images:
        return None
    labels = {name: label_file(files, name) for names in images.values() for name in names}
    boxes_only = 'kpt_shape' in settings  # what follows a box are keypoints
    sizes = sizes_of(files.root, labels, defects)
    objects = {
        image: objects_in(files.root, labels[image], size, boxes_only, defects)
        for image, size in sizes.items()
    }
    highest = max((o.label for found in objects.values() for o in found or ()), default=-1)
    classes, notes = yolo_classes(files, settings, path, highest, defects)
    warn_of_labels(files, labels, defects)
    splits = {}
    for split, names in images.items():
        good = {name: objects[name] for name in names if objects.get(name) is not None}
        splits[split] = Split(coco_content(good, sizes, classes, defects), files.root)
    return Objects('YOLO', splits, classes, notes)


def yolo_settings(files: Files) -> tuple[dict, Optional[Path]]:
    """The content of data.yaml and its path; {} and None without one."""
    for name in files.with_suffix('.yaml', '.yml'):
        path = files.root / name
        try:
            settings = yaml.safe_load(path.read_text(encoding='utf-8-sig'))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            if path.stem in ('data', 'dataset'):
                raise UserError(f'{path} is not YAML: {one_line(error, 120)}') from error
            continue
        train = as_list(settings.get('train')) if isinstance(settings, dict) else []
        if train and all(isinstance(entry, str) for entry in train):
            return settings, path
    return {}, None


def listed_images(files: Files, settings: dict, path: Path) -> dict[str, list[str]]:
    """The images of each split, relative to the root, that data.yaml names."""
    base = path.parent / str(settings.get('path') or '')
    found = {}
    for split, keys in SPLITS.items():
        names = []
        for entry in (e for key in keys for e in as_list(settings.get(key))):
            inside = re.sub(r'^(\.\./)+', '', str(entry))  # Roboflow writes ../ too many
            candidates = [base / str(entry), path.parent / str(entry), path.parent / inside]
            source = next((c for c in candidates if c.exists()), None)
            if source is None and split == 'test':
                continue
            if source is None:
                raise UserError(f'{path}: {split} is {entry}, which does not exist')
            names += images_at(source, base, files)
        if names:
            names = [Path(os.path.relpath(n, files.root)).as_posix() for n in names]
            found[split] = list(dict.fromkeys(names))
    if not found:
        raise UserError(f'{path} names no images')
    return found


def images_at(source: Path, base: Path, files: Files) -> list[Path]:
    """The images of a folder, or those that a text file lists."""
    if source.is_dir():
        return [path for path in files_below(source) if path.suffix.lower() in IMAGE_SUFFIXES]
    found = []
    for line in lines_of(source):
        places = [place / line for place in (source.parent, base) if (place / line).is_file()]
        if not places:  # a path of another machine
            places = [files.root / n for n in files.find_images(line, split_of(source.name))]
        found.append(places[0] if places else source.parent / line)
    return found


def labelled_images(files: Files) -> dict[str, list[str]]:
    """Without a data.yaml, the images of each split; of folders with labelled images only."""
    labelled = {PurePosixPath(name).parent for name in files.images if label_file(files, name)}
    found = defaultdict(list)
    for name in files.images:
        if PurePosixPath(name).parent in labelled:
            found[split_of(os.path.dirname(name)) or 'train'].append(name)
    return {split: found[split] for split in SPLITS if split in found}


def label_file(files: Files, image: str) -> Optional[str]:
    """The label file of an image, both relative to the root, or None."""
    path = PurePosixPath(image).with_suffix('.txt')
    folders, places = path.parent.parts, [path.parent, path.parent / 'labels']
    for i, folder in enumerate(folders):
        if folder.lower() in IMAGE_FOLDERS:
            for labels in ('Labels', 'labels'):
                places.insert(0, PurePosixPath(*folders[:i], labels, *folders[i + 1 :]))
    found = (str(place / path.name) for place in places if path.name not in NAME_FILES)
    return next((name for name in found if (files.root / name).is_file()), None)


def warn_of_labels(files: Files, labels: dict[str, Optional[str]], defects: Defects) -> None:
    """Warn about label files without an image, and with several of those with `labels`."""
    for name, count in Counter(labels.values()).items():
        if name and count > 1:
            defects.warn('label files of several images', name)
    used = {label_file(files, name) for name in files.images}
    for name in files.with_suffix('.txt'):
        path = PurePosixPath(name.lower())
        is_label = 'labels' in path.parts[:-1] and path.name not in NAME_FILES
        if is_label and name not in used:
            defects.warn('label files without an image', name)


def objects_in(
    root: Path, name: Optional[str], size: tuple[int, int], boxes_only: bool, defects: Defects
) -> Optional[list[Outline]]:
    """The objects in a label file, for an image of a (height, width); None if it is not text."""
    try:
        lines = text_of(root / name).splitlines() if name else []
    except UserError:
        defects.add('label files that are not text', str(name))
        return None
    objects = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        values = []
        with suppress(ValueError):
            values = [float(value) for value in line.split()][: 5 if boxes_only else None]
        at = f'{name} line {number}'
        is_polygon = len(values) >= 7 and len(values) % 2 == 1
        is_finite = all(map(math.isfinite, values))
        is_whole = len(values) == 5 or is_polygon
        if not is_whole or not is_finite or values[0] < 0 or values[0] % 1:
            kind = 'lines that are neither a class and a box nor a class and a polygon'
            defects.add(kind, at)
        elif min(values[1:]) < -0.01 or max(values[1:]) > 1.01:
            kind = 'objects beyond the image; values must be shares of its width and height'
            defects.add(kind, at)
        else:
            points = np.reshape(values[1:], (-1, 2))
            if not is_polygon:
                center, sides = points
                points = np.stack([center - sides / 2, center + sides / 2])
            objects.append(Outline(int(values[0]), points * size[::-1], at, is_polygon))
    return objects


def yolo_classes(
    files: Files, settings: dict, path: Optional[Path], highest: int, defects: Defects
) -> tuple[list[str], list[str]]:
    """The names of the classes, and notes about them."""
    names, declared = settings.get('names'), settings.get('nc')
    if isinstance(names, dict):
        try:
            names = {int(key): str(name) for key, name in names.items()}
        except (TypeError, ValueError) as error:
            raise UserError(f'{path}: names must number the classes') from error
        names = [names.get(i, f'class_{i}') for i in range(max(names, default=-1) + 1)]
    if isinstance(names, list) and names:
        if isinstance(declared, int) and declared != len(names):
            kind = 'data.yaml declares another number of classes than it names; the names count'
            defects.warn(kind, f'nc is {declared}, and there are {len(names)} names')
        return distinct(list(map(str, names))), []
    if listed := named_classes(files):
        return listed, []
    count = max(highest + 1, declared if isinstance(declared, int) else 0)
    if not count:
        raise UserError(f'{files.root} has no objects and no names of classes')
    return [f'class_{i}' for i in range(count)], [
        'no file names the classes; add a classes.txt with a name in each line and repeat this'
    ]
