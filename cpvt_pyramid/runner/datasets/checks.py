"""Checks of the contents of data sets: annotation files, label maps and images.

mm finds most of these defects in the middle of an epoch, as a traceback of a worker process, and
some never: objects of an unknown category or with NaN coordinates train silently.
"""

import io
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from mmengine.config import Config
from PIL import Image
from tqdm import tqdm

from ...tooling.command import UserError
from ...tooling.files import atomic_write, make_folder
from ..configs import as_list, dataset_class, is_local, kind_of, leaves
from ..distributed import of_first_process
from ..inference.bands import labels_of_raster, size_of_raster
from .duplicates import ImagePrint, image_print, shared_images

IGNORED_LABEL = 255
CHECKERS = min(os.cpu_count() or 1, 16)  # threads that read images
CHUNK = 64  # images between two looks at the clock
SECONDS = 20  # for each data set of a run; larger ones are not read completely
SHOWN = 3  # items of a problem that its line names
UPRIGHT, TRANSPOSED = (1,), (5, 6, 7, 8)  # values of the EXIF tag for the orientation
ORIENTATION = 0x0112
Prints = dict[Path, ImagePrint]  # of the images that were read


class Problem(NamedTuple):
    """A kind of defect in a data set, and what has it."""

    kind: str  # for example 'annotations without a bbox'
    items: list[str]  # for example 'annotation 3 of a.jpg'
    is_error: bool = True  # training stops or learns from wrong labels; else mm leaves it out

    def __str__(self) -> str:
        more = f' and {len(self.items) - SHOWN} more' if len(self.items) > SHOWN else ''
        return f'{self.kind}: {", ".join(self.items[:SHOWN])}{more}'


class Checked(NamedTuple):
    """What the check of a data set found."""

    problems: list[Problem]
    write_clean: Optional[Callable[[Path], int]]  # write what is good to a file; its images
    images: int  # number of images
    decoded: int  # how many of them were read completely


class Defects:
    """Collects problems by kind, in the order in which the kinds are first seen."""

    def __init__(self) -> None:
        self.errors: dict[str, list[str]] = defaultdict(list)
        self.warnings: dict[str, list[str]] = defaultdict(list)

    def error(self, kind: str, item: str) -> None:
        self.errors[kind].append(item)

    def warn(self, kind: str, item: str) -> None:
        self.warnings[kind].append(item)

    def problems(self) -> list[Problem]:
        return [Problem(*found) for found in self.errors.items()] + [
            Problem(*found, False) for found in self.warnings.items()
        ]


def check_dataset(
    dataset: dict, scope: str, seconds: float = math.inf, prints: Optional[Prints] = None
) -> Optional[Checked]:
    """Check the contents of one data set.

    Args:
        dataset: its config.
        scope: mmdet or mmseg.
        seconds: after which no further images are read completely.
        prints: to fill, to find images that are in another data set, too.

    Returns:
        None for a kind of data set that is not checked: one that is neither a `CocoDataset` nor a
        `BaseSegDataset`, or not in local files.

    Raises:
        UserError: the annotation file is none.
    """
    root = dataset.get('data_root') or ''
    if dataset.get('backend_args') or not is_local(root):
        return None
    kinds = {base.__name__ for base in dataset_class(dataset, scope).__mro__}
    if kind_of(dataset) == 'CocoDataset' and dataset.get('ann_file'):
        folder = Path(root, (dataset.get('data_prefix') or {}).get('img') or '')
        masks = any(step.get('with_mask') for step in dataset.get('pipeline') or ())
        return check_coco(annotation_file(dataset), folder, seconds, masks=masks, prints=prints)
    if 'BaseSegDataset' in kinds:
        return check_label_maps(dataset, scope, seconds, prints)
    return None


# COCO


def check_coco(
    path: Path,
    folder: Path,
    seconds: float = math.inf,
    content: Optional[dict[str, Any]] = None,
    masks: bool = False,
    prints: Optional[Prints] = None,
) -> Checked:
    """Check a COCO file of boxes and masks, and its images.

    Args:
        path: the JSON file.
        folder: of the images.
        seconds: as in `check_dataset`.
        content: of the file, where it was read before.
        masks: every object must have one.
        prints: as in `check_dataset`.
    """
    content = content or read_coco(path)
    defects, images = Defects(), {}
    categories = category_ids(content, path)
    key_kind = str if isinstance(content['images'][0].get('id'), str) else int
    for index, image in enumerate(content['images']):
        name = image.get('file_name')
        at = name if isinstance(name, str) and name else f'image {index}'
        problem = image_record_problem(image, key_kind)
        if problem is None and image['id'] in images:
            problem = 'images with the id of another image'
        if problem:
            defects.error(problem, at)
        else:
            images[image['id']] = image
    sizes = {folder / i['file_name']: (i['height'], i['width']) for i in images.values()}
    found, decoded = check_images(sizes, defects, seconds, prints)
    good_images = {
        k: image for k, image in images.items() if folder / image['file_name'] not in found
    }
    annotations = [
        annotation
        for annotation in good_annotations(content['annotations'], images, categories, defects)
        if annotation['image_id'] in good_images
    ]
    if masks:
        annotations = [a for a in annotations if has_mask(a, images[a['image_id']], defects)]
    if not content['annotations']:
        defects.error('annotation files without annotations', path.name)
    for key in good_images.keys() - {annotation['image_id'] for annotation in annotations}:
        defects.warn('images without annotations', images[key]['file_name'])

    def write_clean(target: Path) -> int:
        clean = {**content, 'images': list(good_images.values()), 'annotations': annotations}
        with atomic_write(target) as file:
            file.write_text(json.dumps(clean))
        return len(good_images)

    return Checked(defects.problems(), write_clean, len(content['images']), decoded)


def usable_content(path: Path) -> tuple[dict[str, Any], Defects]:
    """The content of a COCO file without what cannot be used, and what that is; images are not
    looked at."""
    content, defects, images = read_coco(path), Defects(), {}
    key_kind = str if isinstance(content['images'][0].get('id'), str) else int
    for index, image in enumerate(content['images']):
        if problem := image_record_problem(image, key_kind):
            defects.error(problem, f'image {index}')
        else:
            images.setdefault(image['id'], image)
    categories = category_ids(content, path)
    annotations = list(good_annotations(content['annotations'], images, categories, defects))
    return {**content, 'images': list(images.values()), 'annotations': annotations}, defects


def good_annotations(
    annotations: Sequence[dict], images: dict, categories: set, defects: Defects
) -> Iterator[dict]:
    """The annotations that can be used, with area and iscrowd.

    Args:
        annotations: of a COCO file.
        images: of the file, by their ids.
        categories: the ids of the categories.
        defects: collects what is wrong with the others.
    """
    seen, boxes = set(), set()
    for index, annotation in enumerate(annotations):
        key = annotation.get('image_id')
        image = images.get(key) if isinstance(key, (int, str)) else None
        at = place_of(annotation, index, image)
        problem = annotation_problem(annotation, image, categories)
        if problem is None and annotation['id'] in seen:
            problem = 'annotations with the id of another annotation'
        if problem:
            defects.error(problem, at)
            continue
        seen.add(annotation['id'])
        warn_about_box(annotation, image, boxes, at, defects)
        if not is_number(annotation.get('area')):
            defects.error('annotations without area', at)
            annotation = {**annotation, 'area': box_area(annotation)}
        crowd = annotation.get('iscrowd')
        if crowd not in (0, 1):
            what = 'whose iscrowd is not 0 or 1' if is_number(crowd) else 'without iscrowd'
            defects.error(f'annotations {what}', at)
            annotation = {**annotation, 'iscrowd': int(is_number(crowd))}  # as mmdet reads it
        yield annotation


def place_of(annotation: dict, index: int, image: Optional[dict]) -> str:
    """For messages: 'annotation 3 of a.jpg'."""
    at = f'annotation {annotation.get("id", index)}'
    return f'{at} of {image["file_name"]}' if image else at


def has_mask(annotation: dict, image: dict, defects: Defects) -> bool:
    """Whether an annotation has polygons or a run-length encoding."""
    mask = annotation.get('segmentation')
    good = isinstance(mask, (list, dict)) and bool(mask)
    if not good:
        defects.error('objects without a mask', place_of(annotation, 0, image))
    return good


def read_coco(path: Path) -> dict[str, Any]:
    """The JSON object in a COCO file, whose lists hold objects.

    Raises:
        UserError: says what is wrong with the file as a whole.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from error
    except (ValueError, RecursionError) as error:
        state = 'is empty' if not path.stat().st_size else f'is not complete JSON: {error}'
        raise UserError(f'{path} {state}'[:300]) from error
    if not isinstance(content, dict):
        raise UserError(f'{path} must hold a JSON object, got a {type(content).__name__}')
    for name in ('images', 'annotations', 'categories'):
        if not isinstance(content.get(name), list):
            raise UserError(f'{path} must have a list {name!r}; it has {sorted(content)[:8]}'[:300])
        if not all(isinstance(item, dict) for item in content[name]):
            raise UserError(f'{path}: each of {name!r} must be an object')
    for name in ('images', 'categories'):
        if not content[name]:
            raise UserError(f'{path} has no {name}')
    return content


def category_ids(content: dict[str, Any], path: Path) -> set:
    """The ids of the categories.

    Raises:
        UserError: one has no id or name, or the same as another.
    """
    ids, names = set(), set()
    for category in content['categories']:
        name = category.get('name')
        if not is_key(category, 'id') or not isinstance(name, str):
            raise UserError(
                f'{path}: each category must have a number as id and a name, got {category}'[:300]
            )
        if category['id'] in ids or name in names:
            raise UserError(f'{path} lists the category {category} twice, by its id or name'[:300])
        ids.add(category['id'])
        names.add(name)
    return ids


def image_record_problem(image: dict, key_kind: type) -> Optional[str]:
    if not isinstance(image.get('file_name'), str) or not image['file_name']:
        return 'images without file_name'
    if not is_key(image, 'id', key_kind):
        return f'images without an id of type {key_kind.__name__}'
    sides = image.get('width'), image.get('height')
    if not all(is_number(side) and side >= 1 for side in sides):
        return 'images without width and height'
    return None


def annotation_problem(annotation: dict, image: Optional[dict], categories: set) -> Optional[str]:
    """What makes an annotation unusable, or None."""
    if not is_key(annotation, 'id'):
        return 'annotations without a number as id'
    if image is None:
        return 'annotations of images that are not listed'
    if not is_key(annotation, 'category_id') or annotation['category_id'] not in categories:
        return 'annotations of categories that are not listed'
    box = annotation.get('bbox')
    if not isinstance(box, list) or len(box) != 4:
        return 'annotations without a bbox of 4 numbers'
    if not all(map(is_number, box)):
        return 'annotations whose bbox has a value that is not a finite number'
    return None


def warn_about_box(annotation: dict, image: dict, boxes: set, at: str, defects: Defects) -> None:
    """Warn about a box that mm leaves out, or that is there twice. `boxes`: those before it."""
    left, top, width, height = annotation['bbox']
    if width < 1 or height < 1:
        defects.warn('boxes narrower than a pixel', at)
    elif left >= image['width'] or top >= image['height'] or left + width <= 0 or top + height <= 0:
        defects.warn('boxes outside their image', at)
    box = (annotation['image_id'], annotation['category_id'], left, top, width, height)
    if box in boxes:
        defects.warn('boxes that are there twice', at)
    boxes.add(box)


def box_area(annotation: dict) -> float:
    return annotation['bbox'][2] * annotation['bbox'][3]


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_key(record: dict, field: str, kind: type = int) -> bool:
    """Whether a record has an id, which pycocotools sorts and puts into arrays."""
    value = record.get(field)
    in_range = not isinstance(value, int) or abs(value) < 2**63
    return isinstance(value, kind) and not isinstance(value, bool) and in_range


# Label maps


def check_label_maps(
    dataset: dict, scope: str, seconds: float = math.inf, prints: Optional[Prints] = None
) -> Checked:
    """Check the images and label maps of a `BaseSegDataset`.

    Args:
        dataset: its config.
        scope: mmdet or mmseg.
        seconds, prints: as in `check_dataset`.
    """
    kind, defects = dataset_class(dataset, scope), Defects()
    config = {k: v for k, v in dataset.items() if k not in ('type', 'pipeline')}
    built = kind(**{**config, 'pipeline': [], 'lazy_init': True, 'serialize_data': False})
    images = Path(built.data_prefix.get('img_path') or '')
    listed = built.load_data_list() if images.is_dir() else []
    if not listed:
        others = sorted({p.suffix for p in images.rglob('*') if p.is_file()})[:6]
        found = f'; it has {", ".join(others)}' if others else ''
        raise UserError(f'{images} has no images with the suffix {built.img_suffix}{found}')
    classes = built.METAINFO.get('classes') or built.metainfo.get('classes') or ()
    valid_labels = (len(classes) or IGNORED_LABEL) + bool(built.reduce_zero_label)

    def problems_of(info: dict) -> list[str]:
        path = Path(info['img_path'])
        size, problem, orientation = upright_size(path, prints)
        if orientation not in UPRIGHT:
            turned.append(name_below(path, images))
        problems = [f'images that {problem}'] if problem else []
        lacking = problems_at_a_glance(info)
        if not lacking and info.get('seg_map_path'):
            problems.append(label_problem(Path(info['seg_map_path']), size, valid_labels))
        return list(filter(None, problems)) + lacking

    def problems_at_a_glance(info: dict) -> list[str]:
        lacks = info.get('seg_map_path') and not Path(info['seg_map_path']).is_file()
        return ['images without a label map'] if lacks else []

    turned = []
    found, decoded = checked_until(seconds, listed, problems_of, problems_at_a_glance)
    warn_about_turned(sorted(turned), defects)
    names = [name_below(Path(info['img_path']), images) for info in listed]
    bad = {name for name, problems in zip(names, found) if problems}
    for name, problems in zip(names, found):
        for problem in problems:
            defects.error(problem, name)

    def write_clean(target: Path) -> int:
        kept = [name.removesuffix(built.img_suffix) for name in names if name not in bad]
        with atomic_write(target) as file:
            file.write_text(''.join(f'{name}\n' for name in kept))
        return len(kept)

    return Checked(defects.problems(), write_clean, len(listed), decoded)


def label_problem(path: Path, size: Optional[tuple[int, int]], labels: int) -> Optional[str]:
    """What is wrong with a label map, or None.

    Args:
        path: its file.
        size: height and width of its image; None: unknown.
        labels: number of valid labels; 255 is ignored.
    """
    try:
        with path.open('rb') as file, Image.open(file) as image:
            if image.mode not in ('1', 'L', 'P', 'I', 'I;16'):
                return 'label maps with several channels instead of one of class indices'
            if size and image.size != size[::-1]:
                return 'label maps of another size than their image'
            values = np.unique(np.asarray(image))
    except Exception:  # Pillow raises many kinds on a truncated file, or on a very large one
        whole = labels_of_raster(path)
        if whole is None:
            return 'label maps that are not complete images'
        if size and whole.shape != size:
            return 'label maps of another size than their image'
        values = np.unique(whole)
    if ((values >= labels) & (values != IGNORED_LABEL)).any():
        return f'label maps with labels beyond the classes, 0 to {labels - 1}'
    return None


# Images


def check_images(
    sizes: dict[Path, tuple[int, int]],
    defects: Defects,
    seconds: float,
    prints: Optional[Prints] = None,
) -> tuple[set[Path], int]:
    """Check that images are complete and have the (height, width) of their record.

    Args:
        sizes: the declared size of each file.
        defects: collects what is wrong.
        seconds: after which only the files' existence is checked.
        prints: as in `check_dataset`.

    Returns:
        The bad files, and how many were read completely.
    """

    turned = []

    def problem_of(path: Path) -> Optional[str]:
        size, problem, orientation = upright_size(path, prints)
        if orientation not in UPRIGHT:
            turned.append(path.name)
        if size and size != tuple(sizes[path]):
            if orientation in TRANSPOSED and size[::-1] == tuple(sizes[path]):
                return 'an EXIF tag turns, but their records have the size before'
            return 'have another size than the width and height of its record'
        return problem

    def problem_at_a_glance(path: Path) -> Optional[str]:
        return None if path.is_file() else 'are missing'

    problems, decoded = checked_until(seconds, list(sizes), problem_of, problem_at_a_glance)
    warn_about_turned(sorted(turned), defects)
    bad = {path: problem for path, problem in zip(sizes, problems) if problem}
    for path, problem in bad.items():
        defects.error(f'images that {problem}', path.name)
    return set(bad), decoded


def warn_about_turned(names: Sequence[str], defects: Defects) -> None:
    for name in names:
        defects.warn('images that an EXIF tag turns; their annotations must be upright, too', name)


def upright_size(
    path: Path, prints: Optional[Prints] = None
) -> tuple[Optional[tuple[int, int]], Optional[str], int]:
    """The (height, width) of an image that is read completely, what is wrong with it, and the
    orientation in its EXIF data."""
    if not path.is_file():
        return None, 'are missing', 1
    if not path.stat().st_size:
        return None, 'are empty files', 1
    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            orientation = image.getexif().get(ORIENTATION, 1)
            image.load()
            height, width = image.size[::-1]
            if prints is not None:
                with suppress(ValueError):  # a mode that Pillow cannot convert to gray
                    prints[path] = image_print(data, image)
    except Exception:  # Pillow raises many kinds on a truncated file, or on many bands
        size = size_of_raster(path)
        return size, None if size else 'are not complete images', 1
    if orientation in TRANSPOSED and image.format != 'TIFF':  # which Pillow turns when it loads it
        height, width = width, height
    return (height, width), None, orientation


def checked_until(
    seconds: float,
    items: Sequence[Any],
    thorough: Callable[[Any], Any],
    at_a_glance: Callable[[Any], Any],
) -> tuple[list, int]:
    """For each item the result of `thorough`, or of `at_a_glance` when the time is over; and the
    number of the former. What is checked thoroughly is spread over all items."""
    results = [None] * len(items)
    order = np.random.default_rng(0).permutation(len(items)).tolist()
    deadline, decoded = time.monotonic() + seconds, 0
    with ThreadPoolExecutor(CHECKERS) as threads:
        for start in tqdm(
            range(0, len(order), CHUNK), 'checking images', leave=False, delay=3, unit_scale=CHUNK
        ):
            chunk = order[start : start + CHUNK]
            in_time = time.monotonic() < deadline
            decoded += in_time * len(chunk)
            check = thorough if in_time else at_a_glance
            for i, result in zip(chunk, threads.map(check, [items[i] for i in chunk])):
                results[i] = result
    return results, decoded


def name_below(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


# Configs


def check_before_run(cfg: Config, *splits: str, skip_bad: bool = False) -> None:
    """Check the contents of the data sets of a run, in its first process.

    Args:
        cfg: the config; with `skip_bad` its data sets are replaced by their good parts.
        *splits: of train, val and test.
        skip_bad: read all images, and continue without what has errors.

    Raises:
        UserError: there are errors, which have been printed.
    """
    errors, good_parts = of_first_process(
        lambda: check_contents(
            cfg,
            *splits,
            folder=Path(cfg.work_dir),
            seconds=math.inf if skip_bad else SECONDS,
            write_good=skip_bad,
        )
    )
    if errors and not skip_bad:
        raise UserError(
            'the data have the errors above; correct them, or leave out what has errors with '
            '--skip-bad'
        )
    use_good_parts(cfg, good_parts)


class Contents(NamedTuple):
    """What the check of the data sets of a config found."""

    errors: int  # kinds of errors
    good_parts: dict[tuple[str, int], str]  # by split and number of a data set, a list of the rest


def check_contents(
    cfg: Config,
    *splits: str,
    folder: Path,
    seconds: float = math.inf,
    write_good: bool = False,
    found: Sequence[Problem] = (),
    compare: bool = False,
) -> Contents:
    """Check the contents of the data sets of a config, and print a line for each problem.

    Args:
        cfg: the config.
        *splits: of train, val and test.
        folder: for the report with all items of all problems, and for the lists of what is good.
        seconds: for each data set, after which no further images are read completely.
        write_good: write lists of what is good, for `use_good_parts`.
        found: problems that are known before.
        compare: look for training images in the other splits.
    """
    lines, errors, good, seen = [], sum(problem.is_error for problem in found), {}, []
    prints = {split: {} for split in splits} if compare else {}
    lines += ['classes, sizes and samples: data.html'] if compare else []
    lines += report_lines(found)
    for problem in found:
        print(f'{"error" if problem.is_error else "warning"}: {problem}')
    for split in splits:
        check_evaluators(cfg, split)
        for number, dataset in enumerate(data_of(cfg, split)):
            contents = {k: v for k, v in dataset.items() if k != 'pipeline'}
            if contents in seen and not write_good:  # test is often the same as val
                continue
            seen.append(contents)
            checked = check_dataset(dataset, cfg.default_scope, seconds, prints.get(split))
            if checked is None:
                continue
            name = f'{split}{number or ""}'
            if checked.decoded < checked.images:
                print(
                    f'{name} data: {checked.decoded} of {checked.images} images were read; '
                    'tools/check_data.py reads all'
                )
            for problem in checked.problems:
                print(f'{name} data: {"error" if problem.is_error else "warning"}: {problem}')
            lines.append(f'{name} data: {checked.images} images, {checked.decoded} read completely')
            lines += report_lines(checked.problems)
            bad = sum(problem.is_error for problem in checked.problems)
            errors += bad
            if bad and write_good:
                suffix = 'json' if kind_of(dataset) == 'CocoDataset' else 'txt'
                path = make_folder(folder).absolute() / f'good_{name}.{suffix}'
                if not checked.write_clean(path):
                    raise UserError(f'none of the images of the {split} data is without error')
                good[split, number] = str(path)
    for other in [split for split in prints if split != 'train' and 'train' in prints]:
        problems = shared_problems(prints['train'], prints[other], other)
        for problem in problems:
            print(f'{other} data: warning: {problem}')
        lines += [f'{other} data and train data', *report_lines(problems)] if problems else []
    if any(line.startswith('  ') for line in lines):
        path = make_folder(folder) / 'data_report.txt'
        with atomic_write(path) as file:
            file.write_text('\n'.join(lines) + '\n')
        print(f'all of them: {path}')
    return Contents(errors, good)


def shared_problems(train: Prints, other: Prints, split: str) -> list[Problem]:
    """Warnings about images of a split that are in the training data, too."""
    shared = shared_images(other, train)
    kinds = {
        f'{split} images that are training images, too': shared.exact,
        f'{split} images that look like training images': shared.near,
    }
    return [
        Problem(kind, [f'{path.name} ({same})' for path, same in pairs], False)
        for kind, pairs in kinds.items()
        if pairs
    ]


def use_good_parts(cfg: Config, good_parts: dict[tuple[str, int], str]) -> None:
    """Let the data sets of a config, and the metrics on them, read lists of what is good."""
    for (split, number), path in good_parts.items():
        dataset = data_of(cfg, split)[number]
        before = annotation_file(dataset).resolve()
        dataset.ann_file = path
        for metric in as_list(cfg.get(f'{split}_evaluator')):
            if metric.get('ann_file') and Path(metric['ann_file']).resolve() == before:
                metric['ann_file'] = path


def data_of(cfg: Config, split: str) -> list[dict]:
    """The innermost data sets of a split."""
    loader = cfg.get(f'{split}_dataloader')
    return list(leaves(loader.dataset)) if loader else []


def report_lines(problems: Sequence[Problem]) -> Iterator[str]:
    """All problems with all of their items."""
    for problem in problems:
        yield f'  {"error" if problem.is_error else "warning"}: {problem.kind}'
        yield from (f'    {item}' for item in problem.items)


def check_evaluators(cfg: Config, split: str) -> None:
    """Check that the metrics of a split read the annotations of its data set."""
    data = data_of(cfg, split)
    if len(data) != 1 or kind_of(data[0]) != 'CocoDataset' or not data[0].get('ann_file'):
        return
    path = annotation_file(data[0])
    for metric in as_list(cfg.get(f'{split}_evaluator')):
        read = metric.get('ann_file')
        if kind_of(metric) == 'CocoMetric' and read and Path(read).resolve() != path.resolve():
            raise UserError(
                f'{split}_evaluator reads {read}, but the {split} data are {path}; set '
                f'{split}_evaluator.ann_file to the same file'
            )


def annotation_file(dataset: dict) -> Path:
    return Path(dataset.get('data_root') or '', dataset.get('ann_file') or '')
