"""Pairs of boxes, against the obvious loop."""

import numpy as np

from cpvt_pyramid.app.predictions.matching import box_area, box_ious, greedy_pairs


def random_boxes(seed: int, count: int) -> np.ndarray:
    corners = np.random.default_rng(seed).uniform(0, 10, (count, 2, 2))
    corners.sort(axis=1)
    return corners.reshape(count, 4)


def test_ious_are_those_of_rasterized_boxes():
    boxes = np.array([[0, 0, 4, 3], [2, 1, 6, 5], [7, 7, 9, 9], [1, 1, 1, 5]], float)
    masks = np.zeros((4, 10, 10), bool)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.astype(int)):
        mask[y1:y2, x1:x2] = True
    common = (masks[:, None] & masks).sum((2, 3))
    union = (masks[:, None] | masks).sum((2, 3))
    np.testing.assert_allclose(box_ious(boxes, boxes), common / np.maximum(union, 1))
    np.testing.assert_allclose(box_area(boxes), [12, 16, 4, 0])


def test_each_row_takes_the_best_free_column():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows, columns = rng.integers(0, 8, 2)
        affinity = box_ious(random_boxes(seed, rows), random_boxes(seed + 100, columns))
        affinity[affinity < 0.2] = -np.inf
        given = affinity.copy()
        taken = set()
        expected = []
        for row in range(rows):
            free = [c for c in range(columns) if c not in taken and affinity[row, c] > -np.inf]
            if free:
                best = max(free, key=lambda c: affinity[row, c])
                taken.add(best)
                expected.append((row, best))
        assert greedy_pairs(affinity) == expected
        np.testing.assert_array_equal(affinity, given)
