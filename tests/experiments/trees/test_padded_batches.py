"""Detectors of trees in padded batches."""

import json

import numpy as np
import pytest
import torch
from mmengine.registry import init_default_scope
from mmengine.runner import save_checkpoint
from PIL import Image

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.predict.openmmlab.models import build_model
from experiments.trees import padded_batches, runs


@pytest.fixture
def trained(tmp_path):
    """The folder of a run whose detector has random weights, and data of two sizes."""
    rng = np.random.default_rng(0)
    root = tmp_path / 'data'
    (root / 'annotations').mkdir(parents=True)
    (root / 'whole').mkdir()
    noise = rng.integers(0, 256, (300, 300, 3), np.uint8)
    Image.fromarray(noise).save(root / padded_batches.NEIGHBOR)
    for split in padded_batches.PLACES.values():
        (root / split).mkdir()
        content = dict(images=[], annotations=[], categories=[dict(id=1, name='tree')])
        for number, (height, width) in enumerate([(70, 90), (64, 64)], 1):
            image = rng.integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(image).save(root / split / f'{number}.png')
            size = dict(height=height, width=width)
            content['images'].append(dict(id=number, file_name=f'{number}.png', **size))
            box = dict(bbox=[5, 5, 40, 40], area=1600, iscrowd=0, category_id=1)
            content['annotations'].append(dict(id=number, image_id=number, **box))
        path = root / f'annotations/instances_{split}.json'
        path.write_text(json.dumps(content))
    init_default_scope('mmdet')
    torch.manual_seed(0)
    options = ['model.backbone.init_cfg=None', 'model.test_cfg.score_thr=0.0']
    cfg = load_config(runs.CONFIG, options)
    cfg.data_root = str(root)
    model = build_model(cfg, 'cpu')
    model.bbox_head.retina_cls.bias.data.fill_(0.5)  # all anchors are found
    run = tmp_path / 'distilled-0'
    run.mkdir()
    cfg.dump(run / 'trees_nano.py')
    save_checkpoint(dict(state_dict=model.state_dict(), meta={}), str(run / 'epoch_1.pth'))
    (run / 'last_checkpoint').write_text(str(run / 'epoch_1.pth'))
    return run


def test_padding_changes_boxes_unless_batches_are_divided(trained):
    def measured(name: str) -> dict:
        return padded_batches.measure(trained, padded_batches.SETTINGS[name])

    divided = measured('ours, cpvt test')
    padded = measured('ours, without')
    assert divided['changed'] == [0.0] * len(padded_batches.SHARES)
    assert all(len(set(divided[place])) == 1 for place in padded_batches.PLACES)
    assert padded['changed'][0] == 0 and padded['changed'][-1] > 0.2


def test_the_share_is_that_of_the_padding():
    for share in padded_batches.SHARES:
        height, width = padded_batches.larger(300, 500, share)
        assert 1 - 300 * 500 / (height * width) == pytest.approx(share, abs=2e-3)


def test_tables_compare_each_run_with_itself(tmp_path):
    def run(alone: float, step: float) -> dict:
        values = [alone + i * step for i in range(len(padded_batches.SHARES))]
        return dict.fromkeys([*padded_batches.PLACES, 'changed'], values)

    results = {name: [run(0.3, 0.0), run(0.4, 0.0)] for name in padded_batches.SETTINGS}
    results['ResNet-18'] = [run(0.5, -0.1), run(0.3, -0.101)]
    first, *_ = padded_batches.tables(results)
    assert len(first.rows) == len(padded_batches.SETTINGS)
    assert first.rows[0][2] == '+0.0 ± 0.0 (1.000)'
    assert first.rows[-1][2].startswith('-10.0') and first.rows[-1][-1].startswith('-40.')
    padded_batches.draw(results, tmp_path / 'figure.png')
    assert Image.open(tmp_path / 'figure.png').width > 800


def test_a_missing_training_is_one_line(tmp_path, capsys):
    assert padded_batches.main(['--work-dir', str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert 'python -m experiments.trees --arms distilled' in error and error.count('\n') == 1
