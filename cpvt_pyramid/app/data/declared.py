"""What a YAML file of Ultralytics or Darknet's obj.data declares."""

import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from ..tooling.command import UserError
from ..tooling.files import path_from
from .class_files import classes_from_files
from .description import SPLITS
from .files import lines_of
from .folders import image_places, one_or_many
from .layout import Recognized
from .listing import DeclaredLists, Listing, is_path


def folder_of(given: dict[str, Any], path: Path) -> str:
    """The folder of the data that a file declares, relative to its own."""
    folder = given.get('path') or '.'
    if not isinstance(folder, str):
        raise UserError(f'{path}: path must be a path')
    return folder


def declared_data(listing: Listing, declared: DeclaredLists) -> Recognized:
    """The data that a file declares, with paths that exist here, relative to the root of a
    listing."""
    path, given = declared
    name = Path(path_from(listing.root, path)).as_posix()
    base = path.parent
    folder = folder_of(given, path)
    places = [base / folder, base]
    settings: dict[str, Any] = {}
    notes = [f'{name} declares the data']
    if not places[0].exists():
        other = f'path is {folder}, which does not exist'[:200]
        notes.append(f'{other}: paths are relative to the folder of {name}')
    lists = []
    for split in SPLITS:
        value = given.get(split)
        if not value:
            continue
        if not is_path(value):
            raise UserError(f'{path}: {split} must be a path or a list of paths')
        entries = value if isinstance(value, list) else [value]
        found = [declared_place(listing, entry, places) for entry in entries]
        missing = [entry for entry, place in zip(entries, found) if place is None]
        if missing and split == 'test':
            notes.append(f'test is left out: {missing[0]} of {name} does not exist'[:300])
            continue
        if missing:
            raise UserError(f'{path}: {split} is {missing[0]}, which does not exist'[:300])
        settings[split] = one_or_many(found)
        lists += [place for place in found if place and (listing.root / place).is_file()]
    add_prefix_of_lists(listing, lists, settings)
    for key in ('names', 'masks_dir', 'kpt_shape'):
        if key in given:
            settings[key] = given[key]
    if name.endswith('.data'):
        settings['names'] = darknet_names(path, settings)
    if 'names' not in settings:
        classes = classes_from_files(listing.root, listing.names)
        settings.update(classes.settings)
        notes += classes.notes
    else:
        warn_about_other_orders(listing, settings['names'], name, notes)
    return Recognized({k: v for k, v in settings.items() if v}, notes)


def declared_place(listing: Listing, entry: str, places: Sequence[Path]) -> Optional[str]:
    """The folder or list that an entry names, relative to the folder of the data: as it says, or
    without the `../` that Roboflow writes too often. Of a list the last part alone, too, as
    Darknet's are relative to wherever it is started."""
    entry = entry.replace('\\', '/')
    inside = entry
    while inside.startswith('../'):
        inside = inside.removeprefix('../')
    tried = [place / entry for place in places] + [places[-1] / inside]
    found = [place for place in tried if place.exists()]
    beside = places[-1] / posixpath.basename(entry)
    if beside.is_file():
        found.append(beside)
    return Path(os.path.relpath(found[0], listing.root)).as_posix() if found else None


def add_prefix_of_lists(listing: Listing, lists: Sequence[str], settings: dict[str, Any]) -> None:
    """Add the folders of another machine that the lines of lists begin with."""
    prefixes = set()
    for path in lists:
        names = [n for n in lines_of(listing.root / path) if not n.startswith('./')]
        places = image_places(listing, names) if names else None
        if places and '.' in places.counts:
            prefixes.add(places.prefix)
    if len(prefixes) == 1 and prefixes != {''}:
        settings['strip_prefix'] = prefixes.pop()


def darknet_names(path: Path, settings: dict[str, Any]) -> Any:
    """The names of the file that obj.data names."""
    given = str(settings.get('names') or '')
    for place in (path.parent / given, path.parent / posixpath.basename(given)):
        if given and place.is_file():
            return lines_of(place)
    return None


def warn_about_other_orders(listing: Listing, names: Any, source: str, notes: list[str]) -> None:
    """Note a classes.txt that has the names of another file in another order."""
    texts = list(names.values()) if isinstance(names, dict) else names
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return
    for name in listing.named('classes.txt', 'obj.names'):
        other = lines_of(listing.root / name)
        if other != texts and sorted(other) == sorted(texts):
            notes.append(f'{name} has the classes in another order than {source}, which counts')
