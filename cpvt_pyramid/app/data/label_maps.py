"""Images and label maps for semantic segmentation.

Any pair of folders such as images/ and masks/, train/ and train_labels/, ADE20K's, Cityscapes' and
Pascal VOC's folders, or images and maps in one folder with names such as a.jpg and a_mask.png. The
values of a map are indices of classes; or, if a file lists the colours of the classes, colours.
"""

import csv
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from mmengine.registry import TRANSFORMS
from PIL import Image

from ..config.parts import classes_of, dataset_class, kind_of
from ..images.label_maps import IGNORED, StoredLabels, read_label_map
from ..images.rasters import ReadError
from ..predictions.drawing import Color, class_palette
from ..tooling.command import UserError, one_line
from .defects import Checked, Defects
from .folder import (
    SPLITS,
    WORD,
    Files,
    ImageSets,
    comparable,
    distinct,
    named_classes,
    text_of,
    words,
)
from .images import ALL_IMAGES, Effort, Finding, Size, check_each, in_threads, inspect, sizes_of

MOST_CLASSES = 255
# Words in the names of folders and files with label maps, and with images.
LABEL_WORDS = set(
    'mask masks label labels annotation annotations annot ann anns gt groundtruth ground truth '
    'seg segmentation segmentations segmap semantic semseg labelids labeltrainids gtfine gtcoarse '
    'lbl target targets'.split()
)
IMAGE_WORDS = set(
    'image images img imgs jpeg rgb sat photo photos leftimg8bit input inputs picture '
    'pictures'.split()
)
OTHER_WORDS = {'object', 'instance', 'instances', 'panoptic'}  # of maps of instances
OTHER_TAILS = ('_gtFine_color', '_gtFine_instanceIds', '_gtCoarse_color', '_gtCoarse_instanceIds')
# Words in which the folders of images and label maps may differ.
SKIPPED = LABEL_WORDS | IMAGE_WORDS | set.union(*SPLITS.values()) | {'class'}
TAIL = re.compile(r'[ _.\-]([A-Za-z]+[A-Za-z0-9]*)$')  # the last word of a name
TABLE = 'class_dict.csv, with the line name,r,g,b and one for each class'
SHOWN_COLORS = 8
LONGEST_HEAD = 1000  # bytes of the first line of a table of classes
JPEG = 'segmentation masks that are JPEGs, whose compression changes labels; save them as PNG'


class Pair(NamedTuple):
    """An image and its label map, relative to the folder of the data."""

    image: str
    label: str


class Values(NamedTuple):
    """What occurs in a label map."""

    counts: dict[int, int]  # pixels by value, or by 0xRRGGBB
    is_color: bool  # the file has several channels
    palette: dict[int, Color]  # of its values, if it has one
    size: Size
    is_jpeg: bool


class ClassTable(NamedTuple):
    """What a file says about the classes: their names, and their colours if it lists them."""

    names: list[str]
    colors: list[Color]
    is_ade: bool = False


class LabelMaps(NamedTuple):
    """What was found in a folder with label maps."""

    layout: str  # for people
    classes: list[str]
    palette: list[Color]
    pixels: list[int]  # by class
    notes: list[str]  # what a person should know, one line each
    splits: dict[str, list[Pair]]  # by train, val and test
    sizes: dict[str, Size]  # of each image
    by_name: dict[str, str]  # the splits of the files and folders whose names say it
    ignored: float  # share of the pixels
    codes: Optional[list[int]] = None  # 0xRRGGBB of each class; None: the values are indices
    reduce_zero_label: bool = False  # 0 is to be ignored and 1 is the first class


def has_label_maps(files: Files) -> bool:
    """Whether there are files that are label maps by their names or folders."""
    return any(kind == 'label' for kind, _ in kinds_and_keys(files.images, files))


def read_label_maps(files: Files, defects: Defects) -> LabelMaps:
    """Read the label maps in a folder, without what `defects` collects.

    Raises:
        UserError: no pair is without errors, or nothing says what the values mean.
    """
    root = files.root
    splits, notes, by_name = find_pairs(files, defects)
    pairs = [pair for split in splits.values() for pair in split]
    if not pairs:
        raise UserError(f'{root}: no segmentation mask has the name of an image')
    table = class_table(files)
    values = values_of(root, [pair.label for pair in pairs], bool(table.colors), defects)
    sizes = sizes_of(root, [pair.image for pair in pairs], defects)
    for image, label in pairs:
        if image in sizes and label in values and sizes[image] != values[label].size:
            del values[label]
            defects.add('segmentation masks of another size than their image', image)
    splits = {
        split: [pair for pair in listed if pair.label in values and pair.image in sizes]
        for split, listed in splits.items()
    }
    if not any(splits.values()):
        raise UserError(f'{root}: no pair of an image and a segmentation mask is without errors')
    counts: Counter = Counter()
    for found in values.values():
        counts.update(found.counts)
    if len(counts) == 1:
        value = f'#{min(counts):06x}' if table.colors else min(counts)
        raise UserError(f'all segmentation masks in {root} are {value} everywhere: no classes')
    if table.colors:
        warn_about_unknown_colors(values, table.colors, defects)
        maps = maps_in_colors(table, counts)
    else:
        check_indices(root, values, counts, table)
        warn_about_values(values, defects)
        maps = maps_of_indices(table, counts)
    return maps._replace(splits=splits, sizes=sizes, notes=notes + maps.notes, by_name=by_name)


def maps_in_colors(table: ClassTable, counts: Counter) -> LabelMaps:
    """Label maps whose colours are in a list, without their files."""
    codes = [packed(color) for color in table.colors]
    pixels = [counts[code] for code in codes]
    return LabelMaps(
        layout='images and segmentation masks in colours',
        classes=table.names,
        palette=table.colors,
        pixels=pixels,
        notes=[],
        splits={},
        sizes={},
        by_name={},
        ignored=1 - sum(pixels) / sum(counts.values()),
        codes=codes,
    )


def maps_of_indices(table: ClassTable, counts: Counter) -> LabelMaps:
    """Label maps of class indices, without their files."""
    notes = []
    names = table.names
    if table.is_ade:
        notes.append('label 0 is ignored, and 1 is the first class')
    if not names:
        highest = max(value for value in counts if value != IGNORED)
        names = [f'class_{i}' for i in range(highest + 1)]
        notes.append('no file names the classes; edit the config, or add a classes.txt')
    first = int(table.is_ade)
    pixels = [counts[label] for label in range(first, first + len(names))]
    return LabelMaps(
        layout='ADE20K' if table.is_ade else 'images and segmentation masks of indices',
        classes=names,
        palette=class_palette(names),
        pixels=pixels,
        notes=notes,
        splits={},
        sizes={},
        by_name={},
        ignored=1 - sum(pixels) / sum(counts.values()),
        reduce_zero_label=table.is_ade,
    )


def check_indices(
    root: Path, values: dict[str, Values], counts: Counter, table: ClassTable
) -> None:
    """Raise a UserError if the values of label maps cannot be the indices of classes, or if it is
    not certain that they are."""
    colored = [name for name, found in values.items() if found.is_color]
    if colored:
        colors: Counter = Counter()
        for name in colored:
            colors.update(values[name].counts)
        shown = ' '.join('{},{},{}'.format(*unpacked(code)) for code, _ in colors.most_common(8))
        more = f' and {len(colors) - SHOWN_COLORS} more' if len(colors) > SHOWN_COLORS else ''
        raise UserError(
            f'{root}: segmentation masks are in colours, and no file says of which classes: add '
            f'a {TABLE}. The colours are {shown}{more}'
        )
    every = {item for found in values.values() for item in found.palette.items()}
    if len(every) > len({value for value, _ in every}):
        raise UserError(
            f'{root}: the palettes of the segmentation masks differ, as those of GIFs do, so that '
            f'their values are no indices: add a {TABLE}'
        )
    found = sorted({*counts} - {IGNORED})
    highest = max(found, default=0)
    if highest > IGNORED:
        raise UserError(f'{root}: segmentation masks have values up to {highest}, above 255')
    if found == [0]:
        raise UserError(
            f'{root}: segmentation masks are 0 and 255 only, and 255 is ignored: save them as 0 '
            f'and 1, or add a {TABLE}, for example foreground,255,255,255'
        )
    names = table.names
    if len(names) > MOST_CLASSES:
        raise UserError(f'{len(names)} classes have names; there can be {MOST_CLASSES}')
    if names and highest >= len(names) + table.is_ade:
        raise UserError(
            f'the segmentation masks have the labels {found[0]} to {highest}, but {len(names)} '
            'classes have names; each needs one, also the background'
        )
    if not names and found != [*range(highest + 1)]:
        shown = ' '.join(map(str, found[:SHOWN_COLORS]))
        more = ' ...' if len(found) > SHOWN_COLORS else ''
        raise UserError(
            f'{root}: segmentation masks have the values {shown}{more}, and no file says of which '
            'classes: add a classes.txt with the names of 0, 1, 2 and so on if they are indices, '
            f'or else a {TABLE}'
        )


def warn_about_values(values: dict[str, Values], defects: Defects) -> None:
    """Warn about label maps that are 0 everywhere, or 0 and 255, which is ignored."""
    for name, found in values.items():
        if {*found.counts} == {0}:
            defects.warn('segmentation masks that are 0 everywhere', name)
        elif {*found.counts} <= {0, IGNORED}:
            defects.warn('segmentation masks of 0 and 255 only, whose 255 is ignored', name)


def warn_about_unknown_colors(
    values: dict[str, Values], colors: Sequence[Color], defects: Defects
) -> None:
    known = {*map(packed, colors)}
    for name, found in values.items():
        unknown = sum(count for code, count in found.counts.items() if code not in known)
        if unknown:
            share = unknown / sum(found.counts.values())
            kind = 'segmentation masks with colours that are in no list: ignored'
            defects.warn(kind, f'{name} ({share:.1%} of its pixels)')


# Pairs of files


def find_pairs(
    files: Files, defects: Defects
) -> tuple[dict[str, list[Pair]], list[str], dict[str, str]]:
    """The images with their label maps of each split, notes, and the splits of the folders whose
    names say it."""
    lists = ImageSets(files, 'Segmentation')
    images, labels, notes = {}, {}, []
    # Of Cityscapes' label maps of an image, labelTrainIds goes first.
    names = sorted(files.images, key=lambda name: 'labelTrainIds' not in name)
    for name, (kind, key) in zip(names, kinds_and_keys(names, files)):
        if kind == 'other':
            continue
        known = images if kind == 'image' else labels
        other = known.setdefault(key, name)
        if other != name and 'labelTrainIds' not in other:
            files_of_kind = 'images' if kind == 'image' else 'segmentation masks'
            what = f'{files_of_kind} with the name of another'
            defects.add(what, f'{name} ({other})', is_error=kind == 'image')
    match_by_name(images, labels)
    paired = {key: Pair(images[key], labels[key]) for key in labels if key in images}
    by_name = {}
    if lists.splits:
        split_of_key = {key: lists.split(pair.image, key[-1]) for key, pair in paired.items()}
        lists.warn('a segmentation mask', defects)
        left = list(split_of_key.values()).count(None)
        if left:
            notes.append(f'{left} images are in no list of ImageSets/Segmentation: left out')
    else:
        split_of_key = {key: key[0] or 'train' for key in paired}
        by_name = files.splits_by_name(sorted({os.path.dirname(p.image) for p in paired.values()}))
        folders = {PurePosixPath(pair.image).parent for pair in paired.values()}
        for name in sorted(images[key] for key in images.keys() - labels.keys()):
            is_lost = PurePosixPath(name).parent in folders
            defects.add('images without a segmentation mask', name, is_error=is_lost)
    for name in sorted(labels[key] for key in labels.keys() - images.keys()):
        defects.warn('segmentation masks without an image', name)
    splits = defaultdict(list)
    for key, pair in paired.items():
        splits[split_of_key[key]].append(pair)
    found = {split: sorted(splits[split]) for split in SPLITS if split in splits}
    return found, notes, by_name


class Parts(NamedTuple):
    """What the path of a file with pixels says."""

    by_folder: Optional[str]  # image, label or other, if a folder says it
    by_name: Optional[str]  # the same of the last words of its name
    folders: tuple[str, ...]  # without words such as masks
    stem: str
    short: str  # the stem without those words

    def key(self, split: Optional[str], shared: set[str]) -> tuple[Optional[str], ...]:
        """What an image and its label map share; `shared` are whole names that both have."""
        return split, *self.folders, self.stem if self.stem in shared else self.short


def kinds_and_keys(
    names: Sequence[str], files: Files
) -> list[tuple[str, tuple[Optional[str], ...]]]:
    """Whether each file is an image, a label map or something else, and what it shares with its
    partner: the split, the folders, and the name.

    If there are folders for images and others for label maps, they tell which is which; otherwise,
    the last words of the names go first. A file with the name of one in a folder for label maps is
    their image.
    """
    parts = [parts_of(name) for name in names]
    folders_decide = {'image', 'label'} <= {part.by_folder for part in parts}
    labelled = {part.stem for part in parts if part.by_folder == 'label'}
    kinds = []
    for part in parts:
        if 'other' in (part.by_folder, part.by_name):
            kind = 'other'
        elif part.by_folder is None and part.stem in labelled:
            kind = 'image'
        elif folders_decide:
            kind = part.by_folder or part.by_name or 'image'
        else:
            kind = part.by_name or part.by_folder or 'image'
        kinds.append(kind)
    stems = {'image': set(), 'label': set(), 'other': set()}
    for part, kind in zip(parts, kinds):
        stems[kind].add(part.stem)
    shared = stems['image'] & stems['label']
    splits = [files.split_of(os.path.dirname(name)) for name in names]
    keys = [part.key(split, shared) for part, split in zip(parts, splits)]
    return list(zip(kinds, keys))


def parts_of(name: str) -> Parts:
    path = PurePosixPath(name)
    short = path.stem
    by_name = None
    if short.endswith(OTHER_TAILS):
        by_name = 'other'
    while match := TAIL.search(short):
        tail = match[1].lower()
        if tail not in LABEL_WORDS | IMAGE_WORDS and match[1] != 'L':  # CamVid: a_L.png
            break
        by_name = by_name or ('image' if tail in IMAGE_WORDS else 'label')
        short = short[: match.start()]
    by_folder = None
    folders = []
    for part in reversed(path.parts[:-1]):
        found = {part.lower(), *words(part)}
        if found & OTHER_WORDS:
            by_folder = 'other'
        elif found & (LABEL_WORDS | IMAGE_WORDS):
            by_folder = by_folder or ('label' if found & LABEL_WORDS else 'image')
        if part.lower() in SKIPPED:
            continue
        kept = WORD.sub(lambda match: '' if match[0].lower() in SKIPPED else match[0], part)
        kept = kept.strip(' _.-')
        if kept:
            folders.append(comparable(kept))
    return Parts(by_folder, by_name, tuple(folders), comparable(path.stem), comparable(short))


def match_by_name(images: dict[tuple, str], labels: dict[tuple, str]) -> None:
    """Give label maps in other folders than their images the key of the only image with the same
    split and name."""
    alone = defaultdict(list)
    for key in images.keys() - labels.keys():
        alone[key[0], key[-1]].append(key)
    for key in sorted(labels.keys() - images.keys(), key=str):
        if len(alone[key[0], key[-1]]) == 1:
            labels[alone[key[0], key[-1]].pop()] = labels.pop(key)


# Values and names


def values_of(
    root: Path, names: Sequence[str], in_colors: bool, defects: Defects
) -> dict[str, Values]:
    """What occurs in each label map: colours, or the values of its one channel."""

    def read(name: str) -> Union[Values, str]:
        return values_in(root / name, in_colors)

    found = {}
    for name, values in zip(names, in_threads(read, names, 'reading segmentation masks')):
        if isinstance(values, str):
            defects.add(values, name)
            continue
        if values.is_jpeg:
            defects.warn(JPEG, name)
        found[name] = values
    return found


def values_in(path: Path, in_colors: bool) -> Union[Values, str]:
    """What occurs in a label map, or the kind of problem that it has."""
    stored = labels_in(path)
    if isinstance(stored, str):
        return stored
    pixels = stored.color_codes() if in_colors or stored.is_color else stored.values
    counts = counted(pixels)
    palette = {
        value: tuple(stored.palette[value].tolist())
        for value in counts
        if 0 <= value < len(stored.palette)
    }
    return Values(counts, stored.is_color, palette, pixels.shape, stored.is_jpeg)


def labels_in(path: Path) -> Union[StoredLabels, str]:
    """A label map of whole numbers or colours, or the kind of problem that it has."""
    try:
        stored = read_label_map(path)
    except ReadError:
        return 'segmentation masks that are not complete images'
    if not stored.is_whole:
        return 'segmentation masks of fractions; write them as whole numbers of 8 bits'
    return stored


def counted(pixels: np.ndarray) -> dict[int, int]:
    """How often each value occurs."""
    if pixels.dtype == np.uint8:  # seven times as fast
        by_value = np.bincount(pixels.ravel())
        values = np.flatnonzero(by_value)
        counts = by_value[values]
    else:
        values, counts = np.unique(pixels, return_counts=True)
    return dict(zip(map(int, values), counts.tolist()))


def packed(color: Color) -> int:
    return color[0] << 16 | color[1] << 8 | color[2]


def unpacked(code: int) -> Color:
    return code >> 16, code >> 8 & 255, code & 255


def class_table(files: Files) -> ClassTable:
    """The names of the classes, and their colours, from a file that lists them; or nothing."""
    for name in files.names:
        path = files.root / name
        if path.name == 'objectInfo150.txt':
            head, *rows = csv_rows(path, '\t') or [[]]
            names = [dict(zip(head, row)).get('Name', '') for row in rows if row]
            if not names or not all(names):
                raise UserError(f'{path} must have a column Name')
            first_names = distinct([name.split(',')[0].strip() for name in names])
            return ClassTable(first_names, [], is_ade=True)
        if path.name == 'labelmap.txt':  # CVAT: name:r,g,b:parts:actions
            rows = [line.split(':') for line in text_of(path).splitlines() if line[:1] != '#']
            return listed_colors(path, [[r[0], *r[1].split(',')] for r in rows if len(r) > 1])
        if path.suffix == '.csv':
            head = csv_head(path)
            if head[1:4] == ['r', 'g', 'b']:  # name, r, g, b
                return listed_colors(path, csv_rows(path)[1:])
            if head == ['pixel value', 'class']:  # Roboflow
                rows = csv_rows(path)[1:]
                return ClassTable(distinct([row[1].strip() for row in rows if len(row) > 1]), [])
    return ClassTable(named_classes(files), [])


def csv_head(path: Path) -> list[str]:
    """The first line of a table, in small letters. The table can be of anything, in any encoding,
    with cells of any length."""
    with path.open('rb') as file:
        lines = file.read(LONGEST_HEAD).decode('utf-8-sig', 'replace').splitlines() or ['']
    return [cell.strip(' "').lower() for cell in lines[0].split(',')]


def csv_rows(path: Path, delimiter: str = ',') -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text_of(path)), delimiter=delimiter))
    except csv.Error as error:
        raise UserError(f'{path} must be a table of classes: {error}') from error


def listed_colors(path: Path, rows: Sequence[Sequence[str]]) -> ClassTable:
    rows = [row for row in rows if row]
    try:
        colors = [(int(red), int(green), int(blue)) for _, red, green, blue, *_ in rows]
    except ValueError:
        colors = [(-1, -1, -1)]
    if not rows or not all(0 <= value <= 255 for color in colors for value in color):
        raise UserError(f'{path} must list a name and three numbers, 0 to 255, for each class')
    if len({*colors}) < len(colors):
        raise UserError(f'{path} has two classes of one colour')
    if len(colors) > MOST_CLASSES:
        raise UserError(f'{path} has {len(colors)} classes; there can be {MOST_CLASSES}')
    return ClassTable(distinct([row[0].strip() for row in rows]), colors)


def write_indices(source: Path, target: Path, found: LabelMaps) -> None:
    """Write a label map as one of class indices, with its palette."""
    stored = read_label_map(source)
    labels = stored.values
    if found.codes is not None:
        codes = np.array(found.codes)
        order = codes.argsort()
        pixels = stored.color_codes()
        place = codes[order].searchsorted(pixels).clip(0, len(codes) - 1)
        labels = np.where(codes[order][place] == pixels, order[place], IGNORED)
    indices = Image.fromarray(labels.astype(np.uint8))
    indices.putpalette([value for color in found.palette for value in color])
    indices.save(target, 'PNG', bits=8)  # by default only as many as the palette needs


# Checks


def check_label_maps(dataset: dict, scope: str, effort: Effort = ALL_IMAGES) -> Checked:
    """Check the images and label maps of a `BaseSegDataset`."""
    declared = classes_of(dataset, scope)
    built = built_dataset(dataset, scope)
    defects = Defects()
    images = Path(built.data_prefix.get('img_path') or '')
    listed = built.load_data_list() if images.is_dir() else []
    if not listed:
        others = sorted({p.suffix for p in images.rglob('*') if p.is_file()})[:6]
        found = f'; it has {", ".join(others)}' if others else ''
        raise UserError(f'{images} has no images with the suffix {built.img_suffix}{found}')
    classes = built.METAINFO.get('classes') or declared
    valid_labels = (len(classes) or IGNORED) + bool(built.reduce_zero_label)
    seen = set()

    def findings(info: dict, in_time: bool) -> list[Finding]:
        size, found = inspect(Path(info['img_path']), effort, in_time)
        label_map = info.get('seg_map_path')
        if label_map and not Path(label_map).is_file():
            found.append(('images without a segmentation mask', True))
        elif label_map and in_time:
            labels, problems = label_findings(Path(label_map), size, valid_labels)
            found += problems
            seen.update(labels)
        return found

    names = [Path(info['img_path']).relative_to(images).as_posix() for info in listed]
    _, decoded = check_each(listed, findings, names, effort, defects)
    if decoded == len(listed) and len(seen) == 1:
        defects.warn('segmentation masks with one label only', f'{seen.pop()} in all')
    return Checked(defects.problems(), len(listed), decoded)


def label_findings(
    path: Path, size: Optional[Size], valid_labels: int
) -> tuple[set[int], list[Finding]]:
    """The labels in a label map for an image of a size, but for the ignored one, and what is wrong
    with it; labels must be less than `valid_labels`."""
    stored = labels_in(path)
    if isinstance(stored, str):
        return set(), [(stored, True)]
    found = [(JPEG, False)] if stored.is_jpeg else []
    labels: set[int] = set()
    if stored.is_color:
        problem = 'segmentation masks with several channels instead of one of class indices'
    elif size and stored.values.shape != size:
        problem = 'segmentation masks of another size than their image'
    else:
        labels = {*map(int, np.unique(stored.values))} - {IGNORED}
        if max(labels, default=0) < valid_labels:
            return labels, found
        problem = f'segmentation masks with labels beyond the classes, 0 to {valid_labels - 1}'
    return labels, [*found, (problem, True)]


def is_segmentation(dataset: dict, scope: str) -> bool:
    return 'BaseSegDataset' in {base.__name__ for base in dataset_class(dataset, scope).__mro__}


def label_map_reader(dataset: dict, scope: str) -> tuple[dict[Path, dict], Any]:
    """What a data set lists for each image, and a function that reads a label map for the test."""
    if not is_segmentation(dataset, scope):
        raise UserError(f'the test data must be a BaseSegDataset, got {kind_of(dataset)}')
    built = built_dataset(dataset, scope)
    default = {'type': 'LoadAnnotations', 'reduce_zero_label': built.reduce_zero_label}
    steps = [step for step in dataset.pipeline if kind_of(step).endswith('LoadAnnotations')]
    with TRANSFORMS.switch_scope_and_registry(scope) as registry:
        load = registry.build(steps[0] if steps else default)

    def read(info: dict) -> np.ndarray:
        return load({**info, 'seg_fields': []})['gt_seg_map']

    return {Path(info['img_path']).resolve(): info for info in built.load_data_list()}, read


def built_dataset(dataset: dict, scope: str) -> Any:
    """A data set without its pipeline, whose files are not listed yet."""
    config = {k: v for k, v in dataset.items() if k not in ('type', 'pipeline')}
    config |= {'pipeline': [], 'lazy_init': True, 'serialize_data': False}
    try:
        return dataset_class(dataset, scope)(**config)
    except Exception as error:  # any class of the user
        raise UserError(f'{kind_of(dataset)} cannot be built: {one_line(error)}') from error
