"""infer.py --format: what is written, read by the tools that people use."""

import csv
import json
import sys
from pathlib import Path

import geopandas
import numpy as np
import pytest
import torch
from mmengine.structures import BaseDataElement, PixelData
from PIL import Image
from pycocotools.coco import COCO
from rasterio.control import GroundControlPoint
from rasterio.features import rasterize
from rasterio.transform import Affine, from_origin
from support import load_tool, save_tiff

from cpvt_pyramid.data.coco import check_coco
from cpvt_pyramid.data.defects import Defects
from cpvt_pyramid.data.readers import find_objects
from cpvt_pyramid.predict import Detections, LabelMap
from cpvt_pyramid.predict.formats import Output
from cpvt_pyramid.predict.openmmlab.prediction import INSTANCE_OFFSET, to_prediction
from cpvt_pyramid.predict.polygons import one_polygon, outlines
from cpvt_pyramid.tooling.command import UserError

CLASSES = ('cat, small', 'Hündchen', 'never')
PALETTE = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
HEIGHT, WIDTH = 60, 90
BLACK = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
PHOTO = Path('in put/ä b.png')


def ellipse(x: float, y: float, a: float, b: float) -> np.ndarray:
    rows, columns = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    return ((columns - x) / a) ** 2 + ((rows - y) / b) ** 2 < 1


# A ring, an object of two parts, and an empty mask.
MASKS = np.stack(
    [
        ellipse(30, 30, 20, 25) & ~ellipse(30, 30, 8, 8),
        ellipse(60, 20, 8, 9) | ellipse(78, 40, 6, 12),
        np.zeros((HEIGHT, WIDTH), bool),
    ]
)
BOXES = np.array([[10, 5, 50, 55], [52, 11, 84, 52], [1.5, 2, 4, 8]], np.float32)


def results(form: str, kind: str = 'detections', masks: bool = False) -> None:
    """Write the results for one image, in a format."""
    PHOTO.parent.mkdir(exist_ok=True)
    Path('out').mkdir(exist_ok=True)
    if not PHOTO.exists():
        Image.fromarray(BLACK).save(PHOTO)
    labels, scores = np.array([0, 1, 0]), np.array([0.9, 0.8, 0.7], np.float32)
    given = MASKS if masks else None
    found = Detections(BLACK, CLASSES, PALETTE, BOXES, scores, labels, given)
    if kind == 'labels':
        labels = (MASKS[0] + 2 * MASKS[1]).astype(np.uint8)
        found = LabelMap(BLACK, ('background', *CLASSES), [(0, 0, 0), *PALETTE], labels)
    found.write(Path('out'), PHOTO.stem, str(PHOTO))
    output = Output(Path('out'), form, kind, found.classes)
    output.check([(PHOTO, PHOTO.stem)])
    output.write([(PHOTO, PHOTO.stem)])


kinds_of_results = pytest.mark.parametrize(
    'kind, masks', [('detections', False), ('detections', True), ('labels', True)]
)


def filled(*rings: np.ndarray, shape: tuple = (HEIGHT, WIDTH)) -> np.ndarray:
    polygons = [{'type': 'Polygon', 'coordinates': [np.asarray(ring).tolist()]} for ring in rings]
    return rasterize(polygons, shape).astype(bool)


def test_outlines_follow_a_mask():
    for hole, mask in (
        (ellipse(30, 30, 8, 8), MASKS[0]),
        (0, MASKS[1]),
        (0, ellipse(45, 30, 44, 29)),
        (0, np.ones((5, 7), bool)),
        (0, np.eye(9) > 0),
    ):
        assert (filled(*outlines(mask), shape=mask.shape) != mask | hole).mean() < 0.02
    assert len(outlines(ellipse(45, 30, 28, 28))[0]) < 40  # and not two for each row
    parts = outlines(MASKS[1])
    whole = one_polygon(parts)
    assert len(parts) == 2 and len(whole) == len(parts[0]) + len(parts[1]) + 2
    assert (filled(whole) != MASKS[1]).mean() < 0.02


@kinds_of_results
def test_coco(kind, masks):
    results('coco', kind, masks)
    coco = COCO('out/coco.json')
    annotations = list(coco.anns.values())
    names = [coco.cats[annotation['category_id']]['name'] for annotation in annotations]
    assert names == [CLASSES[0], CLASSES[1], CLASSES[0]][: 2 if kind == 'labels' else 3]
    if kind == 'labels':
        assert annotations[0]['bbox'] == [10, 5, 40, 50]
    else:
        assert [a['score'] for a in annotations] == [0.9, 0.8, 0.7]
        np.testing.assert_allclose([a['bbox'] for a in annotations][2], [1.5, 2, 2.5, 6])
    if masks:
        for annotation, mask in zip(annotations, MASKS):
            np.testing.assert_array_equal(coco.annToMask(annotation), mask)
            assert annotation['area'] == mask.sum()
    checked = check_coco(Path('out/coco.json'), Path())
    assert not [problem for problem in checked.problems if problem.is_error]


@pytest.mark.parametrize('masks', [False, True])
def test_yolo(masks):
    """Read as new_config.py reads it, after the images were put where YOLO has them."""
    results('yolo', masks=masks)
    Path('out/yolo/images').mkdir()
    PHOTO.rename(Path('out/yolo/images', PHOTO.name))
    defects = Defects()
    found = find_objects(Path('out/yolo'), defects)
    assert found.layout == 'YOLO' and tuple(found.classes) == CLASSES and not defects.problems()
    annotations = found.splits['train'].content['annotations']
    assert [a['category_id'] for a in annotations] == [1, 2, 1]
    for annotation, (x1, y1, x2, y2) in zip(annotations, BOXES.tolist()):
        box = [x1, y1, x2 - x1, y2 - y1]
        np.testing.assert_allclose(annotation['bbox'], box, atol=1 if masks else 0.001)
        assert bool(len(annotation.get('segmentation', [[]])[0]) > 8) == (
            masks and box != [1.5, 2, 2.5, 6]
        )


@kinds_of_results
def test_labelme(kind, masks):
    """The fields that labelme's LabelFile.load asks for."""
    results('labelme', kind, masks)
    content = json.loads(Path('out/labelme/ä b.json').read_text())
    assert content.keys() >= {'version', 'flags', 'imageData'}
    assert Path('out/labelme', content['imagePath']).resolve() == PHOTO.resolve()
    assert (content['imageHeight'], content['imageWidth']) == (HEIGHT, WIDTH)
    shapes = content['shapes']
    for shape in shapes:
        assert shape.keys() >= {'label', 'points', 'group_id', 'shape_type', 'flags'}
        assert len(shape['points']) == 2 or shape['shape_type'] == 'polygon'
    if not masks:
        assert [shape['points'] for shape in shapes] == BOXES.reshape(3, 2, 2).tolist()
        assert shapes[0]['description'] == 'score 0.9'
        return
    groups = [(shape['label'], shape['group_id']) for shape in shapes]
    ring, parts, empty = (CLASSES[0], None), (CLASSES[1], 1), (CLASSES[0], None)
    if kind == 'labels':
        assert groups == [ring, (CLASSES[1], None), (CLASSES[1], None)]
    else:
        assert groups == [ring, parts, parts, empty]
    assert (filled(shapes[0]['points']) != ellipse(30, 30, 20, 25)).mean() < 0.01


@pytest.mark.parametrize('kind', ['detections', 'labels'])
def test_csv(kind):
    results('csv', kind, masks=True)
    with open('out/predictions.csv', newline='', encoding='utf-8') as file:
        first, second, *more = csv.DictReader(file)
    numbers = (
        ('0.9', '10.0', '5.0', '50.0', '55.0')
        if kind == 'detections'
        else ('', '10', '5', '50', '55')
    )
    assert tuple(first.values()) == (str(PHOTO), CLASSES[0], *numbers, str(MASKS[0].sum()))
    assert list(first) == ['image', 'class', 'score', 'x1', 'y1', 'x2', 'y2', 'area']
    assert second['class'] == CLASSES[1] and len(more) == (kind == 'detections')


@kinds_of_results
def test_geojson_in_pixels(kind, masks):
    results('geojson', kind, masks)
    table = geopandas.read_file('out/ä b.geojson')
    assert table.is_valid.all()
    if masks:
        assert_masks(table, kind)
    else:
        np.testing.assert_array_equal(table.bounds, BOXES)
        assert list(table['score']) == [0.9, 0.8, 0.7]


def assert_masks(table: geopandas.GeoDataFrame, kind: str, **options: Affine) -> None:
    for name, mask in zip(CLASSES, MASKS):
        areas = table[table['class'] == name].iloc[: 1 if kind == 'detections' else None]
        np.testing.assert_array_equal(rasterize(areas.geometry, mask.shape, **options), mask)


UTM = {'crs': 'EPSG:32633', 'transform': from_origin(500_000, 5_400_000, 2, 2)}
PLACES = {
    'EPSG:32633': UTM,
    'rotated': UTM | {'transform': Affine(1.9, 0.7, 500_000, 0.7, -1.9, 5_400_000)},
    'degrees': {'crs': 'EPSG:4326', 'transform': from_origin(15, 48.7, 2e-5, 2e-5)},
    'without code': {
        'crs': '+proj=tmerc +lat_0=10 +lon_0=15 +k=0.9 +x_0=500000 +ellps=GRS80 +units=m',
        'transform': from_origin(500_000, 4_000_000, 2, 2),
    },
    'points': {
        'crs': 'EPSG:32633',
        'gcps': [
            GroundControlPoint(row, column, 500_000 + 2 * column, 5_400_000 - 2 * row)
            for row, column in ((0, 0), (0, WIDTH), (HEIGHT, 0))
        ],
    },
}


@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('kind', ['detections', 'labels'])
def test_geojson_in_the_world(kind, place, monkeypatch):
    monkeypatch.setattr(f'{__name__}.PHOTO', Path('in put/ä b.tif'))
    save_tiff(PHOTO, BLACK, **PLACES[place])
    results('geojson', kind, masks=True)
    table = geopandas.read_file('out/ä b.geojson')
    assert table.is_valid.all() and all(p.exterior.is_ccw for p in table.geometry.explode())
    where = UTM | PLACES[place]
    degrees = place in ('degrees', 'without code')
    assert table.crs == ('EPSG:4326' if degrees else where['crs'])
    assert_masks(table.to_crs(where['crs']), kind, transform=where['transform'])


def test_a_run_that_cannot_be_written_does_not_begin(monkeypatch):
    """Formats with polygons need rasterio, and others do not."""
    monkeypatch.setitem(sys.modules, 'rasterio', None)
    for form, kind, tiled, file, message in (
        ('yolo', 'labels', False, 'a.png', 'masks can be written .* got --format yolo'),
        ('csv', 'labels', True, 'a.png', 'with --tile only as geojson; got --format csv'),
        ('coco', 'detections', False, 'a.mp4', 'for images, but a.mp4 is a video; run it without'),
        ('labelme', 'labels', False, 'a.png', 'needs rasterio; pip install rasterio'),
        ('yolo', 'segments', False, 'a.png', 'needs rasterio; pip install rasterio'),
        ('geojson', 'detections', False, 'a.tif', 'needs rasterio; pip install rasterio'),
    ):
        with pytest.raises(UserError, match=message):
            Output(Path(), form, kind, CLASSES).check([(Path(file), 'a')], tiled)
    for form, kind in (('labelme', 'detections'), ('csv', 'labels')):
        Output(Path(), form, kind, CLASSES).check([(Path('a.png'), 'a')])


def test_no_detections_and_no_images():
    Path('out').mkdir()
    empty = Detections(BLACK, CLASSES, PALETTE, np.zeros((0, 4)), np.zeros(0), np.zeros(0))
    empty.write(Path('out'), 'a', 'a.png')
    for named in ([(Path('a.png'), 'a')], []):
        for form in ('coco', 'yolo', 'labelme', 'csv', 'geojson'):
            Output(Path('out'), form, 'detections', CLASSES).write(named)
    assert Path('out/yolo/labels/a.txt').read_text() == ''
    assert not len(geopandas.read_file('out/a.geojson'))
    assert Path('out/predictions.csv').read_text().count('\n') == 1


@pytest.mark.parametrize('kind', ['detector', 'segmentor'])
def test_infer_in_tiles(untrained, kind):
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    save_tiff('a.tif', image, **UTM)
    Path('torn.png').write_bytes(b'torn')
    command = [*untrained[kind], 'a.tif', 'torn.png', '--tile', '64', '--format', 'geojson']
    command += ['--score-thr', '0.01'] if kind == 'detector' else []
    assert load_tool('infer').main(command) == 1
    assert not Path('predictions/torn.geojson').exists()
    table = geopandas.read_file('predictions/a.geojson')
    assert len(table) and table.crs == 'EPSG:32633'
    x1, y1, x2, y2 = table.total_bounds
    assert 500_000 <= x1 < x2 <= 500_180 and 5_399_880 <= y1 < y2 <= 5_400_000


def test_panoptic_segments():
    ids = torch.from_numpy(np.where(MASKS[0], 1 + INSTANCE_OFFSET, 2)[None])
    sample = BaseDataElement(pred_panoptic_seg=PixelData(sem_seg=ids))
    meta = {'classes': CLASSES, 'palette': PALETTE}
    Path('out').mkdir()
    to_prediction(sample, BLACK, meta, 0.3).write(Path('out'), 'a', 'a.png')
    Output(Path('out'), 'coco', 'segments', CLASSES).write([(Path('a.png'), 'a')])
    coco = COCO('out/coco.json')
    found = {coco.cats[a['category_id']]['name']: coco.annToMask(a) for a in coco.anns.values()}
    np.testing.assert_array_equal(found[CLASSES[1]], MASKS[0])
    np.testing.assert_array_equal(found[CLASSES[2]], ~MASKS[0])
