"""Tiles of large images, and what they have of the boxes in them.

Boxes are (N, 4), corners x1, y1, x2, y2 in pixels.
"""

from typing import NamedTuple

import numpy as np

WHOLE = 0.99  # share of a box in a window from which it is not cut
SEEN = 0.1  # share from which a cut box is ignored instead of left out


class Window(NamedTuple):
    """A part of an image in pixels; the right and the bottom are outside."""

    left: int
    top: int
    right: int
    bottom: int


class BoxesInside(NamedTuple):
    """What a window has of N boxes: M of them.

    Attributes:
        chosen: (M,), which of the N boxes.
        boxes: (M, 4), their parts in the window, in pixels of the window.
        cut: (M,), True where a part is less than the box.
    """

    chosen: np.ndarray
    boxes: np.ndarray
    cut: np.ndarray


def overlapping(height: int, width: int, tile: int, step: int) -> list[Window]:
    """Square tiles that cover an image, row by row; their corners are `step` pixels apart, but for
    the last ones of a row or column, which end at the edge of the image. Along a side that is
    shorter than a tile, tiles end with it."""
    return [
        Window(left, top, min(left + tile, width), min(top + tile, height))
        for top in starts(height, tile, step)
        for left in starts(width, tile, step)
    ]


def starts(length: int, tile: int, step: int) -> list[int]:
    """First pixels of the tiles along one side of an image."""
    last = max(length - tile, 0)
    return [*range(0, last, step), last]


def disjoint(height: int, width: int, rows: int, columns: int) -> list[Window]:
    """The parts of an image in rows and columns of equal sizes, up to a pixel."""
    ys = [height * i // rows for i in range(rows + 1)]
    xs = [width * i // columns for i in range(columns + 1)]
    return [
        Window(left, top, right, bottom)
        for top, bottom in zip(ys, ys[1:])
        for left, right in zip(xs, xs[1:])
    ]


def boxes_inside(boxes: np.ndarray, window: Window) -> BoxesInside:
    """The boxes of which a window has at least a tenth, and a pixel in width and height."""
    left, top, right, bottom = window
    parts = np.clip(boxes - np.array([left, top] * 2), 0, [right - left, bottom - top] * 2)
    size = areas(boxes)
    share = np.divide(areas(parts), size, out=np.zeros(len(boxes)), where=size > 0)
    cut = share < WHOLE
    is_sliver = cut & (parts[:, 2:] - parts[:, :2] < 1).any(axis=1)
    chosen = np.flatnonzero((share >= SEEN) & ~is_sliver)
    return BoxesInside(chosen, parts[chosen], cut[chosen])


def areas(boxes: np.ndarray) -> np.ndarray:
    """(N,), in pixels."""
    return np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
