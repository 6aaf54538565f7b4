"""The comparison of a model's outputs with those of PyTorch, at its export and on a user's device.

Shapes: N results, H x W image in pixels.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..predictions.matching import greedy_pairs

Arrays = Mapping[str, np.ndarray]  # the outputs for one image, by name


class Tolerances(NamedTuple):
    """How much outputs may differ from PyTorch's."""

    maps: float  # maps and logits: largest difference / largest value
    boxes: float  # of a box, in pixels
    scores: float  # of a score or probability
    pixels: float  # share of the pixels with another label, where two classes are equally likely
    # Share of the boxes without counterpart: where two have almost equal scores or overlaps,
    # rounding decides which one is returned.
    missing: float = 0.05


TOLERANCES = {  # by the dtype in the metadata, or that of OpenVINO
    'float32': Tolerances(maps=1e-3, boxes=0.1, scores=1e-3, pixels=1e-3),
    'float16': Tolerances(maps=5e-2, boxes=2.0, scores=2e-2, pixels=2e-2),
    # Of a file's own outputs on other processors: a value at the border of two steps of 8 bits
    # falls to either side.
    'int8': Tolerances(maps=1e-1, boxes=4.0, scores=5e-2, pixels=2e-2, missing=0.1),
    'bfloat16': Tolerances(maps=1e-1, boxes=4.0, scores=5e-2, pixels=2e-2, missing=0.1),
}
HEAD = ('images', 'stage', 'difference', 'tolerance', 'unit', '', 'runtime', 'passed')


class Check(NamedTuple):
    """One comparison of a report."""

    stage: str  # what was compared: the name of a stage or an output
    error: float  # the measured difference
    tolerance: float  # the largest difference allowed
    unit: str  # of both
    note: str = ''  # such as the number of boxes
    sizes: Sequence[str] = ()  # of the images of the batch, such as '160x213'
    runtime: str = ''  # such as 'openvino'

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # false for NaN

    @property
    def cells(self) -> list[str]:
        """A row of a table under `HEAD`."""
        return [
            ' '.join(self.sizes),
            self.stage,
            f'{self.error:.2g}',
            f'{self.tolerance:.2g}',
            self.unit,
            self.note,
            self.runtime,
            'yes' if self.passed else 'NO',
        ]


def worst(checks: Iterable[Check], images: Sequence[np.ndarray], runtime: str) -> list[Check]:
    """For each stage, the check with the largest error, of a batch of images in a runtime."""
    sizes = ['x'.join(map(str, image.shape[:2])) for image in images]
    result: dict[tuple[str, str], Check] = {}
    for check in checks:
        key = check.stage, check.unit
        if key not in result or not check.error <= result[key].error:  # NaN is the worst
            result[key] = check._replace(sizes=sizes, runtime=runtime)
    return list(result.values())


def compare_tensor(name: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> Check:
    """Compare what is no result for an image, such as maps, with its padding."""
    if found.shape != expected.shape:
        shapes = f'{found.shape} instead of {expected.shape}'
        return Check(name, math.nan, tolerance, 'relative', shapes)
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    scale = max(np.abs(expected).max(initial=0), 1e-6)
    error = np.abs(found - expected).max(initial=0) / scale
    return Check(name, float(error), tolerance, 'relative')


def compare_outputs(found: Arrays, expected: Arrays, tolerances: Tolerances) -> Iterator[Check]:
    """Compare the outputs for one image."""
    if is_detection(expected):
        yield from compare_boxes(found, expected, tolerances)
        return
    for name, x in expected.items():
        if found[name].shape != x.shape or name not in ('labels', 'probabilities'):
            yield compare_tensor(name, found[name], x, tolerances.maps)
        elif name == 'labels':
            share = float((found[name] != x).mean())
            yield Check(name, share, tolerances.pixels, 'share of pixels')
        else:
            error = float(np.abs(found[name] - x).max())
            yield Check(name, error, tolerances.scores, 'probability')


def is_detection(outputs: Arrays) -> bool:
    """Whether the outputs are results in rows, which may be in another order."""
    return {'boxes', 'labels'} <= outputs.keys()


def compare_boxes(found: Arrays, expected: Arrays, tolerances: Tolerances) -> Iterator[Check]:
    """Compare boxes, scores, labels and masks.

    Rows of equal scores may be in another order, and those with a negative label are unused.
    """
    used = found['labels'] >= 0
    found = {name: x[used] for name, x in found.items()}
    pairs = matched(found, expected, tolerances)
    ours = [row for row, _ in pairs]
    theirs = [row for _, row in pairs]
    wrong = len(found['scores']) + len(expected['scores']) - 2 * len(pairs)
    note = f'{len(expected["scores"])} boxes'
    allowed = math.floor(tolerances.missing * len(expected['scores']))
    yield Check('boxes', wrong, allowed, 'without counterpart', note)
    if not pairs:
        return
    pixels = np.abs(found['boxes'][ours] - expected['boxes'][theirs]).max()
    yield Check('boxes', float(pixels), tolerances.boxes, 'pixels', note)
    error = np.abs(found['scores'][ours] - expected['scores'][theirs]).max()
    yield Check('scores', float(error), tolerances.scores, 'probability', note)
    if 'masks' in expected:
        share = ((found['masks'][ours] >= 0.5) != (expected['masks'][theirs] >= 0.5)).mean()
        yield Check('masks', float(share), tolerances.pixels, 'share of pixels', note)


def matched(found: Arrays, expected: Arrays, tolerances: Tolerances) -> list[tuple[int, int]]:
    """Rows of detections that are the same: of one label, closest in box and score."""
    distances = np.abs(expected['boxes'][:, None] - found['boxes']).max(-1)
    differences = np.abs(expected['scores'][:, None] - found['scores'])
    are_close = (distances <= tolerances.boxes) & (differences <= tolerances.scores)
    are_close &= expected['labels'][:, None] == found['labels']
    apart = distances / tolerances.boxes + differences / tolerances.scores
    pairs = greedy_pairs(np.where(are_close, -apart, -np.inf))
    return [(ours, theirs) for theirs, ours in pairs]


def verdict(checks: Sequence[Check], reference: str = 'PyTorch') -> str:
    """What the comparisons with a reference show, in words."""
    failed = sum(not check.passed for check in checks)
    if failed:
        return f'FAILED, {failed} of {len(checks)} comparisons with {reference}'
    return f'passed, all {len(checks)} comparisons with {reference}'


def inside(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The part of an output in a padded batch that an image has alone."""
    return x[tuple(slice(n) for n in shape)]
