"""Recognizes the layout of a folder: what would be written in its `data.yaml`.

Only names and the beginnings of files are looked at. What names do not decide becomes a question
with the lines to choose from; nothing is chosen by numbers of files or by pixels.
"""

import json
import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..images.formats import open_image
from ..tooling.command import UserError
from ..tooling.files import files_below
from .class_files import classes_from_files
from .description import ALIASES, SPLITS, Question, SplitPart, load_yaml, whole_number
from .files import (
    Folder,
    comparable,
    comparable_stem,
    is_image,
    is_utf8,
    lines_of,
    stem_of,
    without_ending,
)
from .yolo import label_file

WORD = re.compile('[A-Z]+(?![a-z])|[A-Z]?[a-z]+')
SPLIT_WORDS = {
    'train': {'train', 'training', 'trainval'},
    'val': {'val', 'valid', 'validation', 'dev', 'eval'},
    'test': {'test', 'testing'},
}
EVERY_SPLIT_WORD = set().union(*SPLIT_WORDS.values())
IMAGE_WORDS = set(
    'image images img imgs jpeg jpg png rgb sat photo photos picture pictures input inputs '
    'leftimg8bit jpegimages'.split()
)
MASK_WORDS = set(
    'mask masks gt groundtruth ground truth seg segmentation segmentations segmap semantic semseg '
    'labelids labeltrainids gtfine gtcoarse lbl target targets label labels annotation annotations '
    'annot ann anns segmentationclass segmentationclassraw'.split()
)
# Of masks of objects, of masks that are only looked at, and of Cityscapes' other files
OTHER_WORDS = set('object instance instances instanceids panoptic color colour overlay vis'.split())
OTHER_WORDS |= {'visualization', 'segmentationobject', 'segmentationclassvisualization'}
KIND_WORDS = IMAGE_WORDS | MASK_WORDS | {'xml', 'xmls', 'txt', 'class', 'dir', 'bbox', 'boxes'}
# Words that stand next to that of a split without changing what it says
NEUTRAL = KIND_WORDS | set(
    'instances coco set data dataset split json yolo voc obj object objects info all lvis '
    'left bit fine'.split()
)
TAIL = re.compile(r'[ _.\-]([A-Za-z]+[A-Za-z0-9]*)$')  # the last word of a name
RESULTS = re.compile(r'(^|/)runs/(detect|segment|pose|obb|classify|train|val)/')  # of Ultralytics
GENERATED = '_data'  # end of the name of the folder that is written next to a config
LIST = re.compile(rb'"(images|annotations)"\s*:\s*\[')
FILE_NAME = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')
COCO_URL = re.compile(rb'"coco_url"\s*:\s*("(?:[^"\\]|\\.)*")')
HEAD = 4096  # bytes at the beginning of a file that tell its format
TRIED = 20  # files of a folder whose beginnings are looked at
SHOWN = 4
# Cityscapes' 19 classes, by the values of its labelIds
CITYSCAPES = dict(
    zip(
        (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33),
        (
            'road,sidewalk,building,wall,fence,pole,traffic light,traffic sign,vegetation,terrain,'
            'sky,person,rider,car,truck,bus,train,motorcycle,bicycle'
        ).split(','),
    )
)
CITYSCAPES_VALUES = range(34)


class Recognized(NamedTuple):
    """What a folder has, as the settings of a `data.yaml` without `path`."""

    settings: dict[str, Any]
    notes: list[str]  # what a person should know, one line each
    questions: list[Question]
    is_declared: bool = False  # by a file of another tool


class NotRecognized(UserError):
    """A folder has no data in a known layout."""

    def __init__(self, root: Path, reason: str = '') -> None:
        super().__init__(
            f'{root} must have boxes for a detector (COCO: a JSON file; YOLO: data.yaml or '
            'labels/*.txt; Pascal VOC: *.xml) or segmentation masks for a segmentor (images/ '
            f'and masks/, or a.jpg and a_mask.png){reason}'
        )


class Ambiguous(UserError):
    """A folder has data in several layouts."""


def recognize(root: Path, formats: Optional[Sequence[str]] = None) -> Recognized:
    """Recognize the layout of a folder.

    Args:
        root: the folder.
        formats: those that are asked for; None: all.

    Raises:
        NotRecognized: none of them is there.
        Ambiguous: several are.
    """
    if not root.is_dir():
        raise UserError(f'no folder {root}' if not root.exists() else f'{root} is not a folder')
    listing = Listing(root)
    if not listing.names:
        raise UserError(f'{root} is empty')
    own = own_description(listing, formats)
    if own:
        return own
    found = recognized_formats(listing, formats or list(RECOGNIZERS))
    others = [] if found or not formats else [*recognized_formats(listing, list(RECOGNIZERS))]
    if others:
        asked = ' or '.join(formats or ())
        raise UserError(
            f'{root} has data in the format {" and ".join(others)}, but {asked} is asked for: '
            'detectors train on coco, yolo and voc, and segmentors on masks'
        )
    if not found:
        raise NotRecognized(root, foreign_format(listing))
    declared = [kind for kind, recognized in found.items() if recognized.is_declared]
    if len(declared) == 1:
        others = [kind for kind in found if kind not in declared]
        recognized = found[declared[0]]
        if others:
            recognized.notes.append(f'the folder has data in {" and ".join(others)}, too: not used')
        return with_notes(recognized, listing)
    if len(found) > 1:
        options = ' or '.join(f'--format {kind}' for kind in found)
        raise Ambiguous(f'{root} has data in several formats; choose one with {options}')
    (recognized,) = found.values()
    return with_notes(recognized, listing)


def recognized_formats(listing: 'Listing', formats: Sequence[str]) -> dict[str, Recognized]:
    found = {}
    for kind in formats:
        recognized = RECOGNIZERS[kind](listing)
        if recognized:
            found[kind] = recognized
    return found


def with_notes(recognized: Recognized, listing: 'Listing') -> Recognized:
    for name in listing.undecodable[:SHOWN]:
        shown = name.encode('utf-8', 'backslashreplace').decode()
        recognized.notes.append(f'left out, its name is not UTF-8: {shown}')
    return recognized


class Listing:
    """The files below a folder, without hidden ones, results, and what new-config wrote."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [path for path in files_below(root) if path.is_file()]  # no pipes, no broken links
        every = [path.relative_to(root).as_posix() for path in paths]
        self.undecodable = [name for name in every if not is_utf8(name)]
        names = [name for name in every if is_utf8(name)]
        generated = tuple(
            f'{name.removesuffix(".py")}{GENERATED}/' for name in names if name[-3:] == '.py'
        )
        if generated:
            names = [name for name in names if not name.startswith(generated)]
        names = [name for name in names if not RESULTS.search(name)]
        self.names = sorted(names, key=lambda name: (name.count('/'), name))  # the root's first
        self.images = [name for name in self.names if is_image(name)]
        self._by_last_parts: dict[int, dict[str, list[str]]] = {}
        self.image_folders = by_folder(self.images)
        self._settings: dict[str, dict[str, Any]] = {}  # of YAML files

    def ending(self, *endings: str) -> list[str]:
        return [n for n in self.names if posixpath.splitext(n)[1].lower() in endings]

    def named(self, *names: str) -> list[str]:
        """The files with some names, whatever their case."""
        return [n for n in self.names if posixpath.basename(n).lower() in names]

    def head(self, name: str) -> bytes:
        with (self.root / name).open('rb') as file:
            return file.read(HEAD)

    def settings(self, name: str) -> dict[str, Any]:
        """The settings in a YAML file."""
        if name not in self._settings:
            self._settings[name] = load_yaml(self.root / name)
        return self._settings[name]

    def with_last_parts(self, count: int) -> dict[str, list[str]]:
        """The images by their comparable names and the folders above, `count` parts in all."""
        if count not in self._by_last_parts:
            found = defaultdict(list)
            for name in self.images:
                parts = comparable(name).split('/')
                if len(parts) >= count:
                    found['/'.join(parts[-count:])].append(name)
            self._by_last_parts[count] = found
        return self._by_last_parts[count]


def by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    """Files by their folder; that of the data is `.`."""
    found = defaultdict(list)
    for name in names:
        found[posixpath.dirname(name) or '.'].append(name)
    return dict(found)


# Splits


class Splits(NamedTuple):
    """Paths by what their names say they are for."""

    by_split: dict[str, list[str]]
    unnamed: list[str]  # their names say nothing
    doubtful: list[str]  # names with a word of a split and others, or words of several


def splits_of(paths: Sequence[str]) -> Splits:
    """What files or folders are for, by the last part of each path that has the word of a split.

    A word next to it that not all such names share makes it doubtful: `crash test`, `site_dev`.
    """
    said: dict[str, tuple[set[str], set[str]]] = {}  # by path: splits, and other words
    for path in paths:
        for part in reversed(path.split('/')):
            words = {word.lower() for word in WORD.findall(without_data_ending(part))}
            if words & EVERY_SPLIT_WORD:
                splits = {s for s, names in SPLIT_WORDS.items() if words & names}
                rest = {word for word in words - EVERY_SPLIT_WORD - NEUTRAL if len(word) > 1}
                said[path] = splits, rest
                break
    rests = [rest for _, rest in said.values()]
    shared = set.intersection(*rests) if len(rests) > 1 else set()
    result = Splits(defaultdict(list), [], [])
    for path in paths:
        splits, rest = said.get(path, (set(), set()))
        is_only_training = len(said) == 1 and splits == {'train'}
        if not splits:
            result.unnamed.append(path)
        elif len(splits) > 1 or rest - shared and not is_only_training:
            result.doubtful.append(path)
        else:
            result.by_split[splits.pop()].append(path)
    return result


def split_of(path: str) -> Optional[str]:
    """What the name of a single path says it is for."""
    found = [*splits_of([path]).by_split]
    return found[0] if found else None


def without_data_ending(name: str) -> str:
    stem, ending = posixpath.splitext(name)
    return stem if ending.lower() in ('.json', '.txt', '.xml') else name


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


# Files that declare data


def own_description(listing: Listing, formats: Optional[Sequence[str]]) -> Optional[Recognized]:
    """A data.yaml in the folder that cpvt check-data wrote, or a person for it: it has `format`."""
    for name in listing.named('data.yaml', 'data.yml'):
        if '/' in name:
            continue
        settings = listing.settings(name)
        kind = settings.get('format')
        if isinstance(kind, str) and kind:
            if formats and kind not in formats:
                raise UserError(
                    f'{listing.root / name} declares {kind}, not {" or ".join(formats)}'
                )
            notes = [f'{name} declares the data']
            check_number_of_names(settings, name, notes)
            return Recognized(settings, notes, [], is_declared=True)
    return None


def declared_lists(listing: Listing) -> Optional[tuple[str, dict[str, Any]]]:
    """The YAML file of Ultralytics that names images, or Darknet's obj.data, with its settings."""
    for name in listing.ending('.yaml', '.yml'):
        is_expected = stem_of(name) in ('data', 'dataset')
        try:
            settings = listing.settings(name)
        except UserError:
            if is_expected:
                raise
            continue
        settings = {ALIASES.get(key, key): value for key, value in settings.items()}
        if any(is_path(settings.get(split)) for split in ('train', 'val')):
            return name, settings
    for name in listing.ending('.data'):
        settings = {}
        for line in lines_of(listing.root / name):
            key, _, value = line.partition('=')
            key = key.strip().lower()
            settings[ALIASES.get(key, key)] = value.strip()
        if settings.get('train'):
            return name, settings
    return None


def is_path(value: Any) -> bool:
    """Whether a setting is a path or a list of paths."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(item, str) and item for item in values)


def recognize_declared(listing: Listing, kind: str) -> Optional[Recognized]:
    """The data that a file of Ultralytics or Darknet declares, with paths that exist here."""
    declared = declared_lists(listing)
    if declared is None:
        return None
    name, given = declared
    if ('masks_dir' in given) != (kind == 'masks'):
        return None
    base = (listing.root / name).parent
    folder = given.get('path')
    if folder is not None and not isinstance(folder, str):
        raise UserError(f'{listing.root / name}: path must be a path')
    places = [base / folder, base] if folder else [base]
    settings: dict[str, Any] = {'format': kind}
    notes = [f'{name} declares the data']
    lists = []
    for split in SPLITS:
        value = given.get(split)
        if not value:
            continue
        if not is_path(value):
            raise UserError(f'{listing.root / name}: {split} must be a path or a list of paths')
        entries = value if isinstance(value, list) else [value]
        found = [declared_place(listing, entry, places) for entry in entries]
        missing = [entry for entry, place in zip(entries, found) if place is None]
        if missing and split == 'test':
            notes.append(f'test is left out: {missing[0]} of {name} does not exist'[:300])
            continue
        if missing:
            raise UserError(
                f'{listing.root / name}: {split} is {missing[0]}, which does not exist'[:300]
            )
        moved = [f'{e} is {p}' for e, p in zip(entries, found) if not is_same_path(e, p, listing)]
        notes += [f'{split}: {line}' for line in moved[:SHOWN]]
        settings[split] = one_or_many(found)
        lists += [place for place in found if place and (listing.root / place).is_file()]
    add_prefix_of_lists(listing, lists, settings)
    for key in ('names', 'nc', 'masks_dir', 'kpt_shape'):
        if key in given:
            settings[key] = given[key]
    if name.endswith('.data'):
        settings['names'] = darknet_names(listing, name, settings)
    check_number_of_names(settings, name, notes)
    if 'names' not in settings:
        classes = classes_from_files(listing.root, listing.names)
        settings.update(classes.settings)
        notes += classes.notes
    else:
        warn_about_other_orders(listing, settings['names'], name, notes)
    settings.pop('nc', None)
    if lists and kind == 'yolo':
        note_unlisted(listing, lists, notes)
    return Recognized({k: v for k, v in settings.items() if v}, notes, [], is_declared=True)


def note_unlisted(listing: Listing, lists: Sequence[str], notes: list[str]) -> None:
    """Note images with labels that no list has."""
    listed = {
        posixpath.basename(comparable(line))
        for path in lists
        for line in lines_of(listing.root / path)
    }
    folder = Folder(listing.root)
    unlisted = [n for n in listing.images if posixpath.basename(comparable(n)) not in listed]
    count = sum(label_file(folder, name, SplitPart('.')) is not None for name in unlisted)
    if count:
        notes.append(f'{count} labelled images are left out: no list has them')


def is_same_path(entry: str, place: Optional[str], listing: Listing) -> bool:
    return os.path.normpath(entry.replace('\\', '/')) in (place, str(listing.root / str(place)))


def declared_place(listing: Listing, entry: str, places: Sequence[Path]) -> Optional[str]:
    """The folder or list that an entry names, relative to the folder of the data: as it says, or
    without the `../` that Roboflow writes too often, or with its last part, as Darknet's are
    relative to wherever it is started."""
    entry = entry.replace('\\', '/')
    inside = entry
    while inside.startswith('../'):
        inside = inside.removeprefix('../')
    tried = [place / entry for place in places]
    tried += [places[-1] / inside, places[-1] / posixpath.basename(entry.rstrip('/'))]
    for place in tried:
        if place.exists():
            return Path(os.path.relpath(place, listing.root)).as_posix()
    return None


def add_prefix_of_lists(listing: Listing, lists: Sequence[str], settings: dict[str, Any]) -> None:
    """Add the folders of another machine that the lines of lists begin with."""
    prefixes = set()
    for path in lists:
        lines = [line.split('\t')[0] for line in lines_of(listing.root / path)]
        names = [line for line in lines if not line.startswith('./')]
        places = image_places(listing, names, None, '') if names else None
        if places and '.' in places.folders:
            prefixes.add(places.prefix)
    if len(prefixes) == 1 and prefixes != {''}:
        settings['strip_prefix'] = prefixes.pop()


def darknet_names(listing: Listing, name: str, settings: dict[str, Any]) -> Any:
    """The names of the file that obj.data names."""
    given = str(settings.get('names') or '')
    base = (listing.root / name).parent
    for place in (base / given, base / posixpath.basename(given)):
        if given and place.is_file():
            return lines_of(place)
    return None


def check_number_of_names(settings: dict[str, Any], name: str, notes: list[str]) -> None:
    count = whole_number(settings.get('nc'))
    names = settings.get('names')
    if count is not None and isinstance(names, (list, dict)) and names and len(names) != count:
        notes.append(
            f'{name} declares another number of classes than it names, and the names count: nc is '
            f'{count}, and there are {len(names)} names'
        )


def warn_about_other_orders(listing: Listing, names: Any, source: str, notes: list[str]) -> None:
    """Note a classes.txt that has the names of another file in another order."""
    texts = list(names.values()) if isinstance(names, dict) else names
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return
    for name in listing.named('classes.txt', 'obj.names'):
        other = lines_of(listing.root / name)
        if other != texts and sorted(other) == sorted(texts):
            notes.append(f'{name} has the classes in another order than {source}, which counts')


# Images that files of annotations name


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


# COCO


class CocoFile(NamedTuple):
    """What the text of a COCO file shows without being parsed."""

    path: str
    images: list[str]  # names
    has_boxes: bool
    has_annotations: bool


def coco_files(listing: Listing) -> list[CocoFile]:
    """The JSON files that have lists of images and annotations, or one of these, if they are
    torn. COCO's lists of test images have categories instead of annotations."""
    found = []
    for name in listing.ending('.json'):
        text = (listing.root / name).read_bytes()
        lists = {*LIST.findall(text)}
        is_torn = not text.rstrip().endswith(b'}')
        is_object = not text.lstrip().startswith(b'[')  # CreateML, for example
        is_list_of_images = b'images' in lists and b'"categories"' in text
        if is_object and (len(lists) == 2 or lists and is_torn or is_list_of_images):
            is_empty = re.search(rb'"annotations"\s*:\s*\[\s*\]', text) is not None
            has_annotations = b'annotations' in lists and not is_empty
            is_panoptic = b'"segments_info"' in text and b'instances' not in name.encode()
            has_boxes = b'"bbox"' in text and not is_panoptic
            found.append(CocoFile(name, names_of_images(text), has_boxes, has_annotations))
    return found


def names_of_images(text: bytes) -> list[str]:
    names = []
    for quoted in FILE_NAME.findall(text) or COCO_URL.findall(text):
        try:
            names.append(json.loads(quoted))
        except ValueError:  # no UTF-8: the reader says so
            continue
    if not FILE_NAME.search(text):  # LVIS
        names = ['/'.join(name.split('/')[-2:]) for name in names]
    return names


def recognize_coco(listing: Listing) -> Optional[Recognized]:
    files = [f for f in coco_files(listing) if f.has_boxes or not f.has_annotations]
    if not files:
        return None
    notes: list[str] = []
    questions: list[Question] = []
    of_path = {file.path: file for file in files}
    found = splits_of(list(of_path))
    by_split = {split: list(found.by_split.get(split, [])) for split in SPLITS}
    doubtful = []
    for path in found.doubtful:
        if is_of_coco(path, by_split):
            notes.append(f'{path} is left out: COCO has the objects in other files')
        else:
            doubtful.append(path)
    if not by_split['train'] and not doubtful:
        by_split['train'] = found.unnamed
    else:
        notes += [f'{path} is left out: its name says no split' for path in found.unnamed]
    settings: dict[str, Any] = {'format': 'coco'}
    annotations: dict[str, str] = {}
    undecided: dict[str, list[str]] = {}
    prefixes = set()
    for split, paths in by_split.items():
        if not paths:
            continue
        chosen = one_file(paths, of_path, split)
        if chosen is None:
            undecided[split] = paths
            continue
        path = chosen
        annotations[split] = path
        names = of_path[path].images
        home = posixpath.dirname(path) or '.'
        places = image_places(listing, names, split, home) if names else None
        if places is None:
            settings[split] = '.'
            if names:
                notes.append(
                    f'no image that {path} names is in the folder, such as {names[0]}'[:300]
                )
            continue
        is_of_others = split == 'test' and not of_path[path].has_annotations and places.is_doubtful
        if is_of_others:
            notes.append(f'{path} is left out: only folders of other splits have its images')
            del annotations[split]
            continue
        prefixes.add(places.prefix)
        if len(places.folders) > 1:
            shown = ', '.join(f'{f} ({places.counts[f]} of {len(names)})' for f in places.folders)
            text = f'the images of {path} are in several folders, {shown}: which of them?'
            questions.append(Question(text, [{split: folder} for folder in places.folders]))
        else:
            settings[split] = places.folders[0]
    if len(prefixes) > 1:
        questions.append(
            Question(
                'the names of images begin with different folders: which is to be left out?',
                [{'strip_prefix': prefix} for prefix in sorted(prefixes) if prefix],
            )
        )
    elif prefixes and prefixes != {''}:
        settings['strip_prefix'] = prefixes.pop()
    if annotations:
        settings['annotations'] = annotations
    for split, paths in undecided.items():
        text = f'which COCO file has the {split} data: {", ".join(paths[:SHOWN])}?'
        answers = [a for p in paths for a in coco_answers(listing, of_path[p], split, annotations)]
        questions.append(Question(text, answers))
    for path in doubtful:
        answers = []
        for split in SPLITS:
            answers += coco_answers(listing, of_path[path], split, annotations)
        questions.append(Question(f'what is {path} for?', answers))
    names_given = without_supercategory(listing.root, annotations.values())
    if names_given:
        settings['names'] = names_given
    return Recognized(settings, notes, questions)


def is_of_coco(path: str, by_split: dict[str, list[str]]) -> bool:
    """Whether a file is one of those that COCO has next to its instances: of keypoints or stuff, or
    a list for its test server. Its name says splits that have a file with a name of COCO."""
    base = posixpath.basename(path).lower()
    if not base.startswith(('person_keypoints_', 'stuff_', 'panoptic_', 'image_info_')):
        return False
    own = {
        split
        for split, paths in by_split.items()
        if any(posixpath.basename(p).lower().startswith(('instances_', 'image_')) for p in paths)
    }
    return any(word in own for word in re.findall('train|val|test', base))


def coco_answers(
    listing: Listing, file: CocoFile, split: str, annotations: dict[str, str]
) -> list[dict[str, Any]]:
    """The settings with a file for a split, with each folder that its images can be in."""
    home = posixpath.dirname(file.path) or '.'
    places = image_places(listing, file.images, split, home) if file.images else None
    answers = []
    for folder in places.folders if places else ['.']:
        answer: dict[str, Any] = {split: folder, 'annotations': {**annotations, split: file.path}}
        if places and places.prefix:
            answer['strip_prefix'] = places.prefix
        answers.append(answer)
    return answers


def one_file(paths: Sequence[str], of_path: dict[str, CocoFile], split: str) -> Optional[str]:
    """The COCO file of a split: of several, that which COCO's own names say has the instances, or
    the only one with boxes; None if names do not decide."""
    if len(paths) > 1:
        instances = [p for p in paths if 'instances' in posixpath.basename(p).lower()]
        if len(instances) == 1:
            return instances[0]
        with_boxes = [path for path in paths if of_path[path].has_boxes]
        if len(with_boxes) == 1 and split != 'test':
            return with_boxes[0]
        return None
    return paths[0]


def without_supercategory(root: Path, paths: Iterable[str]) -> Optional[list[str]]:
    """The names of categories without one that has no objects and is the super-category of the
    others, as Roboflow writes them; None if there is no such category."""
    names: dict[str, None] = {}
    left_out = set()
    for path in paths:
        text = (root / path).read_text(encoding='utf-8-sig', errors='replace')
        start = re.search(r'"categories"\s*:\s*', text)
        try:
            categories, _ = json.JSONDecoder().raw_decode(text, start.end() if start else 0)
            parents = {
                c.get('supercategory') for c in categories if c['supercategory'] != c['name']
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        for category in categories:
            used = re.search(rf'"category_id"\s*:\s*{re.escape(str(category.get("id")))}\b', text)
            if category['name'] in parents and not used:
                left_out.add(category['name'])
            else:
                names[category['name']] = None
    kept = [name for name in names if name not in left_out]
    return kept if left_out - {*names} and kept else None


# YOLO


def recognize_yolo(listing: Listing) -> Optional[Recognized]:
    declared = recognize_declared(listing, 'yolo')
    if declared:
        return declared
    groups, undecided, notes = labelled_folders(listing)
    if not groups and not undecided:
        return None
    settings, more_notes, questions = settings_of_groups('yolo', groups, listing)
    questions += questions_about_groups('yolo', groups, undecided, {}, listing)
    classes = classes_from_files(listing.root, listing.names)
    settings.update(classes.settings)
    return Recognized(settings, notes + more_notes + classes.notes, questions + classes.questions)


def labelled_folders(listing: Listing) -> tuple[list[Group], dict[str, list[Group]], list[str]]:
    """The folders with images whose label files are found; by question, those to choose from; and
    notes."""
    texts = stems_by_folder(listing.ending('.txt'))
    folder = Folder(listing.root)
    groups: list[Group] = []
    undecided: dict[str, list[Group]] = {}
    notes: list[str] = []
    by_labels: dict[str, list[str]] = defaultdict(list)
    for images, names in listing.image_folders.items():
        labels = [label_file(folder, name, SplitPart(images)) for name in names]
        found = [label for label in labels if label]
        if found:
            if any(has_label_line(listing, label) for label in found[:TRIED]):
                groups.append(Group(images, None))
            continue
        stems = set(map(stem_of, names))
        partners = partner_folders(images, stems, texts)
        partners = [p for p in partners if folder_has_labels(listing, p)]
        if len(partners) > 1:
            text = f'which folder has the labels of {images}: {", ".join(partners[:SHOWN])}?'
            undecided[text] = [Group(images, partner) for partner in partners]
        elif partners:
            by_labels[partners[0]].append(images)
        elif groups:
            notes.append(f'{images} is left out, {len(names)} images: it has no label files')
    image_stems = stems_by_folder(listing.images)
    for labels_folder, places in by_labels.items():
        labelled = [s for place in places for s in image_stems[place] & texts[labels_folder]]
        if len(labelled) > len(set(labelled)):
            text = (
                f'of which images are the labels in {labels_folder}: {", ".join(places[:SHOWN])}?'
            )
            undecided[text] = [Group(place, labels_folder) for place in places]
        else:
            groups += [Group(place, labels_folder) for place in places]
    return groups, undecided, notes


def folder_has_labels(listing: Listing, folder: str) -> bool:
    names = [n for n in listing.ending('.txt') if (posixpath.dirname(n) or '.') == folder]
    return any(has_label_line(listing, name) for name in names[:TRIED])


def has_label_line(listing: Listing, name: str) -> bool:
    """Whether a text begins with a class and at least four numbers."""
    lines = listing.head(name).decode('utf-8-sig', 'replace').split('\n')
    values = lines[0].split()
    return len(values) >= 5 and all(re.fullmatch(r'[-+0-9.eE]+|nan|inf', v) for v in values[:5])


# Pascal VOC


def recognize_voc(listing: Listing) -> Optional[Recognized]:
    folders = {}
    for folder, names in by_folder(listing.ending('.xml')).items():
        tags = {root_tag(listing, name) for name in names[:TRIED]}
        if any(tag.lower() == 'annotation' for tag in tags):
            folders[folder] = names
    if not folders:
        return None
    images = stems_by_folder(listing.images)
    groups = []
    undecided = {}
    questions = []
    for folder, names in folders.items():
        stems = set(map(stem_of, names))
        places = voc_images(folder, stems, images)
        if len(places) > 1:
            text = f'where are the images of {folder}: {", ".join(places[:SHOWN])}?'
            undecided[text] = [Group(place, folder) for place in places]
        elif places:
            groups.append(Group(places[0], folder))
        else:
            answer = {split_of(folder) or 'train': 'FOLDER', 'annotations': folder}
            questions.append(Question(f'where are the images of {folder}?', [answer]))
    lists = image_sets(listing, 'Main')
    settings, notes, more = settings_with_lists('voc', groups, lists, listing)
    questions += [q for q in more if 'below it' not in q.text]  # XML files are read, not images
    questions += questions_about_groups('voc', groups, undecided, lists, listing)
    return Recognized(settings, notes, questions)


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


def voc_images(folder: str, stems: set[str], images: dict[str, set[str]]) -> list[str]:
    """The folders that can have the images of XML files: JPEGImages next to Annotations, or
    `partner_folders`; the folder itself if it has images of other names."""
    parts = folder.split('/')
    for word in ('JPEGImages', 'images', 'Images'):
        if parts[-1].lower() == 'annotations':
            place = '/'.join([*parts[:-1], word])
            if stems & images.get(place, set()):
                return [place]
    without_masks = {f: s for f, s in images.items() if not is_mask_folder(f)}
    found = partner_folders(folder, stems, without_masks)
    return found or ([folder] if folder in images else [])


def root_tag(listing: Listing, name: str) -> str:
    """The name of the first element of an XML file; '' of others."""
    match = re.search(rb'<([A-Za-z_][\w.\-]*)', listing.head(name))
    return match[1].decode() if match else ''


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


# Segmentation masks


def recognize_masks(listing: Listing) -> Optional[Recognized]:
    declared = recognize_declared(listing, 'masks')
    if declared:
        return declared
    pairs, undecided = mask_folders(listing)
    if not pairs and not undecided:
        return None
    suffixes = {(pair.image_suffix, pair.mask_suffix) for pair in pairs}
    groups = [Group(pair.images, pair.masks) for pair in pairs]
    lists = image_sets(listing, 'Segmentation')
    settings, notes, questions = settings_with_lists('masks', groups, lists, listing)
    for place, options in undecided.items():
        shown = ', '.join(f'{pair.masks} (*{pair.mask_suffix})' for pair in options[:SHOWN])
        text = f'which masks belong to the images in {place}: {shown}?'
        answers = []
        for pair in options:
            with_pair, _, _ = settings_with_lists(
                'masks', [*groups, Group(pair.images, pair.masks)], lists, listing
            )
            answers.append({**differing(with_pair, settings), **settings_of_suffixes(pair)})
        questions.append(Question(text, answers))
    if len(suffixes) > 1:
        shown = ', '.join(f'{image!r} and {mask!r}' for image, mask in sorted(suffixes))
        questions.append(
            Question(
                f'names of images and masks end in different ways ({shown}): write the pairs to '
                'text files, an image, a tab and its mask in each line',
                [{'train': 'train.txt'}],
            )
        )
    elif pairs:
        settings.update(settings_of_suffixes(pairs[0]))
    every = [*pairs, *(pair for options in undecided.values() for pair in options)]
    used = {pair.images for pair in every} | {pair.masks for pair in every}
    for folder, names in listing.image_folders.items():
        if folder not in used and not is_mask_folder(folder) and not is_other_folder(folder):
            if not any(folder.startswith(f'{place}/') for place in used):
                notes.append(f'{folder} is left out, {len(names)} images: they have no masks')
    settings, more_questions, more_notes = with_classes_of_masks(listing, settings, pairs)
    return Recognized(settings, notes + more_notes, questions + more_questions)


class PairedFolders(NamedTuple):
    """A folder of images and that of their masks, and what their names end with."""

    images: str
    masks: str
    image_suffix: str
    mask_suffix: str


def settings_of_suffixes(pair: PairedFolders) -> dict[str, str]:
    suffixes = {'image_suffix': pair.image_suffix, 'mask_suffix': pair.mask_suffix}
    return {key: suffix for key, suffix in suffixes.items() if suffix}


def is_mask_folder(folder: str) -> bool:
    return any(
        part.lower() in MASK_WORDS or {w.lower() for w in WORD.findall(part)} & MASK_WORDS
        for part in folder.split('/')
    )


def is_other_folder(folder: str) -> bool:
    return any(
        part.lower() in OTHER_WORDS or {w.lower() for w in WORD.findall(part)} & OTHER_WORDS
        for part in folder.split('/')
    )


def mask_folders(
    listing: Listing,
) -> tuple[list[PairedFolders], dict[str, list[PairedFolders]]]:
    """The folders of images that have masks, in another folder or their own; and by folder of
    images, those to choose from."""
    folders = listing.image_folders
    masks = [f for f in folders if is_mask_folder(f) and not is_other_folder(f)]
    images = [f for f in folders if not is_mask_folder(f) and not is_other_folder(f)]
    pairs: list[PairedFolders] = []
    undecided: dict[str, list[PairedFolders]] = {}
    of_images: dict[str, list[PairedFolders]] = defaultdict(list)
    for mask_folder in masks:
        same_key = [f for f in images if key_of(f) == key_of(mask_folder)]
        for place in same_key or images:
            stems = set(map(stem_of, folders[place]))
            suffixes = shared_suffixes(stems, set(map(stem_of, folders[mask_folder])))
            for image_suffix, mask_suffix in suffixes:
                pair = PairedFolders(place, mask_folder, image_suffix, mask_suffix)
                of_images[place].append(pair)
    for place, found in of_images.items():
        if len(found) > 1:
            undecided[place] = found
        else:
            pairs.append(found[0])
    if not of_images:
        for place, names in folders.items():
            within = pairs_within(place, set(map(stem_of, names)))
            if within:
                pairs.append(within)
    return pairs, undecided


def pairs_within(folder: str, stems: set[str]) -> Optional[PairedFolders]:
    """The suffixes of masks in the folder of their images, such as a.jpg and a_mask.png."""
    masks = {stem for stem in stems if is_mask_tail(tail_of(stem))}
    for image_suffix, mask_suffix in shared_suffixes(stems - masks, masks):
        if mask_suffix:
            return PairedFolders(folder, folder, image_suffix, mask_suffix)
    return None


def tail_of(stem: str) -> str:
    match = TAIL.search(stem)
    return match[0] if match else ''


def is_mask_tail(tail: str) -> bool:
    return tail.strip(' _.-').lower() in MASK_WORDS or tail == '_L'  # CamVid: a_L.png


def shared_suffixes(images: set[str], masks: set[str]) -> list[tuple[str, str]]:
    """What the names of images and masks end with after what they share, each pair of suffixes that
    most of the masks have; several are ambiguous. Of Cityscapes' masks, that for training."""
    if images & masks:
        return [('', '')]
    tails = {tail_of(stem) for stem in images}
    image_suffixes = ['']
    if len(tails) == 1 and {w.lower() for w in WORD.findall(next(iter(tails)))} <= IMAGE_WORDS | {
        'left',
        'bit',
    }:
        image_suffixes.append(tails.pop())
    found: Counter = Counter()
    for image_suffix in image_suffixes:
        bases = {stem.removesuffix(image_suffix) for stem in images}
        for mask in masks:
            base = mask
            while base:
                tail = tail_of(base)
                if not tail:
                    break
                base = base.removesuffix(tail)
                if base in bases:
                    found[image_suffix, mask[len(base) :]] += 1
                    break
            if mask in bases and image_suffix:
                found[image_suffix, ''] += 1
    found = Counter({k: n for k, n in found.items() if not is_of_others(k[1])})
    training = [key for key in found if key[1].endswith('labelTrainIds')]
    if training:
        return training
    most = max(found.values(), default=0)
    return [key for key, count in found.items() if count == most]


def is_of_others(suffix: str) -> bool:
    return bool({word.lower() for word in re.findall('[A-Za-z]+', suffix)} & OTHER_WORDS)


def with_classes_of_masks(
    listing: Listing, settings: dict[str, Any], pairs: Sequence[PairedFolders]
) -> tuple[dict[str, Any], list[Question], list[str]]:
    """Settings with the names of the values of masks or their colours, or a question about them."""
    suffix = settings.get('mask_suffix', '')
    if suffix.endswith('labelTrainIds'):
        return {**settings, 'names': dict(enumerate(CITYSCAPES.values()))}, [], []
    if suffix.endswith('_labelIds') and 'gt' in suffix:
        ignored = [value for value in CITYSCAPES_VALUES if value not in CITYSCAPES]
        return {**settings, 'names': CITYSCAPES, 'ignored': [*ignored, 255]}, [], []
    classes = classes_from_files(listing.root, listing.names, for_masks=True)
    settings = {**settings, **classes.settings}
    questions = list(classes.questions)
    mode = mask_mode(listing, pairs)
    if 'colors' in classes.settings and mode in ('L', '1', 'I;16', 'I'):
        colors = classes.settings['colors']
        if any(len(set(color)) > 1 for color in colors.values()):
            settings.pop('colors')
            names = list(colors)
            settings.pop('names', None)
            questions.append(
                Question(
                    f'{classes.source} lists colours, but masks have one channel of values: are '
                    'the values the numbers of its lines?',
                    [{'names': dict(enumerate(names))}],
                )
            )
    return settings, questions, classes.notes


def mask_mode(listing: Listing, pairs: Sequence[PairedFolders]) -> str:
    """Pillow's mode of the first mask that has a header."""
    for pair in pairs:
        for name in listing.image_folders[pair.masks]:
            if comparable_stem(without_ending(name)).endswith(pair.mask_suffix):
                try:
                    with open_image(listing.root / name) as image:
                        return image.mode
                except Exception:  # Pillow raises many kinds on a damaged file
                    continue
    return ''


# Formats that are not read


FOREIGN: tuple[tuple[str, Callable[[bytes], bool], str], ...] = (
    (
        '.json',
        lambda t: b'"shapes"' in t and b'"version"' in t,
        'LabelMe; convert its files to COCO',
    ),
    ('.json', lambda t: b'"_via' in t or b'"regions"' in t, 'VIA; export the project as COCO'),
    ('.csv', lambda t: b'region_shape_attributes' in t, 'VIA; export the project as COCO'),
    ('.json', lambda t: b'"classTitle"' in t or b'"geometryType"' in t, 'Supervisely; export COCO'),
    ('.json', lambda t: b'"coordinates"' in t and b'"label"' in t, 'CreateML; convert it to COCO'),
    (
        '.json',
        lambda t: b'"completed_by"' in t or b'rectanglelabels' in t,
        'Label Studio; export COCO',
    ),
    ('.xml', lambda t: b'<annotations>' in t, 'CVAT; export the task as COCO'),
    ('.tfrecord', lambda t: True, 'TensorFlow; convert it to COCO'),
    ('.record', lambda t: True, 'TensorFlow; convert it to COCO'),
    ('.parquet', lambda t: True, 'a table; convert it to COCO'),
    (
        '.csv',
        lambda t: b'xmin' in t[:300].lower() or b'bbox' in t[:300].lower(),
        'a table of boxes; convert it to COCO',
    ),
)


def foreign_format(listing: Listing) -> str:
    """What the files of a folder are that is known, but not read; as the end of a message."""
    for ending, is_of, tool in FOREIGN:
        for name in listing.ending(ending)[:TRIED]:
            if is_of(listing.head(name)):
                return f'. {name} is of {tool}'
    return ''


RECOGNIZERS: dict[str, Callable[[Listing], Optional[Recognized]]] = {
    'coco': recognize_coco,
    'yolo': recognize_yolo,
    'voc': recognize_voc,
    'masks': recognize_masks,
}
