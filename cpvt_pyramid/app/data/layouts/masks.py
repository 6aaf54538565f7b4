"""Segmentation masks: an image of the same size for each image, with a value or colour per class.

mmseg's data sets read masks whose names differ from their images' in a suffix alone, without checks
of values. So pairs are found and read here, and masks with other values than mmseg expects are
written as indices.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from PIL import Image

from ...images.formats import open_image
from ...images.label_maps import IGNORED, StoredLabels, read_label_map
from ...images.rasters import ReadError, first_band
from ...predictions.drawing import class_palette
from ...tooling.command import UserError
from .. import defects
from ..class_files import classes_from_files
from ..data import Color, Masks, Pair
from ..declared import declared_data
from ..defects import Defects, Kind
from ..description import Description, SplitPart
from ..files import (
    Folder,
    comparable_stem,
    join,
    lines_of,
    report_shared,
    stem_of,
    without_ending,
)
from ..folders import (
    IMAGE_WORDS,
    MASK_WORDS,
    OTHER_WORDS,
    SHOWN,
    Group,
    check_that_folders_are_apart,
    image_sets,
    is_mask_folder,
    key_of,
    settings_with_lists,
    words_in,
)
from ..images import Finding, Size, in_threads
from ..layout import Layout, Recognized, Undecided
from ..listing import Listing
from ..lists import images_of_part, listed_name
from ..splits import words_of

MOST_VALUES = 255
SHOWN_VALUES = 8


TAIL = re.compile(r'[ _.\-]([A-Za-z]+[A-Za-z0-9]*)$')  # the last word of a name
CITYSCAPES = (
    'road,sidewalk,building,wall,fence,pole,traffic light,traffic sign,vegetation,terrain,sky,'
    'person,rider,car,truck,bus,train,motorcycle,bicycle'
).split(',')
CITYSCAPES_IDS = 7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33
# Masks whose names tell what their values are, those for training first: the end of the name, the
# names of values, and what is ignored
KNOWN_ENDS: tuple[tuple[str, dict[int, str], list[int]], ...] = (
    ('labelTrainIds', dict(enumerate(CITYSCAPES)), []),
    (
        'labelIds',
        dict(zip(CITYSCAPES_IDS, CITYSCAPES)),
        [*(value for value in range(34) if value not in CITYSCAPES_IDS), IGNORED],
    ),
)


class PairedFolders(NamedTuple):
    """A folder of images and that of their masks, and what their names end with."""

    images: str
    masks: str
    image_suffix: str
    mask_suffix: str


def recognize_masks(listing: Listing) -> Optional[Recognized]:
    """A file that declares them, or folders of images and masks, or masks next to their images."""
    if listing.declared and 'masks_dir' in listing.declared.settings:
        return declared_data(listing, listing.declared)
    pairs = paired_folders(listing)
    if not pairs:
        return None
    groups = [Group(pair.images, pair.masks) for pair in pairs]
    lists = image_sets(listing, 'Segmentation')
    settings, notes = settings_with_lists(groups, lists, listing)
    check_that_folders_are_apart(settings, listing.image_folders)
    ends = {(pair.image_suffix, pair.mask_suffix) for pair in pairs}
    if len(ends) > 1:
        shown = ', '.join(f'{image!r} and {mask!r}' for image, mask in sorted(ends))
        raise Undecided(f'names of images and masks end in different ways, {shown}', settings)
    ((image_suffix, mask_suffix),) = ends
    suffixes = {'image_suffix': image_suffix, 'mask_suffix': mask_suffix}
    settings.update({key: suffix for key, suffix in suffixes.items() if suffix})
    used = {pair.images for pair in pairs} | {pair.masks for pair in pairs}
    for folder, names in listing.image_folders.items():
        if not is_mask_folder(folder) and not is_other_folder(folder):
            if folder not in used and not any(folder.startswith(f'{place}/') for place in used):
                notes.append(f'{folder} is left out, {len(names)} images: they have no masks')
    named, more = names_of_values(listing, mask_suffix)
    if not named:
        masks = [
            name
            for pair in pairs
            for name in listing.image_folders[pair.masks]
            if stem_of(name).endswith(comparable_stem(mask_suffix))
        ]
        raise Undecided(
            'no file names the values or colours of the masks',
            {**settings, **names_to_complete(listing.root, masks)},
        )
    return Recognized({**settings, **named}, notes + more)


def is_other_folder(folder: str) -> bool:
    return bool(words_in(folder) & OTHER_WORDS)


def paired_folders(listing: Listing) -> list[PairedFolders]:
    """The folders of images that have masks, in a folder whose path differs in words such as images
    and masks, or the only one; or if there are none, their own."""
    folders = {f: names for f, names in listing.image_folders.items() if not is_other_folder(f)}
    masks = [folder for folder in folders if is_mask_folder(folder)]
    images = [folder for folder in folders if not is_mask_folder(folder)]
    pairs = []
    for place in images:
        stems = set(map(stem_of, folders[place]))
        found = []
        for folder in masks:
            if key_of(folder) == key_of(place) or len(masks) == len(images) == 1:
                ends = shared_ends(stems, set(map(stem_of, folders[folder])))
                found += [PairedFolders(place, folder, *end) for end in ends]
        if len(found) > 1:
            shown = ', '.join(f'{pair.masks}/*{pair.mask_suffix}' for pair in found[:SHOWN])
            raise Undecided(
                f'the images in {place} have several masks, {shown}; an image has one, with a '
                'value for each class: merge files of one class each',
                {'train': place},
            )
        pairs += found
    if pairs:
        return pairs
    for place, names in listing.image_folders.items():
        stems = set(map(stem_of, names))
        own = {stem for stem in stems if is_mask_end(last_word(stem))}
        ends = [end for end in shared_ends(stems - own, own) if end[1]]
        if len(ends) == 1:
            pairs.append(PairedFolders(place, place, *ends[0]))
    return pairs


def last_word(stem: str) -> str:
    """The last word of a name, with what stands before it."""
    match = TAIL.search(stem)
    return match[0] if match else ''


def is_mask_end(end: str) -> bool:
    return end.strip(' _.-').lower() in MASK_WORDS or end == '_L'  # CamVid: a_L.png


def shared_ends(images: set[str], masks: set[str]) -> list[tuple[str, str]]:
    """What the names of images and masks end with after what they share: several if an image has
    several masks. Of masks whose names tell their values, those for training."""
    if images & masks:
        return [('', '')]
    image_ends = ['']
    every = {last_word(stem) for stem in images}
    if len(every) == 1 and words_of(next(iter(every))) <= IMAGE_WORDS | {'left', 'bit'}:
        image_ends += every
    found = set()
    for image_end in dict.fromkeys(image_ends):
        bases = {stem.removesuffix(image_end) for stem in images}
        for mask in masks:
            base = mask
            while base not in bases and last_word(base):
                base = base.removesuffix(last_word(base))
            if base in bases and not words_of(mask[len(base) :]) & OTHER_WORDS:
                found.add((image_end, mask[len(base) :]))
    for known, _, _ in KNOWN_ENDS:
        if trained := [pair for pair in found if pair[1].endswith(known)]:
            return trained
    shortest = min(found, key=lambda pair: len(pair[1]), default=('', ''))
    if shortest[1] and all(pair[1].endswith(shortest[1]) for pair in found):
        return [shortest]  # longer ones belong to images that are missing
    return sorted(found)


def names_of_values(listing: Listing, mask_suffix: str) -> tuple[dict[str, Any], list[str]]:
    """The settings with the names of the values or colours of masks, if a file or their own names
    tell them; with notes."""
    for end, values, ignored in KNOWN_ENDS:
        if mask_suffix.endswith(f'_{end}') and 'gt' in mask_suffix:
            return {'names': values, **({'ignored': ignored} if ignored else {})}, []
    classes = classes_from_files(listing.root, listing.names, for_masks=True)
    return classes.settings, classes.notes


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


def names_to_complete(root: Path, masks: Sequence[str]) -> dict[str, Any]:
    """The setting that a person completes: a name for each value of masks, or for the most frequent
    colours; nothing if no mask can be read."""
    in_colors = any(name.lower().endswith('.gif') for name in masks)  # with palettes of their own

    def read(name: str) -> Union[Values, Kind]:
        return values_in(root / name, in_colors)

    readings = in_threads(read, masks, 'reading segmentation masks')
    known = [values for values in readings if isinstance(values, Values)]
    in_colors = in_colors or all(values.is_color for values in known)
    counts: Counter = Counter()
    for values in known:
        if in_colors or not values.is_color:
            counts.update(values.counts)
    if in_colors and counts:
        common = [code for code, _ in counts.most_common(SHOWN_VALUES)]
        return {'colors': {f'class_{n}': [*unpacked(code)] for n, code in enumerate(common)}}
    if {*counts} != {0, IGNORED}:
        del counts[IGNORED]
    if not 0 < len(counts) < MOST_VALUES:
        return {}
    return {'names': {value: f'class_{value}' for value in sorted(counts)}}


LAYOUT = Layout(
    what='an image of labels or colours for each image',
    holds='masks',
    recognize=recognize_masks,
    read=read_masks,
    example={
        'train': 'FOLDER',
        'val': 'FOLDER',
        'annotations': {'train': 'FOLDER', 'val': 'FOLDER'},
        'names': {0: 'FIRST', 1: 'SECOND'},
    },
)
