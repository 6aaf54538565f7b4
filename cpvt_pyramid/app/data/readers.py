"""Reads the data in a folder: the first layout of boxes or polygons that it has, or label maps."""

from pathlib import Path
from typing import Optional, Union
from xml.etree import ElementTree

from ..tooling.command import UserError
from .coco import Objects, read_coco_files, warn_about_classes
from .defects import Defects
from .folder import Files, NotRecognized
from .label_maps import LabelMaps, has_label_maps, read_label_maps
from .voc import read_voc
from .yolo import read_yolo

PEEKED = 4096  # bytes of a JSON file that tell its format


def read_data(
    files: Files, defects: Defects, task: Optional[str] = None
) -> Union[Objects, LabelMaps]:
    """Read the data in a folder for a task, without what `defects` collects.

    Args:
        files: those of the folder.
        defects: gets what is wrong.
        task: detection, instance or segmentation. None: objects, or label maps if there are none.

    Raises:
        NotRecognized: no layout is recognized.
        UserError: a file is broken as a whole, or the data are for another task.
    """
    files.warn(defects)
    if task == 'segmentation' and has_label_maps(files):
        return read_label_maps(files, defects)
    objects = read_objects(files, defects, masks=task == 'instance')
    if objects is None and has_label_maps(files):
        if task is None:
            return read_label_maps(files, defects)
        raise UserError(
            f'{files.root} has segmentation masks, but the base detects objects; choose a '
            'segmentor as the base, such as semantic_fpn_cpvt_s.py'
        )
    if objects is None:
        raise NotRecognized(files.root, foreign_format(files))
    if task == 'segmentation':
        raise UserError(
            f'{files.root} has objects ({objects.layout}), but the base segments images; choose a '
            'detector as the base, such as retinanet_cpvt_s.py'
        )
    every = [split.content['annotations'] for split in objects.splits.values()]
    if task == 'instance' and not any(every):
        raise UserError(
            f'the base trains masks, but the {objects.layout} data have boxes only; choose a base '
            'such as retinanet_cpvt_s.py'
        )
    return objects


def read_objects(files: Files, defects: Defects, masks: bool) -> Optional[Objects]:
    """The boxes or polygons in a folder; None if it has none. With `masks` every object must have a
    polygon or a mask."""
    for read in (read_coco_files, read_yolo, read_voc):
        objects = read(files, defects, masks)
        if objects is not None:
            warn_about_classes(objects.splits, defects)
            return objects
    return None


def foreign_format(files: Files) -> str:
    """What the files of a folder are that is known, but not read; as the end of a message."""
    for name in files.with_suffix('.json'):
        with (files.root / name).open('rb') as file:
            text = file.read(PEEKED)
        if b'"shapes"' in text and b'"version"' in text:
            return f'. {name} is of LabelMe; convert its files to COCO'
    for name in files.with_suffix('.xml'):
        if root_tag(files.root / name) == 'annotations':
            return f'. {name} is of CVAT; export the task as COCO'
    return ''


def root_tag(path: Path) -> str:
    """The name of the first element of an XML file; of a torn one, perhaps ''."""
    try:
        with path.open('rb') as file:
            for _, element in ElementTree.iterparse(file, ['start']):
                return element.tag
    except (ElementTree.ParseError, ValueError, LookupError):
        pass
    return ''
