"""LabelMe: a JSON file for each image, with shapes drawn by hand.

Polygons, rectangles, circles and masks are objects; shapes of one label and `group_id` are the
parts of one object. A mask may have holes. Lines and points have no area, and are left out. What
the file has of the image itself, `imageData`, is not read.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import numpy as np

from ...images.formats import open_image
from ...predictions.records import bounding_box, run_lengths
from .. import defects
from ..annotation_files import data_of_outlines, outlines_in_files
from ..data import DataSet, Outline, polygon_inside
from ..defects import Defects
from ..description import Description
from ..files import as_path, stem_of
from ..folders import recognized_files
from ..images import Size
from ..layout import EXAMPLE_OF_FILES, Layout, Recognized
from ..listing import Listing

ENDING = '.json'
LARGEST = 1e6  # coordinate in pixels
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


def read_labelme(description: Description, found: Defects) -> DataSet:
    outlined = outlines_in_files(description, ENDING, parse_labelme, found)
    return data_of_outlines(description, outlined, found)


def parse_labelme(path: Path, name: str, size: Size, found: Defects) -> Optional[list[Outline]]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found.add(defects.TORN_FILE, name, 'not complete JSON')
        return None
    shapes = content.get('shapes') if isinstance(content, dict) else None
    if not isinstance(shapes, list) or not all(isinstance(shape, dict) for shape in shapes):
        found.add(defects.TORN_FILE, name, 'no list of shapes')
        return None
    image = content.get('imagePath')
    if isinstance(image, str) and image and stem_of(as_path(image)) != stem_of(name):
        found.add(defects.FILE_OF_OTHER, f'{name} ({image[:200]})')
    sides = content.get('imageHeight'), content.get('imageWidth')
    if None not in sides and sides != size:
        found.add(defects.SIZE_IN_FILE, name)
    return objects_of_shapes(shapes, size, name, found)


def objects_of_shapes(
    shapes: list[dict[str, Any]], size: Size, name: str, found: Defects
) -> list[Outline]:
    """The outlines of objects, each of one or several shapes.

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
        kind = shape.get('shape_type') or 'polygon'  # which old files do not say
        if not isinstance(label, str) or not label.strip():
            found.add(defects.BAD_OBJECT, at, 'no label')
            continue
        if kind in WITHOUT_AREA:
            found.add(defects.LINES_OR_POINTS, f'{at} ({kind})')
            continue
        parsed = shape_with_area(shape, kind)
        if parsed is None:
            reason = 'no polygon, rectangle, circle or mask with the points of one'
            found.add(defects.BAD_OBJECT, f'{at} ({str(kind)[:40]})', reason)
            continue
        group = shape.get('group_id')
        key = label.strip(), repr(group), None if group is not None else number
        groups.setdefault(key, []).append(parsed)
        places.setdefault(key, at)
    objects = []
    for key, parts in groups.items():
        outline = outline_of(key[0], parts, size, places[key])
        if outline is None:
            found.add(defects.BAD_OBJECT, places[key], 'an empty mask, or one beyond the image')
        else:
            objects.append(outline)
    return objects


def shape_with_area(shape: dict[str, Any], kind: str) -> Optional[Shape]:
    """A shape; None if its kind is unknown, or its points do not fit the kind."""
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
    return None


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


def outline_of(label: str, parts: list[Shape], size: Size, at: str) -> Optional[Outline]:
    """The outline of an object; None if it has a mask that is empty or reaches beyond its image."""
    if all(part.mask is None for part in parts):
        is_polygon = all(part.is_polygon for part in parts)
        if not is_polygon:  # a rectangle tells no mask
            parts = [Shape(np.stack([p.points.min(0), p.points.max(0)])) for p in parts]
        return Outline(label, [part.points for part in parts], at, is_polygon)
    pixels = np.zeros(size, np.uint8)
    for part in parts:
        if part.mask is None:
            corners = part.points if part.is_polygon else corners_of_box(*part.points)
            inside = polygon_inside(corners, size).round().astype(np.int32)
            if len(inside):
                cv2.fillPoly(pixels, [inside], (1,))
            continue
        (left, top), (right, bottom) = part.points
        if left < 0 or top < 0 or right >= size[1] or bottom >= size[0]:
            return None
        pixels[top : bottom + 1, left : right + 1] |= part.mask
    if not pixels.any():
        return None
    left, top, right, bottom = bounding_box(pixels)
    box = np.array([(left, top), (right, bottom)], float)
    return Outline(label, [box], at, runs=run_lengths(pixels))


def corners_of_box(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.array([low, (high[0], low[1]), high, (low[0], high[1])])


LAYOUT = Layout(
    what='a JSON file of shapes for each image',
    holds='objects',
    recognize=recognize_labelme,
    read=read_labelme,
    example=EXAMPLE_OF_FILES,
)
