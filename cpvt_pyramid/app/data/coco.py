"""COCO: a JSON file with images, categories and objects for each split.

The boxes and polygons of all formats are read as the content of such files.
"""

import io
import json
import math
import re
from codecs import BOM_UTF8
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from itertools import compress
from numbers import Real
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional

import numpy as np
from pycocotools.coco import COCO

from ..tooling.command import UserError
from .defects import Checked, Defects
from .folder import SPLITS, Files, words
from .images import ALL_IMAGES, HEADERS, Effort, Finding, check_each, inspect

COUNTED_IN_AP = 100  # detections of an image and class, the best
ENOUGH = 8  # boxes beyond their images that tell a whole file's boxes to be corners
BEYOND = 1  # pixels by which a box may reach beyond its image: rounding
SURROGATE = re.compile(rb'\\u[dD][89a-fA-F]')  # a character in two parts, as JSON writes it
LIST = re.compile(rb'"(images|annotations)"\s*:\s*\[')
ID_FIELDS = {
    'images': ['id'],
    'categories': ['id'],
    'annotations': ['id', 'image_id', 'category_id'],
}
SHIFTED, FURTHER = 3, 0.05  # pixels and share of a box by which it may differ from its polygons


NO_MASK = 'objects without a mask'


class Split(NamedTuple):
    """The images and objects for training, validation or testing."""

    content: dict[str, Any]  # as in a COCO file
    folder: Path  # that the images' names are relative to
    path: Optional[Path] = None  # the COCO file, if it has this content


class Objects(NamedTuple):
    """What was found in a folder with boxes or polygons."""

    layout: str  # for people
    splits: dict[str, Split]  # by train, val and test
    classes: list[str]
    notes: list[str]  # what a person should know, one line each
    by_name: dict[str, str] = {}  # the splits of the files and folders whose names say it


class Outline(NamedTuple):
    """An object as YOLO and VOC files have it."""

    label: int
    points: np.ndarray  # (N, 2) corners of the box or polygon, in pixels
    at: str  # its place, for messages
    is_polygon: bool = False
    is_ignored: bool = False


def coco_files(files: Files) -> list[str]:
    """The JSON files that have, as their text shows, lists of images and annotations; or one of
    these, if they are torn."""
    found = []
    for name in files.with_suffix('.json'):
        text = (files.root / name).read_bytes()
        lists = {*LIST.findall(text)}
        is_torn = not text.rstrip().endswith(b'}')
        is_object = not text.lstrip().startswith(b'[')  # CreateML, for example
        if is_object and (len(lists) == 2 or lists and is_torn):
            found.append(name)
    return found


def read_coco_files(files: Files, defects: Defects, masks: bool = False) -> Optional[Objects]:
    """The objects of a folder with such files, None if it has none; with `masks` every object must
    have one."""
    paths = coco_files(files)
    if not paths:
        return None
    by_split = defaultdict(list)
    for path in paths:
        by_split[files.split_of(path)].append(path)
    notes = []
    if None in by_split and 'train' in by_split:
        notes += [f'{path} is not used, its name says no split' for path in by_split.pop(None)]
    elif None in by_split:
        by_split['train'] = by_split.pop(None)
    splits = {}
    chosen = []
    for split in SPLITS:
        if split not in by_split:
            continue
        name, content = the_instances(files.root, by_split[split])
        if split == 'test' and not content['annotations']:
            notes.append(f'{name} is not used, it has no annotations')
            continue
        chosen.append(name)
        changes = complete_records(content)
        if has_byte_order_mark(files.root / name):
            changes.append('no byte order mark')
        splits[split] = coco_split(files, name, content, defects, masks)
        if changes:
            notes.append(f'{name} is copied, with {", ".join(changes)}')
            splits[split] = splits[split]._replace(path=None)
    classes, splits = with_same_classes(splits)
    return Objects('COCO', splits, classes, notes, files.splits_by_name(chosen))


def the_instances(root: Path, paths: list[str]) -> tuple[str, dict[str, Any]]:
    """The file with boxes and masks among those of a split, and its content."""
    named = [path for path in paths if 'instances' in words(PurePosixPath(path).name)]
    contents = {path: read_json(root / path) for path in (named if len(named) == 1 else paths)}
    found = [path for path in contents if len(contents) == 1 or may_have_boxes(contents[path])]
    if len(found) != 1:
        raise UserError(
            f'there must be one COCO file for each of train, val and test, and its name or folder '
            f'must say which, or --assign FILE=SPLIT; got {", ".join(paths[:3])}'
        )
    path = found[0]
    return path, coco_of_json(contents[path], root / path)


def may_have_boxes(content: Any) -> bool:
    """Whether the annotations of a JSON file have boxes, as those of captions and panoptic segments
    do not."""
    annotations = content.get('annotations') if isinstance(content, dict) else None
    if not isinstance(annotations, list):
        return False
    records = [annotation for annotation in annotations if isinstance(annotation, dict)]
    return not records or any('bbox' in record for record in records)


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


def coco_split(
    files: Files, name: str, content: dict[str, Any], defects: Defects, masks: bool
) -> Split:
    """The content of a COCO file, changed only if its images are elsewhere, or errors."""
    path = files.root / name
    records = content['images']
    given = [image.get('file_name') for image in records]
    named = [str(n) for n in given if isinstance(n, str) and n]
    places = dict(zip(named, files.find_images(named, name)))
    prefixes = {folder_above(place, n) for n, place in places.items() if place}
    in_place = len(prefixes) == 1 and None not in prefixes
    folder = files.root
    if in_place:
        folder /= prefixes.pop()
    else:
        images = []
        for image, file_name in zip(records, given):
            place = places.get(file_name) if isinstance(file_name, str) else None
            images.append({**image, 'file_name': place} if place else image)
        content = {**content, 'images': images}
    checked = check_coco(path, folder, HEADERS, content, masks)
    for problem in checked.problems:
        in_place &= not problem.is_error
        for item in problem.items:
            defects.add(problem.kind, f'{item} ({name})', problem.is_error)
    if not checked.good or not checked.good['images']:
        raise UserError(f'{path} has no images without errors')
    return Split(checked.good, folder, path if in_place else None)


def folder_above(path: str, name: str) -> Optional[str]:
    """The folder that `name` is relative to, if it is a part of a path."""
    return path.removesuffix(name) if f'/{path}'.endswith(f'/{name}') else None


def with_same_classes(splits: dict[str, Split]) -> tuple[list[str], dict[str, Split]]:
    """The classes of all splits, and the splits with the same categories in the same order.

    A category that has no objects and is the super-category of the others is none (Roboflow).
    """
    used = set()
    parents = set()
    for split in splits.values():
        used.update(annotation['category_id'] for annotation in split.content['annotations'])
        for category in split.content['categories']:
            parent = category.get('supercategory')
            if isinstance(parent, str) and parent != category['name']:
                parents.add(parent)
    names = {}  # by split and id
    for key, split in splits.items():
        names[key] = {
            category['id']: category['name']
            for category in split.content['categories']
            if category['name'] not in parents or category['id'] in used
        }
    classes = list(dict.fromkeys(name for listed in names.values() for name in listed.values()))
    for key, split in splits.items():
        if list(names[key].values()) == classes:
            continue
        annotations = []
        for annotation in split.content['annotations']:
            label = classes.index(names[key][annotation['category_id']])
            annotations.append({**annotation, 'category_id': label + 1})
        content = {'annotations': annotations, 'categories': categories_of(classes)}
        splits[key] = Split({**split.content, **content}, split.folder)
    return classes, splits


def warn_about_classes(splits: dict[str, Split], defects: Defects) -> None:
    """Warn about classes that have no object in the training data, and about names that differ only
    in case, spaces, hyphens and underscores."""
    counts = {split: objects_by_class(content) for split, (content, _, _) in splits.items()}
    alike = defaultdict(list)
    for name in dict.fromkeys(name for found in counts.values() for name in found):
        alike[re.sub(r'[\s_-]+', ' ', name.strip().casefold())].append(name)
    for names in alike.values():
        if len(names) > 1:
            defects.warn('classes with almost the same name', ' and '.join(map(repr, names)))
    trained = counts.pop('train', None)
    if not trained:
        return
    for split, found in counts.items():
        for name, count in found.items():
            if not trained[name]:
                item = f'{name} ({count} in the {split} data)'
                defects.warn('classes without objects in the training data', item)


def objects_by_class(content: dict[str, Any]) -> Counter:
    """The number of objects of each class that has any."""
    names = {category['id']: category['name'] for category in content['categories']}
    return Counter(names[annotation['category_id']] for annotation in content['annotations'])


def coco_content(
    objects: dict[str, list[Outline]],
    sizes: dict[str, tuple[int, int]],
    classes: Sequence[str],
    defects: Defects,
    masks: bool,
) -> dict[str, Any]:
    """The content of a COCO file, from the objects and the (height, width) of each image. What
    reaches beyond an image is cut off; with `masks` every object must have a polygon."""
    images, annotations = [], []
    for name, outlines in objects.items():
        height, width = sizes[name]
        images.append({'id': len(images) + 1, 'file_name': name, 'width': width, 'height': height})
        for outline in outlines:
            if outline.label >= len(classes):
                kind = f'objects of classes beyond the names, 0 to {len(classes) - 1}'
                defects.add(kind, f'class {outline.label} in {outline.at}')
                continue
            if masks and not outline.is_polygon:
                defects.add(NO_MASK, outline.at)
                continue
            points = outline.points.clip(0, (width, height))
            low, high = points.min(0), points.max(0)
            if not (high > low).all():
                outside = (outline.points.max(0) > outline.points.min(0)).all()
                kind = 'boxes outside their image' if outside else 'objects without width or height'
                defects.add(kind, outline.at, is_error=outside)
                continue
            if np.abs(points - outline.points).max() > BEYOND:
                defects.warn('objects that reach beyond their image: cut off', outline.at)
            x, y = points.T
            area = 0.5 * abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) if outline.is_polygon else 0
            annotation = {
                'id': len(annotations) + 1,
                'image_id': len(images),
                'category_id': outline.label + 1,
                'bbox': rounded([*low, *(high - low)]),
                'area': round(float(area or (high - low).prod()), 2),
                'iscrowd': int(outline.is_ignored),
            }
            if outline.is_polygon:
                annotation['segmentation'] = [rounded(points.ravel())]
            annotations.append(annotation)
    return {'images': images, 'annotations': annotations, 'categories': categories_of(classes)}


def content_of_images(content: dict[str, Any], images: list[dict]) -> dict[str, Any]:
    """The part of a COCO file with some of its images; their ids may be of any type."""
    ids = {repr(image.get('id')) for image in images}
    annotations = [a for a in content['annotations'] if repr(a.get('image_id')) in ids]
    return {**content, 'images': images, 'annotations': annotations}


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 2) for value in values]


def categories_of(classes: Sequence[str]) -> list[dict]:
    return [{'id': i, 'name': name} for i, name in enumerate(classes, 1)]


# Checks


def check_coco(
    path: Path,
    folder: Path,
    effort: Effort = ALL_IMAGES,
    content: Optional[dict[str, Any]] = None,
    masks: bool = False,
) -> Checked:
    """Check a COCO file of boxes and masks, and the images in a folder.

    `content` is that of the file, if it was read before; with `masks` every object must have one.
    """
    content = content or read_coco(path)
    usable, defects = usable_content(path, content, masks)

    def findings(image: dict, in_time: bool) -> list[Finding]:
        size, found = inspect(folder / image['file_name'], effort, in_time)
        if size and size != (image['height'], image['width']):
            kind = 'images that have another size than the width and height of their records'
            found.append((kind, True))
        return found

    names = [PurePosixPath(image['file_name']).name for image in usable['images']]
    is_good, decoded = check_each(usable['images'], findings, names, effort, defects)
    images = list(compress(usable['images'], is_good))
    good = content_of_images(usable, images)
    if not content['annotations']:
        defects.add('annotation files without annotations', path.name)
    annotated = {annotation['image_id'] for annotation in good['annotations']}
    for image in images:
        if image['id'] not in annotated:
            defects.warn('images without annotations', image['file_name'])
    return Checked(defects.problems(), len(content['images']), decoded, good)


def usable_content(
    path: Path, content: Optional[dict[str, Any]] = None, masks: bool = False
) -> tuple[dict[str, Any], Defects]:
    """The content of a COCO file without what cannot be used, and what that is; images are not
    looked at. The arguments are those of `check_coco`."""
    content = content or read_coco(path)
    defects = Defects()
    images = {}
    key_kind = str if isinstance(content['images'][0].get('id'), str) else int
    for index, image in enumerate(content['images']):
        problem = image_record_problem(image, key_kind, images)
        if problem:
            name = image.get('file_name')
            defects.add(problem, name if isinstance(name, str) and name else f'image {index}')
        else:
            images[image['id']] = image
    for name, count in Counter(image['file_name'] for image in images.values()).items():
        if count > 1:
            defects.warn('images that are listed twice, each with a part of the objects', name)
    categories = category_ids(content, path)
    annotations = list(good_annotations(content['annotations'], images, categories, masks, defects))
    check_that_boxes_are_no_corners(path, annotations, images)
    check_that_boxes_are_pixels(path, annotations)
    return {**content, 'images': list(images.values()), 'annotations': annotations}, defects


def good_annotations(
    annotations: Sequence[dict], images: dict, categories: set, masks: bool, defects: Defects
) -> Iterator[dict]:
    """The annotations that can be used, with area and iscrowd; `images` and `categories` are the
    records and the ids in the file."""
    seen, boxes = set(), set()
    for index, annotation in enumerate(annotations):
        key = annotation.get('image_id')
        image = images.get(key) if isinstance(key, (int, str)) else None
        place = f' of {image["file_name"]}' if image else ''
        at = f'annotation {annotation.get("id", index)}{place}'
        problem = annotation_problem(annotation, image, categories, seen)
        if image is None and other_type(key) in images:
            is_text = isinstance(key, str)
            kind, other = ('string', 'numbers') if is_text else ('number', 'strings')
            problem = f'annotations whose image_id is a {kind}, but the ids of images are {other}'
        if problem is None:
            mask_problem, is_fatal = problem_of_mask(annotation.get('segmentation'), image)
            if masks and is_fatal:
                problem = mask_problem
            elif mask_problem and annotation.get('segmentation'):
                is_error = '; an error for models of masks' if is_fatal else ''
                defects.warn(f'{mask_problem}{is_error}', at)
        if problem:
            defects.add(problem, at)
            continue
        seen.add(annotation['id'])
        warn_about_box(annotation, image, boxes, at, defects)
        if annotation['id'] == 0:
            defects.warn('objects with the id 0, which evaluations take for no object', at)
        if mask_problem is None and is_box_elsewhere(annotation):
            defects.warn('boxes that are not around their own polygons', at)
        if not is_number(annotation.get('area')):
            defects.add('annotations without area', at)
            width, height = annotation['bbox'][2:]
            annotation = {**annotation, 'area': width * height}
        elif annotation['area'] <= 0:
            defects.warn('objects whose area is 0, which OpenMMLab leaves out', at)
        if annotation.get('ignore'):
            defects.warn('objects with "ignore", which OpenMMLab leaves out', at)
        crowd = annotation.get('iscrowd')
        if crowd not in (0, 1):
            defects.add('annotations whose iscrowd is missing or not 0 or 1', at)
            annotation = {**annotation, 'iscrowd': int(is_number(crowd))}  # as mmdet reads it
        yield annotation


def read_coco(path: Path) -> dict[str, Any]:
    """The JSON object in a COCO file, whose lists hold objects.

    Raises:
        UserError: says what is wrong with the file as a whole.
    """
    content = coco_of_json(read_json(path), path)
    if has_byte_order_mark(path):
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


def category_ids(content: dict[str, Any], path: Path) -> set:
    """The ids of the categories, each of which must have an id and a name of its own."""
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
    return ids


def image_record_problem(image: dict, key_kind: type, known: dict) -> Optional[str]:
    if not isinstance(image.get('file_name'), str) or not image['file_name']:
        return 'images without file_name'
    if not is_key(image, 'id', key_kind):
        return f'images without an id of type {key_kind.__name__}'
    sides = image.get('width'), image.get('height')
    if not all(is_number(side) and side >= 1 for side in sides):
        return 'images without width and height'
    return 'images with the id of another image' if image['id'] in known else None


def annotation_problem(
    annotation: dict, image: Optional[dict], categories: set, known: set
) -> Optional[str]:
    """What makes an annotation unusable, or None."""
    if not is_key(annotation, 'id'):
        return 'annotations without a number as id'
    if image is None:
        return 'annotations of images that are not listed'
    if not is_key(annotation, 'category_id') or annotation['category_id'] not in categories:
        return 'annotations of categories that are not listed'
    if not has_box(annotation):
        return 'annotations without a bbox of 4 finite numbers'
    return 'annotations with the id of another annotation' if annotation['id'] in known else None


def other_type(key: Any) -> Any:
    """A number as a string, or a string as a number; None if that is not possible."""
    if isinstance(key, str):
        return int(key) if key.isdecimal() and len(key) < 20 else None
    return str(key) if isinstance(key, int) else None


def has_box(annotation: dict) -> bool:
    box = annotation.get('bbox')
    return isinstance(box, list) and len(box) == 4 and all(map(is_number, box))


def is_box_elsewhere(annotation: dict) -> bool:
    """Whether a box differs from that around its polygons by more than rounding; these are valid.
    Crowds, whose masks are run lengths, have none."""
    polygons = annotation.get('segmentation')
    if not isinstance(polygons, list) or not polygons:
        return False
    every = sum(polygons, []) if len(polygons) > 1 else polygons[0]
    x = every[::2]
    y = every[1::2]
    left, top, width, height = annotation['bbox']
    most = SHIFTED + FURTHER * max(width, height)
    return (
        abs(min(x) - left) > most
        or abs(min(y) - top) > most
        or abs(max(x) - left - width) > most
        or abs(max(y) - top - height) > most
    )


def problem_of_mask(mask: Any, image: dict) -> tuple[Optional[str], bool]:
    """What is wrong with a mask, or None, and whether mmdet ignores such objects, or stops."""
    if not isinstance(mask, (list, dict)) or not mask:
        return NO_MASK, True
    if isinstance(mask, list):
        points = [p for p in mask if isinstance(p, list) and len(p) % 2 == 0]
        if len(points) < len(mask) or not all(is_number(n) for p in points for n in p):
            return 'masks with a polygon that is no list of pairs of finite numbers', True
        is_short = [len(polygon) < 6 for polygon in mask]
        # mmdet leaves such polygons out, and pycocotools if they are not the first.
        return 'masks with a polygon of less than 3 points' if any(is_short) else None, is_short[0]
    if mask.get('size') != [image['height'], image['width']]:
        return 'masks of another size than their image', True
    counts = mask.get('counts')
    counts = counts_of(counts) if isinstance(counts, str) else counts
    is_list = isinstance(counts, list) and all(isinstance(n, int) and n >= 0 for n in counts)
    is_whole = is_list and sum(counts) == math.prod(mask['size'])
    return None if is_whole else 'masks whose run lengths are damaged', not is_whole


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


def check_that_boxes_are_no_corners(
    path: Path, annotations: Sequence[dict], images: dict[Any, dict]
) -> None:
    """Raise a UserError if all boxes of a file fit their images as x1 y1 x2 y2, and many do not as
    x y width height."""
    found = [images[annotation['image_id']] for annotation in annotations]
    sides = np.array([(image['width'], image['height']) for image in found], float).reshape(-1, 2)
    boxes = np.array([a['bbox'] for a in annotations], float).reshape(-1, 2, 2)
    beyond = (boxes.sum(1) > 1.05 * sides).any(1).sum()
    if beyond >= ENOUGH and are_corners(boxes, sides):
        raise UserError(
            f'{path}: each bbox must be x, y, width and height, but these are x1, y1, x2, y2: '
            f'{beyond} of {len(annotations)} would reach beyond their image'
        )


def check_that_boxes_are_pixels(path: Path, annotations: Sequence[dict]) -> None:
    """Raise a UserError if no box of many has a number above 1."""
    most = max((max(annotation['bbox']) for annotation in annotations), default=0)
    if len(annotations) >= ENOUGH and most <= 1:
        raise UserError(
            f'{path}: each bbox must be x, y, width and height in pixels, but no number is above '
            '1; multiply them by the width and height of the image'
        )


def are_corners(boxes: np.ndarray, sides: np.ndarray) -> bool:
    """Whether (N, 2, 2) numbers are all upper left and lower right corners in images of some (N, 2)
    widths and heights."""
    low, high = boxes[:, 0], boxes[:, 1]
    return bool((low <= high).all() and (high <= sides + BEYOND).all())


def warn_about_box(annotation: dict, image: dict, boxes: set, at: str, defects: Defects) -> None:
    """Warn about a box that mm leaves out, or that is there twice. `boxes`: those before it."""
    left, top, width, height = annotation['bbox']
    right, bottom = left + width, top + height
    if width < 1 or height < 1:
        defects.warn('boxes narrower than a pixel', at)
    elif left >= image['width'] or top >= image['height'] or right <= 0 or bottom <= 0:
        defects.warn('boxes outside their image', at)
    elif max(-left, -top, right - image['width'], bottom - image['height']) > BEYOND:
        defects.warn('boxes that reach beyond their image; bbox is x, y, width and height', at)
    box = (annotation['image_id'], annotation['category_id'], left, top, width, height)
    if box in boxes:
        defects.warn('boxes that are there twice', at)
    boxes.add(box)


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) < 1e300


def is_key(record: dict, field: str, kind: type = int) -> bool:
    """Whether a record has an id, which pycocotools sorts and puts into arrays."""
    value = record.get(field)
    in_range = not isinstance(value, int) or abs(value) < 2**63
    return isinstance(value, kind) and not isinstance(value, bool) and in_range


def indexed_coco(content: dict[str, Any]) -> COCO:
    coco = COCO()
    coco.dataset = content
    with redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco
