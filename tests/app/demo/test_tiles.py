"""Tiles of a photograph: every pixel, and every box whole or cut."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cpvt_pyramid.app.demo.tiles import SEEN, WHOLE, boxes_inside, disjoint, overlapping

sides = st.integers(1, 90)


@settings(max_examples=60, deadline=None)
@given(sides, sides, sides, st.data())
def test_windows_cover_every_pixel(height, width, tile, data):
    step = data.draw(st.integers(1, tile))
    seen = np.zeros((height, width), int)
    for left, top, right, bottom in overlapping(height, width, tile, step):
        assert right - left == min(tile, width) and bottom - top == min(tile, height)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        seen[top:bottom, left:right] += 1
    assert seen.all()
    seen[:] = 0
    rows, columns = -(-height // tile), -(-width // tile)
    for left, top, right, bottom in disjoint(height, width, rows, columns):
        assert 0 < right - left <= tile and 0 < bottom - top <= tile
        seen[top:bottom, left:right] += 1
    assert (seen == 1).all()


@st.composite
def images_with_boxes(draw) -> tuple[int, int, np.ndarray]:
    """Height and width, and boxes inside (N, 4) of at least a pixel."""
    height, width = draw(sides), draw(sides)
    boxes = []
    for _ in range(draw(st.integers(0, 6))):
        x, y = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
        boxes.append((x, y, draw(st.integers(x + 1, width)), draw(st.integers(y + 1, height))))
    return height, width, np.array(boxes, float).reshape(-1, 4)


@settings(max_examples=60, deadline=None)
@given(images_with_boxes(), sides, st.data())
def test_boxes_are_whole_or_cut_and_come_back_to_their_places(image, tile, data):
    """What a window shows of a box is the pixels that they share; a box up to `tile - step` is
    whole in a tile."""
    height, width, boxes = image
    step = data.draw(st.integers(1, tile))
    is_whole = np.zeros(len(boxes), bool)
    for window in overlapping(height, width, tile, step):
        left, top, right, bottom = window
        index, parts, cut = boxes_inside(boxes, window)
        is_whole[index[~cut]] = True
        corner = [left, top, left, top]
        for number, box in enumerate(boxes):
            shared = np.clip(box, corner, [right, bottom, right, bottom])
            pixels = np.maximum(shared[2:] - shared[:2], 0).prod()
            share = pixels / (box[2:] - box[:2]).prod()
            assert (number in index) == (share >= SEEN)
            if number in index:
                (place,) = np.flatnonzero(index == number)
                assert (parts[place] + corner == shared).all()
                assert cut[place] == (share < WHOLE)
    small = (boxes[:, 2:] - boxes[:, :2] <= tile - step).all(axis=1)
    assert is_whole[small].all()


def test_boxes_without_area_and_slivers_are_left_out():
    window = (10, 0, 20, 20)
    boxes = np.array([[12, 5, 12, 9], [5, 5, 10.5, 9], [9.2, 5, 10.9, 9], [30, 1, 40, 5]])
    assert not len(boxes_inside(boxes, window).chosen)
