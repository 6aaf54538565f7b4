"""Images and label maps for semantic segmentation.

Any pair of folders such as images/ and masks/, train/ and train_labels/, ADE20K's, Cityscapes' and
Pascal VOC's folders, or images and maps in one folder with names such as a.jpg and a_mask.png. The
values of a map are indices of classes, or gray values or colours that stand for them.
"""

import csv
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional

import numpy as np
from mmengine.registry import TRANSFORMS
from PIL import Image

from ..config.parts import dataset_class, kind_of
from ..predict.drawing import Color, class_palette
from ..predict.openmmlab.rasters import labels_of_raster
from ..tooling.command import UserError
from ..tooling.images import open_image
from .defects import Checked, Defects
from .folder import (
    IMAGE_WORDS,
    LABEL_WORDS,
    SPLITS,
    WORD,
    Files,
    ImageSets,
    NotRecognized,
    comparable,
    distinct,
    named_classes,
    text_of,
    words,
)
from .images import ALL_IMAGES, Effort, Finding, Size, check_each, in_threads, inspect, sizes_of

IGNORED_LABEL = 255
OTHER_WORDS = {'object', 'instance', 'instances', 'panoptic'}  # of maps of instances
OTHER_TAILS = ('_gtFine_color', '_gtFine_instanceIds', '_gtCoarse_color', '_gtCoarse_instanceIds')
# Words in which the folders of images and label maps may differ.
SKIPPED = LABEL_WORDS | IMAGE_WORDS | set.union(*SPLITS.values()) | {'class'}
TAIL = re.compile(r'[ _.\-]([A-Za-z]+[A-Za-z0-9]*)$')  # the last word of a name
MOST_COLORS = 255
JPEG = 'segmentation masks that are JPEGs, whose compression changes labels; save them as PNG'
SOFT = (
    'segmentation masks with other values along the edges of objects, as after a resize or '
    'anti-aliasing; each class must have one value'
)
SOFT_GRAYS, SOFT_COLORS = 8, 32  # this many values along edges are certainly no classes
SOLID = 0.05  # least share of the pixels of a class that equal the pixels around them


class Pair(NamedTuple):
    """An image and its label map, relative to the folder of the data."""

    image: str
    label: str


class Values(NamedTuple):
    """What occurs in a label map."""

    counts: dict[int, int]  # pixels by value, or by 0xRRGGBB
    solid: dict[int, int]  # those that equal the pixels around them; empty for few values
    is_color: bool
    palette: dict[int, Color]  # of its values, if it has one
    size: Size
    is_jpeg: bool


class LabelMaps(NamedTuple):
    """What was found in a folder with label maps."""

    layout: str  # for people
    classes: list[str]
    palette: list[Color]
    pixels: list[int]  # by class
    notes: list[str]  # what a person should know, one line each
    splits: dict[str, list[Pair]] = {}  # by train, val and test
    sizes: dict[str, Size] = {}  # of each image
    codes: Optional[list[int]] = None  # values that stand for 0, 1, ... in the files; None: these
    by_color: bool = False  # the codes are 0xRRGGBB
    reduce_zero_label: bool = False  # 0 is to be ignored and 1 is the first class
    by_name: dict[str, str] = {}  # the splits of the files and folders whose names say it
    ignored: float = 0  # share of the pixels


def find_label_maps(
    root: Path, defects: Defects, assigned: Optional[Mapping[str, str]] = None
) -> LabelMaps:
    """Read the label maps in a folder, without what `defects` collects; for `assigned`, see
    `Files`.

    Raises:
        UserError: there are none, or their classes cannot be told.
    """
    files = Files(root, assigned)
    splits, notes, by_name = find_pairs(files, defects)
    pairs = [pair for split in splits.values() for pair in split]
    if not pairs:
        raise UserError(f'{root}: no segmentation mask has the name of an image')
    values = values_of(root, [pair.label for pair in pairs], defects)
    sizes = sizes_of(root, [pair.image for pair in pairs], defects)
    for image, label in pairs:
        if image in sizes and label in values and sizes[image] != values[label].size:
            del values[label]
            defects.add('segmentation masks of another size than their image', image)
    names, colors = names_and_colors(files)
    if not colors:
        soft, is_certain = soft_maps(values)
        for label in soft:
            defects.add(SOFT, label, is_certain)
            if is_certain:
                del values[label]
    splits = {
        split: [pair for pair in listed if pair.label in values and pair.image in sizes]
        for split, listed in splits.items()
    }
    if not any(splits.values()):
        raise UserError(f'{root}: no pair of an image and a segmentation mask is without errors')
    warn_about_values(values, defects)
    found = interpreted(list(values.values()), names, colors, files)
    return found._replace(splits=splits, sizes=sizes, notes=notes + found.notes, by_name=by_name)


def interpreted(
    values: list[Values], names: list[str], colors: list[Color], files: Files
) -> LabelMaps:
    """The classes of label maps, without their files; `names` and `colors` are listed in a file."""
    in_color = any(found.is_color for found in values)
    in_palettes = {item for found in values for item in found.palette.items()}
    palette = dict(in_palettes)
    # If an index has several colours, the colours and not the indices are the classes.
    by_color = in_color or len(in_palettes) > len(palette) or bool(palette and colors)
    counts = Counter()
    for found in values:
        for value, count in found.counts.items():
            if by_color and not found.is_color:
                value = packed(found.palette.get(value, (value,) * 3))
            counts[value] += count
    is_gray = all(len(set(unpacked(code))) == 1 for code in counts)
    if by_color and is_gray and not (palette or colors):  # gray values in three channels
        by_color = False
        counts = Counter({code & 255: count for code, count in counts.items()})
    if len(counts) == 1:
        value = f'#{min(counts):06x}' if by_color else min(counts)
        raise UserError(
            f'all segmentation masks in {files.root} are {value} everywhere: no classes'
        )
    if not by_color and any(len(set(color)) > 1 for color in colors):
        colors = []  # names of indices, then
    if by_color or colors or not are_indices(counts, len(names)):
        interpretation = coded(counts, by_color, names, colors)
    else:
        is_ade = any(name.endswith('objectInfo150.txt') for name in files.names)
        interpretation = indexed(is_ade, counts, palette, names)
        if in_color:
            interpretation = interpretation._replace(codes=list(range(256)))
    ignored = 1 - sum(interpretation.pixels) / sum(counts.values())
    return interpretation._replace(ignored=ignored)


def soft_maps(values: dict[str, Values]) -> tuple[list[str], bool]:
    """The label maps with values that occur only along the edges between others, and whether these
    are certainly no classes."""
    grays, colors = {}, {}
    for name, found in values.items():
        if not found.is_color:
            grays[name] = found
        elif all(is_gray_code(code) for code in found.counts):
            grays[name] = found._replace(
                counts={code & 255: count for code, count in found.counts.items()},
                solid={code & 255: count for code, count in found.solid.items()},
            )
        else:
            colors[name] = found
    between, _ = thin_and_solid(grays.values())
    between -= {0, 255}
    thin, solid = thin_and_solid(colors.values())
    if max(between, default=0) > 127:
        soft = [name for name, found in grays.items() if between & {*found.counts}]
        return soft, len(between) >= SOFT_GRAYS
    if len(thin) >= SOFT_COLORS and len(thin) > 2 * len(solid):
        return [name for name, found in colors.items() if thin & {*found.counts}], True
    return [], False


def thin_and_solid(maps: Iterable[Values]) -> tuple[set[int], set[int]]:
    """The values of which hardly any pixel equals the pixels around it, and the others; of maps
    with several values."""
    counts: Counter = Counter()
    solid: Counter = Counter()
    for found in maps:
        if found.solid:
            counts.update(found.counts)
            solid.update(found.solid)
    thin = {value for value, count in counts.items() if solid[value] < SOLID * count}
    return thin, {*counts} - thin


def is_gray_code(code: int) -> bool:
    return len({*unpacked(code)}) == 1


def warn_about_values(values: dict[str, Values], defects: Defects) -> None:
    """Warn about label maps that are 0 everywhere, and about masks of 0 and 255 among those of 0
    and 1, whose foreground would be ignored."""
    for name, found in values.items():
        if {*found.counts} == {0}:
            defects.warn('segmentation masks that are 0 everywhere', name)
    masks = {name: {*found.counts} for name, found in values.items()}
    full = [name for name, found in masks.items() if found in ({0, 255}, {255})]
    ones = [name for name, found in masks.items() if found in ({0, 1}, {1})]
    others = [name for name, found in masks.items() if not found <= {0, 1} | {255}]
    both = [name for name, found in masks.items() if {1, 255} <= found]
    if full and ones and not others and not both:
        kind = 'segmentation masks of 0 and 255, whose 255 is ignored because others are of 0 and 1'
        for name in full:
            defects.warn(kind, name)
    in_color = {code for found in values.values() if found.is_color for code in found.counts}
    for name, found in values.items():
        grays = {packed((value,) * 3) for value in found.counts if value <= 255}
        if in_color and not found.is_color and not found.palette and not grays <= in_color:
            defects.warn('segmentation masks in gray among others in colours', name)


def coded(counts: Counter, by_color: bool, names: list[str], colors: list[Color]) -> LabelMaps:
    """Label maps whose colours or gray values stand for classes, without their files."""
    codes = sorted(counts)
    notes = []
    if colors:
        codes = [packed(color) if by_color else color[0] for color in colors]
        unknown = set(counts) - set(codes)
        if unknown:
            share = sum(counts[code] for code in unknown) / sum(counts.values())
            notes = [f'{len(unknown)} colours ({share:.1%} of the pixels) are in no list: ignored']
    elif codes == [0, 255] and not names:
        names = ['background', 'foreground']
    elif not names:
        kind = 'color_{:06x}' if by_color else 'gray_{}'
        names = [kind.format(code) if code else 'background' for code in codes]
    if len(codes) > MOST_COLORS:
        kind = 'colours' if by_color else 'values'
        raise UserError(
            f'the segmentation masks have {len(codes)} {kind}; there can be {MOST_COLORS}'
        )
    if len(names) != len(codes):
        kind = 'colours' if by_color else 'values'
        shown = ', '.join(f'#{code:06x}' if by_color else str(code) for code in codes[:8])
        shown += ' ...' if len(codes) > 8 else ''
        raise UserError(
            f'the segmentation masks have {len(codes)} {kind} ({shown}), but '
            f'{len(names)} classes have names; each needs one, also the background'
        )
    palette = [unpacked(code) for code in codes] if by_color else class_palette(names)
    layout = f'images and segmentation masks in {"colours" if by_color else "gray"}'
    pixels = [counts[code] for code in codes]
    return LabelMaps(layout, names, palette, pixels, notes, codes=codes, by_color=by_color)


def indexed(
    is_ade: bool, counts: Counter, palette: dict[int, Color], names: list[str]
) -> LabelMaps:
    """Label maps of class indices, without their files."""
    notes = []
    highest = max((value for value in counts if value != IGNORED_LABEL), default=0)
    reduce_zero_label = is_ade or 0 not in counts and len(names) in (0, highest)
    if reduce_zero_label:
        notes.append('label 0 is ignored, and 1 is the first class')
    first = int(reduce_zero_label)
    if not names:
        names = [f'class_{i}' for i in range(highest + 1 - first)]
        notes.append('no file names the classes; edit the config, or add a classes.txt')
    if highest - first >= len(names):
        raise UserError(
            f'the segmentation masks have the labels {first} to {highest}, but {len(names)} '
            'classes have names; each needs one, also the background'
        )
    if len(names) > MOST_COLORS:
        raise UserError(f'{len(names)} classes have names; there can be {MOST_COLORS}')
    labels = range(first, first + len(names))
    colors = [palette[label] for label in labels if label in palette]
    if len(set(colors)) < len(names):
        colors = class_palette(names)
    layout = 'ADE20K' if is_ade else 'images and segmentation masks of indices'
    pixels = [counts[label] for label in labels]
    return LabelMaps(layout, names, colors, pixels, notes, reduce_zero_label=reduce_zero_label)


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
    if not labels:
        raise NotRecognized(files.root)
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


def values_of(root: Path, names: Sequence[str], defects: Defects) -> dict[str, Values]:
    """What occurs in each label map."""
    readings = in_threads(lambda name: values_in(root / name), names, 'reading segmentation masks')
    found = {}
    for name, values in zip(names, readings):
        if values and values.is_jpeg:
            defects.warn(JPEG, name)
        if values is None:
            defects.add('segmentation masks that are not complete images', name)
        elif len(values.counts) > 16 * MOST_COLORS:
            defects.add('segmentation masks that have thousands of colours', name)
        else:
            found[name] = values
    return found


def values_in(path: Path) -> Optional[Values]:
    """What occurs in a label map; None if it is not a complete image."""
    try:
        with open_image(path) as image:
            is_color = image.mode not in ('1', 'L', 'P') and not image.mode.startswith('I')
            pixels = packed_pixels(image) if is_color else np.asarray(image)
            colors = np.reshape(image.getpalette('RGB') if image.mode == 'P' else [], (-1, 3))
            is_jpeg = image.format == 'JPEG'
    except Exception:  # Pillow raises many kinds on a truncated file
        return None
    counts = counted(pixels)
    solid = {}
    if len(counts) > 2 and (is_color or {0, IGNORED_LABEL} <= counts.keys()):
        solid = counted(pixels[1:-1, 1:-1][equal_their_neighbours(pixels)])
    palette = {value: tuple(colors[value].tolist()) for value in counts if value < len(colors)}
    return Values(counts, solid, is_color, palette, pixels.shape, is_jpeg)


def counted(pixels: np.ndarray) -> dict[int, int]:
    """How often each value occurs."""
    if pixels.itemsize == 1:  # seven times as fast
        by_value = np.bincount(pixels.ravel())
        values = np.flatnonzero(by_value)
        counts = by_value[values]
    else:
        values, counts = np.unique(pixels, return_counts=True)
    return dict(zip(map(int, values), counts.tolist()))


def equal_their_neighbours(pixels: np.ndarray) -> np.ndarray:
    """(H - 2, W - 2): whether pixels that are not at the border equal the four next to them."""
    inner = pixels[1:-1, 1:-1]
    equal = (inner == pixels[:-2, 1:-1]) & (inner == pixels[2:, 1:-1])
    return equal & (inner == pixels[1:-1, :-2]) & (inner == pixels[1:-1, 2:])


def packed_pixels(image: Image.Image) -> np.ndarray:
    """(H, W) 0xRRGGBB."""
    return np.asarray(image.convert('RGB')) @ np.array([1 << 16, 1 << 8, 1])


def packed(color: Color) -> int:
    return color[0] << 16 | color[1] << 8 | color[2]


def unpacked(code: int) -> Color:
    return code >> 16, code >> 8 & 255, code & 255


def are_indices(counts: Counter, names: int) -> bool:
    """Whether values are class indices, and not gray values such as 0 and 255 for two classes."""
    values = set(counts) - {IGNORED_LABEL}
    if max(counts) > IGNORED_LABEL or values <= {0} and IGNORED_LABEL in counts:
        return False
    return max(values, default=0) <= (names or 3 * len(values) + 10)


def names_and_colors(files: Files) -> tuple[list[str], list[Color]]:
    """The names of the classes, and their colours, from a file that lists them; or nothing."""
    for name in files.names:
        path = files.root / name
        if path.name == 'objectInfo150.txt':
            table = csv.DictReader(io.StringIO(text_of(path)), delimiter='\t')
            names = [row.get('Name') or '' for row in table]
            if not all(names):
                raise UserError(f'{path} must have a column Name')
            return distinct([name.split(',')[0].strip() for name in names]), []
        if path.name == 'labelmap.txt':  # CVAT: name:r,g,b:parts:actions
            rows = [line.split(':') for line in text_of(path).splitlines() if line[:1] != '#']
            return listed_colors(path, [[r[0], *r[1].split(',')] for r in rows if len(r) > 1])
        if path.suffix == '.csv':
            head, *rows = list(csv.reader(io.StringIO(text_of(path)))) or [[]]
            head = [cell.strip().lower() for cell in head]
            if head[1:4] == ['r', 'g', 'b']:  # name, r, g, b
                return listed_colors(path, rows)
            if head == ['pixel value', 'class']:  # Roboflow
                return distinct([row[1].strip() for row in rows if len(row) > 1]), []
    return named_classes(files), []


def listed_colors(path: Path, rows: Sequence[Sequence[str]]) -> tuple[list[str], list[Color]]:
    rows = [row for row in rows if row]
    try:
        colors = [(int(red), int(green), int(blue)) for _, red, green, blue, *_ in rows]
    except ValueError:
        colors = [(-1, -1, -1)]
    if not all(0 <= value <= 255 for color in colors for value in color):
        raise UserError(f'{path} must list a name and three numbers, 0 to 255, for each class')
    return distinct([row[0].strip() for row in rows]), colors


def write_indices(source: Path, target: Path, found: LabelMaps) -> None:
    """Write a label map as one of class indices, with its palette."""
    with open_image(source) as image:
        if found.by_color:
            pixels = packed_pixels(image)
        else:  # gray values, perhaps in three channels
            pixels = np.asarray(image)
            pixels = pixels[..., 0] if pixels.ndim == 3 else pixels
    codes = np.array(found.codes or range(256))
    order = codes.argsort()
    place = codes[order].searchsorted(pixels).clip(0, len(codes) - 1)
    labels = np.where(codes[order][place] == pixels, order[place], IGNORED_LABEL)
    image = Image.fromarray(labels.astype(np.uint8))
    image.putpalette([value for color in found.palette for value in color])
    image.save(target, 'PNG', bits=8)  # by default only as many as the palette needs


# Checks


def check_label_maps(dataset: dict, scope: str, effort: Effort = ALL_IMAGES) -> Checked:
    """Check the images and label maps of a `BaseSegDataset`."""
    built = built_dataset(dataset, scope)
    defects = Defects()
    images = Path(built.data_prefix.get('img_path') or '')
    listed = built.load_data_list() if images.is_dir() else []
    if not listed:
        others = sorted({p.suffix for p in images.rglob('*') if p.is_file()})[:6]
        found = f'; it has {", ".join(others)}' if others else ''
        raise UserError(f'{images} has no images with the suffix {built.img_suffix}{found}')
    classes = built.METAINFO.get('classes') or built.metainfo.get('classes') or ()
    valid_labels = (len(classes) or IGNORED_LABEL) + bool(built.reduce_zero_label)
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
    is_good, decoded = check_each(listed, findings, names, effort, defects)
    kept = [name.removesuffix(built.img_suffix) for name, good in zip(names, is_good) if good]
    if decoded == len(listed) and len(seen) == 1:
        defects.warn('segmentation masks with one label only', f'{seen.pop()} in all')
    return Checked(defects.problems(), len(listed), decoded, kept)


def label_findings(
    path: Path, size: Optional[Size], valid_labels: int
) -> tuple[set[int], list[Finding]]:
    """The labels in a label map for an image of a size, but for the ignored one, and what is wrong
    with it; labels must be less than `valid_labels`."""
    found = []
    values = None
    is_gray = True
    try:
        with path.open('rb') as file, open_image(file) as image:
            if image.format == 'JPEG':
                found.append((JPEG, False))
            is_gray = image.mode in ('1', 'L', 'P', 'I', 'I;16')
            if is_gray:
                values = np.asarray(image)
    except Exception:  # Pillow raises many kinds on a truncated file, or on a very large one
        values = labels_of_raster(path)
    labels: set[int] = set()
    if not is_gray:
        problem = 'segmentation masks with several channels instead of one of class indices'
    elif values is None:
        problem = 'segmentation masks that are not complete images'
    elif size and values.shape != size:
        problem = 'segmentation masks of another size than their image'
    else:
        labels = {*map(int, np.unique(values))} - {IGNORED_LABEL}
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
    return dataset_class(dataset, scope)(**config)
