"""The images of a part of a split: those in a folder, or those of them that a text file lists."""

import posixpath

from ..tooling.command import UserError
from . import defects
from .defects import Defects
from .description import Description, SplitPart
from .files import Folder, as_path, comparable, is_image, join, lines_of


def images_of_part(
    folder: Folder, part: SplitPart, description: Description, found: Defects
) -> list[str]:
    """The images of a part, relative to the folder of the data."""
    if not (description.root / part.images).is_dir():
        raise UserError(f'{description.source}: {part.images} does not exist in {folder.root}')
    if part.listed is None:
        return folder.images_below(part.images)
    chosen = []
    for line in lines_of(description.root / part.listed):
        name = listed_name(line, part.images, part.listed, description.strip_prefix)
        image = folder.find(name) if is_image(name) else folder.find_image(name)
        if image is not None:
            chosen.append(image)
        elif name not in folder.ambiguous:
            found.add(defects.MISSING_IMAGE, f'{name} ({part.listed})')
    return list(dict.fromkeys(chosen))


def listed_name(line: str, images: str, path: str, prefix: str) -> str:
    """The image in a line of the list at `path`: relative to the list if it begins with `./`, as
    Ultralytics reads it, or if the list is elsewhere; otherwise to the folder of images."""
    if line.startswith('./') or path.startswith('../'):
        return join(posixpath.dirname(path), as_path(line))
    return join(images, without_prefix(line, prefix))


def without_prefix(name: str, prefix: str) -> str:
    """A name of an image without the folders of another machine."""
    path = as_path(name)
    if not prefix or not comparable(path).startswith(f'{comparable(prefix)}/'):
        return path
    skipped = as_path(prefix).count('/') + 1
    return '/'.join(path.split('/')[skipped:])
