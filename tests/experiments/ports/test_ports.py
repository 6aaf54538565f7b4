"""Ports compared by training (experiments/ports)."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel
from support import ROOT

from benchmarks.models.ports import randomize
from experiments.ports import report, runs
from experiments.ports.__main__ import main
from experiments.ports.settings import ARMS, REFERENCE, SVT, RunSettings

TINY = RunSettings(seed=3, steps=3, batch=2, pictures=8, scales=(1,))


def test_a_step_is_all_portrait_or_all_landscape():
    for step in range(40):
        batch = runs.training_batch(replace(TINY, batch=4), step)
        shapes = [sample.image.shape[1:] for sample in batch]
        assert len({int(height > width) for height, width in shapes if height != width}) <= 1


def test_the_smallest_preset(tmp_path, monkeypatch, capsys):
    command = ['--preset', 'smoke', '--work-dir', str(tmp_path), '--workers', '1', '--seed', '7']
    assert main([*command, '--finished']) == 2
    assert 'there is no finished run in' in capsys.readouterr().err
    assert main(command) == 0
    found = (tmp_path / 'training.json').read_text()
    data = json.loads(found)['data']
    seeds = {arm: [run['settings']['seed'] for run in done] for arm, done in data['runs'].items()}
    assert seeds == dict.fromkeys((REFERENCE, 'ours, without', 'ResNet-18'), [7, 8])
    assert {run['settings']['split'] for run in data['tuning']} == {'tuning'}
    assert {run['settings']['seed'] for run in data['tuning']} == {500_007}

    monkeypatch.setattr(runs, 'train', None)  # everything is there
    assert main(command) == 0
    assert (tmp_path / 'training.json').read_text() == found

    lost = RunSettings(**{**data['runs'][REFERENCE][0]['settings'], 'scales': (1,)})
    runs.path_of(lost, tmp_path / 'runs').unlink()
    assert main([*command, '--finished']) == 0
    data = json.loads((tmp_path / 'training.json').read_text())['data']
    assert [len(data['runs'][arm]) for arm in seeds] == [1, 2, 2]


def without_backbone(tensors: dict) -> dict:
    return {key: value for key, value in tensors.items() if not key.startswith('backbone')}


def test_all_models_start_alike():
    """`build` compares the maps of the ports."""
    svts = [runs.build(RunSettings(**ARMS[arm])) for arm in (SVT, 'SVT, zero windows')]
    torch.testing.assert_close(*(model.state_dict() for model in svts), rtol=0, atol=0)
    assert [model.backbone.blocks[0][0].attn.padding for model in svts] == ['mask', 'zero']
    ours, *others = (
        runs.build(RunSettings(**{**ARMS[arm], 'seed': 5})).state_dict()
        for arm in (REFERENCE, 'timm', 'mmsegmentation', 'ours, learned table')
    )
    for weights in others:
        found, expected = without_backbone(weights), without_backbone(ours)
        torch.testing.assert_close(found, expected)
    equal, position = ours.keys() & weights.keys(), ours.keys() ^ weights.keys()
    assert position and all('pos_' in key for key in position)
    torch.testing.assert_close({k: weights[k] for k in equal}, {k: ours[k] for k in equal})


@pytest.mark.parametrize('region', [True, False])
def test_boxes_change_in_a_padded_batch(region):
    """Neck and head read the padding. In a batch of one size nothing changes."""
    settings = replace(TINY, region=region)
    model = runs.build(settings).eval()
    randomize(model.backbone)
    torch.nn.init.normal_(model.detector.retina_cls.weight, std=0.2)  # some scores are high
    samples = runs.evaluation(settings)

    def compare(samples):
        alone, batched = (runs.predict(model, samples, count) for count in (1, 8))
        found = runs.changes_by_padding(alone, batched)
        assert sum(bin_['images'] for bin_ in found) == len(samples)
        same = [torch.equal(a.classes, b.classes) for a, b in zip(alone, batched)]
        return found, all(same)

    found, same = compare(samples)
    assert sum(bin_['boxes'] for bin_ in found) > 100
    assert sum(bin_[kind] for bin_ in found for kind in runs.CHANGES) > 10 and not same
    found, same = compare([one for one in samples if one.image.shape == samples[0].image.shape])
    assert sum(bin_[kind] for bin_ in found for kind in runs.CHANGES) == 0 and same
    assert max(bin_['largest_move'] for bin_ in found) < 1e-2


def prediction(*rows):
    """Rows of left, right, score and label; boxes are 10 high."""
    left, right, scores, labels = torch.tensor(rows, dtype=torch.float32).view(-1, 4).T
    boxes = torch.stack([left, 0 * left, right, 0 * left + 10], dim=1)
    return runs.Prediction(boxes, scores, labels, torch.zeros(1, 1), 0.5)


@pytest.mark.parametrize(
    'alone, batched, kind',
    [
        ((0, 10, 0.9, 1), (0, 10, 0.86, 1), None),
        ((0, 10, 0.9, 1), (0, 10, 0.84, 1), 'score'),
        ((0, 10, 0.32, 1), (0, 10, 0.29, 1), None),  # only one of them is shown
        ((0, 10, 0.9, 1), (2, 12, 0.5, 1), 'moved'),
        ((0, 10, 0.9, 1), (2, 12, 0.9, 2), 'class'),
        ((0, 10, 0.9, 1), (8, 18, 0.2, 1), 'vanished'),
        ((0, 10, 0.2, 1), (8, 18, 0.9, 1), 'appeared'),
    ],
)
def test_changes_by_hand(alone, batched, kind):
    still = (100, 120, 0.9, 0), (200, 220, 0.1, 0)  # the second has too low a score
    found = runs.changes(prediction(alone, *still), prediction(*still, batched))
    assert {k for k in runs.CHANGES if found[k]} == ({kind} if kind else set())
    assert found['boxes'] == 2


def test_average_precision_and_mean_iou_by_hand():
    samples = runs.evaluation(TINY)
    exact = [
        runs.Prediction(one.boxes, torch.ones(len(one.boxes)), one.labels, one.classes, 0)
        for one in samples
    ]
    assert runs.accuracy(samples, exact) == pytest.approx(dict(AP=1, mIoU=1), abs=1e-6)
    wrong = [one._replace(labels=3 - one.labels, classes=0 * one.classes) for one in exact]
    pixels = torch.cat([one.classes.flatten() for one in samples])
    background = float((pixels == 0).double().mean())
    assert runs.accuracy(samples, wrong) == pytest.approx(dict(AP=0, mIoU=background / 5))


def test_the_page_has_what_its_runs_say():
    """Tables from the JSON file, and a difference of two arms by scipy."""
    findings = ROOT / 'experiments/ports/findings'
    page = (findings / 'training.md').read_text()
    data = json.loads((findings / 'training.json').read_text())['data']['runs']
    for table in report.tables(data):
        assert table.markdown() in page, table.title
    a, b = (
        np.array([run['metrics']['AP, batch 8, size 1'] for run in data[arm]])
        for arm in (REFERENCE, 'ours, without')
    )
    mean = 100 * (b - a).mean()
    half = 100 * ttest_rel(b, a).confidence_interval().high - mean
    row = report.tables(data)[1].rows[0]
    assert row[0] == 'ours, without' and row[2].startswith(f'{mean:+.1f} ± {half:.1f} (')


def test_the_page_of_the_region_has_what_its_runs_say():
    """Means, and differences of arms by scipy."""
    findings = ROOT / 'experiments/ports/findings'
    page = (findings / 'region.md').read_text()
    found = json.loads((findings / 'region.json').read_text())
    metrics = [f'{name}, batch 1, size {size}' for name in ('AP', 'mIoU') for size in (1, 2)]

    def values(arm: str, metric: str) -> np.ndarray:
        return np.array([100 * run['metrics'][metric] for run in found['runs'][arm]])

    seeds = [[run['settings']['seed'] for run in runs] for runs in found['runs'].values()]
    assert seeds == [list(range(7))] * 3
    for arm, title in found['arms'].items():
        means = [f'{values(arm, metric).mean():.1f} ± ' for metric in metrics]
        assert re.search(rf'^\| {title} \| ' + r'\S+ \| '.join(means), page, re.M), title
    for arm, other in (('backbone', 'none'), ('all', 'backbone'), ('all', 'none')):
        row = f'^\\| {found["arms"][arm]} minus {found["arms"][other]} '
        for metric in metrics:
            a, b = values(arm, metric), values(other, metric)
            mean = (a - b).mean()
            half = ttest_rel(a, b).confidence_interval().high - mean
            row += rf'\| {re.escape(f"{mean:+.1f} ± {half:.1f}")} \(\d\.\d+\) '
        assert re.search(row, page, re.M), row
