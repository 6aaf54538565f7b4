"""COCO: JSON files with images and annotations."""

import json
import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..description import SPLITS, Question
from .folders import image_places
from .listing import Listing, Recognized
from .splits import splits_of
from .words import SHOWN

LIST = re.compile(rb'"(images|annotations)"\s*:\s*\[')
FILE_NAME = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')
COCO_URL = re.compile(rb'"coco_url"\s*:\s*("(?:[^"\\]|\\.)*")')


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
