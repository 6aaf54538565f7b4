"""What a folder or a YAML file declares, by the table of layouts.

Only names and the beginnings of files are looked at. What they do not decide is not guessed: the
error has a template of a `data.yaml`, in which a person writes it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Optional, Union

from ..config.shipped import is_config_name, shipped_configs, where_configs_are
from ..tooling.command import UserError
from ..tooling.files import full_if_current
from ..tooling.names import did_you_mean
from .declared import declared_data, folder_of
from .description import SPLITS, Description, description_of, load_yaml, text_of_description
from .layout import Holds, Recognized, Undecided
from .layouts import every_layout, layout_named
from .listing import DeclaredLists, Listing

OWN = 'data.yaml', 'data.yml'  # in a folder, where they have a format
ENDINGS = '.yaml', '.yml'
SHOWN = 4  # paths in a line


class Described(NamedTuple):
    """What a source declares, or is recognized as.

    Attributes:
        settings: those of its `data.yaml`, without `path`.
        root: the folder that paths are relative to.
        notes: what a person should know, one line each.
        source: the folder or file.
    """

    settings: dict[str, Any]
    root: Path
    notes: list[str]
    source: str

    @property
    def description(self) -> Description:
        return description_of(self.settings, self.root, self.source)

    def print(self) -> None:
        """Print what was taken for what."""
        print(f'{self.source}: {self.settings["format"]}')
        for split in SPLITS:
            if split not in self.settings:
                continue
            line = f'{split}: images in {shown_paths(self.settings[split])}'
            for key, what in (('annotations', 'annotations in'), ('lists', 'listed in')):
                value = self.settings.get(key)
                of_split = value.get(split) if isinstance(value, dict) else value
                if of_split:
                    line += f', {what} {shown_paths(of_split)}'
            print(line)
        for note in self.notes:
            print(f'note: {note}')


def shown_paths(value: object) -> str:
    """The first paths of a setting, which are relative to the folder."""
    values = list(map(str, value)) if isinstance(value, list) else [str(value)]
    values = ['the folder itself' if path == os.curdir else path for path in values]
    more = f' and {len(values) - SHOWN} more' if len(values) > SHOWN else ''
    return ', '.join(values[:SHOWN]) + more


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


def describe(source: Path, formats: Optional[Sequence[str]] = None) -> Described:
    """Describe a data.yaml or a folder; `formats` are those that are asked for, by default all.

    Raises:
        NotDeclared: a folder has none of them, or its files do not say how they belong together.
        UserError: it has data of other formats, or of several; or a data.yaml has mistakes.
    """
    asked = formats or list(every_layout())
    if source.is_dir():
        return found_in_folder(source, asked)
    if not source.exists():
        raise UserError(f'no folder or file {source}{hint_about(source)}')
    if source.suffix.lower() not in ENDINGS:
        raise UserError(f'the data must be a folder or a data.yaml, got the file {source}')
    return found_in_file(source, asked)


def hint_about(source: Path) -> str:
    """What may be meant by a path at which there is nothing."""
    is_config = is_config_name(source) and source.suffix.lower() not in ENDINGS
    if is_config or source.name in shipped_configs():
        return f'; {where_configs_are(source)}'
    neighbours = [
        p.name for p in source.parent.glob('*') if p.is_dir() or p.suffix.lower() in ENDINGS
    ]
    return did_you_mean(source.name, neighbours)


def found_in_folder(root: Path, formats: Sequence[str]) -> Described:
    """What a folder has, of some formats."""
    listing = Listing(root)
    shown = full_if_current(root)
    if not listing.names:
        raise UserError(f'{shown} is empty')
    for name in OWN:
        if name in listing.names and has_format(listing.settings(name)):
            return own_data(listing.settings(name), root / name, formats, shown)
    declared = listing.declared
    if declared and declared_layout(declared) in formats:
        return described_as(
            declared_layout(declared), declared_data(listing, declared), root, shown
        )
    found = recognized(listing, formats)
    if not found:
        check_other_formats(listing, formats, shown)
        names = ', '.join(formats)
        reason = f'{shown} has no data in a known layout ({names}; other programs can export these)'
        stop(reason, root, formats[0], {})
    decided = {kind: result for kind, result in found.items() if isinstance(result, Recognized)}
    chosen = decided or found
    if len(chosen) > 1:
        raise UserError(
            f'{shown} has data in several formats, {" and ".join(chosen)}; choose one, and write '
            f'it down: cpvt check-data {shown} --format {[*chosen][0]} --out data.yaml'
        )
    ((kind, result),) = chosen.items()
    if isinstance(result, Undecided):
        stop(f'{shown}: {result}', root, kind, result.known)
    if others := [name for name in found if name != kind]:
        result.notes.append(f'the folder has data in {" and ".join(others)}, too: not used')
    return described_as(kind, result, root, shown)


def described_as(kind: str, result: Recognized, root: Path, source: str) -> Described:
    return Described({'format': kind, **result.settings}, root, result.notes, source)


def declared_layout(declared: DeclaredLists) -> str:
    """The layout of the data that a file of Ultralytics or Darknet declares."""
    rows = every_layout().items()
    return next(name for name, row in rows if row.is_declared(declared.settings))


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


def check_other_formats(listing: Listing, formats: Sequence[str], shown: str) -> None:
    """Raise a UserError if a folder has data of other formats than those that are asked for."""
    others = [*recognized(listing, [name for name in every_layout() if name not in formats])]
    if not others and listing.declared:
        others = [declared_layout(listing.declared)]
    if not others:
        return
    reason = ''
    if kinds_of(others).isdisjoint(kinds_of(formats)):
        reason = ': detectors train on objects, and segmentors on masks'
    raise UserError(
        f'{shown} has data in the format {" and ".join(others)}, but {" or ".join(formats)} is '
        f'asked for{reason}'
    )


def kinds_of(formats: Iterable[str]) -> set[Holds]:
    return {every_layout()[name].holds for name in formats}


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


def found_in_file(path: Path, formats: Sequence[str]) -> Described:
    """What a `data.yaml` declares. One of Ultralytics is read as where its folder is named."""
    settings = load_yaml(path)
    if has_format(settings):
        return own_data(settings, path, formats, str(path))
    folder = path.parent / folder_of(settings, path)
    root = folder if folder.is_dir() else path.parent
    declared = DeclaredLists(path, settings)
    kind = declared_layout(declared)
    result = declared_data(Listing(root), declared)
    if not any(split in result.settings for split in SPLITS):
        raise UserError(f'{path} must have train, val or test, a folder or list of images')
    check_format(kind, path, formats)
    return described_as(kind, result, root, str(path))


def has_format(settings: Mapping[str, Any]) -> bool:
    """Whether the settings are of a `data.yaml` of our own; Ultralytics' lack `format`."""
    return bool(settings.get('format')) and isinstance(settings['format'], str)


def own_data(
    settings: dict[str, Any], path: Path, formats: Sequence[str], source: str
) -> Described:
    """What a `data.yaml` of our own declares: one that cpvt check-data wrote, or a person."""
    kind = settings['format']
    layout_named(kind, str(path))
    check_format(kind, path, formats)
    notes = [f'{path.name} declares the data']
    root = Path(os.path.normpath(path.parent / folder_of(settings, path)))
    kept = {key: value for key, value in settings.items() if key != 'path'}
    return Described(kept, root, notes, source)


def check_format(kind: str, path: Path, formats: Sequence[str]) -> None:
    """Check that a file declares a format that is asked for."""
    if kind not in formats:
        raise UserError(f'{path} declares {kind}, not {" or ".join(formats)}')
