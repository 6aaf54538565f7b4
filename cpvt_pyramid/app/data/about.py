"""Lines about a data set, for people."""

from collections import Counter
from collections.abc import Iterator, Sequence

from ..predictions.average_precision import COUNTED as COUNTED_IN_AP
from ..tooling.report import amount
from .data import DataSet, MaskValues, Split, objects_by_class

SHOWN_CLASSES, SHOWN_COUNTS = 12, 8


def lines_about_data(data: DataSet) -> list[str]:
    """Lines about the classes, images and annotations of a data set, and its notes."""
    names = ', '.join(data.classes[:SHOWN_CLASSES])
    more = ' ...' if len(data.classes) > SHOWN_CLASSES else ''
    lines = [f'{amount(len(data.classes), "class", "classes")}: {names}{more}']
    for key, split in data.splits.items():
        if data.masks is None:
            lines += lines_about_objects(key, split, data.classes)
        else:
            without = ' without masks' if split.images and not split.is_annotated else ''
            lines.append(f'{key}: {amount(len(split.images), "image")}{without}')
    if data.masks is not None:
        pixels = sum((split.pixels for split in data.splits.values()), Counter())
        if pixels:
            lines.append(line_about_pixels(pixels, data.masks, data.classes))
    return [*lines, *(f'note: {note}' for note in data.notes)]


def lines_about_objects(key: str, split: Split, classes: Sequence[str]) -> Iterator[str]:
    images = split.images
    every = split.objects
    objects = [item for item in every if not item.is_ignored]
    common = objects_by_class(objects, classes).most_common()
    counts = [sum(not item.is_ignored for item in image.objects) for image in images]
    empty = counts.count(0)
    line = f'{key}: {amount(len(images), "image")}'
    if objects and empty:
        line += f' ({empty} without objects)'
    line += f', {amount(len(objects), "object")}' if objects else ' without objects'
    if common:
        line += ': ' + ', '.join(f'{name} {count}' for name, count in common[:SHOWN_COUNTS])
    if len(common) > SHOWN_COUNTS:
        line += ' ... {} {}'.format(*common[-1])
    if len(objects) < len(every):
        line += f'; {len(every) - len(objects)} more are ignored'
    yield line
    most = max(counts, default=0)
    if key != 'train' and most > COUNTED_IN_AP:
        yield (
            f"note: an image of the {key} data has {most} objects, and COCO's AP counts "
            f'{COUNTED_IN_AP} detections of an image; consider tiles of it'
        )


def line_about_pixels(counts: Counter, masks: MaskValues, classes: Sequence[str]) -> str:
    """A line about the shares of classes, and of what is ignored."""
    pixels = {name: counts[value] for name, value in zip(classes, masks.classes)}
    labelled = sum(pixels.values())
    common = Counter(pixels).most_common(SHOWN_COUNTS)
    shares = [f'{name} {count / max(labelled, 1):.1%}' for name, count in common]
    line = f'pixels: {", ".join(shares)}' + (' ...' if len(pixels) > SHOWN_COUNTS else '')
    ignored = 1 - labelled / sum(counts.values())
    return f'{line}; {ignored:.1%} of all are ignored' if ignored else line
