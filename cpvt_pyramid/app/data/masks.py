"""Segmentation masks: an image of the same size for each image, with a value or colour per class.

mmseg's data sets read masks whose names differ from their images' in a suffix alone, without checks
of values. So pairs are found and read here, and masks with other values than mmseg expects are
written as indices.
"""

import posixpath
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

import numpy as np
from PIL import Image

from ..images.formats import open_image
from ..images.label_maps import IGNORED, StoredLabels, read_label_map
from ..images.rasters import ReadError, first_band
from ..predictions.drawing import class_palette
from ..tooling.command import UserError
from . import defects
from .data import Color, Masks, Pair
from .defects import Defects, Kind
from .description import Description, SplitPart
from .files import Folder, comparable_stem, join, lines_of, report_shared, without_ending
from .images import Finding, Size, in_threads
from .lists import images_of_part, listed_name

MOST_VALUES = 255
SHOWN_VALUES = 8


def read_masks(description: Description, found: Defects) -> Masks:
    """The pairs of a description. Masks without an image are reported, and images without one get
    None, which `check.py` reports."""
    folder = Folder(description.root)
    if not description.names:
        raise UserError(f'{description.source}: names must name the values of the masks')
    if len(description.names) > MOST_VALUES:
        count = len(description.names)
        raise UserError(f'{description.source}: names has {count} classes; there can be 255')
    splits = {}
    for split, parts in description.splits.items():
        pairs = []
        for part in parts:
            pairs += pairs_of_part(folder, part, description, found)
        splits[split] = pairs
    folder.report(found)
    pairs = [pair for of_split in splits.values() for pair in of_split]
    report_shared(pairs, found)
    if not any(pair.mask for pair in pairs):
        raise UserError(f'{description.source}: no image has a segmentation mask of its name')
    return Masks(description, splits, list(description.names.values()), [])


def pairs_of_part(
    folder: Folder, part: SplitPart, description: Description, found: Defects
) -> list[Pair]:
    """The images of a part with their masks."""
    listed = listed_pairs(folder, part, description)
    if listed is not None:
        return listed
    images = images_of_part(folder, part, description, found)
    if shares_folder(part, description):
        images = [name for name in images if not is_mask_name(name, description)]
    pairs = [Pair(image, mask_for(folder, image, part, description)) for image in images]
    used = {pair.mask for pair in pairs}
    for files in folder.ambiguous.values():  # are reported as such
        used |= {*files}
    if part.listed is None and part.annotations and (description.root / part.images).is_dir():
        for name in folder.images_below(part.annotations):
            if is_mask_name(name, description) and name not in used:
                if not shares_folder(part, description) or description.mask_suffix:
                    found.add(defects.LONELY_MASK, name)
    return pairs


def shares_folder(part: SplitPart, description: Description) -> bool:
    """Whether masks are in the folder of their images, and differ in their suffix."""
    return part.annotations == part.images and bool(description.mask_suffix)


def is_mask_name(name: str, description: Description) -> bool:
    return comparable_stem(without_ending(name)).endswith(comparable_stem(description.mask_suffix))


def listed_pairs(folder: Folder, part: SplitPart, description: Description) -> Optional[list[Pair]]:
    """The pairs in a text file with an image, a tab and its mask in each line; None of others."""
    path = description.root / part.images
    if not path.is_file():
        return None
    lines = lines_of(path)
    if not any('\t' in line for line in lines):
        return None
    pairs = []
    for number, line in enumerate(lines, 1):
        names = line.split('\t')
        if len(names) != 2:
            raise UserError(f'{path}: line {number} must be an image, a tab and its mask')
        image, mask = (listed_name(name.strip(), part.images, description) for name in names)
        pairs.append(Pair(folder.find(image) or image, folder.find(mask)))
    return pairs


def mask_for(
    folder: Folder, image: str, part: SplitPart, description: Description
) -> Optional[str]:
    """The mask of an image: in the folder that the description names, in the subfolder that the
    image has in its own; or with `masks_dir` in place of the last `images` of its path."""
    stem = without_ending(image)
    base = posixpath.basename(stem).removesuffix(description.image_suffix)
    name = posixpath.join(posixpath.dirname(stem), base + description.mask_suffix)
    if part.annotations is not None:
        return folder.find_image(join(part.annotations, posixpath.relpath(name, part.images)))
    parts = name.split('/')
    for index in reversed(range(len(parts) - 1)):
        if parts[index].lower() == 'images':
            return folder.find_image(
                '/'.join([*parts[:index], description.masks_dir or 'masks', *parts[index + 1 :]])
            )
    return None


# Values


class Values(NamedTuple):
    """What occurs in a mask."""

    counts: dict[int, int]  # pixels by value, or by 0xRRGGBB
    is_color: bool  # the file has several channels
    is_gray: bool  # one channel without a palette
    size: Size
    is_jpeg: bool


def stored_labels(path: Path, by_pillow: bool = True) -> Union[StoredLabels, Kind]:
    """A mask of whole numbers or colours, or the kind of defect that it has.

    Args:
        path: its file.
        by_pillow: read it with Pillow, as mmseg does; otherwise with GDAL, as
            `LoadTileAnnotations` does.
    """
    try:
        stored = read_label_map(path) if by_pillow else StoredLabels(first_band(path))
    except ReadError:
        return defects.LARGE_MASK if is_too_large(path) else defects.TORN_MASK
    return stored if stored.is_whole else defects.FRACTIONS


def is_too_large(path: Path) -> bool:
    """Whether Pillow refuses an image for its size alone."""
    try:
        with open_image(path):
            return False
    except Image.DecompressionBombError:
        return True
    except Exception:  # Pillow raises many kinds on a damaged file
        return False


def values_in(path: Path, in_colors: bool, by_pillow: bool = True) -> Union[Values, Kind]:
    """What occurs in a mask, or the kind of defect that it has; see `stored_labels`."""
    stored = stored_labels(path, by_pillow)
    if isinstance(stored, Kind):
        return stored
    pixels = stored.color_codes() if in_colors or stored.is_color else stored.values
    is_gray = not stored.is_color and not len(stored.palette)
    return Values(counted(pixels), stored.is_color, is_gray, pixels.shape, stored.is_jpeg)


def counted(pixels: np.ndarray) -> dict[int, int]:
    """How often each value occurs."""
    if pixels.dtype == np.uint8:  # seven times as fast
        by_value = np.bincount(pixels.ravel())
        values = np.flatnonzero(by_value)
        counts = by_value[values]
    else:
        values, counts = np.unique(pixels, return_counts=True)
    return dict(zip(map(int, values), counts.tolist()))


def value_findings(values: Values, data: Masks, size: Optional[Size]) -> list[Finding]:
    """What is wrong with a mask of a data set, whose image has a size."""
    found: list[Finding] = []
    description = data.description
    if values.is_jpeg:
        found.append((defects.JPEG_MASK, ''))
    if size and values.size != size:
        found.append((defects.MASK_OF_OTHER_SIZE, ''))
    if description.colors:
        return found + color_findings(values, data)
    if values.is_color:
        return [*found, (defects.CHANNELS, '')]
    unnamed = sorted({*values.counts} - {*data.values} - {*description.ignored})
    if unnamed:
        shown = ' '.join(map(str, unnamed[:SHOWN_VALUES]))
        found.append((defects.UNNAMED_VALUE, f' ({shown})'))
    elif {*values.counts} <= {*description.ignored}:
        found.append((defects.NOTHING_LABELLED, ''))
    elif {*values.counts} == {0}:
        found.append((defects.ALL_0, ''))
    return found


def color_findings(values: Values, data: Masks) -> list[Finding]:
    """What is wrong with the colours of a mask."""
    known = {*data.values}
    unknown = sum(count for code, count in values.counts.items() if code not in known)
    if not unknown:
        return []
    share = unknown / sum(values.counts.values())
    if share == 1:
        return [(defects.NOTHING_LABELLED, f' ({shown_colors(values.counts)})')]
    return [(defects.UNKNOWN_COLOR, f' ({share:.1%} of its pixels)')]


def shown_colors(counts: dict[int, int]) -> str:
    """The most frequent colours, as r,g,b."""
    common = [code for code, _ in Counter(counts).most_common(SHOWN_VALUES)]
    more = ' ...' if len(counts) > SHOWN_VALUES else ''
    return ' '.join('{},{},{}'.format(*unpacked(code)) for code in common) + more


def unpacked(code: int) -> Color:
    return code >> 16, code >> 8 & 255, code & 255


# Masks as mmseg reads them


def zero_is_ignored(data: Masks) -> bool:
    """Whether mmseg's `reduce_zero_label` reads the values: 0 is ignored, and 1 the first class."""
    ignored = {*data.description.ignored}
    is_from_1 = data.values == [*range(1, len(data.classes) + 1)]
    return not data.description.colors and is_from_1 and 0 in ignored and ignored <= {0, IGNORED}


def are_indices(data: Masks) -> bool:
    """Whether the values are those that mmseg reads: labels from 0, and 255 is ignored."""
    is_from_0 = data.values == [*range(len(data.classes))]
    is_ordinary = {*data.description.ignored} <= {IGNORED}
    return not data.description.colors and is_from_0 and is_ordinary


def palette_of(data: Masks) -> Sequence[Color]:
    """The colours in which classes are shown: those of the masks, if they have any."""
    colors = data.description.colors
    return [colors[name] for name in data.classes] if colors else class_palette(data.classes)


def indices_of(source: Path, data: Masks) -> np.ndarray:
    """The index of the class (H, W) of each pixel of a mask, or `IGNORED`."""
    stored = read_label_map(source)
    pixels = stored.color_codes() if data.description.colors else stored.values
    values = np.array(data.values)
    order = values.argsort()
    place = values[order].searchsorted(pixels).clip(0, len(values) - 1)
    return np.where(values[order][place] == pixels, order[place], IGNORED)


def write_indices(source: Path, target: Path, data: Masks) -> None:
    """Write a mask as one of class indices, with a palette."""
    indices = Image.fromarray(indices_of(source, data).astype(np.uint8))
    indices.putpalette([value for color in palette_of(data) for value in color])
    indices.save(target, 'PNG', bits=8)  # by default only as many as the palette needs


# Names for values


def values_of_masks(root: Path, masks: Sequence[str]) -> list[int]:
    """The values that occur in masks, for a question about their names; without damaged masks and
    those in colours."""

    def read(name: str) -> Union[Values, Kind]:
        return values_in(root / name, in_colors=False)

    every: set[int] = set()
    for values in in_threads(read, masks, 'reading segmentation masks'):
        if isinstance(values, Values) and not values.is_color:
            every.update(values.counts)
    return sorted(every)


def colors_of_masks(root: Path, masks: Sequence[str]) -> list[Color]:
    """The most frequent colours that occur in masks, for a question about their classes."""
    counts: Counter = Counter()
    for values in in_threads(
        lambda name: values_in(root / name, in_colors=True), masks, 'reading segmentation masks'
    ):
        if isinstance(values, Values):
            counts.update(values.counts)
    return [unpacked(code) for code, _ in counts.most_common(SHOWN_VALUES)]
