"""The comparison of detections: right files pass whatever rounding decides, and wrong ones fail."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cpvt_pyramid.app.export import verification
from cpvt_pyramid.app.export.about import Settings
from cpvt_pyramid.app.export.base import Batch, Exportable, Preprocessing
from cpvt_pyramid.app.export.verification import Check, verify

BOXES = torch.tensor([[0.0, 0, 9, 9], [20, 0, 29, 9], [0, 20, 9, 29]])


@pytest.fixture(autouse=True)
def _small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, 'BATCHES', (((12, 20),), ((12, 20), (20, 9))))


class Best(Exportable):
    """Two of three boxes, those of the best scores; the last two differ by a margin.

    Args:
        margin: of their scores. Their last bits depend on the pixels.
    """

    task, output_names = 'detection', ('boxes', 'scores', 'labels')

    def __init__(self, margin: float) -> None:
        super().__init__(Preprocessing())
        self.margin = margin

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        found = [self.reference(image[None]) for image in batch.images]
        return {name: torch.cat([one[name] for one in found]) for name in self.output_names}

    def reference(self, image: Tensor, original: None = None) -> dict[str, Tensor]:
        bits = 1e-6 * (image.double().sum() * 1e3).sin()
        scores = self.scores().double() + bits * torch.tensor([0, 1, -1])
        return chosen(scores.float(), scores.topk(2).indices)

    def scores(self) -> Tensor:
        return torch.tensor([0.9, 0.5, 0.5 - self.margin])


def chosen(scores: Tensor, index: Tensor) -> dict[str, Tensor]:
    found = {'boxes': BOXES[index], 'scores': scores[index], 'labels': index % 2}
    return {name: x[None] for name, x in found.items()}


def checks(model: Best, index: list[int]) -> list[Check]:
    """Those of the boxes of a file that returns boxes by index."""
    found = chosen(model.scores(), torch.tensor(index, dtype=torch.int64))

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x.numpy().repeat(len(inputs['images']), 0) for name, x in found.items()}

    images = [np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)]
    found = verify(model, {'': run}, images, Settings())
    return [check for check in found if check.unit == 'without counterpart']


@pytest.mark.parametrize(
    'margin, index, wrong',
    [
        *((0.0, index, 0) for index in ([0, 1], [0, 2], [2, 0])),  # rounding decides between ties
        (0.0005, [0, 2], 2),  # scores within the tolerance, but no tie
        (0.0, [1, 2], 1),  # the best box is lost
        (0.0005, [0], 1),
        (0.0, [0, 1, 0], 1),  # a box twice
        (0.0, [0, 1, 1], 1),
        (0.0, [], 1),
    ],
)
def test_boxes_without_counterpart(margin, index, wrong):
    found = checks(Best(margin), index)
    assert [(check.error, check.passed) for check in found] == [(wrong, not wrong)] * 2
    if not wrong:
        assert found[0].note == '2 boxes' + ', 2 ties' * (index != [0, 1])


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
    model = Masks(margin=0.1)
    found = chosen(model.scores(), torch.tensor([0, 1])) | {'masks': change(masks())[None]}

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x.numpy().repeat(len(inputs['images']), 0) for name, x in found.items()}

    images = [np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)]
    checks = [check for check in verify(model, {'': run}, images, Settings())]
    of_masks = [check for check in checks if check.stage == 'masks']
    assert {check.passed for check in of_masks} == {passes}
    assert {check.unit for check in of_masks} == {'share of pixels'}
