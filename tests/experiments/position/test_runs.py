"""Trainings: the same settings give the same result, however often they were interrupted."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import ttest_rel

from cpvt_pyramid.grid import Grid
from experiments import runs
from experiments.position import answers
from experiments.position.answers import RunSettings, digit_precision, mean_accuracy
from experiments.position.biases import ALiBi, LookHere
from experiments.position.encodings import ENCODINGS
from experiments.position.models import Answers
from experiments.position.tasks import TASKS, answers_of
from experiments.runs import mean_iou, run, tuned
from experiments.statistics import estimate, holm, paired_difference

TINY = RunSettings(steps=3, batch=4, pictures=8)


@pytest.mark.parametrize('when', ['training', 'writing'])
def test_an_interrupted_run_gives_the_same_result(tmp_path, when):
    """In the second step, or as its result is written."""
    whole = run(TINY, tmp_path / 'whole')
    folder = tmp_path / 'interrupted'
    module, name = (answers, 'loss_of') if when == 'training' else (runs, 'write_text')
    effects = [*[mock.DEFAULT] * (when == 'training'), KeyboardInterrupt]
    interrupted = mock.patch.object(module, name, wraps=getattr(module, name), side_effect=effects)
    with interrupted, pytest.raises(KeyboardInterrupt):
        run(TINY, folder)
    assert not list(folder.glob('*'))
    again = run(TINY, folder)
    assert again.data() == whole.data()
    with mock.patch.object(runs, 'train', side_effect=AssertionError):
        assert run(TINY, folder) == again  # read from its file


def test_the_number_of_threads_changes_nothing(tmp_path):
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run(TINY, tmp_path / str(threads)).losses)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert results[0] == results[1]


def test_tuning_uses_its_own_pictures_and_seeds(tmp_path, monkeypatch):
    asked = []

    def fake(todo, *rest):
        asked.extend(todo)
        best = {2e-3: 0.1, 5e-3: 0.3, 1e-2: 0.3}
        metrics = [dict.fromkeys(TASKS, best[one.lr]) for one in todo]
        return [runs.Result(one, m, [1.0], '', 0.0) for one, m in zip(todo, metrics)]

    monkeypatch.setattr(runs, 'run_all', fake)
    variants = [TINY, replace(TINY, position='none')]
    rates = (2e-3, 5e-3, 1e-2)
    assert tuned(variants, rates, tmp_path, 1, mean_accuracy) == [5e-3, 5e-3]
    assert {s.split for s in asked} == {'tuning'}
    assert {s.seed for s in asked} == {runs.TUNING_SEEDS}
    assert [(s.position, s.lr) for s in asked] == [
        (p, lr) for p in ('peg', 'none') for lr in (2e-3, 5e-3, 1e-2)
    ]


def test_failed_runs_are_counted(tmp_path):
    result = run(replace(TINY, lr=1e30, steps=6), tmp_path)
    assert result.failed and set(result.metrics) == {*TASKS, 'mIoU', 'AP', 'sizes'}


def test_results_are_in_order(tmp_path):
    todo = [replace(TINY, steps=1, seed=seed) for seed in (2, 1, 2)]
    found = runs.run_all(todo, tmp_path)
    assert [one.settings.seed for one in found] == [2, 1, 2] and found[0] is found[2]
    broken = replace(TINY, position='nothing')
    with pytest.raises(ValueError, match='nothing'):
        runs.run_all([*todo, broken], tmp_path)


def test_every_encoding_trains():
    for name, variant in ENCODINGS.items():
        settings = replace(TINY, **variant.of_model)
        model = settings.build()
        settings.loss(model, 0).backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad), name

    for name in ('rope', 'rope, normalized'):  # options reach the encoding
        model = replace(TINY, **ENCODINGS[name].of_model).build()
        assert model.backbone.rotation.normalized == (name == 'rope, normalized')


def test_biases_by_hand():
    """Of a map of 1 x 3 tokens after a class token."""
    q = torch.zeros(1, 2, 4, 8)
    *_, bias = ALiBi(2)(q, q, Grid(1, 3, class_tokens=1))
    assert torch.equal(bias[0, 0, 0], torch.zeros(4)) and torch.equal(bias[..., 0], bias[..., 0, :])
    assert bias[0, 0, 1].tolist() == [0, 0, -(2**-4), -(2**-3)]
    assert bias[0, 1, 2].tolist() == [0, -(2**-8), 0, -(2**-8)]
    *_, bias = LookHere(2, depth=0.5, view=90)(q, q, Grid(1, 3, class_tokens=1))
    hidden = LookHere.HIDDEN
    assert bias[0, 0, 2].tolist() == [0, hidden, 0, -0.5]  # its first head looks to the right
    assert bias[0, 1, 2].tolist() == [0, -0.5, 0, hidden]


# Metrics


def test_estimates_by_hand():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    # The 97.5% quantile of t with 2 degrees of freedom is 4.3027; deviation 1, error 1 / sqrt(3).
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert found.show(percent=False) == '2.000 ± 2.484'
    one = estimate([0.5])
    assert math.isnan(one.half) and math.isnan(one.p) and one.show() == '50.0'
    values, others = [0.3, 0.8, 0.1, 0.5], [0.1, 0.9, 0.4, 0.2]
    assert paired_difference(values, others).p == pytest.approx(ttest_rel(values, others).pvalue)
    constant = paired_difference([0.3, 0.2, 0.4], [0.2, 0.1, 0.3])  # but for rounding
    assert constant.mean == pytest.approx(0.1)
    assert constant.half == 0 and math.isnan(constant.p)
    # Sorted 0.01 0.02 0.04, times 3, 2, 1; then never decreasing.
    adjusted = holm([0.04, math.nan, 0.01, 0.02])
    assert adjusted == pytest.approx([0.04, math.nan, 0.03, 0.04], nan_ok=True)
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_mean_iou_by_hand():
    truth = torch.tensor([[[0, 0, 1, 1], [0, 0, 2, 2]]])
    predicted = torch.tensor([[[0, 1, 1, 1], [0, 0, 2, 0]]])
    # 3 of 5, 2 of 3 and 1 of 2
    assert mean_iou(predicted, truth, 3) == pytest.approx((3 / 5 + 2 / 3 + 1 / 2) / 3)


def test_precision_by_hand():
    """One digit in two pictures: the best candidate is wrong, the next two are right."""
    digits = torch.tensor([[7, 1, 2], [7, 3, 4]])
    truth = torch.zeros(2, 3, 4)
    truth[:, :, 2:] = 10.0
    boxes = torch.tensor([[[0.0, 0, 10, 10], [50, 50, 60, 60]]] * 2)
    scores = torch.zeros(2, 10, 2)
    scores[0, 7] = torch.tensor([0.8, 0.9])
    scores[1, 7] = torch.tensor([0.7, 0.0])
    # precision 1/2 and 2/3 at recall 1/2 and 1, made non-increasing: 2/3; the others have none.
    assert digit_precision(scores, boxes, truth, digits) == pytest.approx(2 / 3 / 5)


def test_perfect_answers_have_perfect_metrics():
    scenes = TINY.draw('test', 6, 0)

    class Oracle(torch.nn.Module):
        def forward(self, image):
            logits = {
                name: F.one_hot(torch.from_numpy(labels), TASKS[name].classes)
                for name, labels in answers_of(scenes).items()
            }
            readings = torch.zeros(6, 6, 6, 11)
            readings[..., 0] = 20
            boxes = torch.zeros(6, 6, 6, 4)
            for i in range(6):
                for j in range(3):
                    r, c = scenes.rows[i, j], scenes.columns[i, j]
                    readings[i, r, c, scenes.digits[i, j] + 1] = 40
                    boxes[i, r, c] = scenes.boxes[i, j] / 8 - torch.tensor([c, r, c, r])
            pixels = F.one_hot(scenes.pixels, 3).permute(0, 3, 1, 2).float()
            return Answers(logits, readings, boxes, pixels)

    assert set(answers.evaluate_answers(Oracle(), scenes).values()) == {1.0}
    zoomed = answers.evaluate_answers(TINY.build(), scenes, size=(96, 72))  # it is untrained
    assert zoomed['AP'] < 0.2 and np.isfinite(list(zoomed.values())).all()
