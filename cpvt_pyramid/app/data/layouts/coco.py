"""COCO: a JSON file with images, categories and objects for each split.

pycocotools reads such a file only if it is correct: it neither checks nor reports. mmdet reads it
with pycocotools. So records are read as JSON here, and checked in `check.py`.
"""

import json
import math
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from ...tooling.command import UserError
from ...tooling.report import amount
from .. import defects
from ..data import (
    ENOUGH,
    DataImage,
    DataSet,
    ImageObject,
    Split,
    check_that_boxes_are_no_corners,
    place_in,
)
from ..defects import Defects
from ..description import Description, SplitPart
from ..files import Folder, by_folder, join
from ..folders import recognized_by_images
from ..images import Size
from ..layout import Layout, Recognized
from ..listing import Listing
from ..lists import without_prefix
from ..splits import split_of

MOST_FILES = 100  # JSON files in a folder
SURROGATE = re.compile(rb'\\u[dD][89a-fA-F]')  # a character in two parts, as JSON writes it


class CocoFile(NamedTuple):
    """A file that may have the objects of a split.

    Attributes:
        path: of the file.
        images: names.
        has_boxes: whether an object has a box.
        is_empty: there are no objects.
    """

    path: str
    images: list[str]
    has_boxes: bool
    is_empty: bool = False


def recognize_coco(listing: Listing) -> Optional[Recognized]:
    """A file for each split, whose images are below one folder."""
    every = coco_files(listing)
    files = used_files(every)
    if not files:
        return None
    found = recognized_by_images(
        listing, {file.path: file.images for file in files}, preferred='instances'
    )
    notes = [f'{file.path} is left out: it has no boxes' for file in every if file not in files]
    return Recognized(found.settings, notes + found.notes)


def used_files(every: Sequence[CocoFile]) -> list[CocoFile]:
    """The files with boxes, and those of training and validation data without objects, for which
    there are no others: a split that is empty is reported, and not left out. If there are none of
    them, those without objects."""
    files = [file for file in every if file.has_boxes]
    splits = {split_of(file.path) for file in files}
    empty = [file for file in every if file.is_empty]
    if not files:
        return empty
    return files + [file for file in empty if split_of(file.path) in {'train', 'val'} - splits]


def coco_files(listing: Listing) -> list[CocoFile]:
    """The JSON files with lists of images and of objects, which may be empty or without boxes, as
    those of captions, and files that are torn. Folders with a JSON file for each image are not
    searched."""
    found = []
    for names in by_folder(listing.ending('.json')).values():
        for name in names if len(names) <= MOST_FILES else ():
            try:
                content = read_json(listing.root / name)
            except UserError:  # the reader says what is wrong
                if b'"images"' in (listing.root / name).read_bytes():
                    found.append(CocoFile(name, [], has_boxes=True))
                continue
            images = content.get('images') if isinstance(content, dict) else None
            if not isinstance(images, list) or not {'annotations', 'categories'} & {*content}:
                continue
            objects = content.get('annotations') or []
            has_boxes = isinstance(objects, list) and any('bbox' in dict_of(o) for o in objects)
            paths = [name_in_record(dict_of(image)) for image in images]
            paths = [path for path in paths if path]
            found.append(CocoFile(name, paths, has_boxes, is_empty=not objects))
    return found


def dict_of(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


# Reading


def read_coco_data(description: Description, found: Defects) -> DataSet:
    """The objects of the COCO files that a description names."""
    contents = {}
    splits = {}
    for key, part in parts_of_files(description).items():
        name = str(part.annotations)
        path = description.root / name
        contents[key] = read_coco(path)
        splits[key] = Split([], description.root / part.images, path, name)
    notes: list[str] = []
    classes = classes_of_files(description, contents, notes)
    parsed = {}
    for key, split in splits.items():
        folder = Folder(description.root)
        images = description.splits[key][0].images
        file_of = partial(file_of_name, folder, images, description.strip_prefix)
        parsed[key] = parse_coco(contents[key], split, classes, found, file_of)
        folder.report(found)
        if parsed[key].path is None:
            notes.append(
                f'OpenMMLab does not read {split.name} as it is: cpvt new-config copies it'
            )
    return DataSet(description, parsed, classes, notes)


def parts_of_files(description: Description) -> dict[str, SplitPart]:
    """The part of each split, which has one folder and a file of its own."""
    found = {}
    for split, parts in description.splits.items():
        if len(parts) > 1 or parts[0].annotations is None or parts[0].listed:
            raise UserError(
                f'{description.source}: {split} must be one folder, and annotations.{split} the '
                'COCO file of its images'
            )
        found[split] = parts[0]
    if len({part.annotations for part in found.values()}) < len(found):
        raise UserError(
            f'{description.source}: annotations must name another COCO file for each split'
        )
    return found


def file_of_name(folder: Folder, images: str, prefix: str, name: str) -> Optional[str]:
    """The file that a record names, relative to the folder of images; a missing one keeps its
    name. None: the name means several files, which `folder` reports."""
    wanted = join(images, without_prefix(name, prefix))
    place = folder.find(wanted)
    if place is None:
        return None if wanted in folder.ambiguous else name
    return place if images == '.' else place.removeprefix(f'{images}/')


def classes_of_files(
    description: Description, contents: Mapping[str, dict], notes: list[str]
) -> list[str]:
    """The classes: as declared, or all categories in the order of the files, without one that has
    no objects and is the super-category of others, as Roboflow writes it."""
    names: dict[str, None] = {}
    parents = set()
    used = set()
    for content in contents.values():
        categories = {category['id']: category['name'] for category in content['categories']}
        names.update(dict.fromkeys(categories.values()))
        used |= {categories.get(key) for key in map(category_of, content['annotations'])}
        for category in content['categories']:
            parent = category.get('supercategory')
            if isinstance(parent, str) and parent != category['name']:
                parents.add(parent)
    if description.names is None:
        groups = [name for name in names if name in parents and name not in used]
        notes += [f'{name} is no class: it has no objects and has other classes' for name in groups]
        return [name for name in names if name not in groups] or list(names)
    for name in description.names.values():
        if name not in names:
            raise UserError(
                f'{description.source}: names has {name!r}, but no COCO file has this category; '
                f'they have {", ".join(map(repr, list(names)[:8]))}'
            )
    return list(description.names.values())


def category_of(annotation: dict) -> Optional[int]:
    return annotation['category_id'] if is_key(annotation, 'category_id') else None


def parse_coco(
    content: dict[str, Any],
    split: Split,
    classes: Sequence[str],
    found: Defects,
    file_of: Callable[[str], Optional[str]] = str,
) -> Split:
    """A split with the images and objects of a COCO file, whose lists and categories are checked.

    It keeps its path if OpenMMLab reads the same from that: if no record is left out or completed,
    the names of images are those of their files, and the file has the classes in their order, which
    is that of mmdet's labels.

    Args:
        content: of the file.
        split: where it belongs, without images.
        classes: that count.
        found: gets what is wrong with single records.
        file_of: the file of the name of an image; None leaves out the image.
    """
    names = {category['id']: category['name'] for category in content['categories']}
    labels = {key: classes.index(name) for key, name in names.items() if name in classes}
    is_same = [name for name in names.values() if name in classes] == list(classes)
    images = images_in_records(content['images'], split, found, file_of)
    listed = (record.get('id') for record in content['images'])
    unusable = {key for key in listed if isinstance(key, (int, float, str))} - {*images}
    given = [record.get('file_name') for record in content['images']]
    is_same = is_same and [image.name for image in images.values()] == given
    lacking = Lacking(content['annotations'])
    others: Counter = Counter()
    for index, record in enumerate(content['annotations']):
        category = category_of(record)
        if category in names and category not in labels:
            others[names[category]] += 1
            continue
        key = record.get('image_id')
        key = key if isinstance(key, (int, float, str)) else None
        image = images.get(key)
        if image is None and key in unusable:
            continue  # which the line about its image says
        at = f'annotation {record.get("id", index)}'
        place = place_in(split, f'{at} of {image.name}' if image else at)
        reason = why_unusable(record, image, category in labels, images)
        if reason or image is None or category is None:
            found.add(defects.BAD_OBJECT, place, reason)
            is_same = False
            continue
        is_complete = lacking.note(record, place)
        mask_problem = why_no_mask(record.get('segmentation'), image.size)
        if mask_problem:
            found.add(defects.BAD_MASK, place, mask_problem)
        if record.get('ignore'):
            found.add(defects.LEFT_OUT, place)
        if found.as_it_is and record.get('id') == 0:  # a copy counts from 1
            found.add(defects.ID_0, place)
        is_kept = not (mask_problem and found.is_error(defects.BAD_MASK))
        if is_kept:
            item = object_in_record(record, labels[category], at, bool(mask_problem))
            if not lacking.has_areas:
                item = item._replace(area=item.box[2] * item.box[3])
            image.objects.append(item)
        is_same = is_same and is_kept and is_complete and record.get('id') != 0
    lacking.report(found)
    for name, count in others.items():
        found.add(defects.OTHER_CLASS, f'{name} ({amount(count, "object")} in {split.name})')
    parsed = split._replace(images=list(images.values()), path=split.path if is_same else None)
    check_boxes_of_file(parsed)
    return parsed


class Lacking:
    """Collects what annotations lack that OpenMMLab needs: an id of their own, area and iscrowd. An
    area of 0 is one, unless all are 0."""

    def __init__(self, annotations: Sequence[dict]) -> None:
        areas: list[Any] = [annotation.get('area') for annotation in annotations]
        self.has_areas = any(is_number(area) and area > 0 for area in areas)
        self._ids: set[int] = set()
        self._first: dict[str, str] = {}  # the place of the first one, by what is lacking
        self._counts: Counter = Counter()

    def note(self, annotation: dict, place: str) -> bool:
        """Note what an annotation lacks; returns whether it is complete."""
        is_own = is_key(annotation, 'id') and annotation['id'] not in self._ids
        if is_own:
            self._ids.add(annotation['id'])
        has = {
            'an id of their own': is_own,
            'an area': self.has_areas and is_number(annotation.get('area')),
            'an iscrowd of 0 or 1': annotation.get('iscrowd') in (0, 1),
        }
        for field in [field for field, is_there in has.items() if not is_there]:
            self._first.setdefault(field, place)
            self._counts[field] += 1
        return all(has.values())

    def report(self, found: Defects) -> None:
        """Report what is lacking, with the first annotation: there can be millions."""
        for field, place in self._first.items():
            others = self._counts[field] - 1
            more = f' and {others} more' if others else ''
            found.add(defects.INCOMPLETE, f'{place}{more}', field)


def images_in_records(
    records: Sequence[dict],
    split: Split,
    found: Defects,
    file_of: Callable[[str], Optional[str]],
) -> dict[Any, DataImage]:
    """The images of a COCO file by their ids, without objects; reports those that are unusable."""
    images: dict[Any, DataImage] = {}
    key_kind = str if isinstance(records[0].get('id'), str) else int
    for index, record in enumerate(records):
        name = name_in_record(record)
        sides: list[Any] = [record.get('height'), record.get('width')]
        reason = ''
        if not name:
            reason = 'no file_name'
        elif not is_key(record, 'id', key_kind):
            reason = 'no id of the type of the others'
        elif not all(is_number(side) and side >= 1 for side in sides):
            reason = 'no width and height'
        elif record['id'] in images:
            reason = 'the id of another image'
        if reason:
            found.add(defects.BAD_IMAGE, place_in(split, name or f'image {index}'), reason)
            continue
        file = file_of(name)
        if file is not None:
            images[record['id']] = DataImage(file, (sides[0], sides[1]), [])
    return images


def name_in_record(image: dict) -> str:
    """The name of an image's file; LVIS has its URL instead. Empty if it has none."""
    name = image.get('file_name')
    url = image.get('coco_url')
    if 'file_name' not in image and isinstance(url, str):
        return '/'.join(url.split('/')[-2:])
    return name if isinstance(name, str) else ''


def why_unusable(
    annotation: dict, image: Optional[DataImage], has_category: bool, images: Collection
) -> str:
    """What makes an annotation unusable; empty: nothing."""
    if image is None:
        if other_type(annotation.get('image_id')) in images:
            return 'its image_id is a string where the ids of images are numbers, or the reverse'
        return 'its image is not listed'
    if not has_category:
        return 'its category is not listed'
    if not has_box(annotation):
        return 'no bbox of 4 finite numbers'
    return 'a bbox with a negative width or height' if min(annotation['bbox'][2:]) < 0 else ''


def other_type(key: Any) -> Any:
    """A number as a string, or a string as a number; None if that is not possible."""
    if isinstance(key, str):
        return int(key) if key.isdecimal() and len(key) < 20 else None
    return str(key) if isinstance(key, int) else None


def object_in_record(annotation: dict, label: int, at: str, has_bad_mask: bool) -> ImageObject:
    """The object in an annotation; without an area that of its box counts, and a crowd is what
    mmdet takes for one."""
    left, top, width, height = annotation['bbox']
    area: Any = annotation.get('area')
    crowd = annotation.get('iscrowd')
    mask = None if has_bad_mask else annotation.get('segmentation')
    return ImageObject(
        label,
        (left, top, width, height),
        area if is_number(area) else width * height,
        at,
        is_ignored=bool(crowd) if crowd in (0, 1) else is_number(crowd),
        polygons=[part for part in mask if len(part) >= 6] if isinstance(mask, list) else (),
        runs=mask if mask and isinstance(mask, dict) else None,
        has_bad_mask=has_bad_mask,
    )


def why_no_mask(mask: Any, size: Size) -> str:
    """Why pycocotools does not read a mask; empty: it does, or there is none."""
    if not isinstance(mask, (list, dict)) or not mask:
        return ''
    if isinstance(mask, list):
        points = [p for p in mask if isinstance(p, list) and len(p) % 2 == 0]
        if len(points) < len(mask) or not all(is_number(n) for p in points for n in p):
            return 'a polygon that is no list of pairs of finite numbers'
        # mmdet leaves short polygons out, and pycocotools if they are not the first.
        return 'a polygon of less than 3 points' if len(mask[0]) < 6 else ''
    if mask.get('size') != list(size):
        return 'another size than its image'
    counts = lengths_of_runs(mask)
    are_counts = isinstance(counts, list) and all(isinstance(n, int) and n >= 0 for n in counts)
    return '' if are_counts and sum(counts) == math.prod(size) else 'damaged run lengths'


def lengths_of_runs(mask: dict) -> Any:
    """The run lengths of a mask, of zeros first."""
    counts = mask.get('counts')
    return counts_of(counts) if isinstance(counts, str) else counts


def counts_of(text: str) -> list[int]:
    """The run lengths, of zeros first, in COCO's compressed encoding."""
    counts: list[int] = []
    value = 0
    shift = 0
    for character in text.encode():
        code = character - 48
        value |= (code & 31) << shift
        shift += 5
        is_last_group = not code & 32
        if is_last_group:
            value -= (code & 16) << shift - 4
            if len(counts) > 2:
                value += counts[-2]
            counts.append(value)
            value = 0
            shift = 0
    return counts


def check_boxes_of_file(split: Split) -> None:
    """Raise a UserError if all boxes of a file are x1 y1 x2 y2, or if no box of many has a number
    above 1."""
    where = f'{split.name or split.folder}: each bbox must be x, y, width and height'
    found = [(item.box, image.size) for image in split.images for item in image.objects]
    boxes = np.array([box for box, _ in found], float).reshape(-1, 2, 2)
    corners = np.stack([boxes[:, 0], boxes.sum(1)], 1)
    check_that_boxes_are_no_corners(boxes, corners, [size for _, size in found], where)
    if len(boxes) >= ENOUGH and boxes.max() <= 1:
        raise UserError(
            f'{where} in pixels, but no number is above 1; multiply them by the width and height '
            'of the image'
        )


# Files


def read_coco(path: Path) -> dict[str, Any]:
    """The JSON object in a COCO file, whose lists hold objects; without `annotations`, as in COCO's
    lists of test images, there are none.

    Raises:
        UserError: says what is wrong with the file as a whole.
    """
    content = coco_of_json(read_json(path), path)
    check_categories(content, path)
    return content


def read_json(path: Path) -> Any:
    try:
        text = path.read_bytes()
        if text.startswith(BOM_UTF8):
            raise UserError(
                f'{path} begins with a byte order mark, which OpenMMLab does not read; write it as '
                'UTF-8 without one'
            )
        content = json.loads(text)
        if SURROGATE.search(text):  # Python takes a half of a character for one
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from error
    except (ValueError, RecursionError) as error:
        state = 'is empty' if not path.stat().st_size else f'is not complete JSON: {error}'
        raise UserError(f'{path} {state}'[:300]) from error


def coco_of_json(content: Any, path: Path) -> dict[str, Any]:
    """The content of a COCO file at `path`, after a check of its lists."""
    if not isinstance(content, dict):
        raise UserError(f'{path} must hold a JSON object, got a {type(content).__name__}')
    content.setdefault('annotations', [])
    for name in ('images', 'annotations', 'categories'):
        records = content.get(name)
        if not isinstance(records, list) or not all(isinstance(item, dict) for item in records):
            raise UserError(f'{path} must have a list {name!r} of objects')
        if not records and name != 'annotations':
            raise UserError(f'{path} has no {name}')
    return content


def check_categories(content: dict[str, Any], path: Path) -> None:
    """Check that each category has an id and a name of its own."""
    ids, names = set(), set()
    for category in content['categories']:
        number = category.get('id')
        name = category.get('name')
        is_valid = is_key(category, 'id') and isinstance(name, str)
        if not is_valid or number in ids or name in names:
            raise UserError(
                f'{path}: each category must have a number as id and a name, and both only once, '
                f'got {category}'[:300]
            )
        ids.add(number)
        names.add(name)


# Records


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_key(record: dict, field: str, kind: type = int) -> bool:
    """Whether a record has an id, which pycocotools sorts and puts into arrays. Whole numbers may
    be floats, as pandas writes them."""
    value: Any = record.get(field)
    if kind is str or isinstance(value, bool):
        return kind is str and isinstance(value, str)
    return is_number(value) and value % 1 == 0 and abs(value) < 2**63


def has_box(annotation: dict) -> bool:
    box = annotation.get('bbox')
    return isinstance(box, list) and len(box) == 4 and all(map(is_number, box))


LAYOUT = Layout(
    what='a JSON file with images, annotations and categories for each split',
    holds='objects',
    recognize=recognize_coco,
    read=read_coco_data,
    example={
        'train': 'FOLDER',
        'val': 'FOLDER',
        'annotations': {'train': 'FILE.json', 'val': 'FILE.json'},
    },
)
