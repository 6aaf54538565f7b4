"""What is written for the prediction of an image, as JSON values and as pictures.

Imports neither torch nor mm: models of mm (`prediction.py`) and exported models
(`cpvt_pyramid.runtime`) write the same files.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from PIL import Image

from .files import atomic_write


def detection_records(
    boxes: np.ndarray,
    scores: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    masks: Optional[np.ndarray] = None,
) -> list[dict]:
    """Detections as JSON values.

    boxes: (N, 4), x1, y1, x2, y2 in pixels. scores, labels: (N,). masks: (N, H, W) boolean.
    """
    records = [
        {
            'box': [round(float(v), 2) for v in box],
            'label': int(label),
            'class': classes[label] if label < len(classes) else str(label),
            'score': round(float(score), 4),
        }
        for box, score, label in zip(boxes, scores, labels)
    ]
    for record, mask in zip(records, () if masks is None else masks):
        record['mask'] = run_lengths(mask)
    return records


def head_of_image(path: Union[str, Path], size: tuple[int, int]) -> dict[str, Any]:
    """What a file of records says about the image of a (height, width)."""
    return {'image': str(path), 'width': size[1], 'height': size[0]}


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


def mask_of(encoded: dict[str, Any]) -> np.ndarray:
    """The mask (H, W) of a run-length encoding, the inverse of `run_lengths`."""
    counts, value, shift = [], 0, 0
    for code in encoded['counts'].encode():
        code -= 48
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:  # the last group of a count
            value -= (code & 16) << shift - 4
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    pixels = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return pixels.reshape(encoded['size'], order='F')


def label_picture(
    labels: np.ndarray, classes: Sequence[str], palette: Sequence[tuple[int, int, int]]
) -> Image.Image:
    """A label map (H, W) as an image whose pixel values are class indices.

    Viewers show it in the colours of the classes, or in grey if there are more than 256.
    """
    if len(classes) > 256:
        return Image.fromarray(labels.astype(np.uint16))
    image = Image.fromarray(labels.astype(np.uint8)).convert('P')
    image.putpalette([int(v) for color in palette for v in color])
    return image


def write_list(path: Path, head: dict[str, Any], name: str, items: Sequence[dict]) -> None:
    """Write a JSON object with a list, one line per field and per item."""
    fields = ''.join(f'{json.dumps(k)}: {json.dumps(v)},\n ' for k, v in head.items())
    lines = ',\n  '.join(map(json.dumps, items))
    with atomic_write(path) as file:
        file.write_text(f'{{{fields}{json.dumps(name)}: [\n  {lines}]}}\n')
