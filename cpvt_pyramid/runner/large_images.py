"""Images larger than memory for the models of mm: what `tiling.py` does, from file to file.

Files are read and written with rasterio (GDAL). Tiles are at the image's own pixels: of the test
pipeline only the model's data preprocessor is applied.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional
from warnings import catch_warnings, filterwarnings

import numpy as np
import torch
from mmengine.config import Config
from mmengine.structures import BaseDataElement, InstanceData
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from .. import __version__
from ..tiling import Found, Grid, Journal
from . import memory, tiling
from .drawing import draw_frames, draw_segmentation
from .launch import UserError
from .prediction import found_boxes, write_detections
from .resume import appearing_whole

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

DRIVERS = ('GTiff', 'PNG', 'JPEG', 'BMP', 'JP2OpenJPEG', 'WEBP')  # GDAL's names of formats
CACHE = 64 * 2**20  # bytes that GDAL may keep of what it has read
OVERVIEW = 2048  # pixels, of the longer side of a picture to look at
LINES = 512  # of a label map that are written at a time
UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class Tiling(NamedTuple):
    """How an image is taken apart."""

    tile: int  # height and width, in pixels, a multiple of 32
    overlap: int  # of neighbours
    batch_size: int = 1
    exact: bool = True
    memory: Optional[int] = None  # bytes that the process may take, all in all


def tile_options(
    batch_size: int,
    tile: Optional[int],
    overlap: Optional[int],
    memory: Optional[str],
    inexact: bool,
) -> Optional[Tiling]:
    """What the options of the command line say; None without --tile.

    Raises:
        UserError: they do not go together.
    """
    if batch_size < 1:
        raise UserError(f'--batch-size {batch_size}; at least 1')
    if tile is None:
        for name, value in (('overlap', overlap), ('memory', memory), ('inexact', inexact)):
            if value:
                raise UserError(f'--{name} goes with --tile')
        return None
    overlap = tile // 4 // 32 * 32 if overlap is None else overlap
    try:
        Grid((1, 1), tile, overlap)
        return Tiling(tile, overlap, batch_size, not inexact, memory and parse_bytes(memory))
    except ValueError as error:
        raise UserError(str(error)) from error


def parse_bytes(text: str) -> int:
    """The number of bytes in `2GiB`, `1500M`, `2G` and the like, always powers of 1024."""
    number, unit = text.strip().rstrip('iBb'), ''
    if number and number[-1].upper() in UNITS:
        number, unit = number[:-1], number[-1].upper()
    try:
        size = float(number)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ValueError(f'{text!r} is no amount of memory; for example 2GiB')
    return int(size * UNITS[unit])


# The image


class ReadError(OSError):
    """A file that is no whole image, or not of a kind that the models are for."""


@contextmanager
def open_image(path: Path) -> Iterator['DatasetReader']:
    """An image that is read window by window.

    Raises:
        ReadError: it is none, or not whole.
    """
    try:
        import rasterio
        from rasterio.errors import NotGeoreferencedWarning, RasterioError
    except ImportError as error:
        raise UserError(f'--tile reads images with rasterio: {error}') from error
    with catch_warnings(), rasterio.Env(GDAL_CACHEMAX=CACHE):
        filterwarnings('ignore', category=NotGeoreferencedWarning)
        try:
            with rasterio.open(path) as image:
                yield image
        except RasterioError as error:
            raise ReadError(f'not a whole image: {error}') from error


def check_kind(image: 'DatasetReader') -> None:
    if image.driver not in DRIVERS:
        raise ReadError(f'{image.driver} files are not read; {", ".join(DRIVERS)} are')
    if set(image.dtypes) != {'uint8'}:
        raise ReadError(
            f'samples are {image.dtypes[0]}, not 8 bits; convert them first, for example with '
            'gdal_translate -ot Byte -scale'
        )
    if image.count > 4:
        raise ReadError(f'{image.count} bands; choose three, for example with gdal_translate -b')
    if image.tags().get('EXIF_Orientation', '1') != '1':
        raise ReadError('its EXIF tag turns it; save it upright first')


def rgb(image: 'DatasetReader', **options: Any) -> np.ndarray:
    """(3, h, w) of an image in grey, in palette colours or in RGB, with or without alpha."""
    from rasterio.enums import ColorInterp

    if image.count >= 3:
        return image.read((1, 2, 3), **options)
    values = image.read(1, **options)
    if image.colorinterp[0] == ColorInterp.palette:
        table = np.zeros((256, 3), np.uint8)
        for index, color in image.colormap(1).items():
            table[index] = color[:3]
        return np.moveaxis(table[values], -1, 0)
    return np.repeat(values[None], 3, 0)


def row_reader(image: 'DatasetReader') -> Callable[[int, int], Tensor]:
    """Reads lines of an image as the data pipelines do: BGR.

    Raises:
        ReadError: it is not of a kind that the models are for; later, it is not whole.
    """
    from rasterio.errors import RasterioError

    check_kind(image)

    def read(start: int, stop: int) -> Tensor:
        try:
            lines = rgb(image, window=((start, stop), (0, image.width)))
        except RasterioError as error:
            raise ReadError(f'not a whole image: {error}') from error
        return torch.from_numpy(np.ascontiguousarray(lines[::-1]))

    return read


def overview(image: 'DatasetReader') -> tuple[np.ndarray, int]:
    """The image with every so many pixels in one, (h, w, 3) RGB, and how many."""
    from rasterio.enums import Resampling

    step = math.ceil(max(image.shape) / OVERVIEW)
    shape = tuple(math.ceil(length / step) for length in image.shape)
    palette = image.count < 3 and image.colorinterp[0].name == 'palette'
    resampling = Resampling.nearest if palette else Resampling.average
    out_shape = shape if image.count < 3 else (3, *shape)
    small = rgb(image, out_shape=out_shape, resampling=resampling)
    return np.ascontiguousarray(np.moveaxis(small, 0, -1)), step


# The model


def segmentor_scores(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Gives a segmentor's scores (B, K, h, w) of tiles (B, 3, h, w), BGR uint8."""
    from mmseg.structures import SegDataSample

    def predict(tiles: Tensor) -> Tensor:
        height, width = tiles.shape[2:]
        shape = dict.fromkeys(('ori_shape', 'img_shape', 'pad_shape'), (height, width))
        samples = [SegDataSample(metainfo=shape) for _ in tiles]
        data = model.data_preprocessor({'inputs': list(tiles), 'data_samples': samples}, False)
        metas = [sample.metainfo for sample in data['data_samples']]
        with torch.no_grad():
            scores = model.inference(data['inputs'], metas)
        return scores[:, :, :height, :width].float()

    return predict


def detector_boxes(model: nn.Module) -> Callable[[Tensor], list[Found]]:
    """Gives what a detector finds in tiles (B, 3, h, w), BGR uint8."""
    from mmdet.structures import DetDataSample

    def predict(tiles: Tensor) -> list[Found]:
        shape = dict.fromkeys(('ori_shape', 'img_shape', 'pad_shape'), tuple(tiles.shape[2:]))
        meta = {**shape, 'scale_factor': (1.0, 1.0), 'img_id': 0}
        samples = [DetDataSample(metainfo=meta) for _ in tiles]
        with torch.no_grad():
            results = model.test_step({'inputs': list(tiles), 'data_samples': samples})
        found = [result.pred_instances for result in results]
        return [Found(part.bboxes, part.scores, part.labels) for part in found]

    return predict


def fingerprint(cfg: Config, weights: dict, device: torch.device) -> dict:
    """What a result depends on besides the image and the tiles."""
    digest = hashlib.sha256()
    for name, tensor in weights['state_dict'].items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    model = json.dumps(cfg.model, default=str, sort_keys=True)
    return {
        'model': hashlib.sha256(model.encode()).hexdigest(),
        'checkpoint': digest.hexdigest(),
        'device': device.type,
        'version': __version__,
    }


# Memory


def check_memory_ahead(
    image: 'DatasetReader', tiles: Tiling, predict: Callable[[Tensor], Any]
) -> None:
    """See from two smaller tiles whether the tiles of an image will keep the budget.

    Raises:
        UserError: they will not.
    """
    sides, peaks = (max(tiles.tile // 128 * 32, 32), max(tiles.tile // 64 * 32, 32)), []
    for side in sides:
        said = predict(torch.zeros(1, 3, side, side, dtype=torch.uint8))
        peaks.append(memory.peak())
    growth = (peaks[1] - peaks[0]) / max(sides[1] ** 2 - sides[0] ** 2, 1)  # bytes to a pixel
    expected = peaks[0] + growth * (tiles.tile**2 - sides[0] ** 2)
    if isinstance(said, Tensor):
        # Sums that wait for the next tile, and the scores of the other tiles of a batch.
        pixels = tiles.tile * (tiles.overlap + (tiles.batch_size - 1) * tiles.tile)
        expected += 4 * said.shape[1] * pixels
    expected += 2 * 3 * tiles.tile * image.width  # a strip, while the next is put together
    expected += max(CACHE, math.prod(image.block_shapes[0]) * image.count)
    if expected > tiles.memory:
        raise UserError(too_much(expected, tiles))


def check_memory(tiles: Tiling) -> None:
    if tiles.memory and memory.peak() > tiles.memory:
        raise UserError(too_much(memory.peak(), tiles))


def too_much(size: float, tiles: Tiling) -> str:
    return (
        f'tiles of {tiles.tile} need {size / 2**30:.2f} GiB, and --memory is '
        f'{tiles.memory / 2**30:.2f} GiB; a smaller --tile, --overlap or --batch-size needs less'
    )


# From file to file


class LargeImages:
    """Writes what a model finds in large images.

    For an image NAME: NAME.overlay.png, a picture of at most 2048 pixels a side, and
    NAME.labels.tif, a tiled and compressed GeoTIFF in the image's place on earth, if it has one,
    or NAME.detections.json. While it is at work, what is done lies in .NAME.partial.

    Args:
        model: a detector or a segmentor.
        cfg: its config.
        weights: its checkpoint.
        meta: `classes` and `palette`.
        tiles: how images are taken apart.
        folder: for the results.
        score_thr: boxes of a lower score are left out.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: Config,
        weights: dict,
        meta: dict,
        tiles: Tiling,
        folder: Path,
        score_thr: float,
    ) -> None:
        self.model, self.meta, self.tiles = model, meta, tiles
        self.folder, self.score_thr = folder, score_thr
        self.detects = cfg.default_scope == 'mmdet'
        self.predict = detector_boxes(model) if self.detects else segmentor_scores(model)
        device = next(model.parameters()).device
        self.about = fingerprint(cfg, weights, device)
        self.about |= {'tile': tiles.tile, 'overlap': tiles.overlap}
        if not tiles.exact:
            self.about['batch size'] = tiles.batch_size
        if self.detects:
            self.about['score threshold'] = score_thr

    def write(self, path: Path, name: str) -> bool:
        """Write the results of an image under a name; False if they are there already.

        Raises:
            ReadError: it is no whole image.
            UserError: the work cannot be done in this memory or on this disk, or not now.
        """
        about = {**self.about, 'image': identity(path)}
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        result = self.folder / f'{name}{".detections.json" if self.detects else ".labels.tif"}'
        with open_image(path) as image:
            if is_result_of(result, key):
                return False
            if self.tiles.memory:
                check_memory_ahead(image, self.tiles, self.predict)
            try:
                journal = Journal(self.folder / f'.{name}.partial', about)
            except ValueError as error:
                raise UserError(str(error)) from error
            grid = Grid(image.shape, self.tiles.tile, self.tiles.overlap)
            try:
                if self.detects:
                    self.write_detections(image, grid, journal, result, key)
                else:
                    self.write_labels(image, grid, journal, result, key)
            except ReadError:
                journal.remove()
                raise
            except OSError as error:
                raise UserError(f'{path}: {error}; what is done stays for another try') from error
            finally:
                journal.lock.close()
            journal.remove()
        return True

    def write_labels(
        self, image: 'DatasetReader', grid: Grid, journal: Journal, result: Path, key: str
    ) -> None:
        classes, palette = self.meta['classes'], self.meta['palette']
        labels = tiling.segment(
            row_reader(image),
            grid,
            self.predict,
            journal,
            np.uint8 if self.model.num_classes <= 256 else np.uint16,
            self.is_foreground if self.model.out_channels == 1 else tiling.best_class,
            **self.options(grid, journal),
        )
        small, step = overview(image)
        picture = draw_segmentation(small, np.array(labels[::step, ::step]), classes, palette)
        save_overview(picture, result)
        with appearing_whole(result) as file:
            write_label_map(file, labels, image, self.meta, key)

    def write_detections(
        self, image: 'DatasetReader', grid: Grid, journal: Journal, result: Path, key: str
    ) -> None:
        found = tiling.detect(
            row_reader(image), grid, self.predict, journal, **self.options(grid, journal)
        )
        sample = as_sample(found)
        small, step = overview(image)
        best = found_boxes(sample, self.score_thr)
        classes, palette = self.meta['classes'], self.meta['palette']
        picture = draw_frames(small, best.bboxes / step, best.labels, classes, palette)
        save_overview(picture, result)
        write_detections(result, image.name, sample, self.meta, self.score_thr, run=key)

    def options(self, grid: Grid, journal: Journal) -> dict:
        """Of the tiling functions, with a progress bar."""
        name = journal.folder.name.removeprefix('.').removesuffix('.partial')
        bar = tqdm(total=len(grid), unit='tile', desc=name, disable=None)

        def progress(tiles: int) -> None:
            check_memory(self.tiles)
            bar.update(tiles)
            if bar.n == bar.total:
                bar.close()

        exact, batch_size = self.tiles.exact, self.tiles.batch_size
        return {'exact': exact, 'batch_size': batch_size, 'progress': progress}

    def is_foreground(self, scores: Tensor) -> Tensor:
        return scores[0].sigmoid() > self.model.decode_head.threshold


def as_sample(found: Found) -> BaseDataElement:
    boxes, scores, labels = found
    return BaseDataElement(pred_instances=InstanceData(bboxes=boxes, scores=scores, labels=labels))


def identity(path: Path) -> dict:
    """What tells one image file from another, and from itself after a change."""
    status = path.stat()
    return {
        'path': str(path.resolve()),
        'bytes': status.st_size,
        'changed': status.st_mtime_ns,
    }


def is_result_of(result: Path, key: str) -> bool:
    """Whether a file is the result of a run with this key."""
    if not result.exists():
        return False
    if result.suffix == '.json':
        with suppress(ValueError, AttributeError):
            return json.loads(result.read_text()).get('run') == key
        return False
    with suppress(ReadError), open_image(result) as labels:
        return labels.tags().get('run') == key
    return False


def save_overview(picture: Image.Image, result: Path) -> None:
    name = result.name.rsplit('.', 2)[0]
    with appearing_whole(result.with_name(f'{name}.overlay.png')) as file:
        picture.save(file, 'PNG')


def write_label_map(
    file: Path, labels: np.memmap, image: 'DatasetReader', meta: dict, key: str
) -> None:
    """A tiled and compressed GeoTIFF of a label map.

    Args:
        file: to be written.
        labels: (H, W).
        image: from which it has its place on earth.
        meta: `classes` and `palette`.
        key: of the run, kept as a tag.
    """
    import rasterio

    gcps, crs = image.gcps
    place = {'gcps': gcps, 'crs': crs} if gcps else {'crs': image.crs}
    if not image.transform.is_identity:
        place['transform'] = image.transform
    height, width = labels.shape
    size = {'height': height, 'width': width, 'count': 1, 'dtype': labels.dtype}
    layout = {'tiled': True, 'blockxsize': 512, 'blockysize': 512, 'bigtiff': 'if_safer'}
    with rasterio.open(file, 'w', 'GTiff', compress='deflate', **size, **layout, **place) as tif:
        tif.update_tags(run=key, classes=json.dumps(list(meta['classes'])))
        if labels.dtype == np.uint8:
            colors = enumerate(meta['palette'])
            tif.write_colormap(1, {i: (*color, 255) for i, color in colors})
        for top in range(0, height, LINES):
            bottom = min(top + LINES, height)
            # Mapped anew: pages that stay mapped would count as memory in use.
            lines = np.memmap(labels.filename, labels.dtype, 'r', shape=labels.shape)[top:bottom]
            tif.write(lines, 1, window=((top, bottom), (0, width)))
