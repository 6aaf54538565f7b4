"""Measures and tables of the detectors of trees."""

import json

import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from pycocotools.coco import COCO

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.predict.openmmlab.models import build_model
from experiments.trees import __main__ as trees
from experiments.trees import runs


@pytest.fixture
def truth(tmp_path) -> COCO:
    """Two images; the second one has three objects."""
    boxes = {1: [[0, 0, 10, 10]], 2: [[0, 0, 10, 10], [20, 0, 10, 10], [40, 0, 10, 10]]}
    annotations = [
        dict(image_id=image, category_id=1, iscrowd=0, bbox=box, area=100)
        for image, of_image in boxes.items()
        for box in of_image
    ]
    content = dict(
        images=[dict(id=1, file_name='a'), dict(id=2, file_name='b')],
        annotations=[dict(a, id=i) for i, a in enumerate(annotations, 1)],
        categories=[dict(id=1, name='tree')],
    )
    path = tmp_path / 'truth.json'
    path.write_text(json.dumps(content))
    return COCO(path)


def test_precision_is_that_of_one_photograph(truth):
    boxes = torch.tensor([[0.0, 0, 10, 10], [20, 0, 30, 10], [60, 0, 70, 10]])
    found = runs.precision(truth, {2: (boxes, torch.tensor([0.9, 0.8, 0.7]))})
    # Two of three objects before the first wrong one: 67 of 101 recalls have precision 1.
    assert found['AP50'] == pytest.approx(67 / 101) and found['AP'] == pytest.approx(67 / 101)
    assert runs.precision(truth, {2: (boxes[:0], torch.zeros(0))}) == dict(AP=0.0, AP50=0.0)


def test_recall_and_precision_match_each_object_once():
    objects = torch.tensor([[0.0, 0, 10, 10], [20, 0, 30, 10]])
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [21, 0, 31, 10], [20, 0, 30, 10]])
    scores = torch.tensor([0.9, 0.8, 0.7, 0.2])  # the last one is below the score that counts
    assert runs.at_score(boxes, scores, objects) == dict(recall=1.0, precision=2 / 3)
    assert runs.at_score(boxes, scores - 1, objects) == dict(recall=0.0, precision=0.0)


def test_the_table_pairs_runs_by_seed(tmp_path, capsys):
    names = [f'{place} {name}' for place in runs.PHOTOGRAPHS for name in runs.MEASURES]
    for arm, values in dict(distilled=(0.5, 0.6, 0.7), scratch=(0.3, 0.41, 0.49)).items():
        for seed, value in enumerate(values):
            folder = tmp_path / f'{arm}-{seed}'
            folder.mkdir()
            measures = dict(arm=arm, seed=seed, **dict.fromkeys(names, value))
            (folder / 'measures.json').write_text(json.dumps(measures))
    assert trees.main(['--work-dir', str(tmp_path), '--finished']) == 0
    out = capsys.readouterr().out
    assert 'distilled, 3 seeds' in out and 'resnet18' not in out
    rows = [line for line in out.splitlines() if 'Yellowstone AP50' in line]
    assert '60.0 ± ' in rows[0] and '+20.0 ± ' in rows[0]
    assert len(json.loads((tmp_path / 'trees.json').read_text())) == 6


@pytest.mark.parametrize('known, wanted', [([], ['a=1']), (['a=1'], []), (['a=1'], ['a=2'])])
def test_runs_with_other_options_are_not_reused(known, wanted, tmp_path, capsys):
    run = tmp_path / 'scratch-0'
    run.mkdir()
    measures = dict(arm='scratch', seed=0, options=known)
    (run / 'measures.json').write_text(
        json.dumps(measures if known else dict(arm='scratch', seed=0))
    )
    words = ['--work-dir', str(tmp_path), '--arms', 'scratch', '--seeds', '1', '--workers', '1']
    assert trees.main([*words, *(['--cfg-options', *wanted] if wanted else [])]) == 2
    error = capsys.readouterr().err
    assert f'other changes of the config ({" ".join(known) or "none"}); take another' in error


def test_no_finished_run_is_one_line(tmp_path, capsys):
    assert trees.main(['--work-dir', str(tmp_path / 'new'), '--finished']) == 2
    assert 'no finished run' in capsys.readouterr().err


@pytest.mark.parametrize('arm', runs.ARMS)
def test_every_arm_takes_images_that_are_padded(arm):
    """The photographs have sides that are no multiples of 32, and crops of the training are."""
    init_default_scope('mmdet')
    cfg = load_config(runs.CONFIG, runs.ARMS[arm])
    model = build_model(cfg, 'cpu')
    sizes = [(100, 70), (64, 96)]
    samples = []
    for size in sizes:
        instances = InstanceData(bboxes=torch.tensor([[5.0, 5, 40, 45]]), labels=torch.tensor([0]))
        ignored = InstanceData(bboxes=torch.tensor([[50.0, 5, 70, 45]]), labels=torch.tensor([0]))
        meta = dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0))
        sample = DetDataSample(metainfo=meta, gt_instances=instances, ignored_instances=ignored)
        samples.append(sample)
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    data = model.data_preprocessor(dict(inputs=images, data_samples=samples), training=True)
    losses = model.train()(**data, mode='loss')
    assert all(module.training for module in model.backbone.modules())  # also BatchNorm
    total = sum(value.sum() for parts in losses.values() for value in parts)
    total.backward()
    assert all(p.grad is not None for p in model.backbone.parameters() if p.requires_grad)
    with torch.no_grad():
        (found,) = model.eval().test_step(dict(inputs=images[:1], data_samples=samples[:1]))
    assert found.pred_instances.bboxes.shape[1] == 4


def test_a_training_that_fails_is_one_line(tmp_path, capsys):
    options = ['--arms', 'scratch', '--seeds', '1', '--workers', '1']
    options += ['--cfg-options', 'nothing=1']
    assert trees.main(['--work-dir', str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert f'{tmp_path}/scratch-0/output.txt says why' in error and 'Traceback' not in error
    assert "name 'nothing'" in (tmp_path / 'scratch-0/output.txt').read_text()
