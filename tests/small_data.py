"""A small random data set: ellipses on smooth noise, each in the colour of its class.

    ROOT/coco/annotations/instances_{train,val}2017.json, ROOT/coco/{train,val}2017/*.jpg
    ROOT/ade/ADEChallengeData2016/{images,annotations}/{training,validation}/*, objectInfo150.txt

Both layouts have the same images. In the label maps 1 is background, and 2 to 11 are the classes.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask
from support import photograph

CLASSES = ('ant', 'bee', 'cat', 'dog', 'elk', 'fox', 'gnu', 'hen', 'ibis', 'jay')
ADE = 'ade/ADEChallengeData2016'
BACKGROUND = 1
COLORS = np.random.default_rng(0).integers(0, 256, (len(CLASSES), 3))


def write_small_data(root: Path, train: int, val: int) -> None:
    """Write the data set with some numbers of images into a new folder."""
    for seed, (split, ade_split, count) in enumerate(
        [('train', 'training', train), ('val', 'validation', val)]
    ):
        rng = np.random.default_rng(seed)
        folders = [
            root / f'coco/{split}2017',
            root / 'coco/annotations',
            root / ADE / 'images' / ade_split,
            root / ADE / 'annotations' / ade_split,
        ]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        coco_images, coco_annotations, ade_images, ade_annotations = folders
        images: list[dict] = []
        annotations: list[dict] = []
        for number in range(1, count + 1):
            pixels, labels, masks = draw_picture(rng, seed=100 * seed + number)
            path = coco_images / f'{number:012d}.jpg'
            Image.fromarray(pixels).save(path, quality=92)
            name = f'ADE_{split}_{number:08d}'
            shutil.copyfile(path, ade_images / f'{name}.jpg')
            Image.fromarray(label_map_of(labels, masks)).save(ade_annotations / f'{name}.png')
            height, width = pixels.shape[:2]
            images.append(dict(id=number, file_name=path.name, height=height, width=width))
            for label, mask in zip(labels, masks):
                annotation = dict(id=len(annotations) + 1, image_id=number, category_id=label + 1)
                annotations.append(annotation | fields_of(mask))
        content = dict(
            images=images,
            annotations=annotations,
            categories=[dict(id=i, name=name) for i, name in enumerate(CLASSES, 1)],
        )
        (coco_annotations / f'instances_{split}2017.json').write_text(json.dumps(content))
    lines = [f'{i}\t{name}' for i, name in enumerate(('background', *CLASSES), BACKGROUND)]
    (root / ADE / 'objectInfo150.txt').write_text('\n'.join(['Idx\tName', *lines, '']))


def draw_picture(
    rng: np.random.Generator, seed: int
) -> tuple[np.ndarray, list[int], list[np.ndarray]]:
    """An image (H, W, 3), and the classes and visible pixels (H, W) of one to six ellipses."""
    short, long = rng.integers((128, 200), (200, 320)).tolist()
    height, width = (short, long) if rng.random() < 0.5 else (long, short)
    pixels = photograph(height, width, seed)
    rows, columns = np.mgrid[:height, :width]
    labels: list[int] = []
    masks: list[np.ndarray] = []
    for _ in range(rng.integers(1, 7)):
        tall, wide = rng.integers(14, 40, 2)  # half axes
        y = rng.integers(tall, height - tall)
        x = rng.integers(wide, width - wide)
        mask = ((rows - y) / tall) ** 2 + ((columns - x) / wide) ** 2 <= 1
        if any((earlier & mask).sum() > earlier.sum() / 2 for earlier in masks):
            continue
        label = int(rng.integers(len(CLASSES)))
        pixels[mask] = COLORS[label]
        masks = [earlier & ~mask for earlier in masks]
        masks.append(mask)
        labels.append(label)
    return pixels, labels, masks


def fields_of(mask: np.ndarray) -> dict:
    """The box, the area and the run lengths of a mask, for a record of COCO."""
    encoded = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    return dict(
        iscrowd=0,
        bbox=[int(side) for side in coco_mask.toBbox(encoded)],
        area=int(coco_mask.area(encoded)),
        segmentation=dict(size=list(encoded['size']), counts=encoded['counts'].decode('ascii')),
    )


def label_map_of(labels: list[int], masks: list[np.ndarray]) -> np.ndarray:
    found = np.full(masks[0].shape, BACKGROUND, np.uint8)
    for label, mask in zip(labels, masks):
        found[mask] = BACKGROUND + 1 + label
    return found
