"""Pascal VOC: an XML file for each image."""

import re
from typing import Optional

from ..description import Question
from ..files import stem_of
from .folders import (
    Group,
    image_sets,
    partner_folders,
    questions_about_groups,
    settings_with_lists,
    stems_by_folder,
)
from .listing import Listing, Recognized, by_folder
from .masks import is_mask_folder
from .splits import split_of
from .words import SHOWN, TRIED


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
