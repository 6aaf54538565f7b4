"""Folders that belong together: those of images and of their annotations, and what they are for."""

import os
import posixpath
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ..tooling.report import amount
from .description import SPLITS
from .files import by_folder, comparable, comparable_stem, lines_of, stem_of, without_ending
from .layout import Recognized, Undecided
from .listing import Listing
from .splits import divided_by_name, split_of, words_of

MASK_WORDS = set(
    'mask masks gt groundtruth ground truth seg segmentation segmentations segmap semantic semseg '
    'gtfine gtcoarse lbl target targets label labels annotation annotations annot ann anns '
    'segmentationclass segmentationclassraw'.split()
)
SHOWN = 4  # names in a message
TRIED = 20  # files of a folder that are looked at


class Group(NamedTuple):
    """A folder with images, that with their annotations, and a list of those that count."""

    images: str
    annotations: str
    listed: Optional[str] = None


def is_mask_folder(folder: str) -> bool:
    return bool(words_in(folder) & MASK_WORDS)


def words_in(folder: str) -> set[str]:
    """The parts of a path, and their words, in small letters."""
    parts = folder.split('/')
    return {part.lower() for part in parts}.union(*map(words_of, parts))


# Which folder has the annotations


def recognized_files(
    listing: Listing,
    ending: str,
    is_one: Callable[[Listing, str], bool],
    lists: Optional[str] = None,
    may_lack_files: bool = False,
) -> Optional[Recognized]:
    """Folders of images, and those of their files of annotations; None: there are no such files.

    Args:
        listing: of all files.
        ending: of the names of the files.
        is_one: whether a file looks like one of the layout.
        lists: the folder in ImageSets that has lists of images.
        may_lack_files: see `outlines_in_files`.
    """
    files = {
        folder: set(map(stem_of, names))
        for folder, names in by_folder(listing.ending(ending)).items()
        if any(is_one(listing, name) for name in names[:TRIED])
    }
    if not files:
        return None
    every = listing.image_folders
    folders = [folder for folder in every if not is_mask_folder(folder)] or [*every]
    groups = []
    notes = []
    for folder in folders:
        stems = set(map(stem_of, every[folder]))
        is_only = len(folders) == len(files) == 1
        if place := folder_of_files(folder, stems, files, is_only):
            groups.append(Group(folder, place))
        else:
            images = amount(len(every[folder]), 'image')
            notes.append(f'{folder} is left out, {images}: no {ending} files belong to it')
    if not groups:
        raise Undecided(f'no folder of images belongs to {", ".join([*files][:SHOWN])}')
    sets = image_sets(listing, lists) if lists else {}
    settings, more = settings_of_groups(groups, listing, sets)
    if not sets:
        apart = [*every] if may_lack_files else [group.images for group in groups]
        check_that_folders_are_apart(settings, apart)
    return Recognized(settings, notes + more)


def folder_of_files(
    folder: str, stems: set[str], files: Mapping[str, set[str]], is_only: bool
) -> Optional[str]:
    """The folder with the files of a folder's images: itself, or one whose path differs in one
    part, as those of images/train and labels/train; None if there is none.

    Args:
        folder: of the images.
        stems: of the images.
        files: the stems in each folder with files.
        is_only: there is one folder of images, and one of files, whose paths may differ more.

    Raises:
        Undecided: there are several.
    """
    known = [place for place, own in files.items() if stems & own]
    if folder in known or is_only:
        return folder if folder in known else next(iter(known), None)
    found = [place for place in known if are_partners(folder, place)]
    if len(found) > 1:
        raise Undecided(f'several folders can belong to {folder}: {", ".join(found[:SHOWN])}')
    return found[0] if found else None


def are_partners(images: str, files: str) -> bool:
    """Whether a folder of files can be that of a folder of images: for the same split, and with the
    same path but for one part, or two in its place, as in annotations/xmls."""
    if split_of(files) not in (None, split_of(images)):
        return False
    first, second = ([part for part in path.split('/') if part != '.'] for path in (images, files))
    while first and second and first[0] == second[0]:
        first, second = first[1:], second[1:]
    while first and second and first[-1] == second[-1]:
        first, second = first[:-1], second[:-1]
    return len(first) <= 1 and len(second) <= 2


# What folders are for


def image_sets(listing: Listing, kind: str) -> dict[str, dict[str, str]]:
    """The lists ImageSets/`kind`/train.txt and so on of Pascal VOC, by the folder of ImageSets and
    split; trainval.txt where there is no train.txt."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in listing.ending('.txt'):
        parts = name.split('/')
        if len(parts) >= 3 and parts[-3:-1] == ['ImageSets', kind]:
            found['/'.join(parts[:-3]) or '.'][without_ending(parts[-1])] = name
    lists = {}
    for folder, by_name in found.items():
        if 'train' not in by_name and 'trainval' in by_name:
            by_name['train'] = by_name['trainval']
        lists[folder] = {split: by_name[split] for split in SPLITS if split in by_name}
    return {folder: by_split for folder, by_split in lists.items() if by_split}


def settings_of_groups(
    groups: Sequence[Group], listing: Listing, lists: Mapping[str, dict[str, str]]
) -> tuple[dict[str, Any], list[str]]:
    """The settings of folders with images, with notes. Their splits are in the lists next to them,
    if there are any; or else in the names of the folders."""
    notes = []
    by_split: dict[str, list[Group]] = {split: [] for split in SPLITS}
    if not lists:
        paths = [posixpath.join(group.annotations, group.images) for group in groups]
        found = divided_by_name(paths)
        by_split = {split: [groups[i] for i in found.by_split[split]] for split in SPLITS}
        for i in found.unnamed:
            folder = groups[i].images
            notes.append(
                f'{folder} is left out, {len(listing.image_folders[folder])} images: its name says '
                'no split; if it should be used, add it to train, val or test'
            )
        return settings_of_splits(by_split), notes
    for group in groups:
        of_group = lists.get(posixpath.dirname(group.images) or '.', {})
        if not of_group:
            raise Undecided(f'no list in ImageSets next to {group.images} divides it into splits')
        in_folder = by_folder(listing.names)[group.annotations]
        annotated = set(map(stem_of, in_folder))
        for split, path in of_group.items():
            names = {comparable_stem(posixpath.basename(n)) for n in lines_of(listing.root / path)}
            if split == 'test' and not names & annotated:
                notes.append(f'{path} is left out: none of its images has annotations')
                continue
            by_split[split].append(group._replace(listed=path))
    return settings_of_splits(by_split), notes


def settings_of_splits(by_split: dict[str, list[Group]]) -> dict[str, Any]:
    """The images of each split, with their annotations and lists."""
    settings: dict[str, Any] = {}
    for split, groups in by_split.items():
        if not groups:
            continue
        settings[split] = one_or_many([group.images for group in groups])
        of_split = settings.setdefault('annotations', {})
        of_split[split] = one_or_many([group.annotations for group in groups])
        if groups[0].listed:
            lists = settings.setdefault('lists', {})
            lists[split] = one_or_many([group.listed for group in groups])
    order = {key: settings[key] for key in (*SPLITS, 'annotations', 'lists') if key in settings}
    return order


def one_or_many(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def check_that_folders_are_apart(settings: dict[str, Any], others: Sequence[str]) -> None:
    """Raise `Undecided` if a folder of a split has one of some others below it, which is not of the
    split and would be read with it."""
    for split in SPLITS:
        paths = settings.get(split, [])
        of_split = [paths] if isinstance(paths, str) else paths
        for folder in of_split:
            above = '' if folder == '.' else f'{folder}/'
            for other in others:
                if other not in of_split and other.startswith(above):
                    raise Undecided(
                        f'{folder} has images, and so has {other} below it; list those for {split} '
                        'in a text file, a path in each line',
                        {split: f'{split}.txt'},
                    )


# Images that a file names


class Places(NamedTuple):
    """Where images can be that a file names.

    Attributes:
        counts: by folder, how many of the names are below it.
        prefix: of the names, which is left out.
    """

    counts: dict[str, int]
    prefix: str


def image_places(listing: Listing, names: Sequence[str]) -> Optional[Places]:
    """The folders below which images of some names are, without as few folders before the names as
    possible; None: there are none."""
    paths = [comparable(name).lstrip('/').split('/') for name in names]
    shared = os.path.commonprefix([path[:-1] for path in paths])
    for skipped in range(len(shared) + 1):
        counts: Counter = Counter()
        for path in paths:
            wanted = path[skipped:]
            for place in listing.with_last_parts(len(wanted)).get('/'.join(wanted), []):
                counts['/'.join(place.split('/')[: -len(wanted)]) or '.'] += 1
            if len(counts) > len(listing.image_folders):
                break
        if counts:
            first = comparable(names[0])
            parts = first.split('/')[: skipped + first.startswith('/')]
            return Places(dict(counts), '/'.join(parts) if skipped else '')
    return None


def recognized_by_images(
    listing: Listing, files: Mapping[str, Sequence[str]], preferred: str = ''
) -> Recognized:
    """A file of annotations for each split, and the folder below which its images are.

    Args:
        listing: of all files.
        files: the names of images in each file of annotations.
        preferred: of several files for a split, the one that has this in its name.

    Raises:
        Undecided: there are several files or folders for a split.
    """
    paths = list(files)
    found = divided_by_name(paths)
    notes = [f'{paths[i]} is left out: its name says no split' for i in found.unnamed]
    settings: dict[str, Any] = {}
    annotations: dict[str, str] = {}
    prefixes = set()
    for split, indices in found.by_split.items():
        if not indices:
            continue
        file = file_of_split(split, [paths[i] for i in indices], preferred)
        annotations[split] = file
        settings[split] = '.'
        names = files[file]
        places = image_places(listing, names) if names else None
        if places:
            settings[split] = place_of_split(places, split, posixpath.dirname(file) or '.')
            prefixes.add(places.prefix)
        elif names:
            notes.append(f'no image that {file} names is in the folder, such as {names[0]}')
    settings['annotations'] = annotations
    if len(prefixes) > 1:
        shown = ', '.join(map(repr, sorted(prefixes)))
        raise Undecided(f'the names of images begin with different folders, {shown}', settings)
    if prefixes - {''}:
        settings['strip_prefix'] = prefixes.pop()
    return Recognized(settings, notes)


def file_of_split(split: str, files: Sequence[str], preferred: str) -> str:
    """The file of a split: the only one, or the only one with a preferred name."""
    named = [file for file in files if preferred in posixpath.basename(file).lower()]
    for chosen in (files, named):
        if len(chosen) == 1:
            return chosen[0]
    raise Undecided(f'several files can have the {split} data: {", ".join(files[:SHOWN])}')


def place_of_split(places: Places, split: str, home: str) -> str:
    """The folder with the images of a split: of those whose names say this split, or else none, or
    else another one, that with most of the names, or `home` if it has as many.

    Raises:
        Undecided: there are several.
    """
    counts = {f: n for f, n in places.counts.items() if not is_mask_folder(f)} or places.counts
    for wanted in ({split}, {None}, {*SPLITS}):
        found = {folder: n for folder, n in counts.items() if split_of(folder) in wanted}
        if found:
            break
    most = max(found.values())
    best = sorted(folder for folder, count in found.items() if count == most)
    if home in best:
        return home
    if len(best) > 1:
        shown = ', '.join(f'{folder} ({found[folder]} images)' for folder in best[:SHOWN])
        raise Undecided(f'the {split} images can be in several folders, {shown}')
    return best[0]
