"""Inference on images of any size in overlapping tiles, with little memory.

An image is read once, from top to bottom, one row of tiles at a time. The model's outputs for
overlapping tiles are blended (segmentation) or merged (detection). The results of each row of tiles
are a file in a working folder, which is there completely or not at all: a run that was killed
continues with the first row that has none, and its result is bit-identical. A band of rows, whose
files can be written by a process of its own, is a half-open range of them.

Results do not depend on the batch size. Tiles are accumulated in a fixed order, and each passes the
model alone, because the rounding of a matrix product depends on its shape.

Shapes: image (3, H, W); tile (3, h, w); scores (K, h, w) of K classes; boxes (N, 4) as x1, y1, x2,
y2 in pixels. A span is a half-open range, [start, stop), of pixels or of rows of tiles.
"""

import io
import itertools
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple, Optional, Union

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from ...tooling.command import UserError
from ...tooling.files import atomic_write

ALIGN = 32  # the largest stride; in aligned tiles, map cells are where those of the image are
CUT = 4  # pixels: a box that ends this close to an inner border of its tile counts as cut

Span = tuple[int, int]
ReadRows = Callable[[int, int], Tensor]  # start, stop -> (3, stop - start, W); in rising order


class Found(NamedTuple):
    """Detections."""

    boxes: Tensor  # (N, 4)
    scores: Tensor  # (N,)
    labels: Tensor  # (N,)


def spans(length: int, tile: int, overlap: int) -> list[Span]:
    """The fewest evenly spread tiles along an axis of some length that overlap by at least
    `overlap`.

    They start and stop at multiples of 32, except that the last one stops with the image.
    """
    if tile <= 0 or tile % ALIGN or overlap % ALIGN or not 0 <= overlap < tile:
        raise UserError(
            f'tile and overlap must be multiples of {ALIGN} with 0 <= overlap < tile, '
            f'got tile={tile} and overlap={overlap}'
        )
    room = max(math.ceil((length - tile) / ALIGN), 0)  # 32s between the first and the last start
    steps = math.ceil(room * ALIGN / (tile - overlap))
    starts = [ALIGN * (room * i // steps) for i in range(steps + 1)] if steps else [0]
    return [(start, min(start + tile, length)) for start in starts]


def ramps(tiles: Sequence[Span]) -> list[Tensor]:
    """The blending weights of each tile along an axis, (stop - start,).

    They fall as a squared sine over the overlap with a neighbour, stay constant towards the ends of
    the image, and sum to 1 at each pixel.
    """
    weights = []
    for i, (start, stop) in enumerate(tiles):
        weight = torch.ones(stop - start, dtype=torch.float64)
        centre = torch.arange(start, stop, dtype=torch.float64) + 0.5
        if i > 0:
            weight *= rise((centre - start) / max(tiles[i - 1][1] - start, 1))
        if i + 1 < len(tiles):
            weight *= rise((stop - centre) / max(stop - tiles[i + 1][0], 1))
        weights.append(weight)
    total = torch.zeros(tiles[-1][1], dtype=torch.float64)
    for (start, stop), weight in zip(tiles, weights):
        total[start:stop] += weight
    return [(weight / total[slice(*tile)]).float() for tile, weight in zip(tiles, weights)]


def rise(x: Tensor) -> Tensor:
    """A smooth step from 0 at x=0 to 1 at x=1, with rise(x) + rise(1 - x) = 1."""
    return torch.sin(x.clamp(0, 1) * (math.pi / 2)) ** 2


class TileGrid:
    """The tiles of an image of a height and width, see `spans`."""

    def __init__(self, size: tuple[int, int], tile: int, overlap: int) -> None:
        self.size = size
        self.rows = spans(size[0], tile, overlap)
        self.columns = spans(size[1], tile, overlap)


class RowFiles(NamedTuple):
    """The results of the rows of tiles of an image, a file for each."""

    folder: Path
    grid: TileGrid

    def of(self, row: int) -> Path:
        return self.folder / f'row-{row:06}'

    def first_missing(self, band: Span) -> int:
        """The first row of a band that has no results; the end of the band if all have."""
        row = band[0]
        while row < band[1] and self.of(row).exists():
            row += 1
        return row

    def write(self, row: int, contents: bytes) -> None:
        """Write the results of a row: on disk before the file has its name."""
        with atomic_write(self.of(row)) as draft, draft.open('wb') as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())


class RowWork(NamedTuple):
    """The work on an image, row of tiles by row."""

    read: ReadRows  # reads lines of the image, each once, from top to bottom
    files: RowFiles
    # A tile (3, h, w) to its scores (K, h, w) in float32, which are overwritten, or to the
    # detections in it, in pixels of the tile
    predict: Callable[[Tensor], Union[Tensor, Found]]
    batch_size: int = 1  # number of tiles queued on the model at a time
    # Called with the number of tiles finished since the last call
    progress: Callable[[int], object] = lambda tiles: None

    def first_missing(self, band: Span) -> int:
        """The first row of a band that has no results, after progress with those before it."""
        first = self.files.first_missing(band)
        self.progress((first - band[0]) * len(self.files.grid.columns))
        return first

    def outputs(self, first: int, stop: int) -> Iterator[tuple[int, Iterator]]:
        """The index and the outputs of `predict` of each row of tiles from `first` on."""
        rows = self.files.grid.rows[:stop]
        for row, strip in enumerate(strips(self.read, rows, first), first):
            yield row, self.outputs_in(strip)

    def outputs_in(self, strip: Tensor) -> Iterator:
        """The outputs of `predict` for the tiles of a strip, from left to right."""
        tiles = (strip[:, :, slice(*span)] for span in self.files.grid.columns)
        while batch := list(itertools.islice(tiles, self.batch_size)):
            yield from [self.predict(tile) for tile in batch]  # a GPU does not wait for the first


def strips(read: ReadRows, rows: Sequence[Span], first: int) -> Iterator[Tensor]:
    """The image under each row of tiles from `first` on, (3, h, W). Each line is read once."""
    strip: Optional[Tensor] = None
    bottom = 0
    for start, stop in rows[first:]:
        fresh = read(max(start, bottom), stop)
        shared = bottom - start
        if strip is None or shared <= 0:
            strip = fresh
        else:
            strip = torch.cat([strip[:, -shared:], fresh], dim=1)
        bottom = stop
        yield strip


# Segmentation


def blended(
    scores: Iterator[Tensor],
    grid: TileGrid,
    row: int,
    weights: tuple[Sequence[Tensor], Sequence[Tensor]],
    above: Optional[Path],
    below: BinaryIO,
) -> Iterator[Tensor]:
    """The blended scores (K, h, w) that a row of tiles completes, block by block.

    Args:
        scores: (K, h, w) of each tile of the row, on any device; overwritten.
        grid, row: the tiles, and the index of the row.
        weights: blending weights of the rows and of the columns, see `ramps`.
        above: file of the partial sums of the previous row; None leaves them out.
        below: open file for the partial sums that the next row needs.
    """
    top, bottom = grid.rows[row]
    is_last = row + 1 == len(grid.rows)
    finished = (bottom if is_last else grid.rows[row + 1][0]) - top
    shared = 0  # lines that the row above has partial sums for
    if above is not None:
        shared = grid.rows[row - 1][1] - top
    pending: Optional[Tensor] = None  # sums of the columns that the next tile completes
    for column, tile in enumerate(scores):
        tile = tile.cpu()
        left, right = grid.columns[column]
        stop = right if column + 1 == len(grid.columns) else grid.columns[column + 1][0]
        tile.mul_(weights[1][column])
        if pending is not None:
            tile[:, :, : pending.shape[2]] += pending
        pending = tile[:, :, stop - left :].clone()
        block = tile[:, :, : stop - left].mul_(weights[0][row][:, None])
        if above is not None and shared > 0:
            shape = len(block), shared, stop - left
            offset = 4 * len(block) * shared * left
            sums = np.fromfile(above, np.float32, math.prod(shape), offset=offset)
            block[:, :shared] += torch.from_numpy(sums.reshape(shape))
        yield block[:, :finished]
        if not is_last:
            below.write(block[:, finished:].contiguous().numpy().data)


best_class = partial(torch.argmax, dim=0)  # scores (K, h, w) -> labels (h, w)


def segment_rows(
    work: RowWork,
    band: Span,
    dtype: DTypeLike = np.uint8,
    decide: Callable[[Tensor], Tensor] = best_class,
) -> None:
    """Write the labels of the lines that each row of tiles of a band completes, unless its file is
    there. They are the same as in the label map of the whole image. `decide` turns blended scores
    into labels."""
    grid = work.files.grid
    start = work.first_missing(band)
    if start == band[1]:
        return
    weights = ramps(grid.rows), ramps(grid.columns)
    first = first_row_reaching(grid, start)
    with TemporaryDirectory(prefix='.sums-', dir=work.files.folder) as sums:
        above: Optional[Path] = None  # partial sums of the row before
        for row, scores in work.outputs(first, band[1]):
            below = Path(sums, str(row))
            labels = []
            with below.open('wb') as file:
                for block in blended(scores, grid, row, weights, above, file):
                    if row >= start:
                        labels.append(decide(block).numpy().astype(dtype))
                        work.progress(1)
            if above is not None:
                above.unlink()
            above = below
            if row >= start:
                work.files.write(row, np.concatenate(labels, axis=1).tobytes())


def first_row_reaching(grid: TileGrid, start: int) -> int:
    """The first row of tiles that shares lines with row `start`, and contributes to its scores."""
    top = grid.rows[start][0]
    first = start
    while first > 0 and grid.rows[first - 1][1] > top:
        first -= 1
    return first


def labels_of_rows(files: RowFiles, dtype: DTypeLike) -> np.memmap:
    """The label map (H, W), memory-mapped and read-only, from the rows of `segment_rows`."""
    path = files.folder / 'labels'
    with path.open('wb') as whole:
        for row in range(len(files.grid.rows)):
            with files.of(row).open('rb') as part:
                shutil.copyfileobj(part, whole)
    return np.memmap(path, dtype, 'r', shape=files.grid.size)


# Detection


def detect_rows(work: RowWork, band: Span) -> None:
    """Write the detections of each row of tiles of a band, unless its file is there."""
    for row, outputs in work.outputs(work.first_missing(band), band[1]):
        found = []
        for tile in outputs:
            found.append([part.cpu() for part in tile])
            work.progress(1)
        contents = io.BytesIO()  # writing it raises OSError on a full disk, torch.save RuntimeError
        torch.save(found, contents)
        work.files.write(row, contents.getvalue())


def found_in_rows(files: RowFiles) -> list[Found]:
    """The detections of all tiles, row by row, that `detect_rows` wrote."""
    found = []
    for row in range(len(files.grid.rows)):
        for tile in torch.load(files.of(row), weights_only=True):
            found.append(Found(*tile))
    return found


def merged(found: Sequence[Found], grid: TileGrid) -> Found:
    """The detections of all tiles, best first, each object once; from those of each tile, row by
    row, in pixels of the tile.

    Two boxes of a class from two tiles are the same object if their IoU within the pixels that the
    tiles share is above 0.5. If some tile contains the object whole, the best whole box is kept. An
    object too large for that has only boxes cut by tile borders; it gets their bounding box and
    best score.
    """
    tiles = torch.tensor(
        [(left, top, right, bottom) for top, bottom in grid.rows for left, right in grid.columns]
    )  # (T, 4)
    counts = torch.tensor([len(part.scores) for part in found])
    own = tiles.repeat_interleave(counts, dim=0)  # (N, 4), the tile of each box
    boxes = torch.cat([part.boxes for part in found]).double() + own[:, [0, 1, 0, 1]]
    scores = torch.cat([part.scores for part in found])
    labels = torch.cat([part.labels for part in found])
    whole = (~are_cut(boxes, own, grid)).tolist()
    score = scores.tolist()
    others = same_objects(boxes, labels, counts.tolist(), tiles, grid)

    # Whole boxes before cut ones, then by score, then in their order.
    order = sorted(range(len(boxes)), key=lambda i: (not whole[i], -score[i], i))
    parent: dict[int, int] = {}  # union-find over the kept boxes; a tree is an object
    for i in order:
        kept = [j for j in others[i] if j in parent]
        if any(whole[j] for j in kept):
            continue  # a whole box is kept for this object
        parent[i] = i
        for j in kept:
            parent[root(parent, j)] = i
    objects: defaultdict[int, list[int]] = defaultdict(list)
    for i in parent:
        objects[root(parent, i)].append(i)
    if not objects:
        return Found(boxes.float(), scores, labels)
    parts_of_best = {}
    for parts in objects.values():
        best = max(parts, key=lambda i: score[i])
        parts_of_best[best] = parts
    best_first = sorted(parts_of_best, key=lambda i: (-score[i], i))
    hulls = []
    for best in best_first:
        own_boxes = boxes[parts_of_best[best]]
        hulls.append(torch.cat([own_boxes[:, :2].amin(0), own_boxes[:, 2:].amax(0)]))
    return Found(torch.stack(hulls).float(), scores[best_first], labels[best_first])


def are_cut(boxes: Tensor, own: Tensor, grid: TileGrid) -> Tensor:
    """Which boxes (N, 4) end at a border of their tiles (N, 4) that is not one of the image."""
    height, width = grid.size
    at_start = (boxes[:, :2] < own[:, :2] + CUT) & (own[:, :2] > 0)
    at_end = (boxes[:, 2:] > own[:, 2:] - CUT) & (own[:, 2:] < torch.tensor([width, height]))
    return (at_start | at_end).any(1)


def same_objects(
    boxes: Tensor, labels: Tensor, counts: Sequence[int], tiles: Tensor, grid: TileGrid
) -> defaultdict[int, list[int]]:
    """For each box, those of its class in other tiles that agree with it; see `merged`.

    Args:
        boxes: (N, 4) of all tiles, tile by tile, in pixels of the image.
        labels: (N,) of the boxes.
        counts: number of boxes of each tile.
        tiles: (T, 4), as boxes.
    """
    others: defaultdict[int, list[int]] = defaultdict(list)
    stops = list(itertools.accumulate(counts))
    columns = len(grid.columns)
    pairs = itertools.product(meeting(grid.rows), meeting(grid.columns))
    for (row, other_row), (column, other_column) in pairs:
        t = row * columns + column
        u = other_row * columns + other_column
        if t >= u or not counts[t] or not counts[u]:
            continue
        a = slice(stops[t] - counts[t], stops[t])
        b = slice(stops[u] - counts[u], stops[u])
        shared = intersection(tiles[t], tiles[u])
        first = intersection(boxes[a], shared)[:, None]
        second = intersection(boxes[b], shared)
        common = area(intersection(first, second))
        agree = common > 0.5 * (area(first) + area(second) - common)
        for i, j in (agree & (labels[a][:, None] == labels[b])).nonzero().tolist():
            others[a.start + i].append(b.start + j)
            others[b.start + j].append(a.start + i)
    return others


def root(parent: dict[int, int], i: int) -> int:
    while parent[i] != i:
        i = parent[i]
    return i


def meeting(tiles: Sequence[Span]) -> list[tuple[int, int]]:
    """The pairs of tiles along an axis that share pixels, including each with itself."""
    pairs = itertools.product(enumerate(tiles), repeat=2)
    return [(i, j) for (i, a), (j, b) in pairs if max(a[0], b[0]) < min(a[1], b[1])]


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """The intersection of boxes (..., 4); empty if x2 <= x1 or y2 <= y1."""
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    return torch.cat([low, high], dim=-1)


def area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
