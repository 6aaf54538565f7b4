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
from ..annotation_files import data_of_outlines, outlines_in_files
from ..data import DataSet, Outline
from ..defects import Defects
from ..description import Description
from ..files import stem_of
from ..folders import recognized_files
from ..images import Size
from ..layout import EXAMPLE_OF_FILES, Layout, Recognized
from ..listing import Listing

ENDING = '.xml'
ROOT_TAG = 'annotation'


def recognize_voc(listing: Listing) -> Optional[Recognized]:
    return recognized_files(listing, ENDING, has_root_tag, lists='Main')


def has_root_tag(listing: Listing, name: str) -> bool:
    """Whether the first element of an XML file is <annotation>, in any case."""
    match = re.search(rb'<([A-Za-z_][\w.\-]*)', listing.head(name))
    return match is not None and match[1].decode().lower() == ROOT_TAG


def read_voc(description: Description, found: Defects) -> DataSet:
    """The objects of the XML files of a description; masks are not read."""
    outlined = outlines_in_files(description, ENDING, parse_xml, found)
    if all(outline.parts[0].min() >= 1 for outline in outlined.objects):
        counted = {k: list(map(counted_from_0, v)) for k, v in outlined.outlines.items()}
        outlined = outlined._replace(outlines=counted)
    return data_of_outlines(description, outlined, found)


def counted_from_0(box: Outline) -> Outline:
    """A box whose pixels count from 1; the last pixel belongs to it."""
    return box._replace(parts=[box.parts[0] - [(1, 1), (0, 0)]])


def parse_xml(path: Path, name: str, size: Size, found: Defects) -> Optional[list[Outline]]:
    """The objects in an annotation file, with pixels as in the file."""
    try:
        tree = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, ValueError, LookupError):
        found.add(defects.TORN_FILE, name, 'not complete XML')
        return None
    if tree.tag != ROOT_TAG:
        found.add(defects.TORN_FILE, name, f'the root is <{tree.tag}>, not <{ROOT_TAG}>'[:100])
        return None
    image = stem_of(tree.findtext('filename') or name)
    if image != stem_of(name):
        found.add(defects.FILE_OF_OTHER, f'{name} ({image})')
    sides = [tree.findtext(f'size/{side}', '0').strip() for side in ('height', 'width')]
    if '0' not in sides and sides != [str(side) for side in size]:
        found.add(defects.SIZE_IN_FILE, f'{name} ({sides[1]} x {sides[0]})'[:300])
    return boxes_in_xml(tree, name, found)


def boxes_in_xml(tree: ElementTree.Element, path: str, found: Defects) -> list[Outline]:
    objects = []
    for element in tree.iter('object'):
        name = (element.findtext('name') or '').strip()
        texts = [element.findtext(f'bndbox/{k}', '') for k in ('xmin', 'ymin', 'xmax', 'ymax')]
        points = np.full((2, 2), np.nan)
        with suppress(ValueError):
            points = np.reshape([float(text) for text in texts], (2, 2))
        if not np.isfinite(points).all():
            found.add(defects.BAD_OBJECT, path, 'no bndbox of 4 numbers')
            continue
        if not name:
            found.add(defects.BAD_OBJECT, path, 'no name')
        elif (points[1] < points[0]).any():
            found.add(defects.BAD_OBJECT, path, 'xmax or ymax is below xmin or ymin')
        else:
            difficult = (element.findtext('difficult') or '').strip()
            if difficult not in ('', '0', '1'):
                found.add(defects.ODD_DIFFICULT, f'{path} ({difficult[:40]})')
            objects.append(Outline(name, [points], path, is_ignored=difficult == '1'))
    return objects


LAYOUT = Layout(
    what='an XML file of boxes for each image',
    holds='objects',
    recognize=recognize_voc,
    read=read_voc,
    example=EXAMPLE_OF_FILES,
)
