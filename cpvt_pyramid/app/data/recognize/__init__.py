"""Recognizes the layout of a folder: what would be written in its `data.yaml`.

Only names and the beginnings of files are looked at. What names do not decide becomes a question
with the lines to choose from; nothing is chosen by numbers of files or by pixels.

`listing.py` is what a folder has, `splits.py` and `folders.py` are what names of files and folders
say. `declared.py` recognizes what a file of another tool declares, and each format has a file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from ...tooling.command import UserError
from ...tooling.files import full_if_current
from .coco import recognize_coco
from .declared import own_description
from .listing import Listing, Recognized
from .masks import recognize_masks
from .voc import recognize_voc
from .words import SHOWN, TRIED
from .yolo import recognize_yolo


class NotRecognized(UserError):
    """A folder has no data in a known layout."""

    def __init__(self, root: str, reason: str = '') -> None:
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
    shown = full_if_current(root)
    if not listing.names:
        raise UserError(f'{shown} is empty')
    own = own_description(listing, formats)
    if own:
        return own
    found = recognized_formats(listing, formats or list(RECOGNIZERS))
    others = [] if found or not formats else [*recognized_formats(listing, list(RECOGNIZERS))]
    if others:
        asked = ' or '.join(formats or ())
        raise UserError(
            f'{shown} has data in the format {" and ".join(others)}, but {asked} is asked for: '
            'detectors train on coco, yolo and voc, and segmentors on masks'
        )
    if not found:
        raise NotRecognized(shown, foreign_format(listing))
    declared = [kind for kind, recognized in found.items() if recognized.is_declared]
    if len(declared) == 1:
        others = [kind for kind in found if kind not in declared]
        recognized = found[declared[0]]
        if others:
            recognized.notes.append(f'the folder has data in {" and ".join(others)}, too: not used')
        return with_notes(recognized, listing)
    if len(found) > 1:
        options = ' or '.join(f'--format {kind}' for kind in found)
        raise Ambiguous(f'{shown} has data in several formats; choose one with {options}')
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


FOREIGN: tuple[tuple[str, Callable[[bytes], bool], str], ...] = (
    (
        '.json',
        lambda t: b'"shapes"' in t and b'"version"' in t,
        'a LabelMe file; convert the annotations to COCO',
    ),
    (
        '.json',
        lambda t: b'"_via' in t or b'"regions"' in t,
        'a VIA file; export the project as COCO',
    ),
    ('.csv', lambda t: b'region_shape_attributes' in t, 'a VIA file; export the project as COCO'),
    (
        '.json',
        lambda t: b'"classTitle"' in t or b'"geometryType"' in t,
        'a Supervisely file; export COCO',
    ),
    (
        '.json',
        lambda t: b'"coordinates"' in t and b'"label"' in t,
        'a CreateML file; convert it to COCO',
    ),
    (
        '.json',
        lambda t: b'"completed_by"' in t or b'rectanglelabels' in t,
        'a Label Studio file; export COCO',
    ),
    ('.xml', lambda t: b'<annotations>' in t, 'a CVAT file; export the task as COCO'),
    ('.tfrecord', lambda t: True, 'a TensorFlow file; convert it to COCO'),
    ('.record', lambda t: True, 'a TensorFlow file; convert it to COCO'),
    ('.parquet', lambda t: True, 'a table; convert it to COCO'),
    (
        '.csv',
        lambda t: b'xmin' in t[:300].lower() or b'bbox' in t[:300].lower(),
        'a table of boxes; convert it to COCO',
    ),
)


def foreign_format(listing: Listing) -> str:
    """What the files of a folder are that is known, but not read; as the end of a message."""
    for ending, is_one, what in FOREIGN:
        for name in listing.ending(ending)[:TRIED]:
            if is_one(listing.head(name)):
                return f'. {name} is {what}'
    return ''


RECOGNIZERS: dict[str, Callable[[Listing], Optional[Recognized]]] = {
    'coco': recognize_coco,
    'yolo': recognize_yolo,
    'voc': recognize_voc,
    'masks': recognize_masks,
}
