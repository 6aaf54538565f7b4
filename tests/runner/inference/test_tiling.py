"""Tiled against untiled inference, with models that treat each pixel separately."""

import errno
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpvt_pyramid.runner.inference import tiling
from cpvt_pyramid.runner.inference.tiling import Found, Journal, Run, TileGrid, merged, ramps, spans
from cpvt_pyramid.tooling import memory
from cpvt_pyramid.tooling.command import UserError


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


def run_of(read: Callable, grid: TileGrid, predict: Callable, folder: Path, *more: object) -> Run:
    """A run on a whole image."""
    return Run(read, grid, predict, Journal(folder, {}), (0, len(grid.rows)), *more)


def segmented(run: Run) -> np.ndarray:
    tiling.segment_in_tiles(run)
    return np.array(tiling.labels_in_tiles([run.journal.folder], run.grid.size, np.uint8))


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
    folder = tmp_path_factory.mktemp('run') / 'band'
    labels = segmented(run_of(reader(image), grid, predict, folder, batch_size, finished.append))
    # Where the two best are equal but for rounding, either is right.
    chosen = expected.gather(0, torch.from_numpy(labels).long()[None])[0]
    torch.testing.assert_close(chosen, expected.amax(0), rtol=1e-5, atol=1e-3)
    assert sum(finished) == len(noise)


def test_a_run_about_something_else_is_not_resumed(tmp_path):
    journal = Journal(tmp_path / 'run', {'checkpoint': 'a', 'tile': 64})
    journal.done(2)
    with pytest.raises(UserError, match='another run is using '):
        Journal(tmp_path / 'run', {'checkpoint': 'a', 'tile': 64})
    journal.close()
    with pytest.raises(UserError, match='an unfinished run with another checkpoint; finish'):
        Journal(tmp_path / 'run', {'checkpoint': 'b', 'tile': 64})
    assert Journal(tmp_path / 'run', {'checkpoint': 'a', 'tile': 64}).rows == 2


@pytest.mark.parametrize('code', ['ENOLCK', 'EOPNOTSUPP', 'ENOTSUP', 'EIO'])
def test_a_file_system_without_locks(code, tmp_path, monkeypatch):
    """Other errors of locks are raised."""

    def flock(*_: object) -> None:
        raise OSError(getattr(errno, code), 'not supported')

    monkeypatch.setattr('fcntl.flock', flock)
    if code == 'EIO':
        with pytest.raises(OSError, match='not supported'):
            Journal(tmp_path, {})
        return
    with pytest.warns(UserWarning, match='no file locks here: do not start a run twice'):
        Journal(tmp_path, {}).done(2)
        assert Journal(tmp_path, {}).rows == 2


def test_memory_is_not_measured_on_windows(monkeypatch):
    monkeypatch.setattr(memory, 'resource', None)
    monkeypatch.setattr(memory, 'in_bytes', mock.Mock(side_effect=FileNotFoundError))
    with pytest.raises(UserError, match='memory can be measured on Linux and macOS only'):
        memory.peak()


@pytest.mark.parametrize('name', ['labels', 'sums-1', 'found-000000.pt'])
def test_a_full_disk_raises_an_error(name, tmp_path):
    """`name` is the file that cannot be written."""
    detects = name.startswith('found')
    predict = (lambda tile: found((1, 2, 3, 4, 0.5, 0))) if detects else pointwise
    (tmp_path / name).symlink_to('/dev/full')
    run = run_of(reader(torch.zeros(3, 90, 64)), TileGrid((90, 64), 64, 32), predict, tmp_path)
    with pytest.raises(OSError, match='No space'):
        (tiling.detect_in_tiles if detects else tiling.segment_in_tiles)(run)


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
    seen, folder = iter(as_tiles_see(things, grid)), tmp_path_factory.mktemp('run')
    image = reader(torch.zeros(3, height, width))
    tiling.detect_in_tiles(run_of(image, grid, lambda tile: next(seen), folder, 2))
    result = merged(tiling.found_in_tiles([folder]), grid)
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
        [71, 61, 101, 91], [90, 10, 140, 40], [10, 10, 30, 30], [90, 10, 140, 40],
    ]  # fmt: skip
    assert result.scores.tolist() == pytest.approx([0.7, 0.6, 0.3, 0.2])
    grid = TileGrid((64, 64), 64, 0)  # boxes of one tile are not merged
    twice = found((1, 1, 20, 20, 0.9, 0), (2, 2, 20, 20, 0.8, 0))
    assert len(merged([twice], grid).scores) == 2
    assert merged([found()], grid).boxes.shape == (0, 4)
