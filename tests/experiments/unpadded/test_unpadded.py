"""Models that are trained without padding (experiments/unpadded)."""

import json
import re

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel
from support import ROOT

from experiments.runs import one_thread, run
from experiments.unpadded import models, report, runs
from experiments.unpadded.__main__ import main
from experiments.unpadded.arms import ARMS, BATCHES, FOLDERS
from experiments.unpadded.runs import Prediction

FINDINGS = ROOT / 'experiments/unpadded/findings'
TINY = dict(seed=3, steps=1, batch=2, pictures=6)


def settings_of(arm, **options):
    model = dict(model=ARMS[arm].model, backbone=ARMS[arm].backbone)
    return runs.RunSettings(**model, **{**TINY, **options})


def test_no_step_is_padded():
    sizes = []
    for step in range(40):
        batch = runs.training_batch(settings_of('DINO'), step)
        sizes.append({tuple(sample.image.shape[1:]) for sample in batch})
    assert max(map(len, sizes)) == 1
    assert len(set().union(*sizes)) == 5  # 128 x 128 and two others, turned too


def test_an_image_alone_is_not_padded():
    for name, folder in FOLDERS.items():
        samples = runs.images_of(settings_of('DINO', pictures=60), name)
        sizes = np.array([sample.image.shape[1:] for sample in samples])
        assert not (sizes % 32).any()
        assert runs.padding_of(samples, 1) == 0
        portrait = np.mean(sizes[:, 0] > sizes[:, 1])
        square = np.mean(sizes[:, 0] == sizes[:, 1])
        assert portrait == pytest.approx(folder.portrait * (1 - square), abs=0.12)


def test_masks_are_those_of_the_classes():
    for sample in runs.images_of(settings_of('DINO'), 'mixed'):
        for mask, label, area in zip(sample.masks, sample.labels, sample.areas):
            assert (sample.classes[torch.from_numpy(mask)] == 1 + label).all()
            assert mask.sum() == area
        assert (sample.masks.any(0) == (sample.classes > 0).numpy()).all()


@pytest.mark.parametrize('arm', ARMS)
def test_every_model_is_trained_and_tested(arm, tmp_path, monkeypatch):
    monkeypatch.setattr(models, 'PROPOSALS', 10)  # an untrained model has a mask for each
    settings = settings_of(arm, pictures=2)
    tests = run(settings, tmp_path).metrics['tests']
    regions = (False,) if settings.backbone == 'resnet' else (True, False)
    expected = {(folder, 1, None) for folder in FOLDERS}
    expected |= {(folder, n, region) for folder in FOLDERS for n in BATCHES for region in regions}
    assert {(test['folder'], test['batch'], test['region']) for test in tests} == expected

    with one_thread():
        model = runs.build(settings.model, settings.backbone, settings.seed).eval()
        samples = runs.images_of(settings_of(arm), 'mixed')
        same_size = [one for one in samples if one.image.shape == samples[0].image.shape][:2]
        assert len(same_size) == 2
        if ARMS[arm].metric == 'AP':
            alone, batched = (runs.detect(model, same_size, count) for count in (1, 2))
            for one, other in zip(alone, batched):
                torch.testing.assert_close(other.scores, one.scores, rtol=1e-3, atol=1e-4)
        else:
            alone, batched = (runs.segment(model, same_size, count) for count in (1, 2))
            assert runs.changed_pixels(alone, batched) < 1e-3


def test_the_region_is_what_a_batch_is_tested_with():
    """Features inside an image change with its neighbors only without the region."""
    settings = settings_of('RetinaNet', pictures=8)
    model = runs.build(settings.model, settings.backbone, settings.seed).eval()
    samples = runs.images_of(settings, 'mixed')
    alone = model.backbone(runs.preprocess(model, samples[:1])[0])
    for region in (True, False):
        model.data_preprocessor.valid_region = region
        images, _ = runs.preprocess(model, samples)
        assert images.shape[1] == (4 if region else 3)
        inside = []
        for own, of_batch in zip(alone, model.backbone(images)):
            inside.append(of_batch[:1, :, : own.shape[2], : own.shape[3]])
        same = [torch.allclose(a, b, atol=1e-4) for a, b in zip(alone, inside)]
        assert all(same) == region


def test_measures_by_hand():
    box = torch.tensor([[0.0, 0.0, 10.0, 10.0]])
    one = Prediction(box, torch.tensor([0.9]), torch.tensor([0]))
    moved = one._replace(boxes=box + torch.tensor([2.0, 0.0, 2.0, 0.0]))
    assert runs.changed_boxes([one, one], [one, moved]) == 0.5
    classes = torch.tensor([[0, 1], [2, 3]])
    assert runs.changed_pixels([classes, classes], [classes, classes.T]) == 0.25


def test_a_small_comparison(tmp_path, capsys):
    arms = ('RetinaNet', 'Semantic FPN')
    command = ['--seeds', '2', '--steps', '2', '--pictures', '2', '--workers', '1']
    page = tmp_path / 'page.md'
    page.write_text('Before\n<!-- findings -->\n<!-- /findings -->\nAfter\n')
    command += ['--work-dir', str(tmp_path / 'work'), '--page', str(page)]
    assert main([*command, '--arms', *arms, 'RetinaNet']) == 0  # named twice
    assert (tmp_path / 'work/batches.png').stat().st_size > 10_000
    assert '**Mixed images: AP' in page.read_text()
    data = json.loads(page.with_suffix('.json').read_text())['data']
    assert {arm: len(of_seeds) for arm, of_seeds in data.items()} == dict.fromkeys(arms, 2)
    shown = capsys.readouterr().out
    for table in report.tables(data):  # from the file alone
        assert table.text() in shown


@pytest.mark.parametrize(
    'options, message',
    [
        (['--arms', 'YOLO'], '--arms must be of RetinaNet'),
        (['--seeds', '0'], '--seeds must be at least 1'),
        (['--page', 'nowhere.md'], 'there is no page nowhere.md'),
    ],
)
def test_a_mistake_is_one_line(options, message, tmp_path, capsys):
    assert main([*options, '--work-dir', str(tmp_path / 'new')]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and '\n' not in error
    assert not (tmp_path / 'new').exists()


def test_the_page_has_what_its_runs_say():
    """Tables from the JSON file, and a change in a batch by scipy."""
    page = (FINDINGS / 'unpadded.md').read_text()
    data = json.loads((FINDINGS / 'unpadded.json').read_text())['data']
    assert list(data) == list(ARMS)
    for table in report.tables(data):
        assert table.markdown() in page, table.title
    for arm, of_seeds in data.items():
        accuracy = {}
        for batch, region in ((1, None), (8, False)):
            of_test = []
            for one in of_seeds:
                for test in one['metrics']['tests']:
                    if (test['folder'], test['batch'], test['region']) == ('mixed', batch, region):
                        of_test.append(100 * test['accuracy'])
            accuracy[batch] = np.array(of_test)
        change = (accuracy[8] - accuracy[1]).mean()
        interval = ttest_rel(accuracy[8], accuracy[1]).confidence_interval()
        row = arm if ARMS[arm].backbone == 'resnet' else f'{arm}, without'
        cells = re.escape(f'{change:+.1f} ± {interval.high - change:.1f}')
        assert re.search(rf'^\| {row} \|.*\| {cells} \(\S.* \| 5 \| 0 \|$', page, re.M), arm
