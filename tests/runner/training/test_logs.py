"""What a training logs, and where."""

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from support import load_tool

from cpvt_pyramid.runner.training import logs
from cpvt_pyramid.tooling.command import UserError

train = load_tool('train')

SHORT = """
_base_ = '{base}'
train_cfg = dict(max_epochs=1)
train_dataloader = dict(dataset=dict(indices=6))
val_dataloader = dict(dataset=dict(indices=2))
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope='module')
def logged(configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training of 3 iterations that logs to everything, and what a terminal got."""
    folder, terminal = tmp_path_factory.mktemp('logged'), Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv('WANDB_MODE', 'offline')
        patch.delenv('MLFLOW_ALLOW_FILE_STORE', raising=False)
        patch.setattr(sys, 'stderr', terminal)
        patch.setattr(logs, 'REDRAW', 0)
        Path('short.py').write_text(SHORT.format(base=configs['detector']))
        command = ['short.py', '--work-dir', 'work', '--log-to', 'tensorboard', 'wandb', 'mlflow']
        assert train.main(command) == 0
        os.environ.pop('MLFLOW_ALLOW_FILE_STORE')
    (folder / 'terminal').write_bytes(terminal.getvalue().encode())
    return folder


def test_the_log_file(logged):
    (path,) = logged.glob('work/*/*.log')
    text = path.read_bytes().decode()
    assert '\r' not in text and '\x1b' not in text
    line = next(line for line in text.splitlines() if 'Epoch(train)' in line)
    assert re.search(r'lr: [\d.e-]+ .*eta: \d:\d\d.*loss: \d.*images/s: \d+\.\d.*memory: \d', line)
    (path,) = logged.glob('work/*/vis_data/2*.json')
    scalars = [json.loads(line) for line in path.read_text().splitlines()]
    first = scalars[0]
    assert first['images_per_second'] == pytest.approx(2 / first['time'])
    assert 'coco/bbox_mAP' in scalars[-1]


def test_the_progress_line(logged):
    drawn = re.split('[\r\n]', (logged / 'terminal').read_bytes().decode())
    lines = [line.strip() for line in drawn if line.startswith('iteration ')]
    assert [line.split()[1] for line in lines if '0/3' not in line] == ['1/3', '2/3', '3/3']
    assert re.fullmatch(
        r'.* 2/3 \(67%\)  00:\d\d left, lr [\d.e-]+  [\d.]+ images/s  \d+ MiB  loss [\d.]+',
        lines[-2],
    )
    assert not drawn[-1].strip()  # removed in the end


def test_tensorboard(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logged / 'work/tensorboard'))
    events.Reload()
    assert [event.step for event in events.Scalars('loss')] == [1, 2, 3]
    assert events.Scalars('lr')[0].value == pytest.approx(1e-3)
    assert events.Scalars('images_per_second')[0].value > 0
    assert len(events.Scalars('coco/bbox_mAP')) == 1


def test_mlflow(logged, monkeypatch):
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    import mlflow

    client = mlflow.MlflowClient(f'file://{logged}/work/mlflow')
    (experiment,) = client.search_experiments()
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == 'FINISHED' and run.info.run_name == 'work'
    history = client.get_metric_history(run.info.run_id, 'loss')
    assert [metric.step for metric in history] == [1, 2, 3]
    assert 'coco/bbox_mAP' in run.data.metrics
    assert run.data.params['model.backbone.arch'] == 'pcpvt_nano'


def test_wandb_offline(logged):
    (path,) = logged.glob('work/wandb/wandb/offline-run-*/run-*.wandb')
    content = path.read_bytes()
    assert b'coco/bbox_mAP' in content and b'images_per_second' in content


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(logs, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match='^--log-to wandb needs the package wandb; pip install'):
        logs.set_up_logs(Config({'work_dir': 'work'}), ['wandb'])


def test_logs_of_the_config_are_kept():
    backends = [{'type': 'TensorboardVisBackend', 'save_dir': 'mine'}]
    cfg = Config({
        'work_dir': 'work',
        'visualizer': {'type': 'DetLocalVisualizer', 'vis_backends': backends},
        'log_processor': {'type': 'MyLogProcessor'},
    })  # fmt: skip
    for _ in range(2):
        logs.set_up_logs(cfg, ['tensorboard', 'mlflow'])
    assert [b['save_dir'] for b in cfg.visualizer.vis_backends] == ['mine', 'work/mlflow']
    assert cfg.log_processor.type == 'MyLogProcessor'
    assert cfg.custom_hooks == [{'type': 'ProgressHook'}]
