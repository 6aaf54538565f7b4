"""Which boxes are of the same object: how much boxes overlap, and pairs of them.

Shapes: boxes (N, 4) as x1, y1, x2, y2 in pixels.
"""

import numpy as np


def box_ious(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The intersection over union (N, M) of boxes (N, 4) and (M, 4); 0 of empty boxes."""
    common = box_area(box_intersection(first[:, None], second))
    union = box_area(first)[:, None] + box_area(second) - common
    return common / np.maximum(union, 1e-9)


def box_intersection(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The intersection of boxes (..., 4), which are broadcast; empty if x2 <= x1 or y2 <= y1."""
    low = np.maximum(first[..., :2], second[..., :2])
    high = np.minimum(first[..., 2:], second[..., 2:])
    return np.concatenate([low, high], axis=-1)


def box_area(boxes: np.ndarray) -> np.ndarray:
    """The areas (...) of boxes (..., 4); 0 of empty boxes."""
    return (boxes[..., 2:] - boxes[..., :2]).clip(0).prod(-1)


def greedy_pairs(affinity: np.ndarray) -> list[tuple[int, int]]:
    """Pair rows with columns: each row in turn takes the free column of its highest affinity.

    Args:
        affinity: (N, M), such as the IoU of detections, best first, and objects; -inf where a row
            and a column cannot be a pair.

    Returns:
        (row, column) of each pair, in the order of the rows. Of equal columns it is the first.

    Examples:
        >>> greedy_pairs(np.array([[0.9, 0.6], [0.8, 0.7], [0.9, 0.9]]))
        [(0, 0), (1, 1)]
    """
    affinity = np.array(affinity, float)
    pairs = []
    if not affinity.size:
        return []
    for row, values in enumerate(affinity):
        column = int(values.argmax())
        if values[column] > -np.inf:
            pairs.append((row, column))
            affinity[:, column] = -np.inf
    return pairs
