"""Data sets in COCO's format."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class CocoImage(NamedTuple):
    """An image of a data set.

    Attributes:
        name: of its file.
        size: height and width in pixels.
        objects: its annotations, without `id` and `image_id`; classes are counted from 1.
    """

    name: str
    size: tuple[int, int]
    objects: list[dict[str, Any]]


def coco_of(found: Iterable[CocoImage], classes: Sequence[str]) -> dict[str, Any]:
    """The content of a COCO file. Images, annotations and categories are numbered from 1."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, image in enumerate(found, 1):
        height, width = image.size
        images.append({'id': number, 'file_name': image.name, 'height': height, 'width': width})
        for item in image.objects:
            annotations.append({'id': len(annotations) + 1, 'image_id': number, **item})
    return {'images': images, 'annotations': annotations, 'categories': categories_of(classes)}


def categories_of(classes: Sequence[str]) -> list[dict[str, Any]]:
    return [{'id': number, 'name': name} for number, name in enumerate(classes, 1)]
