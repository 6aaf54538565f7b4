"""The values of segmentation masks: what occurs in a file, what is wrong with it, and masks of
class indices."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from PIL import Image

from ..images.label_maps import IGNORED, StoredLabels, read_label_map
from ..images.rasters import ReadError, first_band
from ..predictions.drawing import class_palette
from ..tooling.command import one_line
from . import defects
from .data import Color, DataSet, MaskValues, packed, unpacked
from .description import Description
from .images import Finding, Size, in_threads

MOST_VALUES = 255
SHOWN_VALUES = 8


def values_of_classes(description: Description) -> MaskValues:
    """What a description says about the pixels of masks."""
    names = description.names or {}
    classes = list(names)
    if description.colors:
        classes = [packed(description.colors[name]) for name in names.values()]
    is_colored = description.colors is not None
    return MaskValues(classes, description.ignored, is_colored, description.declares_255)


class Values(NamedTuple):
    """What occurs in a mask."""

    counts: dict[int, int]  # pixels by value, or by 0xRRGGBB
    is_color: bool  # the file has several channels
    size: Size
    is_jpeg: bool


def values_in(path: Path, in_colors: bool, by_pillow: bool = True) -> Union[Values, Finding]:
    """What occurs in a mask, or what is wrong with its file.

    Args:
        path: its file.
        in_colors: count colours, also of a file with a palette.
        by_pillow: read it with Pillow, as mmseg does; otherwise with GDAL, as
            `LoadTileAnnotations` does.
    """
    try:
        stored = read_label_map(path) if by_pillow else StoredLabels(first_band(path))
    except ReadError as error:
        return defects.TORN_MASK, f': {one_line(error)}'
    if not stored.is_whole:
        return defects.TORN_MASK, ': its values are fractions'
    pixels = stored.color_codes() if in_colors or stored.is_color else stored.values
    return Values(counted(pixels), stored.is_color, pixels.shape, stored.is_jpeg)


def counted(pixels: np.ndarray) -> dict[int, int]:
    """How often each value occurs."""
    if pixels.dtype == np.uint8:  # seven times as fast
        by_value = np.bincount(pixels.ravel())
        values = np.flatnonzero(by_value)
        counts = by_value[values]
    else:
        values, counts = np.unique(pixels, return_counts=True)
    return dict(zip(map(int, values), counts.tolist()))


def value_findings(values: Values, masks: MaskValues, size: Optional[Size]) -> list[Finding]:
    """What is wrong with a mask of a data set, whose image has a size."""
    found: list[Finding] = []
    if values.is_jpeg:
        found.append((defects.JPEG_MASK, ''))
    if size and values.size != size:
        found.append((defects.MASK_OF_OTHER_SIZE, ''))
    if masks.are_colors:
        return found + color_findings(values, masks)
    if values.is_color:
        return [*found, (defects.CHANNELS, '')]
    unnamed = sorted({*values.counts} - {*masks.classes} - {*masks.ignored})
    if unnamed:
        shown = ' '.join(map(str, unnamed[:SHOWN_VALUES]))
        found.append((defects.UNNAMED_VALUE, f' ({shown})'))
    elif {*values.counts} <= {0, *masks.ignored}:
        found.append((defects.EMPTY_MASK, ''))
    return found


def color_findings(values: Values, masks: MaskValues) -> list[Finding]:
    """What is wrong with the colours of a mask."""
    known = {*masks.classes}
    unknown = sum(count for code, count in values.counts.items() if code not in known)
    if not unknown:
        return []
    share = unknown / sum(values.counts.values())
    if share == 1:
        return [(defects.EMPTY_MASK, f' ({shown_colors(values.counts)})')]
    return [(defects.UNKNOWN_COLOR, f' ({share:.1%} of its pixels)')]


def shown_colors(counts: dict[int, int]) -> str:
    """The most frequent colours, as r,g,b."""
    common = [code for code, _ in Counter(counts).most_common(SHOWN_VALUES)]
    more = ' ...' if len(counts) > SHOWN_VALUES else ''
    return ' '.join('{},{},{}'.format(*unpacked(code)) for code in common) + more


# Masks as mmseg reads them


def zero_is_ignored(masks: MaskValues) -> bool:
    """Whether mmseg's `reduce_zero_label` reads the values: 0 is ignored, and 1 the first class."""
    is_from_1 = masks.classes == [*range(1, len(masks.classes) + 1)]
    ignored = {*masks.ignored}
    return not masks.are_colors and is_from_1 and 0 in ignored and ignored <= {0, IGNORED}


def are_indices(masks: MaskValues) -> bool:
    """Whether the values are those that mmseg reads: labels from 0, and 255 is ignored."""
    is_from_0 = masks.classes == [*range(len(masks.classes))]
    return not masks.are_colors and is_from_0 and {*masks.ignored} <= {IGNORED}


def palette_of(data: DataSet) -> Sequence[Color]:
    """The colours in which classes are shown: those of the masks, if they have any."""
    return data.masks and data.masks.colors or class_palette(data.classes)


def indices_of(source: Path, masks: MaskValues) -> np.ndarray:
    """The index of the class (H, W) of each pixel of a mask, or `IGNORED`."""
    stored = read_label_map(source)
    pixels = stored.color_codes() if masks.are_colors else stored.values
    values = np.array(masks.classes)
    order = values.argsort()
    place = values[order].searchsorted(pixels).clip(0, len(values) - 1)
    return np.where(values[order][place] == pixels, order[place], IGNORED)


def write_indices(source: Path, target: Path, masks: MaskValues, palette: Sequence[Color]) -> None:
    """Write a mask as one of class indices."""
    indices = Image.fromarray(indices_of(source, masks).astype(np.uint8))
    indices.putpalette([value for color in palette for value in color])
    indices.save(target, 'PNG', bits=8)  # by default only as many as the palette needs


# Names for values


def names_to_complete(root: Path, masks: Sequence[str]) -> dict[str, Any]:
    """The setting that a person completes: a name for each value of masks, or for the most frequent
    colours; nothing if no mask can be read."""
    in_colors = any(name.lower().endswith('.gif') for name in masks)  # with palettes of their own

    def read(name: str) -> Union[Values, Finding]:
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
