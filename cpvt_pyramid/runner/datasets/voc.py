"""Pascal VOC: an XML file for each image, with boxes in pixels that count from 1."""

from collections import defaultdict
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Optional
from xml.etree import ElementTree

import numpy as np
from tqdm import tqdm

from ...tooling.command import UserError
from .defects import Defects
from .folder import SPLITS, Files, ImageSets, comparable, split_of
from .images import sizes_of
from .objects import Objects, Outline, Split, coco_content


def read_voc(files: Files, defects: Defects) -> Optional[Objects]:
    """The objects of a folder in this layout, or None."""
    paths = files.with_suffix('.xml')
    if not paths:
        return None
    lists = ImageSets(files, 'Main')
    parsed = {}  # by annotation file: image, names and outlines of objects
    for path in tqdm(paths, 'reading annotations', leave=False, delay=3):
        try:
            tree = ElementTree.parse(files.root / path).getroot()
        except (ElementTree.ParseError, ValueError, LookupError):
            defects.error('annotation files that are not complete XML', path)
            continue
        if tree.tag != 'annotation':
            continue
        found = image_of(files, tree, path, defects)
        if len(found) == 1:
            parsed[path] = found[0], voc_objects(tree, path, defects)
        elif found:
            kind = 'annotation files that fit several images'
            defects.error(kind, f'{path} ({" and ".join(found[:3])})')
        else:
            defects.error('annotation files without an image', path)
    if not parsed and not defects.has_errors:
        return None
    if not parsed:
        raise UserError(f'{files.root}: none of {len(paths)} XML files has an image')
    users = defaultdict(list)
    for path, (image, _) in parsed.items():
        users[image].append(path)
    for image, several in users.items():
        if len(several) > 1:
            kind = 'images with several annotation files, whose objects are all used'
            defects.warn(kind, f'{image} ({" and ".join(several[:3])})')
    every = [found for _, objects in parsed.values() for found in objects]
    zero_based = any(outline.points.min() < 1 for _, outline in every)
    classes = sorted({name for name, _ in every})
    if not classes:
        raise UserError(f'{files.root}: the XML files have no objects')
    sizes = sizes_of(files.root, [image for image, _ in parsed.values()], defects)
    records, unlisted = defaultdict(list), 0
    for path, (image, objects) in parsed.items():
        if image not in sizes:
            continue
        split = split_of(path, folders_only=True) or split_of(image, folders_only=True) or 'train'
        if lists.splits:
            split = lists.split(path, comparable(PurePosixPath(path).stem))
        if split is None:
            unlisted += 1
            continue
        # The last pixel belongs to the box.
        shift = np.array([(0, 0) if zero_based else (1, 1), (0, 0)])
        outlines = [
            o._replace(label=classes.index(name), points=o.points - shift) for name, o in objects
        ]
        records[split].append((image, sizes[image], outlines))
    lists.warn('an annotation file', defects)
    splits = {
        s: Split(coco_content(records[s], classes, defects), files.root)
        for s in SPLITS
        if records[s]
    }
    notes = [f'{unlisted} images are in no list of ImageSets/Main: left out'] if unlisted else []
    folders = {PurePosixPath(image).parent for image, _ in parsed.values()}
    beside = [name for name in files.images if PurePosixPath(name).parent in folders]
    alone = len(set(beside) - {image for image, _ in parsed.values()})
    notes += [f'{alone} images have no annotation file: left out'] if alone else []
    return Objects('Pascal VOC', splits, classes, notes)


def image_of(files: Files, tree: ElementTree.Element, path: str, defects: Defects) -> list[str]:
    """The image of an annotation file: that of the same name, else the one that it names; [] or
    several if it is not clear."""
    split = split_of(path, folders_only=True)
    given = (tree.findtext('filename') or '').strip()
    suffix = PurePosixPath(given).suffix or '.jpg'
    size = None
    with suppress(TypeError, ValueError):
        size = int(tree.findtext('size/height')), int(tree.findtext('size/width'))
    named_alike = PurePosixPath(path).with_suffix(suffix).as_posix()
    found = files.find_images(named_alike, split, size, any_suffix=True)
    folder = (tree.findtext('folder') or '').strip()
    if len(found) != 1 and given:
        named = files.find_images(f'{folder}/{given}', split, size)
        return named if len(named) == 1 or not found else found
    others = files.find_images(f'{folder}/{given}', split, size) if given else []
    if others and not set(found) & set(others):
        defects.warn('annotation files that name another image', f'{path} ({given})')
    return found


def voc_objects(
    tree: ElementTree.Element, path: str, defects: Defects
) -> list[tuple[str, Outline]]:
    """The class and the outline of each object."""
    objects = []
    for element in tree.iter('object'):
        name = (element.findtext('name') or '').strip()
        box = element.find('bndbox')
        try:
            corners = [float(box.findtext(k)) for k in ('xmin', 'ymin', 'xmax', 'ymax')]
        except (AttributeError, TypeError, ValueError):
            defects.error('objects without a bndbox of 4 numbers', path)
            continue
        points = np.reshape(corners, (2, 2))
        if not name:
            defects.error('objects without a name', path)
        elif not np.isfinite(points).all() or (points[1] < points[0]).any():
            defects.error('objects whose xmax or ymax is below their xmin or ymin', path)
        else:
            is_difficult = (element.findtext('difficult') or '').strip() == '1'
            objects.append((name, Outline(0, points, path, is_ignored=is_difficult)))
    return objects
