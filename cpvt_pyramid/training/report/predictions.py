"""Reading the predictions of a test."""

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...predictions.records import coco_fields


def read_predictions(path: Path) -> list[dict]:
    """The samples in a file that this process has written."""
    return pickle.loads(path.read_bytes())


def read_detections(path: Path, categories: Sequence[int]) -> list[dict]:
    """Detections as COCO results; `categories` has that of each label."""
    return [result for sample in read_predictions(path) for result in as_coco(sample, categories)]


def as_coco(sample: dict, categories: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The detections in a sample of mmdet as COCO results."""
    found = sample['pred_instances']
    boxes = found['bboxes'].tolist()
    scores = found['scores'].tolist()
    labels = found['labels'].tolist()
    masks = found.get('masks') or [None] * len(scores)
    for box, score, label, mask in zip(boxes, scores, labels, masks):
        fields = coco_fields({'box': box, 'score': score, 'mask': mask})
        yield {'image_id': sample['img_id'], 'category_id': categories[label], **fields}
