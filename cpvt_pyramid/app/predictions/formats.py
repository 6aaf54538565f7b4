"""COCO and GeoJSON files of what was found in images.

The objects of an image are dicts with `class`, `label`, `box` and, some of them, a `score` and a
`mask` in COCO's run-length encoding.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..images.coco import CocoImage, coco_of
from ..images.formats import FORMATS, IMAGE_ENDINGS
from ..images.rasters import ReadError, import_rasterio, open_raster
from ..tooling.files import atomic_write, write_text
from .drawing import painted_classes
from .records import bounding_box, coco_fields, mask_of, run_lengths

LONGITUDE_LATITUDE = 'urn:ogc:def:crs:OGC:1.3:CRS84'
# Endings of images without a georeference.
PLAIN = {*IMAGE_ENDINGS} - {*FORMATS['TIFF'].endings, *FORMATS['JPEG2000'].endings}


def objects_of_labels(labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The classes in a label map, without the background."""
    objects = []
    for i in painted_classes(labels, classes):
        mask = labels == i
        found = {'class': classes[i], 'label': i, 'box': bounding_box(mask)}
        objects.append({**found, 'mask': run_lengths(mask)})
    return objects


# COCO


class ImageObjects(NamedTuple):
    """What was found in an image."""

    path: Path
    size: tuple[int, int]  # height and width
    objects: list[dict[str, Any]]


def write_coco(file: Path, found: Iterable[ImageObjects], classes: Sequence[str]) -> None:
    """Write a data set of images whose annotations have scores."""
    images = []
    for image in found:
        annotations = []
        for item in image.objects:
            annotation = {
                'category_id': item['label'] + 1,
                'area': area_of(item),
                'iscrowd': 0,
                **coco_fields(item),
            }
            annotation['bbox'] = [round(v, 2) for v in annotation['bbox']]
            annotations.append(annotation)
        images.append(CocoImage(str(image.path), image.size, annotations))
    write_text(file, json.dumps(coco_of(images, classes)))


def area_of(item: dict[str, Any]) -> float:
    """The area of a mask, or else of a box, in pixels."""
    if 'mask' in item:
        return int(mask_of(item['mask']).sum())
    x1, y1, x2, y2 = item['box']
    return round((x2 - x1) * (y2 - y1), 2)


# GeoJSON. The polygons of an object are lists of rings, the outer one first.

Feature = tuple[dict[str, Any], list]  # properties and polygons, in pixels


def write_geojson(file: Path, image: Path, features: Iterable[Feature]) -> None:
    """Write a feature for each object, or each region of a label map, along the borders of its
    pixels.

    In world coordinates if the image is georeferenced: of its coordinate system if that has an EPSG
    code, else longitudes and latitudes. Otherwise in pixels.
    """
    crs, to_geometry = coordinates_of(image)
    with atomic_write(file) as draft, draft.open('w', encoding='utf-8') as target:
        target.write('{"type": "FeatureCollection", ')
        if crs:
            system = {'type': 'name', 'properties': {'name': crs}}
            target.write(f'"crs": {json.dumps(system)}, ')
        target.write('"features": [')
        separator = ''
        for properties, polygons in features:
            geometry = to_geometry(polygons)
            feature = {'type': 'Feature', 'properties': properties, 'geometry': geometry}
            target.write(separator + json.dumps(feature))
            separator = ',\n'
        target.write(']}\n')


def features_of_objects(objects: Iterable[dict[str, Any]]) -> Iterator[Feature]:
    """A feature for each object, of its box where it has no mask."""
    for item in objects:
        polygons = []
        if 'mask' in item:
            mask = mask_of(item['mask'])
            polygons = [polygon for polygon, _ in regions(mask.astype(np.uint8), mask=mask)]
        if not polygons:
            x1, y1, x2, y2 = map(float, item['box'])
            polygons = [[[[x1, y1], [x1, y2], [x2, y2], [x2, y1], [x1, y1]]]]
        yield {key: item[key] for key in ('class', 'score') if key in item}, polygons


def features_of_labels(labels: np.ndarray, classes: Sequence[str]) -> Iterator[Feature]:
    """A feature for each region of a label map."""
    for polygon, label in regions(labels):
        if label < len(classes) and classes[label] != 'background':
            yield {'class': classes[label]}, [polygon]


def features_of_label_file(file: Path, classes: Sequence[str]) -> Iterator[Feature]:
    """As `features_of_labels`, of a GeoTIFF, which is not read into memory."""
    rasterio = import_rasterio('--format geojson')
    # Without its georeference, geometries are in pixels.
    with open_raster(file, '--format geojson', GDAL_GEOREF_SOURCES='NONE') as image:
        yield from features_of_labels(rasterio.band(image, 1), classes)


def regions(values: Any, **options: Any) -> Iterator[tuple[list, int]]:
    """The connected regions of equal values, as polygons along the borders of pixels, each a list
    of rings with the outer one first, with their value.

    `values` are (H, W) integers, or a band of a rasterio data set, which is read line by line;
    `options` are those of `rasterio.features.shapes`.
    """
    shapes = import_rasterio('--format geojson').features.shapes
    for geometry, value in shapes(values, connectivity=4, **options):
        yield geometry['coordinates'], int(value)


def may_be_located(path: Path) -> bool:
    return path.suffix.lower() not in PLAIN


def coordinates_of(path: Path) -> tuple[str, Callable[[list], dict]]:
    """The name of the coordinate system for an image, '' for pixels, and a function from polygons
    in pixels to geometries in it."""
    if not may_be_located(path):
        return '', geometry_of
    rasterio = import_rasterio(f'--format geojson of {path}')
    try:
        with open_raster(path, '--format geojson') as image:
            transform = image.transform
            points, crs = image.gcps
            if points and crs:
                transform = rasterio.transform.from_gcps(points)
            crs = crs or image.crs
    except ReadError:  # a kind of image that GDAL does not read
        crs = None
    if not crs:
        return '', geometry_of
    to_geometry = partial(geometry_of, transform=transform)
    authority, code = crs.to_authority(100) or ('', '')
    if (authority, code) == ('EPSG', '4326'):
        return LONGITUDE_LATITUDE, to_geometry
    if authority == 'EPSG':
        return f'urn:ogc:def:crs:EPSG::{code}', to_geometry
    from rasterio.warp import transform_geom

    return LONGITUDE_LATITUDE, lambda found: transform_geom(crs, 'EPSG:4326', to_geometry(found))


def geometry_of(polygons: list, transform: Any = None) -> dict:
    """The GeoJSON geometry of polygons. Those that an `affine.Affine` transforms have outer rings
    that turn counterclockwise."""
    if transform is not None:
        polygons = [
            [moved_ring(transform, ring, i == 0) for i, ring in enumerate(rings)]
            for rings in polygons
        ]
    if len(polygons) == 1:
        return {'type': 'Polygon', 'coordinates': polygons[0]}
    return {'type': 'MultiPolygon', 'coordinates': polygons}


def moved_ring(transform: Any, ring: Sequence, counterclockwise: bool) -> list[list[float]]:
    a, b, c, d, e, f = transform[:6]
    points = np.array(ring, float) @ np.array([(a, d), (b, e)]) + (c, f)
    x, y = (points - points[0]).T
    turns_left = x[:-1] @ y[1:] > y[:-1] @ x[1:]
    if turns_left != counterclockwise:
        points = points[::-1]
    return points.tolist()
