import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer
from PIL import Image
from support import load_tool

from cpvt_pyramid.runner.configs import load_config
from cpvt_pyramid.runner.models import fetch_checkpoint

sweep = load_tool('benchmarks/resolution_sweep')


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder, on the CPU, and without mmengine's global state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('mmengine.device.utils.DEVICE', 'cpu')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    # mmengine formats configs, which takes longer than these evaluations.
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))
    yield
    for kept in (DefaultScope, MessageHub, MMLogger, Visualizer):
        kept._instance_dict.clear()


def results(parent: str) -> dict:
    (path,) = Path(parent).glob('*/results.json')
    return json.loads(path.read_text())


@pytest.mark.parametrize('name, metric', [('detector', 'coco/bbox_mAP'), ('segmentor', 'mIoU')])
def test_a_sweep(name, metric, untrained, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(
        sweep, 'evaluate', lambda cfg, *rest: seen.append(cfg) or evaluate(cfg, *rest)
    )
    evaluate = load_tool('benchmarks/resolution_sweep').evaluate
    assert sweep.main([*untrained[name], '--sizes', '96', '64', '--limit', '2']) == 0
    assert [cfg.test_dataloader.dataset.pipeline[1].scale for cfg in seen] == [(64, 64), (96, 96)]
    rows = results(f'work_dirs/{name}/resolution_sweep')
    assert list(rows) == ['64', '96']
    for row in rows.values():
        assert metric in row['metrics'] and row['images'] == 2
        assert row['seconds'] > 0 and row['memory'] > 100
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith('| size | ') for line in shown) and shown[-2].endswith('sweep.png')
    with Image.open(shown[-2]) as picture:
        assert len(picture.convert('L').histogram()) > 1 and min(picture.size) > 400
        assert picture.convert('L').getextrema()[0] < 100


def test_continues_an_interrupted_sweep(untrained, monkeypatch):
    """Only the missing size is evaluated. Another checkpoint is another sweep."""
    seen = []

    def evaluate(cfg: Config, weights: dict, checkpoint: str) -> dict:
        size = cfg.test_dataloader.dataset.pipeline[1].scale[0]
        if size == 96 and not seen[-1:] == [None]:
            seen.append(None)
            raise KeyboardInterrupt
        seen.append(size)
        return dict(metrics={'mIoU': 1.0}, images=4, seconds=0.1, memory=1, device='cpu')

    monkeypatch.setattr(sweep, 'evaluate', evaluate)
    command = [*untrained['detector'], '--work-dir', 'here', '--sizes', '64', '96']
    assert sweep.main(command) == 130
    assert list(results('here')) == ['64']
    assert sweep.main(command) == 0
    assert list(results('here')) == ['64', '96'] and seen == [64, None, 96]
    assert sweep.main([*command, '128']) == 0
    assert list(results('here')) == ['64', '96', '128'] and seen == [64, None, 96, 128]
    torch.save({'state_dict': {}}, 'other.pth')
    assert sweep.main([command[0], 'other.pth', *command[2:-1]]) == 0
    assert seen[4:] == [64] and len(list(Path('here').iterdir())) == 2


@pytest.mark.parametrize('scale, expected', [((1333, 800), (800, 480)), ((2048, 512), (1920, 480))])
def test_the_ratio_of_the_scale_is_kept(scale, expected):
    pipeline = [dict(type='LoadImageFromFile'), dict(type='mmdet.Resize', scale=scale)]
    cfg = Config(dict(test_dataloader=dict(dataset=dict(pipeline=pipeline))))
    resized = sweep.at_size(cfg, 480)
    assert resized.test_dataloader.dataset.pipeline[1].scale == expected
    assert cfg.test_dataloader.dataset.pipeline[1].scale == scale


def test_images_beyond_the_limit_are_not_missed(untrained):
    """A perfect detector has an AP of 1 on the images that it has seen."""
    cfg = load_config(untrained['detector'][0])
    cfg.test_dataloader.dataset.indices = 2
    cfg.work_dir = 'work'
    truth = {}

    def perfect(self, data: dict, *_, **__) -> list:
        for sample in data['data_samples']:
            found = sample.gt_instances
            found.bboxes = found.bboxes.tensor  # of the image at its own size, as loaded
            found.scores = torch.ones(len(found))
            sample.pred_instances = found
            truth[sample.img_id] = len(found)
        return data['data_samples']

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mmdet.models.RetinaNet.test_step', perfect)
        weights = fetch_checkpoint(untrained['detector'][1])
        row = sweep.evaluate(cfg, weights, untrained['detector'][1])
    assert len(truth) == row['images'] == 2
    assert row['metrics']['coco/bbox_mAP_50'] == 1


@pytest.mark.parametrize(
    'arguments, complaint',
    [
        (['--sizes', '0', '64'], 'must be at least 1'),
        (['--sizes', '64', '--limit', '0'], 'must be at least 1'),
        (
            ['--sizes', '64', '--cfg-options', 'test_dataloader.dataset.pipeline=[]'],
            'exactly one Resize',
        ),
        (['--sizes', '64', '--cfg-options', 'test_dataloader.dataset.ann_file=no'], 'no test data'),
    ],
)
def test_mistakes(arguments, complaint, untrained, capsys):
    assert sweep.main([*untrained['detector'], *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith('resolution_sweep: ') and complaint in error
    assert error.count('\n') == 1


def test_a_damaged_file_of_results_is_reported(untrained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, 'identity', lambda *_: 'same')
    (tmp_path / 'here/same').mkdir(parents=True)
    (tmp_path / 'here/same/results.json').write_text('{"64')
    command = [*untrained['detector'], '--sizes', '64', '--work-dir', 'here']
    assert sweep.main(command) == 2
    assert 'results.json is damaged; remove it' in capsys.readouterr().err
