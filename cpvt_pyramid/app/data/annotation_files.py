"""Layouts with a file of annotations for each image, such as XML or JSON files.

Which files are one, and what they say, is the layout's. How they find their images is the same for
all: the image of the same name, or that which the file names.
"""

import posixpath
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Optional

from tqdm import tqdm

from ..tooling.command import UserError
from ..tooling.files import files_below
from ..tooling.report import amount
from . import defects
from .data import Objects, Outline, Split, images_with_objects
from .defects import Defects
from .description import Description, SplitPart
from .files import (
    Folder,
    as_path,
    is_image,
    is_utf8,
    join,
    lines_of,
    report_shared,
    stem_of,
    without_ending,
)
from .folders import (
    Group,
    check_that_folders_are_apart,
    image_sets,
    is_mask_folder,
    partner_of,
    settings_with_lists,
    splits_of_folders,
    stems_by_folder,
)
from .images import Size, sizes_of
from .layout import Recognized, Undecided
from .listing import Listing, by_folder
from .lists import ListedFiles

TRIED = 20  # files of a folder that are looked at


class AnnotationFile(NamedTuple):
    """What a file of annotations says.

    Attributes:
        image: the name of its image; '' if it has none.
        size: of the image; None if the file does not say it.
        objects: the names of classes, and outlines.
    """

    image: str
    size: Optional[Size]
    objects: list[tuple[str, Outline]]


class Annotated(NamedTuple):
    """An image and the file of its annotations, relative to the folder of the data."""

    image: str
    path: str
    file: AnnotationFile


Parse = Callable[[Path, str, Defects], Optional[AnnotationFile]]
"""Parses a file; its name is for messages. None: it is none of the layout, which is reported."""


def recognized_files(
    listing: Listing, ending: str, is_one: Callable[[Listing, str], bool]
) -> Optional[Recognized]:
    """Folders with files of annotations, and those of their images: `partner_of` the folder, or
    itself.

    Args:
        listing: of all files.
        ending: of the names of the files.
        is_one: whether a file looks like one of the layout.
    """
    images = stems_by_folder(listing.images)
    candidates = {f: stems for f, stems in images.items() if not is_mask_folder(f)} or images
    groups = []
    for folder, names in by_folder(listing.ending(ending)).items():
        if not any(is_one(listing, name) for name in names[:TRIED]):
            continue
        place = partner_of(folder, set(map(stem_of, names)), candidates)
        if place is None and folder in images:  # of other names, which the files have
            place = folder
        if place is None:
            raise Undecided(f'no folder that belongs to {folder} has its images')
        groups.append(Group(place, folder))
    if not groups:
        return None
    settings, notes = settings_with_lists(groups, image_sets(listing, 'Main'), listing)
    if 'lists' not in settings:
        check_that_folders_are_apart(settings, splits_of_folders(settings))
    return Recognized(settings, notes)


def read_annotation_files(
    description: Description, ending: str, parse: Parse, found: Defects
) -> dict[str, list[Annotated]]:
    """The files of a description that have an image, by split.

    Args:
        description: what there is.
        ending: of the names of the files.
        parse: one of them.
        found: gets what is wrong with them.
    """
    folder = Folder(description.root)
    annotated: dict[str, list[Annotated]] = {}
    places: set[str] = set()  # folders of images of which all should be annotated
    files: dict[str, Optional[AnnotationFile]] = {}
    for split, parts in description.splits.items():
        of_split: dict[tuple[str, str], Annotated] = {}  # parts may lie in each other
        for part in parts:
            names = files_of_part(folder, part, description, ending, found)
            for name in tqdm(names, 'reading annotations', leave=False, delay=3):
                if name not in files:
                    files[name] = parse(description.root / name, name, found)
                file = files[name]
                image = image_of_file(folder, file, name, part, found) if file else None
                if file and image:
                    of_split[image, name] = Annotated(image, name, file)
                    if part.listed is None:
                        places.add(posixpath.dirname(image))
        annotated[split] = list(of_split.values())
    folder.report(found)
    every = [item for of_split in annotated.values() for item in of_split]
    report_shared(((item.image, item.path) for item in every), found)
    used = {item.image for item in every}
    stems = set(map(stem_of, files))
    for place in sorted(places):
        for image in folder.images_in(place):
            if image not in used and stem_of(image) not in stems:
                found.add(defects.UNANNOTATED, image)
    if not any(item.file.objects for item in every):
        raise UserError(f'{description.root}: no {ending} file has an image and objects')
    return annotated


def files_of_part(
    folder: Folder, part: SplitPart, description: Description, ending: str, found: Defects
) -> list[str]:
    """The files of a part, relative to the folder of the data."""
    place = part.annotations
    if place is None or not (description.root / place).is_dir():
        given = '' if place is None else f', got {place}'
        raise UserError(
            f'{description.source}: annotations must be the folder of the {ending} files{given}'
        )
    names = []
    for path in files_below(description.root / place):
        name = posixpath.join(place, path.relative_to(description.root / place).as_posix())
        if path.suffix.lower() == ending and path.is_file():
            if is_utf8(name):
                names.append(posixpath.normpath(name))
            else:
                folder.undecodable.add(name)
    if part.listed is None:
        return names
    known = ListedFiles(names, place)
    listed = []
    for name in lines_of(description.root / part.listed):
        matching = known.matching(name)
        file = folder.only(f'{name} ({part.listed})', matching)
        stem = without_ending(name) if is_image(name) else name
        if file is not None:
            listed.append(file)
        elif matching:
            continue  # is reported
        elif folder.find_image(join(part.images, stem)):
            found.add(defects.LISTED_WITHOUT_FILE, f'{name} ({part.listed})')
        else:
            found.add(defects.LOST_NAME, f'{name} ({part.listed})')
    return list(dict.fromkeys(listed))


def image_of_file(
    folder: Folder, file: AnnotationFile, name: str, part: SplitPart, found: Defects
) -> Optional[str]:
    """The image of a file in the folder of the images: that of the same name, of several the one
    that the file names; or else that which the file names."""
    inside = without_ending(posixpath.relpath(name, part.annotations))
    given = posixpath.basename(as_path(file.image)).removeprefix('.')  # `.` names none
    stem = join(part.images, inside)
    image = folder.find_image(stem, named=given)
    if image is None and given and stem not in folder.ambiguous:
        image = folder.find(join(part.images, join(posixpath.dirname(inside), given)))
    if image is None:
        found.add(defects.FILE_WITHOUT_IMAGE, name)
    elif stem_of(file.image or name) not in (stem_of(name), stem_of(image)):
        found.add(defects.FILE_OF_OTHER, f'{name} ({stem_of(file.image)})')
    return image


def objects_of_files(
    description: Description, annotated: dict[str, list[Annotated]], found: Defects
) -> Objects:
    """The objects of files, whose classes are those of the description, or all that occur."""
    every = [item for of_split in annotated.values() for item in of_split]
    sizes = sizes_of(description.root, [item.image for item in every], found)
    check_files_of_images(every, sizes, found)
    classes = sorted({name for item in every for name, _ in item.file.objects})
    if description.names:
        classes = list(description.names.values())
    left_out: Counter = Counter()
    splits = {}
    for split, of_split in annotated.items():
        outlines: dict[str, list[Outline]] = {}
        for item in of_split:
            if item.image not in sizes:
                continue
            of_image = outlines.setdefault(item.image, [])
            for name, outline in item.file.objects:
                if name in classes:
                    of_image.append(outline._replace(label=classes.index(name)))
                else:
                    left_out[name] += 1
        splits[split] = Split(images_with_objects(outlines, sizes, found), description.root)
    for name, count in left_out.items():
        found.add(defects.OTHER_CLASS, f'{name} ({amount(count, "object")})')
    return Objects(description, splits, classes, [])


def check_files_of_images(
    annotated: list[Annotated], sizes: dict[str, Size], found: Defects
) -> None:
    """Report images of another size than their file says, and with several files."""
    users = Counter(item.image for item in annotated)
    for item in annotated:
        size = item.file.size
        if size and item.image in sizes and size != sizes[item.image]:
            found.add(defects.SIZE_IN_FILE, item.path)
        if users[item.image] > 1:
            is_own = stem_of(item.path) == stem_of(item.image)
            kind = defects.SHARED_IMAGE if is_own else defects.STRAY_FILE
            found.add(kind, f'{item.image} ({item.path})')
