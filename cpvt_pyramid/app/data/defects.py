"""What can be wrong with a data set: one table, for all formats.

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
# What --skip-bad leaves out
IMAGE = 'image'  # with its annotations
OBJECT = 'object'
NOTHING = ''
KEPT = 'nothing: correct it'  # an error that cannot be left out


class Kind(NamedTuple):
    """A kind of defect."""

    words: str
    severity: str = ERROR
    left_out: str = IMAGE


# Files

AMBIGUOUS_NAME = Kind(
    'names that mean several files; keep one of the files, or give them names of their own',
    left_out=KEPT,
)
SHARED = Kind('files of annotations that several images share', left_out=KEPT)
NO_TEXT_NAME = Kind('files whose names are not UTF-8: left out', WARNING, NOTHING)
MISSING_IMAGE = Kind('images that are missing')
TORN_IMAGE = Kind('images that are not complete images')
OTHER_IMAGE = Kind(
    'images that readers do not agree on; they must have 8 bits a channel, be grey or RGB, and '
    'hide nothing (docs/predict.md)'
)
LARGE_IMAGE = Kind('images too large for OpenCV, with which training reads them')
LARGE_FOR_INFER = Kind('images too large for cpvt infer without --tile', WARNING, NOTHING)
TURNED_IMAGE = Kind(
    'images that an EXIF tag turns; their annotations must be upright, too', WARNING, NOTHING
)
FLAT_IMAGE = Kind('images so narrow that resizing leaves a side of 0 pixels')
NARROW_IMAGE = Kind(
    'images so narrow that resizing to 1333 pixels would leave a side of 0', WARNING, NOTHING
)
OTHER_SIZE = Kind('images that have another size than the width and height of their records')

# Records of COCO files, and objects of all layouts

NO_FILE_NAME = Kind('images without file_name')
NO_IMAGE_ID = Kind('images without an id of the type of the others')
NO_SIZE = Kind('images without width and height')
SAME_IMAGE_ID = Kind('images with the id of another image')
LISTED_TWICE = Kind('images that are listed twice, each with a part of the objects', left_out=KEPT)
NAMED_TWICE = Kind('images that records name in different ways', left_out=KEPT)
NO_ID = Kind('annotations without a number as id', left_out=OBJECT)
UNKNOWN_IMAGE = Kind('annotations of images that are not listed', left_out=OBJECT)
ID_OF_OTHER_TYPE = Kind(
    'annotations whose image_id is a string where the ids of images are numbers, or the reverse',
    left_out=OBJECT,
)
UNKNOWN_CATEGORY = Kind('annotations of categories that are not listed', left_out=OBJECT)
NO_BOX = Kind('annotations without a bbox of 4 finite numbers', left_out=OBJECT)
SAME_ID = Kind('annotations with the id of another annotation', left_out=OBJECT)
NO_AREA = Kind('annotations without area', left_out='nothing: the area of the box is used')
NO_CROWD = Kind(
    'annotations whose iscrowd is missing or not 0 or 1', left_out='nothing: 0 or 1 is used'
)
NO_ANNOTATIONS = Kind('annotation files without annotations', left_out=KEPT)
NO_IMAGES = Kind('splits without images', left_out='the split')
ALL_IGNORED = Kind('data whose labels are all ignored', left_out=KEPT)
NO_MASK = Kind('objects without a mask', OF_MASKS, OBJECT)
BAD_POLYGON = Kind(
    'masks with a polygon that is no list of pairs of finite numbers', OF_MASKS, OBJECT
)
SHORT_POLYGON = Kind('masks with a polygon of less than 3 points', OF_MASKS, OBJECT)
SHORT_PART = Kind(
    'masks with a further polygon of less than 3 points, which is left out', WARNING, NOTHING
)
MASK_SIZE = Kind('masks of another size than their image', OF_MASKS, OBJECT)
BAD_RUNS = Kind('masks whose run lengths are damaged', OF_MASKS, OBJECT)
OUTSIDE = Kind('boxes outside their image', WARNING, NOTHING)
BEYOND = Kind(
    'boxes that reach beyond their image; bbox is x, y, width and height', WARNING, NOTHING
)
NARROW = Kind('boxes narrower than a pixel', WARNING, NOTHING)
TWICE = Kind('boxes that are there twice', WARNING, NOTHING)
ELSEWHERE = Kind('boxes that are not around their own masks', WARNING, NOTHING)
ID_0 = Kind('objects with the id 0, which evaluations take for no object', WARNING, NOTHING)
AREA_0 = Kind('objects whose area is 0, which OpenMMLab leaves out', WARNING, NOTHING)
IGNORED_OBJECT = Kind('objects with "ignore", which OpenMMLab leaves out', WARNING, NOTHING)
EMPTY_IMAGE = Kind('images without annotations', WARNING, NOTHING)
ALIKE = Kind('classes with almost the same name', WARNING, NOTHING)
SAME_IMAGE = Kind('images that are in the training data, too', WARNING, NOTHING)
UNTRAINED = Kind('classes without objects in the training data', WARNING, NOTHING)
OTHER_CLASS = Kind(
    'categories that are not among the classes: OpenMMLab leaves their objects out',
    WARNING,
    NOTHING,
)

# Files of annotations for each image

NO_LABEL_TEXT = Kind('label files that are not text')
BAD_LINE = Kind(
    'lines that are neither a class and a box nor a class and a polygon', left_out=OBJECT
)
BEYOND_SHARES = Kind(
    'objects beyond the image; values must be shares of its width and height', left_out=OBJECT
)
UNNAMED_LABEL = Kind('objects of classes without a name', left_out=OBJECT)
WITHOUT_AREA = Kind('objects without width or height', WARNING, OBJECT)
OUTSIDE_CUT = Kind('objects outside their image', left_out=OBJECT)
CUT = Kind('objects that reach beyond their image: cut off', WARNING, NOTHING)
LONELY_LABELS = Kind('label files without an image', WARNING, NOTHING)
TORN_XML = Kind('annotation files that are not complete XML')
TORN_JSON = Kind('annotation files that are not complete JSON')
OTHER_JSON = Kind('JSON files without a list of shapes')
OTHER_ROOT = Kind('XML files with another root than <annotation>')
FILE_WITHOUT_IMAGE = Kind('annotation files without an image')
FILE_OF_OTHER = Kind('annotation files that name another image', WARNING, NOTHING)
SIZE_IN_FILE = Kind('annotation files with another size than their image', WARNING, NOTHING)
SHARED_IMAGE = Kind(
    'images with several annotation files, whose objects are all used', WARNING, NOTHING
)
STRAY_FILE = Kind(
    'annotation files of other names whose image has an annotation file of its own', left_out=KEPT
)
UNANNOTATED = Kind('images without an annotation file: left out', WARNING, NOTHING)
UNKNOWN_SHAPE = Kind('shapes of an unknown type', left_out=OBJECT)
BAD_SHAPE = Kind('shapes whose points or mask do not fit their type', left_out=OBJECT)
LINES_OR_POINTS = Kind('shapes without an area, which are no objects: left out', WARNING, OBJECT)
BAD_BOX = Kind('objects without a bndbox of 4 numbers', left_out=OBJECT)
NO_NAME = Kind('objects without a name', left_out=OBJECT)
REVERSED_BOX = Kind('objects whose xmax or ymax is below their xmin or ymin', left_out=OBJECT)
ODD_DIFFICULT = Kind(
    'objects whose <difficult> is neither 0 nor 1, taken for 0: they count', WARNING, NOTHING
)
LOST_NAME = Kind('names in a list for which there is no image', WARNING, NOTHING)
LISTED_WITHOUT_FILE = Kind('images in a list without an annotation file', WARNING, NOTHING)

# Segmentation masks

NO_LABELS = Kind('images without a segmentation mask')
LONELY_MASK = Kind('segmentation masks without an image', WARNING, NOTHING)
TORN_MASK = Kind(
    'segmentation masks that are not complete images of one page, or of a kind that Pillow, with '
    'which training reads them, cannot read, such as 64 bits or LERC; convert them: gdal_translate '
    '-ot Byte MASK NEW.png'
)
LARGE_MASK = Kind('segmentation masks too large for Pillow, with which training reads them')
FRACTIONS = Kind('segmentation masks of fractions; write them as whole numbers of 8 bits')
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
ALL_0 = Kind('segmentation masks that are 0 everywhere', WARNING, NOTHING)
NOTHING_LABELLED = Kind('segmentation masks whose labels are all ignored', WARNING, NOTHING)
ONE_LABEL = Kind('segmentation masks with one label only', WARNING, NOTHING)


class Problem(NamedTuple):
    """A kind of defect in a data set, and what has it."""

    kind: Kind
    items: list[str]  # for example 'annotation 3 of a.jpg'
    is_error: bool
    skips: bool = False  # what has it is left out

    @property
    def head(self) -> str:
        """The kind and how bad it is, as in 'error: images that are missing'."""
        words = self.kind.words
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
    """Collects problems by kind, in the order in which the kinds are first seen.

    Args:
        masks: whether the masks of objects are used.
        skips: whether what has errors is left out.
    """

    def __init__(self, masks: bool = False, skips: bool = False) -> None:
        self.masks = masks
        self.skips = skips
        self._items: dict[Kind, list[str]] = defaultdict(list)

    def add(self, kind: Kind, item: str) -> None:
        self._items[kind].append(item)

    def is_error(self, kind: Kind) -> bool:
        return kind.severity == ERROR or kind.severity == OF_MASKS and self.masks

    def problems(self) -> list[Problem]:
        """Errors, then warnings."""
        found = [
            Problem(kind, items, self.is_error(kind), self.skips)
            for kind, items in self._items.items()
        ]
        return sorted(found, key=lambda problem: not problem.is_error)

    def stop(self) -> None:
        """Raise a UserError if there are errors, unless what has them is left out."""
        errors = [kind for kind in self._items if self.is_error(kind)]
        if self.skips:
            errors = [kind for kind in errors if kind.left_out == KEPT]
        if errors:
            raise UserError(stop_message(self.skips))


def stop_message(skips: bool = False) -> str:
    """What to do about errors that have been printed."""
    if skips:
        return 'the data have errors above that --skip-bad cannot leave out; correct them'
    return (
        'the data have the errors above; correct them, or leave out what has errors with '
        'cpvt new-config --skip-bad'
    )
