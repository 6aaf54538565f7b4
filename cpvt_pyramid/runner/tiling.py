"""Inference on images of any size: overlapping tiles, strip by strip, with little in memory.

An image is read from top to bottom, once, a row of tiles at a time. What the model says of
overlapping tiles is blended (segmentation) or merged (detection). What is finished, and the sums
that the next row of tiles goes on with, is in a working folder, so a run that was killed goes on
after the last whole row of tiles, to the same bits.

Nothing depends on how the tiles are batched: they are added up in a fixed order, and, because the
last bits of a matrix product depend on its shape, each passes the model by itself unless told
otherwise.

Shapes: image (3, H, W); tiles (B, 3, h, w); scores (B, K, h, w) of K classes; boxes (N, 4) as
x1, y1, x2, y2 in pixels. A span is a pair of pixels along an axis, from the first to behind the
last.
"""

import fcntl
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Union

import numpy as np
import torch
from torch import Tensor

ALIGN = 32  # tiles begin at multiples of the largest stride, where untiled maps have their cells
CUT = 4  # pixels: a box that ends so close to a border inside of the image is cut by it

Span = tuple[int, int]
ReadRows = Callable[[int, int], Tensor]  # rows from, to -> (3, to - from, W); goes downwards only


class Found(NamedTuple):
    """What a detector found."""

    boxes: Tensor  # (N, 4)
    scores: Tensor  # (N,)
    labels: Tensor  # (N,)


def spans(length: int, tile: int, overlap: int) -> list[Span]:
    """Tiles along an axis: as few as overlap by `overlap` at least, evenly spread.

    All but the last begin and end at multiples of 32; the last may be up to 31 shorter.

    Args:
        length: of the image, in pixels.
        tile: length of a tile, a multiple of 32.
        overlap: of neighbours, a multiple of 32 below `tile`.
    """
    if tile <= 0 or tile % ALIGN or overlap % ALIGN or not 0 <= overlap < tile:
        raise ValueError(
            f'tile {tile} and overlap {overlap}; both are multiples of {ALIGN}, '
            f'and the overlap is from 0 up to, but not, the tile'
        )
    room = max(math.ceil((length - tile) / ALIGN), 0)  # for the first tile to move in
    steps = math.ceil(room * ALIGN / (tile - overlap))
    starts = [ALIGN * (room * i // steps) for i in range(steps + 1)] if steps else [0]
    return [(start, min(start + tile, length)) for start in starts]


def ramps(tiles: Sequence[Span]) -> list[Tensor]:
    """The weight of each tile along an axis, (length of the tile,) each.

    They fall smoothly, as a squared sine, over what a tile shares with its neighbour, and add up
    to 1 at each pixel. They do not fall towards the ends of the image.
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
    """From 0 at 0 to 1 at 1 and beyond, with rise(x) + rise(1 - x) = 1."""
    return torch.sin(x.clamp(0, 1) * (math.pi / 2)) ** 2


class Grid:
    """The tiles of an image.

    Args:
        size: height and width of the image.
        tile: height and width of a tile, a multiple of 32.
        overlap: of neighbouring tiles, a multiple of 32.
    """

    def __init__(self, size: tuple[int, int], tile: int, overlap: int) -> None:
        self.size = size
        self.rows = spans(size[0], tile, overlap)
        self.columns = spans(size[1], tile, overlap)

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns)


class Journal:
    """What is done of a run, in a folder, so that the run goes on after being killed.

    Args:
        folder: for all that the run keeps; made if it is not there.
        about: what the result depends on, as JSON has it.

    Raises:
        ValueError: the folder is of a run that is about something else, or still going.

    Attributes:
        rows: how many rows of tiles are done.
    """

    def __init__(self, folder: Union[str, Path], about: dict) -> None:
        self.folder = Path(folder)
        self.about = json.loads(json.dumps(about))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / 'lock', 'w')
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rows = self._rows_done()
        except BlockingIOError:
            self.lock.close()
            raise ValueError(f'another run is at work in {self.folder}') from None
        except ValueError:
            self.lock.close()
            raise

    def _rows_done(self) -> int:
        path = self.folder / 'state.json'
        if not path.exists():
            return 0
        state = json.loads(path.read_text())
        if state['about'] != self.about:
            keys = self.about.keys() | state['about'].keys()
            other = [k for k in sorted(keys) if state['about'].get(k) != self.about.get(k)]
            raise ValueError(
                f'{self.folder} is of an unfinished run with another {", ".join(other)}; '
                f'finish that one or remove the folder'
            )
        return state['rows']

    def done(self, rows: int) -> None:
        """So many rows of tiles are done, and what is written of them will stay."""
        partial = self.folder / 'state.json.partial'
        with partial.open('w') as file:
            json.dump({'about': self.about, 'rows': rows}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / 'state.json')
        self.rows = rows

    def remove(self) -> None:
        """The run is over: the folder goes, the state first."""
        for path in (self.folder / 'state.json', *self.folder.iterdir()):
            path.unlink(missing_ok=True)
        self.lock.close()
        self.folder.rmdir()


def strips(read: ReadRows, rows: Sequence[Span], first: int = 0) -> Iterator[Tensor]:
    """The image below each row of tiles from the `first`, (3, h, W); each line is read once."""
    strip, bottom = None, 0
    for start, stop in rows[first:]:
        fresh = read(max(start, bottom), stop)
        shared = bottom - start
        strip = fresh if shared <= 0 else torch.cat([strip[:, -shared:], fresh], dim=1)
        bottom = stop
        yield strip


def batches(
    strip: Tensor, columns: Sequence[Span], predict: Callable, batch_size: int, exact: bool
) -> Iterator:
    """What `predict` says of the tiles of a strip, tile by tile, from left to right."""
    tiles = (strip[:, :, slice(*span)] for span in columns)
    # A batch is of one shape; only the last tile may be of another.
    for _, alike in itertools.groupby(tiles, lambda tile: tile.shape):
        while batch := list(itertools.islice(alike, batch_size)):
            if exact:
                said = [predict(tile[None]) for tile in batch]  # a GPU is not waited for
                yield from (result[0] for result in said)
            else:
                yield from predict(torch.stack(batch))


# Segmentation


class Sums:
    """A file of blended scores (K, rows, width) that wait for the next row of tiles.

    It lies block by block, each as wide as a step of the tiles, and a block is mapped into memory
    only while it is read or written.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.path = path
        self.width = width

    def write(self, left: int, block: Tensor) -> None:
        if not self.path.exists():
            allocate(self.path, 4 * len(block) * block.shape[1] * self.width)
        self._block(left, block.shape, 'r+')[:] = block.numpy()

    def read(self, left: int, shape: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.array(self._block(left, shape, 'r')))

    def _block(self, left: int, shape: Sequence[int], mode: str) -> np.memmap:
        classes, rows, _ = shape
        return np.memmap(self.path, np.float32, mode, 4 * classes * rows * left, tuple(shape))

    def flush(self) -> None:
        if self.path.exists():
            flush(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def allocate(path: Path, length: int) -> None:
    """Make a file of so many bytes, or fail: a mapped file that a full disk has no place for
    would be the end of the process."""
    with path.open('wb') as file:
        os.posix_fallocate(file.fileno(), 0, length)


def flush(path: Path) -> None:
    """See a file onto the disk."""
    with path.open('rb+') as file:
        os.fsync(file.fileno())


def blended(
    scores: Iterator[Tensor],
    grid: Grid,
    row: int,
    weights: tuple[Sequence[Tensor], Sequence[Tensor]],
    above: Sums,
    below: Sums,
) -> Iterator[tuple[Span, Span, Tensor]]:
    """The blended scores that a row of tiles finishes, block by block.

    Args:
        scores: (K, h, w) of each tile of the row, on any device; they are written over.
        grid: the tiles.
        row: which of its rows.
        weights: of the rows and of the columns, see `ramps`.
        above: the sums that the row before has left.
        below: for the sums that this row leaves to the next.

    Yields:
        Rows, columns and their scores (K, h, w).
    """
    top, bottom = grid.rows[row]
    last = row + 1 == len(grid.rows)
    finished = (bottom if last else grid.rows[row + 1][0]) - top
    shared = grid.rows[row - 1][1] - top if row else 0  # lines that the row before has seen
    pending = None  # sums of columns that the next tile sees too
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
            block[:, :shared] += above.read(left, (len(block), shared, stop - left))
        yield (top, top + finished), (left, stop), block[:, :finished]
        if not last and finished < bottom - top:
            below.write(left, block[:, finished:].contiguous())


def best_class(scores: Tensor) -> Tensor:
    """Labels (h, w) of scores (K, h, w)."""
    return scores.argmax(0)


def segment(
    read: ReadRows,
    grid: Grid,
    predict: Callable[[Tensor], Tensor],
    journal: Journal,
    dtype: np.dtype = np.uint8,
    decide: Callable[[Tensor], Tensor] = best_class,
    batch_size: int = 1,
    exact: bool = True,
    progress: Callable[[int], object] = lambda tiles: None,
) -> np.memmap:
    """The label map of an image of any size, in a file of the journal's folder.

    Args:
        read: gives lines of the image, from top to bottom; they are read once.
        grid: the tiles.
        predict: scores (B, K, h, w), float32, of tiles (B, 3, h, w); their own to write over.
        journal: where the work is kept; a run that it knows goes on.
        dtype: of the label map.
        decide: labels (h, w) of blended scores (K, h, w).
        batch_size: tiles that are handed to the model before the first answer is waited for.
        exact: hand them over one by one; the result is then the same for all batch sizes to the
            last bit. False: together, which a GPU may do faster; the last bits of the scores then
            depend on the batch size, and the label where two classes are as good as equal.
        progress: is told how many more tiles are done.

    Returns:
        (H, W), memory-mapped and read-only.
    """
    path = journal.folder / 'labels'
    weights = ramps(grid.rows), ramps(grid.columns)
    if not journal.rows:
        allocate(path, math.prod(grid.size) * np.dtype(dtype).itemsize)
    progress(journal.rows * len(grid.columns))
    for row, strip in enumerate(strips(read, grid.rows, journal.rows), journal.rows):
        above, below = (Sums(journal.folder / f'sums-{i}', grid.size[1]) for i in (row, row + 1))
        below.remove()
        scores = batches(strip, grid.columns, predict, batch_size, exact)
        for rows, columns, block in blended(scores, grid, row, weights, above, below):
            # Mapped anew for each block: pages that stay mapped would count as memory in use.
            labels = np.memmap(path, dtype, 'r+', shape=grid.size)
            labels[slice(*rows), slice(*columns)] = decide(block).numpy()
            del labels
            progress(1)
        flush(path)
        below.flush()
        journal.done(row + 1)
        above.remove()
    return np.memmap(path, dtype, 'r', shape=grid.size)


# Detection


def detect(
    read: ReadRows,
    grid: Grid,
    predict: Callable[[Tensor], Sequence[Found]],
    journal: Journal,
    iou: float = 0.5,
    batch_size: int = 1,
    exact: bool = True,
    progress: Callable[[int], object] = lambda tiles: None,
) -> Found:
    """What a detector finds in an image of any size, the best first.

    Args:
        read, grid, journal, batch_size, exact, progress: as of `segment`.
        predict: what is found in each of the tiles (B, 3, h, w), in pixels of the tile.
        iou: boxes from two tiles that overlap by more where both look are of one thing.
    """
    progress(journal.rows * len(grid.columns))
    for row, strip in enumerate(strips(read, grid.rows, journal.rows), journal.rows):
        path = journal.folder / f'found-{row}.pt'
        found = []
        for tile in batches(strip, grid.columns, predict, batch_size, exact):
            found.append(tuple(part.cpu() for part in tile))
            progress(1)
        torch.save(found, path)
        flush(path)
        journal.done(row + 1)
    rows = (torch.load(journal.folder / f'found-{row}.pt') for row in range(len(grid.rows)))
    return merged([Found(*tile) for row in rows for tile in row], grid, iou)


def merged(found: Sequence[Found], grid: Grid, iou: float = 0.5) -> Found:
    """One list of what was found in all tiles, the best first, each thing once.

    Two boxes of a class from two tiles are of one thing if they agree about the pixels that both
    tiles see. Of a thing that some tile sees whole, the whole box of the best score stays. A thing
    that is larger than that has only boxes that are cut by borders of tiles; it gets the box
    around them, and their best score.

    Args:
        found: for each tile, row by row, in pixels of the tile.
        grid: the tiles.
        iou: intersection over union, in the pixels that both tiles see, from which boxes agree.
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

    # Whole boxes before cut ones, then by score, then as they came.
    parent = {}  # of the boxes that count; the boxes of one thing hang together
    for i in sorted(range(len(boxes)), key=lambda i: (not whole[i], -score[i], i)):
        kept = [j for j in others.get(i, ()) if j in parent]
        if any(whole[j] for j in kept):
            continue  # the whole box stands for it
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
    """Whether a border of its tile (N, 4), inside of the image, may have cut a box (N, 4)."""
    height, width = size
    low = (boxes[:, :2] < tiles[:, :2] + CUT) & (tiles[:, :2] > 0)
    inside = tiles[:, 2:] < torch.tensor([width, height])
    high = (boxes[:, 2:] > tiles[:, 2:] - CUT) & inside
    return (low | high).any(1)


def agreeing(
    boxes: Tensor, labels: Tensor, ends: Sequence[int], tiles: Tensor, grid: Grid, iou: float
) -> dict[int, list[int]]:
    """For each box, those of its class and of other tiles that agree with it where both see.

    Args:
        boxes: (N, 4), those of the first tile first.
        labels: (N,).
        ends: for each tile, how many boxes there are up to its last.
        tiles: (T, 4).
        grid: of the tiles.
        iou: from which boxes agree.
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
    """The pairs of tiles along an axis, each with itself too, that share pixels."""
    indices = range(len(tiles))
    return [
        (i, j)
        for i in indices
        for j in indices
        if tiles[i][0] < tiles[j][1] and tiles[j][0] < tiles[i][1]
    ]


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """Of boxes (..., 4); empty where the result's second corner is not beyond its first."""
    return torch.cat(
        [torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])], dim=-1
    )


def area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
