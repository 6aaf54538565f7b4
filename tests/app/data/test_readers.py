"""What the readers of each format make of odd but valid data, and say about mistakes."""

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CLASSES, MORE, SCENES, SIZE, fill, label_map, scene, voc, write, yolo
from mmengine.config import Config
from PIL import Image
from pycocotools import mask as coco_masks
from support import ROOT, load_tool

from cpvt_pyramid.app.data.check import checked_data
from cpvt_pyramid.app.data.config_data import check_dataset
from cpvt_pyramid.app.data.data import DataImage, DataSet, ImageObject, Split, coco_of_split
from cpvt_pyramid.app.data.datasets import without_validation
from cpvt_pyramid.app.data.defects import Defects
from cpvt_pyramid.app.data.description import Description, SplitPart
from cpvt_pyramid.app.data.files import Folder
from cpvt_pyramid.app.data.folders import image_places
from cpvt_pyramid.app.data.images import HEADERS
from cpvt_pyramid.app.data.listing import Listing
from cpvt_pyramid.app.data.lists import images_of_part
from cpvt_pyramid.app.data.new_config import new_config
from cpvt_pyramid.app.data.read import read_data
from cpvt_pyramid.app.data.recipes import Scales
from cpvt_pyramid.app.data.recognize import NotDeclared, describe
from cpvt_pyramid.app.images.label_maps import read_label_map
from cpvt_pyramid.app.tooling.command import UserError

DETECTOR = ROOT / 'configs/demo/pages_retinanet_cpvt_nano.py'
SEGMENTOR = ROOT / 'configs/demo/pages_semantic_fpn_cpvt_nano.py'


OBJECTS = 'coco', 'yolo', 'voc'


def data_in(root: Path, formats: tuple[str, ...]) -> tuple[Any, list[str]]:
    """What is read of a folder or a data.yaml, and the problems."""
    described = describe(root, formats)
    found = Defects()
    data = read_data(described.description, found)
    checked = checked_data(data, HEADERS, found)
    notes = [*described.notes, *checked.notes]
    return checked._replace(notes=notes), list(map(str, found.problems()))


def objects_in(root: Path) -> tuple[DataSet, list[str]]:
    return data_in(root, OBJECTS)


def maps_in(root: Path, names: str = '') -> tuple[DataSet, list[str]]:
    """Those of a folder; or, with the names of the values, those of its data.yaml."""
    if not names:
        return data_in(root, ('masks',))
    path = root.parent / f'{root.name}.yaml'
    load_tool('check_data').main([str(root), '--format', 'masks', '--out', str(path)])
    template = path.read_text()
    assert template.count('\nnames:\n') == 1
    write(path, f'{template.partition("names:")[0]}names: {names}\n')
    return data_in(path, ('masks',))


def counts(found: DataSet) -> dict[str, tuple[int, int]]:
    """The number of images and objects of each split."""
    return {key: (len(split.images), len(split.objects)) for key, split in found.splits.items()}


def trained(found: DataSet) -> dict[str, Any]:
    """The content of a COCO file with the training data."""
    return coco_of_split(found.splits['train'], found.classes)


@pytest.fixture
def coco(tmp_path):
    """A folder with four images, and the content of a COCO file for them."""
    fill(tmp_path, SCENES, 'images/{}.png')
    return tmp_path, layouts.coco_content(SCENES)


# COCO


@pytest.mark.parametrize('place', ['category', 'attribute', 'description'])
def test_coco_with_the_word_caption(place, coco):
    """Files of captions and of panoptic segments have other annotations, and are not used."""
    root, content = coco
    if place == 'category':
        content['categories'][0].update(name='caption', supercategory=['page'])
    elif place == 'attribute':
        content['annotations'][0]['attributes'] = {'caption': '', 'segments_info': []}
    else:
        content['info'] = {'description': 'caption'}
    write(root / 'instances.json', json.dumps(content))
    captions = [3, {'id': 1, 'image_id': 0, 'caption': 'a cat'}]
    segments = [{'image_id': 0, 'file_name': '0.png', 'segments_info': []}]
    for name, annotations in (('captions', captions), ('panoptic', segments)):
        write(root / f'{name}.json', json.dumps({**content, 'annotations': annotations}))
    found, problems = objects_in(root)
    assert counts(found) == {'train': (4, 8)} and not problems


@pytest.mark.parametrize('name', ['images', 'annotations'])
def test_coco_of_a_split_that_is_empty(name, tmp_path):
    """It is not left out: that would be a data set of validation data alone, without errors."""
    layouts.coco_of_splits(tmp_path)
    path = tmp_path / 'annotations/instances_train2017.json'
    write(path, json.dumps(json.loads(path.read_text()) | {'annotations': [], name: []}))
    if name == 'images':
        with pytest.raises(UserError, match='instances_train2017.json has no images'):
            objects_in(tmp_path)
    else:
        assert 'error: data without annotations that count' in objects_in(tmp_path)[1][0]


def test_coco_whose_objects_have_no_boxes(tmp_path):
    layouts.coco_of_splits(tmp_path)
    path = tmp_path / 'annotations/instances_train2017.json'
    write(path, path.read_text().replace('"bbox"', '"box"'))
    notes = objects_in(tmp_path)[0].notes
    assert 'annotations/instances_train2017.json is left out: it has no boxes' in notes


def test_coco_with_a_byte_order_mark(coco):
    """pycocotools does not read it."""
    root, content = coco
    path = root / 'instances_train.json'
    path.write_text(json.dumps(content), encoding='utf-8-sig')
    with pytest.raises(UserError, match='instances_train.json begins with a byte order mark'):
        objects_in(root)


def test_coco_with_half_a_character(coco):
    """Python reads it, and cannot print it."""
    root, content = coco
    content['images'][0]['file_name'] = '\ud800.png'
    write(root / 'all.json', json.dumps(content))
    with pytest.raises(UserError, match='all.json is not complete JSON: .*surrogates not allowed'):
        objects_in(root)


def test_coco_with_whole_numbers_as_floats(coco):
    """As pandas writes them."""
    root, content = coco
    for record in (*content['images'], *content['categories'], *content['annotations']):
        record.update({key: float(n) for key, n in record.items() if isinstance(n, int)})
    write(root / 'all.json', json.dumps(content))
    found, problems = objects_in(root)
    assert counts(found) == {'train': (4, 8)} and not problems
    content['annotations'][0]['image_id'] = 0.5
    write(root / 'all.json', json.dumps(content))
    assert '(its image is not listed)' in objects_in(root)[1][0]


def test_coco_of_lvis(coco):
    root, content = coco
    for image in content['images']:
        image['coco_url'] = 'http://images.cocodataset.org/val2017/' + image.pop('file_name')
    for annotation in content['annotations']:
        del annotation['iscrowd']
    write(root / 'lvis.json', json.dumps(content))
    (root / 'images').rename(root / 'val2017')
    found, (problem,) = objects_in(root)
    assert counts(found) == {'train': (4, 8)} and found.splits['train'].path is None
    assert problem.startswith('warning: objects that lack what OpenMMLab needs')
    assert problem.endswith(
        'iscrowd of 0 or 1): annotation 1 of val2017/000.png (lvis.json) and 7 more'
    )
    assert found.splits['train'].images[0].name == 'val2017/000.png'


def test_coco_without_areas_and_ids_from_0(coco):
    """pycocotools counts a detection of the object with the id 0 as wrong."""
    root, content = coco
    for number, annotation in enumerate(content['annotations']):
        annotation['id'] = number
        del annotation['area']
    path = root / 'all.json'
    write(path, json.dumps(content))
    found, problems = objects_in(root)
    assert found.splits['train'].path is None  # a copy is used
    assert len(problems) == 1 and 'in a copy (an area)' in problems[0]
    read = trained(found)['annotations']
    assert [a['id'] for a in read] == list(range(1, 9))
    assert all(a['area'] == a['bbox'][2] * a['bbox'][3] for a in read)
    for annotation in content['annotations']:
        del annotation['id']
    write(path, json.dumps(content))
    assert [a['id'] for a in trained(objects_in(root)[0])['annotations']] == [*range(1, 9)]


def test_coco_with_ids_of_two_types(coco):
    root, content = coco
    for annotation in content['annotations']:
        annotation['image_id'] = str(annotation['image_id'])
    write(root / 'all.json', json.dumps(content))
    kind = '(its image_id is a string where the ids of images are numbers, or the reverse)'
    assert kind in objects_in(root)[1][0]
    for image in content['images']:
        image['id'] = str(image['id'])
    write(root / 'all.json', json.dumps(content))
    assert counts(objects_in(root)[0]) == {'train': (4, 8)}


def test_images_are_in_one_folder(coco):
    """Without folders of another split; the only one that has most of them. If there are two, a
    data.yaml must say which."""
    root, content = coco
    path = root / 'train.json'
    write(path, json.dumps(content))
    fill(root, SCENES, 'val/images/{}.png')
    assert objects_in(root)[0].splits['train'].folder == root / 'images'
    fill(root, SCENES, 'copies/{}.png')
    several = (
        r'train images can be in several folders, copies \({0} images\), images \({0} images\)'
    )
    with pytest.raises(UserError, match=several.format(4)):
        objects_in(root)
    (root / 'copies/001.png').unlink()
    assert objects_in(root)[0].splits['train'].folder == root / 'images'
    (root / 'images/003.png').unlink()
    with pytest.raises(UserError, match=several.format(3)):
        objects_in(root)
    settings = 'format: coco\ntrain: copies\nannotations: {train: train.json}'
    write(root / 'data.yaml', settings)
    found, problems = objects_in(root)
    assert found.splits['train'].folder == root / 'copies'
    assert problems[0] == 'error: images that are missing: 001.png (train.json)'


def test_images_of_another_split_if_there_are_no_others(coco):
    """Two files can divide the images of one folder; but an image that is missing for training is
    not one of the validation data."""
    root, content = coco
    (root / 'images').rename(root / 'train')
    write(root / 'val.json', json.dumps(content))
    write(root / 'train.json', json.dumps(content))
    assert objects_in(root)[0].splits['val'].folder == root / 'train'
    fill(root, SCENES, 'val/{}.png')
    (root / 'train/000.png').unlink()
    found, problems = objects_in(root)
    assert [split.folder.name for split in found.splits.values()] == ['train', 'val']
    assert problems[0] == 'error: images that are missing: 000.png (train.json)'


def test_images_of_another_machine(coco):
    """Folders before the names are left out, as few as possible; those inside are kept."""
    root, content = coco
    fill(root, SCENES, 'images/a/{}.png')
    fill(root, SCENES, 'images/b/{}.png')
    for number, image in enumerate(content['images']):
        image['file_name'] = f'/home/me/{"ab"[number % 2]}/{image["file_name"]}'
    write(root / 'all.json', json.dumps(content))
    (root / 'images/a/000.png').unlink()
    found, problems = objects_in(root)
    names = [image.name for image in found.splits['train'].images]
    assert names == ['b/001.png', 'a/002.png', 'b/003.png']
    assert found.splits['train'].folder == root / 'images'
    assert problems[0] == 'error: images that are missing: /home/me/a/000.png (all.json)'


NFC, NFD = '\u00e9', 'e\u0301'
# Names of two images that are alike, and a third name that could mean both.
ALIKE = [('1.JPG', '1.jpg', '1.Jpg'), (f'{NFC}.png', f'{NFD}.png', None)]


@pytest.mark.parametrize(('first', 'second', 'third'), ALIKE)
def test_coco_names_that_are_alike(first, second, third, tmp_path):
    """Each object stays with the image that its record names exactly."""
    scenes = {first: SCENES[0], second: SCENES[1]}
    for name, picture in scenes.items():
        picture.write(tmp_path / 'images' / name)
    content = layouts.coco_content([s._replace(name=n) for n, s in scenes.items()], '{}')
    write(tmp_path / 'train.json', json.dumps(content))
    found, said = objects_in(tmp_path)
    assert not any('error' in line for line in said)
    for image, (name, picture) in zip(found.splits['train'].images, scenes.items()):
        assert image.name == name
        assert [item.box for item in image.objects] == [box[1:] for box in picture.boxes]
    if third:
        text = (tmp_path / 'train.json').read_text()
        write(tmp_path / 'train.json', text.replace(json.dumps(first), json.dumps(third)))
        _, said = objects_in(tmp_path)
        (line,) = [line for line in said if 'error' in line]
        assert (
            'names that mean several files' in line and f'images/{first}, images/{second}' in line
        )
        (tmp_path / 'images' / first).unlink()  # now the other one has both records
        _, said = objects_in(tmp_path)
        assert any(f'listed twice, each with a part of the objects: {second} (' in s for s in said)


@pytest.mark.parametrize('kind', ['maps', 'objects'])
def test_two_files_of_one_image_are_one_error(kind, tmp_path):
    """Not also that the image has none."""
    root = tmp_path / 'data'
    write(root / 'classes.txt', '\n'.join(('ground', *CLASSES)))
    if kind == 'maps':
        fill(root, SCENES[:2], 'images/{}.png', label_map, 'masks/{}.png')
        Image.open(root / 'masks/000.png').save(root / 'masks/000.gif')
        name, files, wanted = 'masks/000', 'masks/000.gif, masks/000.png', 'segmentation mask'
    else:
        fill(root, SCENES[:2], 'images/{}.png', yolo, 'labels/{}.Txt')
        write(root / 'labels/000.tXt', '')
        name, files, wanted = 'labels/000.txt', 'labels/000.Txt, labels/000.tXt', '.txt file'
    read = maps_in if kind == 'maps' else objects_in
    assert [line for line in read(root)[1] if '000' in line] == [
        'error: names that mean several files; keep one of the files, or give them names of their '
        f'own: {name} ({files})'
    ]
    (root / 'images/001.png').unlink()  # no other image has one
    line = f'no image has a {wanted} of its name alone; see the names above that mean several files'
    with pytest.raises(UserError, match=line):
        read(root)


def test_folders_that_are_alike(tmp_path):
    for folder, picture in ((NFC, SCENES[0]), (NFD, SCENES[1])):
        fill(tmp_path, [picture._replace(name='0')], f'{folder}/images/{{}}.png')
        yolo(tmp_path / folder / 'labels/0.txt', picture)
    write(
        tmp_path / 'data.yaml',
        f'format: yolo\ntrain: [{NFC}/images, {NFD}/images]\nnames: {list(CLASSES)}\n',
    )
    found, _ = objects_in(tmp_path)
    content = trained(found)
    for image, picture in zip(content['images'], SCENES):
        boxes = [a['bbox'] for a in content['annotations'] if a['image_id'] == image['id']]
        np.testing.assert_allclose(boxes, [box[1:] for box in picture.boxes], atol=0.02)


@pytest.mark.parametrize('value', ['0', '1', 'true', 'Unspecified'])
def test_voc_objects_that_are_difficult_in_other_words(value, tmp_path):
    fill(tmp_path, SCENES, 'images/{}.png', voc, 'annotations/{}.xml')
    path = tmp_path / 'annotations/000.xml'
    write(path, path.read_text().replace('</name>', f'</name><difficult>{value}</difficult>'))
    found, said = objects_in(tmp_path)
    ignored = [item for item in found.splits['train'].objects if item.is_ignored]
    assert len(ignored) == (2 if value == '1' else 0)
    assert any(f'annotations/000.xml ({value})' in line for line in said) == (value not in '01')


def test_voc_whose_image_has_a_file_of_its_own(tmp_path):
    """Another file that names it, as after a copy, is not used."""
    fill(tmp_path, SCENES, 'images/{}.png', voc, 'annotations/{}.xml')
    voc(tmp_path / 'annotations/copy.xml', SCENES[1], '000.png')
    found, (line,) = objects_in(tmp_path)
    assert counts(found) == {'train': (4, 8)}
    assert line == 'warning: files of annotations without an image: annotations/copy.xml'


@pytest.mark.parametrize('kind', ['masks', 'yolo', 'voc'])
@pytest.mark.parametrize('second', ['b/0.png', 'a/0.jpg'])
def test_annotations_that_images_share(second, kind, tmp_path):
    """One of the images has the annotations of the other."""
    images = ['a/0.png', 'a/1.png', second]
    for name in images:
        SCENES[0].write(tmp_path / name)
    ending, annotate = {
        'masks': ('png', label_map),
        'yolo': ('txt', yolo),
        'voc': ('xml', voc),
    }[kind]
    for number in range(2):
        annotate(tmp_path / f'given/{number}.{ending}', SCENES[0])
    folders = sorted({str(Path(name).parent) for name in images})
    names = ['ground', *CLASSES] if kind == 'masks' else list(CLASSES)
    settings = f'format: {kind}\ntrain: {folders}\nannotations: given\nnames: {names}\n'
    write(tmp_path / 'data.yaml', settings)
    _, said = data_in(tmp_path, (kind,))
    shared = f'given/0.{ending} (a/0.png, b/0.png)'
    if second == 'a/0.jpg':
        shared = f'given/0.{ending} (a/0.jpg, a/0.png)'
    assert any(line.startswith('error') and shared in line for line in said)


def test_masks_of_one_name(tmp_path):
    """Such as a picture of each mask next to it: which is which is not guessed."""
    for number in range(2):
        fill(tmp_path, [scene(number)], 'images/{}.jpg', label_map, 'masks/{}.png')
    fill(tmp_path, [scene(0)], 'masks/{}.tif')
    found, said = maps_in(tmp_path, '[ground, cat, dog, owl]')
    assert [image.name for image in found.splits['train'].images] == ['images/001.jpg']
    assert any('masks/000 (masks/000.png, masks/000.tif)' in line for line in said)
    assert not any('without an image' in line for line in said)


@pytest.mark.parametrize(
    ('lines', 'read', 'message'),
    [
        (['a/0.png'], ['a/0.png'], ''),
        (['a/0.jpg', 'b/1'], ['a/0.jpg', 'b/1.png'], ''),
        (['a/0', 'b/1'], ['b/1.png'], 'a/0 (a/0.jpg, a/0.png)'),
        (['1'], [], '1 (list.txt)'),
    ],
)
def test_lists_of_names_that_several_images_have(lines, read, message, tmp_path):
    images = ['a/0.png', 'a/0.jpg', 'a/1.png', 'b/1.png']
    for name in images:
        SCENES[0].write(tmp_path / name)
    (tmp_path / 'labels').mkdir()
    write(tmp_path / 'list.txt', '\n'.join(lines))
    part = SplitPart('.', 'labels', 'list.txt')
    folder, found = Folder(tmp_path), Defects()
    description = Description(tmp_path, 'yolo', {'train': [part]})
    assert images_of_part(folder, part, description, found) == read
    folder.report(found)
    assert [item for problem in found.problems() for item in problem.items] == [message] * bool(
        message
    )


def test_many_images_of_one_name(tmp_path):
    """None of which is where the file says: finding out takes no longer than reading it."""
    for number in range(2000):
        write(tmp_path / f'run_{number}/left.png', '')
    listing = Listing(tmp_path)
    start = time.monotonic()
    assert image_places(listing, [f'run{i}/left.png' for i in range(2000)]) is None
    assert time.monotonic() - start < 3  # not each with each
    names = [f'D:\\run_{i}\\left.png' for i in range(2000)]
    places = image_places(listing, names)
    assert places.counts == {'.': 2000} and places.prefix == 'D:'


def test_annotations_of_two_sites_with_the_same_names(tmp_path):
    """Folders say which images they belong to; without them, a data.yaml must."""
    for site in ('a', 'b'):
        fill(tmp_path / site, SCENES, 'pictures/{}.png', layouts.voc, 'xml/{}.xml')
    assert counts(objects_in(tmp_path)[0]) == {'train': (8, 16)}
    (tmp_path / 'a/xml').rename(tmp_path / 'c')
    shutil.rmtree(tmp_path / 'b/xml')
    with pytest.raises(NotDeclared, match='no folder of images belongs to c'):
        objects_in(tmp_path)


def test_coco_objects_that_mm_leaves_out(coco):
    """Without an area or to be ignored; if all are crowds, nothing is left."""
    root, content = coco
    content['annotations'][0]['area'] = 0
    content['annotations'][1]['ignore'] = 1
    write(root / 'all.json', json.dumps(content))
    assert objects_in(root)[1] == [
        'warning: objects with "ignore", which OpenMMLab leaves out: annotation 2 of 000.png '
        '(all.json)',
        'warning: objects without an area inside their image, of which training learns nothing: '
        'annotation 1 of 000.png '
        '(all.json)',
    ]
    for annotation in content['annotations']:
        annotation['iscrowd'] = 1
    write(root / 'all.json', json.dumps(content))
    assert '(all objects are crowds or difficult): all.json' in objects_in(root)[1][0]
    with pytest.raises(UserError, match='errors above that --skip-bad cannot leave out'):
        new_config(root, DETECTOR, root / 'x.py', skip_bad=True)


def test_coco_with_shares_instead_of_pixels(coco):
    """mm would leave out all objects."""
    root, content = coco
    for annotation in content['annotations']:
        left, top, width, height = annotation['bbox']
        annotation['bbox'] = [left / 80, top / 60, width / 80, height / 60]
    write(root / 'all.json', json.dumps(content))
    with pytest.raises(UserError, match='in pixels, but no number is above 1'):
        objects_in(root)


@pytest.mark.parametrize('form', ['polygon', 'runs', 'compressed'])
def test_coco_box_that_is_not_around_its_mask(form, coco):
    root, content = coco
    for annotation in content['annotations']:
        if form == 'polygon':
            break
        (polygon,) = annotation['segmentation']
        runs = coco_masks.frPyObjects([polygon], *SIZE)[0]
        if form == 'compressed':
            annotation['segmentation'] = {'size': [*SIZE], 'counts': runs['counts'].decode()}
        else:
            pixels = coco_masks.decode(runs).ravel('F')
            changes = np.flatnonzero(np.diff(pixels, prepend=0, append=0))
            counts = np.diff(changes, prepend=0, append=pixels.size)
            annotation['segmentation'] = {'size': [*SIZE], 'counts': counts.tolist()}
    content['annotations'][2]['bbox'][0] += 5
    content['annotations'][3]['bbox'][0] += 1  # rounding
    write(root / 'all.json', json.dumps(content))
    problem = 'warning: boxes that are not around their own masks: annotation 3 of 001.png'
    assert [p.partition(' (')[0] for p in objects_in(root)[1]] == [problem]


def test_classes_of_validation_data_that_training_data_lack(tmp_path):
    layouts.coco_of_splits(tmp_path)
    path = tmp_path / 'annotations/instances_val2017.json'
    write(path, path.read_text().replace('"cat"', '"Cat "'))
    found, problems = objects_in(tmp_path)
    assert problems == [
        "warning: classes with almost the same name: 'cat' and 'Cat '",
        'warning: classes without objects in the training data: Cat  (2 in the val data)',
    ]


def test_category_that_was_added_after_the_config(tmp_path):
    """Its objects are not trained: the check of a config names it."""
    layouts.coco_of_splits(tmp_path)
    path = tmp_path / 'annotations/instances_train2017.json'
    content = json.loads(path.read_text())
    content['categories'].append({'id': 9, 'name': 'yak'})
    content['annotations'][0]['category_id'] = 9
    content['annotations'][1]['category_id'] = 9
    write(path, json.dumps(content))
    files = dict(ann_file='annotations/instances_train2017.json', data_prefix=dict(img='train2017'))
    data = dict(type='CocoDataset', data_root=str(tmp_path), metainfo=dict(classes=CLASSES))
    cfg = Config(dict(default_scope='mmdet', train_dataloader=dict(dataset=data | files)))
    problem = check_dataset(cfg, 'train', cfg.train_dataloader.dataset)[0]
    assert not problem.is_error
    assert problem.items == ['yak (2 objects in instances_train2017.json)']


# YOLO


def darknet(root: Path) -> None:
    fill(root, SCENES[:3], 'obj_train_data/{}.png', yolo, 'obj_train_data/{}.txt')
    fill(root, [scene(8, 'v')], 'obj_train_data/{}.png', yolo, 'obj_train_data/{}.txt')
    fill(root, [scene(9, 'w')], 'obj_train_data/{}.png', yolo, 'obj_train_data/{}.txt')
    for name, images in (('train', ['000', '001', '002']), ('valid', ['v'])):
        text = ''.join(f'data/obj_train_data/{image}.png\n' for image in images)
        write(root / f'{name}.txt', text)
    write(root / 'my.names', '\n'.join(CLASSES))
    lines = 'classes = 3', 'train = data/train.txt', 'valid= data/valid.txt', 'names=my.names'
    write(root / 'obj.data', '\r\n'.join(lines))


def test_yolo_of_darknet_with_splits(tmp_path):
    darknet(tmp_path)
    found, problems = objects_in(tmp_path)
    assert counts(found) == {'train': (3, 6), 'val': (1, 2)} and not problems
    assert found.classes == list(CLASSES)


@pytest.mark.parametrize(
    'first, second, is_wrong',
    [
        ('train/labels', 'val/labels', True),
        ('', 'train', True),
        ('train', 'val', False),
    ],
)
def test_yolo_with_two_files_of_classes(first, second, is_wrong, tmp_path):
    """In another order; or the first ones of the other."""
    for split, scenes in layouts.SPLITS:
        fill(tmp_path, scenes, f'{split}/images/{{}}.png', yolo, f'{split}/labels/{{}}.txt')
    write(tmp_path / first / 'classes.txt', 'cat\ndog' + '\nowl' * is_wrong)
    write(tmp_path / second / 'classes.txt', 'dog\ncat\nowl' if is_wrong else 'cat\ndog\nowl\n')
    if is_wrong:
        with pytest.raises(UserError, match='classes.txt and .* number the classes differently'):
            objects_in(tmp_path)
    else:
        assert objects_in(tmp_path)[0].classes == list(CLASSES)


def test_yolo_with_an_empty_line_in_the_classes(tmp_path):
    layouts.yolo_without_yaml(tmp_path)
    write(tmp_path / 'classes.txt', '\ufeffcat\r\n\r\ndog\r\nowl\r\n\r\n')
    with pytest.raises(UserError, match='classes.txt: line 2 is empty'):
        objects_in(tmp_path)


def test_files_are_parsed_once(tmp_path, monkeypatch):
    layouts.yolo_of_splits(tmp_path)
    parsed = []
    load = yaml.load
    monkeypatch.setattr('yaml.load', lambda *given: parsed.append(given[0]) or load(*given))
    objects_in(tmp_path)
    assert len(parsed) == len({*parsed}) == 2  # config.yaml and data.yaml


def test_yolo_with_names_in_a_data_yaml_without_lists(tmp_path):
    layouts.yolo_without_yaml(tmp_path)
    (tmp_path / 'classes.txt').unlink()
    write(tmp_path / 'data.yaml', f'nc: 3\nnames: {list(CLASSES)}')
    found, _ = objects_in(tmp_path)
    assert found.classes == list(CLASSES) and counts(found)['train'] == (4, 8)


def test_yolo_with_gaps_in_its_labels(tmp_path):
    """Classes are those that have names; an object of another label is an error."""
    layouts.yolo_of_splits(tmp_path)
    expected, _ = objects_in(tmp_path)
    new_labels = {'0': '2', '1': '7', '2': '40'}
    for path in [*tmp_path.glob('labels/*/*.txt')]:
        rows = [line.split(' ', 1) for line in path.read_text().splitlines()]
        path.write_text('\n'.join(f'{new_labels[label]} {box}' for label, box in rows))
    declared = 'train: images/train\nval: images/val\n'
    write(tmp_path / 'data.yaml', declared + 'names: {40: owl, 7: dog, 2: cat}')
    found, problems = objects_in(tmp_path)
    assert found.classes == ['cat', 'dog', 'owl']
    assert trained(found) == trained(expected)
    assert not any('without a name' in problem for problem in problems)
    write(tmp_path / 'data.yaml', declared + 'names: {7: dog, 2: cat}')
    found, problems = objects_in(tmp_path)
    assert found.classes == ['cat', 'dog']
    (problem,) = (problem for problem in problems if 'without a name' in problem)
    assert 'class 40 in labels/train/' in problem and '(the names are 2, 7)' in problem


def test_yolo_with_images_in_other_folders(tmp_path):
    """Their labels are next to them; a list there names them relative to itself."""
    root = tmp_path / 'data'
    fill(root, SCENES, 'images/{}.png', yolo, 'labels/{}.txt')
    fill(tmp_path, MORE, 'other/images/{}.png', yolo, 'other/labels/{}.txt')
    write(tmp_path / 'other/list.txt', './images/000.png\nimages/001.png')
    names = f'names: {list(CLASSES)}'
    write(root / 'data.yaml', f'train: images\nval: ../other/images\n{names}')
    found, problems = objects_in(root)
    assert counts(found) == {'train': (4, 8), 'val': (4, 8)} and not problems
    write(root / 'data.yaml', f'train: images\nval: {tmp_path}/other/list.txt\n{names}')
    found, problems = objects_in(root)
    assert counts(found) == {'train': (4, 8), 'val': (2, 4)}
    assert all('label files without an image' in problem for problem in problems)


def test_yolo_with_another_order_than_data_yaml(tmp_path):
    layouts.yolo_of_splits(tmp_path)
    write(tmp_path / 'classes.txt', 'dog\ncat\nowl')
    notes = objects_in(tmp_path)[0].notes
    assert 'classes.txt has the classes in another order than data.yaml, which counts' in notes


def test_yolo_of_corners(tmp_path):
    """They are an error as in COCO files, if there are enough to be certain."""

    def corners(path: Path, picture: layouts.Scene) -> None:
        height, width = SIZE
        lines = [
            f'{label} {x / width} {y / height} {(x + w) / width} {(y + h) / height}'
            for label, x, y, w, h in picture.boxes
        ]
        write(path, '\n'.join(lines))

    fill(tmp_path, list(map(scene, range(9))), '{}.png', corners, '{}.txt')
    with pytest.raises(UserError, match='center x, center y, .* but these are x1, y1, x2, y2'):
        objects_in(tmp_path)


def test_yolo_poses(tmp_path):
    """data.yaml says it; only their boxes are used."""

    def pose(path: Path, picture: layouts.Scene) -> None:
        write(path, '0 0.25 0.3 0.16 0.1 0.2 0.3 1 0.22 0.3 0')

    fill(tmp_path, SCENES, 'images/{}.png', pose, 'labels/{}.txt')
    names = 'train: images\nval: images\nnames: [cat]\n'
    write(tmp_path / 'data.yaml', names + 'kpt_shape: [2, 3]')
    found, problems = objects_in(tmp_path)
    assert 'in the training data, too' in problems[0] and len(problems) == 1
    assert any('only the boxes are used' in note for note in found.notes)
    annotations = trained(found)['annotations']
    assert [a['bbox'] for a in annotations] == [[13.6, 15, 12.8, 6]] * 4


@pytest.mark.parametrize(
    'text, message',
    [
        ('train: images\nnames: {}', 'names must be a list of names, or number them'),
        ('train: images\nval: {}', 'data.yaml: val must be a path or a list of paths'),
        ('train: images\npath: {}', 'data.yaml: path must be a path'),
        ('train: images\nnames: {{1000000000000: cat}}', 'names must number the classes from 0'),
    ],
)
def test_yaml_bombs(text, message, tmp_path):
    """A few lines that stand for gigabytes, and numbers that stand for lists."""
    layouts.yolo_of_splits(tmp_path)
    levels = [f'l{n}: &l{n} [{", ".join([f"*l{n - 1}"] * 9)}]' for n in range(1, 9)]
    bomb = '\n'.join(['l0: &l0 [lol, lol]', *levels, text.format('*l8')])
    write(tmp_path / 'data.yaml', bomb)
    with pytest.raises(UserError, match=message) as raised:
        objects_in(tmp_path)
    assert len(str(raised.value)) < 400


def test_yolo_of_windows(tmp_path):
    """Backslashes and line ends; and a list of CreateML, which is no torn COCO file."""
    for split, scenes in layouts.SPLITS:
        fill(tmp_path, scenes, f'images/{split}/{{}}.PNG', yolo, f'labels/{split}/{{}}.txt')
    settings = 'train: images\\train\r\nval: images\\val\r\nnames: [cat, dog, owl]\r\n'
    write(tmp_path / 'data.yaml', settings)
    write(tmp_path / 'a.json', '[{"image": "000.PNG", "annotations": [{"label": "cat"}]}]')
    found, problems = objects_in(tmp_path)
    assert counts(found) == {'train': (4, 8), 'val': (4, 8)} and not problems
    for path in tmp_path.rglob('labels/*/*'):
        path.unlink()
    (tmp_path / 'data.yaml').unlink()
    with pytest.raises(NotDeclared):
        objects_in(tmp_path)


def test_voc_of_another_size_than_its_images(tmp_path):
    layouts.voc_of_folders(tmp_path)
    path = tmp_path / 'xml/a/000.xml'
    path.write_text(path.read_text().replace('<width>80', '<width>160'))
    assert 'with another size than their image: xml/a/000.xml' in objects_in(tmp_path)[1][-1]


@pytest.mark.parametrize('value', ['inf', 'nan', 'ten', ''])
def test_voc_with_numbers_that_are_none(value, tmp_path):
    layouts.voc_of_folders(tmp_path)
    path = tmp_path / 'xml/a/000.xml'
    path.write_text(re.sub('<xmax>[^<]*', f'<xmax>{value}', path.read_text()))
    problem, *others = objects_in(tmp_path)[1]
    assert problem.startswith('error: objects that cannot be used (no bndbox of 4 numbers)')
    assert not [other for other in others if other.startswith('error')]


def test_xml_of_other_tools(tmp_path):
    for picture in SCENES:
        layouts.voc(tmp_path / f'{picture.name}.xml', picture)
        picture.write(tmp_path / f'{picture.name}.png')
    path = tmp_path / '000.xml'
    path.write_text(path.read_text().replace('annotation>', 'Annotation>'))
    assert objects_in(tmp_path)[1] == [
        'error: files of annotations that cannot be read (the root is <Annotation>, not '
        '<annotation>): 000.xml'
    ]
    for path in tmp_path.glob('*.xml'):
        path.unlink()
    write(tmp_path / 'annotations.xml', '<annotations><version>1.1</version></annotations>')
    with pytest.raises(NotDeclared, match='has no data in a known layout'):
        objects_in(tmp_path)


def test_pipes_and_broken_links(tmp_path):
    """They are no files: reading a pipe would wait for ever."""
    layouts.coco_of_splits(tmp_path)
    os.mkfifo(tmp_path / 'pipe.json')
    os.mkfifo(tmp_path / 'train2017/pipe.png')
    (tmp_path / 'lost.json').symlink_to('nowhere.json')
    (tmp_path / 'self.json').symlink_to('self.json')
    found, problems = objects_in(tmp_path)
    assert counts(found) == {'train': (4, 8), 'val': (4, 8)} and not problems


def test_names_that_are_not_utf8(tmp_path, capsys):
    """No annotation and no config can have them."""
    layouts.voc_of_2007(tmp_path)
    for suffix in ('xml', 'png'):
        folder = tmp_path / 'VOC2007' / ('Annotations' if suffix == 'xml' else 'JPEGImages')
        shutil.copy(folder / f'000.{suffix}', os.fsencode(folder) + b'/\xff.' + suffix.encode())
    command = [str(tmp_path), '--base', str(DETECTOR), '--out', str(tmp_path / 'my.py')]
    assert load_tool('new_config').main(command) == 2
    printed = capsys.readouterr().err
    assert 'udcff.xml' in printed and printed.endswith('is not UTF-8; rename it\n')


# Masks

FOUR = '\n'.join(('ground', *CLASSES))


def soft_colors(path: Path, picture: layouts.Scene) -> None:
    label_map(path, picture, 'colors')
    mask = Image.open(path)
    mask.resize((27, 20), Image.Resampling.BILINEAR).resize(SIZE[::-1], 2).save(path)


def test_colors_need_a_table(tmp_path):
    root = tmp_path / 'data'
    fill(root, SCENES, 'images/{}.png', label_map, 'masks/{}.png', 'colors')
    with pytest.raises(UserError, match='no file names the values or colours of the masks'):
        maps_in(root)
    layouts.color_table(root, ('ground', *CLASSES), [(0, 0, 0), *layouts.COLORS.tolist()])
    found, problems = maps_in(root)
    assert found.classes == ['ground', *CLASSES] and not problems
    table = root / 'class_dict.csv'
    table.write_bytes(b'\xef\xbb\xbf' + table.read_bytes().replace(b'\n', b'\r'))
    assert maps_in(root)[0].classes == ['ground', *CLASSES]
    fill(root, SCENES[:1], 'images/{}.png', soft_colors, 'masks/{}.png')
    found, (problem,) = maps_in(root)
    assert 'colours that are in no list: ignored: images/000.png (' in problem
    colors = [(0, 0, 0), (1, 2, 3), (4, 5, 6), (7, 8, 9)]  # of which only black occurs
    layouts.color_table(root, ('ground', *CLASSES), colors)
    assert '(all colours but black are ignored)' in maps_in(root)[1][0]


@pytest.mark.parametrize(
    'values, names',
    [
        ([0, 255], '{0: class_0, 255: class_255}'),
        ([0, 85, 170], '{0: class_0, 85: class_85, 170: class_170}'),
        ([0, 1, 255], '{0: class_0, 1: class_1}'),
        ([0, 300], '{0: class_0, 300: class_300}'),
    ],
)
def test_values_are_named_by_the_user(values, names, tmp_path):
    """The template has the values that occur. Each value that a name is given to is a class, in
    this order, and its pixels are written so; 255 is ignored unless it has a name."""
    root = tmp_path / 'data'
    fill(root, SCENES, 'images/{}.png')
    (root / 'masks').mkdir()
    for picture in SCENES:
        labels = np.resize(values, SIZE).astype(np.uint16 if max(values) > 255 else np.uint8)
        Image.fromarray(labels).save(root / f'masks/{picture.name}.png')
    with pytest.raises(
        UserError, match='no file names the values or colours of the masks'
    ) as raised:
        maps_in(root)
    assert yaml.safe_load(raised.value.details)['names'] == yaml.safe_load(names)
    found, problems = maps_in(root, names)
    assert not problems and len(found.classes) == names.count('class')
    out = tmp_path / 'my.py'
    new_config(tmp_path / 'data.yaml', SEGMENTOR, out)
    cfg = Config.fromfile(out)
    dataset = cfg.train_dataloader.dataset
    masks = Path(cfg.data_root) / dataset.data_prefix.seg_map_path
    path = sorted(masks.rglob(f'*{dataset.seg_map_suffix}'))[0]
    ignored = {255} if 255 in values and 'class_255' not in names else set()
    assert {*np.unique(read_label_map(path).values)} == {*range(len(found.classes))} | ignored


@pytest.mark.parametrize(
    ('names', 'values', 'advice'),
    [
        ('[lesion]', [255], 'names: {0: background, 255: lesion}, or ignored: [255]'),
        ('[ground, lesion]', [255], 'names: {0: ground, 255: lesion}, or ignored: [255]'),
        ('{0: ground, 255: lesion}', [255], ''),
        ('[ground, lesion]\nignored: [255]', [255], ''),
        ('[ground, lesion]', [1, 255], ''),
        ('[ground, lesion]', [1], ''),
    ],
)
def test_masks_in_which_255_may_be_the_object(names, values, advice, tmp_path):
    for number, value in enumerate((*values, values[-1])):
        scene(number).write(tmp_path / f'images/{number}.png')
        mask = np.zeros(SIZE, np.uint8)
        mask[:9] = value
        (tmp_path / 'masks').mkdir(exist_ok=True)
        Image.fromarray(mask).save(tmp_path / f'masks/{number}.png')
    settings = 'format: masks\ntrain: images\nannotations: masks\n'
    write(tmp_path / 'data.yaml', f'{settings}names: {names}\n')
    _, said = maps_in(tmp_path)
    (line, *_) = [*(line for line in said if line.startswith('error')), '']
    assert line.endswith(advice) and bool(line) == bool(advice)


def test_masks_of_two_scales(tmp_path):
    root = tmp_path / 'data'
    fill(root, SCENES, 'images/{}.png', label_map, 'masks/{}.png', 'binary')
    for name in ('000', '001'):
        path = root / f'masks/{name}.png'
        Image.fromarray(np.array(Image.open(path)) // 255).save(path)
    problems = maps_in(root, '{0: ground, 255: object}')[1]
    words = 'segmentation masks with values that have no name and are not ignored'
    assert problems == [f'error: {words}: images/000.png (1), images/001.png (1)']


def test_masks_of_fractions(tmp_path):
    """They are no colours."""
    fill(tmp_path, SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    write(tmp_path / 'classes.txt', FOUR)
    path = tmp_path / 'masks/000.png'
    Image.fromarray(np.array(Image.open(path), np.float32)).save(path.with_suffix('.tif'))
    path.unlink()
    _, problems = maps_in(tmp_path)
    assert problems == [
        'error: segmentation masks that training cannot read as whole numbers; convert them: '
        'gdal_translate -ot Byte MASK NEW.png: images/000.png: its values are fractions'
    ]


@pytest.mark.parametrize('folder', ['masks', 'labels', 'gt_labels'])
@pytest.mark.parametrize('ending', ['png', 'jpg'])
def test_zero_is_ignored_in_all_splits_or_in_none(folder, ending, tmp_path):
    """Whatever the folder of the masks is called. Where validation images have two endings, mmseg
    cannot read their folder, and the masks of all splits are written as indices."""
    for split in ('train', 'val'):
        for number in range(2):
            images = tmp_path / 'data/images' / split
            is_other = split == 'val' and number == 1
            scene(number).write(images / f'{number}.{ending if is_other else "png"}')
            mask = tmp_path / 'data' / folder / split / f'{number}.png'
            mask.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full(scene(0).pixels.shape[:2], number + 1, np.uint8)).save(mask)
    write(
        tmp_path / 'data/data.yaml',
        'format: masks\ntrain: images/train\nval: images/val\n'
        f'annotations: {{train: {folder}/train, val: {folder}/val}}\n'
        'names: {1: road, 2: tree}\nignored: [0, 255]\n',
    )
    new_config(tmp_path / 'data/data.yaml', SEGMENTOR, tmp_path / 'my.py')
    cfg = Config.fromfile(tmp_path / 'my.py')
    for loader, number in ((cfg.train_dataloader, 0), (cfg.val_dataloader, 1)):
        dataset = loader.dataset
        assert dataset.reduce_zero_label == (ending == 'png')
        (loads,) = [step for step in dataset.pipeline if step.type == 'LoadAnnotations']
        assert loads.get('reduce_zero_label', False) == dataset.reduce_zero_label
        name = Path(dataset.ann_file).read_text().splitlines()[number]
        mask = Path(cfg.data_root, dataset.data_prefix.seg_map_path, name + dataset.seg_map_suffix)
        values = read_label_map(mask).values
        assert (values == number + dataset.reduce_zero_label).all()


def test_share_of_ignored_pixels(tmp_path, capsys):
    """It shows that 255 is taken for no class; if all are ignored, nothing can be learned."""
    fill(tmp_path, SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    write(tmp_path / 'classes.txt', FOUR)
    labels = np.full(SIZE, 255, np.uint8)
    labels[:, : SIZE[1] // 5] = 1
    Image.fromarray(labels).save(tmp_path / 'masks/000.png')
    assert load_tool('check_data').main([str(tmp_path)]) == 0
    assert '20.0% of all are ignored' in capsys.readouterr().out
    for picture in SCENES:
        Image.new('L', SIZE[::-1], 255).save(tmp_path / f'masks/{picture.name}.png')
    assert load_tool('check_data').main([str(tmp_path)]) == 1
    assert 'that count (all labels are ignored)' in capsys.readouterr().out


def test_images_that_pillow_finds_too_large(tmp_path, monkeypatch):
    """Training reads images with OpenCV, and masks with Pillow, whose limit is named."""
    fill(tmp_path, SCENES, 'images/{}.tif', label_map, 'masks/{}.png')
    write(tmp_path / 'classes.txt', FOUR)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', SIZE[0] * SIZE[1] // 2 - 1)
    _, problems = maps_in(tmp_path)
    assert len(problems) == 2
    for start in (
        'error: segmentation masks that training cannot read',
        'error: images that are too large to be read as a whole; cut them into tiles: images/000.',
    ):
        assert any(problem.startswith(start) for problem in problems)


@pytest.mark.parametrize('text', ['a,b\n1,' + 'x' * 200_000, 'größe\n1'.encode('latin-1')])
def test_tables_of_other_things_than_classes(text, tmp_path):
    """Of any encoding, with cells of any length; or the mean colours of the images."""
    fill(tmp_path, SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    write(tmp_path / 'classes.txt', FOUR)
    (tmp_path / 'notes.csv').write_bytes(text if isinstance(text, bytes) else text.encode())
    found, problems = maps_in(tmp_path)
    assert len(found.classes) == 4 and not problems
    (tmp_path / 'notes.csv').write_text('file,r,g,b\n000.png,1,2,3')
    assert not found.masks.are_colors and not maps_in(tmp_path)[0].masks.are_colors
    (tmp_path / 'notes.csv').write_text('name,r,g,b\n000.png,1,2,3')
    assert not maps_in(tmp_path)[0].masks.are_colors
    (tmp_path / 'colors.csv').write_text('name,r,g,b\n' + 'x' * 200_000 + ',1,2,3')
    with pytest.raises(UserError, match='colors.csv must be a table of classes: field larger'):
        maps_in(tmp_path)


@pytest.mark.parametrize('names', ['cat\ndog\nowl', 'cat'])
def test_maps_with_too_few_names(names, tmp_path):
    fill(tmp_path, SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    write(tmp_path / 'classes.txt', names)
    assert 'error: segmentation masks with values that have no name' in maps_in(tmp_path)[1][0]


def test_masks_of_which_none_can_be_used(tmp_path, capsys):
    """There are no shares of pixels to show."""
    fill(tmp_path, SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    write(tmp_path / 'classes.txt', FOUR)
    for path in (tmp_path / 'masks').iterdir():
        Image.new('L', (3, 3)).save(path)
    assert load_tool('check_data').main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert 'train: 0 images' in printed and 'pixels:' not in printed


def test_maps_that_are_0(tmp_path):
    """One of them may be background only; if all are, it is said."""
    fill(tmp_path, SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    write(tmp_path / 'classes.txt', FOUR)
    Image.new('L', SIZE[::-1]).save(tmp_path / 'masks/000.png')
    warning = 'warning: segmentation masks of nothing but 0 or ignored labels: images/000.png'
    assert maps_in(tmp_path)[1] == [warning]
    for path in (tmp_path / 'masks').iterdir():
        Image.new('L', SIZE[::-1]).save(path)
    problems = maps_in(tmp_path)[1]
    assert problems[1].endswith('with one label only: the masks of the train data: ground')
    data = dict(type='BaseSegDataset', data_root=str(tmp_path), metainfo=dict(classes=CLASSES))
    prefix = dict(img_path='images', seg_map_path='masks')
    data = Config(data | dict(data_prefix=prefix, img_suffix='.png'))
    problems = check_dataset(Config(dict(default_scope='mmseg')), 'train', data)
    assert 'with one label only' in problems[1].head and not problems[1].is_error


def test_names_of_images_like_those_of_label_maps(tmp_path):
    names = 'play_ground', 'on_target', 'a_gt', 'b_seg', 'a'
    scenes = [scene(i, name) for i, name in enumerate(names)]
    fill(tmp_path, scenes, 'images/{}.png', label_map, 'masks/{}.png')
    write(tmp_path / 'classes.txt', FOUR)
    found, problems = maps_in(tmp_path)
    assert not problems
    pairs = [(f'images/{name}.png', f'masks/{name}.png') for name in sorted(names)]
    images = found.splits['train'].images
    assert sorted((image.name, image.mask) for image in images) == sorted(pairs)


# new_config.py


def made(data: Path, base: Path, out: Path) -> int:
    return load_tool('new_config').main([str(data), '--base', str(base), '--out', str(out)])


@pytest.fixture(autouse=True)
def _unformatted(monkeypatch) -> None:
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))


@pytest.mark.parametrize('call', range(4))
def test_full_disk(call, tmp_path, monkeypatch, capsys):
    """At each file: one line, nothing is left, and the next call works."""
    root, out = tmp_path / 'data', tmp_path / 'x.py'
    layouts.yolo_of_splits(root)
    write_text = Path.write_text
    left = [call]

    def full(self: Path, *arguments, **options) -> int:
        left[0] -= 1
        if left[0] < 0:
            self.touch()
            raise OSError(errno.ENOSPC, 'No space left on device')
        return write_text(self, *arguments, **options)

    def no_copy(*paths: str) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device', paths[1])

    with monkeypatch.context() as patch:
        patch.setattr(Path, 'write_text', full)
        patch.setattr(shutil, 'copy2', no_copy)
        status = made(root, DETECTOR, out)
    printed = capsys.readouterr().err
    if status:
        assert printed.count('\n') == 1 and 'no space left on the disk' in printed
        assert [path.name for path in tmp_path.iterdir()] == ['data']
    assert bool(status) == (call < 3)  # train.json, val.json and the config
    if status:
        assert made(root, DETECTOR, out) == 0


def test_bases_and_arguments_that_do_not_fit(tmp_path, capsys):
    layouts.yolo_of_splits(tmp_path / 'boxes')
    layouts.maps_of_mmseg(tmp_path / 'maps')
    image = tmp_path / 'boxes/images/train/000.png'
    out = tmp_path / 'x.py'
    for data, base, said in (
        (tmp_path / 'boxes', SEGMENTOR, 'has data in the format yolo, but masks is asked for'),
        (
            tmp_path / 'maps',
            DETECTOR,
            'has data in the format masks, but coco or labelme or voc or yolo is asked for',
        ),
        (DETECTOR, tmp_path / 'boxes', 'the data and --base are swapped'),
        (tmp_path / 'boxes', tmp_path / 'boxes', '--base must be a config with the suffix .py'),
        (tmp_path / 'boxes', image, '--base must be a config with the suffix .py'),
        (image, DETECTOR, 'the data must be a folder or a data.yaml, got the file'),
    ):
        assert made(data, base, out) == 2
        printed = capsys.readouterr().err
        assert said in printed and printed.count('\n') == 1


@pytest.mark.skipif(not Path('/proc/self').exists(), reason='needs the folder /proc of Linux')
def test_folders_in_which_nothing_can_be_created(tmp_path, capsys):
    layouts.yolo_of_splits(tmp_path)
    assert made(tmp_path, DETECTOR, Path('/proc/x.py')) == 2
    said = 'cpvt new-config: cannot write to the folder /proc: No such file or directory\n'
    assert capsys.readouterr().err == said


def test_paths_of_configs(tmp_path, capsys):
    """The next command can be pasted; a refusal says which path it means."""
    layouts.yolo_of_splits(tmp_path / 'data')
    out = tmp_path / 'my data/a config.py'
    out.parent.mkdir()
    assert made(tmp_path / 'data', DETECTOR, out) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"next: cpvt check-data '{out}', then cpvt train '{out}'"
    assert "#   cpvt train 'a config.py'\n" in out.read_text()
    quoted = tmp_path / "it's mine/a.py"
    quoted.parent.mkdir()
    assert made(tmp_path / 'data', DETECTOR, quoted) == 2
    assert f'no quotes, braces and backslashes: {quoted}' in capsys.readouterr().err


def test_validation_images_are_drawn_of_those_with_and_without_objects():
    item = ImageObject(0, (1, 1, 5, 5), 25, 'a')
    ignored = item._replace(is_ignored=True)
    for with_objects, others in ((2, 0), (2, 9), (3, 40), (7, 1), (60, 40), (20_000, 5)):
        images = [DataImage(f'{i}', (60, 80), [item]) for i in range(with_objects)]
        images += [DataImage(f'no {i}', (60, 80), [ignored]) for i in range(others)]
        train, val = without_validation(Split(images, Path()))
        count = min(max(len(images) // 5, 1), 2000)
        assert len(val.images) == count and len(train.images) == len(images) - count
        of_val = sum(image.objects == [item] for image in val.images)
        assert 1 <= of_val < with_objects
        assert abs(of_val - count * with_objects / len(images)) < 1
    for few in ([], images[:1], images[:1] + images[-5:]):
        with pytest.raises(UserError, match='at least 2 training images with annotations'):
            without_validation(Split(few, Path()))


def test_names_that_mmengine_would_replace(tmp_path):
    layouts.yolo_without_yaml(tmp_path / 'data')
    write(tmp_path / 'data/classes.txt', 'cat\n{{ fileDirname }}\nowl')
    with pytest.raises(UserError, match='must not have {{, got'):
        new_config(tmp_path / 'data', DETECTOR, tmp_path / 'x.py')
    assert not (tmp_path / 'x.py').exists()


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
    layouts.coco_of_splits(tmp_path / 'data')
    content = layouts.coco_content(MORE)
    annotation = content['annotations'][0]
    content['annotations'] = [{**annotation, 'id': i} for i in range(1, 103)]
    write(tmp_path / 'data/annotations/instances_val2017.json', json.dumps(content))
    lines = new_config(tmp_path / 'data', DETECTOR, tmp_path / 'my.py')
    assert any('an image of the val data has 102 objects' in line for line in lines)


def test_a_data_set_in_the_current_folder(tmp_path, monkeypatch, capsys):
    """Its lines name the folder, not a dot."""
    monkeypatch.chdir(tmp_path)
    check_data = load_tool('check_data').main
    assert check_data(['.']) == 2
    assert capsys.readouterr().err == f'cpvt check-data: {os.getcwd()} is empty\n'
    fill(tmp_path, SCENES, '{}.png')
    assert check_data(['.']) == 2
    assert capsys.readouterr().err.startswith(f'cpvt check-data: {os.getcwd()} has no data')
    layouts.coco(tmp_path / 'found.json', SCENES)
    assert check_data(['.']) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f'{os.getcwd()}: coco'
    assert second == 'train: images in the folder itself, annotations in found.json'
