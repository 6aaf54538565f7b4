"""Data sets with every kind of defect: found before the first iteration, in a line each."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import layouts
import numpy as np
import pytest
import torch
from layouts import CLASSES, SIZE, coco_content, fill, label_map, scene
from mmengine.config import Config
from PIL import Image
from pycocotools.cocoeval import COCOeval
from support import ROOT, load_tool, save_tiff

from cpvt_pyramid.app.config.check import check_classes
from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.parts import dataset_meta
from cpvt_pyramid.app.data import defects
from cpvt_pyramid.app.data.check import checked_split
from cpvt_pyramid.app.data.config_data import check_dataset
from cpvt_pyramid.app.data.data import Split, coco_of_split
from cpvt_pyramid.app.data.defects import Defects, Problem
from cpvt_pyramid.app.data.images import ALL, HEADERS, NAMES, inspect, shown_image
from cpvt_pyramid.app.data.layouts.coco import parse_coco, read_coco
from cpvt_pyramid.app.images.rasters import ReadError
from cpvt_pyramid.app.predictions.average_precision import coco_with_index
from cpvt_pyramid.app.tooling.command import UserError

SCENES = [scene(i, name) for i, name in enumerate(('a', 'b', 'c ä', 'd'))]
TURNED = Image.Exif()
TURNED[0x0112] = 6


def picture(path: Path, mode: str = 'RGB', size=SIZE, **options) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(noise).convert(mode).save(path, **options)


@pytest.fixture
def coco(tmp_path):
    """A folder with a.jpg to d.jpg, and the content of a COCO file for them."""
    fill(tmp_path, SCENES, '{}.jpg')
    return tmp_path, coco_content(SCENES, '{}.jpg')


def check_file(
    path: Path, folder: Path, masks: bool = False, how=ALL
) -> tuple[dict, list[Problem]]:
    """The content of a COCO file without what has errors, and the problems."""
    content = read_coco(path)
    found = Defects(masks=masks, as_it_is=True)
    classes = [category['name'] for category in content['categories']]
    split = parse_coco(content, Split([], folder, path), classes, found)
    good = checked_split('train', split, classes, None, how, found)
    return coco_of_split(good, classes), found.problems()


def found(folder: Path, content: object, **options) -> tuple[dict, list[Problem]]:
    (folder / 'coco.json').write_text(json.dumps(content))
    return check_file(folder / 'coco.json', folder, **options)


NOT_COCO = (
    '',
    '[' * 100_000,
    '{"images": [{"id": 1',
    '[1, 2]',
    '{"images": [{}], "annotations": []}',
    '{"images": [], "annotations": [], "categories": []}',
    '{"images": [3], "annotations": [], "categories": []}',
    '{"images": [{}], "annotations": [], "categories": [{"id": 1}]}',
    '{"images": [{}], "annotations": [], "categories": '
    '[{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]}',
)


def test_not_a_coco_file(tmp_path):
    with pytest.raises(UserError, match='cannot read'):
        check_file(tmp_path / 'coco.json', tmp_path)
    for text in NOT_COCO:
        (tmp_path / 'coco.json').write_text(text)
        with pytest.raises(UserError, match='coco.json'):
            check_file(tmp_path / 'coco.json', tmp_path)


def change(record: str, index: int, **values):
    """Set fields of a record; `...` deletes one."""

    def apply(folder, content):
        for name, value in values.items():
            content[record][index][name] = value
            if value is ...:
                del content[record][index][name]

    return apply


def cut(name: str):
    return lambda folder, *_: os.truncate(folder / name, (folder / name).stat().st_size // 2)


DEFECTS = [  # what is done, the problem, its item, and how many images and annotations are left
    (change('annotations', 2, bbox=None), 'no bbox of 4 finite', 'annotation 3 of b', 4, 7),
    (change('annotations', 2, bbox=[1, 2, 3]), 'no bbox of 4 finite', 'b.jpg', 4, 7),
    (change('annotations', 2, bbox=[3, 3, 10**400, 9]), 'no bbox of 4 finite', 'b.jpg', 4, 7),
    (change('annotations', 2, bbox=[1, 2, math.nan, 3]), 'no bbox of 4 finite', 'b.jpg', 4, 7),
    (change('annotations', 2, bbox=[9, 3, -4, 9]), 'a negative width or height', 'b.jpg', 4, 7),
    (change('annotations', 2, category_id=8), 'its category is not listed', 'b.jpg', 4, 7),
    (change('annotations', 2, category_id=[1]), 'its category is not listed', 'b.jpg', 4, 7),
    (change('annotations', 2, image_id=99), 'its image is not listed', 'annotation 3', 4, 7),
    (change('annotations', 2, id=1), 'an id of their own', 'annotation 1 of b.jpg', 4, 8),
    (change('annotations', 2, id=...), 'an id of their own', 'annotation 2 of b', 4, 8),
    (change('annotations', 2, area=...), '(an area)', 'annotation 3', 4, 8),
    (change('annotations', 2, iscrowd=-1), '(an iscrowd of 0 or 1)', 'annotation 3', 4, 8),
    (change('images', 1, width=...), 'no width and height', 'b.jpg', 3, 6),
    (change('images', 1, height=0), 'no width and height', 'b.jpg', 3, 6),
    (change('images', 1, width=81), 'another size than the width and height of', 'b.jpg', 3, 6),
    (change('images', 1, file_name=...), 'no file_name', 'image 1', 3, 6),
    (change('images', 1, id=0), 'id of another image', 'b.jpg', 3, 6),
    (change('images', 1, id='1'), 'no id of the type of', 'b.jpg', 3, 6),
    (change('images', 1, id=2**70), 'no id of the type of', 'b.jpg', 3, 6),
    (change('images', 1, file_name='x.jpg'), 'images that are missing', 'x.jpg', 3, 6),
    (lambda folder, _: os.truncate(folder / 'b.jpg', 0), 'not complete images', 'b.jpg', 3, 6),
    (cut('c ä.jpg'), 'images that are not complete', 'c ä.jpg', 3, 6),
    # mm turns the image, but not its boxes.
    (lambda folder, _: picture(folder / 'b.jpg', exif=TURNED), 'another size than', 'b.jpg', 3, 6),
    (change('annotations', 2, bbox=[3, 3, 0.5, 9]), 'warning: boxes narrower', 'b.jpg', 4, 8),
    (
        change('annotations', 2, bbox=[90, 3, 5, 9]),
        'warning: objects without an area',
        'b.jpg',
        4,
        8,
    ),
    (
        lambda _, content: content['annotations'].append({**content['annotations'][0], 'id': 9}),
        'warning: boxes that are there twice',
        'annotation 9 of a.jpg',
        4,
        9,
    ),
    (
        lambda _, content: content.update(annotations=content['annotations'][:6]),
        'warning: images without annotations',
        'd.jpg',
        4,
        6,
    ),
]


@pytest.mark.parametrize('apply, problem, item, images, annotations', DEFECTS)
def test_defects(coco, apply, problem, item, images, annotations):
    folder, content = coco
    apply(folder, content)
    good, problems = found(folder, content)
    first = problems[0]  # errors come first
    assert problem in first.lines[0] and item in str(first)
    assert first.is_error != problem.startswith('warning')
    clean = json.loads(json.dumps(good))
    assert (len(clean['images']), len(clean['annotations'])) == (images, annotations)
    assert not [p for p in found(folder, clean)[1] if p.is_error]


def test_objects_of_an_image_that_cannot_be_used(coco):
    """One line: the image is listed, and that it has no width says all."""
    folder, content = coco
    del content['images'][1]['width']
    _, problems = found(folder, content)
    assert [problem.head for problem in problems] == [
        'error: images that cannot be used (no width and height)'
    ]


@pytest.mark.parametrize(
    'mask, is_error',
    [
        (None, True),
        ([[1, 1, 5, 5]], True),
        ([[1, 1, 5, 5], [1, 1, 5, 1, 5, 5]], True),
        ([[58, 40, 64, 40, 64, 49], [1, 1, 5, 5]], False),
        ({'size': [60, 79], 'counts': [4740]}, True),
        ({'size': [60, 80], 'counts': 'XX0'}, True),
        ({'size': [60, 80], 'counts': [3, 4]}, True),
        ({'size': [60, 80], 'counts': '0'}, True),
    ],
)
def test_masks_that_training_cannot_use(coco, mask, is_error):
    """They are errors where masks are trained, else warnings; none at all is no defect there, and
    a short polygon after the first is left out by all. A good file has no problems; its iscrowd may
    be a boolean."""
    folder, content = coco
    rle = {'size': [60, 80], 'counts': [4792, 8]}
    content['annotations'][2].update(segmentation=rle, bbox=[79, 52, 1, 8], iscrowd=True)
    assert not found(folder, content, masks=True)[1]
    content['annotations'][3]['segmentation'] = mask
    _, problems = found(folder, content)
    assert [problem.is_error for problem in problems] == ([False] if mask and is_error else [])
    good, problems = found(folder, content, masks=True)
    assert [problem.is_error for problem in problems] == [True] * is_error
    assert all('annotation 4 of b' in str(problem) for problem in problems)
    assert len(good['annotations']) == 8 - is_error


BAD_MASKS = {
    'flat': [1, 1, 9, 1, 9, 9],
    'short': [[1, 1, 9, 9]],
    'nested': [[[1, 1], [9, 1], [9, 9]]],
    'empty': [],
    'of an empty polygon': [[]],
    'text': 'torn',
}


@pytest.mark.parametrize('mask', BAD_MASKS.values(), ids=BAD_MASKS)
@pytest.mark.parametrize('is_crowd', [0, 1])
def test_masks_that_the_evaluation_cannot_read(coco, mask, is_crowd):
    """Of validation data whose pipeline loads none; without them, it reads the rest."""
    folder, content = coco
    content['annotations'][2].update(segmentation=mask, iscrowd=is_crowd)
    (folder / 'coco.json').write_text(json.dumps(content))
    dataset = dict(type='CocoDataset', ann_file='coco.json', data_root=str(folder), pipeline=[])
    dataset['metainfo'] = dict(classes=CLASSES)
    settings = dict(default_scope='mmdet', val_dataloader=dict(dataset=dataset))
    for metric, is_error in (('bbox', False), (['bbox', 'segm'], True)):
        cfg = Config(settings | dict(val_evaluator=dict(type='CocoMetric', metric=metric)))
        problems = check_dataset(cfg, 'val', cfg.val_dataloader.dataset)
        assert any(problem.is_error for problem in problems) == is_error
    good, _ = found(folder, content, masks=True)
    truth = coco_with_index(good)
    results = [
        dict(image_id=a['image_id'], category_id=a['category_id'], score=0.5)
        | dict(segmentation=truth.annToRLE(a), bbox=a['bbox'])
        for a in truth.anns.values()
    ]
    evaluation = COCOeval(truth, truth.loadRes(results), 'segm')
    evaluation.evaluate()
    assert len(results) == 7


def test_masks_of_validation_data_in_a_new_config(tmp_path, capsys):
    layouts.coco_of_splits(tmp_path / 'data')
    path = tmp_path / 'data/annotations/instances_val2017.json'
    content = json.loads(path.read_text())
    content['annotations'][0]['segmentation'] = BAD_MASKS['flat']
    path.write_text(json.dumps(content))
    base, out = str(ROOT / 'configs/mask_rcnn_cpvt_s.py'), str(tmp_path / 'my.py')
    command = [str(tmp_path / 'data'), '--base', base, '--out', out]
    assert load_tool('new_config').main(command) == 2
    said = capsys.readouterr()
    assert 'that cannot be read (a polygon that is no list of pairs' in said.out
    assert said.err.endswith('; correct them, or leave out what has errors with --skip-bad\n')
    assert load_tool('new_config').main([*command, '--skip-bad']) == 0
    assert load_tool('check_data').main([out]) == 0


def test_missing_files_are_found_without_reading_images(coco):
    folder, content = coco
    (folder / 'a.jpg').unlink()
    cut('b.jpg')(folder)
    _, problems = found(folder, content, how=NAMES)
    assert [p.items for p in problems] == [['a.jpg']]


def test_headers_of_images(tmp_path):
    """They tell the size and the orientation; pixels are not decoded."""
    for name in ('a.png', 'a.tif', 'turned.jpg'):
        path = tmp_path / name
        options = {'exif': TURNED} if 'turned' in name else {}
        picture(path, **options)
        assert inspect(path)[0] == inspect(path, HEADERS)[0]
        os.truncate(path, path.stat().st_size // 2)
        size, problems = inspect(path, HEADERS)
        assert size == (SIZE[::-1] if options else SIZE)
        assert problems == [(defects.TURNED_IMAGE, '')] * len(options)
        assert [kind for kind, _ in inspect(path)[1]] == [defects.TORN_IMAGE]


# Label maps


MAP = 'labels/b.png'


@pytest.mark.parametrize(
    'apply, problem',
    [
        (lambda root: (root / MAP).unlink(), 'images without a segmentation mask'),
        (lambda root: picture(root / MAP, 'L', (60, 79)), 'of another size'),
        (lambda root: picture(root / MAP, 'RGBA'), 'several channels'),
        (cut(MAP), 'segmentation masks that training cannot read'),
        (cut('images/b.jpg'), 'images that are not complete'),
        (lambda root: Image.new('L', (80, 60), 4).save(root / MAP), 'values that have no name'),
    ],
)
def test_label_maps(apply, problem, tmp_path):
    fill(tmp_path, SCENES[:3], 'images/{}.jpg', label_map, 'labels/{}.png')
    data = Config(
        dict(type='BaseSegDataset', data_root=str(tmp_path), metainfo=dict(classes=CLASSES))
        | dict(data_prefix=dict(img_path='images', seg_map_path='labels'), reduce_zero_label=True)
    )
    cfg = Config(dict(default_scope='mmseg'))
    Image.new('L', (80, 60), 255).save(tmp_path / 'labels/c.png')  # ignored
    assert not [p for p in check_dataset(cfg, 'train', data) if p.is_error]
    apply(tmp_path)
    first = check_dataset(cfg, 'train', data)[0]
    assert problem in first.head and first.items[0].startswith('b.jpg')
    with pytest.raises(UserError, match='BaseSegDataset cannot be built: .*img_sufix'):
        check_dataset(cfg, 'train', Config(dict(data, img_sufix='.tiff')))
    data.update(img_suffix='.tiff')
    with pytest.raises(UserError, match='no images with the suffix .tiff; it has .jpg'):
        check_dataset(cfg, 'train', data)


# Configs


def test_train_and_test_with_bad_data(configs, tmp_path, capsys):
    """The training data have an image of another size and a bad box: they are refused, or what is
    good is used. So are metrics that read another file than the data set."""
    train, test = load_tool('train'), load_tool('test')
    cfg = load_config(configs['detector'])
    dataset, path = cfg.train_dataloader.dataset, tmp_path / 'train.json'
    content = json.loads(Path(dataset.data_root, dataset.ann_file).read_text())
    content['images'][0]['width'] += 1
    content['annotations'][-1]['bbox'][2] = math.nan
    path.write_text(json.dumps(content))
    dataset.ann_file = str(path)
    cfg.dump(tmp_path / 'config.py')
    run = [str(tmp_path / 'config.py'), '--cfg-options', 'train_cfg.max_epochs=1']
    evaluators = []
    for split in ('val', 'test'):
        run += [f'{split}_dataloader.dataset.ann_file={path}']
        run += [f'{split}_dataloader.dataset.data_prefix.img=train2017/']
        evaluators += [f'{split}_evaluator.ann_file={path}']
    assert train.main([*run, '--work-dir', str(tmp_path / 'a')]) == 2
    assert re.search('val_evaluator reads .* but the val data are', capsys.readouterr().err)
    run += evaluators
    assert train.main([*run, '--work-dir', str(tmp_path / 'a')]) == 2
    printed = capsys.readouterr()
    assert printed.out.count('data: error:') == 2  # of annotations alone
    assert 'cpvt check-data CONFIG reads all images' in printed.out
    assert printed.err.startswith('cpvt train: the data have the errors above; correct')
    assert printed.err.endswith(' leave out what has errors with cpvt new-config --skip-bad\n')
    assert '    annotation ' in (tmp_path / 'a/data_report.txt').read_text()
    torch.save({'state_dict': {}}, tmp_path / 'a.pth')
    run.insert(1, str(tmp_path / 'a.pth'))
    assert test.main([*run, '--work-dir', str(tmp_path / 'c')]) == 2
    line = 'cpvt test: the data have the errors above; correct them (cpvt check-data lists all of'
    assert capsys.readouterr().err.startswith(line)


# The report of check_data.py


def test_check_data_of_a_config_without_data(capsys):
    Path('a.py').write_text("model = dict(type='RetinaNet')\ndefault_scope = 'mmdet'")
    assert load_tool('check_data').main(['a.py']) == 2
    assert 'a.py has no data for train or val or test' in capsys.readouterr().err


@pytest.mark.parametrize(
    'options, said',
    [
        (['--cfg-options', 'a=1'], '--splits and --cfg-options need a config, got data'),
        (['--splits', 'test'], '--splits and --cfg-options need a config, got data'),
    ],
)
def test_check_data_of_a_folder(options, said, capsys):
    layouts.coco_of_splits(Path('data'))
    assert load_tool('check_data').main(['data', *options]) == 2
    assert capsys.readouterr().err == f'cpvt check-data: {said}\n'


def test_check_data(configs, sample_dataset, tmp_path, capsys):
    """With turned and broken images, and names with spaces."""
    root = tmp_path / 'my däta'
    shutil.copytree(sample_dataset / 'coco', root)
    path = root / 'annotations/instances_val2017.json'
    content = json.loads(path.read_text())
    spaced, turned, torn = content['images'][:3]
    (root / 'val2017' / spaced['file_name']).rename(root / 'val2017/a ü.jpg')
    spaced['file_name'] = 'a ü.jpg'
    with Image.open(root / 'val2017' / turned['file_name']) as image:
        image.rotate(90, expand=True).save(root / 'val2017' / turned['file_name'], exif=TURNED)
    (root / 'val2017' / torn['file_name']).write_bytes(b'torn')
    content['annotations'][-1]['bbox'][0] = math.nan
    path.write_text(json.dumps(content))
    assert load_tool('check_data').main([str(root), '--out-dir', 'report']) == 1
    said, report = capsys.readouterr().out, Path('report/data_report.txt').read_text()
    for problem, item in (
        ('warning: images that an EXIF tag turns', turned['file_name']),
        ('error: images that are not complete images', torn['file_name']),
        ('error: objects that cannot be used .no bbox of 4 finite numbers.', 'annotation '),
    ):
        assert re.search(rf'{problem}.*: {re.escape(item)}', said)
        assert len(re.findall(problem, said)) == 1
        assert re.search(problem, report) and f'    {item}' in report
    command = [str(configs['segmentor']), '--splits', 'train', '--out-dir', 'maps']
    assert load_tool('check_data').main(command) == 0
    assert ' data: ' not in capsys.readouterr().out
    assert not Path('maps/data_report.txt').exists()


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_classes_without_a_comma(name, configs, tmp_path):
    """metainfo=dict(classes=('red')) is a string, wherever classes are read; that of a file which
    lists them is none."""
    cfg = load_config(configs[name])
    dataset = cfg.val_dataloader.dataset
    dataset.metainfo.classes = 'red'
    message = r"got the string 'red'; .* a comma: \('red',\)"
    with pytest.raises(UserError, match=message):
        check_dataset(cfg, 'val', dataset)
    with pytest.raises(UserError, match=message):
        check_classes(cfg, torch.nn.Identity(), 'val')
    with pytest.raises(UserError, match=message):
        dataset_meta(cfg, {}, 'val')
    (tmp_path / 'classes.txt').write_text('red\nblue')
    dataset.metainfo.classes = str(tmp_path / 'classes.txt')
    assert dataset_meta(cfg, {}, 'val')['classes'] == ['red', 'blue']
    with pytest.raises(UserError, match="the checkpoint's classes must be a tuple or list"):
        dataset_meta(cfg, {'meta': {'dataset_meta': {'classes': 'red'}}}, 'val')


def test_pictures_of_bands():
    """A scene of five bands of 16 bits, stretched to be seen; a torn one is no image."""
    scene = np.random.default_rng(0).integers(0, 4000, (*SIZE, 5), np.uint16)
    shown = shown_image(save_tiff('scene.tif', scene))
    assert shown.shape == (*SIZE, 3) and shown.dtype == np.uint8
    assert np.corrcoef(shown[..., 0].ravel(), scene[..., 0].ravel())[0, 1] > 0.99
    os.truncate('scene.tif', 900)
    with pytest.raises(ReadError):
        shown_image(Path('scene.tif'))


# As training reads images


def test_images_that_exif_data_turn(tmp_path):
    """Readers agree on JPEG; where OpenCV does not turn WebP, boxes would lie beside objects."""
    for name, kind in (('a.webp', defects.OTHER_IMAGE), ('a.jpg', defects.TURNED_IMAGE)):
        picture(tmp_path / name, exif=TURNED)
        assert kind in dict(inspect(tmp_path / name)[1])


def test_objects_without_masks_where_others_have_one(tmp_path, capsys):
    layouts.coco_of_splits(tmp_path)
    path = tmp_path / 'annotations/instances_train2017.json'
    content = json.loads(path.read_text())
    del content['annotations'][2]['segmentation']
    path.write_text(json.dumps(content))
    assert load_tool('check_data').main([str(tmp_path)]) == 0
    said = 'warning: objects without a mask; an error for models of masks: annotation 3 of'
    assert said in capsys.readouterr().out


@pytest.mark.parametrize('evaluator, is_error', [(dict(format_only=True), False), ({}, True)])
def test_test_lists_without_annotations(coco, evaluator, is_error):
    folder, content = coco
    del content['annotations']
    (folder / 'a.json').write_text(json.dumps(content))
    dataset = dict(type='CocoDataset', data_root=str(folder), ann_file='a.json', pipeline=[])
    dataset |= dict(metainfo=dict(classes=CLASSES))
    metric = dict(type='CocoMetric', **evaluator)
    cfg = Config(dict(default_scope='mmdet', test_dataloader=dict(dataset=dataset)))
    cfg.test_evaluator = metric
    problems = check_dataset(cfg, 'test', cfg.test_dataloader.dataset)
    assert any(problem.is_error for problem in problems) == is_error
