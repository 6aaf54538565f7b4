"""Pascal VOC: an XML file for each image, with boxes in pixels that count from 1.

mmdet's XMLDataset reads it for a fixed list of names and counts pixels in its own way; supervision
reads no difficult objects and no lists. So the files are read here.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Optional
from xml.etree import ElementTree

import numpy as np

from .. import defects
from ..annotation_files import (
    AnnotationFile,
    objects_of_files,
    read_annotation_files,
    recognized_files,
)
from ..data import Objects, Outline
from ..defects import Defects
from ..description import Description
from ..images import Size
from ..layout import Layout, Recognized
from ..listing import Listing

ENDING = '.xml'
ROOT_TAG = 'annotation'


def recognize_voc(listing: Listing) -> Optional[Recognized]:
    return recognized_files(listing, ENDING, has_root_tag)


def has_root_tag(listing: Listing, name: str) -> bool:
    """Whether the first element of an XML file is <annotation>, in any case."""
    match = re.search(rb'<([A-Za-z_][\w.\-]*)', listing.head(name))
    return match is not None and match[1].decode().lower() == ROOT_TAG


def read_voc(description: Description, found: Defects) -> Objects:
    """The objects of the XML files of a description; masks are not read."""
    annotated = read_annotation_files(description, ENDING, parse_xml, found)
    every = [item for of_split in annotated.values() for item in of_split]
    if all(o.parts[0].min() >= 1 for item in every for _, o in item.file.objects):
        for item in every:
            item.file.objects[:] = [(name, counted_from_0(o)) for name, o in item.file.objects]
    return objects_of_files(description, annotated, found)


def counted_from_0(box: Outline) -> Outline:
    """A box whose pixels count from 1; the last pixel belongs to it."""
    return box._replace(parts=[box.parts[0] - [(1, 1), (0, 0)]])


def parse_xml(path: Path, name: str, found: Defects) -> Optional[AnnotationFile]:
    """The objects in an annotation file, with pixels as in the file."""
    try:
        tree = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, ValueError, LookupError):
        found.add(defects.TORN_XML, name)
        return None
    if tree.tag != ROOT_TAG:
        found.add(defects.OTHER_ROOT, f'{name} (<{tree.tag}>)'[:300])
        return None
    image = (tree.findtext('filename') or '').strip()
    return AnnotationFile(image, size_in_xml(tree), boxes_in_xml(tree, name, found))


def size_in_xml(tree: ElementTree.Element) -> Optional[Size]:
    """The size of the image in an annotation file; None without one, or if it is 0."""
    with suppress(ValueError):
        height = int(tree.findtext('size/height', ''))
        width = int(tree.findtext('size/width', ''))
        return (height, width) if height and width else None
    return None


def boxes_in_xml(tree: ElementTree.Element, path: str, found: Defects) -> list[tuple[str, Outline]]:
    """The class and the box of each object."""
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
            objects.append((name, Outline(0, [points], path, is_ignored=difficult == '1')))
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
