"""Images with boxes, in COCO's layout."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..images.coco import CocoImage, coco_of


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
    images = []
    for name, image, boxes in boxed_images:
        file_name = f'{name}.png'
        image.save(folder / split / file_name)
        if are_rectangles:
            label_map_of_boxes(image.size, boxes).save(masks / file_name)
        annotations = []
        for box in boxes:
            annotation = box_annotation(box)
            if are_rectangles:
                x1, y1, x2, y2 = box.corners
                annotation['segmentation'] = [[x1, y1, x2, y1, x2, y2, x1, y2]]
            annotations.append(annotation)
        images.append(CocoImage(file_name, (image.height, image.width), annotations))
    content = {**coco_of(images, categories), 'info': {'description': description}}
    (folder / f'annotations/instances_{split}.json').write_text(json.dumps(content))


def label_map_of_boxes(size: tuple[int, int], boxes: Sequence[Box]) -> Image.Image:
    """Filled boxes in an image of a (width, height): 1 + category, 0 elsewhere."""
    width, height = size
    labels = np.zeros((height, width), np.uint8)
    for box in boxes:
        x1, y1, x2, y2 = map(int, box.corners)
        labels[y1:y2, x1:x2] = 1 + box.category
    return Image.fromarray(labels)


def box_annotation(box: Box) -> dict[str, Any]:
    """An object of a COCO file. One that is ignored, in training and in metrics, has `iscrowd`: it
    counts neither as an object nor as background."""
    left, top, right, bottom = box.corners
    return {
        'category_id': box.category + 1,
        'iscrowd': int(box.is_ignored),
        'bbox': [left, top, right - left, bottom - top],
        'area': (right - left) * (bottom - top),
    }
