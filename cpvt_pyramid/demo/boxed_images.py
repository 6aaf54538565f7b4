"""Images with boxes, in COCO's layout."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from ..tooling.tiles import box_annotation


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
) -> None:
    """Write FOLDER/SPLIT/*.png and FOLDER/annotations/instances_SPLIT.json."""
    (folder / split).mkdir()
    (folder / 'annotations').mkdir(exist_ok=True)
    images: list[dict] = []
    annotations: list[dict] = []
    for number, (name, image, boxes) in enumerate(boxed_images, 1):
        file_name = f'{name}.png'
        image.save(folder / split / file_name)
        images.append(dict(id=number, file_name=file_name, width=image.width, height=image.height))
        for box in boxes:
            index = len(annotations) + 1
            category = box.category + 1
            annotations.append(box_annotation(index, number, category, box.corners, box.is_ignored))
    content = dict(
        images=images,
        annotations=annotations,
        categories=[dict(id=number, name=name) for number, name in enumerate(categories, 1)],
        info=dict(description=description),
    )
    (folder / f'annotations/instances_{split}.json').write_text(json.dumps(content))
