"""Large images of a data set with boxes cut into tiles, as a data set in COCO's layout.

    OUT/annotations/instances_{train,val,test}.json
    OUT/{train,val,test}/NAME_TOP_LEFT.png    a tile, by the place of its corner in the image NAME

The record of a tile has `source`, the image, and the `left` and `top` of the tile in it; `info`
has the arguments.
"""

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np
from PIL import Image

from ..predict.openmmlab.rasters import read_image
from ..tooling.command import UserError
from ..tooling.files import distinct_name, is_taken, new_folder
from ..tooling.progress import progress
from ..tooling.rasters import ReadError, open_raster
from ..tooling.tiles import (
    Window,
    areas,
    box_annotation,
    boxes_inside,
    disjoint,
    overlapping,
)
from .coco import TILES, Objects, Split, content_of_images
from .defects import Defects
from .folder import NotRecognized
from .images import Size, inspect
from .label_maps import find_label_maps
from .new_config import divided, find_objects, reported, splits_by_name

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

CACHE = 64 * 2**20  # bytes of GDAL's block cache
OFTEN = 0.25  # share of objects that are whole in no tile, from which a line says what to do


class SplitTiling(NamedTuple):
    """How the images of a split are cut.

    Attributes:
        tile: longest side of a tile in pixels.
        step: pixels between the corners of tiles; None: parts of equal sizes, side by side.
    """

    tile: int
    step: Optional[int]

    def windows(self, height: int, width: int) -> list[Window]:
        """The tiles of an image, row by row."""
        if self.step is None:
            rows, columns = (math.ceil(side / self.tile) for side in (height, width))
            return disjoint(height, width, rows, columns)
        return overlapping(height, width, self.tile, self.step)


def tile_data(
    data: Path,
    out: Path,
    tile: int,
    step: int,
    assigned: Optional[Mapping[str, str]] = None,
    boxes_only: bool = False,
    skip_bad: bool = False,
) -> list[str]:
    """Cut the images of a data set into tiles, completely or not at all; returns lines for people.

    Training tiles overlap. Those of other splits lie side by side, so that each object counts once.
    A box of which a tile has only a part is ignored there (`iscrowd`), and left out if that is less
    than a tenth; objects that are ignored stay so.

    Args:
        data: folder with images and boxes in any layout that `find_objects` reads.
        out: folder to create.
        tile: side of a tile in pixels. Images that are not larger are copied.
        step: pixels between the corners of training tiles.
        assigned: see `Files`.
        boxes_only: leave out masks of objects instead of raising an error.
        skip_bad: leave out what has errors.

    Raises:
        UserError: `out` exists, or the data cannot be read or have masks.
    """
    if not 1 <= step <= tile:
        raise UserError(f'--step must be from 1 to --tile, {tile}, got {step}')
    target = out.expanduser().resolve()
    if is_taken(out.expanduser()):
        raise UserError(f'{out} exists; remove it, or name another folder')
    if target.is_relative_to(data.resolve()):
        raise UserError(f'{out} is inside {data}, whose files it would join; name another folder')
    with reported(Defects(), skip_bad) as defects:
        found = found_boxes(data, defects, assigned, boxes_only)
        splits, notes = splits_of(found, data)
    lines = [f'{data}: {found.layout}, {len(found.classes)} classes', *notes]
    total = sum(len(split.content['images']) for split in splits.values())
    with new_folder(target) as folder, progress(total, 'images') as update:
        (folder / 'annotations').mkdir()
        for name, split in splits.items():
            tiling = SplitTiling(tile, step if name == 'train' else None)
            writer = SplitWriter(folder, name, split, tiling)
            for image in split.content['images']:
                try:
                    writer.add(image)
                except ReadError as error:
                    bad = f'{split.folder / image["file_name"]}: {error}'
                    if not skip_bad:
                        raise UserError(f'{bad}; with --skip-bad it is left out') from error
                    lines.append(f'warning: left out {bad}')
                update(1)
            writer.finish(data, step)
            lines += writer.lines()
    return [*lines, f'wrote {out}']


def found_boxes(
    data: Path, defects: Defects, assigned: Optional[Mapping[str, str]], boxes_only: bool
) -> Objects:
    """The objects of a folder.

    Raises:
        UserError: there are masks, which tiles would not have.
    """
    try:
        found = find_objects(data, defects, assigned)
    except NotRecognized:
        with suppress(NotRecognized):
            layout = find_label_maps(data, Defects(), assigned).layout
            raise UserError(
                f'{data} has {layout}, and only boxes can be cut into tiles; train with the images '
                'as they are: RandomCrop in the configs of segmentors cuts them'
            ) from None
        raise
    if not boxes_only:
        for split in found.splits.values():
            masks = sum(bool(a.get('segmentation')) for a in split.content['annotations'])
            if masks:
                raise UserError(
                    f'{data} has {masks} objects with masks or polygons, and only boxes can be cut '
                    'into tiles; leave the masks out with --boxes-only'
                )
    return found


def splits_of(found: Objects, data: Path) -> tuple[dict[str, Split], list[str]]:
    """The splits to cut, and lines for people. Tiles of one image must not be in two splits, so
    validation images are chosen here if there are none."""
    splits = {name: split for name, split in found.splits.items() if split.content['images']}
    notes = [f'note: {note}' for note in found.notes]
    if by_name := splits_by_name(found):
        notes.append(f'note: {by_name}, by name; if not, use --assign')
    if 'train' not in splits or 'val' in splits:
        return splits, notes
    train = splits.pop('train')
    images = train.content['images']
    if len(images) < 2:
        raise UserError(
            f'{data} has one training image and no validation data, and tiles of one image must '
            'not be in both; cut a part of it off for validation, or label another image'
        )
    parts = divided(images)
    notes.append(
        f'note: no validation data: {len(parts[1])} training images, chosen at random with seed 0, '
        'are used for it'
    )
    contents = [content_of_images(train.content, part) for part in parts]
    chosen = dict(zip(('train', 'val'), (Split(c, train.folder) for c in contents)))
    return {**chosen, **splits}, notes


class SplitWriter:
    """Writes the tiles of the images of a split, and its COCO file."""

    def __init__(self, folder: Path, name: str, split: Split, tiling: SplitTiling) -> None:
        self.folder = folder
        self.name = name
        self.split = split
        self.tiling = tiling
        self.images: list[dict] = []
        self.annotations: list[dict] = []
        self.sources = 0  # images that were cut or copied
        self.objects = 0  # in them, that are not ignored
        self.whole = 0  # of these, those that are whole in a tile
        self._names: set[str] = set()
        self._objects_of = defaultdict(list)
        for annotation in split.content['annotations']:
            self._objects_of[annotation['image_id']].append(annotation)
        (folder / name).mkdir()

    def add(self, image: dict) -> None:
        """Write the tiles of an image.

        Raises:
            ReadError: it cannot be read.
        """
        path = self.split.folder / image['file_name']
        size = int(image['height']), int(image['width'])
        objects = self._objects_of[image['id']]
        boxes = np.array([a['bbox'] for a in objects], float).reshape(-1, 4)
        boxes[:, 2:] = boxes[:, :2] + boxes[:, 2:].clip(0)
        boxes = boxes.clip(0, [size[1], size[0]] * 2)
        is_ignored = np.array([bool(a['iscrowd'] or a.get('ignore')) for a in objects], bool)
        is_object = ~is_ignored & (areas(boxes) > 0)
        is_whole = np.zeros(len(objects), bool)
        for window, file_name in self._write(path, size):
            number = self._record(image, window, file_name)
            inside = boxes_inside(boxes, window)
            is_whole[inside.chosen[~inside.cut]] = True
            for index, corners, cut in zip(*(part.tolist() for part in inside)):
                category = objects[index]['category_id']
                ignored = cut or bool(is_ignored[index])
                count = len(self.annotations)
                annotation = box_annotation(count + 1, number, category, corners, ignored)
                self.annotations.append(annotation)
        self.sources += 1
        self.objects += int(is_object.sum())
        self.whole += int((is_object & is_whole).sum())

    def _write(self, path: Path, size: Size) -> list[tuple[Window, str]]:
        """Write the tiles of an image, or copy one that is not larger; returns their windows and
        the names of their files. After an error there are none."""
        height, width = size
        folder = self.folder / self.name
        if max(size) <= self.tiling.tile:
            name = distinct_name(path.stem, self._names) + path.suffix
            copy_image(path, folder / name)
            return [(Window(0, 0, width, height), name)]
        windows = self.tiling.windows(height, width)
        pixels = None
        suffix = '.png'
        try:
            pixels = read_image(path)
        except ReadError:
            if path.suffix.lower() not in ('.tif', '.tiff'):
                raise
            suffix = '.tif'  # of more bands, bits or pixels
        names = []
        for window in windows:
            wanted = f'{path.stem}_{window.top:04d}_{window.left:04d}'
            names.append(distinct_name(wanted, self._names) + suffix)
        files = [folder / name for name in names]
        try:
            if pixels is None:
                write_tiffs(path, size, windows, files)
            else:
                write_pngs(pixels, size, windows, files)
        except BaseException:
            for file in files:
                file.unlink(missing_ok=True)
            raise
        return list(zip(windows, names))

    def _record(self, image: dict, window: Window, file_name: str) -> int:
        """Add the record of a tile; returns its id."""
        number = len(self.images) + 1
        self.images.append(
            dict(
                id=number,
                file_name=file_name,
                width=window.right - window.left,
                height=window.bottom - window.top,
                source=image['file_name'],
                left=window.left,
                top=window.top,
            )
        )
        return number

    def finish(self, data: Path, step: int) -> None:
        """Write the COCO file.

        Raises:
            UserError: no image could be read.
        """
        if not self.images:
            raise UserError(f'no image of the {self.name} data can be read')
        info: dict[str, Any] = dict(description=f'Tiles of {data}, by cpvt tile-data')
        info[TILES] = dict(tile=self.tiling.tile, step=step)
        content = dict(
            images=self.images,
            annotations=self.annotations,
            categories=self.split.content['categories'],
            info=info,
        )
        path = self.folder / f'annotations/instances_{self.name}.json'
        path.write_text(json.dumps(content, ensure_ascii=False), encoding='utf-8')

    def lines(self) -> list[str]:
        """What was written, for people."""
        with_objects = {a['image_id'] for a in self.annotations if not a['iscrowd']}
        lost = self.objects - self.whole
        line = (
            f'{self.name}: {len(self.images)} tiles of {self.sources} images '
            f'({len(self.images) - len(with_objects)} without objects), {self.objects} objects'
        )
        if lost:
            line += f', {lost} of them whole in no tile and ignored'
        if lost > OFTEN * self.objects:
            line += '; a larger --tile has more of them'
            if self.tiling.step is not None:
                line += ', and a smaller --step'
        return [line]


# Images, each read once


def copy_image(path: Path, target: Path) -> None:
    """Copy an image as it is, after a look at its pixels.

    Raises:
        ReadError: not a complete image.
    """
    size, problems = inspect(path)
    if size is None:
        raise ReadError(problems[0][0] if problems else 'not a complete image')
    shutil.copyfile(path, target)


def write_pngs(
    pixels: np.ndarray, size: Size, windows: Sequence[Window], files: Sequence[Path]
) -> None:
    """Write parts of an image (H, W, 3), BGR, for a window and a file each."""
    check_size(pixels.shape[:2], size)
    for (left, top, right, bottom), file in zip(windows, files):
        tile = np.ascontiguousarray(pixels[top:bottom, left:right, ::-1])
        Image.fromarray(tile).save(file)


def write_tiffs(path: Path, size: Size, windows: Sequence[Window], files: Sequence[Path]) -> None:
    """Write parts of a TIFF, for a window and a file each, with its bands, sample type and affine
    georeference; ground control points are left out. The windows are row by row; each line of the
    image is read once.

    Raises:
        ReadError: not a complete image.
    """
    with open_raster(path, user='cpvt tile-data', GDAL_CACHEMAX=CACHE) as image:
        check_size(image.shape, size)
        lines = np.zeros((image.count, 0, image.width), image.dtypes[0])
        start = 0  # first line of `lines`
        for (left, top, right, bottom), file in zip(windows, files):
            stop = start + lines.shape[1]
            if bottom > stop:
                fresh = image.read(window=((max(top, stop), bottom), (0, image.width)))
                lines = np.concatenate([lines[:, max(top - start, 0) :], fresh], axis=1)
                start = bottom - lines.shape[1]
            tile = lines[:, top - start : bottom - start, left:right]
            write_tiff(tile, image, ((top, bottom), (left, right)), file)


def write_tiff(tile: np.ndarray, image: 'DatasetReader', window: tuple, file: Path) -> None:
    """Write bands (N, h, w) that an image has in a window of rows and columns."""
    import rasterio
    from rasterio.errors import RasterioError

    settings = dict(crs=image.crs, nodata=image.nodata)
    if not image.transform.is_identity:
        settings['transform'] = image.window_transform(window)
    count, height, width = tile.shape
    try:
        with rasterio.open(
            file,
            'w',
            'GTiff',
            width,
            height,
            count,
            dtype=tile.dtype,
            compress='deflate',
            **settings,
        ) as tif:
            tif.write(tile)
    except RasterioError as error:
        raise UserError(f'cannot write {file.name}: {error.__cause__ or error}') from error


def check_size(found: tuple[int, ...], recorded: Size) -> None:
    if tuple(found) != recorded:
        raise ReadError(
            f'has {found[1]} x {found[0]} pixels, but {recorded[1]} x {recorded[0]} by its record'
        )
