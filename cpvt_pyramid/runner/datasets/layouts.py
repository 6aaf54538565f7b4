"""Recognizes the layout of a folder with data, and reads boxes and polygons as COCO records.

COCO files, YOLO and Pascal VOC. YOLO and VOC are read here and not with supervision: it would be a
large new dependency, it draws each polygon as a mask of the whole image and traces it again, and
it skips or raises where a file has errors, which are to be reported by name. Images are not
decoded, only their sizes are read.
"""

import json
import math
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Optional
from xml.etree import ElementTree

import numpy as np
import yaml
from PIL import Image
from tqdm import tqdm

from ...tooling.command import UserError, one_line
from ..configs import as_list
from .checks import CHECKERS, Defects, check_coco, read_coco

IMAGE_SUFFIXES = {'.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp', '.ppm', '.pgm'}
# Words in the names of files and folders that tell what a split is for.
SPLITS = {
    'train': {'train', 'training', 'trainval', 'tr'},
    'val': {'val', 'valid', 'validation', 'dev', 'eval'},
    'test': {'test', 'testing'},
}
WORD = re.compile('[A-Z]+(?![a-z])|[A-Z]?[a-z]+')
# Files with a class name in each line, as tools for YOLO and label maps write them.
NAME_FILES = ('classes.txt', 'obj.names', 'labels.txt', 'names.txt', '_darknet.labels', 'codes.txt')
GENERATED = '_data'  # end of the name of the folder that is written next to a config
SEED = 0  # of the validation split


class NotRecognized(UserError):
    """A folder has none of the known layouts."""


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


class Files:
    """The files below a folder, hidden ones and those that new_config wrote excluded."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f'no folder {root}')
        self.root = root
        self.names = sorted(walk(root))
        if not self.names:
            raise UserError(f'{root} is empty')
        self.images = [n for n in self.names if PurePosixPath(n).suffix.lower() in IMAGE_SUFFIXES]
        self.images_by_stem = defaultdict(list)
        for name in self.images:
            self.images_by_stem[comparable(PurePosixPath(name).stem)].append(name)

    def with_suffix(self, *suffixes: str) -> list[str]:
        return [name for name in self.names if PurePosixPath(name).suffix.lower() in suffixes]

    def find_image(
        self, name: str, split: Optional[str] = None, any_suffix: bool = False
    ) -> Optional[str]:
        """The image that an annotation file calls `name`, relative to the root, or None.

        The name may have folders in front that are not here, or those of Windows. Of several
        images it is the one whose path has most in common with `name`, then that of the split.
        """
        wanted = PurePosixPath(comparable(name.replace('\\', '/')))

        def agreement(path: str) -> tuple[int, bool]:
            parts = PurePosixPath(comparable(path)).parts
            pairs = zip(reversed(parts), reversed(wanted.parts))
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            return same, split_of(path, folders_only=True) == split

        found = [
            path
            for path in self.images_by_stem.get(wanted.stem, ())
            if any_suffix or comparable(PurePosixPath(path).name) == wanted.name
        ]
        return max(found, key=agreement, default=None)


def walk(root: Path) -> Iterator[str]:
    """The files below a folder, relative to it; links to folders are followed, but not in rings."""
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        here = set(files)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(('.', '__MACOSX'))
            and not (name.endswith(GENERATED) and f'{name.removesuffix(GENERATED)}.py' in here)
        )
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in files:
            if not name.startswith('.'):
                yield Path(folder, name).relative_to(root).as_posix()


def comparable(name: str) -> str:
    """A name whose accents are written in one way; file systems differ."""
    return unicodedata.normalize('NFC', name)


def words(name: str) -> list[str]:
    """The words of a name in small letters: instances_train2017, JPEGImages, valSet."""
    return [word.lower() for word in WORD.findall(name)]


def split_of(path: str, folders_only: bool = False) -> Optional[str]:
    """What a file is for, by the last part of its path that says so; its own name tells this for
    annotations and not for images."""
    pure = PurePosixPath(path)
    parts = pure.parts[:-1] if folders_only else pure.with_suffix('').parts
    for part in reversed(parts):
        for split, names in SPLITS.items():
            if names & set(words(part)):
                return split
    return None


def find_objects(root: Path, defects: Defects, skip_bad: bool = False) -> Objects:
    """Read the boxes and polygons in a folder.

    Args:
        root: the folder.
        defects: collects what is wrong with files; what is returned is without it.
        skip_bad: read COCO files without what has errors.

    Raises:
        NotRecognized: no layout is recognized.
        UserError: a file is broken as a whole.
    """
    files = Files(root)
    for read in (read_coco_files, read_yolo, read_voc):
        found = read(files, defects, skip_bad)
        if found is not None:
            return found
    suffixes = Counter(PurePosixPath(name).suffix for name in files.names).most_common(6)
    listed = ', '.join(f'{count} {suffix or "other"}' for suffix, count in suffixes)
    raise NotRecognized(
        f'{root} has none of the layouts COCO (a JSON file), YOLO (data.yaml or labels/*.txt) and '
        f'Pascal VOC (*.xml); it has {listed} files. Label maps need a segmentor as base, such as '
        'configs/semantic_fpn_cpvt_s.py'
    )


# COCO


def read_coco_files(files: Files, defects: Defects, skip_bad: bool) -> Optional[Objects]:
    paths = [name for name in files.with_suffix('.json') if may_be_coco(files.root / name)]
    if not paths:
        return None
    by_split = defaultdict(list)
    for path in paths:
        by_split[split_of(path)].append(path)
    chosen = {split: the_instances(names) for split, names in by_split.items()}
    notes = []
    if None in chosen and len(chosen) > 1 and 'train' in chosen:
        notes.append(f'{chosen.pop(None)} is not used, its name says no split')
    elif None in chosen:
        chosen['train'] = chosen.pop(None)
    splits = {s: coco_split(files, chosen[s], s, defects, skip_bad) for s in SPLITS if s in chosen}
    stop_on_errors(defects, skip_bad)
    classes, splits = with_same_classes(splits)
    return Objects('COCO', splits, classes, notes)


def may_be_coco(path: Path) -> bool:
    """Whether a JSON file has lists of images or annotations, by a look at its text.

    The annotations of captions, panoptic segments and labelme are none.
    """
    text = path.read_bytes()
    if not text.strip():
        return True  # an error later
    if b'"shapes"' in text and b'"imagePath"' in text:
        raise UserError(
            f'{path} is a file of labelme; convert the folder to COCO, for example with '
            'labelme2coco'
        )
    if b'"segments_info"' in text or b'"caption"' in text:
        return False
    if split_of(path.name) == 'test' and b'"annotations"' not in text:
        return False  # COCO's image_info_test
    return b'"images"' in text or b'"annotations"' in text


def the_instances(paths: list[str]) -> str:
    """The file with boxes and masks among those of a split."""
    instances = [path for path in paths if 'instances' in words(PurePosixPath(path).name)]
    found = instances if len(instances) == 1 else paths
    if len(found) > 1:
        raise UserError(
            f'there must be one COCO file for each of train, val and test, and its name or folder '
            f'must say which; got {", ".join(found[:3])}'
        )
    return found[0]


def coco_split(files: Files, name: str, split: str, defects: Defects, skip_bad: bool) -> Split:
    path = files.root / name
    content = read_coco(path)
    names = [image.get('file_name') for image in content['images']]
    folder = folder_of_images(files, [n for n in names if isinstance(n, str)], split)
    renamed = {}
    for image in content['images']:
        given = image.get('file_name')
        if isinstance(given, str) and not (folder / given).is_file():
            found = files.find_image(given, split)
            if found:
                renamed[given] = found
    if renamed:  # relative to the root then, for all images
        prefix = folder.relative_to(files.root)
        for image in content['images']:
            given = image.get('file_name')
            if isinstance(given, str):
                image['file_name'] = renamed.get(given, (prefix / given).as_posix())
        folder = files.root
    checked = check_coco(path, folder, seconds=0, content=content)
    errors = [problem for problem in checked.problems if problem.is_error]
    for problem in errors:
        for item in problem.items:
            defects.error(problem.kind, f'{item} ({name})')
    if errors and skip_bad:
        with TemporaryDirectory() as temporary:
            checked.write_clean(Path(temporary, 'clean.json'))
            content = read_coco(Path(temporary, 'clean.json'))
    return Split(content, folder, None if renamed or errors else path)


def folder_of_images(files: Files, names: Sequence[str], split: str) -> Path:
    """The folder that the most of some images' names are relative to."""
    rng = np.random.default_rng(SEED)
    sample = names if len(names) < 200 else [names[i] for i in rng.choice(len(names), 200)]
    votes = Counter()
    for name in sample:
        for path in files.images_by_stem.get(comparable(PurePosixPath(name).stem), ()):
            if path == name or path.endswith(f'/{name}'):
                votes[path.removesuffix(name)] += 1
    if not votes:
        return files.root
    best = max(votes, key=lambda f: (votes[f], split_of(f + 'x') == split, -f.count('/')))
    return files.root / best


def with_same_classes(splits: dict[str, Split]) -> tuple[list[str], dict[str, Split]]:
    """The classes of all splits, and the splits with the same categories in the same order.

    A category that has no objects and is the super-category of the others is none (Roboflow).
    """
    used = {a.get('category_id') for s in splits.values() for a in s.content['annotations']}
    parents = {
        c.get('supercategory')
        for s in splits.values()
        for c in s.content['categories']
        if c.get('supercategory') != c['name']
    }

    def listed(split: Split) -> list[str]:
        return [
            c['name']
            for c in split.content['categories']
            if c['name'] not in parents or c['id'] in used
        ]

    classes = list(dict.fromkeys(name for split in splits.values() for name in listed(split)))
    for key, split in splits.items():
        if listed(split) == classes:
            continue
        number = {
            c['id']: classes.index(c['name']) + 1
            for c in split.content['categories']
            if c['name'] in classes
        }
        annotations = [
            {**a, 'category_id': number.get(a['category_id'])}
            for a in split.content['annotations']
            if a.get('category_id') in number
        ]
        content = {
            **split.content, 'annotations': annotations, 'categories': categories_of(classes)
        }  # fmt: skip
        splits[key] = Split(content, split.folder)
    return classes, splits


def categories_of(classes: Sequence[str]) -> list[dict]:
    return [{'id': i, 'name': name} for i, name in enumerate(classes, 1)]


# YOLO


def read_yolo(files: Files, defects: Defects, skip_bad: bool) -> Optional[Objects]:
    settings, path = yolo_settings(files)
    images = yolo_lists(files, settings, path) if path else yolo_folders(files)
    if not images:
        return None
    labels = {name: yolo_labels(files.root, name) for names in images.values() for name in names}
    boxes_only = 'kpt_shape' in settings  # what follows a box are keypoints
    parsed = {
        image: yolo_objects(files.root / label, boxes_only, label, defects) if label else []
        for image, label in labels.items()
    }
    highest = max((c for objects in parsed.values() for c, _, _ in objects or ()), default=-1)
    classes, notes = yolo_classes(files, settings, path, highest)
    warn_about_lonely(files, set(labels.values()), defects)
    splits = {}
    for split, names in images.items():
        sizes = sizes_of(files.root, names, defects)
        records = []
        for name in names:
            objects = parsed[name]
            if name not in sizes or objects is None:
                continue
            height, width = sizes[name]
            good = []
            for number, points, is_polygon in objects:
                if number >= len(classes):
                    defects.error(
                        f'objects of classes beyond the names, 0 to {len(classes) - 1}',
                        f'class {number} in {labels[name]}',
                    )
                    continue
                good.append((number, points * (width, height), is_polygon, False))
            records.append((name, sizes[name], good))
        splits[split] = Split(coco_content(records, classes), files.root)
    return Objects('YOLO', splits, classes, notes)


def yolo_settings(files: Files) -> tuple[dict, Optional[Path]]:
    """The content of data.yaml and its path; {} and None without one."""
    broken = None
    for name in sorted(files.with_suffix('.yaml', '.yml'), key=lambda n: (n.count('/'), n)):
        path = files.root / name
        try:
            settings = yaml.safe_load(path.read_text(encoding='utf-8-sig'))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            if path.stem in ('data', 'dataset'):
                broken = broken or UserError(f'{path} is not YAML: {one_line(error, 120)}')
            continue
        if isinstance(settings, dict) and settings.get('train'):
            return settings, path
    if broken:
        raise broken
    return {}, None


def yolo_lists(files: Files, settings: dict, path: Path) -> dict[str, list[str]]:
    """The images of each split, relative to the root, that data.yaml names."""
    base = path.parent / str(settings.get('path') or '')
    found = {}
    for split, keys in (('train', ['train']), ('val', ['val', 'valid']), ('test', ['test'])):
        names = []
        for entry in (e for key in keys for e in as_list(settings.get(key))):
            inside = re.sub(r'^(\.\./)+', '', str(entry))  # Roboflow writes ../ too many
            candidates = [base / str(entry), path.parent / str(entry), path.parent / inside]
            source = next((c for c in candidates if c.exists()), None)
            if source is None and split == 'test':
                continue
            if source is None:
                raise UserError(f'{path}: {split} is {entry}, which does not exist')
            names += yolo_images(source, base)
        if names:
            names = [Path(os.path.relpath(n, files.root)).as_posix() for n in names]
            found[split] = list(dict.fromkeys(names))
    if not found:
        raise UserError(f'{path} names no images')
    return found


def yolo_folders(files: Files) -> dict[str, list[str]]:
    """Without a data.yaml, the images of each split; of folders with labelled images only."""
    labelled = {
        PurePosixPath(name).parent for name in files.images if yolo_labels(files.root, name)
    }
    found = defaultdict(list)
    for name in files.images:
        if PurePosixPath(name).parent in labelled:
            found[split_of(name, folders_only=True) or 'train'].append(name)
    return {split: found[split] for split in SPLITS if split in found}


def yolo_images(source: Path, base: Path) -> list[Path]:
    """The images of a folder, or those that a text file lists."""
    if source.is_dir():
        names = sorted(walk(source))
        return [source / n for n in names if Path(n).suffix.lower() in IMAGE_SUFFIXES]
    lines = filter(None, map(str.strip, text_of(source).splitlines()))
    return [
        next((f / line for f in (source.parent, base) if (f / line).exists()), source.parent / line)
        for line in lines
    ]


def yolo_labels(root: Path, image: str) -> Optional[str]:
    """The label file of an image, both relative to the root, or None."""
    path = PurePosixPath(image).with_suffix('.txt')
    candidates = [
        PurePosixPath(*path.parts[:i], 'labels', *path.parts[i + 1 :])
        for i in reversed(range(len(path.parts) - 1))
        if path.parts[i].lower() in ('images', 'jpegimages', 'img', 'imgs')
    ]
    candidates += [path, path.parent / 'labels' / path.name]
    return next((c.as_posix() for c in candidates if (root / c).is_file()), None)


def yolo_objects(
    path: Path, boxes_only: bool, name: str, defects: Defects
) -> Optional[list[tuple[int, np.ndarray, bool]]]:
    """The class, the corners in shares of the image (N, 2), and whether they are a polygon, of
    each object; None if the file is not text."""
    objects = []
    try:
        lines = text_of(path).splitlines()
    except UserError:
        defects.error('label files that are not text', name)
        return None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = [float(value) for value in line.split()]
        except ValueError:
            values = []
        at = f'{name} line {number}'
        if boxes_only:
            values = values[:5]
        if not (len(values) == 5 or len(values) >= 7 and len(values) % 2) or (
            values[0] != int(values[0]) if math.isfinite(values[0]) else True
        ):
            defects.error('lines that are neither a class and a box nor a class and a polygon', at)
            continue
        if not all(map(math.isfinite, values)) or values[0] < 0:
            defects.error('lines with values that are negative classes or no numbers', at)
            continue
        is_polygon = len(values) > 5
        if is_polygon:
            points = np.reshape(values[1:], (-1, 2))
        else:
            x, y, w, h = values[1:]
            points = np.array([(x - w / 2, y - h / 2), (x + w / 2, y + h / 2)])
        if points.min() < -0.01 or points.max() > 1.01:
            defects.error('objects beyond the image; values must be shares of its size', at)
            continue
        points = points.clip(0, 1)
        if not (points.max(0) > points.min(0)).all():
            defects.error('objects without width or height', at)
            continue
        objects.append((int(values[0]), points, is_polygon))
    return objects


def yolo_classes(
    files: Files, settings: dict, path: Optional[Path], highest: int
) -> tuple[list[str], list[str]]:
    """The names of the classes, and notes about them."""
    names = settings.get('names')
    if isinstance(names, dict):
        with suppress(TypeError, ValueError):
            names = {int(key): str(name) for key, name in names.items()}
            count = max(names, default=-1) + 1
            return distinct([names.get(i, f'class_{i}') for i in range(count)]), []
        raise UserError(f'{path}: names must number the classes')
    if isinstance(names, list) and names:
        return distinct(list(map(str, names))), []
    if listed := named_classes(files):
        return listed, []
    declared = settings.get('nc')
    count = max(highest + 1, declared if isinstance(declared, int) else 0)
    if not count:
        raise UserError(f'{files.root} has no objects and no names of classes')
    return [f'class_{i}' for i in range(count)], [
        'no file names the classes; add a classes.txt with a name in each line and repeat this'
    ]


def named_classes(files: Files) -> list[str]:
    """The names in a classes.txt or a similar file; empty without one."""
    for name in sorted(files.names, key=lambda n: (n.count('/'), n)):
        if PurePosixPath(name).name in NAME_FILES:
            lines = [line.strip() for line in text_of(files.root / name).splitlines()]
            return distinct(list(filter(None, lines)))
    return []


def distinct(names: list[str]) -> list[str]:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f'two classes have the same name {repeated[0]!r}')
    return names


def warn_about_lonely(files: Files, used: set[Optional[str]], defects: Defects) -> None:
    """Report label files of no image."""
    for name in files.with_suffix('.txt'):
        if 'labels' in PurePosixPath(name).parts[:-1] and name not in used:
            if PurePosixPath(name).name not in NAME_FILES:
                defects.error('label files without an image', name)


# Pascal VOC


def read_voc(files: Files, defects: Defects, skip_bad: bool) -> Optional[Objects]:
    paths = files.with_suffix('.xml')
    if not paths:
        return None
    lists = image_sets(files, 'Main')
    parsed = {}  # by annotation file: image, size, objects
    for path in tqdm(paths, 'reading annotations', leave=False, delay=3):
        try:
            tree = ElementTree.parse(files.root / path).getroot()
        except (ElementTree.ParseError, ValueError, LookupError):
            defects.error('annotation files that are not complete XML', path)
            continue
        if tree.tag != 'annotation':
            continue
        split = split_of(path, folders_only=True)
        given = (tree.findtext('filename') or '').strip()
        suffix = PurePosixPath(given).suffix or '.jpg'
        named_alike = PurePosixPath(path).with_suffix(suffix).as_posix()
        image = files.find_image(named_alike, split, any_suffix=True)
        image = image or given and files.find_image(given, split)
        if not image:
            defects.error('annotation files without an image', path)
            continue
        parsed[path] = image, voc_objects(tree, path, defects)
    if not parsed and not defects.errors:
        return None
    if not parsed:
        raise UserError(f'{files.root}: none of {len(paths)} XML files is a complete annotation')
    zero_based = any(
        min(points[0]) < 1 for _, objects in parsed.values() for _, points, _ in objects
    )
    classes = sorted({name for _, objects in parsed.values() for name, _, _ in objects})
    if not classes:
        raise UserError(f'{files.root}: the XML files have no objects')
    sizes = sizes_of(files.root, [image for image, _ in parsed.values()], defects)
    records, unlisted = defaultdict(list), 0
    for path, (image, objects) in parsed.items():
        if image not in sizes:
            continue
        if lists:
            split = lists.get(comparable(PurePosixPath(path).stem))
        else:
            split = (
                split_of(path, folders_only=True) or split_of(image, folders_only=True) or 'train'
            )
        if split is None:
            unlisted += 1
            continue
        height, width = sizes[image]
        good = []
        for name, points, difficult in objects:
            # Pixels count from 1 in VOC, and the last one belongs to the box.
            points = points - ((0, 0) if zero_based else [(1, 1), (0, 0)])
            if (points[0] >= (width, height)).any() or (points[1] <= 0).any():
                defects.error('boxes outside their image', path)
                continue
            points = points.clip(0, (width, height))
            good.append((classes.index(name), points, False, difficult))
        records[split].append((image, sizes[image], good))
    splits = {s: Split(coco_content(records[s], classes), files.root) for s in SPLITS if records[s]}
    notes = [f'{unlisted} images are in no list of ImageSets/Main: left out'] if unlisted else []
    folders = {PurePosixPath(image).parent for image, _ in parsed.values()}
    beside = [name for name in files.images if PurePosixPath(name).parent in folders]
    alone = len(set(beside) - {image for image, _ in parsed.values()})
    notes += [f'{alone} images have no annotation file: left out'] if alone else []
    return Objects('Pascal VOC', splits, classes, notes)


def voc_objects(
    tree: ElementTree.Element, path: str, defects: Defects
) -> list[tuple[str, np.ndarray, bool]]:
    """The class, the corners (2, 2) in pixels, and whether it is difficult, of each object."""
    objects = []
    for element in tree.iter('object'):
        name = (element.findtext('name') or '').strip()
        box = element.find('bndbox')
        try:
            corners = [float(box.findtext(k)) for k in ('xmin', 'ymin', 'xmax', 'ymax')]
        except (AttributeError, TypeError, ValueError):
            defects.error('objects without a bndbox of 4 numbers', path)
            continue
        points = np.reshape(corners, (2, 2))
        if not name:
            defects.error('objects without a name', path)
        elif not np.isfinite(points).all() or not (points[1] > points[0]).all():
            defects.error('objects without width or height', path)
        else:
            objects.append((name, points, (element.findtext('difficult') or '').strip() == '1'))
    return objects


def image_sets(files: Files, kind: str) -> dict[str, str]:
    """The split of each name in the lists ImageSets/`kind`/train.txt, val.txt and so on."""
    listed = {}
    for split in ('trainval', 'train', 'val', 'test'):  # later ones are more precise
        for name in files.with_suffix('.txt'):
            if PurePosixPath(name).parts[-3:] == ('ImageSets', kind, f'{split}.txt'):
                for line in text_of(files.root / name).splitlines():
                    if line.strip():
                        listed[comparable(line.strip())] = split.replace('trainval', 'train')
    return listed


# Common


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding='utf-8-sig')
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from error
    except UnicodeDecodeError as error:
        raise UserError(f'{path} must be text in UTF-8: {one_line(error, 100)}') from error


def sizes_of(root: Path, names: Iterable[str], defects: Defects) -> dict[str, tuple[int, int]]:
    """The (height, width) of images, upright, from their headers."""
    names = list(dict.fromkeys(names))

    def size_or_problem(name: str) -> tuple[Optional[tuple[int, int]], str]:
        path = root / name
        if not path.is_file():
            return None, 'images that are missing'
        if not path.stat().st_size:
            return None, 'images that are empty files'
        try:
            with Image.open(path) as image:
                turned = image.getexif().get(0x0112) in (5, 6, 7, 8)
                return (image.size if turned else image.size[::-1]), ''
        except Exception:  # Pillow raises many kinds on a damaged file
            return None, 'images that are not complete images'

    found = {}
    with ThreadPoolExecutor(CHECKERS) as threads:
        results = threads.map(size_or_problem, names)
        progress = tqdm(results, 'reading sizes', len(names), leave=False, delay=3)
        for name, (size, problem) in zip(names, progress):
            if size is None:
                defects.error(problem, name)
            else:
                found[name] = size
    return found


def coco_content(
    records: Iterable[tuple[str, tuple[int, int], list]], classes: Sequence[str]
) -> dict[str, Any]:
    """The content of a COCO file.

    Args:
        records: for each image its name, its (height, width) and its objects, each with the number
            of its class, corners or polygon (N, 2) in pixels, whether they are a polygon, and
            whether the object is to be ignored.
        classes: names.
    """
    images, annotations = [], []
    for name, (height, width), objects in records:
        images.append({'id': len(images) + 1, 'file_name': name, 'width': width, 'height': height})
        for number, points, is_polygon, ignored in objects:
            low, high = points.min(0), points.max(0)
            box = [*low, *(high - low)]
            x, y = points.T
            area = 0.5 * abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) if is_polygon else 0
            annotation = {
                'id': len(annotations) + 1,
                'image_id': len(images),
                'category_id': number + 1,
                'bbox': rounded(box),
                'area': round(float(area or box[2] * box[3]), 2),
                'iscrowd': int(ignored),
            }
            if is_polygon:
                annotation['segmentation'] = [rounded(points.ravel())]
            annotations.append(annotation)
    return {'images': images, 'annotations': annotations, 'categories': categories_of(classes)}


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 2) for value in values]


def validation_part(count: int) -> np.ndarray:
    """Which of `count` training images become validation data where there are none, as a mask: a
    fifth of them, at most 2,000."""
    if count < 2:
        raise UserError('there must be at least 2 training images, one of them for validation')
    chosen = np.zeros(count, bool)
    part = min(max(count // 5, 1), 2000)
    chosen[np.random.default_rng(SEED).permutation(count)[:part]] = True
    return chosen


def divide(split: Split, chosen: np.ndarray) -> tuple[Split, Split]:
    """A split without and with the chosen images."""
    parts = []
    for mask in (~chosen, chosen):
        images = [image for image, inside in zip(split.content['images'], mask) if inside]
        ids = {image['id'] for image in images}
        annotations = [a for a in split.content['annotations'] if a['image_id'] in ids]
        content = {**split.content, 'images': images, 'annotations': annotations}
        parts.append(Split(content, split.folder))
    return parts[0], parts[1]


def stop_on_errors(defects: Defects, skip_bad: bool) -> None:
    """Print a line for each kind of error.

    Raises:
        UserError: there are errors, and what has them is not to be left out.
    """
    if not skip_bad and defects.errors:
        for problem in defects.problems():
            print(f'{"error" if problem.is_error else "warning"}: {problem}')
        raise UserError(
            'the data have the errors above; correct them, or leave out what has errors with '
            '--skip-bad'
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding='utf-8')
