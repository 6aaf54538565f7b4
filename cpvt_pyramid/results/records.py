"""What is written for the prediction of an image, as JSON values."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import numpy as np

from ..tooling.files import write_text


def write_records(
    path: Path,
    source: Union[str, Path],
    size: tuple[int, int],
    name: str,
    items: Sequence[dict],
    **more: Any,
) -> None:
    """Write a JSON object with a list `name` of items, one line per field and per item.

    Args:
        source, size: path, and height and width, of the image.
        **more: further fields.
    """
    head = {'image': str(source), 'width': size[1], 'height': size[0], **more}
    fields = ''.join(f'{json.dumps(k)}: {json.dumps(v)},\n ' for k, v in head.items())
    lines = ',\n  '.join(map(json.dumps, items))
    write_text(path, f'{{{fields}{json.dumps(name)}: [\n  {lines}]}}\n')


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
    rows, columns = (np.flatnonzero(mask.any(axis)).tolist() for axis in (1, 0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """COCO's compressed run-length encoding of a mask (H, W)."""
    pixels = mask.ravel(order='F')
    borders = np.flatnonzero(pixels[1:] != pixels[:-1]) + 1
    counts = np.diff(borders, prepend=0, append=len(pixels)).tolist()
    if pixels[0]:
        counts.insert(0, 0)
    text = ''
    for i, count in enumerate(counts):
        rest = count - counts[i - 2] if i > 2 else count
        # Groups of 5 bits, the lowest first; bit 5 says that more follow, bit 4 is the sign.
        while not -16 <= rest < 16:
            text += chr((rest & 31 | 32) + 48)
            rest >>= 5
        text += chr((rest & 31) + 48)
    return {'size': list(mask.shape), 'counts': text}


def counts_of(text: str) -> list[int]:
    """The run lengths, of zeros first, in COCO's compressed encoding."""
    counts, value, shift = [], 0, 0
    for code in text.encode():
        code -= 48
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:  # the last group of a count
            value -= (code & 16) << shift - 4
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    return counts


def mask_of(encoded: dict[str, Any]) -> np.ndarray:
    """The mask (H, W) of a run-length encoding, the inverse of `run_lengths`."""
    counts = counts_of(encoded['counts'])
    pixels = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return pixels.reshape(encoded['size'], order='F')
