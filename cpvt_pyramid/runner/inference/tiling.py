"""Inference on images of any size in overlapping tiles, with little memory.

An image is read once, from top to bottom, one row of tiles at a time. The model's outputs for
overlapping tiles are blended (segmentation) or merged (detection). Finished results, and partial
sums that the next row of tiles needs, are kept in a working folder: a run that was killed resumes
after its last complete row of tiles, and its result is bit-identical.

Results do not depend on the batch size. Tiles are accumulated in a fixed order, and each passes the
model alone, because the rounding of a matrix product depends on its shape.

Shapes: image (3, H, W); tile (3, h, w); scores (K, h, w) of K classes; boxes (N, 4) as x1, y1, x2,
y2 in pixels. A span is a half-open range, [start, stop), of pixels or of rows of tiles.
"""

import io
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import Tensor

from ...tooling.command import UserError
from ...tooling.files import atomic_write, locked

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


class Journal:
    """The number of finished rows of tiles of a run, in a folder for all of its files, so that the
    same run can resume after a kill. What its result depends on is `about`, JSON values.

    Where there are no file locks, it warns that it cannot tell whether another run uses the folder.

    Raises:
        UserError: the folder belongs to a run about something else, or to one in progress.
    """

    def __init__(self, folder: Path, about: dict) -> None:
        self.folder, self.about, self.rows = folder, json.loads(json.dumps(about)), 0
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = locked(self.folder / 'lock')
        except BlockingIOError:
            raise UserError(f'another run is using {self.folder}') from None
        if self.lock is None:
            warnings.warn('no file locks here: do not start a run twice at a time', stacklevel=2)
        path = self.folder / 'state.json'
        if path.exists():
            state = json.loads(path.read_text())
            self.rows = state['rows']
            other = [key for key in self.about if state['about'].get(key) != self.about[key]]
            if other:
                self.close()
                raise UserError(
                    f'{self.folder} belongs to an unfinished run with another {", ".join(other)}; '
                    'finish that run or remove the folder'
                )

    def done(self, rows: int) -> None:
        """Record that `rows` rows of tiles are finished and on disk."""
        with atomic_write(self.folder / 'state.json') as partial, partial.open('w') as file:
            json.dump({'about': self.about, 'rows': rows}, file)
            flush(file)
        self.rows = rows

    def close(self) -> None:
        """Let another run use the folder."""
        if self.lock is not None:
            self.lock.release()


def flush(file: IO) -> None:
    """Force an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


class Run(NamedTuple):
    """The work on a band of an image: a span of rows of tiles."""

    read: ReadRows  # reads lines of the image, each once, from top to bottom
    grid: TileGrid
    # A tile (3, h, w) to its scores (K, h, w) in float32, which are overwritten, or to the
    # detections in it, in pixels of the tile
    predict: Callable[[Tensor], Union[Tensor, Found]]
    journal: Journal  # keeps the work; an unfinished run in it is resumed
    band: Span
    batch_size: int = 1  # number of tiles queued on the model at a time
    # Called with the number of tiles finished since the last call
    progress: Callable[[int], object] = lambda tiles: None

    def outputs(self, first: int) -> Iterator[tuple[int, Iterator]]:
        """The index and the outputs of `predict` of each row of tiles from `first` on that is not
        finished yet. It is finished when the next one is asked for."""
        begin = self.journal.rows or first
        self.progress((begin - first) * len(self.grid.columns))
        rows = self.grid.rows[: self.band[1]]
        for row, strip in enumerate(strips(self.read, rows, begin), begin):
            yield row, self.outputs_in(strip)
            self.journal.done(row + 1)

    def outputs_in(self, strip: Tensor) -> Iterator:
        """The outputs of `predict` for the tiles of a strip, from left to right."""
        tiles = (strip[:, :, slice(*span)] for span in self.grid.columns)
        while batch := list(itertools.islice(tiles, self.batch_size)):
            yield from [self.predict(tile) for tile in batch]  # a GPU does not wait for the first


def strips(read: ReadRows, rows: Sequence[Span], first: int) -> Iterator[Tensor]:
    """The image under each row of tiles from `first` on, (3, h, W). Each line is read once."""
    strip, bottom = None, 0
    for start, stop in rows[first:]:
        fresh = read(max(start, bottom), stop)
        shared = bottom - start
        strip = fresh if shared <= 0 else torch.cat([strip[:, -shared:], fresh], dim=1)
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
    last = row + 1 == len(grid.rows)
    finished = (bottom if last else grid.rows[row + 1][0]) - top
    shared = grid.rows[row - 1][1] - top if row and above else 0  # lines in the previous row too
    pending = None  # sums of the columns that the next tile completes
    for column, tile in enumerate(scores):
        tile = tile.cpu()
        left, right = grid.columns[column]
        stop = right if column + 1 == len(grid.columns) else grid.columns[column + 1][0]
        tile.mul_(weights[1][column])
        if pending is not None:
            tile[:, :, : pending.shape[2]] += pending
        pending = tile[:, :, stop - left :].clone()
        block = tile[:, :, : stop - left].mul_(weights[0][row][:, None])
        if shared > 0:
            shape = len(block), shared, stop - left
            offset = 4 * len(block) * shared * left
            sums = np.fromfile(above, np.float32, math.prod(shape), offset=offset)
            block[:, :shared] += torch.from_numpy(sums.reshape(shape))
        yield block[:, :finished]
        if not last:
            below.write(block[:, finished:].contiguous().numpy())


best_class = partial(torch.argmax, dim=0)  # scores (K, h, w) -> labels (h, w)


def segment_in_tiles(
    run: Run, dtype: np.dtype = np.uint8, decide: Callable[[Tensor], Tensor] = best_class
) -> None:
    """Write the labels of the lines that a band completes into the journal's folder. They are the
    same as in the label map of the whole image. `decide` turns blended scores into labels."""
    grid = run.grid
    folder = run.journal.folder
    start = run.band[0]
    weights = ramps(grid.rows), ramps(grid.columns)
    top = grid.rows[start][0]
    first = first_row_reaching(grid, start)
    with (folder / 'labels').open('r+b' if run.journal.rows else 'wb') as file:
        for row, scores in run.outputs(first):
            (folder / f'sums-{row - 1}').unlink(missing_ok=True)
            above = folder / f'sums-{row}' if row > first else None
            below = folder / f'sums-{row + 1}'
            blocks = []
            with below.open('wb') as sums:
                for block in blended(scores, grid, row, weights, above, sums):
                    if row >= start:
                        blocks.append(decide(block).numpy().astype(dtype))
                    run.progress(1)
                flush(sums)
            if blocks:
                file.seek((grid.rows[row][0] - top) * grid.size[1] * blocks[0].itemsize)
                file.write(np.concatenate(blocks, axis=1))
                flush(file)


def first_row_reaching(grid: TileGrid, start: int) -> int:
    """The first row of tiles that shares lines with row `start`, and contributes to its scores."""
    top = grid.rows[start][0]
    first = start
    while first > 0 and grid.rows[first - 1][1] > top:
        first -= 1
    return first


def labels_in_tiles(folders: Sequence[Path], size: tuple[int, int], dtype: np.dtype) -> np.memmap:
    """The label map (H, W), memory-mapped and read-only, whose bands `segment_in_tiles` wrote into
    subfolders of one."""
    path = folders[0].with_name('labels')
    with path.open('wb') as whole:
        for folder in folders:
            with (folder / 'labels').open('rb') as band:
                shutil.copyfileobj(band, whole)
    return np.memmap(path, dtype, 'r', shape=size)


# Detection


def detect_in_tiles(run: Run) -> None:
    """Write the detections of each row of tiles of a band into the journal's folder."""
    for row, outputs in run.outputs(run.band[0]):
        found = []
        for tile in outputs:
            found.append([part.cpu() for part in tile])
            run.progress(1)
        contents = io.BytesIO()  # writing it raises OSError on a full disk, torch.save RuntimeError
        torch.save(found, contents)
        with (run.journal.folder / f'found-{row:06}.pt').open('wb') as file:
            file.write(contents.getbuffer())
            flush(file)


def found_in_tiles(folders: Iterable[Path]) -> list[Found]:
    """The detections of all tiles, row by row, that `detect_in_tiles` wrote into folders."""
    paths = [path for folder in folders for path in sorted(folder.glob('found-*.pt'))]
    return [Found(*tile) for path in paths for tile in torch.load(path, weights_only=True)]


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
    counts = [len(part.scores) for part in found]
    own = tiles.repeat_interleave(torch.tensor(counts), dim=0)  # (N, 4)
    boxes = torch.cat([part.boxes for part in found]).double() + own[:, [0, 1, 0, 1]]
    scores = torch.cat([part.scores for part in found])
    labels = torch.cat([part.labels for part in found])
    height, width = grid.size
    cut = (boxes[:, :2] < own[:, :2] + CUT) & (own[:, :2] > 0)
    cut |= (boxes[:, 2:] > own[:, 2:] - CUT) & (own[:, 2:] < torch.tensor([width, height]))
    whole, score = (~cut.any(1)).tolist(), scores.tolist()

    others = {}  # for each box, those of its class in other tiles that agree with it
    stops = list(itertools.accumulate(counts))
    rows, columns = meeting(grid.rows), meeting(grid.columns)
    for (r, s), (c, d) in itertools.product(rows, columns):
        t, u = r * len(grid.columns) + c, s * len(grid.columns) + d
        if t >= u or not counts[t] or not counts[u]:
            continue
        a, b = (slice(stops[i] - counts[i], stops[i]) for i in (t, u))
        shared = intersection(tiles[t], tiles[u])
        first, second = (intersection(boxes[each], shared) for each in (a, b))
        first = first[:, None]
        common = area(intersection(first, second))
        same = common > 0.5 * (area(first) + area(second) - common)
        for i, j in (same & (labels[a][:, None] == labels[b])).nonzero().tolist():
            others.setdefault(a.start + i, []).append(b.start + j)
            others.setdefault(b.start + j, []).append(a.start + i)

    # Whole boxes before cut ones, then by score, then in their order.
    parent = {}  # union-find over the kept boxes; a tree is an object
    for i in sorted(range(len(boxes)), key=lambda i: (not whole[i], -score[i], i)):
        kept = [j for j in others.get(i, ()) if j in parent]
        if any(whole[j] for j in kept):
            continue  # a whole box is kept for this object
        parent[i] = i
        for j in kept:
            parent[root(parent, j)] = i
    things = {}
    for i in parent:
        things.setdefault(root(parent, i), []).append(i)
    if not things:
        return Found(boxes.float(), scores, labels)
    best = {max(members, key=lambda i: score[i]): members for members in things.values()}
    order = sorted(best, key=lambda i: (-score[i], i))
    parts = [boxes[best[i]] for i in order]
    hulls = [torch.cat([part[:, :2].amin(0), part[:, 2:].amax(0)]) for part in parts]
    return Found(torch.stack(hulls).float(), scores[order], labels[order])


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
