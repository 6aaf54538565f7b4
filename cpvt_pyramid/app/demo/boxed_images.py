"""Images with boxes, in COCO's layout."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image


class Box(NamedTuple):
    """A box of an image.

    Attributes:
        category: index of its category.
        corners: x1, y1, x2, y2 in pixels.
        is_ignored: whether it counts neither as an object nor as background.
    """

    category: int
    corners: list[float]
    is_ignored: bool = False


class BoxedImage(NamedTuple):
    """An image, the name of its file without suffix, and its boxes."""

    name: str
    image: Image.Image
    boxes: list[Box]


def write_boxed_images(
    folder: Path,
    split: str,
    boxed_images: Iterable[BoxedImage],
    categories: Sequence[str],
    description: str,
    are_rectangles: bool = False,
) -> None:
    """Write FOLDER/SPLIT/*.png and FOLDER/annotations/instances_SPLIT.json.

    Args:
        folder: of the data set.
        split: of the images.
        boxed_images: the images with their boxes.
        categories: names of the categories.
        description: of the data set.
        are_rectangles: objects fill their boxes, whose corners are whole numbers. Annotations then
            have polygons, and FOLDER/masks/SPLIT/*.png are label maps: 0 is background, and 1 the
            first category.
    """
    (folder / split).mkdir()
    (folder / 'annotations').mkdir(exist_ok=True)
    masks = folder / 'masks' / split
    if are_rectangles:
        masks.mkdir(parents=True)
    images: list[dict] = []
    annotations: list[dict] = []
    for number, (name, image, boxes) in enumerate(boxed_images, 1):
        file_name = f'{name}.png'
        image.save(folder / split / file_name)
        images.append(dict(id=number, file_name=file_name, width=image.width, height=image.height))
        if are_rectangles:
            label_map_of_boxes(image.size, boxes).save(masks / file_name)
        for box in boxes:
            index = len(annotations) + 1
            category = box.category + 1
            annotation = box_annotation(index, number, category, box.corners, box.is_ignored)
            if are_rectangles:
                x1, y1, x2, y2 = box.corners
                annotation['segmentation'] = [[x1, y1, x2, y1, x2, y2, x1, y2]]
            annotations.append(annotation)
    content = dict(
        images=images,
        annotations=annotations,
        categories=[dict(id=number, name=name) for number, name in enumerate(categories, 1)],
        info=dict(description=description),
    )
    (folder / f'annotations/instances_{split}.json').write_text(json.dumps(content))


def label_map_of_boxes(size: tuple[int, int], boxes: Sequence[Box]) -> Image.Image:
    """Filled boxes in an image of a (width, height): 1 + category, 0 elsewhere."""
    width, height = size
    labels = np.zeros((height, width), np.uint8)
    for box in boxes:
        x1, y1, x2, y2 = map(int, box.corners)
        labels[y1:y2, x1:x2] = 1 + box.category
    return Image.fromarray(labels)


def box_annotation(
    number: int, image: int, category: int, corners: list[float], is_ignored: bool
) -> dict:
    """An object of a COCO file: its id, those of its image and category, and its box.

    One that is ignored, in training and in metrics, has `iscrowd`: it counts neither as an object
    nor as background.
    """
    left, top, right, bottom = corners
    return dict(
        id=number,
        image_id=image,
        category_id=category,
        iscrowd=int(is_ignored),
        bbox=[left, top, right - left, bottom - top],
        area=(right - left) * (bottom - top),
    )
