"""Pascal VOC: an XML file for each image, with boxes in pixels that count from 1.

mmdet's XMLDataset reads it for a fixed list of names and counts pixels in its own way; supervision
reads no difficult objects and no lists. So the files are read here.
"""

import posixpath
import re
from collections import Counter
from contextlib import suppress
from typing import NamedTuple, Optional
from xml.etree import ElementTree

import numpy as np
from tqdm import tqdm

from ...tooling.command import UserError
from ...tooling.files import files_below
from ...tooling.report import amount
from .. import defects
from ..data import Objects, Outline, Split, coco_content
from ..defects import Defects
from ..description import Description, SplitPart
from ..files import (
    Folder,
    as_path,
    is_image,
    is_utf8,
    join,
    lines_of,
    report_shared,
    stem_of,
    without_ending,
)
from ..folders import (
    Group,
    image_sets,
    is_mask_folder,
    partner_of,
    settings_with_lists,
    stems_by_folder,
)
from ..images import Size, sizes_of
from ..layout import Layout, Recognized, Undecided
from ..listing import Listing, by_folder
from ..lists import ListedFiles

ROOT_TAG = 'annotation'
TRIED = 20  # XML files of a folder whose beginnings are looked at


class Annotated(NamedTuple):
    """An annotation file and its image, relative to the folder of the data."""

    path: str
    image: str
    objects: list[tuple[str, Outline]]  # with the names of their classes; pixels as in the file
    size: Optional[Size]  # of the image, as the file has it


def recognize_voc(listing: Listing) -> Optional[Recognized]:
    """Folders of XML files, and those of their images: Annotations and JPEGImages, for example."""
    images = stems_by_folder(listing.images)
    candidates = {f: stems for f, stems in images.items() if not is_mask_folder(f)} or images
    groups = []
    for folder, names in by_folder(listing.ending('.xml')).items():
        if not any(has_root_tag(listing, name) for name in names[:TRIED]):
            continue
        place = partner_of(folder, set(map(stem_of, names)), candidates)
        if place is None and folder in images:  # of other names, which the files have
            place = folder
        if place is None:
            raise Undecided(f'no folder that belongs to {folder} has its images')
        groups.append(Group(place, folder))
    if not groups:
        return None
    return Recognized(*settings_with_lists(groups, image_sets(listing, 'Main'), listing))


def has_root_tag(listing: Listing, name: str) -> bool:
    """Whether the first element of an XML file is <annotation>, in any case."""
    match = re.search(rb'<([A-Za-z_][\w.\-]*)', listing.head(name))
    return match is not None and match[1].decode().lower() == ROOT_TAG


def read_voc(description: Description, found: Defects) -> Objects:
    """The objects of the XML files of a description; masks are not read."""
    folder = Folder(description.root)
    annotated: dict[str, list[Annotated]] = {}
    for split, parts in description.splits.items():
        annotated[split] = []
        for part in parts:
            if part.annotations is None:
                source = description.source
                raise UserError(f'{source}: annotations must be the folder of the XML files')
            annotated[split] += annotated_of_part(folder, part, description, found)
    folder.report(found)
    every = [item for of_split in annotated.values() for item in of_split]
    report_shared(((item.image, item.path) for item in every), found)
    objects = [found_object for item in every for found_object in item.objects]
    if not objects:
        raise UserError(f'{description.root}: no XML file has an image and objects')
    sizes = sizes_of(description.root, [item.image for item in every], found)
    warn_about_images(every, sizes, found)
    classes = sorted({name for name, _ in objects})
    if description.names:
        classes = list(description.names.values())
    # The last pixel belongs to the box.
    zero_based = any(outline.points.min() < 1 for _, outline in objects)
    shift = np.array([(0, 0) if zero_based else (1, 1), (0, 0)])
    left_out: Counter = Counter()
    splits = {}
    for split, of_split in annotated.items():
        outlines: dict[str, list[Outline]] = {}
        for item in of_split:
            if item.image not in sizes:
                continue
            of_image = outlines.setdefault(item.image, [])
            for name, outline in item.objects:
                if name not in classes:
                    left_out[name] += 1
                    continue
                points = outline.points - shift
                of_image.append(outline._replace(label=classes.index(name), points=points))
        splits[split] = Split(coco_content(outlines, sizes, classes, found), description.root)
    for name, count in left_out.items():
        found.add(defects.OTHER_CLASS, f'{name} ({amount(count, "object")})')
    return Objects(description, splits, classes, [])


def annotated_of_part(
    folder: Folder, part: SplitPart, description: Description, found: Defects
) -> list[Annotated]:
    """The annotation files of a part that have an image."""
    place = str(part.annotations)
    if not (description.root / place).is_dir():
        raise UserError(f'{description.source}: annotations must be a folder, got {place}')
    names = []
    for path in files_below(description.root / place):
        name = posixpath.join(place, path.relative_to(description.root / place).as_posix())
        if path.suffix.lower() == '.xml' and path.is_file():
            if is_utf8(name):
                names.append(posixpath.normpath(name))
            else:
                folder.undecodable.add(name)
    if part.listed is not None:
        names = listed_files(names, part, description, folder, found)
    annotated = []
    for name in tqdm(names, 'reading annotations', leave=False, delay=3):
        tree = parsed(description, name, found)
        if tree is None:
            continue
        image = image_of(folder, tree, name, part)
        if image is None:
            found.add(defects.XML_WITHOUT_IMAGE, name)
            continue
        given = stem_of((tree.findtext('filename') or '').strip() or name)
        if given not in (stem_of(name), stem_of(image)):
            found.add(defects.XML_OF_OTHER, f'{name} ({given})')
        objects = voc_objects(tree, name, found)
        annotated.append(Annotated(name, image, objects, declared_size(tree)))
    return annotated


def listed_files(
    names: list[str], part: SplitPart, description: Description, folder: Folder, found: Defects
) -> list[str]:
    """The annotation files whose names a list has."""
    known = ListedFiles(names, str(part.annotations))
    listed = []
    for name in lines_of(description.root / str(part.listed)):
        matching = known.matching(name)
        file = folder.only(f'{name} ({part.listed})', matching)
        stem = without_ending(name) if is_image(name) else name
        if file is not None:
            listed.append(file)
        elif matching:
            continue  # is reported
        elif folder.find_image(join(part.images, stem)):
            found.add(defects.LIST_WITHOUT_XML, f'{name} ({part.listed})')
        else:
            found.add(defects.LOST_NAME, f'{name} ({part.listed})')
    return list(dict.fromkeys(listed))


def parsed(description: Description, name: str, found: Defects) -> Optional[ElementTree.Element]:
    """The root of an annotation file."""
    try:
        tree = ElementTree.parse(description.root / name).getroot()
    except (ElementTree.ParseError, ValueError, LookupError):
        found.add(defects.TORN_XML, name)
        return None
    if tree.tag != ROOT_TAG:
        found.add(defects.OTHER_ROOT, f'{name} (<{tree.tag}>)'[:300])
        return None
    return tree


def image_of(
    folder: Folder, tree: ElementTree.Element, name: str, part: SplitPart
) -> Optional[str]:
    """The image of an annotation file in the folder of the images: that of the same name, of
    several the one that the file names; or else that which the file names."""
    inside = without_ending(posixpath.relpath(name, part.annotations))
    given = posixpath.basename(as_path((tree.findtext('filename') or '').strip()))
    given = given.removeprefix('.')  # `.` names none
    image = folder.find_image(join(part.images, inside), named=given)
    stem = join(part.images, inside)
    if image is not None or stem in folder.ambiguous or not given:
        return image
    return folder.find(join(part.images, join(posixpath.dirname(inside), given)))


def warn_about_images(annotated: list[Annotated], sizes: dict[str, Size], found: Defects) -> None:
    """Report images of another size than their file says, and with several files."""
    users = Counter(item.image for item in annotated)
    for item in annotated:
        if item.size and item.image in sizes and item.size != sizes[item.image]:
            found.add(defects.XML_SIZE, item.path)
        if users[item.image] > 1:
            is_own = stem_of(item.path) == stem_of(item.image)
            kind = defects.SHARED_IMAGE if is_own else defects.STRAY_XML
            found.add(kind, f'{item.image} ({item.path})')


def declared_size(tree: ElementTree.Element) -> Optional[Size]:
    """The size of the image in an annotation file; None without one, or if it is 0."""
    with suppress(ValueError):
        height = int(tree.findtext('size/height', ''))
        width = int(tree.findtext('size/width', ''))
        return (height, width) if height and width else None
    return None


def voc_objects(tree: ElementTree.Element, path: str, found: Defects) -> list[tuple[str, Outline]]:
    """The class and the outline of each object."""
    objects = []
    for element in tree.iter('object'):
        name = (element.findtext('name') or '').strip()
        texts = [element.findtext(f'bndbox/{k}', '') for k in ('xmin', 'ymin', 'xmax', 'ymax')]
        try:
            corners = [float(text) for text in texts]
        except ValueError:
            found.add(defects.BAD_BOX, path)
            continue
        points = np.reshape(corners, (2, 2))
        if not name:
            found.add(defects.NO_NAME, path)
        elif not np.isfinite(points).all() or (points[1] < points[0]).any():
            found.add(defects.REVERSED_BOX, path)
        else:
            difficult = (element.findtext('difficult') or '').strip()
            if difficult not in ('', '0', '1'):
                found.add(defects.ODD_DIFFICULT, f'{path} ({difficult[:40]})')
            objects.append((name, Outline(0, points, path, is_ignored=difficult == '1')))
    return objects


LAYOUT = Layout(
    what='an XML file of boxes for each image',
    holds='objects',
    recognize=recognize_voc,
    read=read_voc,
    example={
        'train': 'FOLDER',
        'val': 'FOLDER',
        'annotations': {'train': 'FOLDER', 'val': 'FOLDER'},
    },
)
