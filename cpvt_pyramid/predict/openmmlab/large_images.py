"""Tiled inference (`tiling.py`) with the models of mm, on image files larger than memory.

Tiles keep the resolution of the image: of the test pipeline, only the model's data preprocessor is
applied.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import numpy as np
import torch
from mmengine.config import Config
from numpy.typing import DTypeLike
from torch import Tensor

from ... import __version__
from ...config.parts import loaded_bands
from ...mm.samples import data_sample
from ...tooling import memory
from ...tooling.command import UserError
from ...tooling.files import atomic_write
from ...tooling.progress import progress
from ..drawing import draw_frames, draw_segmentation
from ..predictions import Detections, save_overlay
from ..records import write_records
from .postprocessing import as_scores
from .prediction import is_panoptic
from .raster import CACHE, open_image, overview, row_reader, write_label_map
from .tiling import (
    Found,
    RowFiles,
    RowWork,
    Span,
    TileGrid,
    best_class,
    detect_rows,
    found_in_rows,
    labels_of_rows,
    merged,
    segment_rows,
    spans,
)

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class Tiling(NamedTuple):
    """How an image is split into tiles."""

    tile: int  # height and width of a tile in pixels, a multiple of 32
    overlap: int  # overlap of neighbouring tiles in pixels
    batch_size: int = 1  # tiles that are queued on a GPU
    memory: Optional[int] = None  # limit for the resident memory of the process, in bytes


def tiling_of(
    tile: int, overlap: Optional[int], batch_size: int, memory_limit: Optional[int]
) -> Tiling:
    """For the arguments, see `cpvt infer`.

    Raises:
        UserError: they do not fit the strides of the models.
    """
    if overlap is None:
        overlap = tile // 4 // 32 * 32
    spans(1, tile, overlap)
    return Tiling(tile, overlap, batch_size, memory_limit)


def parse_bytes(text: Optional[str], option: str) -> Optional[int]:
    """The number of bytes in `2GiB`, `1500M` or `2G`; units are powers of 1024."""
    if text is None:
        return None
    found = re.fullmatch(r'(\d*\.?\d+)\s*([KMGT]?)i?B?', text.strip(), re.I)
    if not found or not float(found[1]):
        raise UserError(f'{option} must be a size such as 2GiB, got {text!r}')
    return int(float(found[1]) * UNITS[found[2].upper()])


# The model


class TileModel(NamedTuple):
    """A model as tiled inference needs it."""

    detects: bool  # boxes; else it segments
    predict: Callable[[Tensor], Union[Tensor, Found]]  # see `RowWork`
    meta: dict  # `classes` and `palette`
    about: dict  # identifies the model, as JSON values
    device: torch.device
    score_thr: float  # boxes of a lower score are left out
    decide: Callable[[Tensor], Tensor] = best_class  # scores (K, h, w) to labels
    # Of a tile (N, h, w) float32, numbers of the bands in the file; None: (3, h, w) BGR uint8
    bands: Optional[tuple[int, ...]] = None


def tile_model(model: Any, cfg: Config, about: dict, meta: dict, score_thr: float) -> TileModel:
    """A detector or a segmentor of mm for tiled inference; for the rest, see `TileModel`.

    Raises:
        UserError: the model is panoptic.
    """
    if is_panoptic(model):
        raise UserError(f'{type(model).__name__} is panoptic; run it without --tile')
    detects = cfg.default_scope == 'mmdet'
    predict = partial(detector_boxes if detects else segmentor_scores, model)
    device = next(model.parameters()).device
    ready = TileModel(detects, predict, meta, about, device, score_thr, bands=loaded_bands(cfg))
    if detects or model.out_channels > 1:
        return ready
    threshold = model.decode_head.threshold
    return ready._replace(decide=lambda scores: scores[0].sigmoid() > threshold)


@torch.no_grad()
def segmentor_scores(model: Any, tile: Tensor) -> Tensor:
    """A segmentor's scores (K, h, w) of a tile."""
    height, width = tile.shape[1:]
    batch = {'inputs': [tile], 'data_samples': [data_sample(True, (height, width))]}
    data = model.data_preprocessor(batch, False)
    metas = [sample.metainfo for sample in data['data_samples']]
    scores = as_scores(model.inference(data['inputs'], metas))
    return scores[0, :, :height, :width].float()


@torch.no_grad()
def detector_boxes(model: Any, tile: Tensor) -> Found:
    """The detections in a tile."""
    height, width = tile.shape[1:]
    batch = {'inputs': [tile], 'data_samples': [data_sample(False, (height, width))]}
    found = model.test_step(batch)[0].pred_instances
    return Found(found.bboxes, found.scores, found.labels)


def fingerprint(cfg: Config, weights: dict) -> dict:
    """What a result depends on, other than the image and the tiles."""
    digest = hashlib.sha256()
    for name, tensor in weights['state_dict'].items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    return {
        'model': hashed(cfg.model),
        'bands': loaded_bands(cfg),
        'checkpoint': digest.hexdigest(),
        'version': __version__,
    }


def hashed(values: Any) -> str:
    """The SHA-256 of JSON values, in hexadecimal."""
    text = json.dumps(values, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# Memory


def check_memory_ahead(image: 'DatasetReader', tiles: Tiling, model: TileModel) -> None:
    """Raise a UserError if the tiles of an image will not fit into the memory limit, to judge from
    two smaller tiles."""
    on_gpu = model.device.type != 'cpu'
    pixel = torch.zeros(len(model.bands)) if model.bands else torch.zeros(3, dtype=torch.uint8)
    small = max(tiles.tile // 128 * 32, 32)
    large = max(tiles.tile // 64 * 32, 64)

    def run(side: int) -> Union[Tensor, Found]:
        return model.predict(pixel[:, None, None].expand(-1, side, side))

    run(small)
    peak_of_small = memory.peak()
    output = run(large)
    peak_of_large = memory.peak()
    # On a GPU, what the process gains are CUDA's kernels, however large the tile.
    growth = 0 if on_gpu else (peak_of_large - peak_of_small) / (large**2 - small**2)
    expected = peak_of_large + growth * (tiles.tile**2 - large**2)
    if isinstance(output, Tensor):
        # Partial sums for the next tile, and the scores that `expected` does not have yet.
        scores = 1 if on_gpu else tiles.batch_size - 1
        expected += 4 * len(output) * tiles.tile * (tiles.overlap + scores * tiles.tile)
    # A strip, while the next one is assembled; and the labels of a row of tiles, in 16 bits, twice
    expected += 2 * (pixel.nbytes + 2) * tiles.tile * image.width
    expected += max(CACHE, math.prod(image.block_shapes[0]) * image.count)
    check_memory(expected, tiles)


def check_memory(size: float, tiles: Tiling) -> None:
    """Raise a UserError if this number of bytes exceeds the limit."""
    if tiles.memory and size > tiles.memory:
        raise UserError(
            f'tiles of {tiles.tile} need {size / 2**30:.2f} GiB but --memory is '
            f'{tiles.memory / 2**30:.2f} GiB; reduce --tile, --overlap or --batch-size'
        )


@contextmanager
def limited_gpu_memory(size: Optional[int], device: torch.device) -> Iterator[None]:
    """Inside this context, PyTorch raises an OutOfMemoryError before it allocates more than `size`
    bytes (None: as many as there are)."""
    if size is None:
        yield
        return
    if device.type != 'cuda':
        raise UserError(f'--gpu-memory needs a GPU, but the model is on the device {device}')
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(size / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


# From file to file


class LargeImage:
    """Writes the predictions of a model for a large image.

    For an image NAME: NAME.overlay.jpg, at most 2048 pixels a side, unless without `pictures`, and
    NAME.detections.json or NAME.labels.tif, a tiled and compressed GeoTIFF with the georeference of
    the image, if it has one.

    `write_rows` writes the results of rows of tiles, each a file in a subfolder of .NAME.partial
    that is named after what they depend on. So what is there is right, whichever run wrote it.
    `join` makes the results of the image from them.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        model: TileModel,
        tiles: Tiling,
        folder: Path,
        pictures: bool = True,
    ) -> None:
        self.path = path
        self.name = name
        self.model = model
        self.tiles = tiles
        self.pictures = pictures
        # What the results depend on
        about = {**model.about, 'tile': tiles.tile, 'overlap': tiles.overlap}
        if model.detects:
            about['score threshold'] = model.score_thr
        about['image'] = identity(path)
        self.run = hashed(about)
        self.result = folder / f'{name}{".detections.json" if model.detects else ".labels.tif"}'
        self.overlay = folder / f'{name}.overlay.jpg'
        self.working_folder = self.result.with_name(f'.{Path(name).name}.partial')
        self.label_type: DTypeLike = np.uint8 if len(model.meta['classes']) <= 256 else np.uint16

    def is_done(self) -> bool:
        """Whether the results exist."""
        if self.pictures and not self.overlay.exists():
            return False
        # ReadError, as of a file that does not exist, is an OSError.
        with suppress(OSError, ValueError, AttributeError):
            if self.model.detects:
                return json.loads(self.result.read_text()).get('run') == self.run
            with open_image(self.result) as labels:
                return labels.tags().get('run') == self.run
        return False

    def rows(self) -> int:
        """The number of rows of tiles.

        Raises:
            ReadError: not a complete image.
        """
        with open_image(self.path) as image:
            return len(self._grid(image).rows)

    def write_rows(self, band: Span) -> None:
        """Write the results of a band of rows of tiles that are not there yet, with a progress bar.

        Raises:
            ReadError: not a complete image.
            UserError: too little memory.
        """
        tiles = self.tiles
        with open_image(self.path) as image:
            read = row_reader(image, self.model.bands)
            if tiles.memory:
                check_memory_ahead(image, tiles, self.model)
            total = (band[1] - band[0]) * len(self._grid(image).columns)
            with progress(total, 'tiles', self.name) as update:

                def done(count: int) -> None:
                    if tiles.memory:
                        check_memory(memory.peak(), tiles)
                    update(count)

                files = self._files(image)
                files.folder.mkdir(parents=True, exist_ok=True)
                work = RowWork(read, files, self.model.predict, tiles.batch_size, done)
                if self.model.detects:
                    detect_rows(work, band)
                else:
                    segment_rows(work, band, self.label_type, self.model.decide)

    def join(self) -> None:
        """Write the results of the image, whose rows are all there, and remove those of the rows.

        Raises:
            UserError: GDAL cannot write them, for example on a full disk.
        """
        with open_image(self.path) as image:
            if self.model.detects:
                self._join_boxes(image)
            else:
                self._join_labels(image)
        self.give_up()

    def give_up(self) -> None:
        """Remove the results of rows."""
        shutil.rmtree(self.working_folder, ignore_errors=True)

    def _join_boxes(self, image: 'DatasetReader') -> None:
        small, step = overview(image, self.model.bands)
        classes = self.model.meta['classes']
        palette = self.model.meta['palette']
        found = merged(found_in_rows(self._files(image)), self._grid(image))
        boxes, scores, labels = (part.numpy() for part in found)
        best = Detections(small, classes, palette, boxes, scores, labels).above(
            self.model.score_thr
        )
        if self.pictures:  # before the result, which counts as done
            picture = draw_frames(small, best.boxes / step, best.labels, classes, palette)
            save_overlay(picture, self.overlay)
        items = best.records()
        write_records(self.result, image.name, image.shape, best.kind, items, run=self.run)

    def _join_labels(self, image: 'DatasetReader') -> None:
        from rasterio.errors import RasterioError

        labels = labels_of_rows(self._files(image), self.label_type)
        meta = self.model.meta
        if self.pictures:  # before the result, which counts as done
            small, step = overview(image, self.model.bands)
            shown = np.array(labels[::step, ::step])
            picture = draw_segmentation(small, shown, meta['classes'], meta['palette'])
            save_overlay(picture, self.overlay)
        try:
            with atomic_write(self.result) as file:
                write_label_map(file, labels, image, meta, self.run)
        except RasterioError as error:
            reason = error.__cause__ or error
            raise UserError(f'cannot write {self.result}: {reason}') from error

    def _grid(self, image: 'DatasetReader') -> TileGrid:
        return TileGrid(image.shape, self.tiles.tile, self.tiles.overlap)

    def _files(self, image: 'DatasetReader') -> RowFiles:
        return RowFiles(self.working_folder / self.run[:16], self._grid(image))


def identity(path: Path) -> dict:
    """Identifies a file and its version; empty if there is none."""
    if not path.is_file():
        return {}
    status = path.stat()
    return {'path': str(path.resolve()), 'bytes': status.st_size, 'changed': status.st_mtime_ns}
