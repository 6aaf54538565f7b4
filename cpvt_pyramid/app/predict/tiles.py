"""Tiles of an image, and what becomes of the predictions for them.

Tiles overlap. Scores of pixels are blended, and boxes of one object are merged. Results do not
depend on how many tiles a model gets at a time, because they are accumulated in a fixed order.

Shapes: tile (h, w, N); scores (K, h, w) of K classes; boxes (N, 4) as x1, y1, x2, y2 in pixels. A
span is a half-open range [start, stop) of pixels.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Literal, NamedTuple, Optional

import numpy as np

from ..predictions.matching import box_intersection, box_ious
from .options import ALIGN

TILE = 1024  # pixels: the side of tiles, unless the user or the model says otherwise
CUT = 4  # pixels: a box that ends this close to an inner border of its tile counts as cut

Span = tuple[int, int]


class Boxes(NamedTuple):
    """Detections."""

    boxes: np.ndarray  # (N, 4) float32
    scores: np.ndarray  # (N,) float32
    labels: np.ndarray  # (N,)


class Suppression(NamedTuple):
    """How a detector decides that a box is of the same object as one with a higher score.

    The default is that of a detector that has no non-maximum suppression.
    """

    iou_threshold: float = 0.5
    is_class_agnostic: bool = False
    # 'linear' and 'gaussian' are soft: they reduce the score of the box, which is removed if it
    # falls below `min_score`.
    method: Literal['hard', 'linear', 'gaussian'] = 'hard'
    sigma: float = 0.5  # of 'gaussian'
    min_score: float = 0.0

    def removes(self, iou: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Which boxes with these scores are removed by better ones that they overlap by `iou`."""
        if self.method == 'gaussian':
            return np.less(scores * np.exp(-(iou**2) / self.sigma), self.min_score)
        overlaps: np.ndarray = np.greater(iou, self.iou_threshold)
        if self.method == 'linear':
            return overlaps & np.less(scores * (1 - iou), self.min_score)
        return overlaps


class TileGrid:
    """The tiles of an image of a height and width, see `spans`."""

    def __init__(self, size: tuple[int, int], tile: int, overlap: int) -> None:
        self.size = size
        self.rows = spans(size[0], tile, overlap)
        self.columns = spans(size[1], tile, overlap)


def overlap_for(tile: int) -> int:
    """The overlap of tiles, unless the user says otherwise: a quarter, at least 32 pixels."""
    return min(max(tile // 4 // ALIGN, 1) * ALIGN, tile - ALIGN)


def spans(length: int, tile: int, overlap: int) -> list[Span]:
    """The fewest evenly spread tiles along an axis of some length that overlap by at least
    `overlap`.

    They start and stop at multiples of 32, as the tile and the overlap are, except that the last
    one stops with the image.
    """
    room = max(math.ceil((length - tile) / ALIGN), 0)  # 32s between the first and the last start
    steps = math.ceil(room * ALIGN / (tile - overlap))
    starts = [ALIGN * (room * i // steps) for i in range(steps + 1)] if steps else [0]
    return [(start, min(start + tile, length)) for start in starts]


# Segmentation


def ramps(tiles: Sequence[Span]) -> list[np.ndarray]:
    """The blending weights (stop - start,) of each tile along an axis.

    They fall as a squared sine over the overlap with a neighbour, stay constant towards the ends of
    the image, and sum to 1 at each pixel.
    """
    weights = []
    for i, (start, stop) in enumerate(tiles):
        weight = np.ones(stop - start)
        centre = np.arange(start, stop) + 0.5
        if i > 0:
            weight *= rise((centre - start) / max(tiles[i - 1][1] - start, 1))
        if i + 1 < len(tiles):
            weight *= rise((stop - centre) / max(stop - tiles[i + 1][0], 1))
        weights.append(weight)
    total = np.zeros(tiles[-1][1])
    for (start, stop), weight in zip(tiles, weights):
        total[start:stop] += weight
    return [
        (weight / total[start:stop]).astype(np.float32)
        for (start, stop), weight in zip(tiles, weights)
    ]


def rise(x: np.ndarray) -> np.ndarray:
    """A smooth step from 0 at x=0 to 1 at x=1, with rise(x) + rise(1 - x) = 1."""
    return np.sin(x.clip(0, 1) * (math.pi / 2)) ** 2


def blended(
    scores: Iterator[np.ndarray],
    grid: TileGrid,
    row: int,
    weights: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    above: Optional[BinaryIO],
    below: BinaryIO,
) -> Iterator[np.ndarray]:
    """The blended scores (K, h, w) that a row of tiles completes, block by block.

    Args:
        scores: (K, h, w) of each tile of the row; overwritten.
        grid, row: the tiles, and the index of the row.
        weights: blending weights of the rows and of the columns, see `ramps`.
        above: open file of the partial sums of the previous row; None for the first row.
        below: open file for the partial sums that the next row needs.
    """
    top, bottom = grid.rows[row]
    is_last = row + 1 == len(grid.rows)
    finished = (bottom if is_last else grid.rows[row + 1][0]) - top
    shared = 0  # lines that the row above has partial sums for
    if above is not None:
        shared = grid.rows[row - 1][1] - top
    pending: Optional[np.ndarray] = None  # sums of the columns that the next tile completes
    for column, tile in enumerate(scores):
        left, right = grid.columns[column]
        stop = right if column + 1 == len(grid.columns) else grid.columns[column + 1][0]
        tile *= weights[1][column]
        if pending is not None:
            tile[:, :, : pending.shape[2]] += pending
        pending = tile[:, :, stop - left :].copy()
        block = tile[:, :, : stop - left]
        block *= weights[0][row][:, None]
        if above is not None and shared > 0:
            shape = len(block), shared, stop - left
            above.seek(4 * len(block) * shared * left)
            sums = np.frombuffer(above.read(4 * math.prod(shape)), np.float32)
            block[:, :shared] += sums.reshape(shape)
        yield block[:, :finished]
        if not is_last:
            below.write(np.ascontiguousarray(block[:, finished:]).data)


# Detection


def merged(found: Sequence[Boxes], grid: TileGrid, suppression: Suppression) -> Boxes:
    """The detections of all tiles, best first, each object once; from those of each tile, row by
    row, in pixels of the tile.

    The model's own suppression decides whether two boxes from two tiles are of the same object, by
    their parts within the pixels that the tiles share. In one tile it has decided already. If some
    tile contains the object whole, the best whole box is kept. An object too large for that has
    only boxes cut by tile borders; it gets their bounding box and best score. The suppression then
    decides again about boxes that overlap such a bounding box.
    """
    tiles = np.array(
        [(left, top, right, bottom) for top, bottom in grid.rows for left, right in grid.columns]
    )  # (T, 4)
    counts = [len(part.scores) for part in found]
    own = tiles.repeat(counts, axis=0)  # (N, 4), the tile of each box
    boxes = np.concatenate([part.boxes for part in found]).astype(float) + own[:, [0, 1, 0, 1]]
    scores = np.concatenate([part.scores for part in found])
    labels = np.concatenate([part.labels for part in found])
    whole = (~are_cut(boxes, own, grid)).tolist()
    score = scores.tolist()
    others = same_objects(Boxes(boxes, scores, labels), counts, tiles, grid, suppression)

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
        return Boxes(boxes.astype(np.float32), scores, labels)
    parts_of_best = {}
    for parts in objects.values():
        best = max(parts, key=lambda i: score[i])
        parts_of_best[best] = parts
    best_first = sorted(parts_of_best, key=lambda i: (-score[i], i))
    hulls = []
    for best in best_first:
        own_boxes = boxes[parts_of_best[best]]
        hulls.append(np.concatenate([own_boxes[:, :2].min(0), own_boxes[:, 2:].max(0)]))
    joined = np.array([len(parts_of_best[best]) > 1 for best in best_first])
    objects_found = Boxes(
        np.stack(hulls).astype(np.float32), scores[best_first], labels[best_first]
    )
    return without_suppressed(objects_found, joined, suppression)


def without_suppressed(found: Boxes, joined: np.ndarray, suppression: Suppression) -> Boxes:
    """The boxes, best first, without those that better ones suppress, where one of the two is
    `joined` (N,) from parts. About other pairs the model or `same_objects` has decided."""
    rivals: defaultdict[int, list[int]] = defaultdict(list)  # better boxes that suppress a box
    for i in np.flatnonzero(joined).tolist():
        iou = box_ious(found.boxes[i : i + 1], found.boxes)[0]
        worse_score = np.minimum(found.scores[i], found.scores)
        conflicts = (iou > 0) & suppression.removes(iou, worse_score)
        if not suppression.is_class_agnostic:
            conflicts &= found.labels == found.labels[i]
        for j in np.flatnonzero(conflicts).tolist():
            if i != j:
                rivals[max(i, j)].append(min(i, j))
    kept = np.ones(len(found.scores), bool)
    for i, better in sorted(rivals.items()):
        kept[i] = not kept[better].any()
    return Boxes(*(part[kept] for part in found))


def are_cut(boxes: np.ndarray, own: np.ndarray, grid: TileGrid) -> np.ndarray:
    """Which boxes (N, 4) end at a border of their tiles (N, 4) that is not one of the image."""
    height, width = grid.size
    at_start = (boxes[:, :2] < own[:, :2] + CUT) & (own[:, :2] > 0)
    at_end = (boxes[:, 2:] > own[:, 2:] - CUT) & (own[:, 2:] < np.array([width, height]))
    return np.any(at_start | at_end, axis=1)


def same_objects(
    found: Boxes,
    counts: Sequence[int],
    tiles: np.ndarray,
    grid: TileGrid,
    suppression: Suppression,
) -> defaultdict[int, list[int]]:
    """For each box, those in other tiles that are of the same object; see `merged`.

    Args:
        found: boxes of all tiles, tile by tile, in pixels of the image.
        counts: number of boxes of each tile.
        tiles: (T, 4), as boxes.
        grid, suppression: of the tiles, and of the model.
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
        shared = box_intersection(tiles[t], tiles[u])
        iou = box_ious(
            box_intersection(found.boxes[a], shared), box_intersection(found.boxes[b], shared)
        )
        worse = np.minimum(found.scores[a][:, None], found.scores[b])
        agree = (iou > 0) & suppression.removes(iou, worse)
        if not suppression.is_class_agnostic:
            agree &= found.labels[a][:, None] == found.labels[b]
        for i, j in np.argwhere(agree).tolist():
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
