"""COCO: a JSON file with images, categories and objects for each split.

pycocotools reads such a file only if it is correct: it neither checks nor reports. mmdet reads it
with pycocotools. So records are read as JSON here, and checked in `check.py`.
"""

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..images.coco import categories_of
from ..tooling.command import UserError
from ..tooling.report import amount
from . import defects
from .data import Objects, Split
from .defects import Defects
from .description import Description
from .files import Folder, as_path, comparable, join

SURROGATE = re.compile(rb'\\u[dD][89a-fA-F]')  # a character in two parts, as JSON writes it
ID_FIELDS = {
    'images': ['id'],
    'categories': ['id'],
    'annotations': ['id', 'image_id', 'category_id'],
}


def read_coco_data(description: Description, found: Defects) -> Objects:
    """The objects of the COCO files that a description names."""
    splits = {}
    notes = []
    for split, (part,) in description.splits.items():
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
        splits[split] = Split(content, folder, None if changes else path, name)
    classes = classes_of_files(description, splits)
    chosen = {name: with_classes(split, classes, found) for name, split in splits.items()}
    return Objects(description, chosen, classes, notes)


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


def without_prefix(name: str, prefix: str) -> str:
    """A name of an image without the folders of another machine."""
    path = as_path(name)
    if not prefix or not comparable(path).startswith(f'{comparable(prefix)}/'):
        return path
    skipped = as_path(prefix).count('/') + 1
    return '/'.join(path.split('/')[skipped:])


def classes_of_files(description: Description, splits: dict[str, Split]) -> list[str]:
    """The classes: as declared, or all categories in the order of the files."""
    names: dict[str, None] = {}
    for split in splits.values():
        check_categories(split.content, description.root / split.name)
        names.update(dict.fromkeys(c['name'] for c in split.content['categories']))
    if description.names is None:
        return list(names)
    for name in description.names.values():
        if name not in names:
            raise UserError(
                f'{description.source}: names has {name!r}, but no COCO file has this category; '
                f'they have {", ".join(map(repr, list(names)[:8]))}'
            )
    return list(description.names.values())


def with_classes(split: Split, classes: Sequence[str], found: Defects) -> Split:
    """A split with the objects of some classes alone; with categories of its own, unless those of
    the file have the classes in their order, which is that of mmdet's labels."""
    names = {category['id']: category['name'] for category in split.content['categories']}
    others = {key: name for key, name in names.items() if name not in classes}
    annotations = split.content['annotations']
    if others:
        counts: Counter = Counter()
        kept = []
        for annotation in annotations:
            key = annotation.get('category_id')
            name = others.get(key) if is_key(annotation, 'category_id') else None
            if name is None:
                kept.append(annotation)
            else:
                counts[name] += 1
        annotations = kept
        for name, count in counts.items():
            found.add(defects.OTHER_CLASS, f'{name} ({amount(count, "object")} in {split.name})')
    if [name for name in names.values() if name in classes] == list(classes):
        return split._replace(content={**split.content, 'annotations': annotations})
    labels = {key: classes.index(name) + 1 for key, name in names.items() if name in classes}
    numbered = []
    for annotation in annotations:
        key = annotation.get('category_id')
        number = labels.get(key) if is_key(annotation, 'category_id') else None
        numbered.append({**annotation, 'category_id': -1 if number is None else number})
    content = {'annotations': numbered, 'categories': categories_of(classes)}
    return split._replace(content={**split.content, **content}, path=None)


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
