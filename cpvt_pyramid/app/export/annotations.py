"""Annotations next to exported models: reading them, and finding those of an image.

What is wrong with them is said before a model runs.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Optional, Union

from pycocotools import mask as mask_utils

from ..images.reading import size_of
from ..predictions.average_precision import coco_with_index
from ..tooling.command import UserError, one_line


def read_coco_file(file: Path) -> dict[str, Any]:
    """The content of a file of objects, with its three lists."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f'{file} is not in COCO format: {one_line(error)}') from error
    fields = {
        'images': ('id', 'file_name'),
        'categories': ('id', 'name'),
        'annotations': ('image_id', 'category_id'),
    }
    for name, needed in fields.items():
        records = content.get(name) if isinstance(content, dict) else None
        if not isinstance(records, list):
            raise UserError(f'{file} is not in COCO format: it must have a list of {name}')
        for record in records:
            given = [record.get(key) for key in needed] if isinstance(record, dict) else [None]
            if not all(isinstance(value, (int, float, str)) for value in given):
                raise UserError(
                    f'{file} is not in COCO format: each of its {name} must have '
                    f'{" and ".join(needed)}, got {shortened(record)}'
                )
    return content


def labels_of_categories(
    categories: Sequence[dict[str, Any]], classes: Sequence[str], file: Path
) -> dict[Any, int]:
    """The class of the model by the id of its category."""
    names = [category['name'] for category in categories]
    lacking = [name for name in classes if name not in names]
    if lacking:
        raise UserError(
            f'{file} must have the categories of the model; it lacks {", ".join(lacking[:5])}'
        )
    repeated = [name for name in classes if names.count(name) > 1]
    if repeated:
        raise UserError(f'{file} must have each category once, but has {repeated[0]} several times')
    return {
        category['id']: list(classes).index(category['name'])
        for category in categories
        if category['name'] in classes
    }


def sides_of(record: Mapping[str, Any], path: Path, file: Path) -> dict[str, Any]:
    """The height and width of an image file, which must be those that a COCO file says."""
    said = record.get('height'), record.get('width')
    size = size_of(path) or said  # a file that cannot be read is left out later
    if None not in said and size != said:
        raise UserError(
            f'{path} has {size[0]} x {size[1]} pixels (height x width), but {file} says '
            f'{said[0]} x {said[1]}: boxes would be elsewhere'
        )
    return dict(zip(('height', 'width'), size))


def complete_object(
    annotation: Mapping[str, Any], image: Mapping[str, Any], metric: str, at: str
) -> dict[str, Any]:
    """An annotation with all that pycocotools needs; `at` says which it is."""
    box = annotation.get('bbox')
    if metric == 'bbox':
        if not isinstance(box, list) or len(box) != 4 or not all(map(is_finite, box)):
            raise UserError(f'{at} must have a bbox of 4 finite numbers, got {shortened(box)}')
        shape = {'bbox': box, 'area': box[2] * box[3]}
    else:
        mask = mask_of_object(annotation.get('segmentation'), image)
        if mask is None:
            raise UserError(
                f'{at} must have a segmentation, polygons or run lengths of its image, because the '
                'model predicts masks'
            )
        shape = {'segmentation': mask, 'area': float(mask_utils.area(mask))}
        shape['bbox'] = mask_utils.toBbox(mask).tolist()
    return {
        'id': annotation['id'],
        'image_id': image['id'],
        'category_id': annotation['category_id'],
        'iscrowd': int(annotation.get('iscrowd') in (1, True)),
        **shape,
    }


def mask_of_object(segmentation: Any, image: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """The run lengths of polygons or run lengths; None if they are damaged or of another size."""
    if not segmentation:
        return None
    index = coco_with_index({'images': [image]})
    try:
        mask = index.annToRLE({'image_id': image['id'], 'segmentation': segmentation})
        mask_utils.decode(mask)
    except Exception:  # pycocotools raises many kinds
        return None
    return mask if list(mask['size']) == [image['height'], image['width']] else None


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def match_names(
    paths: Sequence[Path], names: Sequence[str], place: Path, with_endings: bool = True
) -> dict[Path, int]:
    """Which of the names in `place` each path has, by index; paths that have none are left out.

    A name is a path of any system, relative to some folder. Its last part must be that of the path,
    without its ending if names have none. Of several names and paths with one last part, those
    belong together that share most parts at their ends.

    Raises:
        UserError: more than one name or path shares most parts.
    """
    parts_of_name = [tuple(re.split(r'[\\/]+', name)) for name in names]
    with_last_part = defaultdict(list)
    for index, parts in enumerate(parts_of_name):
        with_last_part[parts[-1]].append(index)
    shared: dict[tuple[Path, int], int] = {}  # parts of a path and a name
    for path in paths:
        whole = path.absolute() if with_endings else path.absolute().with_suffix('')
        for index in with_last_part[whole.name]:
            shared[path, index] = common_end(whole.parts, parts_of_name[index])
    most: dict[Union[Path, int], int] = defaultdict(int)
    for pair, count in shared.items():
        for end in pair:
            most[end] = max(most[end], count)
    name_of: dict[Path, int] = {}
    path_of: dict[int, Path] = {}
    for (path, index), count in shared.items():
        if count < most[path] or count < most[index]:
            continue
        if path in name_of:
            raise UserError(
                f'{path} may be {names[name_of[path]]} or {names[index]} of {place}; give images '
                'in folders that tell them apart'
            )
        if index in path_of:
            raise UserError(
                f'{names[index]} of {place} may be {path_of[index]} or {path}; leave one of them '
                'out'
            )
        name_of[path] = index
        path_of[index] = path
    return name_of


def common_end(one: Sequence[str], other: Sequence[str]) -> int:
    """The number of equal parts at the ends of two paths."""
    count = 0
    for a, b in zip(reversed(one), reversed(other)):
        if a != b:
            break
        count += 1
    return count
