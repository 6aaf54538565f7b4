"""What kinds of errors detections have, and what they cost, in the manner of TIDE (Bolya et al.,
"TIDE: A General Toolbox for Identifying Object Detection Errors", ECCV 2020).

A detection is correct if it overlaps an object of its class with an IoU of at least 0.5 that no
better detection has. Every other one has an error:

    localization    its best object of its class has an IoU from 0.1 to 0.5
    classification  an object of another class has an IoU of at least 0.5
    duplicate       its object has a better detection
    background      no object has an IoU of 0.1
    both            none of these: the class and the place are wrong

tested in this order, as TIDE's code does. An object is missed if it has no correct detection and
none with an error of class or place. What a kind of error costs is the AP50 that is gained without
it: the best of the detections with a wrong class or place becomes correct and the others vanish, as
do duplicates, background and both; missed objects are not asked for.

Shapes: D detections and G objects of an image; K classes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...predictions.matching import greedy_pairs

ERRORS = ('classification', 'localization', 'both', 'duplicate', 'background', 'missed')
CLASSIFICATION, LOCALIZATION, BOTH, DUPLICATE, BACKGROUND, MISSED = range(len(ERRORS))
CORRECT = -1
FOREGROUND_IOU, BACKGROUND_IOU = 0.5, 0.1
RECALLS = np.linspace(0, 1, 101)


class Compared(NamedTuple):
    """The detections of an image, best first, next to its objects.

    Ignored objects, such as crowds, and detections of them are left out.
    """

    image: int  # its id
    labels: np.ndarray  # (D,)
    scores: np.ndarray  # (D,)
    boxes: np.ndarray  # (D, 4) x, y, width, height
    match: np.ndarray  # (D,) index of the object that a correct detection has; -1
    truth: np.ndarray  # (G,) labels of the objects
    truth_boxes: np.ndarray  # (G, 4)
    iou: np.ndarray  # (D, G)


def error_types(compared: Compared) -> tuple[np.ndarray, np.ndarray]:
    """The type of error of each detection (D,), CORRECT for none, and the object (D,) that one with
    a wrong class or place was meant for, -1 for others."""
    iou = compared.iou
    if not len(compared.truth):
        count = len(compared.labels)
        return np.full(count, BACKGROUND), np.full(count, -1)
    same = compared.labels[:, None] == compared.truth
    own = np.where(same, iou, 0)
    other = np.where(same, 0, iou)
    misplaced = (own.max(1) >= BACKGROUND_IOU) & (own.max(1) < FOREGROUND_IOU)
    tests = {  # the first that holds
        CORRECT: compared.match >= 0,
        LOCALIZATION: misplaced,
        CLASSIFICATION: other.max(1) >= FOREGROUND_IOU,
        DUPLICATE: own.max(1) >= FOREGROUND_IOU,
        BACKGROUND: iou.max(1) < BACKGROUND_IOU,
    }
    types = np.select(list(tests.values()), list(tests), BOTH)
    meant = [own.argmax(1), other.argmax(1)]
    return types, np.select([types == LOCALIZATION, types == CLASSIFICATION], meant, -1)


class Errors(NamedTuple):
    """The errors of detections on a data set."""

    ap50: float  # mean over the classes with objects
    counts: dict[str, int]  # by type
    costs: dict[str, float]  # by type, the AP50 that is gained without it


def find_errors(images: Sequence[Compared], classes: int) -> Errors:
    """Classify the errors on images, and compute what each type costs."""
    parts = []
    objects = np.zeros(classes, int)
    missed = np.zeros(classes, int)
    for compared in images:
        types, target = error_types(compared)
        places = np.arange(len(compared.truth))
        used = np.isin(places, compared.match)
        becomes = np.full(len(types), -1)  # the label with which a wrong detection is correct
        for i, j in enumerate(target):  # best first
            if j >= 0 and not used[j] and j not in target[:i]:
                becomes[i] = compared.truth[j]
        unreached = ~used & ~np.isin(places, target)
        objects += np.bincount(compared.truth, minlength=classes)
        missed += np.bincount(compared.truth[unreached], minlength=classes)
        parts.append((compared.labels, compared.scores, types, becomes))
    labels, scores, types, becomes = (np.concatenate(column) for column in zip(*parts))

    def mean_ap(
        labels: np.ndarray, correct: np.ndarray, kept: np.ndarray, number: np.ndarray
    ) -> float:
        values = []
        for label in np.flatnonzero(objects):
            mine = kept & (labels == label)
            values.append(ap_at_one_iou(scores[mine], correct[mine], number[label]))
        return float(np.mean(values)) if values else math.nan

    correct = types == CORRECT
    ap50 = mean_ap(labels, correct, np.ones(len(labels), bool), objects)
    counts = {}
    costs = {}
    for number, name in enumerate(ERRORS):
        of_type = types == number
        fixed = of_type & (becomes >= 0)
        left = objects - missed if number == MISSED else objects
        better = mean_ap(np.where(fixed, becomes, labels), correct | fixed, ~of_type | fixed, left)
        counts[name] = int(missed.sum() if number == MISSED else of_type.sum())
        costs[name] = max(better - ap50, 0.0)
    return Errors(ap50, counts, costs)


def ap_at_one_iou(scores: np.ndarray, correct: np.ndarray, objects: int) -> float:
    """COCO's AP at one IoU: the mean precision at 101 recalls; 0 without objects."""
    if not objects:
        return 0.0
    hits = correct[np.argsort(-scores, kind='stable')].cumsum()
    recall = hits / objects
    precision = hits / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(recall, RECALLS)
    return float(np.append(envelope, 0)[places].mean())


def best_threshold(scores: np.ndarray, correct: np.ndarray, objects: int) -> tuple[float, float]:
    """The score threshold with the highest F1, and that F1; nan without detections or objects."""
    if not objects or not len(scores):
        return math.nan, math.nan
    order = np.argsort(-scores, kind='stable')
    f1 = 2 * correct[order].cumsum() / (objects + np.arange(1, len(order) + 1))
    best = f1.argmax()
    return float(scores[order][best]), float(f1[best])


def confusion_of(images: Sequence[Compared], classes: int, score_thr: float) -> np.ndarray:
    """How often an object of a class (row) is detected as another (column), (K + 1, K + 1).

    The last column counts missed objects, and the last row detections of no object. Correct
    detections come first; each of the others, best first, takes the free object with the largest
    IoU of at least 0.5.
    """
    matrix = np.zeros((classes + 1, classes + 1), int)
    for compared in images:
        chosen = np.flatnonzero(compared.scores >= score_thr)
        match = compared.match[chosen]
        free = np.ones(len(compared.truth), bool)
        free[match[match >= 0]] = False
        wrong = np.flatnonzero(match < 0)  # of the chosen
        overlap = compared.iou[chosen[wrong]]
        for row, j in greedy_pairs(np.where(free & (overlap >= FOREGROUND_IOU), overlap, -np.inf)):
            match[wrong[row]] = j
            free[j] = False
        for i, j in zip(chosen, match):
            matrix[compared.truth[j] if j >= 0 else classes, compared.labels[i]] += 1
        missed = np.bincount(compared.truth[free], minlength=classes)
        matrix[:classes, classes] += missed
    return matrix
