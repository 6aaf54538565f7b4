"""Tiled against untiled inference, with models that treat each pixel separately."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpvt_pyramid.predict.openmmlab import tiling
from cpvt_pyramid.predict.openmmlab.tiling import (
    Found,
    RowFiles,
    RowWork,
    TileGrid,
    detect_rows,
    first_row_reaching,
    found_in_rows,
    labels_of_rows,
    merged,
    ramps,
    segment_rows,
    spans,
)


@st.composite
def axes(draw: Callable) -> tuple[int, int, int]:
    """Length, tile and overlap of an axis."""
    tile = draw(st.integers(1, 6)) * 32
    return draw(st.integers(1, 700)), tile, draw(st.integers(0, tile // 32 - 1)) * 32


@settings(deadline=None, max_examples=60)
@given(axes())
def test_tiles_cover_the_axis_and_their_weights_add_up_to_one(axis):
    length, tile, overlap = axis
    tiles = spans(length, tile, overlap)
    assert tiles[0][0] == 0 and tiles[-1][1] == length
    assert len(tiles) == max(
        math.ceil((math.ceil(length / 32) * 32 - overlap) / (tile - overlap)), 1
    )
    for start, stop in tiles:
        assert start % 32 == 0 and stop - start <= tile
        assert stop - start == tile or stop == length and (start == 0 or stop - start > tile - 32)
    for (start, stop), (following, _) in zip(tiles, tiles[1:]):
        assert start < following <= stop - overlap
    total = torch.zeros(length)
    for (start, stop), weight in zip(tiles, ramps(tiles)):
        assert (weight > 0).all()
        total[start:stop] += weight
    torch.testing.assert_close(total, torch.ones(length))


def test_weights_fall_over_the_overlap_alone():
    left, right = ramps([(0, 128), (64, 192)])
    assert (left[:64] == 1).all() and (right[64:] == 1).all()
    assert (left[64:].diff() < 0).all() and left[-1] < 1e-3
    torch.testing.assert_close(left[64:], right[:64].flip(0))


# Segmentation


def pointwise(tile: Tensor) -> Tensor:
    """Scores (4, h, w) from each pixel alone."""
    x = tile.float()
    return torch.cat([x, x.mean(0, keepdim=True) * 1.1])


def reader(image: Tensor) -> Callable[[int, int], Tensor]:
    """Reads lines of an image; fails if a line is read twice."""
    bottom = 0

    def read(start: int, stop: int) -> Tensor:
        nonlocal bottom
        assert bottom <= start < stop
        bottom = stop
        return image[:, start:stop]

    return read


def all_rows(grid: TileGrid) -> tuple[int, int]:
    return 0, len(grid.rows)


def segmented(work: RowWork) -> np.ndarray:
    segment_rows(work, all_rows(work.files.grid))
    return np.array(labels_of_rows(work.files, np.uint8))


@settings(deadline=None, max_examples=30)
@given(axes(), st.integers(1, 400), st.integers(1, 3))
def test_scores_of_tiles_are_blended_by_their_weights(tmp_path_factory, axis, width, batch_size):
    """Against weights times scores, added up over the whole image."""
    height, tile, overlap = axis
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    grid = TileGrid((height, width), tile, overlap)
    expected, noise = torch.zeros(4, height, width), []
    for (top, bottom), v in zip(grid.rows, ramps(grid.rows)):
        for (left, right), u in zip(grid.columns, ramps(grid.columns)):
            noise.append(50 * torch.randn(4, bottom - top, right - left))
            scores = pointwise(image[:, top:bottom, left:right]) + noise[-1]
            expected[:, top:bottom, left:right] += v[:, None] * u * scores
    unused, finished = iter(noise), []
    predict = lambda tile: pointwise(tile) + next(unused)  # noqa: E731
    files = RowFiles(tmp_path_factory.mktemp('run'), grid)
    labels = segmented(RowWork(reader(image), files, predict, batch_size, finished.append))
    # Where the two best are equal but for rounding, either is right.
    chosen = expected.gather(0, torch.from_numpy(labels).long()[None])[0]
    torch.testing.assert_close(chosen, expected.amax(0), rtol=1e-5, atol=1e-3)
    assert sum(finished) == len(noise)


def test_rows_do_not_depend_on_how_they_are_divided(tmp_path):
    """Into two bands, of which one fails in its second row and is continued. The labels are those
    of one pass, where four rows of tiles contribute to a line."""
    image = torch.randint(0, 256, (3, 400, 90), dtype=torch.uint8)
    grid = TileGrid((400, 90), 128, 96)
    rows = len(grid.rows)

    def noisy(tile: Tensor) -> Tensor:
        return pointwise(tile) * torch.linspace(0.5, 1.5, tile.shape[1])[:, None]

    def work(folder: str, predict: Callable = noisy) -> RowWork:
        files = RowFiles(tmp_path / folder, grid)
        files.folder.mkdir(exist_ok=True)
        return RowWork(reader(image), files, predict)

    def fails_in_row_5(tile: Tensor) -> Tensor:
        if next(calls) == 5 - first_row_reaching(grid, 4):
            raise KeyError
        return noisy(tile)

    expected = segmented(work('whole'))
    calls = itertools.count()
    with pytest.raises(KeyError):
        segment_rows(work('bands', fails_in_row_5), (4, rows))
    assert [path.name for path in (tmp_path / 'bands').iterdir()] == ['row-000004']
    written = (tmp_path / 'bands/row-000004').stat().st_mtime_ns
    segment_rows(work('bands'), (0, 4))
    segment_rows(work('bands'), (4, rows))
    assert (tmp_path / 'bands/row-000004').stat().st_mtime_ns == written
    np.testing.assert_array_equal(labels_of_rows(work('bands').files, np.uint8), expected)


@pytest.mark.parametrize('detects', [False, True])
def test_a_full_disk_raises_an_error(detects, tmp_path):
    predict = (lambda tile: found((1, 2, 3, 4, 0.5, 0))) if detects else pointwise
    (tmp_path / '.row-000000.partial').symlink_to('/dev/full')
    files = RowFiles(tmp_path, TileGrid((90, 64), 64, 32))
    work = RowWork(reader(torch.zeros(3, 90, 64)), files, predict)
    with pytest.raises(OSError, match='No space'):
        (detect_rows if detects else segment_rows)(work, all_rows(files.grid))
    assert not files.of(0).exists()


# Detection


def found(*boxes: tuple[float, ...]) -> Found:
    """From x1, y1, x2, y2, score, label of each box."""
    table = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 6)
    return Found(table[:, :4], table[:, 4], table[:, 5].long())


def as_tiles_see(things: Found, grid: TileGrid, visible: float = 4) -> list[Found]:
    """A perfect detector: in each tile, the visible part of each object, if large enough."""
    seen = []
    for top, bottom in grid.rows:
        for left, right in grid.columns:
            tile = torch.tensor([left, top, right, bottom])
            boxes = tiling.intersection(things.boxes, tile)
            enough = ((boxes[:, 2:] - boxes[:, :2]) > visible).all(1)
            shift = tile[[0, 1, 0, 1]]
            parts = boxes - shift, things.scores, things.labels
            seen.append(Found(*(part[enough] for part in parts)))
    return seen


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 500), st.integers(1, 500))
def test_separate_objects_are_found_once_and_whole(tmp_path_factory, seed, height, width):
    """Of any size: an object larger than a tile is assembled from its parts."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda: float(torch.rand((), generator=generator))  # noqa: E731
    boxes = []
    for top in range(0, height, 180):
        for left in range(0, width, 180):
            x, y = left + 40 * random(), top + 40 * random()
            box = x, y, min(x + 8 + 120 * random(), width), min(y + 8 + 120 * random(), height)
            if box[2] - box[0] > 6 and box[3] - box[1] > 6:
                boxes.append((*box, random(), 3 * random()))
    things = found(*boxes)
    grid = TileGrid((height, width), 128, 64)
    seen = iter(as_tiles_see(things, grid))
    files = RowFiles(tmp_path_factory.mktemp('run'), grid)
    image = reader(torch.zeros(3, height, width))
    detect_rows(RowWork(image, files, lambda tile: next(seen), 2), all_rows(grid))
    result = merged(found_in_rows(files), grid)
    order = things.scores.argsort(descending=True)
    torch.testing.assert_close(result.boxes, things.boxes[order])
    assert torch.equal(result.scores, things.scores[order])
    assert torch.equal(result.labels, things.labels[order])


def test_a_box_cut_by_its_tile_is_replaced_by_the_whole_one():
    """Even if the cut one has the higher score. Boxes of different classes both stay."""
    grid = TileGrid((128, 192), 128, 64)  # tiles from 0 to 128 and from 64 to 192
    left = found((90, 10, 128, 40, 0.9, 1), (70, 60, 100, 90, 0.5, 0), (10, 10, 30, 30, 0.3, 2))
    right = found((26, 10, 76, 40, 0.6, 1), (7, 61, 37, 91, 0.7, 0), (26, 10, 76, 40, 0.2, 2))
    result = merged([left, right], grid)
    assert result.labels.tolist() == [0, 1, 2, 2]
    assert result.boxes.tolist() == [
        [71, 61, 101, 91],
        [90, 10, 140, 40],
        [10, 10, 30, 30],
        [90, 10, 140, 40],
    ]
    assert result.scores.tolist() == pytest.approx([0.7, 0.6, 0.3, 0.2])
    grid = TileGrid((64, 64), 64, 0)  # boxes of one tile are not merged
    twice = found((1, 1, 20, 20, 0.9, 0), (2, 2, 20, 20, 0.8, 0))
    assert len(merged([twice], grid).scores) == 2
    assert merged([found()], grid).boxes.shape == (0, 4)
