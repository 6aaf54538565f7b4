"""A small package like deepforest, for the data set of trees."""

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cpvt_pyramid.app.demo import trees

SIZES = {  # width and height
    '2019_YELL_2_528000_4978000_image_crop2': (700, 500),
    '2019_YELL_2_541000_4977000_image_crop': (300, 200),
    'OSBS_029': (120, 120),
    'SOAP_061': (120, 120),
}


def voc(boxes: list) -> str:
    """An annotation file of Pascal VOC, which counts pixels from 1."""
    objects = ''.join(
        f'<object><name>Tree</name><bndbox><xmin>{x1 + 1}</xmin><ymin>{y1 + 1}</ymin>'
        f'<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>'
        for x1, y1, x2, y2 in boxes
    )
    return f'<annotation>{objects}</annotation>'


def random_boxes() -> dict[str, list[tuple]]:
    """Ten boxes in each photograph; one of them lies at its right lower corner."""
    rng = np.random.default_rng(0)
    found = {}
    for name, (width, height) in SIZES.items():
        corners = [rng.integers(0, (width - 40, height - 40)) for _ in range(9)]
        sides = rng.integers(10, 40, (9, 2))
        boxes = [(x, y, x + w, y + h) for (x, y), (w, h) in zip(corners, sides)]
        boxes.append((width - 30, height - 30, width, height))
        found[name] = [tuple(map(int, box)) for box in boxes]
    return found


def use_package(folder: Path, boxes: dict[str, list], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the wheel where downloads are kept, in `folder`, and expect its hash."""
    path = folder / trees.DEEPFOREST.wheel
    folder.mkdir()
    rng = np.random.default_rng(1)
    with zipfile.ZipFile(path, 'w') as wheel:
        for name, (width, height) in SIZES.items():
            file = io.BytesIO()
            pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(pixels).save(file, 'png')
            wheel.writestr(f'deepforest/data/{name}.png', file.getvalue())
            wheel.writestr(f'deepforest/data/{name}.xml', voc(boxes[name]))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setenv('CPVT_WHEEL_CACHE', str(folder))
    monkeypatch.setattr(trees, 'DEEPFOREST', trees.DEEPFOREST._replace(sha256=digest))
    return path
