"""The metrics of the experiments against other implementations, in random cases."""

import io
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision

from experiments.position.answers import LEAST_SCORE, digit_precision
from experiments.runs import mean_iou
from experiments.unpadded.pictures import KEPT, Sample
from experiments.unpadded.runs import Prediction, average_precision


def random_boxes(count: int) -> Tensor:
    corner = 100 * torch.rand(count, 2)
    return torch.cat([corner, corner + 10 + 60 * torch.rand(count, 2)], dim=1)


def random_image(jitter: float) -> tuple[Sample, Prediction]:
    """Objects, most of which are found, and what is no object; many scores are equal."""
    objects, others = int(torch.randint(1, 6, ())), int(torch.randint(4, ()))
    boxes, labels = random_boxes(objects), torch.randint(len(KEPT), (objects,))
    areas = [int(0.6 * (box[2:] - box[:2]).prod()) for box in boxes]
    moved = boxes + jitter * torch.randn(boxes.shape)
    confused = torch.where(torch.rand(objects) < 0.8, labels, (labels + 1) % len(KEPT))
    prediction = Prediction(
        boxes=torch.cat([moved, random_boxes(others)]),
        scores=(20 * torch.rand(objects + others)).round() / 20,
        labels=torch.cat([confused, torch.randint(len(KEPT), (others,))]),
    )
    nothing = torch.zeros(0)
    return Sample(nothing, boxes, labels, areas, nothing.numpy(), nothing), prediction


def precision_by_pycocotools(pairs: list[tuple[Sample, Prediction]]) -> float:
    def wide(boxes: Tensor) -> list[list[float]]:
        return torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1).tolist()

    objects, found = [], []
    for i, (sample, prediction) in enumerate(pairs):
        for box, label, area in zip(wide(sample.boxes), sample.labels.tolist(), sample.areas):
            about = dict(image_id=i, category_id=label, bbox=box, area=area, iscrowd=0)
            objects.append(dict(id=len(objects) + 1, **about))
        numbers = prediction.scores.tolist(), prediction.labels.tolist()
        for box, score, label in zip(wide(prediction.boxes), *numbers):
            found.append(dict(image_id=i, category_id=label, bbox=box, score=score))
    truth = COCO()
    truth.dataset = dict(
        info={},
        images=[dict(id=i) for i in range(len(pairs))],
        annotations=objects,
        categories=[dict(id=i) for i in range(len(KEPT))],
    )
    with redirect_stdout(io.StringIO()):
        truth.createIndex()
        result = COCOeval(truth, truth.loadRes(found), 'bbox')
        result.evaluate()
        result.accumulate()
        result.summarize()
    return float(result.stats[0])


def test_box_ap_is_that_of_pycocotools():
    """What the published runs were measured with."""
    for count in range(1, 13):
        pairs = [random_image(jitter=1 + count % 7) for _ in range(count)]
        samples, predictions = zip(*pairs)
        expected = precision_by_pycocotools(pairs)
        assert average_precision(samples, predictions) == pytest.approx(expected, abs=1e-6)


def test_no_box_has_no_precision():
    sample, prediction = random_image(1)
    nothing = prediction._replace(
        boxes=torch.zeros(0, 4), scores=torch.zeros(0), labels=torch.zeros(0, dtype=torch.long)
    )
    assert average_precision([sample], [nothing]) == 0


def test_precision_of_digits_is_that_of_torchmetrics_with_many_recalls():
    pictures, candidates = 60, 36
    digits = torch.stack([torch.randperm(10)[:3] for _ in range(pictures)])
    truth = random_boxes(3 * pictures).view(pictures, 3, 4)
    boxes = random_boxes(candidates * pictures).view(pictures, candidates, 4)
    boxes[:, :3] = truth + torch.randn(truth.shape)
    scores = torch.rand(pictures, 10, candidates) ** 3
    scores[torch.rand(scores.shape) < 0.9] = 0
    for i in range(3):
        scores[torch.arange(pictures), digits[:, i], i] = torch.rand(pictures)
    found = []
    for of_digits, of_picture in zip(scores, boxes):
        labels, places = torch.nonzero(of_digits > LEAST_SCORE, as_tuple=True)
        kept = dict(boxes=of_picture[places], scores=of_digits[labels, places], labels=labels)
        found.append(kept)
    expected = MeanAveragePrecision(
        backend='pycocotools',
        iou_thresholds=[0.5],
        rec_thresholds=np.linspace(0, 1, 2001).tolist(),
    )
    expected.update(found, [dict(boxes=t, labels=d) for t, d in zip(truth, digits)])
    ours = digit_precision(scores, boxes, truth, digits)
    assert 0.1 < ours < 0.9
    assert ours == pytest.approx(float(expected.compute()['map']), abs=5e-4)


def test_mean_iou_is_that_of_sums_in_float64():
    for _ in range(5):
        truth = torch.randint(5, (3, 64, 64))
        guess = torch.randint(5, truth.shape)
        predicted = torch.where(torch.rand(truth.shape) < 0.3, guess, truth)
        shares = []
        for class_ in range(5):
            both = (truth == class_) & (predicted == class_)
            either = (truth == class_) | (predicted == class_)
            shares.append(int(both.sum()) / int(either.sum()))
        assert mean_iou(predicted, truth, 5) == pytest.approx(np.mean(shares), abs=1e-6)
