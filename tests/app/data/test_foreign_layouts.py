"""Layouts as other tools export them: recognized, or a template to declare them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import layouts
import numpy as np
import pytest
from layouts import (
    CLASSES,
    MORE,
    SCENES,
    Scene,
    coco,
    coco_content,
    fill,
    label_map,
    voc,
    write,
    yolo,
)
from PIL import Image
from support import load_tool

from cpvt_pyramid.app.data.defects import Defects
from cpvt_pyramid.app.data.read import read_data
from cpvt_pyramid.app.data.recognize import describe
from cpvt_pyramid.app.tooling.command import UserError

NAMES = '\n'.join(CLASSES)
FOUR = '\n'.join(('ground', *CLASSES))
YAML = f'names: {list(CLASSES)}\n'


def ultralytics_segment(root: Path) -> None:
    for split, scenes in layouts.SPLITS:
        fill(root, scenes, f'images/{split}/{{}}.png', yolo, f'labels/{split}/{{}}.txt', 'polygon')
    write(
        root / 'coco8-seg.yaml',
        f'path: ../datasets/x\ntrain: images/train\nval: images/val\n{YAML}',
    )


def ultralytics_semantic(root: Path) -> None:
    for split, scenes in layouts.SPLITS:
        fill(root, scenes, f'images/{split}/{{}}.png', label_map, f'masks/{split}/{{}}.png')
    names = dict(enumerate(('ground', *CLASSES)))
    write(
        root / 'x.yaml', f'train: images/train\nval: images/val\nmasks_dir: masks\nnames: {names}'
    )


def only_train(root: Path) -> None:
    fill(root, SCENES, 'train/images/{}.png', yolo, 'train/labels/{}.txt')
    write(root / 'data.yaml', f'train: train/images\n{YAML}')


def val_is_train(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', yolo, 'labels/{}.txt')
    write(root / 'data.yaml', f'train: images\nval: images\n{YAML}')


def names_that_yaml_reads_otherwise(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', yolo, 'labels/{}.txt')
    write(root / 'data.yaml', "train: images\nval: images\nnames: [yes, 010, '12:30']")


def upper_case(root: Path) -> None:
    fill(root, SCENES, 'Train/Images/{}.PNG', yolo, 'Train/Labels/{}.TXT')
    fill(root, MORE, 'Valid/Images/{}.PNG', yolo, 'Valid/Labels/{}.TXT')
    write(root / 'classes.txt', NAMES)


def capital_classes(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', yolo, 'labels/{}.txt')
    write(root / 'Classes.txt', NAMES)


def decomposed_names(root: Path) -> None:
    for picture in SCENES:
        picture.write(root / f'images/Ko\u0308ln {picture.name}.png')
        yolo(root / f'labels/K\u00f6ln {picture.name}.txt', picture)
    write(root / 'classes.txt', NAMES)


def label_studio_yolo(root: Path) -> None:
    fill(root, SCENES, 'images/1a2b-{}.png', yolo, 'labels/1a2b-{}.txt')
    write(root / 'classes.txt', NAMES)
    write(root / 'notes.json', json.dumps({'categories': [{'id': 0, 'name': 'cat'}], 'info': {}}))


def label_studio_coco(root: Path) -> None:
    coco(root / 'result.json', SCENES, 'images\\{}.png')
    fill(root, SCENES, 'images/{}.png')


def label_studio_json(root: Path) -> None:
    fill(root, SCENES, '{}.png')
    write(root / 'project.json', json.dumps([{'annotations': [{'completed_by': 1}], 'data': {}}]))


def cvat_images(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png')
    write(root / 'annotations.xml', '<annotations><version>1.1</version></annotations>')


def cvat_masks(root: Path) -> None:
    fill(root, SCENES, 'JPEGImages/{}.png', label_map, 'SegmentationClass/{}.png', 'palette')
    fill(root, SCENES, 'JPEGImages/{}.png', label_map, 'SegmentationObject/{}.png', 'palette')
    rows = zip(('ground', *CLASSES), [(0, 0, 0), *layouts.COLORS.tolist()])
    table = ''.join(f'{name}:{r},{g},{b}::\n' for name, (r, g, b) in rows)
    write(root / 'labelmap.txt', f'# label:color_rgb:parts:actions\n{table}')
    write(root / 'ImageSets/Segmentation/default.txt', '000\n001\n002\n003')


def cvat_table_of_indices(root: Path) -> None:
    cvat_masks(root)
    for picture in SCENES:
        label_map(root / f'SegmentationClass/{picture.name}.png', picture)


def labelme_in_a_folder(root: Path) -> None:
    """As people have it: the images and their files, and the list of labels."""
    fill(root, SCENES, '{}.png', layouts.labelme, '{}.json')
    write(root / 'labels.txt', f'__ignore__\n_background_\n{NAMES}')


def labelme_of_windows(root: Path) -> None:
    """The files name images with another ending, in another folder."""
    fill(root, SCENES, 'images/{}.png')
    for picture in SCENES:
        image = f'..\\images\\{picture.name}.jpg'
        layouts.labelme(root / f'annotations/{picture.name}.json', picture, image)


def labelme_without_shapes(root: Path) -> None:
    fill(root, SCENES, '{}.png')
    for picture in SCENES:
        write(root / f'{picture.name}.json', '{"version": "5.0", "shapes": [], "imagePath": ""}')


def via(root: Path) -> None:
    fill(root, SCENES, '{}.png')
    write(root / 'via_project.json', '{"_via_settings": {}, "_via_img_metadata": {}}')


def via_table(root: Path) -> None:
    fill(root, SCENES, '{}.png')
    write(root / 'via.csv', 'filename,region_id,region_shape_attributes\n000.png,0,"{}"\n')


def supervisely(root: Path) -> None:
    fill(root, SCENES, 'ds0/img/{}.png')
    for picture in SCENES:
        write(root / f'ds0/ann/{picture.name}.png.json', '{"objects": [{"classTitle": "cat"}]}')


def create_ml(root: Path) -> None:
    fill(root, SCENES, '{}.png')
    boxes = [{'label': 'cat', 'coordinates': {'x': 1, 'y': 2, 'width': 3, 'height': 4}}]
    write(root / '_annotations.createml.json', json.dumps([{'image': 'a', 'annotations': boxes}]))


def table_of_boxes(root: Path) -> None:
    fill(root, SCENES, 'train/{}.png')
    write(root / 'train.csv', 'filename,xmin,ymin,xmax,ymax,class\n000.png,1,2,3,4,cat')


def captions(root: Path) -> None:
    fill(root, SCENES, '{}.png')
    for picture in SCENES:
        write(root / f'{picture.name}.txt', 'a cat on a mat')


def fiftyone_coco(root: Path) -> None:
    coco(root / 'labels.json', SCENES)
    fill(root, SCENES, 'data/{}.png')


def fiftyone_yolo(root: Path) -> None:
    for split, scenes in layouts.SPLITS:
        fill(root, scenes, f'images/{split}/{{}}.png', yolo, f'labels/{split}/{{}}.txt')
    write(
        root / 'dataset.yaml', f'path: {root}\ntrain: ./images/train/\nval: ./images/val/\n{YAML}'
    )


def roboflow_coco(root: Path) -> None:
    """With a super-category that is no class."""
    for split, scenes in (('train', SCENES), ('valid', MORE)):
        content = coco_content(scenes)
        for category in content['categories']:
            category['supercategory'] = 'animals'
        content['categories'].insert(0, {'id': 0, 'name': 'animals', 'supercategory': 'none'})
        write(root / f'{split}/_annotations.coco.json', json.dumps(content))
        fill(root, scenes, f'{split}/{{}}.png')


def roboflow_masks(root: Path) -> None:
    for split, scenes in (('train', SCENES), ('valid', MORE)):
        fill(root, scenes, f'{split}/{{}}.png', label_map, f'{split}/{{}}_mask.png')
        rows = ''.join(f'{value}, {name}\n' for value, name in enumerate(('ground', *CLASSES)))
        write(root / f'{split}/_classes.csv', f'Pixel Value, Class\n{rows}')


def two_json_files(root: Path) -> None:
    coco(root / 'first.json', SCENES)
    coco(root / 'second.json', SCENES)
    fill(root, SCENES, 'images/{}.png')


def list_of_test_images(root: Path) -> None:
    """COCO's list of test images has no annotations."""
    layouts.coco_of_splits(root)
    (root / 'annotations/instances_test2017.json').unlink()
    content = {k: v for k, v in coco_content(MORE).items() if k != 'annotations'}
    write(root / 'annotations/image_info_test2017.json', json.dumps(content))
    fill(root, MORE, 'test2017/{}.png')


def coco_and_yolo(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', yolo, 'labels/{}.txt')
    coco(root / 'all.json', SCENES)


def binary(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', label_map, 'masks/{}.png', 'binary')


def colors(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', label_map, 'masks/{}.png', 'colors')


def masks_of_each_class(root: Path) -> None:
    """One file of 0 and 255 for each class of an image."""
    fill(root, SCENES, 'images/{}.png')
    (root / 'masks').mkdir()
    for picture in SCENES:
        label_map(root / 'whole.png', picture)
        labels = np.array(Image.open(root / 'whole.png'))
        for label, name in enumerate(CLASSES, 1):
            mask = np.where(labels == label, 255, 0).astype(np.uint8)
            Image.fromarray(mask).save(root / f'masks/{picture.name}_{name}.png')
    (root / 'whole.png').unlink()


def two_kinds_of_masks(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    fill(root, SCENES, 'images/{}.png', label_map, 'labels/{}.png')
    write(root / 'classes.txt', FOUR)


def deep_masks(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png')
    for picture in SCENES:
        label_map(root / f'masks/{picture.name}.png', picture)
        labels = np.array(Image.open(root / f'masks/{picture.name}.png')).astype(np.uint16)
        Image.fromarray(labels).save(root / f'masks/{picture.name}.png')
    write(root / 'classes.txt', FOUR)


def linked(root: Path) -> None:
    store = root.parent / 'store'
    fill(store, SCENES, 'images/{}.png', yolo, 'labels/{}.txt')
    root.mkdir()
    os.symlink(store / 'images', root / 'images')
    os.symlink(store / 'labels', root / 'labels')
    write(root / 'classes.txt', NAMES)


def empty_validation(root: Path) -> None:
    fill(root, SCENES, 'train/images/{}.png', yolo, 'train/labels/{}.txt')
    (root / 'valid/images').mkdir(parents=True)
    write(root / 'data.yaml', f'train: train/images\nval: valid/images\n{YAML}')


def voc_next_to_images(root: Path) -> None:
    fill(root, SCENES, 'train/{}.png', voc, 'train/{}.xml')
    fill(root, MORE, 'test/{}.png', voc, 'test/{}.xml')


def voc_with_spaces(root: Path) -> None:
    scenes = [Scene(f'my photo {s.name}', s.boxes) for s in SCENES]
    fill(root, scenes, 'images/{}.png', voc, 'annotations/{}.xml')


def cityscapes_ids(root: Path) -> None:
    for split, scenes in layouts.SPLITS:
        for picture in scenes:
            name = f'{split}/bonn/bonn_{picture.name}_000019'
            picture.write(root / f'leftImg8bit/{name}_leftImg8bit.png')
            labels = np.where(picture.pixels[..., 0] > 100, 26, 7).astype(np.uint8)
            path = root / f'gtFine/{name}_gtFine_labelIds.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(labels).save(path)
            write(root / f'gtFine/{name}_gtFine_polygons.json', '{"objects": []}')


def coco_2017(root: Path) -> None:
    for split, scenes in layouts.SPLITS:
        coco(root / f'annotations/instances_{split}2017.json', scenes)
        coco(root / f'annotations/person_keypoints_{split}2017.json', scenes[:1])
        for picture in scenes:
            picture.write(root / f'{split}2017/{picture.name}.png')
    content = {**coco_content(SCENES, 'test_{}.png'), 'annotations': []}
    for name in ('test', 'test-dev'):
        write(root / f'annotations/image_info_{name}2017.json', json.dumps(content))
    for picture in SCENES:
        picture.write(root / f'test2017/test_{picture.name}.png')


def images_of_one_name(root: Path) -> None:
    for folder in ('first', 'second'):
        fill(root, SCENES, f'images/{folder}/{{}}.png')


def coco_of_images_of_one_name(root: Path) -> None:
    images_of_one_name(root)
    coco(root / 'train.json', SCENES)


def voc_of_images_of_one_name(root: Path) -> None:
    images_of_one_name(root)
    for picture in SCENES:
        voc(root / f'xml/{picture.name}.xml', picture)


def yolo_of_images_of_one_name(root: Path) -> None:
    images_of_one_name(root)
    for picture in SCENES:
        yolo(root / f'labels/{picture.name}.txt', picture)


def labels_in_two_folders(root: Path) -> None:
    fill(root, SCENES, 'pictures/{}.png', yolo, 'first/{}.txt')
    for picture in SCENES:
        yolo(root / f'second/{picture.name}.txt', picture)


def coco_of_splits_in_images(root: Path) -> None:
    for split, scenes in layouts.SPLITS:
        coco(root / f'annotations/instances_{split}2017.json', scenes)
        fill(root, scenes, f'images/{split}2017/{{}}.png')


def coco_of_named_files(root: Path) -> None:
    """A word that both files have says nothing."""
    for split, scenes in layouts.SPLITS:
        coco(root / f'cattle_{split}.json', scenes)
        fill(root, scenes, f'{split}/images/{{}}.png')


def yolo_in_a_project(root: Path) -> None:
    """As Roboflow's archive is unpacked."""
    layouts.yolo_of_roboflow(root / 'My-Project-1')
    write(root / 'My-Project-1/README.roboflow.txt', 'exported')


def darknet_of_roboflow(root: Path) -> None:
    for split, scenes in (('train', SCENES), ('valid', MORE)):
        fill(root, scenes, f'{split}/{{}}.png', yolo, f'{split}/{{}}.txt')
        write(root / f'{split}/_darknet.labels', NAMES)


def yolo_in_the_only_folders(root: Path) -> None:
    """One has the images, and one the texts."""
    fill(root, SCENES, 'frames/{}.png', yolo, 'boxes_yolo/{}.txt')
    write(root / 'classes.txt', NAMES)


def voc_of_pets(root: Path) -> None:
    fill(root, SCENES, 'images/{}.png', voc, 'annotations/xmls/{}.xml')


def voc_of_splits(root: Path) -> None:
    for split, scenes in layouts.SPLITS:
        fill(root, scenes, f'{split}/images/{{}}.png', voc, f'{split}/annotations/{{}}.xml')


def masks_of_camvid(root: Path) -> None:
    for split, scenes in layouts.SPLITS:
        fill(root, scenes, f'{split}/{{}}.png', label_map, f'{split}_labels/{{}}_L.png', 'colors')
    layouts.color_table(root, ('ground', *CLASSES), [(0, 0, 0), *layouts.COLORS.tolist()])


def masks_of_isic(root: Path) -> None:
    masks = 'ISIC_Training_GroundTruth/{}_segmentation.png'
    fill(root, SCENES, 'ISIC_Training_Input/{}.png', label_map, masks)
    write(root / 'classes.txt', FOUR)


def masks_of_loveda(root: Path) -> None:
    for split, scenes in (('Train', SCENES), ('Val', MORE)):
        masks = f'{split}/Urban/masks_png/{{}}.png'
        fill(root, scenes, f'{split}/Urban/images_png/{{}}.png', label_map, masks)
    write(root / 'classes.txt', FOUR)


def masks_in_the_only_folders(root: Path) -> None:
    fill(root, SCENES, 'original/{}.png', label_map, 'masks/{}.png')
    write(root / 'classes.txt', FOUR)


def masks_below_their_images(root: Path) -> None:
    fill(root, SCENES, '{}.png', label_map, 'masks/{}.png')
    write(root / 'classes.txt', FOUR)


def voc_with_lists_elsewhere(root: Path) -> None:
    layouts.voc_of_2007(root)
    (root / 'lists').mkdir()
    (root / 'VOC2007/ImageSets').rename(root / 'lists/ImageSets')
    shutil.rmtree(root / 'VOC2007/SegmentationClass')


@pytest.mark.parametrize('images', ['.', 'photos'])
def test_masks_of_listed_images(images, tmp_path, capsys):
    """As the template asks for where masks are below their images."""
    fill(tmp_path, SCENES, f'{images}/{{}}.png', label_map, 'masks/{}.png')
    write(tmp_path / 'train.txt', ''.join(f'{images}/{scene.name}.png\n' for scene in SCENES[:3]))
    settings = 'format: masks\ntrain: train.txt\nannotations: masks\n'
    write(tmp_path / 'data.yaml', f'{settings}names: [ground, cat, dog, owl]\n')
    assert load_tool('check_data').main([str(tmp_path)]) == 0
    assert 'train: 3 images' in capsys.readouterr().out


def test_a_folder_next_to_a_script_of_its_name_has_data(tmp_path):
    """Only what is written next to a config of `cpvt new-config` is left out."""
    root = tmp_path / 'project'
    fill(root, SCENES, 'my_data/images/{}.png', yolo, 'my_data/labels/{}.txt')
    write(root / 'my_data/classes.txt', NAMES)
    write(root / 'my.py', 'print("draws the images")')
    assert describe(root).settings['train'] == 'my_data/images'
    write(root / 'my.py', '# 3 classes (yolo). Written by cpvt new-config.')
    with pytest.raises(UserError):
        describe(root)


def test_a_description_that_was_written_into_the_folder(tmp_path):
    """Under a name of its own it is none of Ultralytics."""
    layouts.coco_of_splits(tmp_path)
    path = tmp_path / 'mine.yaml'
    assert load_tool('check_data').main([str(tmp_path), '--out', str(path)]) == 0
    assert describe(tmp_path).settings['format'] == 'coco'


DECLARED = {
    "Roboflow's": 'train: ../train/images\nval: ../valid/images\ntest: ../test/images\n',
    'a path that is elsewhere': 'path: ../datasets/mine\ntrain: train/images\nval: valid/images\n',
    'lists of another machine': 'train: train.txt\nval: [valid/images]\n',
    'an absolute path': 'path: {root}\ntrain: {root}/train/images\nval: valid/images\n',
    'a folder that is missing': 'train: pictures\nval: valid/images\n',
}


@pytest.mark.parametrize('name', DECLARED)
def test_a_yaml_file_is_read_as_its_folder(name, tmp_path):
    root = tmp_path / 'data'
    fill(root, SCENES, 'train/images/{}.png', yolo, 'train/labels/{}.txt')
    fill(root, MORE, 'valid/images/{}.png', yolo, 'valid/labels/{}.txt')
    write(root / 'train.txt', ''.join(f'/home/me/train/images/{s.name}.png\n' for s in SCENES))
    text = f'{DECLARED[name]}names: [cat, dog, owl]\nroboflow: {{license: MIT}}\n'
    write(root / 'data.yaml', text.replace('{root}', str(root)))
    if name == 'a folder that is missing':
        for source in (root, root / 'data.yaml'):
            with pytest.raises(UserError, match='train is pictures, which does not exist'):
                describe(source)
        return
    of_folder, of_file = describe(root), describe(root / 'data.yaml')
    assert of_file.notes == of_folder.notes
    assert of_file.description == of_folder.description._replace(source=of_file.source)
    found = read_data(of_file.description, Defects())
    assert [len(split.images) for split in found.splits.values()] == [4, 4]


def test_folders_that_are_declared_and_missing(tmp_path):
    """Their last part, which other folders have, too, does not stand for them."""
    fill(tmp_path, SCENES, 'images/train/{}.png', yolo, 'labels/train/{}.txt')
    fill(tmp_path, MORE, 'images/val/{}.png', yolo, 'labels/val/{}.txt')
    declared = 'train: ../train/images\nval: ../valid/images\nnames: [cat, dog, owl]\n'
    write(tmp_path / 'data.yaml', declared)
    for source in (tmp_path, tmp_path / 'data.yaml'):
        with pytest.raises(UserError, match=r'train is \.\./train/images, which does not exist'):
            describe(source)
    write(tmp_path / 'data.yaml', declared.replace('../train/images', 'images/train'))
    with pytest.raises(UserError, match=r'val is \.\./valid/images, which does not exist'):
        describe(tmp_path)


def test_a_path_that_is_declared_and_missing_is_said(tmp_path):
    fill(tmp_path, SCENES, 'images/train/{}.png', yolo, 'labels/train/{}.txt')
    write(tmp_path / 'data.yaml', 'path: ../mine\ntrain: images/train\nnames: [cat, dog, owl]\n')
    said = 'path is ../mine, which does not exist: paths are relative to the folder of data.yaml'
    assert said in describe(tmp_path).notes


@pytest.mark.parametrize('build', ['binary', 'colors'])
def test_a_template_is_complete_but_for_names(build, tmp_path, capsys):
    """Below the line, and in the file of --out; only the names are made up."""
    root, path = tmp_path / 'data', tmp_path / 'data.yaml'
    globals()[build](root)
    assert load_tool('check_data').main([str(root)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f'cpvt check-data: {root}: no file names the values or colours')
    assert printed.err.endswith('; write a data.yaml as below, and give it instead of the folder\n')
    assert printed.out.startswith('# Complete it') and '#   coco: a JSON file' in printed.out
    write(tmp_path / 'printed.yaml', printed.out)
    assert load_tool('check_data').main([str(root), '--out', str(path)]) == 2
    assert f'complete {path}, a template' in capsys.readouterr().err
    for template in (tmp_path / 'printed.yaml', path):
        assert load_tool('check_data').main([str(template)]) == 0
        assert 'train: 4 images' in capsys.readouterr().out


@pytest.mark.parametrize(
    'build, key, value',
    [
        ('two_json_files', 'annotations', {'train': 'first.json'}),
        ('coco_of_images_of_one_name', 'train', 'images/second'),
        ('labels_in_two_folders', 'annotations', 'second'),
        ('yolo_of_images_of_one_name', 'train', 'images/first'),
        ('voc_of_images_of_one_name', 'train', 'images/first'),
        ('two_kinds_of_masks', 'annotations', 'labels'),
    ],
)
def test_what_a_person_declares_is_read(build, key, value, tmp_path, capsys):
    """Whatever names leave open."""
    declared = {
        'two_json_files': 'format: coco\ntrain: images',
        'coco_of_images_of_one_name': 'format: coco\nannotations: {train: train.json}',
        'labels_in_two_folders': f'format: yolo\ntrain: pictures\n{YAML}',
        'yolo_of_images_of_one_name': f'format: yolo\nannotations: labels\n{YAML}',
        'voc_of_images_of_one_name': 'format: voc\nannotations: xml',
        'two_kinds_of_masks': 'format: masks\ntrain: images\nnames: [ground, cat, dog, owl]',
    }
    root, path = tmp_path / 'data', tmp_path / 'data.yaml'
    globals()[build](root)
    assert load_tool('check_data').main([str(root)]) == 2
    assert 'write a data.yaml as below' in capsys.readouterr().err
    write(path, f'path: data\n{declared[build]}\n{key}: {json.dumps(value)}\n')
    assert load_tool('check_data').main([str(path)]) == 0
    assert 'no errors' in capsys.readouterr().out


@pytest.mark.parametrize(
    'text, said',
    [
        ('val: images\nvalid: images', 'must have val or valid, and has both'),
        ('annotations: {traain: labels}', 'annotations must be of train, val, test, got traain'),
        ('lists: {tset: labels}', 'lists must be of train, val, test, got tset'),
        ('annotations: nowhere', 'annotations must be a folder, got nowhere'),
        ('lists: nowhere.txt', 'cannot read '),
    ],
)
def test_descriptions_with_mistakes(text, said, tmp_path, capsys):
    fill(tmp_path, SCENES, 'images/{}.png', yolo, 'labels/{}.txt')
    path = tmp_path / 'my.yaml'
    write(path, f'format: yolo\ntrain: images\n{YAML}{text}\n')
    assert load_tool('check_data').main([str(path)]) == 2
    printed = capsys.readouterr().err
    assert said in printed and len(printed.splitlines()) == 1


def test_ways_to_write_a_path(tmp_path, capsys):
    fill(tmp_path, SCENES, 'images/{}.png', yolo, 'texts/{}.txt')
    path = tmp_path / 'my.yaml'
    for images, annotations in (
        ('images', 'texts'),
        ('./images/', 'texts/'),
        (tmp_path / 'images', tmp_path / 'texts'),
    ):
        settings = f'format: yolo\ntrain: {images}\nannotations: {annotations}\n{YAML}nc: 9\n'
        write(path, settings)
        assert load_tool('check_data').main([str(path)]) == 0
        printed = capsys.readouterr().out
        assert 'train: 4 images, 8 objects' in printed


LAYOUTS: list[tuple[Callable, int, str]] = [  # exit status, and what is said
    (ultralytics_segment, 0, 'val: 4 images, 8 objects'),
    (ultralytics_semantic, 0, '4 classes: ground, cat, dog, owl'),
    (only_train, 0, 'train: 4 images, 8 objects'),
    (val_is_train, 0, 'warning: images that are in the training data, too'),
    (names_that_yaml_reads_otherwise, 0, '3 classes: yes, 010, 12:30'),
    (upper_case, 0, 'val: 4 images, 8 objects'),
    (decomposed_names, 0, 'train: 4 images, 8 objects'),
    (label_studio_yolo, 0, 'train: 4 images, 8 objects'),
    (label_studio_coco, 0, 'train: 4 images, 8 objects'),
    (label_studio_json, 2, 'has no data in a known layout'),
    (cvat_images, 2, 'has no data in a known layout'),
    (cvat_masks, 0, '4 classes: ground, cat, dog, owl'),
    (cvat_table_of_indices, 1, 'colours that are in no list'),
    (labelme_in_a_folder, 0, 'train: 4 images, 8 objects'),
    (labelme_of_windows, 0, 'train: 4 images, 8 objects'),
    (labelme_without_shapes, 2, 'has no objects and no names of classes'),
    (via, 2, 'has no data in a known layout'),
    (via_table, 2, 'has no data in a known layout'),
    (capital_classes, 0, '3 classes: cat, dog, owl'),
    (supervisely, 2, 'has no data in a known layout'),
    (create_ml, 2, 'has no data in a known layout'),
    (table_of_boxes, 2, 'has no data in a known layout'),
    (captions, 2, 'has no data in a known layout'),
    (fiftyone_coco, 0, 'train: 4 images, 8 objects'),
    (fiftyone_yolo, 0, 'val: 4 images, 8 objects'),
    (roboflow_coco, 0, '3 classes: cat, dog, owl'),
    (roboflow_masks, 0, 'val: 4 images'),
    (two_json_files, 2, 'several files can have the train data: first.json, second.json'),
    (list_of_test_images, 0, 'val: 4 images, 8 objects'),
    (coco_and_yolo, 2, 'has data in several formats, coco and yolo; choose one'),
    (binary, 2, 'no file names the values or colours of the masks'),
    (colors, 2, 'no file names the values or colours of the masks'),
    (masks_of_each_class, 2, 'merge files of one class each'),
    (two_kinds_of_masks, 2, 'the images in images have several masks, labels/*, masks/*'),
    (deep_masks, 0, '4 classes: ground, cat, dog, owl'),
    (linked, 0, 'train: 4 images, 8 objects'),
    (empty_validation, 1, 'error: splits without images'),
    (voc_next_to_images, 0, 'test: 4 images, 8 objects'),
    (voc_with_spaces, 0, 'train: 4 images, 8 objects'),
    (cityscapes_ids, 0, '19 classes: road, sidewalk'),
    (coco_2017, 0, 'val: 4 images, 8 objects'),
    (coco_of_splits_in_images, 0, 'val: 4 images, 8 objects'),
    (coco_of_named_files, 0, 'val: 4 images, 8 objects'),
    (yolo_in_a_project, 0, 'val: 4 images, 8 objects'),
    (darknet_of_roboflow, 0, 'val: 4 images, 8 objects'),
    (yolo_in_the_only_folders, 0, '3 classes: cat, dog, owl'),
    (voc_of_pets, 0, 'train: 4 images, 8 objects'),
    (voc_of_splits, 0, 'val: 4 images, 8 objects'),
    (masks_of_camvid, 0, 'val: 4 images'),
    (masks_of_isic, 0, '4 classes: ground, cat, dog, owl'),
    (masks_of_loveda, 0, 'val: 4 images'),
    (masks_in_the_only_folders, 0, '4 classes: ground, cat, dog, owl'),
    (masks_below_their_images, 2, 'has images, and so has masks below it'),
    (voc_with_lists_elsewhere, 2, 'no list in ImageSets next to VOC2007/JPEGImages'),
]


@pytest.mark.parametrize('asked, has_reason', [('yolo', False), ('masks', True)])
def test_a_format_that_a_folder_has_not(asked, has_reason, tmp_path, capsys):
    """What detectors and segmentors train on is said where it is the reason."""
    layouts.coco_of_splits(tmp_path)
    assert load_tool('check_data').main([str(tmp_path), '--format', asked]) == 2
    printed = capsys.readouterr().err
    assert f'has data in the format coco, but {asked} is asked for' in printed
    assert ('detectors train on objects' in printed) == has_reason


@pytest.mark.parametrize(
    'build, status, said', LAYOUTS, ids=lambda value: getattr(value, '__name__', '')
)
def test_layouts_of_other_tools(build, status, said, tmp_path, capsys):
    """What is recognized is also read from the description that is written."""
    root, path = tmp_path / 'data', tmp_path / 'data.yaml'
    build(root)
    assert load_tool('check_data').main([str(root), '--out', str(path)]) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    if status == 0:
        assert load_tool('check_data').main([str(path)]) == 0
        assert said in capsys.readouterr().out
