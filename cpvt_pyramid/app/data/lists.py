"""The images of a part of a split: those in a folder, or those that a text file lists."""

import posixpath

from ..tooling.command import UserError
from . import defects
from .coco import without_prefix
from .defects import Defects
from .description import Description, SplitPart
from .files import (
    Folder,
    comparable,
    comparable_stem,
    is_image,
    join,
    lines_of,
    stem_of,
    without_ending,
)


def images_of_part(
    folder: Folder, part: SplitPart, description: Description, found: Defects
) -> list[str]:
    """The images of a part, relative to the folder of the data."""
    if not (description.root / part.images).exists():
        raise UserError(f'{description.source}: {part.images} does not exist in {folder.root}')
    if part.annotations is not None and not (description.root / part.annotations).is_dir():
        raise UserError(
            f'{description.source}: annotations must be a folder, got {part.annotations}'
        )
    if (description.root / part.images).is_dir():
        images = folder.images_below(part.images)
    else:
        images = []
        for line in lines_of(description.root / part.images):
            name = listed_name(line, part.images, description)
            place = folder.find(name)
            images.append(place or name)  # a missing one is reported when it is opened
    if part.listed is None:
        return images
    listed = names_of_list(description, part.listed)
    known: dict[str, str] = {}
    for image in images:
        inside = posixpath.relpath(without_ending(image), part.images)
        known.setdefault(stem_of(image), image)
        known[comparable_stem(inside)] = image
    chosen = []
    for name in listed:
        if name in known:
            chosen.append(known[name])
        else:
            found.add(defects.LOST_NAME, f'{name} ({part.listed})')
    return list(dict.fromkeys(chosen))


def listed_name(line: str, path: str, description: Description) -> str:
    """The image in a line of the list at `path`: relative to the list if it begins with `./`, as
    Ultralytics reads it, or if the list is elsewhere; otherwise to the folder of the data."""
    if line.startswith('./') or path.startswith('../'):
        return join(posixpath.dirname(path), comparable(line))
    return without_prefix(line, description.strip_prefix)


def names_of_list(description: Description, path: str) -> list[str]:
    """The comparable names in a list such as ImageSets/Main/train.txt, without endings."""
    names = []
    for line in lines_of(description.root / path):
        is_file = is_image(line)
        names.append(without_ending(comparable(line)) if is_file else comparable_stem(line))
    return names


def warn_about_names(folder: Folder, found: Defects) -> None:
    """Warn about files whose names are no text, which no annotation or config can name."""
    for name in sorted(folder.undecodable):
        shown = name.encode('utf-8', 'backslashreplace').decode()
        found.add(defects.NO_TEXT_NAME, shown)
