"""How much the predictions of two models agree.

Shapes: N boxes, H x W image in pixels.
"""

from typing import Any, NamedTuple

import numpy as np

from ..predictions.kinds import Detections, LabelMap, Prediction
from ..predictions.matching import box_ious, greedy_pairs

IOU = 0.5  # of two boxes that are the same object
SCORES = 0.1  # largest difference of the scores of a pair that agrees


class Agreement(NamedTuple):
    """How much of the predictions of two models is the same; sums over images."""

    same: float = 0  # boxes of both models, or pixels, on which they agree
    all: float = 0  # boxes of both models, or pixels

    @property
    def share(self) -> float:
        """From 0 to 1; 1 if there is nothing to disagree on."""
        return self.same / self.all if self.all else 1.0

    def __add__(self, other: Any) -> 'Agreement':
        return Agreement(self.same + other.same, self.all + other.all)


def agreement_of(found: Prediction, expected: Prediction) -> Agreement:
    """Compare two predictions for one image.

    Pixels agree if they have one label. Boxes agree if they have one label, an IoU of at least
    `IOU`, and scores that differ by at most `SCORES`. Each box counts, so that a missing one and
    one too many cost the same.
    """
    if isinstance(found, LabelMap) and isinstance(expected, LabelMap):
        return Agreement(float((found.labels == expected.labels).sum()), found.labels.size)
    assert isinstance(found, Detections) and isinstance(expected, Detections)
    pairs = pairs_of(found, expected)
    same = 0
    for ours, theirs in pairs:
        if abs(found.scores[ours] - expected.scores[theirs]) <= SCORES:
            same += 2
    return Agreement(same, len(found) + len(expected))


def pairs_of(found: Detections, expected: Detections) -> list[tuple[int, int]]:
    """Boxes of two predictions that are one object: each of `expected`, which is sorted by score,
    takes the free one with the largest IoU."""
    overlaps = box_ious(expected.boxes, found.boxes)
    may_be_one = (overlaps >= IOU) & (expected.labels[:, None] == found.labels)
    pairs = greedy_pairs(np.where(may_be_one, overlaps, -np.inf))
    return [(ours, theirs) for theirs, ours in pairs]
