"""YOLO: a text file of boxes or polygons for each image."""

import posixpath
import re
from collections import defaultdict
from typing import Optional

from ...tooling.report import amount
from ..class_files import classes_from_files
from ..description import SplitPart
from ..files import Folder, stem_of
from ..yolo import label_file
from .declared import recognize_declared
from .folders import (
    Group,
    partner_folders,
    questions_about_groups,
    settings_of_groups,
    stems_by_folder,
)
from .listing import Listing, Recognized
from .words import SHOWN, TRIED


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
            notes.append(
                f'{images} is left out, {amount(len(names), "image")}: it has no label files'
            )
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
