"""Segmentation masks: an image of labels for each image."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ...images.formats import open_image
from ..class_files import classes_from_files
from ..description import Question
from ..files import comparable_stem, stem_of, without_ending
from .declared import recognize_declared
from .folders import Group, differing, image_sets, key_of, settings_with_lists
from .listing import Listing, Recognized
from .words import IMAGE_WORDS, MASK_WORDS, SHOWN, WORD

# Of masks of objects, of masks that are only looked at, and of Cityscapes' other files
OTHER_WORDS = set('object instance instances instanceids panoptic color colour overlay vis'.split())
OTHER_WORDS |= {'visualization', 'segmentationobject', 'segmentationclassvisualization'}
TAIL = re.compile(r'[ _.\-]([A-Za-z]+[A-Za-z0-9]*)$')  # the last word of a name
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
        if len({pair.masks for pair in options}) < len(options):
            text += ' If each file is the mask of one class, first merge those of an image to one'
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
