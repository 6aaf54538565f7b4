"""Small data sets in every layout: pictures with objects, each in the colour of its class."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
from PIL import Image

CLASSES = ('cat', 'dog', 'owl')
COLORS = np.array([(200, 60, 0), (60, 200, 0), (0, 60, 200)], np.uint8)
SIZE = (60, 80)  # height and width


class Scene(NamedTuple):
    """A picture with objects at places of its own, each in the colour of its class."""

    name: str
    boxes: list[tuple[int, int, int, int, int]]  # class, x, y, width, height

    @property
    def pixels(self) -> np.ndarray:
        image = np.full((*SIZE, 3), 7, np.uint8)
        image[-2:, -2:] = len(self.name), ord(self.name[-1]), 0  # the files differ
        for label, x, y, width, height in self.boxes:
            image[y : y + height, x : x + width] = COLORS[label]
        return image

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(self.pixels).save(path)


def scene(number: int, name: str = '') -> Scene:
    random = np.random.default_rng(number)
    x, y, width, height = random.integers(3, (30, 20, 24, 18)).tolist()
    boxes = [(number % 3, x, y, width, height), ((number + 1) % 3, 58, 40, 5 + number, 9)]
    return Scene(name or f'{number:03d}', boxes)


SCENES = [scene(i) for i in range(4)]
MORE = [scene(4 + i, f'{i:03d}') for i in range(4)]  # others with the same names
FOREIGN = [scene(i, f'été 写真 {i}') for i in range(4)]
SPLITS = ('train', SCENES), ('val', MORE)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def coco_content(scenes: list[Scene], names: str = '{}.png') -> dict:
    """The content of a COCO file with a box and a polygon for each object."""
    size, images, annotations = {'height': SIZE[0], 'width': SIZE[1]}, [], []
    for number, picture in enumerate(scenes):
        images.append({'id': number, 'file_name': names.format(picture.name), **size})
        for label, x, y, width, height in picture.boxes:
            right, bottom = x + width, y + height
            annotations.append(
                {'id': len(annotations) + 1, 'image_id': number, 'category_id': label + 1}
                | {'bbox': [x, y, width, height], 'area': width * height, 'iscrowd': 0}
                | {'segmentation': [[x, y, right, y, right, bottom, x, bottom]]}
            )
    categories = [{'id': i, 'name': name} for i, name in enumerate(CLASSES, 1)]
    return {'images': images, 'annotations': annotations, 'categories': categories}


def coco(path: Path, scenes: list[Scene], names: str = '{}.png') -> None:
    write(path, json.dumps(coco_content(scenes, names)))


def yolo(path: Path, picture: Scene, form: str = 'box') -> None:
    lines = []
    for label, x, y, width, height in picture.boxes:
        corners = np.array([(x, y), (x + width, y), (x + width, y + height), (x, y + height)])
        corners = corners / SIZE[::-1]
        box = [*corners[[0, 2]].mean(0), *(corners[2] - corners[0])]
        lines.append(' '.join(map(str, [label, *(box if form == 'box' else corners.ravel())])))
    write(path, '\n'.join(lines))


def voc(path: Path, picture: Scene, filename: str = '', folder: str = '') -> None:
    objects = ''.join(
        f'<object><name>{CLASSES[label]}</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>'
        f'<xmax>{x + width}</xmax><ymax>{y + height}</ymax></bndbox></object>'
        for label, x, y, width, height in picture.boxes
    )
    size = '<size><width>80</width><height>60</height></size>'
    place = f'<folder>{folder}</folder><filename>{filename}</filename>'
    write(path, f'<annotation>{place}{size}{objects}</annotation>')


def labelme(path: Path, picture: Scene, image: str = '') -> None:
    """Polygons."""
    shapes = []
    for label, x, y, width, height in picture.boxes:
        right, bottom = x + width, y + height
        points = [[x, y], [right, y], [right, bottom], [x, bottom]]
        shape = {'label': CLASSES[label], 'points': points, 'group_id': None}
        shapes.append({**shape, 'shape_type': 'polygon', 'flags': {}})
    content = {'version': '5.5.0', 'flags': {}, 'shapes': shapes, 'imagePath': image}
    size = {'imageHeight': SIZE[0], 'imageWidth': SIZE[1]}
    write(path, json.dumps({**content, 'imageData': 'iVBORw0K', **size}))


def label_map(path: Path, picture: Scene, kind: str = 'indices') -> None:
    labels = np.zeros(SIZE, np.uint8)
    for label, x, y, width, height in picture.boxes:
        labels[y : y + height, x : x + width] = label + 1
    colors = np.concatenate([[(0, 0, 0)], COLORS])
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == 'binary':
        labels = np.where(labels, 255, 0).astype(np.uint8)
    image = Image.fromarray(colors[labels].astype(np.uint8) if kind == 'colors' else labels)
    if kind == 'palette':
        image.putpalette(colors.astype(np.uint8).tobytes())
    image.save(path)


def fill(
    root: Path,
    scenes: list[Scene],
    images: str,
    annotate: Optional[Callable] = None,
    annotations: str = '',
    *options: str,
) -> None:
    """Write images, and a file of annotations for each, to paths with {} for the name."""
    for picture in scenes:
        picture.write(root / images.format(picture.name))
        if annotate:
            annotate(root / annotations.format(picture.name), picture, *options)


# Valid layouts: by name, what is in a folder


def coco_of_splits(root: Path) -> None:
    """Both splits have images of the same names, and the test has no annotations."""
    for split, scenes in SPLITS:
        coco(root / f'annotations/instances_{split}2017.json', scenes)
        fill(root, scenes, f'{split}2017/{{}}.png')
    test = {**coco_content(MORE), 'annotations': []}
    write(root / 'annotations/instances_test2017.json', json.dumps(test))


def coco_of_roboflow(root: Path) -> None:
    for split, scenes in (('train', SCENES), ('valid', MORE)):
        coco(root / f'{split}/_annotations.coco.json', scenes)
        fill(root, scenes, f'{split}/{{}}.png')


def coco_of_subfolders(root: Path) -> None:
    """Names with folders, of the same files in each, as Windows writes them."""
    scenes = [s._replace(name=f'a/{s.name}') for s in SCENES]
    scenes += [s._replace(name=f'b/{s.name}') for s in MORE]
    content = json.dumps(coco_content(scenes, 'C:/my data/{}.png'))
    write(root / 'all.json', content.replace('/', '\\\\'))
    fill(root, scenes, 'images/{}.png')


def coco_with_copies(root: Path) -> None:
    """Next to the images, a copy of some, and drawn ones of some."""
    coco(root / 'labels.json', SCENES)
    fill(root, SCENES, 'images/{}.png')
    fill(root, SCENES[:2], 'backup/{}.png')
    fill(root, [scene(9, picture.name) for picture in SCENES[:2]], 'shown/{}.png')


def yolo_of_splits(root: Path) -> None:
    """With folders that data.yaml does not name, lonely label files, and results."""
    for split, scenes in (*SPLITS, ('test', MORE[:2])):
        fill(root, scenes, f'images/{split}/{{}}.png', yolo, f'labels/{split}/{{}}.txt')
    for picture in SCENES:
        yolo(root / f'backup/labels/{picture.name}.txt', picture)
        yolo(root / f'runs/detect/predict/labels/{picture.name}.txt', MORE[0])
        picture.write(root / f'runs/detect/predict/{picture.name}.png')
    for name, text in (
        ('data.yaml', f'train: images/train\nval: images/val\nnames: {list(CLASSES)}'),
        ('package.json', '{"images": 3}'),
        ('config.yaml', 'train:\n  lr: 3'),
        ('labels/README.txt', 'hello'),
    ):
        write(root / name, text)


def yolo_without_yaml(root: Path) -> None:
    yolo_of_splits(root)
    (root / 'data.yaml').unlink()
    write(root / 'classes.txt', '\n'.join(CLASSES))


def yolo_of_roboflow(root: Path) -> None:
    for split, scenes in (('train', SCENES), ('valid', MORE)):
        labels = f'{split}/labels/{{}}.txt'
        fill(root, scenes, f'{split}/images/{{}}.png', yolo, labels, 'polygon')
    write(
        root / 'data.yaml',
        'train: ../train/images\nval: ../valid/images\ntest: ../test/images\n'
        f'nc: 3\nnames: {dict(enumerate(CLASSES))}',
    )


def yolo_of_darknet(root: Path) -> None:
    fill(root, FOREIGN, 'obj_train_data/{}.png', yolo, 'obj_train_data/{}.txt')
    write(root / 'obj.names', '\n'.join(CLASSES))
    write(root / 'obj.data', 'classes = 3\ntrain = data/train.txt\nnames = data/obj.names')
    write(root / 'train.txt', ''.join(f'data/obj_train_data/{s.name}.png\n' for s in FOREIGN))


def yolo_of_lists(root: Path) -> None:
    """Lists with paths of another machine."""
    for split, scenes in SPLITS:
        fill(root, scenes, f'images/{split}/{{}}.png', yolo, f'labels/{split}/{{}}.txt')
        lines = [f'/home/me/set/images/{split}/{picture.name}.png' for picture in scenes]
        write(root / f'{split}.txt', '\n'.join(lines))
    names = f'names: {list(CLASSES)}'
    write(root / 'my.yaml', f'path: /home/me/set\ntrain: train.txt\nval: val.txt\n{names}')


def voc_of_2007(root: Path) -> None:
    """With a list of a test whose annotations are not there, and maps of the same names."""
    root = root / 'VOC2007'
    for picture in SCENES:
        voc(root / f'Annotations/{picture.name}.xml', picture, f'{picture.name}.png')
    fill(root, [*SCENES, scene(8)], 'JPEGImages/{}.png')
    label_map(root / 'SegmentationClass/000.png', SCENES[0], 'palette')
    for split, names in (('train', '000\n001'), ('val', '002.png\n003'), ('test', '008')):
        write(root / f'ImageSets/Main/{split}.txt', names)
    write(root / 'ImageSets/Main/cat_train.txt', '000  1\n001 -1')


def voc_of_folders(root: Path) -> None:
    """Subfolders with the same names."""
    for place, scenes in (('a', SCENES), ('b', MORE)):
        fill(root, scenes, f'pictures/{place}/{{}}.png', voc, f'xml/{place}/{{}}.xml')


def voc_of_two_years(root: Path) -> None:
    """With the same names, and lists of their own."""
    for year, split, scenes in (('VOC2007', 'train', SCENES), ('VOC2012', 'val', MORE)):
        fill(root / year, scenes, 'JPEGImages/{}.png', voc, 'Annotations/{}.xml')
        names = '\n'.join(picture.name for picture in scenes)
        write(root / year / f'ImageSets/Main/{split}.txt', names)


def labelme_of_splits(root: Path) -> None:
    """Next to their images, with one that is not annotated; and in a folder of their own."""
    fill(root, SCENES, 'train/{}.png', labelme, 'train/{}.json')
    scene(8).write(root / 'train/008.png')
    fill(root, MORE, 'val/images/{}.png', labelme, 'val/json/{}.json')


def maps_of_folders(root: Path) -> None:
    """With images of a test without maps, and a picture that belongs to nothing."""
    for place, scenes in (('a', SCENES), ('b', MORE)):
        fill(root / place, scenes, 'images/{}.png', label_map, 'masks/{}.png')
    scene(8).write(root / 'test/images/1.png')
    scene(9).write(root / 'logo.png')


def maps_of_cityscapes(root: Path) -> None:
    for split, scenes in SPLITS:
        names = f'{split}/bonn/bonn_{{}}_000019_'
        images, maps = f'leftImg8bit/{names}leftImg8bit.png', f'gtFine/{names}gtFine_'
        fill(root, scenes, images, label_map, f'{maps}labelTrainIds.png')
        fill(root, scenes, images, label_map, f'{maps}color.png', 'colors')
        for picture in scenes:
            for kind, mode, value in (('labelIds', 'L', 26), ('instanceIds', 'I', 26001)):
                path = root / f'{maps}{kind}.png'.format(picture.name)
                Image.new(mode, SIZE[::-1], value).save(path)


def maps_of_mmseg(root: Path) -> None:
    for split, scenes in SPLITS:
        fill(root, scenes, f'img_dir/{split}/{{}}.png', label_map, f'ann_dir/{split}/{{}}.png')


def maps_of_mmseg_named(root: Path) -> None:
    maps_of_mmseg(root)
    write(root / 'classes.txt', '\n'.join(('ground', *CLASSES)))


def maps_of_voc(root: Path) -> None:
    fill(root, SCENES, 'JPEGImages/{}.png', label_map, 'SegmentationClass/{}.png', 'palette')
    for picture in SCENES:
        label_map(root / f'SegmentationObject/{picture.name}.png', scene(9), 'palette')
    write(root / 'ImageSets/Segmentation/train.txt', '000\n001')
    write(root / 'ImageSets/Segmentation/val.txt', '002\n003')


def maps_as_gif(root: Path) -> None:
    """With a palette of its own in each file."""
    fill(root, SCENES, 'train/{}.png', label_map, 'train_masks/{}_mask.gif', 'palette')
    color_table(root, ('ground', *CLASSES), [(0, 0, 0), *COLORS.tolist()])


def color_table(root: Path, names: tuple[str, ...], colors: list) -> None:
    text = ''.join(f'{name},{r},{g},{b}\n' for name, (r, g, b) in zip(names, colors))
    write(root / 'class_dict.csv', f'name,r,g,b\n{text}')


def maps_in_colors(root: Path) -> None:
    fill(root, FOREIGN, '{}_sat.png', label_map, '{}_mask.png', 'colors')
    color_table(root, ('ground', *CLASSES), [(0, 0, 0), *COLORS.tolist()])


def maps_in_gray(root: Path) -> None:
    """0 and 255 for background and foreground."""
    fill(root, SCENES, 'images/{}.png', label_map, 'masks/{}.png', 'binary')
    color_table(root, ('background', 'foreground'), [(0, 0, 0), (255, 255, 255)])


VALID = {  # by layout: the number of training and validation images
    coco_of_splits: (4, 4),
    coco_of_roboflow: (4, 4),
    coco_of_subfolders: (7, 1),
    coco_with_copies: (3, 1),
    yolo_of_splits: (4, 4),
    yolo_without_yaml: (4, 4),
    yolo_of_roboflow: (4, 4),
    yolo_of_darknet: (3, 1),
    yolo_of_lists: (4, 4),
    voc_of_2007: (2, 2),
    voc_of_folders: (7, 1),
    voc_of_two_years: (4, 4),
    labelme_of_splits: (4, 4),
    maps_of_folders: (7, 1),
    maps_of_cityscapes: (4, 4),
    maps_of_mmseg: (4, 4),
    maps_of_mmseg_named: (4, 4),
    maps_of_voc: (2, 2),
    maps_as_gif: (3, 1),
    maps_in_colors: (3, 1),
    maps_in_gray: (3, 1),
}
