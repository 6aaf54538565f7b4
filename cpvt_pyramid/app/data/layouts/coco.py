"""COCO: a JSON file with images, categories and objects for each split.

pycocotools reads such a file only if it is correct: it neither checks nor reports. mmdet reads it
with pycocotools. So records are read as JSON here, and checked in `check.py`.
"""

import json
import math
import posixpath
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from ...tooling.command import UserError
from ...tooling.report import amount
from .. import defects
from ..data import (
    ENOUGH,
    ImageObject,
    ObjectImage,
    Objects,
    Split,
    are_corners,
    place_in,
)
from ..defects import Defects, Kind
from ..description import Description, SplitPart
from ..files import Folder, join
from ..folders import SHOWN, Places, image_places, place_of_split
from ..images import Size
from ..layout import Layout, Recognized, Undecided
from ..listing import Listing, by_folder
from ..lists import without_prefix
from ..splits import divided_by_name, split_of

SURROGATE = re.compile(rb'\\u[dD][89a-fA-F]')  # a character in two parts, as JSON writes it
ID_FIELDS = {
    'images': ['id'],
    'categories': ['id'],
    'annotations': ['id', 'image_id', 'category_id'],
}
LIST = re.compile(rb'"(images|annotations)"\s*:\s*\[')
FILE_NAME = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')
COCO_URL = re.compile(rb'"coco_url"\s*:\s*("(?:[^"\\]|\\.)*")')
MOST_FILES = 100  # JSON files in a folder
# COCO's files without objects that detectors are trained on, next to instances_train2017.json
OTHER_FILES = (
    'person_keypoints_',
    'stuff_',
    'panoptic_',
    'captions_',
    'image_info_test-dev',
    'image_info_unlabeled',
)


class CocoFile(NamedTuple):
    """What the text of a COCO file shows without being parsed."""

    path: str
    images: list[str]  # names
    has_boxes: bool
    has_annotations: bool


def recognize_coco(listing: Listing) -> Optional[Recognized]:
    """A file for each split, whose images are below one folder."""
    files = [file for file in coco_files(listing) if file.has_boxes or not file.has_annotations]
    if not files:
        return None
    notes: list[str] = []
    if any(posixpath.basename(file.path).startswith('instances_') for file in files):
        others = [f for f in files if posixpath.basename(f.path).startswith(OTHER_FILES)]
        notes += [f'{f.path} is left out: COCO has the objects in other files' for f in others]
        files = [file for file in files if file not in others]
    found = divided_by_name([file.path for file in files])
    notes += [f'{files[i].path} is left out: its name says no split' for i in found.unnamed]
    settings: dict[str, Any] = {}
    annotations: dict[str, str] = {}
    prefixes = set()
    for split, indices in found.by_split.items():
        if not indices:
            continue
        file = file_of_split(split, [files[i] for i in indices])
        places = image_places(listing, file.images) if file.images else None
        if places and is_list_of_others(file, split, places):
            notes.append(f'{file.path} is left out: its images are those of other splits')
            continue
        annotations[split] = file.path
        settings[split] = '.'
        if places:
            settings[split] = place_of_split(places, split, posixpath.dirname(file.path) or '.')
            prefixes.add(places.prefix)
        elif file.images:
            first = file.images[0]
            notes.append(f'no image that {file.path} names is in the folder, such as {first}')
    settings['annotations'] = annotations
    if len(prefixes) > 1:
        shown = ', '.join(map(repr, sorted(prefixes)))
        raise Undecided(f'the names of images begin with different folders, {shown}', settings)
    if prefixes - {''}:
        settings['strip_prefix'] = prefixes.pop()
    names = without_supercategory(listing.root, annotations.values())
    if names:
        settings['names'] = names
    return Recognized(settings, notes)


def is_list_of_others(file: CocoFile, split: str, places: Places) -> bool:
    """Whether a file of test images without annotations names those of other splits alone: COCO has
    such a list, and the images may not be there."""
    if split != 'test' or file.has_annotations:
        return False
    return all(split_of(folder) not in (None, split) for folder in places.counts)


def coco_files(listing: Listing) -> list[CocoFile]:
    """The JSON files that have lists of images and annotations, or one of these, if they are
    torn. COCO's lists of test images have categories instead of annotations. Folders with a JSON
    file for each image are not searched."""
    found = []
    folders = by_folder(listing.ending('.json')).values()
    few = [names for names in folders if len(names) <= MOST_FILES]
    for name in [name for names in few for name in names]:
        text = (listing.root / name).read_bytes()
        lists = {*LIST.findall(text)}
        is_torn = not text.rstrip().endswith(b'}')
        is_object = not text.lstrip().startswith(b'[')  # CreateML, for example
        is_list_of_images = b'images' in lists and b'"categories"' in text
        if is_object and (len(lists) == 2 or lists and is_torn or is_list_of_images):
            is_empty = re.search(rb'"annotations"\s*:\s*\[\s*\]', text) is not None
            has_annotations = b'annotations' in lists and not is_empty
            is_panoptic = b'"segments_info"' in text and b'instances' not in name.encode()
            has_boxes = b'"bbox"' in text and not is_panoptic
            found.append(CocoFile(name, names_of_images(text), has_boxes, has_annotations))
    return found


def names_of_images(text: bytes) -> list[str]:
    names = []
    for quoted in FILE_NAME.findall(text) or COCO_URL.findall(text):
        try:
            names.append(json.loads(quoted))
        except ValueError:  # no UTF-8: the reader says so
            continue
    if not FILE_NAME.search(text):  # LVIS
        names = ['/'.join(name.split('/')[-2:]) for name in names]
    return names


def file_of_split(split: str, files: Sequence[CocoFile]) -> CocoFile:
    """The COCO file of a split: of several, that with the instances in COCO's own names, or else
    the only one with boxes."""
    instances = [f for f in files if 'instances' in posixpath.basename(f.path).lower()]
    for chosen in (files, instances, [f for f in files if f.has_boxes]):
        if len(chosen) == 1:
            return chosen[0]
    shown = ', '.join(file.path for file in files[:SHOWN])
    raise Undecided(f'several files can have the {split} data: {shown}')


def without_supercategory(root: Path, paths: Iterable[str]) -> Optional[list[str]]:
    """The names of categories without one that has no objects and is the super-category of the
    others, as Roboflow writes them; None if there is no such category."""
    names: dict[str, None] = {}
    left_out = set()
    for path in paths:
        text = (root / path).read_text(encoding='utf-8-sig', errors='replace')
        start = re.search(r'"categories"\s*:\s*', text)
        try:
            categories, _ = json.JSONDecoder().raw_decode(text, start.end() if start else 0)
            parents = {
                c.get('supercategory') for c in categories if c['supercategory'] != c['name']
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        for category in categories:
            used = re.search(rf'"category_id"\s*:\s*{re.escape(str(category.get("id")))}\b', text)
            if category['name'] in parents and not used:
                left_out.add(category['name'])
            else:
                names[category['name']] = None
    kept = [name for name in names if name not in left_out]
    return kept if left_out - {*names} and kept else None


# Reading


def read_coco_data(description: Description, found: Defects) -> Objects:
    """The objects of the COCO files that a description names."""
    contents = {}
    splits = {}
    notes = []
    for split, part in parts_of_files(description).items():
        name = str(part.annotations)
        path = description.root / name
        content = read_coco(path, with_mark=True)
        changes = complete_records(content)
        if has_byte_order_mark(path):
            changes.append('no byte order mark')
        if name_images(content, description, part.images, name, found):
            changes.append('names as those of the files')
        folder = description.root / part.images
        if changes:
            notes.append(f'{name} is copied, with {", ".join(changes)}')
        contents[split] = content
        splits[split] = Split([], folder, None if changes else path, name)
    classes = classes_of_files(description, contents, splits)
    parsed = {
        key: parse_coco(contents[key], split, classes, found) for key, split in splits.items()
    }
    return Objects(description, parsed, classes, notes)


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
        raise UserError(f'{description.source}: annotations must name a COCO file for each split')
    return found


def name_images(
    content: dict[str, Any], description: Description, images: str, file: str, found: Defects
) -> bool:
    """Set the names of images in a content to those of files in a folder, without the prefix of
    another machine; returns whether a name changes. A missing image keeps its name.

    Args:
        content: of the COCO file.
        description: what declares it.
        images: the folder.
        file: the name of the COCO file, for messages.
        found: gets names between which the files do not decide, and files of several names.
    """
    folder = Folder(description.root)
    given: dict[str, str] = {}  # the name in the COCO file, by that of the image
    is_changed = False
    for image in content['images']:
        name = image.get('file_name')
        if not isinstance(name, str) or not name:
            continue
        place = folder.find(join(images, without_prefix(name, description.strip_prefix)))
        if place is None:
            continue
        place = place if images == '.' else place.removeprefix(f'{images}/')
        if given.setdefault(place, name) != name:
            found.add(defects.NAMED_TWICE, f'{place} ({given[place]} and {name} in {file})')
        if place != name:
            image['file_name'] = place
            is_changed = True
    folder.report(found)
    return is_changed


def classes_of_files(
    description: Description, contents: dict[str, dict], splits: dict[str, Split]
) -> list[str]:
    """The classes: as declared, or all categories in the order of the files."""
    names: dict[str, None] = {}
    for key, content in contents.items():
        check_categories(content, description.root / splits[key].name)
        names.update(dict.fromkeys(c['name'] for c in content['categories']))
    if description.names is None:
        return list(names)
    for name in description.names.values():
        if name not in names:
            raise UserError(
                f'{description.source}: names has {name!r}, but no COCO file has this category; '
                f'they have {", ".join(map(repr, list(names)[:8]))}'
            )
    return list(description.names.values())


def parse_coco(
    content: dict[str, Any], split: Split, classes: Sequence[str], found: Defects
) -> Split:
    """A split with the images and objects of a COCO file, whose lists and categories are checked.

    It keeps its path if OpenMMLab reads the same from that: if no record is left out or completed,
    and the file has the classes in their order, which is that of mmdet's labels.

    Args:
        content: of the file.
        split: where it belongs, without images.
        classes: that count.
        found: gets what is wrong with single records.
    """
    names = {category['id']: category['name'] for category in content['categories']}
    labels = {key: classes.index(name) for key, name in names.items() if name in classes}
    is_same = [name for name in names.values() if name in classes] == list(classes)
    images = images_in_records(content['images'], split, found)
    is_same = is_same and len(images) == len(content['images'])
    seen: set[int] = set()  # ids of annotations
    others: Counter = Counter()
    for index, record in enumerate(content['annotations']):
        category = record.get('category_id') if is_key(record, 'category_id') else None
        if category in names and category not in labels:
            others[names[category]] += 1
            continue
        key = record.get('image_id')
        image = images.get(key) if isinstance(key, (int, str)) else None
        at = f'annotation {record.get("id", index)}'
        problem = annotation_problem(record, image is not None, labels, seen, images)
        if problem or image is None:
            place = f'{at} of {image.name}' if image else at
            found.add(problem or defects.UNKNOWN_IMAGE, place_in(split, place))
            is_same = False
            continue
        seen.add(record['id'])
        flaws = flaws_of(record, image.size)
        for kind in flaws:
            found.add(kind, place_in(split, f'{at} of {image.name}'))
        if any(kind.left_out == defects.OBJECT and found.is_error(kind) for kind in flaws):
            is_same = False
            continue
        is_same = is_same and defects.NO_AREA not in flaws and defects.NO_CROWD not in flaws
        image.objects.append(object_in_record(record, labels[category], at, flaws))
    for name, count in others.items():
        found.add(defects.OTHER_CLASS, f'{name} ({amount(count, "object")} in {split.name})')
    parsed = split._replace(images=list(images.values()), path=split.path if is_same else None)
    check_that_boxes_are_no_corners(parsed)
    check_that_boxes_are_pixels(parsed)
    return parsed


def images_in_records(
    records: Sequence[dict], split: Split, found: Defects
) -> dict[Any, ObjectImage]:
    """The images of a COCO file by their ids, without objects; reports those that are unusable."""
    images: dict[Any, ObjectImage] = {}
    key_kind = str if isinstance(records[0].get('id'), str) else int
    for index, record in enumerate(records):
        problem = image_record_problem(record, key_kind, images)
        if problem is None:
            size = record['height'], record['width']
            images[record['id']] = ObjectImage(record['file_name'], size, [])
            continue
        name: Any = record.get('file_name')
        is_named = isinstance(name, str) and name
        found.add(problem, place_in(split, name if is_named else f'image {index}'))
    return images


def image_record_problem(image: dict, key_kind: type, known: Collection) -> Optional[Kind]:
    if not isinstance(image.get('file_name'), str) or not image['file_name']:
        return defects.NO_FILE_NAME
    if not is_key(image, 'id', key_kind):
        return defects.NO_IMAGE_ID
    sides: list[Any] = [image.get('width'), image.get('height')]
    if not all(is_number(side) and side >= 1 for side in sides):
        return defects.NO_SIZE
    return defects.SAME_IMAGE_ID if image['id'] in known else None


def annotation_problem(
    annotation: dict, has_image: bool, categories: Collection, seen: set, images: dict
) -> Optional[Kind]:
    """What makes an annotation unusable, or None. `has_image` tells whether its image is listed,
    and `seen` are the ids of annotations before it."""
    if not is_key(annotation, 'id'):
        return defects.NO_ID
    if not has_image:
        is_other_type = other_type(annotation.get('image_id')) in images
        return defects.ID_OF_OTHER_TYPE if is_other_type else defects.UNKNOWN_IMAGE
    if not is_key(annotation, 'category_id') or annotation['category_id'] not in categories:
        return defects.UNKNOWN_CATEGORY
    if not has_box(annotation):
        return defects.NO_BOX
    return defects.SAME_ID if annotation['id'] in seen else None


def other_type(key: Any) -> Any:
    """A number as a string, or a string as a number; None if that is not possible."""
    if isinstance(key, str):
        return int(key) if key.isdecimal() and len(key) < 20 else None
    return str(key) if isinstance(key, int) else None


def flaws_of(annotation: dict, size: Size) -> list[Kind]:
    """What is odd about an annotation in an image of a size; what it lacks is completed."""
    found = []
    if not is_number(annotation.get('area')):
        found.append(defects.NO_AREA)
    if annotation.get('iscrowd') not in (0, 1):
        found.append(defects.NO_CROWD)
    if annotation['id'] == 0:
        found.append(defects.ID_0)
    if annotation.get('ignore'):
        found.append(defects.IGNORED_OBJECT)
    mask = mask_problem(annotation.get('segmentation'), size)
    if mask not in (None, defects.NO_MASK):
        found.append(mask)
    return found


BAD_MASKS = {
    defects.BAD_POLYGON,
    defects.SHORT_POLYGON,
    defects.MASK_SIZE,
    defects.BAD_RUNS,
}


def object_in_record(annotation: dict, label: int, at: str, flaws: Collection[Kind]) -> ImageObject:
    """The object in an annotation; without an area that of its box counts, and a crowd is what
    mmdet takes for one."""
    left, top, width, height = annotation['bbox']
    area: Any = annotation.get('area')
    crowd = annotation.get('iscrowd')
    mask = annotation.get('segmentation')
    has_bad_mask = not BAD_MASKS.isdisjoint(flaws)
    polygons: Sequence[list[float]] = ()
    if isinstance(mask, list) and not has_bad_mask:
        polygons = [part for part in mask if len(part) >= 6]
    return ImageObject(
        label,
        (left, top, width, height),
        area if is_number(area) else width * height,
        at,
        is_ignored=bool(crowd) if crowd in (0, 1) else is_number(crowd),
        polygons=polygons,
        runs=mask if mask and isinstance(mask, dict) and not has_bad_mask else None,
        has_bad_mask=has_bad_mask,
    )


def mask_problem(mask: Any, size: Size) -> Optional[Kind]:
    """What is wrong with a mask as pycocotools reads it, or None."""
    if not isinstance(mask, (list, dict)) or not mask:
        return defects.NO_MASK
    if isinstance(mask, list):
        points = [p for p in mask if isinstance(p, list) and len(p) % 2 == 0]
        if len(points) < len(mask) or not all(is_number(n) for p in points for n in p):
            return defects.BAD_POLYGON
        # mmdet leaves short polygons out, and pycocotools if they are not the first.
        if len(mask[0]) < 6:
            return defects.SHORT_POLYGON
        return defects.SHORT_PART if any(len(polygon) < 6 for polygon in mask) else None
    if mask.get('size') != list(size):
        return defects.MASK_SIZE
    counts = lengths_of_runs(mask)
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
        return defects.BAD_RUNS
    return None if sum(counts) == math.prod(mask['size']) else defects.BAD_RUNS


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


def check_that_boxes_are_no_corners(split: Split) -> None:
    """Raise a UserError if all boxes of a file fit their images as x1 y1 x2 y2, and many do not as
    x y width height."""
    found = [(item.box, image.size[::-1]) for image in split.images for item in image.objects]
    sides = np.array([side for _, side in found], float).reshape(-1, 2)
    boxes = np.array([box for box, _ in found], float).reshape(-1, 2, 2)
    beyond = (boxes.sum(1) > 1.05 * sides).any(1).sum()
    if beyond >= ENOUGH and are_corners(boxes, sides):
        raise UserError(
            f'{split.name or split.folder}: each bbox must be x, y, width and height, but these '
            f'are x1, y1, x2, y2: {beyond} of {len(boxes)} would reach beyond their image'
        )


def check_that_boxes_are_pixels(split: Split) -> None:
    """Raise a UserError if no box of many has a number above 1."""
    boxes = [item.box for item in split.objects]
    if len(boxes) >= ENOUGH and max(map(max, boxes)) <= 1:
        raise UserError(
            f'{split.name or split.folder}: each bbox must be x, y, width and height in pixels, '
            'but no number is above 1; multiply them by the width and height of the image'
        )


def complete_records(content: dict[str, Any]) -> list[str]:
    """Add what some tools leave out of a COCO file, but mm needs; returns what was added.

    LVIS has URLs for images, and no crowds. Many files count objects from 0, which pycocotools
    takes for no object: what is found of it then counts as wrong.
    """
    changes = []
    unnamed = [image for image in content['images'] if 'file_name' not in image]
    with_url = [image for image in unnamed if isinstance(image.get('coco_url'), str)]
    for image in with_url:
        image['file_name'] = '/'.join(image['coco_url'].split('/')[-2:])
    if with_url:
        changes.append('file names from coco_url')
    annotations = content['annotations']
    fields = {field for annotation in annotations for field in annotation}
    if not annotations:
        return changes
    if 'iscrowd' not in fields:
        for annotation in annotations:
            annotation['iscrowd'] = 0
        changes.append('iscrowd 0')
    areas = [annotation.get('area') for annotation in annotations]
    if not any(is_number(area) and area > 0 for area in areas):
        for annotation in annotations:
            if has_box(annotation):
                annotation['area'] = annotation['bbox'][2] * annotation['bbox'][3]
        changes.append('the areas of boxes')
    if 'id' not in fields:
        for number, annotation in enumerate(annotations, 1):
            annotation['id'] = number
        changes.append('ids for objects')
    elif any(is_key(annotation, 'id') and annotation['id'] == 0 for annotation in annotations):
        for annotation in annotations:
            if is_key(annotation, 'id'):
                annotation['id'] += 1
        changes.append('ids of objects from 1')
    return changes


# Files


def read_coco(path: Path, with_mark: bool = False) -> dict[str, Any]:
    """The JSON object in a COCO file, whose lists hold objects; without `annotations`, as in COCO's
    lists of test images, there are none.

    Raises:
        UserError: says what is wrong with the file as a whole, which includes a byte order mark
            unless `with_mark`.
    """
    content = coco_of_json(read_json(path), path)
    if not with_mark and has_byte_order_mark(path):
        raise UserError(
            f'{path} begins with a byte order mark, which OpenMMLab does not read; write it as '
            'UTF-8 without one'
        )
    return content


def has_byte_order_mark(path: Path) -> bool:
    """Whether a text begins as some programs on Windows write UTF-8."""
    with path.open('rb') as file:
        return file.read(len(BOM_UTF8)) == BOM_UTF8


def read_json(path: Path) -> Any:
    try:
        text = path.read_bytes()
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
        for record in records:
            for field in ID_FIELDS[name]:
                value = record.get(field)
                if isinstance(value, float) and value.is_integer():  # pandas writes 1.0
                    record[field] = int(value)
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
    """Whether a record has an id, which pycocotools sorts and puts into arrays."""
    value = record.get(field)
    in_range = not isinstance(value, int) or abs(value) < 2**63
    return isinstance(value, kind) and not isinstance(value, bool) and in_range


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
