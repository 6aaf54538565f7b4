"""What is written for the prediction of an image, as JSON values."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import numpy as np
from pycocotools import mask as coco_mask

from ..tooling.files import write_text


def write_records(
    path: Path,
    source: Union[str, Path],
    size: tuple[int, int],
    name: str,
    items: Sequence[dict[str, Any]],
    **more: Any,
) -> None:
    """Write a JSON object with a list `name` of items, one line per field and per item.

    Args:
        source, size: path, and height and width, of the image.
        **more: further fields.
    """
    head = {'image': str(source), 'width': size[1], 'height': size[0], **more}
    fields = [f'{json.dumps(key)}: {json.dumps(value)}' for key, value in head.items()]
    lines = ',\n  '.join(json.dumps(item) for item in items)
    fields.append(f'{json.dumps(name)}: [\n  {lines}]')
    write_text(path, '{' + ',\n '.join(fields) + '}\n')


def coco_fields(item: dict[str, Any]) -> dict[str, Any]:
    """The box, score and mask of an item under COCO's names."""
    names = {'score': 'score', 'mask': 'segmentation'}
    fields = {name: item[key] for key, name in names.items() if key in item}
    if 'box' in item:
        x1, y1, x2, y2 = item['box']
        fields['bbox'] = [x1, y1, x2 - x1, y2 - y1]
    return fields


def bounding_box(mask: np.ndarray) -> list[int]:
    """x1, y1, x2, y2 of the pixels of a mask (H, W), which must not be empty."""
    rows = np.flatnonzero(mask.any(axis=1)).tolist()
    columns = np.flatnonzero(mask.any(axis=0)).tolist()
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """COCO's compressed run-length encoding of a mask (H, W), as JSON values."""
    encoded = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    return {'size': encoded['size'], 'counts': encoded['counts'].decode()}


def mask_of(encoded: dict[str, Any]) -> np.ndarray:
    """The mask (H, W) of a run-length encoding, the inverse of `run_lengths`."""
    return coco_mask.decode(encoded).astype(bool)
