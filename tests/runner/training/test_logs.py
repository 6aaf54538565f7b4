"""What a training logs, and where."""

import json
import re
from pathlib import Path

import pytest
from mmengine.config import Config
from support import load_tool

from cpvt_pyramid.config.plan import apply
from cpvt_pyramid.runner.training import logs
from cpvt_pyramid.tooling.command import UserError

train = load_tool('train')


def test_a_training_logs_to_everything(configs, monkeypatch):
    """3 iterations and an evaluation."""
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', '')
    monkeypatch.delenv('MLFLOW_ALLOW_FILE_STORE')  # also what the training sets is undone
    command = [str(configs['detector']), '--work-dir', 'work', '--log-to', *logs.LOGS]
    short = ['train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=6']
    assert train.main([*command, '--cfg-options', *short, 'val_dataloader.dataset.indices=2']) == 0
    work = Path('work').absolute()

    (path,) = work.glob('*/*.log')
    line = next(line for line in path.read_text().splitlines() if 'Epoch(train)' in line)
    assert re.search(r'lr: [\d.e-]+ .*eta: \d:\d\d.*loss: \d.*images/s: \d+\.\d.*memory: \d', line)
    (path,) = work.glob('*/vis_data/2*.json')
    first, *_, last = map(json.loads, path.read_text().splitlines())
    assert first['images_per_second'] == pytest.approx(2 / first['time'])
    assert 'coco/bbox_mAP' in last

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(work / 'tensorboard'))
    events.Reload()
    assert [event.step for event in events.Scalars('loss')] == [1, 2, 3]
    assert events.Scalars('lr')[0].value == pytest.approx(1e-3)
    assert events.Scalars('images_per_second')[0].value > 0
    assert len(events.Scalars('coco/bbox_mAP')) == 1

    import mlflow

    client = mlflow.MlflowClient(f'file://{work}/mlflow')
    (experiment,) = client.search_experiments()
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == 'FINISHED' and run.info.run_name == 'work'
    history = client.get_metric_history(run.info.run_id, 'loss')
    assert [metric.step for metric in history] == [1, 2, 3]
    assert 'coco/bbox_mAP' in run.data.metrics
    assert run.data.params['model.backbone.arch'] == 'pcpvt_nano'

    (path,) = work.glob('wandb/wandb/offline-run-*/run-*.wandb')
    content = path.read_bytes()
    assert b'coco/bbox_mAP' in content and b'images_per_second' in content


def test_settings_of_the_config_are_kept_and_a_missing_package_is_named(monkeypatch):
    backends = [{'type': 'TensorboardVisBackend', 'save_dir': 'mine'}]
    cfg = Config(
        {
            'visualizer': {'type': 'DetLocalVisualizer', 'vis_backends': backends},
            'log_processor': {'type': 'MyLogProcessor'},
        }
    )
    for _ in range(2):
        apply(cfg, logs.plan_logs(cfg, ['tensorboard', 'mlflow'], 'work'))
    assert [b['save_dir'] for b in cfg.visualizer.vis_backends] == ['mine', 'work/mlflow']
    assert cfg.log_processor.type == 'MyLogProcessor'
    monkeypatch.setattr(logs, 'find_spec', lambda name: None)
    with pytest.raises(
        UserError, match='^--log-to wandb needs the package wandb; pip install wandb$'
    ):
        logs.plan_logs(cfg, ['wandb'], 'work')
