import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from skimage.color import rgb2lab

from cpvt_pyramid.app.predictions import drawing
from cpvt_pyramid.app.predictions.drawing import (
    draw_boxes,
    draw_segmentation,
    jpeg_of,
    label_counts,
)

CLASSES = ('zero', 'one', 'two', 'three')
GREY = np.full((100, 200, 3), 128, np.uint8)
GREY_SQUARE = np.full((400, 400, 3), 128, np.uint8)


def count(picture: Image.Image, color: tuple) -> int:
    return int((np.array(picture) == color).all(-1).sum())


def test_palette() -> None:
    palette = drawing.class_palette(['a'] * 128)
    assert drawing.class_palette(['a'] * 7) == palette[:7] and len(set(palette)) == 128
    lab = rgb2lab(np.array(palette[:20]) / 255)
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1) + 99 * np.eye(20)
    assert apart.min() > 15  # a just noticeable difference is about 2
    assert drawing.class_palette(['background', 'a', 'b']) == [(0, 0, 0), *palette[:2]]
    assert drawing.class_palette(['a', 'b'], [[1, 2, 3], [4, 5, 6]]) == [(1, 2, 3), (4, 5, 6)]
    for of_other_classes in ('random', [[1, 2, 3]] * 80):
        assert drawing.class_palette(['a', 'b'], of_other_classes) == palette[:2]


def test_box_is_where_it_was_found() -> None:
    picture = draw_boxes(GREY, [[50, 40, 90, 80]], [2], None, CLASSES)
    color = drawing.class_palette(CLASSES)[2]
    assert picture.size == (400, 200)  # small: twice as large
    seen = np.array(picture)
    for x, y in ((100, 120), (180, 120), (140, 81), (140, 160)):  # left, right, top, bottom
        assert tuple(seen[y, x]) == color
    assert tuple(seen[120, 140]) == (128,) * 3  # inside it nothing is hidden
    rows, columns = np.nonzero((seen == color).all(-1))
    assert (columns.min(), columns.max(), rows.max()) == (100, 180, 160)
    assert 60 <= rows.min() < 80  # the name stands on top


def test_boxes_outside_empty_or_unnamed_are_no_trouble() -> None:
    boxes = [[-50, -50, 30, 30], [190, 90, 500, 500], [300, 300, 400, 400], [10, 10, 10, 10]]
    draw_boxes(GREY, boxes, [0, 1, 2, 99], torch.rand(4), CLASSES)
    for masks in (None, np.zeros((0, 28, 28), bool)):
        picture = draw_boxes(GREY, np.zeros((0, 4)), [], [], CLASSES, masks=masks)
        assert count(picture, (128, 128, 128)) == 400 * 200


def test_masks_are_tinted_and_outlined_the_most_certain_on_top() -> None:
    red, blue = (250, 0, 0), (0, 0, 250)
    masks = np.zeros((2, 100, 200), bool)
    masks[0, 20:60, 30:90] = masks[1, 40:80, 60:160] = True
    masks[0, 30:40, 40:50] = False
    boxes = [[30, 20, 90, 60], [60, 40, 160, 80]]
    for scores, on_top in (([0.9, 0.4], red), ([0.4, 0.9], blue)):
        picture = draw_boxes(GREY, boxes, [0, 1], scores, CLASSES[:2], [red, blue], masks=masks)
        assert picture.size == (400, 200)  # twice as large
        tint = {color: tuple(round(0.4 * 128 + 0.6 * v) for v in color) for color in (red, blue)}
        assert picture.getpixel((110, 70)) == tint[red]
        assert picture.getpixel((260, 120)) == tint[blue]
        assert picture.getpixel((150, 100)) == tint[on_top]  # in both
        assert picture.getpixel((79, 70)) == picture.getpixel((80, 70)) == drawing.INK  # the hole
        assert picture.getpixel((90, 70)) == picture.getpixel((370, 180)) == (128,) * 3
        picture = draw_boxes(GREY, [boxes[1]] * 2, [0, 1], scores, CLASSES[:2], [red, blue])
        assert picture.getpixel((200, 160)) == on_top  # on the lower edge


@pytest.mark.parametrize('shape', [(1, 1), (3, 900), (1400, 2)])
def test_outlines_are_where_an_id_differs_within_their_width(shape) -> None:
    ids = (np.random.default_rng(0).random(shape) < 0.01).astype(np.uint8)
    width = max(1, round(max(shape) / 500))
    edges = drawing._edges(ids)
    for (row, column), edge in np.ndenumerate(edges):
        across = ids[row, max(column - width, 0) : column + width + 1]
        down = ids[max(row - width, 0) : row + width + 1, column]
        assert edge == (ids[row, column] != [*across, *down]).any(), (row, column)


def test_names_stay_inside_and_clear_of_each_other() -> None:
    frame, size, picture = (100, 100, 200, 200), (40, 16), (400, 300)
    taken = []
    for _ in range(8):  # as many as a frame has room for
        x1, y1, x2, y2 = drawing._free_place(frame, size, picture, taken)
        assert all(x2 <= a or x1 >= c or y2 <= b or y1 >= d for a, b, c, d in taken)
        taken.append((x1, y1, x2, y2))
    assert taken[0] == (100, 84, 140, 100)  # the first stands on its frame
    x1, y1, x2, y2 = drawing._free_place((390, 0, 399, 299), size, picture, [])
    assert x1 >= 0 and y1 >= 0 and x2 <= 400 and y2 <= 300


def test_segments_are_tinted_and_the_rest_is_not() -> None:
    label_map = np.zeros((100, 200), int)
    label_map[20:60, 30:90] = 2
    label_map[:10] = 255
    classes, red, blue = ['background', 'red', 'blue'], (250, 0, 0), (0, 0, 250)
    palette = [(0, 250, 0), red, blue]
    picture = draw_segmentation(GREY, label_map, classes, palette, legend=False)
    assert picture.size == (400, 200)
    seen = np.array(picture)
    tinted = seen[..., 2].astype(int) - seen[..., 0] > 100
    np.testing.assert_array_equal(tinted, (label_map == 2).repeat(2, 0).repeat(2, 1))
    assert (seen[~tinted] == 128).all()

    with_legend = draw_segmentation(GREY, label_map, classes, palette)
    assert with_legend.height > 200 and with_legend.crop((0, 0, 400, 200)) == picture
    legend = with_legend.crop((0, 200, 400, with_legend.height))
    assert count(legend, blue) > 100 and count(legend, red) == 0  # red is not in the image
    nothing = draw_segmentation(GREY, label_map * 0, classes, palette)
    assert nothing.size == (400, 200)


def test_legend_breaks_into_rows() -> None:
    names, colors = ['class'] * 20, drawing.class_palette('a' * 20)
    strip = drawing.draw_legend(names, colors, 300, 14)
    assert strip.width == 300 and strip.height > 100
    assert all(count(strip, color) > 50 for color in colors)


def test_overlays_keep_the_colours_of_thin_lines() -> None:
    picture = Image.new('RGB', (64, 48), (128, 128, 128))
    ImageDraw.Draw(picture).line([(31, 0), (31, 47)], (255, 0, 0))
    with Image.open(io.BytesIO(jpeg_of(picture))) as file:
        assert (file.format, file.mode, file.size) == ('JPEG', 'RGB', (64, 48))
        difference = np.abs(np.array(file).astype(int) - np.array(picture))
    assert difference.max() < 40  # 100 with colours at half of the resolution


def test_overlays_that_are_too_large_for_jpeg_are_reduced() -> None:
    picture = Image.new('RGB', (70_000, 10))
    with Image.open(io.BytesIO(jpeg_of(picture))) as file:
        assert file.size == (65_500, 9)
    assert picture.size == (70_000, 10)


@pytest.mark.parametrize('kind', [np.uint8, np.int32])
def test_labels_are_counted(kind) -> None:
    label_map = np.array([[3, 0, 255], [3, 3, 0]], kind)
    labels, pixels = label_counts(label_map)
    assert (labels.tolist(), pixels.tolist()) == ([0, 3, 255], [2, 3, 1])


def test_palettes_of_more_than_256_colours() -> None:
    label_map = np.zeros((400, 400), np.int32)
    label_map[:, 200:] = 299
    classes = [f'class {i}' for i in range(300)]
    palette = [(0, 0, 250)] * 299 + [(250, 0, 0)]
    few = draw_segmentation(GREY_SQUARE, label_map // 299, classes[:2], palette[-2:], legend=False)
    many = draw_segmentation(GREY_SQUARE, label_map, classes, palette, legend=False)
    assert few == many and count(many, (250, 0, 0)) == count(many, (0, 0, 250)) == 400


def test_masks_of_higher_scores_are_on_top() -> None:
    """Each pixel in the colour of its mask, which may reach beyond its box or be empty."""
    masks = np.zeros((3, 400, 400), bool)
    masks[0, 100:300, 100:300] = True
    masks[1, 200:350, 200:350] = True
    boxes = np.array([[100, 100, 300, 300], [200, 200, 210, 210], [0, 0, 9, 9]])
    scores = np.array([0.9, 0.5, 0.7])
    palette = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    picture = draw_boxes(GREY_SQUARE, boxes, [0, 1, 2], scores, 'abc', palette, masks)
    tint = {}
    for name, place in {'first': (150, 260), 'both': (260, 260), 'second': (330, 330)}.items():
        tint[name] = int(np.argmax(picture.getpixel(place)))
    assert tint == {'first': 0, 'both': 0, 'second': 1}
    assert picture.getpixel((380, 20)) == (128, 128, 128)


def test_names_of_many_boxes_hide_nothing() -> None:
    """A grid of boxes that their names would cover: every box's inside stays as it is, and a legend
    names the classes."""
    corners = np.stack(np.meshgrid(np.arange(10, 390, 40), np.arange(10, 390, 40)), -1)
    corners = corners.reshape(-1, 2)
    boxes = np.concatenate([corners, corners + 30], 1)
    labels = np.arange(len(boxes)) % 2
    scores = np.linspace(0.3, 0.9, len(boxes))
    for some in (scores, None):
        picture = draw_boxes(GREY_SQUARE, boxes, labels, some, CLASSES)
        assert picture.width == 400 and picture.height > 400
        seen = np.array(picture)
        palette = drawing.class_palette(CLASSES)
        for (x1, y1, x2, y2), label in zip(boxes, labels):
            assert (seen[y1 + 4 : y2 - 3, x1 + 4 : x2 - 3] == 128).all()
            assert tuple(seen[y1, (x1 + x2) // 2]) == palette[label]
    few = draw_boxes(GREY_SQUARE, boxes[:5], labels[:5], scores[:5], CLASSES)
    assert few.size == (400, 400)  # with their names


def test_letters_that_the_plain_font_lacks(monkeypatch):
    """Names are drawn in an installed font that has them; else one warning tells what to do."""
    from matplotlib import font_manager

    drawing._font_file.cache_clear()
    image = np.zeros((60, 90, 3), np.uint8)
    box = np.array([[5, 5, 60, 40]])
    with pytest.warns(UserWarning, match='install Noto Sans CJK') as caught:
        for _ in range(2):
            draw_boxes(image, box, np.array([0]), None, ['\U00012000'])  # of cuneiform
    assert len(caught) == 1
    wide = [e.fname for e in font_manager.fontManager.ttflist if e.name == 'STIXGeneral']
    monkeypatch.setattr(drawing, 'WIDE_FONTS', {'STIXGeneral'})
    drawing._font_file.cache_clear()
    letter = '\u20dd'  # a circle, which STIX has and DejaVu has not
    file = drawing._font_file(frozenset(letter))
    assert str(file) in wide and drawing._font_file(frozenset('name')).name == 'DejaVuSans.ttf'
    drawing._font_file.cache_clear()
