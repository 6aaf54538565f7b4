import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from cpvt_pyramid.app.training.curves import number_run, read_curves, smoothed, write_curves


def write_log(folder: Path, records: list[dict], tail: str = '') -> None:
    (folder / 'vis_data').mkdir(parents=True)
    lines = ''.join(json.dumps(record) + '\n' for record in records)
    (folder / 'vis_data' / 'scalars.json').write_text(lines + tail)


def train_record(step: int, loss: float = 1.0, **more: float) -> dict:
    return {'lr': 0.1, 'loss': loss, 'loss_cls': loss / 3, 'time': 0.5, 'step': step, **more}


def epochs(first: int, last: int, length: int, interval: int, loss: float = 1.0) -> list[dict]:
    """As mmengine logs: every `interval` iterations of an epoch; the validation by the epoch."""
    records = []
    for epoch in range(first, last + 1):
        for i in range(interval, length + 1, interval):
            step = (epoch - 1) * length + i
            records.append(train_record(step, loss, epoch=epoch, iter=step))
        records.append({'coco/bbox_mAP': epoch / 100, 'time': 1.0, 'step': epoch})
    return records


def test_epochs_become_iterations_and_iterations_stay(tmp_path) -> None:
    write_log(tmp_path / 'epochs/20260101_000000', epochs(1, 4, 77, 10))
    curves = read_curves(tmp_path / 'epochs')
    assert curves.epoch_length == 77 and not curves.resumed
    assert curves.metrics == {'coco/bbox_mAP': {77: 0.01, 154: 0.02, 231: 0.03, 308: 0.04}}
    assert sorted(curves.losses) == ['loss', 'loss_cls'] and len(curves.losses['loss']) == 28
    records = [train_record(step, iter=step) for step in range(50, 201, 50)]
    records.insert(2, {'mIoU': 20.0, 'step': 100})
    records.append({'mIoU': 30.0, 'step': 0})  # where nobody counts epochs, mmengine may say 0
    write_log(tmp_path / 'iterations/20260101_000000', records)
    curves = read_curves(tmp_path / 'iterations')
    assert curves.epoch_length is None and curves.metrics == {'mIoU': {100: 20.0, 200: 30.0}}


def test_resumed_training_is_one_curve(tmp_path) -> None:
    # Killed in epoch 4, with checkpoints up to epoch 2; resumed with another loss.
    killed = epochs(1, 3, 50, 10) + [train_record(s, epoch=4, iter=s) for s in (160, 170)]
    write_log(tmp_path / '20260101_000000', killed, tail='{"lr": 0.1, "lo')
    write_log(tmp_path / '20260101_010000', epochs(3, 3, 50, 10, loss=2.0))
    write_log(tmp_path / '20260101_020000', [])  # began and was stopped at once
    curves = read_curves(tmp_path)
    assert curves.resumed == [110] and curves.epoch_length == 50
    assert curves.losses['loss'] == {s: 1.0 if s <= 100 else 2.0 for s in range(10, 151, 10)}
    assert list(curves.metrics['coco/bbox_mAP']) == [50, 100, 150]


@pytest.mark.parametrize('numbered', [True, False])
def test_the_order_of_runs_does_not_depend_on_local_time(tmp_path, numbered):
    """Which goes back with its zone and in autumn; where runs have numbers, that of the file system
    does not count either."""
    for index, (name, steps) in enumerate([('2', range(1, 10)), ('1', range(10, 16))]):
        write_log(tmp_path / name, [train_record(step) for step in steps])
        log = tmp_path / name / 'vis_data/scalars.json'
        os.utime(log, (9 - index, 9 - index) if numbered else (index, index))
        if numbered:
            number_run(tmp_path / name)
    curves = read_curves(tmp_path)
    assert sorted(curves.losses['loss']) == list(range(1, 16)) and curves.resumed == [10]


@pytest.mark.parametrize('until', [2, 3])
def test_a_run_that_was_stopped_in_its_first_epoch(tmp_path, until):
    """Its iterations stay, and the next run, which begins there, tells how long an epoch is."""
    records = epochs(1, until, 200, 25)
    write_log(tmp_path / '1', records[:3])
    shifted = [train_record(step, epoch=1, iter=step) for step in (112, 137, 162, 187)]
    write_log(tmp_path / '2', shifted + records[8:])
    curves = read_curves(tmp_path)
    assert curves.epoch_length == 200 and curves.resumed == [112]
    first_epoch = [step for step in curves.losses['loss'] if step <= 200]
    assert first_epoch == [25, 50, 75, 112, 137, 162, 187]
    assert list(curves.metrics['coco/bbox_mAP']) == [200 * epoch for epoch in range(1, until + 1)]


@pytest.mark.parametrize('by_epoch', [True, False])
def test_logs_of_mmengine_itself(tmp_path, monkeypatch, by_epoch: bool) -> None:
    from mmengine.evaluator import BaseMetric
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, inputs, mode: str):
            return {'loss': (self.weight**2).sum()} if mode == 'loss' else [{}]

    validated = []

    class Metric(BaseMetric):
        def process(self, *_) -> None:
            self.results.append(0)

        def compute_metrics(self, results: list) -> dict:
            validated.append(runner.iter)
            return {'mIoU': float(runner.iter)}

    loader = {
        'batch_size': 1,
        'num_workers': 0,
        'dataset': [{'inputs': torch.zeros(1)}] * 10,
        'sampler': {'type': 'DefaultSampler', 'shuffle': False},
    }
    loop = {'max_epochs': 4, 'val_interval': 2} if by_epoch else {'max_iters': 9, 'val_interval': 4}
    # It looks at the machine's compilers, which takes seconds.
    monkeypatch.setattr('mmengine.runner.runner.collect_env', dict)
    runner = Runner(
        Model(),
        str(tmp_path / 'run'),
        loader,
        loader,
        train_cfg={'by_epoch': by_epoch, **loop},
        val_cfg={},
        val_evaluator=[Metric()],
        optim_wrapper={'optimizer': {'type': 'SGD', 'lr': 0.01}},
        default_hooks={
            'logger': {'type': 'LoggerHook', 'interval': 2, 'log_metric_by_epoch': by_epoch},
            'checkpoint': None,
        },
        log_processor={'by_epoch': by_epoch},
        default_scope='mmengine',
        log_level='ERROR',
        experiment_name=f'curves_{by_epoch}',
    )
    runner.train()
    curves = read_curves(tmp_path / 'run')
    assert validated == ([20, 40] if by_epoch else [4, 8, 9])
    assert curves.metrics['mIoU'] == {i: float(i) for i in validated}


def test_curves_are_drawn(tmp_path) -> None:
    records = [train_record(10, math.nan), train_record(20), train_record(30, 0.5)]
    write_log(tmp_path / 'alone', records)
    write_log(tmp_path / 'both', epochs(1, 3, 20, 5))
    write_curves(tmp_path, tmp_path / 'both.jpg')
    shutil.rmtree(tmp_path / 'both')
    write_curves(tmp_path, tmp_path / 'curves.png')
    alone, both = (Image.open(tmp_path / name).size for name in ('curves.png', 'both.jpg'))
    assert both[0] == alone[0] and both[1] > 1.5 * alone[1]  # a second panel
    assert sorted(p.name for p in tmp_path.iterdir()) == ['alone', 'both.jpg', 'curves.png']
    assert smoothed([1, 2, 6, 3], 1) == [1.5, 3, 11 / 3, 4.5]
    assert smoothed([1, math.nan, 3], 1) == [1, 2, 3]


def test_metrics_of_objects_that_do_not_exist(tmp_path) -> None:
    records = epochs(1, 2, 50, 10)
    for record in records:
        if 'coco/bbox_mAP' in record:
            record['coco/bbox_mAP_s'] = -1.0
    write_log(tmp_path / '20260101_000000', records)
    assert list(read_curves(tmp_path).metrics) == ['coco/bbox_mAP']


def test_nothing_to_draw(tmp_path) -> None:
    write_log(tmp_path / 'empty/20260101_000000', [])
    with pytest.raises(ValueError, match='no loss was logged'):
        write_curves(tmp_path / 'empty', tmp_path / 'curves.png')
    assert not (tmp_path / 'curves.png').exists()
