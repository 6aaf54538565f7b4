"""infer.py --format: what is written, read by the tools that people use."""

import json
import sys
from pathlib import Path

import geopandas
import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from rasterio.control import GroundControlPoint
from rasterio.features import rasterize
from rasterio.transform import Affine, from_origin
from support import load_tool, save_tiff

from cpvt_pyramid.app.data.check import checked_split
from cpvt_pyramid.app.data.data import Split
from cpvt_pyramid.app.data.defects import Defects
from cpvt_pyramid.app.data.images import ALL
from cpvt_pyramid.app.data.layouts.coco import parse_coco, read_coco
from cpvt_pyramid.app.predict import Detections, LabelMap
from cpvt_pyramid.app.predict.options import InferOptions
from cpvt_pyramid.app.predict.results import Results
from cpvt_pyramid.app.tooling.command import UserError

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


def results(form: str, kind: str = 'detections', masks: bool = False) -> Results:
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
    written = Results(InferOptions(out_dir='out', format=form), kind, found.classes)
    entry = PHOTO, PHOTO.stem
    written.check([PHOTO])
    written.write(entry, found)
    written.finish([entry])
    return written


kinds_of_results = pytest.mark.parametrize(
    'kind, masks', [('detections', False), ('detections', True), ('labels', True)]
)


@kinds_of_results
def test_coco(kind, masks):
    written = results('coco', kind, masks)
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
    if kind == 'labels':
        first, second, _ = MASKS.mean((1, 2))
        shares = 1 - first - second, first, second
        names = ('background', *CLASSES)
        expected = ', '.join(f'{name} {share:.1%}' for name, share in zip(names, shares))
        assert written.summary() == expected
    else:
        assert written.summary() == '2 cat, small, 1 Hündchen'
    found = Defects()
    content = read_coco(Path('out/coco.json'))
    classes = [category['name'] for category in content['categories']]
    split = parse_coco(content, Split([], Path()), classes, found)
    checked_split('train', split, classes, None, ALL, found)
    assert not [problem for problem in found.problems() if problem.is_error]


@pytest.mark.parametrize('kind', ['detections', 'labels'])
def test_coco_of_an_earlier_run(kind):
    """With --skip-existing, what is in the folder is read."""
    results('coco', kind, masks=True)
    first = Path('out/coco.json').read_text()
    classes = ('background', *CLASSES) if kind == 'labels' else CLASSES
    later = Results(InferOptions(out_dir='out', format='coco'), kind, classes)
    assert later.exist((PHOTO, PHOTO.stem))
    later.finish([(PHOTO, PHOTO.stem)])
    assert Path('out/coco.json').read_text() == first


def test_a_damaged_file_of_an_earlier_run():
    results('coco')
    Path('out', f'{PHOTO.stem}.detections.json').write_text('{"detections": [')
    later = Results(InferOptions(out_dir='out', format='coco'), 'detections', CLASSES)
    with pytest.raises(UserError, match='must have the detections of cpvt infer; remove it'):
        later.finish([(PHOTO, PHOTO.stem)])


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
    """GeoJSON of masks and of images with a place needs rasterio, and the rest does not."""
    monkeypatch.setitem(sys.modules, 'rasterio', None)
    for form, kind, is_tiled, file, message in (
        ('coco', 'labels', True, 'a.png', 'masks can be written as geojson, got --format coco'),
        ('coco', 'detections', False, 'a.mp4', 'for images, but a.mp4 is a video; run it without'),
        ('geojson', 'labels', False, 'a.png', 'needs rasterio; pip install rasterio'),
        ('geojson', 'detections', False, 'a.tif', 'needs rasterio; pip install rasterio'),
    ):
        results = Results(InferOptions(format=form, tile=64 if is_tiled else None), kind, CLASSES)
        with pytest.raises(UserError, match=message):
            results.check([Path(file)])
    for form, kind in (('geojson', 'detections'), ('coco', 'labels')):
        Results(InferOptions(format=form), kind, CLASSES).check([Path('a.png')])


def test_no_detections_and_no_images():
    Path('out').mkdir()
    empty = Detections(BLACK, CLASSES, PALETTE, np.zeros((0, 4)), np.zeros(0), np.zeros(0))
    for named in ([(Path('a.png'), 'a')], []):
        for form in ('coco', 'geojson'):
            results = Results(InferOptions(out_dir='out', format=form), 'detections', CLASSES)
            for entry in named:
                results.write(entry, empty)
            results.finish(named)
            assert results.summary() == 'nothing'
    assert not len(geopandas.read_file('out/a.geojson'))
    assert json.loads(Path('out/coco.json').read_text())['annotations'] == []


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
