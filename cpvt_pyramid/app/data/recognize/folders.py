"""Folders that belong together: images and their annotations, and where images are."""

import os
import posixpath
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

from ..description import SPLITS, Question
from ..files import comparable, comparable_stem, lines_of, stem_of, without_ending
from .listing import Listing, by_folder
from .splits import Splits, split_of, splits_of
from .words import KIND_WORDS, MASK_WORDS, WORD


class Group(NamedTuple):
    """A folder with images, and what is annotated where."""

    images: str
    annotations: Optional[str]
    listed: Optional[str] = None


def settings_of_groups(
    kind: str, groups: Sequence[Group], listing: Listing
) -> tuple[dict[str, Any], list[str], list[Question]]:
    """The settings of folders with images, divided into splits by their names; with notes and
    questions."""
    settings: dict[str, Any] = {'format': kind}
    notes = []
    questions = []
    folders = [group.images for group in groups]
    found = splits_of(folders)
    if not any(found.by_split.values()) and any(
        '/' in g.annotations for g in groups if g.annotations
    ):
        # pictures/a with xml/train, for example
        found_by_annotations = splits_of([str(group.annotations) for group in groups])
        if found_by_annotations.by_split and not found_by_annotations.unnamed:
            places = {str(group.annotations): group.images for group in groups}
            found = Splits(
                {
                    split: [places[path] for path in paths]
                    for split, paths in found_by_annotations.by_split.items()
                },
                [],
                [places[path] for path in found_by_annotations.doubtful],
            )
    by_split = {split: list(found.by_split.get(split, [])) for split in SPLITS}
    if not by_split['train'] and not found.doubtful:
        by_split['train'] = found.unnamed
    else:
        for folder in found.unnamed:
            count = len(listing.image_folders[folder])
            notes.append(
                f'{folder} is left out, {count} images: its name says no split; if it should be '
                'used, add it to train, val or test'
            )
    of_folder = {group.images: group for group in groups}
    chosen = [folder for folders in by_split.values() for folder in folders]
    add_parts(settings, {s: [of_folder[f] for f in by_split[s]] for s in SPLITS if by_split[s]})
    for folder in found.doubtful:
        answers = []
        for split in SPLITS:
            changed = {**by_split, split: [*by_split[split], folder]}
            with_folder: dict[str, Any] = {}
            add_parts(
                with_folder, {s: [of_folder[f] for f in changed[s]] for s in SPLITS if changed[s]}
            )
            answers.append(differing(with_folder, settings))
        questions.append(Question(f'what are the images in {folder} for?', answers))
    questions += nested_folders(chosen, by_split, listing)
    return settings, notes, questions


def add_parts(settings: dict[str, Any], by_split: dict[str, list[Group]]) -> None:
    """Add the images of each split, and their annotations and lists where there are any."""
    for split, groups in by_split.items():
        settings[split] = one_or_many([group.images for group in groups])
    for key, field in (('annotations', 1), ('lists', 2)):
        values = {split: [group[field] for group in groups] for split, groups in by_split.items()}
        if any(value is not None for of_split in values.values() for value in of_split):
            settings[key] = {split: one_or_many(of_split) for split, of_split in values.items()}


def differing(settings: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The settings that others do not have, or have with another value."""
    return {key: value for key, value in settings.items() if others.get(key) != value}


def one_or_many(values: Sequence[Any]) -> Any:
    return values[0] if len(set(values)) == 1 and len(values) == 1 else list(values)


def nested_folders(
    chosen: Sequence[str], by_split: dict[str, list[str]], listing: Listing
) -> list[Question]:
    """A question if a folder of a split has further folders with images below it, which would be
    read with it."""
    purposes = {folder: split for split, folders in by_split.items() for folder in folders}
    for folder in chosen:
        above = '' if folder == '.' else f'{folder}/'
        for other in listing.image_folders:
            if (
                other != folder
                and other.startswith(above)
                and purposes.get(other) != purposes[folder]
            ):
                return [
                    Question(
                        f'{folder} has images, and so has {other} below it: which of them '
                        f'are for {purposes[folder]}? Move them to a folder of their own, or list '
                        'them in a text file, a path in each line',
                        [{purposes[folder]: f'{purposes[folder]}.txt'}],
                    )
                ]
    return []


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


def partner_folders(folder: str, stems: set[str], candidates: dict[str, set[str]]) -> list[str]:
    """The folders that can have the partners of the files in a folder, by their stems: those with
    the same key, or itself, or all in which a stem is found; several are ambiguous."""
    same_key = [c for c in candidates if key_of(c) == key_of(folder) and c != folder]
    for group in (same_key, [folder] if folder in candidates else [], list(candidates)):
        found = [candidate for candidate in group if stems & candidates[candidate]]
        if found:
            most = max(len(stems & candidates[candidate]) for candidate in found)
            complete = [c for c in found if len(stems & candidates[c]) == most]
            return complete if most == len(stems) else found
    return []


def stems_by_folder(names: Iterable[str]) -> dict[str, set[str]]:
    return {folder: set(map(stem_of, files)) for folder, files in by_folder(names).items()}


class Places(NamedTuple):
    """Where images can be that a file names."""

    folders: list[str]  # that have the names; several are ambiguous
    prefix: str  # of the names, which is left out
    counts: dict[str, int]  # of names found in each
    is_doubtful: bool  # the names of the folders say another split


def image_places(
    listing: Listing, names: Sequence[str], split: Optional[str], home: str
) -> Optional[Places]:
    """The folders below which images of some names are, without as few folders before the names as
    possible; None: there are none.

    Folders whose names say the same split as `split` go first, and those of other splits last; then
    `home`, the folder of the file; then those with more of the names.
    """
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
            prefix = '/'.join(comparable(names[0]).split('/')[: skipped + names_root(names[0])])
            folders = best_places(counts, split, home)
            is_doubtful = split is not None and split_of(folders[0]) not in (None, split)
            return Places(folders, prefix if skipped else '', dict(counts), is_doubtful)
    return None


def names_root(name: str) -> int:
    """1 if a name begins at the root of a file system, whose first part is empty."""
    return int(comparable(name).startswith('/'))


def best_places(counts: Counter, split: Optional[str], home: str) -> list[str]:
    """The folders that are most likely, by their names, and then by what they have."""

    def rank(folder: str) -> tuple[int, int, int]:
        of_folder = split_of(folder)
        affinity = 1
        if split and of_folder:
            affinity = 2 if of_folder == split else 0
        is_mask = bool({w.lower() for w in WORD.findall(folder)} & (MASK_WORDS - {'labels'}))
        return affinity, int(folder == home) - int(is_mask), counts[folder]

    best = max(map(rank, counts))
    return sorted(folder for folder in counts if rank(folder) == best)


def settings_with_lists(
    kind: str, groups: Sequence[Group], lists: dict[str, dict[str, str]], listing: Listing
) -> tuple[dict[str, Any], list[str], list[Question]]:
    """The settings of folders with images, divided into splits by lists if there are any, and
    otherwise by their names; with notes and questions."""
    if not lists:
        return settings_of_groups(kind, groups, listing)
    settings, notes = settings_of_lists(kind, groups, lists, listing)
    return settings, notes, []


def questions_about_groups(
    kind: str,
    groups: Sequence[Group],
    undecided: dict[str, list[Group]],
    lists: dict[str, dict[str, str]],
    listing: Listing,
) -> list[Question]:
    """Questions, by their texts, about the one of some groups that belongs to the data. The answers
    are the settings with each of them."""
    settings, _, _ = settings_with_lists(kind, groups, lists, listing)
    questions = []
    for text, options in undecided.items():
        answers = []
        for group in options:
            with_group, _, _ = settings_with_lists(kind, [*groups, group], lists, listing)
            answers.append(differing(with_group, settings))
        questions.append(Question(text, answers))
    return questions


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


def settings_of_lists(
    kind: str, groups: Sequence[Group], lists: dict[str, dict[str, str]], listing: Listing
) -> tuple[dict[str, Any], list[str]]:
    """The settings of folders with images whose splits are in lists: those in the folder above
    them, or if there are none, in the only ones."""
    settings: dict[str, Any] = {'format': kind}
    by_split: dict[str, list[Group]] = {}
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
            by_split.setdefault(split, []).append(group._replace(listed=path))
    ordered = {split: by_split[split] for split in SPLITS if split in by_split}
    add_parts(settings, ordered)
    return settings, notes


def in_folder(name: str, folder: str) -> bool:
    return (posixpath.dirname(name) or '.') == folder
