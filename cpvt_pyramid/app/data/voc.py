"""Pascal VOC: an XML file for each image, with boxes in pixels that count from 1."""

from collections import Counter, defaultdict
from contextlib import suppress
from os.path import dirname
from pathlib import PurePosixPath
from typing import NamedTuple, Optional
from xml.etree import ElementTree

import numpy as np
from tqdm import tqdm

from ..tooling.command import UserError
from .coco import Objects, Outline, Split, coco_content
from .defects import Defects
from .folder import SPLITS, Files, ImageSets, stem_of
from .images import Size, sizes_of

ROOT_TAG = 'annotation'


class Annotated(NamedTuple):
    """An annotation file and its image."""

    path: str
    image: str
    objects: list[tuple[str, Outline]]  # with the names of their classes; pixels as in the file
    size: Optional[Size]  # of the image, as the file has it


def read_voc(files: Files, defects: Defects, masks: bool = False) -> Optional[Objects]:
    """The objects of a folder in this layout, which has no masks; None if it has no such file."""
    trees = parsed_files(files, defects)
    if trees is None:
        return None
    annotated = with_images(files, trees, defects)
    every = [found for item in annotated for found in item.objects]
    if not every:
        raise UserError(f'{files.root}: none of {len(trees)} XML files has an image and objects')
    sizes = sizes_of(files.root, [item.image for item in annotated], defects)
    warn_about_images(annotated, sizes, defects)
    classes = sorted({name for name, _ in every})
    # The last pixel belongs to the box.
    zero_based = any(outline.points.min() < 1 for _, outline in every)
    shift = np.array([(0, 0) if zero_based else (1, 1), (0, 0)])
    lists = ImageSets(files, 'Main')
    outlines: dict[str, dict[str, list[Outline]]] = defaultdict(dict)  # by split and image
    for item in annotated:
        split = split_of_file(files, lists, item)
        if split is None or item.image not in sizes:
            continue
        of_image = outlines[split].setdefault(item.image, [])
        for name, outline in item.objects:
            label = classes.index(name)
            of_image.append(outline._replace(label=label, points=outline.points - shift))
    lists.warn('an annotation file', defects)
    splits = {
        split: Split(coco_content(outlines[split], sizes, classes, defects, masks), files.root)
        for split in SPLITS
        if split in outlines
    }
    folders = {dirname(item.image) for item in annotated}
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
        folders |= {dirname(item.path) for item in annotated}
        by_name = files.splits_by_name(sorted(folders))
    return Objects('Pascal VOC', splits, classes, notes, by_name)


def parsed_files(files: Files, defects: Defects) -> Optional[dict[str, ElementTree.Element]]:
    """The XML files of this layout; None if there are none, not even with their root in capital
    letters."""
    trees = {}
    torn = []
    others = {}
    for path in tqdm(files.with_suffix('.xml'), 'reading annotations', leave=False, delay=3):
        try:
            tree = ElementTree.parse(files.root / path).getroot()
        except (ElementTree.ParseError, ValueError, LookupError):
            torn.append(path)
            continue
        if tree.tag == ROOT_TAG:
            trees[path] = tree
        elif tree.tag.lower() == ROOT_TAG:
            others[path] = tree.tag
    if not trees and not others:
        return None
    for path in torn:
        defects.add('annotation files that are not complete XML', path)
    for path, tag in others.items():
        defects.add(f'XML files with the root <{tag}> in place of <{ROOT_TAG}>', path)
    return trees


def with_images(
    files: Files, trees: dict[str, ElementTree.Element], defects: Defects
) -> list[Annotated]:
    """The annotation files that have an image."""
    annotated = []
    places = images_of_annotations(files, trees)
    for path, tree in trees.items():
        image = places[path]
        if image is None:
            defects.add('annotation files without an image', path)
            continue
        given = stem_of((tree.findtext('filename') or '').strip())
        if given and given not in (stem_of(path), stem_of(image)):
            defects.warn('annotation files that name another image', f'{path} ({given})')
        objects = voc_objects(tree, path, defects)
        annotated.append(Annotated(path, image, objects, declared_size(tree)))
    return annotated


def warn_about_images(annotated: list[Annotated], sizes: dict[str, Size], defects: Defects) -> None:
    """Warn about images of another size than their file says, and with several files."""
    users = Counter(item.image for item in annotated)
    for item in annotated:
        if item.size and item.image in sizes and item.size != sizes[item.image]:
            defects.warn('annotation files with another size than their image', item.path)
        if users[item.image] > 1:
            kind = 'images with several annotation files, whose objects are all used'
            defects.warn(kind, f'{item.image} ({item.path})')


def split_of_file(files: Files, lists: ImageSets, item: Annotated) -> Optional[str]:
    """The split of an annotation file by the lists; without lists, as it or its image is assigned,
    or as their folders are named. None: no list has it."""
    if lists.splits:
        return lists.split(item.path, stem_of(item.path))
    assigned = files.assigned_split(item.path) or files.assigned_split(item.image)
    by_folder = files.split_of(dirname(item.path)) or files.split_of(dirname(item.image))
    return assigned or by_folder or 'train'


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
        alike = [image_of(path) for path in paths]
        found = files.find_images(alike, paths[0], by_stem=True)
        if None in found:
            named = files.find_images([named_by(path, trees[path]) for path in paths], paths[0])
            if named.count(None) < found.count(None):
                found = named
        images.update(zip(paths, found))
    return images


def image_of(path: str) -> str:
    """Where the image of an annotation file is expected, without its suffix: next to it, or in the
    folder JPEGImages next to Annotations."""
    parts = PurePosixPath(path).with_suffix('').parts
    return '/'.join('JPEGImages' if part == 'Annotations' else part for part in parts)


def named_by(path: str, tree: ElementTree.Element) -> str:
    """Where the image that an annotation file names is expected; '' if it names none."""
    name = (tree.findtext('filename') or '').strip()
    return f'{dirname(image_of(path))}/{name}' if name else ''


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
