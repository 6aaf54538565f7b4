"""What can be wrong with a data set: one table, for all layouts.

An error refuses data, so its check must be certain; otherwise it is a warning.
"""

from collections import defaultdict
from typing import NamedTuple

from ..tooling.command import UserError

SHOWN = 3  # items of a problem that its line names
# How bad a defect is
ERROR = 'error'  # training stops, or learns something wrong
WARNING = 'warning'  # training does without, or it is mostly a mistake
OF_MASKS = 'error of masks'  # an error where the masks of objects are used, else a warning
OF_FILES = 'error of files'  # an error where OpenMMLab reads the file itself, else a warning
# What --skip-bad leaves out
IMAGE = 'image'  # with its annotations
OBJECT = 'object'
NOTHING = ''
KEPT = 'nothing: correct it'  # an error that cannot be left out


class Kind(NamedTuple):
    """A kind of defect. Where it can have several reasons, the lines name them."""

    words: str
    severity: str = ERROR
    left_out: str = IMAGE


# Images

MISSING_IMAGE = Kind('images that are missing')
TORN_IMAGE = Kind('images that are not complete images')
OTHER_IMAGE = Kind(
    'images that readers do not agree on; they must have 8 bits a channel, be grey or RGB, and '
    'hide nothing (docs/predict.md)'
)
LARGE_IMAGE = Kind('images that are too large to be read as a whole; cut them into tiles')
TURNED_IMAGE = Kind(
    'images that an EXIF tag turns; their annotations must be upright, too', WARNING, NOTHING
)
OTHER_SIZE = Kind('images that have another size than the width and height of their records')
SAME_IMAGE = Kind('images that are in the training data, too', WARNING, NOTHING)

# Which file belongs to which image

AMBIGUOUS_NAME = Kind(
    'names that mean several files; keep one of the files, or give them names of their own',
    left_out=KEPT,
)
SHARED = Kind('files of annotations that several images share', left_out=KEPT)
LISTED_TWICE = Kind('images that are listed twice, each with a part of the objects', left_out=KEPT)
WITHOUT_IMAGE = Kind('files of annotations without an image', WARNING, NOTHING)
WITHOUT_FILE = Kind('images without a file of annotations: left out', WARNING, NOTHING)
SIZE_IN_FILE = Kind('files of annotations with another size than their image', WARNING, NOTHING)
FILE_OF_OTHER = Kind('files of annotations that name another image', WARNING, NOTHING)

# Annotations that cannot be read

TORN_FILE = Kind('files of annotations that cannot be read')
BAD_IMAGE = Kind('images that cannot be used')
BAD_OBJECT = Kind('objects that cannot be used', left_out=OBJECT)
UNNAMED_LABEL = Kind('objects of classes without a name', left_out=OBJECT)
INCOMPLETE = Kind(
    'objects that lack what OpenMMLab needs, and what cpvt new-config adds in a copy',
    OF_FILES,
    NOTHING,
)
NO_MASK = Kind('objects without a mask', OF_MASKS, OBJECT)
BAD_MASK = Kind('objects with a mask that cannot be read', OF_MASKS, OBJECT)

# Annotations that say something odd

NO_IMAGES = Kind('splits without images', left_out='the split')
NOTHING_COUNTS = Kind('data without annotations that count', left_out=KEPT)
OUTSIDE = Kind(
    'objects without an area inside their image, of which training learns nothing', WARNING, OBJECT
)
BEYOND = Kind(
    'boxes that reach beyond their image; bbox is x, y, width and height', WARNING, NOTHING
)
CUT = Kind('objects that reach beyond their image: cut off', WARNING, NOTHING)
NARROW = Kind('boxes narrower than a pixel', WARNING, NOTHING)
TWICE = Kind('boxes that are there twice', WARNING, NOTHING)
ELSEWHERE = Kind('boxes that are not around their own masks', WARNING, NOTHING)
ID_0 = Kind('objects with the id 0, which evaluations take for no object', WARNING, NOTHING)
LEFT_OUT = Kind('objects with "ignore", which OpenMMLab leaves out', WARNING, NOTHING)
LINES_OR_POINTS = Kind('shapes without an area, which are no objects: left out', WARNING, OBJECT)
ODD_DIFFICULT = Kind(
    'objects whose <difficult> is neither 0 nor 1, taken for 0: they count', WARNING, NOTHING
)
EMPTY_IMAGE = Kind('images without annotations', WARNING, NOTHING)
ALIKE = Kind('classes with almost the same name', WARNING, NOTHING)
UNTRAINED = Kind('classes without objects in the training data', WARNING, NOTHING)
OTHER_CLASS = Kind(
    'objects of categories that are not among the classes: left out', WARNING, NOTHING
)

# Segmentation masks

WITHOUT_MASK = Kind('images without a segmentation mask')
TORN_MASK = Kind(
    'segmentation masks that training cannot read as whole numbers; convert them: gdal_translate '
    '-ot Byte MASK NEW.png'
)
MASK_OF_OTHER_SIZE = Kind('segmentation masks of another size than their image')
CHANNELS = Kind('segmentation masks with several channels instead of one of class indices')
UNNAMED_VALUE = Kind('segmentation masks with values that have no name and are not ignored')
UNKNOWN_COLOR = Kind(
    'segmentation masks with colours that are in no list: ignored', WARNING, NOTHING
)
JPEG_MASK = Kind(
    'segmentation masks that are JPEGs, whose compression changes labels; save them as PNG',
    WARNING,
    NOTHING,
)
UNDECLARED_255 = Kind(
    'segmentation masks of 0 and 255 alone, of which 255 may be a class or be ignored; write in '
    'data.yaml which it is',
    left_out=KEPT,
)
EMPTY_MASK = Kind('segmentation masks of nothing but 0 or ignored labels', WARNING, NOTHING)
ONE_LABEL = Kind('segmentation masks with one label only', WARNING, NOTHING)


class Problem(NamedTuple):
    """A kind of defect in a data set, and what has it."""

    kind: Kind
    reason: str  # of a kind with several
    items: list[str]  # for example 'annotation 3 of a.jpg'
    is_error: bool
    skips: bool = False  # what has it is left out

    @property
    def head(self) -> str:
        """The kind and how bad it is, as in 'error: images that are missing'."""
        words = self.kind.words + (f' ({self.reason})' if self.reason else '')
        if self.kind.severity == OF_MASKS and not self.is_error:
            words += '; an error for models of masks'
        severity = ERROR if self.is_error else WARNING
        if self.skips and self.is_error and self.kind.left_out != KEPT:
            severity = 'left out'
        return f'{severity}: {words}'

    @property
    def lines(self) -> list[str]:
        """All that has it."""
        return [self.head, *(f'    {item}' for item in self.items)]

    def __str__(self) -> str:
        more = f' and {len(self.items) - SHOWN} more' if len(self.items) > SHOWN else ''
        return f'{self.head}: {", ".join(self.items[:SHOWN])}{more}'


class Defects:
    """Collects problems by kind and reason, in the order in which they are first seen.

    Args:
        masks: whether the masks of objects are used.
        skips: whether what has errors is left out.
        as_it_is: whether OpenMMLab reads the file of annotations itself, and no copy.
    """

    def __init__(self, masks: bool = False, skips: bool = False, as_it_is: bool = False) -> None:
        self.masks = masks
        self.skips = skips
        self.as_it_is = as_it_is
        self._items: dict[tuple[Kind, str], list[str]] = defaultdict(list)

    def add(self, kind: Kind, item: str, reason: str = '') -> None:
        self._items[kind, reason].append(item)

    def is_error(self, kind: Kind) -> bool:
        is_used = {OF_MASKS: self.masks, OF_FILES: self.as_it_is}
        return kind.severity == ERROR or is_used.get(kind.severity, False)

    def problems(self) -> list[Problem]:
        """Errors, then warnings."""
        found = [
            Problem(kind, reason, items, self.is_error(kind), self.skips)
            for (kind, reason), items in self._items.items()
        ]
        return sorted(found, key=lambda problem: not problem.is_error)

    def stop(self, leave_out: str = '') -> None:
        """Raise a UserError if there are errors, unless what has them is left out.

        Args:
            leave_out: how a user of the command leaves out what has errors; see `stop_message`.
        """
        errors = [kind for kind, _ in self._items if self.is_error(kind)]
        if self.skips:
            errors = [kind for kind in errors if kind.left_out == KEPT]
        if errors and self.skips:
            raise UserError(
                'the data have errors above that --skip-bad cannot leave out; correct them'
            )
        if errors:
            raise UserError(stop_message(leave_out))


def stop_message(leave_out: str = '') -> str:
    """What to do about errors that have been printed.

    Args:
        leave_out: the option, or another command, that leaves out what has them. Empty: nothing
            does.
    """
    line = 'the data have the errors above; correct them'
    if leave_out:
        return f'{line}, or leave out what has errors with {leave_out}'
    return f'{line} (cpvt check-data lists all of each kind)'
