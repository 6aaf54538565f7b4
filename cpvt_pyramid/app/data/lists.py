"""The images of a part of a split: those in a folder, or those that a text file lists."""

import posixpath
from collections.abc import Sequence

from ..tooling.command import UserError
from . import defects
from .defects import Defects
from .description import Description, SplitPart
from .files import Folder, Names, as_path, comparable, is_image, join, lines_of, without_ending


def images_of_part(
    folder: Folder, part: SplitPart, description: Description, found: Defects
) -> list[str]:
    """The images of a part, relative to the folder of the data."""
    if not (description.root / part.images).exists():
        raise UserError(f'{description.source}: {part.images} does not exist in {folder.root}')
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
    known = ListedImages(images, part.images)
    chosen = []
    for name in lines_of(description.root / part.listed):
        matching = known.matching(name)
        image = folder.only(f'{name} ({part.listed})', matching)
        if image is not None:
            chosen.append(image)
        elif not matching:
            found.add(defects.MISSING_IMAGE, f'{name} ({part.listed})')
    return list(dict.fromkeys(chosen))


class ListedImages:
    """Images of a folder by the lines of a list, such as ImageSets/Main/train.txt: names with or
    without their endings, and with or without their folders.

    Args:
        paths: of the images, relative to the folder of the data.
        place: the folder.
    """

    def __init__(self, paths: Sequence[str], place: str) -> None:
        inside: dict[str, list[str]] = {}
        alone: dict[str, list[str]] = {}
        for path in paths:
            inside[posixpath.relpath(path, place)] = [path]
            alone.setdefault(posixpath.basename(path), []).append(path)
        # The paths by their names with and without folders, and these by how a line has them
        self._known = [
            (known, Names(known), Names(known, with_endings=False)) for known in (inside, alone)
        ]

    def matching(self, line: str) -> list[str]:
        """The images that a line means: one, none, or several between which it does not decide."""
        name = as_path(line)
        stem = without_ending(name) if is_image(name) else name
        for paths, names, stems in self._known:
            found = names.matching(name) or stems.matching(stem)
            if found:
                return [path for match in found for path in paths[match]]
        return []


def listed_name(line: str, path: str, description: Description) -> str:
    """The image in a line of the list at `path`: relative to the list if it begins with `./`, as
    Ultralytics reads it, or if the list is elsewhere; otherwise to the folder of the data."""
    if line.startswith('./') or path.startswith('../'):
        return join(posixpath.dirname(path), as_path(line))
    return without_prefix(line, description.strip_prefix)


def without_prefix(name: str, prefix: str) -> str:
    """A name of an image without the folders of another machine."""
    path = as_path(name)
    if not prefix or not comparable(path).startswith(f'{comparable(prefix)}/'):
        return path
    skipped = as_path(prefix).count('/') + 1
    return '/'.join(path.split('/')[skipped:])
