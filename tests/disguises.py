"""The sample data set in other layouts, with spaces and letters of several languages in names."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ['zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine']
COLORS = [(0, 0, 0), *[(20 * i, 255 - 25 * i, 60 + i) for i in range(10)]]


def records(sample: Path, split: str) -> Iterator[tuple[Path, dict, list[dict]]]:
    """Each image of a split of the sample data set: its file, its record, its annotations."""
    content = json.loads((sample / f'coco/annotations/instances_{split}2017.json').read_text())
    for image in content['images']:
        objects = [a for a in content['annotations'] if a['image_id'] == image['id']]
        yield sample / f'coco/{split}2017' / image['file_name'], image, objects


def yolo(sample: Path, root: Path, polygons: bool = False) -> Path:
    """images/ and labels/ with a data.yaml; the first object of an image is a polygon or a box."""
    for split in ('train', 'val'):
        for source, image, objects in records(sample, split):
            name = f'Bild ä {source.stem}'
            size = np.array([image['width'], image['height']])
            lines = []
            for a in objects:
                low, side = np.array(a['bbox'][:2]) / size, np.array(a['bbox'][2:]) / size
                values = [*(low + side / 2), *side]
                if polygons:
                    values = [
                        *low,
                        low[0] + side[0],
                        low[1],
                        *(low + side),
                        low[0],
                        low[1] + side[1],
                    ]
                lines.append(' '.join(map(str, [a['category_id'] - 1, *values])))
            for kind in ('images', 'labels'):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / 'images' / split / f'{name}.jpg')
            (root / 'labels' / split / f'{name}.txt').write_text('\n'.join(lines))
    (root / 'data.yaml').write_text(
        f'path: ../somewhere/else\ntrain: images/train\nval: images/val\nnc: 10\nnames: {CLASSES}\n'
    )
    return root


def voc(sample: Path, root: Path) -> Path:
    """Annotations/, JPEGImages/ and ImageSets/Main/."""
    for folder in ('Annotations', 'JPEGImages', 'ImageSets/Main'):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for split in ('train', 'val'):
        names = []
        for source, image, objects in records(sample, split):
            name = f'{split} 写真 {source.stem}'
            names.append(name)
            text = ''.join(
                f'<object><name>{CLASSES[a["category_id"] - 1]}</name><difficult>0</difficult>'
                f'<bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax>'
                f'<ymax>{y + h}</ymax></bndbox></object>'
                for a in objects
                for x, y, w, h in [a['bbox']]
            )
            shutil.copy(source, root / 'JPEGImages' / f'{name}.jpg')
            (root / 'Annotations' / f'{name}.xml').write_text(
                f'<annotation><filename>{name}.jpg</filename><size><width>{image["width"]}</width>'
                f'<height>{image["height"]}</height></size>{text}</annotation>'
            )
        (root / f'ImageSets/Main/{split}.txt').write_text('\n'.join(names))
    return root


def label_maps(sample: Path, split: str) -> Iterator[tuple[Path, np.ndarray]]:
    """Each image of a split and its map: 0 background, 1 to 10 digits."""
    ade, name = sample / 'ade/ADEChallengeData2016', {'train': 'training', 'val': 'validation'}
    for source in sorted((ade / 'images' / name[split]).iterdir()):
        labels = np.asarray(Image.open(ade / 'annotations' / name[split] / f'{source.stem}.png'))
        yield source, labels - 1


def mask_folders(sample: Path, root: Path, kind: str) -> Path:
    """images/ and masks/ without a split; `kind`: indexed, colors (with a list of them), binary."""
    for folder in ('images', 'masks'):
        (root / folder).mkdir(parents=True)
    for source, labels in label_maps(sample, 'train'):
        shutil.copy(source, root / 'images' / f'été {source.stem}.jpg')
        values = {
            'indexed': labels,
            'colors': np.array(COLORS, np.uint8)[labels],
            'binary': (255 * (labels > 0)).astype(np.uint8),
        }[kind]
        Image.fromarray(values).save(root / 'masks' / f'été {source.stem}.png')
    if kind == 'colors':
        rows = [f'{n},{r},{g},{b}' for n, (r, g, b) in zip(['ground', *CLASSES], COLORS)]
        (root / 'class_dict.csv').write_text('name,r,g,b\n' + '\n'.join(rows))
    return root
