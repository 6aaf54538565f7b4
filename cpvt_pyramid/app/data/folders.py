"""Folders that belong together: those of images and their annotations, and where images are."""

import os
import posixpath
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

from .description import SPLITS
from .files import comparable, comparable_stem, lines_of, stem_of, without_ending
from .layout import Undecided
from .listing import Listing, by_folder
from .splits import WORD, divided_by_name, split_of, words_of

IMAGE_WORDS = set(
    'image images img imgs jpeg jpg png rgb sat photo photos picture pictures input inputs '
    'leftimg8bit jpegimages'.split()
)
MASK_WORDS = set(
    'mask masks gt groundtruth ground truth seg segmentation segmentations segmap semantic semseg '
    'gtfine gtcoarse lbl target targets label labels annotation annotations annot ann anns '
    'segmentationclass segmentationclassraw'.split()
)
KIND_WORDS = IMAGE_WORDS | MASK_WORDS
KIND_WORDS |= set('xml xmls json jsons dir class left bit fine coarse bbox boxes'.split())
# Of masks of objects, of masks that are only looked at, and of Cityscapes' other files
OTHER_WORDS = set(
    'object objects instance instances panoptic color colors colour overlay vis visualization '
    'segmentationobject'.split()
)
SHOWN = 4  # names in a message


class Group(NamedTuple):
    """A folder with images, and what is annotated where."""

    images: str
    annotations: Optional[str]
    listed: Optional[str] = None


def words_in(folder: str) -> set[str]:
    """The parts of a path, and their words, in small letters."""
    parts = folder.split('/')
    return {part.lower() for part in parts}.union(*map(words_of, parts))


def is_mask_folder(folder: str) -> bool:
    return bool(words_in(folder) & MASK_WORDS)


def key_of(folder: str) -> tuple[str, ...]:
    """What the paths of a folder of images and that of its annotations share: the parts without
    words such as images, masks and labels."""
    parts = []
    for part in comparable(folder).split('/'):
        if part.lower() in KIND_WORDS:
            continue
        kept = WORD.sub(lambda match: '' if match[0].lower() in KIND_WORDS else match[0], part)
        kept = kept.strip(' _.-').lower()
        if kept:
            parts.append(kept)
    return tuple(parts)


def partner_of(
    folder: str, stems: set[str], candidates: dict[str, set[str]], or_only: bool = True
) -> Optional[str]:
    """The folder with partners of the files in another one, by their stems: one of the same key, or
    the folder itself, or the only candidate.

    Args:
        folder: has the files.
        stems: of the files.
        candidates: the stems in each folder that there is.
        or_only: a single candidate may have another key.

    Raises:
        Undecided: there are several.
    """
    known = {c: own for c, own in candidates.items() if stems & own}
    found = [c for c in known if c != folder and key_of(c) == key_of(folder)]
    if len(found) > 1:
        raise Undecided(f'several folders can belong to {folder}: {", ".join(found[:SHOWN])}')
    if found:
        return found[0]
    if folder in known:
        return folder
    return [*known][0] if or_only and len(candidates) == len(known) == 1 else None


def stems_by_folder(names: Iterable[str]) -> dict[str, set[str]]:
    return {folder: set(map(stem_of, files)) for folder, files in by_folder(names).items()}


def settings_of_groups(
    groups: Sequence[Group], listing: Listing
) -> tuple[dict[str, Any], list[str]]:
    """The settings of folders with images, divided into splits by their names or those of their
    annotations; with notes."""
    paths = [posixpath.join(group.annotations or '', group.images) for group in groups]
    found = divided_by_name(paths)
    by_split = {split: [groups[i] for i in indices] for split, indices in found.by_split.items()}
    notes = []
    for i in found.unnamed:
        folder = groups[i].images
        notes.append(
            f'{folder} is left out, {len(listing.image_folders[folder])} images: its name says no '
            'split; if it should be used, add it to train, val or test'
        )
    return settings_of_splits(by_split), notes


def settings_of_splits(by_split: dict[str, list[Group]]) -> dict[str, Any]:
    """The images of each split, and their annotations and lists where there are any."""
    used = {split: by_split[split] for split in SPLITS if by_split.get(split)}
    settings: dict[str, Any] = {}
    for split, groups in used.items():
        settings[split] = one_or_many([group.images for group in groups])
    for key, field in (('annotations', 1), ('lists', 2)):
        values = {split: [group[field] for group in groups] for split, groups in used.items()}
        if any(value is not None for of_split in values.values() for value in of_split):
            settings[key] = {split: one_or_many(of_split) for split, of_split in values.items()}
    return settings


def one_or_many(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def splits_of_folders(settings: dict[str, Any]) -> dict[str, str]:
    """The split of each folder or list of images."""
    found: dict[str, str] = {}
    for split in SPLITS:
        paths = settings.get(split, [])
        found.update(dict.fromkeys([paths] if isinstance(paths, str) else paths, split))
    return found


def check_that_folders_are_apart(settings: dict[str, Any], others: Iterable[str]) -> None:
    """Raise `Undecided` if a folder of a split has one of some others below it, which is not of the
    split and would be read with it."""
    purposes = splits_of_folders(settings)
    for folder, split in purposes.items():
        above = '' if folder == '.' else f'{folder}/'
        for other in others:
            if other != folder and other.startswith(above) and purposes.get(other) != split:
                raise Undecided(
                    f'{folder} has images, and so has {other} below it; list those for {split} in '
                    'a text file, a path in each line',
                    {split: f'{split}.txt'},
                )


# Lists of Pascal VOC


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


def settings_with_lists(
    groups: Sequence[Group], lists: dict[str, dict[str, str]], listing: Listing
) -> tuple[dict[str, Any], list[str]]:
    """The settings of folders with images, with notes. Their splits are in lists, if there are any:
    those in the folder above them, or else the only ones."""
    if not lists:
        return settings_of_groups(groups, listing)
    by_split: dict[str, list[Group]] = {split: [] for split in SPLITS}
    notes = []
    for group in groups:
        above = [f for f in lists if f'{group.images}/'.startswith('' if f == '.' else f'{f}/')]
        of_group = lists[max(above, key=len)] if above else {}
        if not above and len(lists) == 1:
            (of_group,) = lists.values()
        if not of_group:
            notes.append(f'{group.images} is left out: no list of ImageSets has its images')
        annotated = {stem_of(n) for n in listing.names if in_folder(n, str(group.annotations))}
        for split, path in of_group.items():
            names = {comparable_stem(posixpath.basename(n)) for n in lines_of(listing.root / path)}
            if split == 'test' and not names & annotated:
                notes.append(f'{path} is left out: none of its images has annotations')
                continue
            by_split[split].append(group._replace(listed=path))
    return settings_of_splits(by_split), notes


def in_folder(name: str, folder: str) -> bool:
    return (posixpath.dirname(name) or '.') == folder


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
