"""Tiles of large images: every pixel, every box, in any layout; and what is refused."""

import errno
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import layouts
import numpy as np
import pytest
import rasterio
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CLASSES, MORE, SCENES, fill, write, yolo
from mmengine.config import Config
from PIL import Image
from support import ROOT

from cpvt_pyramid.cli import tile_data as command
from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.data.defects import Defects
from cpvt_pyramid.data.new_config import find_objects, new_config
from cpvt_pyramid.data.recipes import Scales
from cpvt_pyramid.data.tile_data import tile_data
from cpvt_pyramid.tooling.rasters import open_raster
from cpvt_pyramid.tooling.tiles import SEEN, WHOLE, boxes_inside, disjoint, overlapping

RETINANET = ROOT / 'configs/retinanet_cpvt_s.py'
TREES = ROOT / 'configs/demo/trees_retinanet_cpvt_nano.py'
TILE, STEP = 48, 24  # of scenes of 60 x 80
sides = st.integers(1, 90)


# Windows and boxes


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


# Data sets


def boxes_of(content: dict) -> dict[str, list]:
    """The category and the corners of each object that counts, and those of others, by image."""
    names = {image['id']: image for image in content['images']}
    found = {image['file_name']: [] for image in content['images']}
    for a in content['annotations']:
        left, top, width, height = a['bbox']
        corners = left, top, left + width, top + height
        found[names[a['image_id']]['file_name']].append((a['category_id'], corners, a['iscrowd']))
    return found


def read(root: Path, split: str) -> dict:
    return json.loads((root / f'annotations/instances_{split}.json').read_text())


LAYOUTS = [
    layouts.coco_of_splits,
    layouts.coco_of_roboflow,
    layouts.coco_of_subfolders,
    layouts.yolo_of_splits,
    layouts.yolo_of_darknet,
    layouts.voc_of_2007,
    layouts.voc_of_folders,
]


@pytest.mark.parametrize('layout', LAYOUTS, ids=lambda layout: layout.__name__)
def test_tiles_of_every_layout(layout: Callable, tmp_path: Path):
    """Pixels and boxes of the tiles are those of the images at their places, each object that fits
    is whole in a training tile, and the tiles are read as a data set without problems."""
    layout(tmp_path / 'data')
    tiles = tmp_path / 'tiles'
    tile_data(tmp_path / 'data', tiles, TILE, STEP, boxes_only=True)
    source = find_objects(tmp_path / 'data', Defects())
    defects = Defects()
    found = find_objects(tiles, defects)  # tiles without objects are no mistake
    assert not defects.problems() and found.layout == 'COCO' and found.classes == source.classes
    total = 0
    for split in found.splits:
        content = read(tiles, split)
        assert found.splits[split].content == content
        folders = {s.folder for s in source.splits.values()}
        (folder,) = folders if len(folders) == 1 else (source.splits[split].folder,)
        given = {}
        for part in source.splits.values():
            if part.folder == folder:
                given |= boxes_of(part.content)
        whole = {name: set() for name in given}
        shown = boxes_of(content)
        for record in content['images']:
            left, top = record['left'], record['top']
            right, bottom = left + record['width'], top + record['height']
            scene = np.asarray(Image.open(folder / record['source']))
            tile = np.asarray(Image.open(tiles / split / record['file_name']))
            assert (tile == scene[top:bottom, left:right]).all()
            for label, (x1, y1, x2, y2), is_ignored in shown[record['file_name']]:
                assert 0 <= x1 < x2 <= record['width'] and 0 <= y1 < y2 <= record['height']
                placed = label, (x1 + left, y1 + top, x2 + left, y2 + top), 0
                near = [
                    np.allclose(placed[1], b) and label == c for c, b, _ in given[record['source']]
                ]
                assert any(near) != bool(is_ignored)
                whole[record['source']] |= set(np.flatnonzero(near))
        sources = {record['source'] for record in content['images']}
        total += len(sources)
        if split == 'train':
            assert all(len(whole[name]) == len(given[name]) for name in sources)
    assert total == sum(len(s.content['images']) for s in source.splits.values())


def large(root: Path, *, masks: bool = False, **changes: object) -> dict:
    """A data set of one image of 200 x 150 in each split, with three objects; the annotations of
    the training have some changes in the first object."""
    pixels = np.random.default_rng(0).integers(0, 256, (150, 200, 3), np.uint8)
    boxes = [[10, 20, 30, 30], [60, 60, 20, 10], [5, 5, 180, 140]]
    for split in ('train', 'val'):
        (root / split).mkdir(parents=True)
        Image.fromarray(pixels).save(root / split / 'a.png')
        annotations = [
            dict(id=i, image_id=1, category_id=1, iscrowd=0, bbox=b, area=b[2] * b[3])
            for i, b in enumerate(boxes, 1)
        ]
        if split == 'train':
            annotations[0].update(changes)
        content = dict(
            images=[dict(id=1, file_name='a.png', width=200, height=150)],
            annotations=annotations,
            categories=[dict(id=1, name='tree')],
        )
        write(root / split / 'boxes.json', json.dumps(content))
    return content


@pytest.mark.parametrize('key', ['iscrowd', 'ignore'])
def test_ignored_objects_stay_ignored(key, tmp_path):
    large(tmp_path / 'data', **{key: 1})
    tile_data(tmp_path / 'data', tmp_path / 'tiles', 64, 32)
    counted = [a for a in read(tmp_path / 'tiles', 'train')['annotations'] if not a['iscrowd']]
    assert counted and {tuple(a['bbox'][2:]) for a in counted} == {(20, 10)}


def test_difficult_objects_stay_ignored(tmp_path):
    layouts.voc_of_2007(tmp_path / 'data')
    for path in (tmp_path / 'data').rglob('*.xml'):
        text = path.read_text()
        path.write_text(text.replace('</name>', '</name><difficult>1</difficult>', 1))
    tile_data(tmp_path / 'data', tmp_path / 'tiles', TILE, STEP)
    for split, scenes in (('train', SCENES[:2]), ('val', SCENES[2:])):
        counted = [a for a in read(tmp_path / 'tiles', split)['annotations'] if not a['iscrowd']]
        labels = {scene.boxes[1][0] + 1 for scene in scenes}
        assert {a['category_id'] for a in counted} <= labels


def test_objects_that_no_tile_has_are_counted(tmp_path, capsys):
    large(tmp_path / 'data')
    out = str(tmp_path / 'tiles')
    assert command.main([str(tmp_path / 'data'), '--tile', '64', '--out', out]) == 0
    printed = capsys.readouterr().out
    expected = '3 objects, 1 of them whole in no tile and ignored; a larger --tile has more of them'
    assert expected in printed
    tiles = read(tmp_path / 'tiles', 'train')['images']
    assert f'train: {len(tiles)} tiles of 1 images' in printed
    assert read(tmp_path / 'tiles', 'train')['info']['cpvt_tiles'] == dict(tile=64, step=32)


def test_small_images_are_copied(tmp_path):
    """And two of the same name do not replace each other."""
    layouts.coco_of_subfolders(tmp_path / 'data')
    tile_data(tmp_path / 'data', tmp_path / 'tiles', 80, 40, boxes_only=True)
    files = [p.read_bytes() for p in (tmp_path / 'data').rglob('*.png')]
    copies = [p.read_bytes() for p in (tmp_path / 'tiles').rglob('*.png')]
    assert sorted(files) == sorted(copies) and len(set(copies)) == 8


def test_tiffs_of_bands_keep_them_and_are_read_once(tmp_path, monkeypatch):
    """Five bands of 16 bits, with a georeference; lines of the file are read in order."""
    large(tmp_path / 'data')
    values = np.random.default_rng(0).integers(0, 60000, (5, 150, 200)).astype(np.uint16)
    transform = rasterio.Affine(0.5, 0, 1000, 0, -0.5, 2000)
    for split in ('train', 'val'):
        (tmp_path / f'data/{split}/a.png').unlink()
        path = tmp_path / f'data/{split}/boxes.json'
        write(path, path.read_text().replace('a.png', 'a.tif'))
        with rasterio.open(
            tmp_path / f'data/{split}/a.tif',
            'w',
            'GTiff',
            200,
            150,
            5,
            dtype='uint16',
            crs='EPSG:32612',
            transform=transform,
        ) as file:
            file.write(values)
    lines = []

    class Watched:
        def __init__(self, image) -> None:
            self.image = image

        def __getattr__(self, name: str):
            return getattr(self.image, name)

        def read(self, window):
            lines.extend(range(*window[0]))
            return self.image.read(window=window)

    @contextmanager
    def watched(path, user, **options):
        with open_raster(path, user, **options) as image:
            yield Watched(image)

    monkeypatch.setattr('cpvt_pyramid.data.tile_data.open_raster', watched)
    tile_data(tmp_path / 'data', tmp_path / 'tiles', 64, 32)
    assert lines == [*range(150)] * 2  # of train and val
    for record in read(tmp_path / 'tiles', 'train')['images']:
        left, top = record['left'], record['top']
        with rasterio.open(tmp_path / 'tiles/train' / record['file_name']) as tile:
            expected = values[:, top : top + record['height'], left : left + record['width']]
            assert (tile.read() == expected).all()
            place = tile.transform.c, tile.transform.f
            assert place == (1000 + left / 2, 2000 - top / 2)


# Refused


def refusal(capsys, data: Path, *options: str) -> str:
    """The line of an error; nothing is left."""
    out = data.parent / 'tiles'
    before = set(data.parent.iterdir())
    assert command.main([str(data), '--out', str(out), '--tile', '48', *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith('cpvt tile-data: ') and err.count('\n') == 1
    assert set(data.parent.iterdir()) == before
    return err


def test_masks_are_refused(tmp_path, capsys):
    layouts.coco_of_splits(tmp_path / 'polygons')
    layouts.maps_of_mmseg(tmp_path / 'maps')
    assert '8 objects with masks or polygons' in refusal(capsys, tmp_path / 'polygons')
    assert 'only boxes can be cut' in refusal(capsys, tmp_path / 'maps')


def test_one_image_is_not_training_and_validation(tmp_path, capsys):
    """Tiles of one image overlap."""
    fill(tmp_path / 'one', SCENES[:1], '{}.png', yolo, '{}.txt')
    write(tmp_path / 'one/classes.txt', '\n'.join(CLASSES))
    assert 'tiles of one image must not be in both' in refusal(capsys, tmp_path / 'one')
    fill(tmp_path / 'one', SCENES, '{}.png', yolo, '{}.txt')
    tile_data(tmp_path / 'one', tmp_path / 'tiles', TILE, STEP)
    sources = [
        {image['source'] for image in read(tmp_path / 'tiles', split)['images']}
        for split in ('train', 'val')
    ]
    assert sorted(map(len, sources)) == [1, 3] and not sources[0] & sources[1]


def test_arguments_and_places(tmp_path, capsys):
    data = tmp_path / 'data'
    large(data)
    assert '--step must be from 1 to --tile, 48' in refusal(capsys, data, '--step', '49')
    assert '--step must be from 1' in refusal(capsys, data, '--step', '0')
    assert '--tile must be' in refusal(capsys, data, '--tile', '31')
    assert 'is inside' in refusal(capsys, data, '--out', str(data / 'tiles'))
    (tmp_path / 'tiles').mkdir()
    write(tmp_path / 'tiles/a.txt', 'mine')
    assert 'exists; remove it' in refusal(capsys, data)
    assert 'no folder' in refusal(capsys, tmp_path / 'nowhere', '--out', str(tmp_path / 'x'))
    assert (tmp_path / 'tiles/a.txt').read_text() == 'mine'


def test_damaged_images(tmp_path, capsys):
    """A header that is complete, and half of the pixels."""
    for split, scenes in layouts.SPLITS:
        fill(tmp_path / 'data', scenes, f'{split}/{{}}.bmp', yolo, f'{split}/{{}}.txt')
    write(tmp_path / 'data/classes.txt', '\n'.join(CLASSES))
    image = tmp_path / 'data/train/001.bmp'
    image.write_bytes(image.read_bytes()[:7000])
    error = refusal(capsys, tmp_path / 'data')
    assert '001.bmp: not a complete image' in error and '--skip-bad' in error
    out = str(tmp_path / 'tiles')
    command.main([str(tmp_path / 'data'), '--tile', '48', '--skip-bad', '--out', out])
    assert 'warning: left out' in capsys.readouterr().out
    assert not list((tmp_path / 'tiles/train').glob('001*'))
    assert len({i['source'] for i in read(tmp_path / 'tiles', 'train')['images']}) == 3


def test_a_full_disk_leaves_nothing(tmp_path, capsys, monkeypatch):
    large(tmp_path / 'data')
    save = Image.Image.save

    def full(self, path, *rest) -> None:
        if path.name == 'a_0032_0000.png':
            raise OSError(errno.ENOSPC, 'No space left on device')
        save(self, path, *rest)

    monkeypatch.setattr(Image.Image, 'save', full)
    options = '--tile', '64', '--step', '32'
    assert 'no space left on the disk' in refusal(capsys, tmp_path / 'data', *options)


# Configs for tiles


@pytest.mark.parametrize('base', [RETINANET, TREES], ids=lambda base: base.stem)
def test_configs_for_tiles_keep_the_resolution_and_ignore_cut_boxes(base, tmp_path, monkeypatch):
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))
    large(tmp_path / 'data')
    tile_data(tmp_path / 'data', tmp_path / 'tiles', 64, 32)
    lines = new_config(tmp_path / 'tiles', base, tmp_path / 'my.py')
    assert any('not resized; objects have' in line for line in lines)
    assert any('more are ignored' in line for line in lines)
    cfg = load_config(tmp_path / 'my.py')
    assert cfg.model.train_cfg.assigner.ignore_iof_thr == 0.5
    (resize,) = (s for s in cfg.test_pipeline if s['type'] == 'Resize')
    assert resize['scale_factor'] == 1.0 and 'scale' not in resize
    (resize,) = (s for s in cfg.train_pipeline if 'Resize' in s['type'])
    assert min(resize['scale']) == 64
    anchors = load_config(base).model.bbox_head.anchor_generator
    assert cfg.model.bbox_head.anchor_generator == anchors


@settings(max_examples=30, deadline=None)
@given(st.integers(32, 2000), st.integers(32, 2000))
def test_training_at_the_resolution_of_tests(height, width):
    """A base whose tests do not resize images trains them at their size, whatever it is; crops do
    not grow."""
    train = [
        dict(type='RandomResize', scale=(384, 384), ratio_range=(0.75, 1.5)),
        dict(type='RandomCrop', crop_size=(256, 256)),
    ]
    val = [dict(type='Resize', scale_factor=1.0)]
    cfg = Config(
        dict(
            train_dataloader=dict(dataset=dict(pipeline=train)),
            val_dataloader=dict(dataset=dict(pipeline=val)),
        )
    )
    scales = Scales.of(cfg, np.array([[height, width]] * 3, float), 'detection')
    resize, crop = scales.pipeline(train, False)
    factor = min(
        max(resize['scale']) / max(height, width), min(resize['scale']) / min(height, width)
    )
    assert factor == pytest.approx(1, abs=0.02) or max(height, width) < 33
    assert max(crop['crop_size']) <= 256
    assert scales.pipeline(val, False, is_test=True) == val


def test_images_with_more_objects_than_metrics_count(tmp_path):
    content = large(tmp_path / 'data')
    annotation = content['annotations'][0]
    content['annotations'] = [{**annotation, 'id': i} for i in range(1, 103)]
    write(tmp_path / 'data/val/boxes.json', json.dumps(content))
    lines = new_config(tmp_path / 'data', RETINANET, tmp_path / 'my.py')
    assert any('an image of the val data has 102 objects' in line for line in lines)


@pytest.mark.parametrize('annotate, suffix', [(yolo, 'txt'), (layouts.voc, 'xml')])
def test_files_can_be_assigned(annotate, suffix, tmp_path):
    """Without lists and folders for splits."""
    fill(
        tmp_path,
        [*SCENES, *(m._replace(name=f'm{m.name}') for m in MORE)],
        '{}.png',
        annotate,
        f'{{}}.{suffix}',
    )
    write(tmp_path / 'classes.txt', '\n'.join(CLASSES))
    found = find_objects(tmp_path, Defects(), {'m001': 'val', '002.png': 'val'})
    images = found.splits['val'].content['images']
    assert {Path(image['file_name']).stem for image in images} == {'m001', '002'}
    assert len(found.splits['train'].content['images']) == 6
