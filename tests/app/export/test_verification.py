"""The comparison of detections: right files pass whatever rounding decides, and wrong ones fail."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from cpvt_pyramid.app.export import verification
from cpvt_pyramid.app.export.about import Settings
from cpvt_pyramid.app.export.base import Batch, Exportable, Preprocessing
from cpvt_pyramid.app.export.verification import Check, verify

MANY, FEW = 40, 10  # boxes


@pytest.fixture(autouse=True)
def _small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, 'BATCHES', (((12, 20),), ((12, 20), (20, 9))))


class Best(Exportable):
    """Finds the first of many boxes.

    Args:
        count: of the boxes.
    """

    task, output_names = 'detection', ('boxes', 'scores', 'labels')

    def __init__(self, count: int) -> None:
        super().__init__(Preprocessing())
        self.count = count

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        found = [self.reference(image[None]) for image in batch.images]
        return {name: torch.cat([one[name] for one in found]) for name in self.output_names}

    def reference(self, image: Tensor, original: None = None) -> dict[str, Tensor]:
        return chosen(range(self.count))


def chosen(index: Iterable[int]) -> dict[str, Tensor]:
    numbers = torch.tensor([*index], dtype=torch.int64)
    corners = 10.0 * numbers[:, None] + torch.tensor([0.0, 0, 9, 9])
    found = {'boxes': corners, 'scores': 0.9 - 0.01 * numbers, 'labels': numbers % 2}
    return {name: x[None] for name, x in found.items()}


def checks(model: Best, index: Iterable[int]) -> list[Check]:
    """Those of the boxes of a file that returns boxes by index."""
    found = chosen(index)

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x.numpy().repeat(len(inputs['images']), 0) for name, x in found.items()}

    images = [np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)]
    found_checks = verify(model, {'': run}, images, Settings())
    return [check for check in found_checks if check.unit == 'without counterpart']


@pytest.mark.parametrize(
    'count, index, wrong, passes',
    [
        (MANY, range(MANY), 0, True),
        (MANY, range(MANY - 1, -1, -1), 0, True),  # in another order
        (MANY, [*range(MANY - 1), MANY], 2, True),  # rounding decides which one is the last
        (MANY, [*range(2, MANY), 0, 0], 2, True),
        (MANY, range(3, MANY), 3, False),  # the best ones are lost
        (MANY, [*range(MANY), 0, 1, 2], 3, False),  # boxes twice
        (FEW, range(FEW), 0, True),
        (FEW, range(1, FEW), 1, False),
        (FEW, [], FEW, False),
    ],
)
def test_boxes_without_counterpart(count, index, wrong, passes):
    found = checks(Best(count), index)
    assert [(check.error, check.passed) for check in found] == [(wrong, passes)] * 2
    assert found[0].note == f'{count} boxes'


class Masks(Best):
    """With masks, which the reference does not have."""

    output_names = ('boxes', 'scores', 'labels', 'masks')

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        found = [self.reference(image[None]) for image in batch.images]
        result = {name: torch.cat([one[name] for one in found]) for name in Best.output_names}
        return result | {'masks': masks().expand(len(found), 2, 28, 28)}


def masks() -> Tensor:
    return torch.rand(2, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    'change, passes',
    [(lambda x: x + 0.0014 * (x - 0.5), True), (lambda x: 1 - x, False)],
    ids=['values', 'pixels'],
)
def test_masks_are_judged_by_their_pixels(change, passes):
    """A sound export was refused, because values of masks differed by 0.0014."""
    model = Masks(2)
    found = chosen(range(2)) | {'masks': change(masks())[None]}

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x.numpy().repeat(len(inputs['images']), 0) for name, x in found.items()}

    images = [np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)]
    checks = [check for check in verify(model, {'': run}, images, Settings())]
    of_masks = [check for check in checks if check.stage == 'masks']
    assert {check.passed for check in of_masks} == {passes}
    assert {check.unit for check in of_masks} == {'share of pixels'}
