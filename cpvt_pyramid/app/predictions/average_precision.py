"""COCO's average precision, by pycocotools: the one place where its evaluation is set up.

`evaluate_coco` takes objects and detections in COCO's format, and what MMDetection's CocoMetric
leaves at its defaults: IoUs of 0.5 to 0.95, sizes by COCO's areas, and the categories of a model.
"""

import io
import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ..tooling.command import UserError

COUNTED = 100  # detections of an image and class in AP, the best


class CocoEvaluation(NamedTuple):
    """What `evaluate_coco` returns."""

    found: COCO  # the detections
    matches: COCOeval  # with `evalImgs`: which detection is which object
    # (10, 101, K, 4, C) by IoU, recall, category, size and number of detections that count; -1
    # where there are no objects
    precision: np.ndarray

    @property
    def ap(self) -> float:
        """AP, from 0 to 1; nan without objects."""
        return mean_precision(self.precision[..., 0, 0])


def evaluate_coco(
    truth: COCO,
    results: Sequence[dict[str, Any]],
    categories: Sequence[int],
    metric: str,
    counted: Sequence[int] = (COUNTED,),
) -> CocoEvaluation:
    """Compare detections with objects.

    Args:
        truth: the objects, with ids from 1: pycocotools takes an object with the id 0 for none.
        results: detections in COCO's format; they may be none.
        categories: that the model knows, in its order; objects of others do not count.
        metric: 'bbox' or 'segm', of boxes or masks.
        counted: detections of an image and category that count.

    Raises:
        UserError: a mask does not have the size of its image.
    """
    found = coco_of_results(truth, results, metric)
    if metric == 'segm':
        for annotation in truth.anns.values():
            run_lengths_of(truth, annotation, f'annotation {annotation["id"]}')
    matches = COCOeval(truth, found, metric)
    matches.params.catIds = list(categories)
    matches.params.maxDets = list(counted)
    with redirect_stdout(io.StringIO()):
        matches.evaluate()
        matches.accumulate()
    # The categories are sorted inside.
    order = np.searchsorted(matches.params.catIds, categories)
    return CocoEvaluation(found, matches, matches.eval['precision'][:, :, order])


def coco_of_results(truth: COCO, results: Sequence[dict[str, Any]], metric: str) -> COCO:
    """Detections as pycocotools compares them: with ids and areas."""
    annotations = [{**result, 'id': i, 'iscrowd': 0} for i, result in enumerate(results, 1)]
    for number, annotation in enumerate(annotations):
        if metric == 'segm':
            mask = run_lengths_of(truth, annotation, f'result {number}')
            annotation |= {'segmentation': mask, 'area': float(mask_utils.area(mask))}
            annotation['bbox'] = mask_utils.toBbox(mask).tolist()
        else:
            annotation['area'] = annotation['bbox'][2] * annotation['bbox'][3]
    return coco_with_index({**truth.dataset, 'annotations': annotations})


def coco_with_index(content: dict[str, Any]) -> COCO:
    """The content of a COCO file as pycocotools holds it."""
    coco = COCO()
    coco.dataset = content
    with redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def run_lengths_of(truth: COCO, annotation: dict[str, Any], name: str) -> dict[str, Any]:
    """The mask of an annotation or a result, which must have the size of its image."""
    image = truth.imgs[annotation['image_id']]
    try:
        mask = truth.annToRLE(annotation)
        mask_utils.decode(mask)
    except Exception:  # pycocotools raises many kinds
        mask = {'size': None}
    if mask['size'] != [image['height'], image['width']]:
        raise UserError(
            f'{name} must have a mask of its image, {image["height"]} x {image["width"]} pixels, '
            'for the metric segm; without masks, set test_evaluator.metric=bbox'
        )
    return mask


def mean_precision(values: np.ndarray) -> float:
    """The mean of precisions without those of -1; nan if there are no others."""
    values = values[values > -1]
    return float(values.mean()) if values.size else math.nan
