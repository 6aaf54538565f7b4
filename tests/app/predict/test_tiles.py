"""Tiled against untiled inference, with models that treat each pixel separately."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import batched_nms
from support import save_tiff

from cpvt_pyramid.app.images.large import open_large
from cpvt_pyramid.app.predict.large_images import TiledImage, boxes_in_tiles, label_lines
from cpvt_pyramid.app.predict.openmmlab.model import most_boxes_of, suppression_of
from cpvt_pyramid.app.predict.tiles import (
    Boxes,
    Suppression,
    TileGrid,
    merged,
    ramps,
    spans,
)
from cpvt_pyramid.app.predictions.matching import box_intersection, box_ious


@dataclass
class TileModel:
    """The part of a model that tiles need."""

    predict: Callable[[np.ndarray], Any]
    bands: None = None
    classes: tuple = tuple('abcd')
    score_thr: float = 0.0
    suppression: Suppression = Suppression()
    most_boxes: Optional[int] = None
    takes_tiles: bool = True
    together: list[int] = field(default_factory=list)  # tiles of each call

    def predict_tiles(self, tiles: list[np.ndarray]) -> list:
        self.together.append(len(tiles))
        return [self.predict(tile) for tile in tiles]

    def to_labels(self, scores: np.ndarray) -> np.ndarray:
        return scores.argmax(0)


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
    total = np.zeros(length)
    for (start, stop), weight in zip(tiles, ramps(tiles)):
        assert (weight > 0).all()
        total[start:stop] += weight
    np.testing.assert_allclose(total, 1, atol=1e-6)


def test_weights_fall_over_the_overlap_alone():
    left, right = ramps([(0, 128), (64, 192)])
    assert (left[:64] == 1).all() and (right[64:] == 1).all()
    assert (np.diff(left[64:]) < 0).all() and left[-1] < 1e-3
    np.testing.assert_allclose(left[64:], right[:64][::-1], atol=1e-6)


# Segmentation


def pointwise(tile: np.ndarray) -> np.ndarray:
    """Scores (4, h, w) from each pixel alone."""
    x = np.moveaxis(tile.astype(np.float32), -1, 0)
    return np.concatenate([x, x.mean(0, keepdims=True) * 1.1])


@settings(deadline=None, max_examples=30)
@given(axes(), st.integers(1, 400), st.integers(1, 3))
def test_scores_of_tiles_are_blended_by_their_weights(tmp_path_factory, axis, width, batch_size):
    """Against weights times scores, added up over the whole image."""
    height, tile, overlap = axis
    generator = np.random.default_rng(height * width)
    image = generator.integers(0, 256, (height, width, 3), np.uint8)
    grid = TileGrid((height, width), tile, overlap)
    expected = np.zeros((4, height, width))
    noise = []
    for (top, bottom), v in zip(grid.rows, ramps(grid.rows)):
        for (left, right), u in zip(grid.columns, ramps(grid.columns)):
            own = generator.normal(0, 50, (4, bottom - top, right - left)).astype(np.float32)
            noise.append(own)
            scores = pointwise(image[top:bottom, left:right]) + own
            expected[:, top:bottom, left:right] += v[:, None] * u * scores
    unused = iter(noise)
    model = TileModel(lambda tile: pointwise(tile) + next(unused))
    folder = tmp_path_factory.mktemp('run')
    path = save_tiff(folder / 'a.tif', image, photometric='rgb')
    finished: list[int] = []
    with open_large(path) as file:
        lines = label_lines(TiledImage(model, file, grid, batch_size, finished.append), folder)
        labels = np.concatenate([*lines])
    assert labels.shape == (height, width) and labels.dtype == np.uint8
    # Where the two best are equal but for rounding, either is right.
    chosen = np.take_along_axis(expected, labels[None].astype(int), 0)[0]
    np.testing.assert_allclose(chosen, expected.max(0), rtol=1e-5, atol=1e-3)
    assert sum(finished) == len(noise) and max(model.together) <= batch_size
    assert [path.name for path in folder.iterdir()] == ['a.tif']


# Detection


def found(*boxes: tuple[float, ...]) -> Boxes:
    """From x1, y1, x2, y2, score, label of each box."""
    table = np.array(boxes, np.float32).reshape(-1, 6)
    return Boxes(table[:, :4], table[:, 4], table[:, 5].astype(int))


def as_tiles_see(things: Boxes, grid: TileGrid, visible: float = 4) -> Iterator[Boxes]:
    """A perfect detector: in each tile, the visible part of each object, if large enough."""
    for top, bottom in grid.rows:
        for left, right in grid.columns:
            tile = np.array([left, top, right, bottom])
            boxes = box_intersection(things.boxes, tile)
            enough = ((boxes[:, 2:] - boxes[:, :2]) > visible).all(1)
            shifted = (boxes - tile[[0, 1, 0, 1]]).astype(np.float32)
            parts = shifted, things.scores, things.labels
            yield Boxes(*(part[enough] for part in parts))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 500), st.integers(1, 500))
def test_separate_objects_are_found_once_and_whole(tmp_path_factory, seed, height, width):
    """Of any size: an object larger than a tile is assembled from its parts."""
    random = np.random.default_rng(seed).random
    boxes = []
    for top in range(0, height, 180):
        for left in range(0, width, 180):
            x, y = left + 40 * random(), top + 40 * random()
            box = x, y, min(x + 8 + 120 * random(), width), min(y + 8 + 120 * random(), height)
            if box[2] - box[0] > 6 and box[3] - box[1] > 6:
                boxes.append((*box, random(), 3 * random()))
    things = found(*boxes)
    grid = TileGrid((height, width), 128, 64)
    seen = as_tiles_see(things, grid)
    model = TileModel(lambda tile: next(seen))
    path = tmp_path_factory.mktemp('run') / 'a.tif'
    save_tiff(path, np.zeros((height, width, 3), np.uint8), photometric='rgb')
    with open_large(path) as file:
        result, fullest = boxes_in_tiles(TiledImage(model, file, grid, 2, lambda count: None))
    assert fullest <= len(result.scores)
    order = np.argsort(-things.scores, kind='stable')
    np.testing.assert_allclose(result.boxes, things.boxes[order], atol=1e-4)
    np.testing.assert_array_equal(result.scores, things.scores[order])
    np.testing.assert_array_equal(result.labels, things.labels[order])


def test_a_box_cut_by_its_tile_is_replaced_by_the_whole_one():
    """Even if the cut one has the higher score. Boxes of different classes both stay."""
    grid = TileGrid((128, 192), 128, 64)  # tiles from 0 to 128 and from 64 to 192
    left = found((90, 10, 128, 40, 0.9, 1), (70, 60, 100, 90, 0.5, 0), (10, 10, 30, 30, 0.3, 2))
    right = found((26, 10, 76, 40, 0.6, 1), (7, 61, 37, 91, 0.7, 0), (26, 10, 76, 40, 0.2, 2))
    result = merged([left, right], grid, Suppression())
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
    assert len(merged([twice], grid, Suppression()).scores) == 2
    assert merged([found()], grid, Suppression()).boxes.shape == (0, 4)


def nms_by_class(found: Boxes, iou_threshold: float) -> list[int]:
    """The indices of the boxes that are left, best first."""
    iou = box_ious(found.boxes, found.boxes)
    kept: list[int] = []
    for i in np.argsort(-found.scores):
        rivals = [j for j in kept if found.labels[j] == found.labels[i]]
        if not (iou[i, rivals] > iou_threshold).any():
            kept.append(i)
    return kept


@pytest.mark.parametrize('iou_threshold', [0.05, 0.5])
def test_boxes_joined_from_parts_are_suppressed_again(iou_threshold):
    """As the model would suppress them in the whole image: the tiles alone cannot see that two
    objects overlap that are larger than tiles."""
    grid = TileGrid((320, 320), 128, 32)
    overlaps = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        corners = rng.uniform(0, 240, (12, 2))
        sides = rng.uniform(10, 250, (12, 2))
        boxes = np.concatenate([corners, np.minimum(corners + sides, 320)], axis=1)
        things = Boxes(boxes, rng.uniform(0.3, 1, 12).astype(np.float32), rng.integers(0, 2, 12))
        parts = []
        for part in as_tiles_see(things, grid):
            index = nms_by_class(part, iou_threshold)
            parts.append(Boxes(*(values[index] for values in part)))
        result = merged(parts, grid, Suppression(iou_threshold))
        assert (np.diff(result.scores) <= 0).all()
        iou = np.triu(box_ious(result.boxes, result.boxes), 1)
        iou[result.labels[:, None] != result.labels] = 0
        overlaps += int((iou > iou_threshold).sum())
    assert overlaps == 0


SETTINGS = {
    'default': dict(type='nms', iou_threshold=0.5),
    'crowds': dict(type='nms', iou_threshold=0.8),
    'sparse': dict(type='nms', iou_threshold=0.2),
    'any class': dict(type='nms', iou_threshold=0.5, class_agnostic=True),
    'linear': dict(type='soft_nms', iou_threshold=0.3, min_score=0.3),
    'gaussian': dict(type='soft_nms', method='gaussian', sigma=0.5, min_score=0.3),
    'naive': dict(type='soft_nms', method='naive', iou_threshold=0.3, min_score=0.3),
}


@pytest.mark.parametrize('name', SETTINGS)
@pytest.mark.parametrize('is_two_stage', [False, True])
def test_two_tiles_suppress_what_one_does(name, is_two_stage):
    """Pairs of boxes, of which each tile sees one, against mmcv's suppression of both."""
    nms = SETTINGS[name]
    test_cfg = {'nms': nms, 'score_thr': 0.05}
    model = type('Model', (), {'test_cfg': {'rcnn': test_cfg} if is_two_stage else test_cfg})
    suppression = suppression_of(model, 0.3)
    grid = TileGrid((128, 192), 128, 64)
    kept = set()
    for shift in (1, 4, 7, 9, 13, 16, 19):  # of 20 pixels
        for labels in ((0, 0), (0, 1)):
            first = (70, 50, 90, 70, 0.9, labels[0])
            second = (70, 50 + shift, 90, 70 + shift, 0.7, labels[1])
            moved = (6, *second[1:2], 26, *second[3:])
            result = merged([found(first), found(moved)], grid, suppression)
            both = found(first, second)
            arguments = [torch.from_numpy(part) for part in both]
            _, index = batched_nms(*arguments, dict(nms))
            assert len(result.scores) == len(index), (shift, labels)
            kept.add((len(index), labels))
    assert kept >= {(1, (0, 0)), (2, (0, 0))}
    assert ((1, (0, 1)) in kept) == (name == 'any class')


def test_models_without_suppression():
    assert (
        suppression_of(type('Detr', (), {'test_cfg': {'max_per_img': 100}}), 0.3) == Suppression()
    )


@pytest.mark.parametrize(
    'test_cfg, most',
    [
        ({'max_per_img': 300}, 300),
        ({'rpn': {'max_per_img': 1000}, 'rcnn': {'max_per_img': 100}}, 100),
        ({'max_per_image': 100, 'instance_on': True}, 100),  # Mask2Former
        ({'max_per_img': -1}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_limit_of_boxes_is_that_of_the_last_stage(test_cfg, most):
    assert most_boxes_of(type('Model', (), {'test_cfg': test_cfg})) == most
