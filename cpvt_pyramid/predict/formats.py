"""The results of a run in the formats of other tools.

They are made from the files that a run writes for each image (`records.py`). So this serves whole
images and tiles, models of mm and exported models.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from tqdm import tqdm

from ..tooling.command import UserError
from ..tooling.files import Format, atomic_write, make_folder, path_from, write_text
from ..tooling.images import IMAGE_ENDINGS, open_image
from ..tooling.inputs import Named, is_video
from ..tooling.rasters import ReadError, import_rasterio, open_raster
from .drawing import label_counts, painted_classes
from .polygons import one_polygon, outlines, regions, ring_area
from .predictions import Kind
from .records import bounding_box, coco_fields, mask_of, run_lengths

COLUMNS = ('image', 'class', 'score', 'x1', 'y1', 'x2', 'y2', 'area')
LONGITUDE_LATITUDE = 'urn:ogc:def:crs:OGC:1.3:CRS84'
PLAIN = {*IMAGE_ENDINGS} - {'.tif', '.tiff'}  # images without a georeference


class ImageResult(NamedTuple):
    """What was found in an image."""

    path: Path  # of the image
    name: str  # of its results
    size: tuple[int, int]  # height and width
    items: list[dict[str, Any]]  # `class`, `label`, `box`; some have a `score` or a `mask`


class Output(NamedTuple):
    """The results of a run, and the format in which they are written as well."""

    folder: Path  # with the files of each image
    format: Optional[Format]
    kind: Kind
    classes: Sequence[str]

    def check(self, named: Sequence[Named], tiled: bool = False) -> None:
        """Check, before a run, that the results of images can be written in the format."""
        if not self.format:
            return
        if videos := [path for path, _ in named if is_video(path)]:
            raise UserError(f'--format is for images, but {videos[0]} is a video; run it without')
        fits = self.format == 'geojson' or not tiled and self.format != 'yolo'
        if self.kind == 'labels' and not fits:
            raise UserError(
                'segmentation masks can be written as coco, labelme, csv or geojson, and with '
                f'--tile only as geojson; got --format {self.format}'
            )
        has_outlines = self.kind != 'detections' and self.format in ('yolo', 'labelme', 'geojson')
        if has_outlines or self.format == 'geojson' and any(may_be_located(p) for p, _ in named):
            import_rasterio(f'--format {self.format}')

    def write(self, named: Sequence[Named]) -> None:
        """Write the results of images, which are in the folder, in the format."""
        if self.format:
            named = tqdm(named, f'writing {self.format}', leave=False, delay=3)
            WRITERS[self.format](self, named)

    def report(self, done: Sequence[Named], inputs: int) -> None:
        """Print how many of the inputs have results, and what was found."""
        print(f'{len(done)} of {inputs} done: results in {self.folder}')
        if any(not is_video(path) for path, _ in done):
            print(f'found in images: {self.summary(done) or "nothing"}')

    def summary(self, named: Sequence[Named]) -> str:
        """What was found in images: the number of objects of each class, or the share of pixels."""
        counts: Counter[str] = Counter()
        for path, name in tqdm(named, 'counting', leave=False, delay=3):
            if is_video(path):
                continue
            if self.kind == 'labels':
                pixels = count_labels(label_map_file(self.folder, name))
                counts.update({str(n): int(pixels[i]) for i, n in enumerate(self.classes)})
            else:
                file = self.folder / f'{name}.{self.kind}.json'
                content = json.loads(file.read_text(encoding='utf-8'))
                counts.update(item['class'] for item in content[self.kind])
        total = sum(counts.values())
        found = []
        for name, count in counts.most_common():
            if not count:
                continue
            found.append(
                f'{name} {count / total:.1%}' if self.kind == 'labels' else f'{count} {name}'
            )
        return ', '.join(found)


def results_of(output: Output, named: Sequence[Named]) -> Iterator[ImageResult]:
    """Read what a run wrote for images."""
    for path, name in named:
        if output.kind == 'labels':
            labels = pixels_of(label_map_file(output.folder, name))
            height, width = labels.shape
            items = items_of_labels(labels, output.classes)
        else:
            file = output.folder / f'{name}.{output.kind}.json'
            content = json.loads(file.read_text(encoding='utf-8'))
            height, width = content['height'], content['width']
            items = content[output.kind]
        if output.kind == 'segments':
            numbers = pixels_of(output.folder / f'{name}.segments.png')
            for item in items:
                item['mask'] = run_lengths(numbers == item['id'])
        yield ImageResult(path, name, (height, width), items)


def items_of_labels(labels: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The classes in a label map, without the background."""
    items = []
    for i in painted_classes(labels, classes):
        mask = labels == i
        item = {'class': classes[i], 'label': i, 'box': bounding_box(mask)}
        items.append({**item, 'mask': run_lengths(mask)})
    return items


def pixels_of(path: Path) -> np.ndarray:
    with open_image(path) as image:
        return np.asarray(image)


def label_map_file(folder: Path, name: str) -> Path:
    """The label map of an image: of the two that --tile and others write, the newer one."""
    paths = [folder / f'{name}.labels.{ending}' for ending in ('png', 'tif')]
    return max((path for path in paths if path.exists()), key=lambda path: path.stat().st_mtime_ns)


def count_labels(path: Path) -> np.ndarray:
    """The number of pixels of each label in a map; that of --tile is read in parts."""
    counts = np.zeros(2**16, int)
    if path.suffix == '.png':
        labels, pixels = label_counts(pixels_of(path))
        counts[labels] = pixels
        return counts
    with open_raster(path, 'a segmentation mask of --tile') as image:
        for _, window in image.block_windows(1):
            labels, pixels = label_counts(image.read(1, window=window))
            counts[labels] += pixels
    return counts


# Formats


def write_coco(output: Output, named: Sequence[Named]) -> None:
    """coco.json: a data set of the images whose annotations have scores."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, result in enumerate(results_of(output, named), 1):
        height, width = result.size
        file = str(result.path)
        images.append({'id': number, 'file_name': file, 'height': height, 'width': width})
        for item in result.items:
            annotation = {
                'id': len(annotations) + 1,
                'image_id': number,
                'category_id': item['label'] + 1,
                'area': area_of(item),
                'iscrowd': 0,
                **coco_fields(item),
            }
            annotation['bbox'] = [round(v, 2) for v in annotation['bbox']]
            annotations.append(annotation)
    categories = [{'id': i, 'name': name} for i, name in enumerate(output.classes, 1)]
    content = {'images': images, 'annotations': annotations, 'categories': categories}
    write_text(output.folder / 'coco.json', json.dumps(content))


def write_yolo(output: Output, named: Sequence[Named]) -> None:
    """yolo/labels/NAME.txt: on each line a class and a box or a polygon, in shares of the image.
    yolo/classes.txt: the names."""
    root = output.folder / 'yolo'
    make_folder(root / 'labels')
    for result in results_of(output, named):
        scale = np.array(result.size[::-1])
        lines = []
        for item in result.items:
            if 'mask' in item:
                numbers = one_polygon(polygons_of(item)) / scale
            else:
                start, stop = np.reshape(item['box'], (2, 2)) / scale
                numbers = np.array([(start + stop) / 2, stop - start])
            lines.append(' '.join([str(item['label']), *(f'{v:.6f}' for v in numbers.flat)]))
        path = root / f'labels/{result.name}.txt'
        make_folder(path.parent)
        write_text(path, ''.join(f'{line}\n' for line in lines))
    write_text(root / 'classes.txt', ''.join(f'{name}\n' for name in output.classes))


def write_labelme(output: Output, named: Sequence[Named]) -> None:
    """labelme/NAME.json: rectangles or polygons, to open in labelme. Parts of an object share a
    group; the score is the description."""
    is_map = output.kind == 'labels'
    for result in results_of(output, named):
        path = output.folder / f'labelme/{result.name}.json'
        make_folder(path.parent)
        shapes: list[dict[str, Any]] = []
        for group, item in enumerate(result.items):
            parts = shapes_of_labelme(item)
            if len(parts) > 1 and not is_map:
                for part in parts:
                    part['group_id'] = group
            shapes += parts
        if is_map:  # polygons have no holes; small ones come last and are on top
            shapes.sort(key=lambda shape: -ring_area(np.array(shape['points'])))
        content: dict[str, Any] = {
            'version': '5.5.0',
            'flags': {},
            'shapes': shapes,
            'imagePath': path_from(path.parent, result.path),
            'imageData': None,
            'imageHeight': result.size[0],
            'imageWidth': result.size[1],
        }
        write_text(path, json.dumps(content, indent=1))


def shapes_of_labelme(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of an object, or its box."""
    if 'mask' in item:
        kind = 'polygon'
        parts = polygons_of(item)
    else:
        kind = 'rectangle'
        parts = [np.reshape(item['box'], (2, 2))]
    return [
        {
            'label': item['class'],
            'points': part.round(2).tolist(),
            'group_id': None,
            'description': f'score {item["score"]}' if 'score' in item else '',
            'shape_type': kind,
            'flags': {},
        }
        for part in parts
    ]


def write_csv(output: Output, named: Sequence[Named]) -> None:
    """predictions.csv: a line for each object, or for each class in a label map."""
    with atomic_write(output.folder / 'predictions.csv') as draft:
        with draft.open('w', encoding='utf-8', errors='surrogateescape', newline='') as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            for result in results_of(output, named):
                for item in result.items:
                    score, area = item.get('score', ''), area_of(item)
                    table.writerow([result.path, item['class'], score, *item['box'], area])


def area_of(item: dict[str, Any]) -> float:
    """The area of a mask, or else of a box, in pixels."""
    if 'mask' in item:
        return int(mask_of(item['mask']).sum())
    x1, y1, x2, y2 = item['box']
    return round((x2 - x1) * (y2 - y1), 2)


def polygons_of(item: dict[str, Any]) -> list[np.ndarray]:
    """The outlines of an object's mask, or of its box where the mask is empty."""
    return outlines(mask_of(item['mask'])) or [box_corners(item['box'])]


def box_corners(box: Sequence[float]) -> np.ndarray:
    x1, y1, x2, y2 = box
    return np.array([(x1, y1), (x1, y2), (x2, y2), (x2, y1)], float)


# GeoJSON. The polygons of an object are lists of rings, the outer one first.


def write_geojson(output: Output, named: Sequence[Named]) -> None:
    """NAME.geojson: a feature for each object, or each region of a label map, along the borders of
    its pixels.

    In world coordinates if the image is georeferenced: of its coordinate system if that has an EPSG
    code, else longitudes and latitudes. Otherwise in pixels.
    """
    features = features_of_labels if output.kind == 'labels' else features_of_items
    for path, name in named:
        crs, to_geometry = coordinates_of(path)
        with atomic_write(output.folder / f'{name}.geojson') as draft, draft.open('w') as file:
            file.write('{"type": "FeatureCollection", ')
            if crs:
                system = {'type': 'name', 'properties': {'name': crs}}
                file.write(f'"crs": {json.dumps(system)}, ')
            file.write('"features": [')
            separator = ''
            for properties, polygons in features(output, path, name):
                geometry = to_geometry(polygons)
                feature = {'type': 'Feature', 'properties': properties, 'geometry': geometry}
                file.write(separator + json.dumps(feature))
                separator = ',\n'
            file.write(']}\n')


def features_of_items(output: Output, path: Path, name: str) -> Iterator[tuple[dict, list]]:
    """The properties and the polygons of each object, of its box where it has no mask."""
    (result,) = results_of(output, [(path, name)])
    for item in result.items:
        polygons = []
        if 'mask' in item:
            mask = mask_of(item['mask'])
            polygons = [polygon for polygon, _ in regions(mask.astype(np.uint8), mask=mask)]
        if not polygons:
            corners = box_corners(item['box']).tolist()
            ring = [*corners, corners[0]]
            polygons = [[ring]]
        yield {key: item[key] for key in ('class', 'score') if key in item}, polygons


def features_of_labels(output: Output, path: Path, name: str) -> Iterator[tuple[dict, list]]:
    """The properties and the polygon of each region; the map is not read into memory."""
    rasterio = import_rasterio('--format geojson')
    classes = output.classes
    file = label_map_file(output.folder, name)
    # Without its georeference, geometries are in pixels.
    with open_raster(file, '--format geojson', GDAL_GEOREF_SOURCES='NONE') as image:
        for polygon, label in regions(rasterio.band(image, 1)):
            if label < len(classes) and classes[label] != 'background':
                yield {'class': classes[label]}, [polygon]


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


WRITERS: dict[str, Callable[[Output, Sequence[Named]], None]] = {
    'coco': write_coco,
    'yolo': write_yolo,
    'labelme': write_labelme,
    'csv': write_csv,
    'geojson': write_geojson,
}
