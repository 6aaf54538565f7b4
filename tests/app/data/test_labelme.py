"""LabelMe's files: objects of several parts and with holes, and what is wrong with shapes."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CLASSES, SCENES, SIZE, fill, labelme, write
from PIL import Image
from pycocotools import mask as coco_masks
from support import ROOT, load_tool

from cpvt_pyramid.app.data.check import checked_data
from cpvt_pyramid.app.data.data import area_of_polygon, coco_of_split, polygon_inside
from cpvt_pyramid.app.data.defects import Defects
from cpvt_pyramid.app.data.images import HEADERS
from cpvt_pyramid.app.data.layouts.labelme import parse_labelme
from cpvt_pyramid.app.data.new_config import new_config
from cpvt_pyramid.app.data.read import read_data
from cpvt_pyramid.app.data.recognize import describe
from cpvt_pyramid.app.tooling.command import UserError

SQUARE = [[10, 10], [30, 10], [30, 30], [10, 30]]


def shape(points: Any, kind: str = 'polygon', group: Any = None, **more: Any) -> dict[str, Any]:
    return {'label': 'cat', 'points': points, 'shape_type': kind, 'group_id': group, **more}


def png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, 'PNG')
    return base64.b64encode(file.getvalue()).decode()


def read(root: Path, shapes: list, **more: Any) -> tuple[list[dict], list[str]]:
    """The objects that are read of a file with some shapes, and the problems."""
    SCENES[0].write(root / 'a.png')
    fill(root, SCENES[1:3], '{}.png', labelme, '{}.json')
    size = {'imageHeight': SIZE[0], 'imageWidth': SIZE[1]}
    write(root / 'a.json', json.dumps({'shapes': shapes, 'imagePath': 'a.png', **size, **more}))
    found = Defects()
    data = checked_data(read_data(describe(root).description, found), HEADERS, found)
    content = coco_of_split(data.splits['train'], data.classes)
    ids = {image['file_name']: image['id'] for image in content['images']}
    own = [a for a in content['annotations'] if a['image_id'] == ids.get('a.png')]
    return own, [str(problem) for problem in found.problems()]


def pixels_of(annotation: dict) -> np.ndarray:
    mask = annotation['segmentation']
    if isinstance(mask, list):
        mask = coco_masks.merge(coco_masks.frPyObjects(mask, *SIZE))
    return coco_masks.decode(mask)


def test_shapes_become_objects(tmp_path):
    objects, problems = read(
        tmp_path,
        [
            shape(SQUARE),
            shape([[30, 40], [10, 20]], 'rectangle'),
            shape([[10, 20], [30, 20], [30, 40], [10, 40]], 'rectangle', label='dog'),
            shape([[40, 30], [50, 30]], 'circle'),
            {'label': 'owl', 'points': SQUARE},
        ],
    )
    boxes = [annotation['bbox'] for annotation in objects]
    assert boxes == [
        [10, 10, 20, 20],
        [10, 20, 20, 20],
        [10, 20, 20, 20],
        [30, 20, 20, 20],
        [10, 10, 20, 20],
    ]
    assert [a['category_id'] for a in objects] == [1, 1, 2, 1, 3]
    assert [a.get('segmentation') is None for a in objects] == [False, True, True, False, False]
    assert objects[3]['area'] == pytest.approx(np.pi * 100, rel=0.01)
    assert len(problems) == 1 and 'objects without a mask' in problems[0]  # the rectangles


def test_shapes_of_a_group_are_the_parts_of_an_object(tmp_path):
    """Those of one label."""
    right = [[50, 10], [60, 10], [60, 20], [50, 20]]
    objects, problems = read(
        tmp_path,
        [
            shape(SQUARE, group=1),
            shape(SQUARE, group=1, label='dog'),
            shape([[5, 40], [9, 40], [9, 50]], group=2),
            shape(right, group=1),
            shape([[20, 20]], 'point', group=1),
        ],
    )
    assert len(objects) == 3 and 'no objects: left out: a.json shape 5 (point)' in problems[0]
    assert objects[0]['bbox'] == [10, 10, 50, 20] and objects[0]['area'] == 500
    assert len(objects[0]['segmentation']) == 2
    assert pixels_of(objects[0]).sum() == pytest.approx(500, rel=0.1)
    assert objects[1]['bbox'] == [10, 10, 20, 20]


def test_a_polygon_that_reaches_beyond_its_image_is_cut_off(tmp_path):
    """Its edges keep their directions. SIZE is 60 x 80 pixels."""
    objects, problems = read(tmp_path, [shape([[-5, -5], [200, -5], [200, 30]])])
    (annotation,) = objects
    left, right, bottom = 5 * 205 / 35 - 5, 80, 85 * 35 / 205 - 5
    assert annotation['bbox'] == pytest.approx([left, 0, right - left, bottom], abs=0.01)
    assert annotation['area'] == pytest.approx((right - left) * bottom / 2, abs=0.02)
    assert 'reach beyond their image: cut off' in problems[0]


corners = st.tuples(st.integers(-50, 150), st.integers(-50, 120))


@given(st.tuples(corners, corners, corners))
def test_the_part_of_a_triangle_inside_an_image(triangle):
    """Against the share of a grid of points that is inside of both."""
    points = np.array(triangle, float)
    part = polygon_inside(points, SIZE)
    grid = np.stack(np.meshgrid(np.arange(0.5, SIZE[1]), np.arange(0.5, SIZE[0])), axis=-1)
    edges = np.roll(points, -1, axis=0) - points
    to_grid = grid[:, :, None] - points
    sides = edges[:, 0] * to_grid[..., 1] - edges[:, 1] * to_grid[..., 0]
    expected = ((sides >= 0).all(-1) | (sides <= 0).all(-1)).sum()
    area = area_of_polygon(part) if len(part) else 0
    if abs(np.linalg.det(edges[:2])) < 1e-9:  # the points are on a line
        assert area == pytest.approx(0, abs=1e-6)
        return
    assert abs(area - expected) <= 1 + np.abs(edges).sum() / 2
    if len(part):
        assert part.min() >= -1e-9 and (part.max(0) <= np.array(SIZE[::-1]) + 1e-9).all()


def test_masks_have_holes(tmp_path):
    """A mask of LabelMe is that of its box, whose last pixels belong to it."""
    ring = np.ones((11, 21))
    ring[3:8, 5:15] = 0
    objects, problems = read(
        tmp_path, [shape([[10, 20], [30, 30]], 'mask', 7, mask=png(ring)), shape(SQUARE, group=7)]
    )
    (annotation,) = objects
    expected = np.zeros(SIZE, bool)
    expected[20:31, 10:31] = ring
    expected[10:31, 10:31] = True  # the polygon, with its border
    assert (pixels_of(annotation) == expected).all() and annotation['area'] == expected.sum()
    objects, problems = read(tmp_path, [shape([[10, 20], [30, 30]], 'mask', mask=png(ring))])
    (annotation,) = objects
    pixels = pixels_of(annotation)
    assert (pixels[20:31, 10:31] == ring).all() and pixels.sum() == ring.sum()
    assert annotation['bbox'] == [10, 20, 21, 11] and annotation['area'] == 181
    assert not problems


NO_SHAPE = (
    'error: objects that cannot be used (no polygon, rectangle, circle or mask with '
    'the points of one)'
)
BAD = {
    'unknown': (shape(SQUARE, 'spline'), f'{NO_SHAPE}: a.json shape 1 (spline)'),
    'line': (shape(SQUARE, 'linestrip'), 'warning: shapes without an area'),
    'two points': (shape(SQUARE[:2]), NO_SHAPE),
    'no points': (shape(None), NO_SHAPE),
    'texts': (shape([['1', '2']] * 3), NO_SHAPE),
    'uneven': (shape([[1, 2], [3], [4, 5]]), NO_SHAPE),
    'endless': (shape([[1, 2], [float('inf'), 3], [4, 5]]), NO_SHAPE),
    'huge': (shape([[1, 2], [10**400, 3], [4, 5]]), NO_SHAPE),
    'far': (shape([[1, 2], [1e300, 3], [4, 5]]), NO_SHAPE),
    'no label': (
        shape(SQUARE, label=' '),
        'error: objects that cannot be used (no label)',
    ),
    'another label': (
        shape(SQUARE, label=3),
        'error: objects that cannot be used (no label)',
    ),
    'outside': (
        shape([[90, 70], [95, 70], [95, 75]]),
        'warning: objects without an area inside their image',
    ),
    'beyond': (
        shape([[60, 50], [95, 50], [95, 55]]),
        'warning: objects that reach beyond their image: cut off: a.json shape 1',
    ),
    'flat': (shape([[60, 50], [70, 50], [65, 50]]), 'warning: objects without an area inside'),
    'torn mask': (shape([[1, 1], [4, 4]], 'mask', mask='iVBORw0K'), NO_SHAPE),
    'other mask': (
        shape([[1, 1], [4, 4]], 'mask', mask=png(np.ones((9, 9)))),
        NO_SHAPE,
    ),
    'mask outside': (
        shape([[78, 1], [81, 4]], 'mask', mask=png(np.ones((4, 4)))),
        'error: objects that cannot be used (an empty mask, or one beyond',
    ),
    'empty mask': (
        shape([[1, 1], [4, 4]], 'mask', mask=png(np.zeros((4, 4)))),
        'error: objects that cannot be used (an empty mask, or one beyond',
    ),
}


@pytest.mark.parametrize('name', BAD)
def test_shapes_that_cannot_be_used(name, tmp_path):
    """The others are used."""
    bad, said = BAD[name]
    objects, problems = read(tmp_path, [bad, shape(SQUARE, label='dog')])
    assert any(problem.startswith(said) for problem in problems), problems
    assert objects[-1]['bbox'] == [10, 10, 20, 20] and len(objects) == 1 + (name == 'beyond')


@pytest.mark.parametrize(
    'text, said',
    [
        (
            '{"shapes": [',
            'that cannot be read (not complete JSON): a.json',
        ),
        (
            '{"shapes": {}}',
            'that cannot be read (no list of shapes): a.json',
        ),
        (
            '[' * 100_000,
            'that cannot be read (not complete JSON): a.json',
        ),
        ('[1]', 'that cannot be read (no list of shapes): a.json'),
        (
            '{"shapes": [3]}',
            'that cannot be read (no list of shapes): a.json',
        ),
        ('{"shapes": [], "imagePath": "b.png"}', 'warning: files of annotations that name another'),
        ('{"shapes": [], "imageHeight": 9, "imageWidth": 9}', 'with another size than their'),
        ('{"shapes": [], "imagePath": 3, "imageHeight": "9"}', 'warning: images without annot'),
        ('\ufeff{"shapes": []}', 'warning: images without annotations'),
    ],
)
def test_files_that_are_damaged(text, said, tmp_path):
    read(tmp_path, [])
    write(tmp_path / 'a.json', text)
    found = Defects()
    checked_data(read_data(describe(tmp_path).description, found), HEADERS, found)
    problems = list(map(str, found.problems()))
    assert any(said in problem for problem in problems), problems


def test_missing_images_and_files(tmp_path):
    read(tmp_path, [shape(SQUARE)])
    (tmp_path / '001.png').unlink()
    SCENES[3].write(tmp_path / 'new.png')
    found = Defects()
    data = read_data(describe(tmp_path).description, found)
    assert [image.name for image in data.splits['train'].images] == ['002.png', 'a.png']
    assert list(map(str, found.problems())) == [
        'warning: files of annotations without an image: 001.json',
        'warning: images without a file of annotations: left out: new.png',
    ]


def test_a_size_that_would_need_gigabytes(tmp_path):
    """Masks have the size of their image."""
    sides = {'imageHeight': 10**9, 'imageWidth': 10**9}
    ring = shape([[1, 1], [4, 4]], 'mask', mask=png(np.ones((4, 4))))
    _, problems = read(tmp_path, [ring, shape(SQUARE)], **sides)
    assert any('with another size than their image' in problem for problem in problems)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 10**30, 0.5, float('nan'), 1e308, 'cat', 'mask', 'circle', '']),
    st.lists(st.lists(st.sampled_from([0, 3, 70, -5, 1e9, None, '1']), max_size=3), max_size=5),
    st.just({}),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(['label', 'points', 'shape_type', 'group_id', 'mask']), VALUES
        ),
        max_size=3,
    ),
    st.sampled_from(['imageHeight', 'imagePath', 'shapes', 'x']),
    VALUES,
)
def test_any_values(tmp_path_factory, shapes, key, value):
    """Whatever a file has, it is read, or what is wrong with it is said."""
    path = tmp_path_factory.mktemp('labelme') / 'a.json'
    objects = [{**shape(SQUARE), **changes} for changes in shapes]
    size = {'imageHeight': SIZE[0], 'imageWidth': SIZE[1]}
    path.write_text(json.dumps({'shapes': objects, 'imagePath': 'a.png', **size, key: value}))
    outlines = parse_labelme(path, 'a.json', SIZE, Defects())
    if outlines is not None:
        assert len(outlines) <= len(shapes)
        for outline in outlines:
            assert outline.label and all(np.isfinite(part).all() for part in outline.parts)


def test_masks_of_objects_are_trained(tmp_path):
    """A config for a model of masks has polygons of several parts, and run lengths of those with
    holes; objects without a mask are an error for it."""
    ring = np.ones((11, 21))
    ring[3:8, 5:15] = 0
    root = tmp_path / 'data'
    read(
        root,
        [
            shape(SQUARE, group=1),
            shape([[50, 10], [60, 10], [60, 20]], group=1),
            shape([[10, 40], [30, 50]], 'mask', mask=png(ring)),
        ],
    )
    base = ROOT / 'configs/mask_rcnn_cpvt_s.py'
    command = [str(root), '--base', str(base), '--out', str(tmp_path / 'my.py')]
    assert load_tool('new_config').main(command) == 0
    parts = [json.loads((tmp_path / f'my_data/{s}.json').read_text()) for s in ('train', 'val')]
    every = [a for part in parts for a in part['annotations']]
    kinds = sorted(type(a['segmentation']).__name__ for a in every)
    assert kinds == ['dict', *['list'] * 5]
    assert load_tool('check_data').main([str(tmp_path / 'my.py')]) == 0
    read(root, [shape([[10, 20], [30, 40]], 'rectangle')])
    with pytest.raises(UserError, match='the data have the errors above'):
        new_config(root, base, tmp_path / 'other.py')


def test_a_folder_of_many_files_is_no_coco(tmp_path, monkeypatch):
    """A COCO file is not searched among the files of thousands of images, which have images in
    them."""
    fill(tmp_path, SCENES, '{}.png', labelme, '{}.json')
    monkeypatch.setattr('cpvt_pyramid.app.data.layouts.coco.MOST_FILES', 3)
    read_bytes = Path.read_bytes
    opened: list[Path] = []
    monkeypatch.setattr(Path, 'read_bytes', lambda path: opened.append(path) or read_bytes(path))
    assert describe(tmp_path).settings['format'] == 'labelme'
    assert not opened


def test_classes_are_those_that_are_declared(tmp_path):
    fill(tmp_path, SCENES, '{}.png', labelme, '{}.json')
    write(tmp_path / 'data.yaml', 'format: labelme\ntrain: .\nannotations: .\nnames: [dog, cat]\n')
    found = Defects()
    data = read_data(describe(tmp_path).description, found)
    assert data.classes == ['dog', 'cat']
    assert 'classes: left out: owl (2 objects)' in str(found.problems()[0])
    assert layouts.CLASSES == CLASSES
