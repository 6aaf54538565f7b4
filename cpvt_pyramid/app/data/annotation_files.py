"""Layouts with a file of annotations for each image: text, XML or JSON files, or masks.

Which file belongs to which image is the same for all of them: the one of the same name. What the
files say is the layout's.
"""

import posixpath
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Optional, Union

from tqdm import tqdm

from ..tooling.command import UserError
from ..tooling.report import amount
from . import defects
from .class_files import NAME_FILES
from .data import DataImage, DataSet, Outline, Split, object_inside
from .defects import Defects
from .description import Description, SplitPart
from .files import Folder, comparable, comparable_stem, is_image, join, without_ending
from .images import Size, sizes_of
from .lists import images_of_part

OTHER_TEXTS = {*NAME_FILES, 'readme.txt', 'train.txt', 'val.txt', 'test.txt'}
SHOWN_LABELS = 8  # in a message

Parse = Callable[[Path, str, Size, Defects], Optional[list[Outline]]]
"""Parses the file of an image of a size; its name is for messages. None: it cannot be read, which
is reported."""


# Which file belongs to which image


class SeveralFiles(Exception):
    """An image has several files of its name."""


class AnnotatedImages(NamedTuple):
    """The images of each split, and the file of each; None: it has none. Paths are relative to the
    folder of the data."""

    splits: dict[str, list[str]]
    files: dict[str, Optional[str]]


def annotated_images(
    description: Description, ending: Optional[str], found: Defects
) -> AnnotatedImages:
    """The images of a description and the file of each, without images of whose name there are
    several files, which is an error.

    Args:
        description: what there is.
        ending: of the files; None: they are masks, images themselves.
        found: gets files that several images share, and those without an image.
    """
    folder = Folder(description.root)
    splits: dict[str, list[str]] = {}
    files: dict[str, Optional[str]] = {}
    for split, parts in description.splits.items():
        images: dict[str, None] = {}  # parts may lie in each other
        for part in parts:
            check_folder_of_files(part, description)
            for image in images_of_part(folder, part, description, found):
                if is_mask_beside_images(image, part, description):
                    continue
                try:
                    files[image] = file_of_image(folder, image, part, description, ending)
                except SeveralFiles:  # which `folder` reports
                    continue
                images[image] = None
        splits[split] = list(images)
    folder.report(found)
    report_shared(files, found)
    if not any(files.values()):
        what = 'segmentation mask' if ending is None else f'{ending} file'
        where = '; annotations must be the folder of these files'
        if folder.ambiguous:
            where = ' alone; see the names above that mean several files'
        raise UserError(f'{description.source}: no image has a {what} of its name{where}')
    parts = [part for of_split in description.splits.values() for part in of_split]
    if all(part.listed is None for part in parts):
        warn_about_files_without_image(folder, files, description, ending, found)
    return AnnotatedImages(splits, files)


def check_folder_of_files(part: SplitPart, description: Description) -> None:
    if part.annotations is not None and not (description.root / part.annotations).is_dir():
        raise UserError(
            f'{description.source}: annotations must be a folder, got {part.annotations}'
        )


def is_mask_beside_images(name: str, part: SplitPart, description: Description) -> bool:
    """Whether a name is that of a mask in a folder that has images, too."""
    if part.annotations != part.images or not description.mask_suffix:
        return False
    return ends_with(name, description.mask_suffix)


def ends_with(name: str, suffix: str) -> bool:
    return comparable_stem(without_ending(name)).endswith(comparable_stem(suffix))


def file_of_image(
    folder: Folder, image: str, part: SplitPart, description: Description, ending: Optional[str]
) -> Optional[str]:
    """The file of an image: in the folder that the description names, in the subfolder that the
    image has in its own; or else where Ultralytics expects it, in `labels` or `masks` in place of
    the last `images` of its path, or next to it.

    Raises:
        SeveralFiles: which of them it is, is not guessed.
    """
    place, name = posixpath.split(without_ending(image))
    stem = join(place, name.removesuffix(description.image_suffix) + description.mask_suffix)

    def find(path: str) -> Optional[str]:
        name = path if ending is None else path + ending
        file = folder.find_image(name) if ending is None else folder.find(name)
        if name in folder.ambiguous:
            raise SeveralFiles
        return file

    if part.annotations is not None:
        file = find(join(part.annotations, posixpath.relpath(stem, part.images)))
        if file is None and part.listed:
            file = find(join(part.annotations, posixpath.basename(stem)))
        return file
    parts = stem.split('/')
    folders = parts[:-1]
    if 'images' in folders:
        last = len(folders) - 1 - folders[::-1].index('images')
        parts[last] = 'labels' if ending else description.masks_dir or 'masks'
        if file := find('/'.join(parts)):
            return file
    return find(stem) if ending else None


def report_shared(files: Mapping[str, Optional[str]], found: Defects) -> None:
    """Report files of several images: each image must have its own."""
    images: dict[str, list[str]] = {}
    for image, file in files.items():
        if file is not None:
            images.setdefault(file, []).append(image)
    for file, names in images.items():
        if len(names) > 1:
            found.add(defects.SHARED, f'{file} ({", ".join(sorted(names))})')


def warn_about_files_without_image(
    folder: Folder,
    files: Mapping[str, Optional[str]],
    description: Description,
    ending: Optional[str],
    found: Defects,
) -> None:
    """Warn about files that no image has, in the folders of those that images have."""
    known = {*files, *files.values()}
    for ambiguous in folder.ambiguous.values():  # are reported as such
        known |= {*ambiguous}
    for place in sorted({posixpath.dirname(file) for file in files.values() if file}):
        for name in folder.files_in(place):
            if ending is None:
                is_one = is_image(name) and ends_with(name, description.mask_suffix)
            else:
                is_one = comparable(name).endswith(ending) and name.lower() not in OTHER_TEXTS
            if is_one and posixpath.join(place, name) not in known:
                found.add(defects.WITHOUT_IMAGE, posixpath.join(place, name))


# What the files say


class OutlinedImages(NamedTuple):
    """What files say of images.

    Attributes:
        splits: the names of the images, relative to the folder of the data.
        sizes: of the images that can be read.
        outlines: of the objects in each image whose file can be read.
    """

    splits: dict[str, list[str]]
    sizes: dict[str, Size]
    outlines: dict[str, list[Outline]]

    @property
    def objects(self) -> list[Outline]:
        return [outline for of_image in self.outlines.values() for outline in of_image]


def outlines_in_files(
    description: Description,
    ending: str,
    parse: Parse,
    found: Defects,
    may_lack_files: bool = False,
) -> OutlinedImages:
    """The outlines of objects in the files of a description.

    Args:
        description: what there is.
        ending: of the names of the files.
        parse: one of them.
        found: gets what is wrong with them.
        may_lack_files: an image without a file has no objects. Otherwise nobody has looked at it,
            and it is left out.
    """
    annotated = annotated_images(description, ending, found)
    files = dict(annotated.files)
    if not may_lack_files:
        for image in [image for image, file in files.items() if file is None]:
            found.add(defects.WITHOUT_FILE, image)
            del files[image]
    sizes = sizes_of(description.root, list(files), found)
    outlines: dict[str, list[Outline]] = {}
    for image in tqdm(sizes, 'reading annotations', leave=False, delay=3):
        file = files[image]
        parsed = parse(description.root / file, file, sizes[image], found) if file else []
        if parsed is not None:
            outlines[image] = parsed
    return OutlinedImages(annotated.splits, sizes, outlines)


def data_of_outlines(
    description: Description,
    outlined: OutlinedImages,
    found: Defects,
    numbered: Optional[Mapping[int, str]] = None,
) -> DataSet:
    """The data set of images with outlines. Images without a size or outlines are left out.

    Args:
        description: what declares it.
        outlined: what its files say.
        found: gets objects that are not used: those of other classes, and those of numbers without
            a name, which are errors.
        numbered: the names of the labels, if they are numbers. Otherwise they are names, and the
            classes are those of the description, or all that occur.
    """
    if numbered is None:
        names = description.names or {}
        named = [*names.values()] or sorted({str(outline.label) for outline in outlined.objects})
        classes: dict[Union[int, str], str] = {name: name for name in named}
    else:
        classes = dict(numbered.items())
    if not classes:
        raise UserError(f'{description.root} has no objects and no names of classes')
    indices = {label: index for index, label in enumerate(classes)}
    others: Counter = Counter()

    def image_of(name: str) -> DataImage:
        size = outlined.sizes[name]
        objects = []
        for outline in outlined.outlines[name]:
            if outline.label not in indices:
                others[outline.label] += isinstance(outline.label, str)
                if isinstance(outline.label, int):
                    given = f'class {outline.label} in {outline.at}'
                    found.add(defects.UNNAMED_LABEL, f'{given} (the names are {known})')
                continue
            item = object_inside(outline, indices[outline.label], size, found)
            if item:
                objects.append(item)
        return DataImage(name, size, objects)

    known = labels_text(list(classes))
    images = {name: image_of(name) for name in outlined.outlines if name in outlined.sizes}
    for name, count in others.items():
        if count:
            found.add(defects.OTHER_CLASS, f'{name} ({amount(count, "object")})')
    splits = {
        split: Split([images[name] for name in names if name in images], description.root)
        for split, names in outlined.splits.items()
    }
    return DataSet(description, splits, list(classes.values()), [])


def labels_text(labels: list) -> str:
    """The labels that have a name, for messages."""
    if labels == list(range(len(labels))):
        return f'0 to {len(labels) - 1}'
    more = ', ...' if len(labels) > SHOWN_LABELS else ''
    return ', '.join(map(str, labels[:SHOWN_LABELS])) + more
