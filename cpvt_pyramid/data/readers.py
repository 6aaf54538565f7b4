"""The layouts of data, and which of them a folder has.

A layout is recognized by a file that only it has. What has it is then read, and the one that reads
reports what is wrong.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Optional, Union

from ..tooling.command import UserError
from .coco import Objects, is_coco_folder, read_coco_files, warn_about_classes
from .defects import Defects
from .folder import Files, NotRecognized
from .label_maps import LabelMaps, has_label_maps, read_label_maps
from .voc import is_voc_folder, read_voc, root_tag
from .yolo import is_yolo_folder, read_yolo

PEEKED = 4096  # bytes of a JSON file that tell its format


class Layout(NamedTuple):
    """A layout of images with boxes or polygons."""

    name: str  # for people
    is_in: Callable[[Files], bool]
    # The objects of a folder, without what is collected as a defect; with the last argument, every
    # object must have a mask.
    read: Callable[[Files, Defects, bool], Objects]


LAYOUTS = (  # the first one that a folder has counts
    Layout('COCO', is_coco_folder, read_coco_files),
    Layout('YOLO', is_yolo_folder, read_yolo),
    Layout('Pascal VOC', is_voc_folder, read_voc),
)


def layout_of(files: Files) -> Optional[Layout]:
    """The layout of the boxes or polygons in a folder; None if it has none."""
    for layout in LAYOUTS:
        if layout.is_in(files):
            return layout
    return None


def find_objects(
    root: Path, defects: Defects, assigned: Optional[Mapping[str, str]] = None, masks: bool = False
) -> Objects:
    """Read the boxes and polygons in a folder, without what `defects` collects.

    Args:
        root: the folder.
        defects: gets what is wrong.
        assigned: see `Files`.
        masks: every object must have a mask.

    Raises:
        NotRecognized: no layout is recognized.
        UserError: a file is broken as a whole.
    """
    files = Files(root, assigned)
    files.warn(defects)
    layout = layout_of(files)
    if layout is None:
        raise NotRecognized(root, foreign_format(files))
    return read_objects(layout, files, defects, masks)


def read_objects(layout: Layout, files: Files, defects: Defects, masks: bool) -> Objects:
    found = layout.read(files, defects, masks)
    warn_about_classes(found.splits, defects)
    return found


def find_label_maps(
    root: Path, defects: Defects, assigned: Optional[Mapping[str, str]] = None
) -> LabelMaps:
    """Read the label maps in a folder, without what `defects` collects; for `assigned`, see
    `Files`.

    Raises:
        NotRecognized: there are none.
        UserError: a file is broken as a whole, or nothing says what the values of the maps mean.
    """
    files = Files(root, assigned)
    files.warn(defects)
    if not has_label_maps(files):
        raise NotRecognized(root, foreign_format(files))
    return read_label_maps(files, defects)


def find_data(
    root: Path, defects: Defects, assigned: Optional[Mapping[str, str]] = None
) -> Union[Objects, LabelMaps]:
    """Read the objects in a folder, or the label maps if there are none."""
    files = Files(root, assigned)
    files.warn(defects)
    layout = layout_of(files)
    if layout:
        return read_objects(layout, files, defects, masks=False)
    if has_label_maps(files):
        return read_label_maps(files, defects)
    raise NotRecognized(root, foreign_format(files))


def found_for_task(
    task: str,
    root: Path,
    base: Path,
    defects: Defects,
    assigned: Optional[Mapping[str, str]] = None,
) -> Union[Objects, LabelMaps]:
    """What the data have for the task of a base, without what `defects` collects.

    Raises:
        UserError: a file is broken as a whole, or the data are for another kind of base.
    """
    files = Files(root, assigned)
    files.warn(defects)
    layout = layout_of(files)
    if task == 'segmentation':
        if has_label_maps(files):
            return read_label_maps(files, defects)
        if layout:
            raise UserError(
                f'{root} has objects ({layout.name}), but {base} segments images; choose a '
                'detector as the base, such as retinanet_cpvt_s.py'
            )
        raise NotRecognized(root, foreign_format(files))
    if layout is None:
        if has_label_maps(files):
            raise UserError(
                f'{root} has segmentation masks, but {base} detects objects; choose a segmentor as '
                'the base, such as semantic_fpn_cpvt_s.py'
            )
        raise NotRecognized(root, foreign_format(files))
    found = read_objects(layout, files, defects, masks=task == 'instance')
    every = [split.content['annotations'] for split in found.splits.values()]
    if task == 'instance' and not any(every):
        raise UserError(
            f'the base trains masks, but the {found.layout} data have boxes only; choose a base '
            'such as retinanet_cpvt_s.py'
        )
    return found


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
