"""Segmentation masks: an image of the same size for each image, with a value or colour per class.

mmseg's data sets read masks whose names differ from their images' in a suffix alone, without checks
of values. So pairs are found and read here, and masks with other values than mmseg expects are
written as indices.
"""

from typing import Any, NamedTuple, Optional

from ...tooling.command import UserError
from ..annotation_files import annotated_images
from ..class_files import classes_from_files
from ..data import UNREAD, DataImage, DataSet, Split
from ..defects import Defects
from ..description import IGNORED, Description
from ..files import comparable_stem, stem_of
from ..folders import (
    SHOWN,
    Group,
    are_partners,
    check_that_folders_are_apart,
    image_sets,
    is_mask_folder,
    settings_of_groups,
    words_in,
)
from ..layout import EXAMPLE_OF_FILES, Layout, Recognized, Undecided
from ..listing import Listing
from ..mask_values import MOST_VALUES, names_to_complete, values_of_classes

# Of masks of objects, of masks that are only looked at, and of Cityscapes' other files
OTHER_WORDS = set(
    'object objects instance instances panoptic color colors colour overlay vis visualization '
    'segmentationobject'.split()
)


class Ends(NamedTuple):
    """What the names of images and masks have after what they share."""

    image: str
    mask: str


# In this order: of masks whose names tell their values, those for training first
ENDS = (
    Ends('_leftImg8bit', '_gtFine_labelTrainIds'),
    Ends('_leftImg8bit', '_gtFine_labelIds'),
    Ends('', ''),
    *(
        Ends(image, mask)
        for image in ('', '_sat', '_image', '_img')
        for mask in ('_mask', '_segmentation', '_label', '_labels', '_gt', '_seg', '_L')
    ),
    Ends('_sat', ''),
    Ends('_image', ''),
    Ends('_img', ''),
)
CITYSCAPES = (
    'road,sidewalk,building,wall,fence,pole,traffic light,traffic sign,vegetation,terrain,sky,'
    'person,rider,car,truck,bus,train,motorcycle,bicycle'
).split(',')
CITYSCAPES_IDS = 7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33
KNOWN_VALUES: dict[str, dict[str, Any]] = {  # the settings of masks with such ends
    '_gtFine_labelTrainIds': {'names': dict(enumerate(CITYSCAPES))},
    '_gtFine_labelIds': {
        'names': dict(zip(CITYSCAPES_IDS, CITYSCAPES)),
        'ignored': [*(value for value in range(34) if value not in CITYSCAPES_IDS), IGNORED],
    },
}


class PairedFolders(NamedTuple):
    """A folder of images and that of their masks, and what their names end with."""

    images: str
    masks: str
    ends: Ends


def recognize_masks(listing: Listing) -> Optional[Recognized]:
    """Folders of images and masks, or masks next to their images."""
    pairs = paired_folders(listing)
    if not pairs:
        return None
    groups = [Group(pair.images, pair.masks) for pair in pairs]
    settings, notes = settings_of_groups(groups, listing, image_sets(listing, 'Segmentation'))
    check_that_folders_are_apart(settings, [*listing.image_folders])
    every = sorted({pair.ends for pair in pairs})
    if len(every) > 1:
        shown = ', '.join(f'{end.image!r} and {end.mask!r}' for end in every)
        raise Undecided(f'names of images and masks end in different ways, {shown}', settings)
    (ends,) = every
    suffixes = {'image_suffix': ends.image, 'mask_suffix': ends.mask}
    settings.update({key: suffix for key, suffix in suffixes.items() if suffix})
    used = {pair.images for pair in pairs} | {pair.masks for pair in pairs}
    for folder, names in listing.image_folders.items():
        if folder not in used and not is_mask_folder(folder) and not is_other_folder(folder):
            notes.append(f'{folder} is left out, {len(names)} images: they have no masks')
    if ends.mask in KNOWN_VALUES:
        return Recognized({**settings, **KNOWN_VALUES[ends.mask]}, notes)
    classes = classes_from_files(listing.root, listing.names, for_masks=True)
    if not classes.settings:
        masks = [
            name
            for pair in pairs
            for name in listing.image_folders[pair.masks]
            if stem_of(name).endswith(comparable_stem(ends.mask))
        ]
        raise Undecided(
            'no file names the values or colours of the masks',
            {**settings, **names_to_complete(listing.root, masks)},
        )
    return Recognized({**settings, **classes.settings}, notes + classes.notes)


def is_other_folder(folder: str) -> bool:
    return bool(words_in(folder) & OTHER_WORDS)


def paired_folders(listing: Listing) -> list[PairedFolders]:
    """The folders of images that have masks, in a folder whose path differs in one part, or the
    only one; or if there are none, their own.

    Raises:
        Undecided: images have several masks, or masks of other names.
    """
    folders = {
        folder: set(map(stem_of, names))
        for folder, names in listing.image_folders.items()
        if not is_other_folder(folder)
    }
    masks = [folder for folder in folders if is_mask_folder(folder)]
    images = [folder for folder in folders if not is_mask_folder(folder)]
    pairs = []
    unnamed = []
    for place in images:
        is_only = len(images) == len(masks) == 1
        partners = [folder for folder in masks if is_only or are_partners(place, folder)]
        found = []
        for folder in partners:
            if ends := shared_ends(folders[place], folders[folder]):
                found.append(PairedFolders(place, folder, ends))
        if len(found) > 1:
            raise Undecided(
                f'the images in {place} have several masks, '
                f'{", ".join(f"{pair.masks}/*{pair.ends.mask}" for pair in found[:SHOWN])}; an '
                'image has one, with a value for each class',
                {'train': place},
            )
        pairs += found
        unnamed += [folder for folder in partners if not found]
    if pairs:
        return pairs
    for place in images:
        ends = shared_ends(folders[place], folders[place])
        if ends and ends.mask:
            pairs.append(PairedFolders(place, place, ends))
    if unnamed and not pairs:
        raise Undecided(
            f'the names in {unnamed[0]} are not those of images; write what they end with as '
            'image_suffix and mask_suffix. An image has one mask, with a value for each class: '
            'merge files of one class each'
        )
    return pairs


def shared_ends(images: set[str], masks: set[str]) -> Optional[Ends]:
    """What the names of images and masks end with after what they share: the first of `ENDS` by
    which a mask belongs to an image."""
    for ends in ENDS:
        wanted = comparable_stem(ends.image)
        bases = {stem.removesuffix(wanted) for stem in images if stem.endswith(wanted)}
        if masks & {base + comparable_stem(ends.mask) for base in bases}:
            if images is not masks or ends.mask:
                return ends
    return None


def read_masks(description: Description, found: Defects) -> DataSet:
    """The images of a description with their masks, which `check.py` reads."""
    if not description.names:
        raise UserError(f'{description.source}: names must name the values of the masks')
    if len(description.names) > MOST_VALUES:
        count = len(description.names)
        raise UserError(f'{description.source}: names has {count} classes; there can be 255')
    annotated = annotated_images(description, None, found)
    splits = {}
    for split, images in annotated.splits.items():
        entries = [DataImage(image, UNREAD, [], annotated.files[image]) for image in images]
        splits[split] = Split(entries, description.root)
    masks = values_of_classes(description)
    return DataSet(description, splits, list(description.names.values()), [], masks)


LAYOUT = Layout(
    what='an image of labels or colours for each image',
    holds='masks',
    recognize=recognize_masks,
    read=read_masks,
    example={**EXAMPLE_OF_FILES, 'names': {0: 'FIRST', 1: 'SECOND'}},
    is_declared=lambda settings: 'masks_dir' in settings,
)
