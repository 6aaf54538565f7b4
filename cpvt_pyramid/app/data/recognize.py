"""What a folder or a YAML file declares, by the table of layouts.

Only names and the beginnings of files are looked at. What they do not decide is not guessed: the
error has a template of a `data.yaml`, in which a person writes it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Union

from ..tooling.command import UserError
from ..tooling.files import full_if_current
from .declared import check_number_of_names, folder_of
from .description import SPLITS, load_yaml, text_of_description
from .folders import SHOWN
from .layout import Recognized, Undecided
from .layouts import every_layout, layout_named
from .listing import DeclaredLists, Listing, with_names_of_splits

OWN = 'data.yaml', 'data.yml'  # in a folder, where they have a format


class Declared(NamedTuple):
    """What a source has.

    Attributes:
        settings: of a `data.yaml`, without `path`.
        root: the folder that paths are relative to.
        notes: what a person should know, one line each.
        is_declared: by a file, and not by the names of files and folders.
    """

    settings: dict[str, Any]
    root: Path
    notes: list[str]
    is_declared: bool


class NotDeclared(UserError):
    """A folder does not say what it has. The line is followed by a template of a `data.yaml`.

    Attributes:
        reason: what is not understood.
        settings: what is known, with words in capitals for what is not.
        root: the folder.
        comments: what stands above them.
    """

    def __init__(self, reason: str, settings: Mapping[str, Any], root: Path) -> None:
        super().__init__(f'{reason}; write a data.yaml as below, and give it instead of the folder')
        self.reason = reason
        self.settings = dict(settings)
        self.root = root
        self.comments = ['Complete it; val may be left out. See docs/own_data.md. The formats are']
        self.comments += [f'  {name}: {row.what}' for name, row in every_layout().items()]
        template = {'path': os.path.abspath(root), **settings}
        self.details = text_of_description(template, self.comments)


def found_in_folder(root: Path, formats: Sequence[str]) -> Declared:
    """What a folder has.

    Args:
        root: the folder.
        formats: that it may have.

    Raises:
        NotDeclared: it has none of them, or its files do not say how they belong together.
        UserError: it has data of other formats, or of several.
    """
    listing = Listing(root)
    shown = full_if_current(root)
    if not listing.names:
        raise UserError(f'{shown} is empty')
    for name in OWN:
        if name in listing.names and has_format(listing.settings(name)):
            return own_data(listing.settings(name), root / name, formats)
    found = recognized(listing, formats)
    if not found:
        check_other_formats(listing, formats, shown)
        names = ', '.join(formats)
        reason = f'{shown} has no data in a known layout ({names}; other programs can export these)'
        stop(reason, root, formats[0], {})
    declared = {kind: result for kind, result in found.items() if is_declared(result)}
    chosen = declared or found
    if len(chosen) > 1:
        raise UserError(
            f'{shown} has data in several formats, {" and ".join(chosen)}; choose one, and write '
            f'it down: cpvt check-data {shown} --format {[*chosen][0]} --out data.yaml'
        )
    ((kind, result),) = chosen.items()
    if isinstance(result, Undecided):
        stop(f'{shown}: {result}', root, kind, result.known)
    notes = [*result.notes]
    if others := [name for name in found if name != kind]:
        notes.append(f'the folder has data in {" and ".join(others)}, too: not used')
    for name in listing.undecodable[:SHOWN]:
        readable = name.encode('utf-8', 'backslashreplace').decode()
        notes.append(f'left out, its name is not UTF-8: {readable}')
    return Declared({'format': kind, **result.settings}, root, notes, result.is_declared)


def recognized(listing: Listing, formats: Iterable[str]) -> dict[str, Union[Recognized, Undecided]]:
    """What each layout finds among the files of a folder."""
    found: dict[str, Union[Recognized, Undecided]] = {}
    for kind in formats:
        try:
            result = every_layout()[kind].recognize(listing)
        except Undecided as undecided:
            found[kind] = undecided
            continue
        if result:
            found[kind] = result
    return found


def is_declared(result: Union[Recognized, Undecided]) -> bool:
    return isinstance(result, Recognized) and result.is_declared


def check_other_formats(listing: Listing, formats: Sequence[str], shown: str) -> None:
    """Raise a UserError if a folder has data of other formats than those that are asked for."""
    others = recognized(listing, [name for name in every_layout() if name not in formats])
    if others:
        raise UserError(
            f'{shown} has data in the format {" and ".join(others)}, but {" or ".join(formats)} is '
            'asked for: detectors train on objects, and segmentors on masks'
        )


def stop(reason: str, root: Path, kind: str, known: Mapping[str, Any]) -> NoReturn:
    """Raise the error of a folder that is not understood, with a template for a person."""
    settings = {'format': kind, **known}
    unused = {'names'} if 'colors' in known else set()
    if any(split in known for split in SPLITS):
        unused |= {*SPLITS}
    for key, value in every_layout()[kind].example.items():
        if key not in unused:
            settings.setdefault(key, value)
    raise NotDeclared(reason, settings, root)


def found_in_file(path: Path, formats: Sequence[str]) -> Declared:
    """What a `data.yaml` declares. One of Ultralytics is read as where its folder is named."""
    settings = load_yaml(path)
    if has_format(settings):
        return own_data(settings, path, formats)
    settings = with_names_of_splits(settings)
    folder = path.parent / folder_of(settings, path)
    root = folder if folder.is_dir() else path.parent
    listing = Listing(root, DeclaredLists(path, settings))
    for kind in every_layout():
        result = every_layout()[kind].recognize(listing)
        if result and result.is_declared:
            check_format(kind, path, formats)
            return Declared({'format': kind, **result.settings}, root, result.notes, True)
    raise UserError(f'{path} must have train, val or test, a folder or list of images')


def has_format(settings: Mapping[str, Any]) -> bool:
    """Whether the settings are of a `data.yaml` of our own; Ultralytics' lack `format`."""
    return bool(settings.get('format')) and isinstance(settings['format'], str)


def own_data(settings: dict[str, Any], path: Path, formats: Sequence[str]) -> Declared:
    """What a `data.yaml` of our own declares: one that cpvt check-data wrote, or a person."""
    kind = settings['format']
    layout_named(kind, str(path))
    check_format(kind, path, formats)
    notes = [f'{path.name} declares the data']
    check_number_of_names(settings, path.name, notes)
    place = settings.get('path') or '.'
    if not isinstance(place, str):
        raise UserError(f'{path}: path must be a text')
    root = Path(os.path.normpath(path.parent / place))
    kept = {key: value for key, value in settings.items() if key != 'path'}
    return Declared(kept, root, notes, True)


def check_format(kind: str, path: Path, formats: Sequence[str]) -> None:
    """Check that a file declares a format that is asked for."""
    if kind not in formats:
        raise UserError(f'{path} declares {kind}, not {" or ".join(formats)}')
