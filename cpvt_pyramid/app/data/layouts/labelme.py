"""LabelMe: a JSON file for each image, with shapes drawn by hand.

Polygons, rectangles, circles and masks are objects; shapes of one label and `group_id` are the
parts of one object. A mask may have holes. Lines and points have no area, and are left out. What
the file has of the image itself, `imageData`, is not read.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import cv2
import numpy as np

from ...images.formats import open_image
from ...predictions.records import bounding_box, run_lengths
from .. import defects
from ..annotation_files import (
    AnnotationFile,
    objects_of_files,
    read_annotation_files,
    recognized_files,
)
from ..data import Objects, Outline
from ..defects import Defects, Kind
from ..description import Description
from ..images import Size
from ..layout import Layout, Recognized
from ..listing import Listing

ENDING = '.json'
LARGEST = 1e6  # coordinate in pixels
MOST_PIXELS = 2**30  # of an image with masks
WITHOUT_AREA = 'line', 'linestrip', 'point', 'points'
CIRCLE = np.linspace(0, 2 * np.pi, 64, endpoint=False)  # the corners by which circles are written


class Shape(NamedTuple):
    """A shape with an area.

    Attributes:
        points: (N, 2) corners of a polygon, or the two of a rectangle or of the box of a mask.
        mask: (H, W) of the box.
    """

    points: np.ndarray
    is_polygon: bool = False
    mask: Optional[np.ndarray] = None


def recognize_labelme(listing: Listing) -> Optional[Recognized]:
    return recognized_files(listing, ENDING, begins_with_shapes)


def begins_with_shapes(listing: Listing, name: str) -> bool:
    """Whether a file begins as LabelMe writes them: what is long comes after the shapes."""
    return b'"shapes"' in listing.head(name)


def read_labelme(description: Description, found: Defects) -> Objects:
    annotated = read_annotation_files(description, ENDING, parse_labelme, found)
    return objects_of_files(description, annotated, found)


def parse_labelme(path: Path, name: str, found: Defects) -> Optional[AnnotationFile]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found.add(defects.TORN_JSON, name)
        return None
    shapes = content.get('shapes') if isinstance(content, dict) else None
    if not isinstance(shapes, list) or not all(isinstance(shape, dict) for shape in shapes):
        found.add(defects.OTHER_JSON, name)
        return None
    image = content.get('imagePath')
    sides = content.get('imageHeight'), content.get('imageWidth')
    size = sides if all(type(side) is int and side > 0 for side in sides) else None
    objects = objects_of_shapes(shapes, size, name, found)
    return AnnotationFile(image if isinstance(image, str) else '', size, objects)


def objects_of_shapes(
    shapes: list[dict[str, Any]], size: Optional[Size], name: str, found: Defects
) -> list[tuple[str, Outline]]:
    """The classes and outlines of objects, each of one or several shapes.

    Args:
        shapes: of a file.
        size: of its image.
        name: of the file, for messages.
        found: gets shapes that cannot be used.
    """
    groups: dict[tuple, list[Shape]] = {}
    places: dict[tuple, str] = {}
    for number, shape in enumerate(shapes, 1):
        at = f'{name} shape {number}'
        label = shape.get('label')
        if not isinstance(label, str) or not label.strip():
            found.add(defects.NO_NAME, at)
            continue
        parsed = area_of_shape(shape)
        if isinstance(parsed, Kind):
            found.add(parsed, f'{at} ({str(shape.get("shape_type"))[:40]})')
            continue
        group = shape.get('group_id')
        key = label.strip(), repr(group), None if group is not None else number
        groups.setdefault(key, []).append(parsed)
        places.setdefault(key, at)
    objects = []
    for key, parts in groups.items():
        outline = outline_of(parts, size, places[key])
        if isinstance(outline, Kind):
            found.add(outline, places[key])
        else:
            objects.append((key[0], outline))
    return objects


def area_of_shape(shape: dict[str, Any]) -> Union[Shape, Kind]:
    """A shape, or the kind of defect that it has."""
    kind = shape.get('shape_type') or 'polygon'  # which old files do not say
    if kind in WITHOUT_AREA:
        return defects.LINES_OR_POINTS
    if kind not in ('polygon', 'rectangle', 'circle', 'mask'):
        return defects.UNKNOWN_SHAPE
    points = points_of(shape.get('points'))
    count = len(points)
    if kind == 'polygon' and count >= 3:
        return Shape(points, is_polygon=True)
    if kind == 'rectangle' and count in (2, 4):
        return Shape(np.stack([points.min(0), points.max(0)]))
    if kind == 'circle' and count == 2:
        center, edge = points
        radius = np.hypot(*(edge - center))
        corners = center + radius * np.stack([np.cos(CIRCLE), np.sin(CIRCLE)], 1)
        return Shape(corners, is_polygon=True)
    if kind == 'mask' and count == 2:
        corners = points.astype(int)
        mask = decoded_mask(shape.get('mask'), corners)
        if mask is not None:
            return Shape(corners, mask=mask)
    return defects.BAD_SHAPE


def points_of(value: Any) -> np.ndarray:
    """(N, 2) points; none if a value is no list of pairs of possible numbers."""
    none = np.zeros((0, 2))
    try:
        points = np.array(value)
    except ValueError:  # of different lengths
        return none
    if points.ndim != 2 or points.shape[1] != 2 or points.dtype.kind not in 'iuf':
        return none
    return points.astype(float) if (np.abs(points) <= LARGEST).all() else none


def decoded_mask(text: Any, corners: np.ndarray) -> Optional[np.ndarray]:
    """The pixels (H, W) of a mask, a PNG in base64, between two corners, which belong to it; None
    if it is damaged or of another size."""
    try:
        with open_image(io.BytesIO(base64.b64decode(text))) as image:
            if image.size == tuple(np.diff(corners, axis=0)[0] + 1):
                return np.asarray(image.convert('L')) > 0
    except Exception:  # Pillow raises many kinds on a damaged file
        pass
    return None


def outline_of(parts: list[Shape], size: Optional[Size], at: str) -> Union[Outline, Kind]:
    """The outline of an object, or the kind of defect that it has."""
    if all(part.mask is None for part in parts):
        is_polygon = all(part.is_polygon for part in parts)
        if not is_polygon:  # a rectangle tells no mask
            parts = [Shape(np.stack([p.points.min(0), p.points.max(0)])) for p in parts]
        return Outline(0, [part.points for part in parts], at, is_polygon)
    if size is None or size[0] * size[1] > MOST_PIXELS:
        return defects.BAD_SHAPE
    pixels = np.zeros(size, np.uint8)
    for part in parts:
        if part.mask is None:
            corners = part.points if part.is_polygon else corners_of_box(*part.points)
            inside = corners.clip(0, size[::-1]).round().astype(np.int32)
            cv2.fillPoly(pixels, [inside], (1,))
            continue
        (left, top), (right, bottom) = part.points
        if left < 0 or top < 0 or right >= size[1] or bottom >= size[0]:
            return defects.BAD_SHAPE
        pixels[top : bottom + 1, left : right + 1] |= part.mask
    if not pixels.any():
        return defects.WITHOUT_AREA
    left, top, right, bottom = bounding_box(pixels)
    box = np.array([(left, top), (right, bottom)], float)
    return Outline(0, [box], at, runs=run_lengths(pixels))


def corners_of_box(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.array([low, (high[0], low[1]), high, (low[0], high[1])])


LAYOUT = Layout(
    what='a JSON file of shapes for each image',
    holds='objects',
    recognize=recognize_labelme,
    read=read_labelme,
    example={
        'train': 'FOLDER',
        'val': 'FOLDER',
        'annotations': {'train': 'FOLDER', 'val': 'FOLDER'},
    },
)
