"""Inference on images of any size in overlapping tiles, with little memory.

An image is read once, from top to bottom, one row of tiles at a time. The model's outputs for
overlapping tiles are blended (segmentation) or merged (detection). Finished results, and partial
sums that the next row of tiles needs, are kept in a working folder: a run that was killed resumes
after its last complete row of tiles, and its result is bit-identical.

Results do not depend on the batch size. Tiles are accumulated in a fixed order, and each passes the
model alone unless told otherwise, because the rounding of a matrix product depends on its shape.

Shapes: image (3, H, W); tiles (B, 3, h, w); scores (B, K, h, w) of K classes; boxes (N, 4) as
x1, y1, x2, y2 in pixels. A span is a half-open range of pixels along an axis, [start, stop).
"""

import io
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

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
    """The fewest evenly spread tiles along an axis that overlap by at least `overlap`.

    They start and stop at multiples of 32, except that the last one stops with the image.

    Args:
        length: length of the image, in pixels.
        tile: length of a tile, a multiple of 32.
        overlap: overlap of neighbouring tiles, a multiple of 32 below `tile`.
    """
    if tile <= 0 or tile % ALIGN or overlap % ALIGN or not 0 <= overlap < tile:
        raise ValueError(
            f'tile and overlap must be multiples of {ALIGN} with 0 <= overlap < tile, '
            f'got tile={tile} and overlap={overlap}'
        )
    room = max(math.ceil((length - tile) / ALIGN), 0)  # 32s between the first and the last start
    steps = math.ceil(room * ALIGN / (tile - overlap))
    starts = [ALIGN * (room * i // steps) for i in range(steps + 1)] if steps else [0]
    return [(start, min(start + tile, length)) for start in starts]


def ramps(tiles: Sequence[Span]) -> list[Tensor]:
    """The blending weights of each tile along an axis, one (stop - start,) tensor per tile.

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
    """The tiles of an image.

    Args:
        size: height and width of the image.
        tile: height and width of a tile, a multiple of 32.
        overlap: overlap of neighbouring tiles, a multiple of 32.
    """

    def __init__(self, size: tuple[int, int], tile: int, overlap: int) -> None:
        self.size = size
        self.rows = spans(size[0], tile, overlap)
        self.columns = spans(size[1], tile, overlap)

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns)


class Journal:
    """The progress of a run, in a folder, so that the run can resume after a kill.

    Where the file system or the platform has no file locks, it warns that it cannot tell whether
    another run uses the folder.

    Args:
        folder: for all files of the run; created if needed.
        about: what the result depends on, as JSON values.

    Raises:
        UserError: the folder belongs to a run about something else, or to one in progress.

    Attributes:
        rows: the number of finished rows of tiles.
    """

    def __init__(self, folder: Union[str, Path], about: dict) -> None:
        self.folder = Path(folder)
        self.about = json.loads(json.dumps(about))
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = locked(self.folder / 'lock')
        except BlockingIOError:
            raise UserError(f'another run is using {self.folder}') from None
        if self.lock is None:
            warnings.warn('no file locks here: do not start a run twice at a time', stacklevel=2)
        try:
            self.rows = self._rows_done()
        except BaseException:
            self.close()
            raise

    def _rows_done(self) -> int:
        path = self.folder / 'state.json'
        if not path.exists():
            return 0
        state = json.loads(path.read_text())
        if state['about'] != self.about:
            keys = self.about.keys() | state['about'].keys()
            other = [k for k in sorted(keys) if state['about'].get(k) != self.about.get(k)]
            raise UserError(
                f'{self.folder} belongs to an unfinished run with another {", ".join(other)}; '
                f'finish that run or remove the folder'
            )
        return state['rows']

    def done(self, rows: int) -> None:
        """Record that `rows` rows of tiles are finished and on disk."""
        with atomic_write(self.folder / 'state.json') as partial, partial.open('w') as file:
            json.dump({'about': self.about, 'rows': rows}, file)
            file.flush()
            os.fsync(file.fileno())
        self.rows = rows

    def remove(self) -> None:
        """Remove the folder of a finished run, its state first."""
        (self.folder / 'state.json').unlink(missing_ok=True)
        shutil.rmtree(self.folder)
        self.close()

    def close(self) -> None:
        """Let another run use the folder."""
        if self.lock is not None:
            self.lock.release()


class Run(NamedTuple):
    """The work on an image."""

    read: ReadRows  # reads lines of the image, each once, from top to bottom
    grid: TileGrid
    # Tiles (B, 3, h, w) to their scores (B, K, h, w) in float32, which are overwritten, or to the
    # detections in each, in pixels of the tile
    predict: Callable[[Tensor], Union[Tensor, Sequence[Found]]]
    journal: Journal  # keeps the work; an unfinished run in it is resumed
    batch_size: int = 1  # number of tiles queued on the model at a time
    # Pass tiles to the model one by one, so that the result is bit-identical for all batch sizes.
    # If False, they pass together, which may be faster on a GPU; the rounding of the scores then
    # depends on the batch size, and so may the label where two classes tie.
    exact: bool = True
    # Called with the number of tiles finished since the last call
    progress: Callable[[int], object] = lambda tiles: None

    def outputs(self, first: int, stop: int) -> Iterator[tuple[int, Iterator]]:
        """The index and the outputs of `predict` of each row of tiles in [first, stop) that is not
        finished yet. It is finished when the next one is asked for."""
        begin = self.journal.rows or first
        self.progress((begin - first) * len(self.grid.columns))
        for row, strip in enumerate(strips(self.read, self.grid.rows[:stop], begin), begin):
            yield row, self.outputs_in(strip)
            self.journal.done(row + 1)

    def outputs_in(self, strip: Tensor) -> Iterator:
        """The outputs of `predict` for the tiles of a strip, one by one from left to right."""
        tiles = (strip[:, :, slice(*span)] for span in self.grid.columns)
        # All tiles have one shape, except perhaps the last.
        for _, alike in itertools.groupby(tiles, lambda tile: tile.shape):
            while batch := list(itertools.islice(alike, self.batch_size)):
                if self.exact:
                    outputs = [self.predict(tile[None]) for tile in batch]  # queued, no waiting
                    yield from (output[0] for output in outputs)
                else:
                    yield from self.predict(torch.stack(batch))


def strips(read: ReadRows, rows: Sequence[Span], first: int = 0) -> Iterator[Tensor]:
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
    below: Path,
) -> Iterator[Tensor]:
    """The blended scores (K, h, w) that a row of tiles completes, block by block.

    Args:
        scores: (K, h, w) of each tile of the row, on any device; overwritten.
        grid: the tiles.
        row: index of the row.
        weights: blending weights of the rows and of the columns, see `ramps`.
        above: file of the partial sums of the previous row; None leaves them out.
        below: file to append the partial sums for the next row to.
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
        if not last and finished < bottom - top:
            with below.open('ab') as file:
                file.write(block[:, finished:].contiguous().numpy())


def best_class(scores: Tensor) -> Tensor:
    """The class of the highest score: (K, h, w) -> (h, w)."""
    return scores.argmax(0)


def segment_in_tiles(
    run: Run,
    dtype: np.dtype = np.uint8,
    decide: Callable[[Tensor], Tensor] = best_class,
    band: Optional[Span] = None,
) -> None:
    """Write the label map of an image of any size into the journal's folder.

    Args:
        run: the work.
        dtype: dtype of the label map.
        decide: labels (h, w) of blended scores (K, h, w).
        band: a span of rows of tiles; only the lines that these complete are labelled. They are
            the same as in the whole label map. None takes all rows.
    """
    grid, folder = run.grid, run.journal.folder
    weights = ramps(grid.rows), ramps(grid.columns)
    start, stop = band or (0, len(grid.rows))
    top = grid.rows[start][0]
    # Earlier rows of tiles that reach into the band contribute to its scores.
    first = next(i for i, rows in enumerate(grid.rows) if rows[1] > top or i == start)
    with (folder / 'labels').open('r+b' if run.journal.rows else 'wb') as file:
        for row, scores in run.outputs(first, stop):
            old, above, below = (folder / f'sums-{i}' for i in (row - 1, row, row + 1))
            old.unlink(missing_ok=True)
            below.unlink(missing_ok=True)
            blocks, sums = [], above if row > first else None
            for block in blended(scores, grid, row, weights, sums, below):
                if row >= start:
                    blocks.append(decide(block).numpy().astype(dtype))
                run.progress(1)
            if blocks:
                file.seek((grid.rows[row][0] - top) * grid.size[1] * blocks[0].itemsize)
                file.write(np.concatenate(blocks, axis=1))
                file.flush()
                os.fsync(file.fileno())
            if below.exists():
                flush(below)


def labels_in_tiles(folders: Sequence[Path], size: tuple[int, int], dtype: np.dtype) -> np.memmap:
    """The label map (H, W), memory-mapped and read-only, that `segment_in_tiles` wrote into a
    folder, or band by band into several subfolders of one."""
    path = folders[0] / 'labels'
    if len(folders) > 1:
        path = folders[0].with_name('labels')
        with path.open('wb') as whole:
            for folder in folders:
                with (folder / 'labels').open('rb') as band:
                    shutil.copyfileobj(band, whole)
    return np.memmap(path, dtype, 'r', shape=size)


def flush(path: Path) -> None:
    """Force a file to disk."""
    with path.open('rb+') as file:
        os.fsync(file.fileno())


# Detection


def detect_in_tiles(run: Run, band: Optional[Span] = None) -> None:
    """Write the detections of each row of tiles, or of a band of them, into the journal's
    folder."""
    for row, outputs in run.outputs(*(band or (0, len(run.grid.rows)))):
        path = run.journal.folder / f'found-{row}.pt'
        found = []
        for tile in outputs:
            found.append(tuple(part.cpu() for part in tile))
            run.progress(1)
        contents = io.BytesIO()  # writing it raises OSError on a full disk, torch.save RuntimeError
        torch.save(found, contents)
        path.write_bytes(contents.getbuffer())
        flush(path)


def found_in_tiles(folders: Iterable[Path]) -> list[Found]:
    """The detections of all tiles, row by row, that `detect_in_tiles` wrote into folders."""
    paths = [path for folder in folders for path in folder.glob('found-*.pt')]
    paths.sort(key=lambda path: int(path.stem.partition('-')[2]))
    return [Found(*tile) for path in paths for tile in torch.load(path)]


def merged(found: Sequence[Found], grid: TileGrid, iou: float = 0.5) -> Found:
    """The detections of all tiles, best first, each object once.

    Two boxes of a class from two tiles are the same object if they agree within the pixels that the
    tiles share. If some tile contains the object whole, the best whole box is kept. An object too
    large for that has only boxes cut by tile borders; it gets their bounding box and best score.

    Args:
        found: the detections of each tile, row by row, in pixels of the tile.
        grid: the tiles.
        iou: intersection over union, within the shared pixels, above which boxes agree.
    """
    tiles = torch.tensor(
        [(left, top, right, bottom) for top, bottom in grid.rows for left, right in grid.columns]
    )  # (T, 4)
    counts = torch.tensor([len(part.scores) for part in found])
    own = tiles.repeat_interleave(counts, dim=0)  # (N, 4)
    boxes = torch.cat([part.boxes for part in found]).double() + own[:, [0, 1, 0, 1]]
    scores = torch.cat([part.scores for part in found])
    labels = torch.cat([part.labels for part in found])
    whole = (~is_cut(boxes, own, grid.size)).tolist()
    score = scores.tolist()
    others = agreeing(boxes, labels, counts.cumsum(0).tolist(), tiles, grid, iou)

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
    best = dict(sorted(best.items(), key=lambda item: (-score[item[0]], item[0])))
    hulls = [
        torch.cat([boxes[members, :2].amin(0), boxes[members, 2:].amax(0)])
        for members in best.values()
    ]
    return Found(torch.stack(hulls).float(), scores[list(best)], labels[list(best)])


def root(parent: dict[int, int], i: int) -> int:
    while parent[i] != i:
        i = parent[i]
    return i


def is_cut(boxes: Tensor, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """Whether each box (N, 4) touches a border of its tile (N, 4) that is not an image border."""
    height, width = size
    low = (boxes[:, :2] < tiles[:, :2] + CUT) & (tiles[:, :2] > 0)
    inside = tiles[:, 2:] < torch.tensor([width, height])
    high = (boxes[:, 2:] > tiles[:, 2:] - CUT) & inside
    return (low | high).any(1)


def agreeing(
    boxes: Tensor, labels: Tensor, ends: Sequence[int], tiles: Tensor, grid: TileGrid, iou: float
) -> dict[int, list[int]]:
    """For each box, the boxes of its class in other tiles that agree with it, see `merged`.

    Args:
        boxes: (N, 4), in the order of their tiles (T, 4).
        labels: (N,).
        ends: the cumulative number of boxes after each tile.
        tiles, grid: the tiles.
        iou: the overlap above which boxes agree.
    """
    others = {}
    starts = [0, *ends[:-1]]
    rows, columns = meeting(grid.rows), meeting(grid.columns)
    for (r, s), (c, d) in itertools.product(rows, columns):
        t, u = r * len(grid.columns) + c, s * len(grid.columns) + d
        a, b = slice(starts[t], ends[t]), slice(starts[u], ends[u])
        if t >= u or a.start == a.stop or b.start == b.stop:
            continue
        shared = intersection(tiles[t], tiles[u])
        first = intersection(boxes[a], shared)[:, None]
        second = intersection(boxes[b], shared)[None]
        common = area(intersection(first, second))
        union = area(first) + area(second) - common
        same = (common > iou * union) & (labels[a][:, None] == labels[b][None])
        for i, j in same.nonzero().tolist():
            i, j = a.start + i, b.start + j
            others.setdefault(i, []).append(j)
            others.setdefault(j, []).append(i)
    return others


def meeting(tiles: Sequence[Span]) -> list[tuple[int, int]]:
    """The pairs of tiles along an axis that share pixels, including each with itself."""
    indices = range(len(tiles))
    return [
        (i, j)
        for i in indices
        for j in indices
        if tiles[i][0] < tiles[j][1] and tiles[j][0] < tiles[i][1]
    ]


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """The intersection of boxes (..., 4); empty if x2 <= x1 or y2 <= y1."""
    return torch.cat(
        [torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])], dim=-1
    )


def area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
