"""Tiled inference (`tiling.py`) with the models of mm, on image files larger than memory.

Tiles keep the resolution of the image: of the test pipeline, only the model's data preprocessor is
applied.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import numpy as np
import torch
from mmengine.config import Config
from torch import Tensor, nn

from ... import __version__
from ...mm.samples import data_sample
from ...results.drawing import draw_frames, draw_segmentation
from ...results.predictions import Detections, save_overlay
from ...results.records import write_records
from ...tooling import memory
from ...tooling.command import UserError
from ...tooling.files import atomic_write
from ...tooling.progress import progress
from ..config.parts import loaded_bands
from . import tiling
from .prediction import is_panoptic
from .raster import CACHE, open_image, overview, row_reader, write_label_map
from .tiling import Found, Journal, Run, Span, TileGrid

if TYPE_CHECKING:
    from rasterio.io import DatasetReader

UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class Tiling(NamedTuple):
    """How an image is split into tiles."""

    tile: int  # height and width of a tile in pixels, a multiple of 32
    overlap: int  # overlap of neighbouring tiles in pixels
    batch_size: int = 1  # tiles that are queued on a GPU
    memory: Optional[int] = None  # limit for the resident memory of the process, in bytes


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
    predict: Callable[[Tensor], Union[Tensor, Found]]  # see `Run`
    meta: dict  # `classes` and `palette`
    about: dict  # identifies the model, as JSON values
    device: torch.device
    decide: Callable[[Tensor], Tensor] = tiling.best_class  # scores (K, h, w) to labels
    # Of a tile (N, h, w) float32, numbers of the bands in the file; None: (3, h, w) BGR uint8
    bands: Optional[tuple[int, ...]] = None


def tile_model(model: nn.Module, cfg: Config, about: dict, meta: dict) -> TileModel:
    """A detector or a segmentor of mm for tiled inference; for `about` and `meta`, see `TileModel`.

    Raises:
        UserError: the model is panoptic.
    """
    if is_panoptic(model):
        raise UserError(f'{type(model).__name__} is panoptic; run it without --tile')
    detects = cfg.default_scope == 'mmdet'
    predict = partial(detector_boxes if detects else segmentor_scores, model)
    device = next(model.parameters()).device
    ready = TileModel(detects, predict, meta, about, device, bands=loaded_bands(cfg))
    if detects or model.out_channels > 1:
        return ready
    threshold = model.decode_head.threshold
    return ready._replace(decide=lambda scores: scores[0].sigmoid() > threshold)


@torch.no_grad()
def segmentor_scores(model: nn.Module, tile: Tensor) -> Tensor:
    """A segmentor's scores (K, h, w) of a tile."""
    height, width = size = tuple(tile.shape[1:])
    batch = {'inputs': [tile], 'data_samples': [data_sample(True, size)]}
    data = model.data_preprocessor(batch, False)
    metas = [sample.metainfo for sample in data['data_samples']]
    return model.inference(data['inputs'], metas)[0, :, :height, :width].float()


@torch.no_grad()
def detector_boxes(model: nn.Module, tile: Tensor) -> Found:
    """The detections in a tile."""
    batch = {'inputs': [tile], 'data_samples': [data_sample(False, tuple(tile.shape[1:]))]}
    found = model.test_step(batch)[0].pred_instances
    return Found(found.bboxes, found.scores, found.labels)


def fingerprint(cfg: Config, weights: dict, device: torch.device) -> dict:
    """What a result depends on, other than the image and the tiles."""
    digest = hashlib.sha256()
    for name, tensor in weights['state_dict'].items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    return {
        'model': hashed(cfg.model),
        'bands': loaded_bands(cfg),
        'checkpoint': digest.hexdigest(),
        'device': device.type,
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
    pixel = torch.zeros(len(model.bands)) if model.bands else torch.zeros(3, dtype=torch.uint8)
    sides, peaks = (max(tiles.tile // 128 * 32, 32), max(tiles.tile // 64 * 32, 64)), []
    on_gpu = model.device.type != 'cpu'
    for side in sides:
        output = model.predict(pixel[:, None, None].expand(-1, side, side))
        peaks.append(memory.peak())
    # On a GPU, what the process gains are CUDA's kernels, however large the tile.
    growth = 0 if on_gpu else (peaks[1] - peaks[0]) / (sides[1] ** 2 - sides[0] ** 2)
    expected = peaks[1] + growth * (tiles.tile**2 - sides[1] ** 2)
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


def limit_gpu_memory(size: int, device: torch.device) -> None:
    """Let PyTorch raise an OutOfMemoryError before it allocates more than `size` bytes."""
    if device.type != 'cuda':
        raise UserError(f'--gpu-memory needs a GPU, but the model is on the device {device}')
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(size / total, 1.0), device)


# From file to file


class LargeImage:
    """Writes the predictions of a model for a large image.

    For an image NAME: NAME.overlay.jpg, at most 2048 pixels a side, unless without `pictures`, and
    NAME.detections.json or NAME.labels.tif, a tiled and compressed GeoTIFF with the georeference of
    the image, if it has one. Work in progress is kept in .NAME.partial.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        model: TileModel,
        tiles: Tiling,
        folder: Path,
        score_thr: float,
        pictures: bool = True,
    ) -> None:
        self.path, self.name, self.model, self.tiles = path, name, model, tiles
        self.score_thr, self.pictures = score_thr, pictures
        # What the results depend on
        self.about = {**model.about, 'tile': tiles.tile, 'overlap': tiles.overlap}
        self.about |= {'score threshold': score_thr} if model.detects else {}
        self.about['image'] = identity(path)
        self.run = hashed(self.about)
        self.result = folder / f'{name}{".detections.json" if model.detects else ".labels.tif"}'
        self.overlay = folder / f'{name}.overlay.jpg'
        self.working_folder = self.result.with_name(f'.{Path(name).name}.partial')
        self.label_type = np.uint8 if len(model.meta['classes']) <= 256 else np.uint16

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

    def band_folder(self, band: Span) -> Path:
        return self.working_folder / f'rows-{band[0]}-{band[1]}'

    def grid(self, image: 'DatasetReader') -> TileGrid:
        return TileGrid(image.shape, self.tiles.tile, self.tiles.overlap)

    def bands(self, processes: int) -> list[Span]:
        """The spans of rows of tiles into which processes divide the image.

        Of a detector, each is a row. Of a segmentor, which computes tiles twice where bands meet,
        there is one for each process.

        Raises:
            ReadError: not a complete image.
        """
        with open_image(self.path) as image:
            rows = len(self.grid(image).rows)
        length = 1 if self.model.detects and processes > 1 else math.ceil(rows / processes)
        return [(start, min(start + length, rows)) for start in range(0, rows, length)]

    def write_band(self, band: Span) -> None:
        """Do the work for a band, with a progress bar; `join_bands` then writes the results.

        Raises:
            ReadError: not a complete image.
            UserError: too little memory, or another run is at work on it.
        """
        tiles = self.tiles
        with open_image(self.path) as image, ExitStack() as stack:
            read, grid = row_reader(image, self.model.bands), self.grid(image)
            if tiles.memory:
                check_memory_ahead(image, tiles, self.model)
            journal = Journal(self.band_folder(band), self.about)
            stack.callback(journal.close)
            total = (band[1] - band[0]) * len(grid.columns)
            update = stack.enter_context(progress(total, 'tiles', self.name))

            def done(count: int) -> None:
                if tiles.memory:
                    check_memory(memory.peak(), tiles)
                update(count)

            run = Run(read, grid, self.model.predict, journal, band, tiles.batch_size, done)
            if self.model.detects:
                tiling.detect_in_tiles(run)
            else:
                tiling.segment_in_tiles(run, self.label_type, self.model.decide)

    def join_bands(self, bands: Sequence[Span]) -> None:
        """Write the results of bands that are finished.

        Raises:
            UserError: GDAL cannot write them, for example on a full disk.
        """
        from rasterio.errors import RasterioError

        folders = list(map(self.band_folder, bands))
        classes, palette = self.model.meta['classes'], self.model.meta['palette']
        with open_image(self.path) as image:
            small, step = overview(image, self.model.bands)
            # The overlay comes before the result, which counts as done.
            if not self.model.detects:
                labels = tiling.labels_in_tiles(folders, image.shape, self.label_type)
                if self.pictures:
                    shown = np.array(labels[::step, ::step])
                    save_overlay(draw_segmentation(small, shown, classes, palette), self.overlay)
                try:
                    with atomic_write(self.result) as file:
                        write_label_map(file, labels, image, self.model.meta, self.run)
                except RasterioError as error:
                    reason = error.__cause__ or error
                    raise UserError(f'cannot write {self.result}: {reason}') from error
                return
            found = tiling.merged(tiling.found_in_tiles(folders), self.grid(image))
            boxes, scores, labels = (part.numpy() for part in found)
            best = Detections(small, classes, palette, boxes, scores, labels).above(self.score_thr)
            if self.pictures:
                picture = draw_frames(small, best.boxes / step, best.labels, classes, palette)
                save_overlay(picture, self.overlay)
            items = best.records()
            write_records(self.result, image.name, image.shape, best.kind, items, run=self.run)


def identity(path: Path) -> dict:
    """Identifies a file and its version; empty if there is none."""
    if not path.is_file():
        return {}
    status = path.stat()
    return {'path': str(path.resolve()), 'bytes': status.st_size, 'changed': status.st_mtime_ns}
