"""Valid data in any layout: not refused, and each object on its picture; damaged data: named."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import layouts
import numpy as np
import pytest
from layouts import CLASSES, COLORS, MORE, SCENES, SIZE, VALID, Scene, fill, label_map, scene
from PIL import Image
from support import ROOT, load_tool

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.parts import data_of

BASES = {
    'boxes': ROOT / 'configs/demo/pages_retinanet_cpvt_nano.py',
    'maps': ROOT / 'configs/demo/pages_semantic_fpn_cpvt_nano.py',
}


@pytest.fixture(autouse=True)
def _unformatted(monkeypatch) -> None:
    """Formatting a config takes longer than the rest."""
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))


def check_boxes(dataset: dict) -> int:
    content = json.loads(Path(dataset.data_root, dataset.ann_file).read_text())
    names = {c['id']: c['name'] for c in content['categories']}
    assert {a['image_id'] for a in content['annotations']} == {i['id'] for i in content['images']}
    for image in content['images']:
        path = Path(dataset.data_root, dataset.data_prefix.img, image['file_name'])
        pixels = np.asarray(Image.open(path)).astype(int)
        expected = np.full((*SIZE, 3), 7)
        for annotation in content['annotations']:
            if annotation['image_id'] == image['id']:
                x, y, width, height = map(round, annotation['bbox'])
                assert annotation['area'] > 0
                color = COLORS[CLASSES.index(names[annotation['category_id']])]
                expected[y : y + height, x : x + width] = color
        assert (pixels[:-2] == expected[:-2]).all(), path
    return len(content['images'])


def check_maps(dataset: dict) -> int:
    root, images, maps = (Path(dataset.data_root), *dataset.data_prefix.values())
    names = Path(dataset.ann_file).read_text().splitlines()
    colors = np.concatenate([[(7, 7, 7)], COLORS])
    for name in names:
        pixels = np.asarray(Image.open(root / images / f'{name}{dataset.img_suffix}'))
        labels = np.asarray(Image.open(root / maps / f'{name}{dataset.seg_map_suffix}'))
        if len(dataset.metainfo.classes) == 2:
            assert ((pixels != 7).any(-1) == labels)[:-2].all(), name
            continue
        if dataset.metainfo.classes[0] == 'background':  # colours in the order of their values
            order = [0, *1 + COLORS.astype(int).dot([65536, 256, 1]).argsort()]
            labels = np.array(order)[labels]
        assert (pixels[:-2] == colors[labels][:-2]).all(), name
    return len(names)


@pytest.mark.parametrize('layout', VALID, ids=lambda layout: layout.__name__)
def test_valid(layout: Callable, tmp_path: Path, capsys):
    root = tmp_path / 'mes données'
    layout(root)
    task = 'maps' if layout.__name__.startswith('maps') else 'boxes'
    path = described(root, tmp_path / 'data.yaml', capsys)
    command = [str(path), '--base', str(BASES[task]), '--out', str(tmp_path / 'my.py')]
    assert load_tool('new_config').main(command) == 0
    cfg = load_config(tmp_path / 'my.py')
    for split, count in zip(('train', 'val'), VALID[layout]):
        check = check_maps if task == 'maps' else check_boxes
        assert sum(map(check, data_of(cfg, split))) == count, split
    assert load_tool('check_data').main([str(path)]) == 0
    assert 'error' not in capsys.readouterr().out.replace('no errors', '')


def described(root: Path, path: Path, capsys) -> Path:
    """The data.yaml of a folder; of masks whose values no file names, the template."""
    command = [str(root), '--out', str(path)]
    if (root / 'VOC2007').exists() or (root / 'lists').exists():
        command += ['--format', 'voc']
    status = load_tool('check_data').main(command)
    said = capsys.readouterr().err
    assert status == (2 if 'no file names the values or colours' in said else 0), said
    return path


@pytest.mark.parametrize('task', ['boxes', 'maps'])
def test_the_demo_as_data_of_ones_own(task, pages_dataset, tmp_path, capsys):
    """It has boxes and segmentation masks, in files of the same names."""
    command = [str(pages_dataset), '--base', str(BASES[task]), '--out', str(tmp_path / 'my.py')]
    assert load_tool('new_config').main(command) == 0
    cfg = load_config(tmp_path / 'my.py')
    parts = 'text', 'title', 'list', 'table', 'figure'
    assert cfg.metainfo.classes == (('background', *parts) if task == 'maps' else parts)
    assert load_tool('check_data').main([str(tmp_path / 'my.py')]) == 0
    assert 'warning' not in capsys.readouterr().out


def test_written_maps_keep_ignored_pixels_and_skip_a_split_without_maps(tmp_path: Path):
    """In PNGs with a palette of few colours, 255 must not become 3."""
    root = tmp_path / 'data'
    for suffix, picture in zip(('png', 'bmp', 'png', 'bmp'), SCENES):
        fill(root, [picture], f'images/{{}}.{suffix}', label_map, 'masks/{}.png')
        labels = np.array(Image.open(root / f'masks/{picture.name}.png'))
        labels[:5] = 255
        Image.fromarray(labels).save(root / f'masks/{picture.name}.png')
    fill(root, MORE[:1], 'val/images/{}.png', label_map, 'val/masks/{}.png')
    (root / 'val/masks/000.png').write_bytes(b'torn')
    (root / 'classes.txt').write_text('\n'.join(('ground', *CLASSES)))
    command = [str(root), '--base', str(BASES['maps']), '--out', str(tmp_path / 'my.py')]
    assert load_tool('new_config').main([*command, '--skip-bad']) == 0
    written = list((tmp_path / 'my_data/labels/images').iterdir())
    assert len(written) == 4  # also that of the validation, which is read in the same way
    for path in written:
        source = np.asarray(Image.open(root / f'masks/{path.name[:3]}.png'))
        assert (np.asarray(Image.open(path)) == source).all()


# Damaged data


def changed(layout: Callable, change: Callable) -> Callable:
    """A layout with a change, which is called with its folder."""

    def build(root: Path) -> None:
        layout(root)
        change(root)

    build.__name__ = layout.__name__
    return build


def replaced(pattern: str, text: str = 'torn') -> Callable:
    return lambda root: [path.write_text(text) for path in root.glob(pattern)]


def coco_of(scenes: list[Scene], suffix: str = 'png') -> Callable:
    def build(root: Path) -> None:
        layouts.coco(root / 'all.json', scenes, f'{{}}.{suffix}')
        fill(root, scenes, f'images/{{}}.{suffix}')

    return build


def coco_same_names(root: Path) -> None:
    layouts.coco(root / 'all.json', SCENES + MORE)
    fill(root, SCENES, 'a/{}.png')
    fill(root, MORE, 'b/{}.png')


def voc_that_names_images(root: Path) -> None:
    layouts.voc_of_two_years(root)
    for path in root.glob('*/Annotations/*.xml'):
        name = f'<filename>{path.stem}.png</filename>'
        path.write_text(path.read_text().replace('<filename></filename>', name))


def spoil_yolo(root: Path) -> None:
    images, labels = (sorted((root / kind / 'train').iterdir()) for kind in ('images', 'labels'))
    images[0].write_bytes(b'')
    images[1].write_text('no image')
    images[2].unlink()
    with labels[3].open('a') as file:
        file.write('\n0 0.5 0.5 0.2\n3 0.5 0.5 0.2 0.2\n0 nan 0.5 0.2 0.2\n0 20 30 5 5\n')


def spoil_voc(root: Path) -> None:
    files = sorted((root / 'VOC2007/Annotations').iterdir())
    files[0].write_text('')
    files[1].write_text(files[1].read_text()[:80])
    for image in root.glob(f'*/JPEGImages/{files[2].stem}.png'):
        image.unlink()
    files[3].write_text(files[3].read_text().replace('xmin', 'left', 2))


def maps_spoiled(root: Path) -> None:
    fill(root, list(map(scene, range(8))), 'images/{}.png', label_map, 'masks/{}.png')
    (root / 'masks/000.png').unlink()
    for name in ('masks/001.png', 'masks/002.png'):
        (root / name).write_bytes((root / name).read_bytes()[:50])
    (root / 'images/003.png').write_bytes((root / 'images/003.png').read_bytes()[:20])  # no header


def maps_as_jpeg(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', label_map, 'masks/{}.jpg')


LISTED = '000\n001\n0077'  # the last does not exist
TEN_OF_CORNERS = [
    s._replace(boxes=[(c, x, y, x + w, y + h) for c, x, y, w, h in s.boxes])
    for s in map(scene, range(10))
]  # enough to be certain
ALL = None  # are used: what is said is a warning
DAMAGED = [  # what is in the folder, how many training images have no error, what is said
    (
        coco_of(TEN_OF_CORNERS[:3]),
        ALL,
        ['boxes that reach beyond their image; bbox is x, y, width and height'],
    ),
    (coco_of(TEN_OF_CORNERS), 0, ['must be x, y, width and height, but these are x1, y1, x2, y2']),
    (
        coco_same_names,
        0,
        ['the train images can be in several folders, a (8 images), b (8 images)'],
    ),
    # The other split has another image of this name.
    (
        changed(layouts.coco_of_splits, lambda root: (root / 'train2017/001.png').unlink()),
        3,
        ['images that are missing: 001.png'],
    ),
    (
        changed(coco_of(SCENES), replaced('images/001.png')),
        2,
        ['images that are not complete images: 001.png'],
    ),
    (
        changed(layouts.coco_of_splits, replaced('annotations/*train*', '{"images": [')),
        0,
        ['is not complete JSON'],
    ),
    (changed(coco_of(SCENES), replaced('all.json', '{"images": [')), 0, ['is not complete JSON']),
    (
        coco_of(SCENES, 'gif'),
        0,
        ['images that readers do not agree on', 'GIF'],
    ),
    (
        changed(layouts.yolo_of_splits, lambda root: MORE[0].write(root / 'images/train/000.bmp')),
        0,
        [
            'files of annotations that several images share: labels/train/000.txt '
            '(images/train/000.bmp, images/train/000.png)'
        ],
    ),
    (
        changed(layouts.yolo_of_splits, spoil_yolo),
        1,
        [
            'images that are not complete images: images/train/000.png',
            'neither a class and a box nor a polygon',
            'the names are 0 to 2',
            'beyond the image; values must be shares',
        ],
    ),
    (
        changed(layouts.voc_of_2007, replaced('*/ImageSets/Main/train.txt', LISTED)),
        2,
        ['JPEGImages/0077 ('],
    ),
    # There is a label map of this name.
    (
        changed(layouts.voc_of_2007, lambda root: (root / 'VOC2007/JPEGImages/000.png').unlink()),
        1,
        ['images that are missing: VOC2007/JPEGImages/000 (VOC2007/ImageSets/Main/train.txt)'],
    ),
    (
        changed(layouts.voc_of_folders, lambda root: layouts.voc(root / 'xml/a/lost.xml', MORE[0])),
        ALL,
        ['files of annotations without an image: xml/a/lost.xml'],
    ),
    # The other year has another image of this name.
    *(
        (
            changed(layout, lambda root: (root / 'VOC2007/JPEGImages/000.png').unlink()),
            3,
            ['images that are missing: VOC2007/JPEGImages/000 (VOC2007/ImageSets/Main/train.txt)'],
        )
        for layout in (layouts.voc_of_two_years, voc_that_names_images)
    ),
    (
        changed(layouts.voc_of_two_years, spoil_voc),
        1,
        ['not complete XML', 'images that are missing', 'no bndbox'],
    ),
    (maps_as_jpeg, ALL, ['segmentation masks that are JPEGs']),
    (
        changed(layouts.maps_of_voc, replaced('JPEGImages/*')),
        0,
        ['images that are not complete images: JPEGImages/000.png'],
    ),
    (
        changed(
            layouts.maps_of_voc,
            lambda root: Image.new('P', (9, 9)).save(root / 'SegmentationClass/001.png'),
        ),
        1,
        ['segmentation masks of another size than their image: JPEGImages/001.png'],
    ),
    (
        changed(layouts.maps_of_voc, replaced('ImageSets/Segmentation/train.txt', LISTED)),
        2,
        ['JPEGImages/0077 ('],
    ),
    (
        maps_spoiled,
        3,
        [
            'images without a segmentation mask',
            'segmentation masks that training cannot read',
            'images that are not complete',
        ],
    ),
    (
        lambda root: SCENES[0].write(root / 'a.png'),
        0,
        ['has no data in a known layout', 'format: '],
    ),
]


@pytest.mark.parametrize('build, left, said', DAMAGED)
def test_damaged(build: Callable, left: Optional[int], said: list[str], tmp_path: Path, capsys):
    """Both tools name the defects, and refuse what is certainly wrong; with --skip-bad, the rest is
    used. Nothing is left of a config that is refused."""
    root, out = tmp_path / 'data', tmp_path / 'my.py'
    build(root)
    is_segmentor = build.__name__.startswith('maps')
    if is_segmentor:
        (root / 'classes.txt').write_text('\n'.join(('ground', *CLASSES)))
    formats = ['--format', 'voc'] if build.__name__.startswith('voc') else []
    command = [str(root), '--base', str(BASES['maps' if is_segmentor else 'boxes'])]
    command += ['--out', str(out)]
    for tool, words in (('new_config', command), ('check_data', [str(root), *formats])):
        assert bool(load_tool(tool).main(words)) == (left is not ALL), tool
        printed = capsys.readouterr()
        assert all(kind in printed.out + printed.err for kind in said)
        assert 'Traceback' not in printed.err and printed.err.count(f'cpvt {tool}: ') <= 1
        assert not re.search('error', printed.err) or left is not ALL
    if left is ALL:
        return
    assert {path.name for path in tmp_path.iterdir()} <= {'data', 'work_dirs'}
    assert bool(load_tool('new_config').main([*command, '--skip-bad'])) == (left == 0)
    if left:
        text = (tmp_path / f'my_data/train.{"txt" if is_segmentor else "json"}').read_text()
        assert left == len(text.splitlines() if is_segmentor else json.loads(text)['images'])


@pytest.mark.parametrize(
    'build', ['coco_of_splits', 'yolo_of_splits', 'voc_of_folders', 'maps_of_folders']
)
def test_skip_bad_leaves_out_images_with_complete_headers_alone(build, tmp_path, capsys):
    """The config that it writes has no errors, and can be trained."""
    root, out = tmp_path / 'data', tmp_path / 'my.py'
    getattr(layouts, build)(root)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob('*.png'))
    image = root / next(name for name in names if not re.search('mask|test', name))
    os.truncate(image, image.stat().st_size // 2)
    base = BASES['maps' if build.startswith('maps') else 'boxes']
    if build.startswith('maps'):
        (root / 'classes.txt').write_text('\n'.join(('ground', *CLASSES)))
    command = [str(root), '--base', str(base), '--out', str(out), '--skip-bad']
    assert load_tool('new_config').main(command) == 0
    assert 'left out: images that are not complete images' in capsys.readouterr().out
    assert load_tool('check_data').main([str(out)]) == 0
