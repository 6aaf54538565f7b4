"""Pascal VOC: an XML file for each image, with boxes in pixels that count from 1."""

from collections import Counter, defaultdict
from contextlib import suppress
from os.path import dirname
from pathlib import Path, PurePosixPath
from typing import Optional
from xml.etree import ElementTree

import numpy as np
from tqdm import tqdm

from ..tooling.command import UserError
from .coco import Objects, Outline, Split, coco_content
from .defects import Defects
from .folder import SPLITS, Files, ImageSets, stem_of
from .images import Size, sizes_of

ROOT_TAG = 'annotation'


def is_voc_folder(files: Files) -> bool:
    """Whether there is such an XML file, perhaps with its root in capital letters."""
    paths = files.with_suffix('.xml')
    return any(root_tag(files.root / path).lower() == ROOT_TAG for path in paths)


def root_tag(path: Path) -> str:
    """The name of the first element of an XML file; of a torn one, perhaps ''."""
    try:
        with path.open('rb') as file:
            for _, element in ElementTree.iterparse(file, ['start']):
                return element.tag
    except (ElementTree.ParseError, ValueError, LookupError):
        pass
    return ''


def read_voc(files: Files, defects: Defects, masks: bool = False) -> Objects:
    """The objects of a folder in this layout, which has no masks."""
    paths = files.with_suffix('.xml')
    parsed = {}  # by annotation file: image, names and outlines of objects
    declared = {}  # by annotation file: the size of the image
    trees = {}
    for path in tqdm(paths, 'reading annotations', leave=False, delay=3):
        try:
            tree = ElementTree.parse(files.root / path).getroot()
        except (ElementTree.ParseError, ValueError, LookupError):
            defects.add('annotation files that are not complete XML', path)
            continue
        if tree.tag == ROOT_TAG:
            trees[path] = tree
        elif tree.tag.lower() == ROOT_TAG:
            kind = f'XML files with the root <{tree.tag}> in place of <{ROOT_TAG}>'
            defects.add(kind, path)
    places = images_of_annotations(files, trees)
    for path, tree in trees.items():
        place = places[path]
        if place is None:
            defects.add('annotation files without an image', path)
            continue
        given = stem_of((tree.findtext('filename') or '').strip())
        if given and given not in (stem_of(path), stem_of(place)):
            defects.warn('annotation files that name another image', f'{path} ({given})')
        parsed[path] = place, voc_objects(tree, path, defects)
        declared[path] = declared_size(tree)
    every = [found for _, objects in parsed.values() for found in objects]
    if not every:
        raise UserError(f'{files.root}: none of {len(paths)} XML files has an image and objects')
    # The last pixel belongs to the box.
    zero_based = any(outline.points.min() < 1 for _, outline in every)
    shift = np.array([(0, 0) if zero_based else (1, 1), (0, 0)])
    classes = sorted({name for name, _ in every})
    lists = ImageSets(files, 'Main')
    images = [image for image, _ in parsed.values()]
    sizes = sizes_of(files.root, images, defects)
    users = Counter(images)
    outlines: dict[str, dict[str, list]] = defaultdict(dict)  # by split and image
    for path, (image, objects) in parsed.items():
        if declared[path] and image in sizes and declared[path] != sizes[image]:
            defects.warn('annotation files with another size than their image', path)
        if users[image] > 1:
            kind = 'images with several annotation files, whose objects are all used'
            defects.warn(kind, f'{image} ({path})')
        if lists.splits:
            split = lists.split(path, stem_of(path))
        else:
            split = files.assigned_split(path) or files.assigned_split(image)
            split = split or files.split_of(dirname(path)) or files.split_of(dirname(image))
            split = split or 'train'
        if split and image in sizes:
            outlines[split].setdefault(image, []).extend(
                o._replace(label=classes.index(name), points=o.points - shift)
                for name, o in objects
            )
    lists.warn('an annotation file', defects)
    splits = {
        split: Split(coco_content(outlines[split], sizes, classes, defects, masks), files.root)
        for split in SPLITS
        if split in outlines
    }
    folders = set(map(dirname, images))
    used = {image for found in outlines.values() for image in found}
    left = [name for name in files.images if dirname(name) in folders and name not in used]
    notes = []
    if left:
        notes.append(
            f'{len(left)} images are left out: no annotation file that was read, or no list of '
            'ImageSets, has them'
        )
    by_name = {}
    if not lists.splits:
        by_name = files.splits_by_name(sorted(folders | set(map(dirname, parsed))))
    return Objects('Pascal VOC', splits, classes, notes, by_name)


def images_of_annotations(
    files: Files, trees: dict[str, ElementTree.Element]
) -> dict[str, Optional[str]]:
    """The image of each annotation file: that of the same name, or if fewer files have one, that
    which the file names. The images of the files in one folder are in one folder."""
    by_folder = defaultdict(list)
    for path in trees:
        by_folder[dirname(path)].append(path)
    images: dict[str, Optional[str]] = {}
    for paths in by_folder.values():
        alike = [str(PurePosixPath(path).with_suffix('')) for path in paths]
        found = files.find_images(alike, paths[0], by_stem=True)
        if None in found:
            given = [(trees[path].findtext('filename') or '').strip() for path in paths]
            named = files.find_images(given, paths[0])
            if named.count(None) < found.count(None):
                found = named
        images.update(zip(paths, found))
    return images


def declared_size(tree: ElementTree.Element) -> Optional[Size]:
    """The size of the image in an annotation file; None without one, or if it is 0."""
    with suppress(ValueError):
        height = int(tree.findtext('size/height', ''))
        width = int(tree.findtext('size/width', ''))
        return (height, width) if height and width else None
    return None


def voc_objects(
    tree: ElementTree.Element, path: str, defects: Defects
) -> list[tuple[str, Outline]]:
    """The class and the outline of each object."""
    objects = []
    for element in tree.iter('object'):
        name = (element.findtext('name') or '').strip()
        texts = [element.findtext(f'bndbox/{k}', '') for k in ('xmin', 'ymin', 'xmax', 'ymax')]
        try:
            corners = [float(text) for text in texts]
        except ValueError:
            defects.add('objects without a bndbox of 4 numbers', path)
            continue
        points = np.reshape(corners, (2, 2))
        if not name:
            defects.add('objects without a name', path)
        elif not np.isfinite(points).all() or (points[1] < points[0]).any():
            defects.add('objects whose xmax or ymax is below their xmin or ymin', path)
        else:
            is_difficult = (element.findtext('difficult') or '').strip() == '1'
            objects.append((name, Outline(0, points, path, is_ignored=is_difficult)))
    return objects
