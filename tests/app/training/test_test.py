"""test.py: evaluation, with and without test-time augmentation."""

import errno
import logging
import math
import os
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from mmcv.transforms import Compose
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS as METRICS_OF_MM
from mmengine.registry import init_default_scope
from PIL import Image
from small_data import CLASSES
from support import ROOT, assert_same, in_processes, load_tool, save_tiff

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.parts import data_of
from cpvt_pyramid.app.training import test as testing
from cpvt_pyramid.app.training.dump import results_dump
from cpvt_pyramid.app.training.report_of_config import analyse
from cpvt_pyramid.app.training.runner import CommandRunner

test_tool = load_tool('test')


# By the kind of model: the metric of a report, its names of mm's metrics, and mm's unit.
METRICS = {
    'detector': ('bbox', {'mAP': 'AP', 'mAP_50': 'AP50', 'mAP_s': 'AP small'}, 1),
    'segmentor': ('labels', {'mIoU': 'mIoU', 'mAcc': 'mAcc', 'aAcc': 'aAcc'}, 100),
}

TTA_CONFIGS = (
    'retinanet_cpvt_s.py',
    'semantic_fpn_cpvt_s.py',
    'demo/trees_retinanet_cpvt_nano.py',
    'bands/semantic_fpn_cpvt_s.py',
)


@pytest.mark.parametrize('tta', [(), ('--tta',)])
@pytest.mark.parametrize('kind', METRICS)
def test_evaluation(untrained, kind, tta, capsys):
    """Of images of several sizes. Its metrics are those of its report, and do not depend on the
    batch size."""
    resize = 'test_dataloader.dataset.pipeline.1.keep_ratio=True'
    command = [*untrained[kind], *tta, '--cfg-options', resize]
    tables, samples = [], []
    for size, report in ((1, ['--report', 'page.html']), (4, [])):
        files = ['--out', f'found/{size}.pkl', *report]
        assert test_tool.main([*command, f'test_dataloader.batch_size={size}', *files]) == 0
        said = capsys.readouterr().out
        tables.append(re.findall(r'^(\S+) +(-?[\d.]+(?:e-\d+)?)$', said, re.M))
        samples.append(pickle.loads(Path(f'found/{size}.pkl').read_bytes()))
        assert said.endswith('\npage.html\n') == (size == 1)
    assert tables[0] == tables[1] and '<svg' in Path('page.html').read_text()
    metric, names, unit = METRICS[kind]
    found = analyse(load_config(untrained[kind][0]), Path('found/1.pkl')).numbers[metric]
    shown = {name.removeprefix('coco/bbox_'): float(value) for name, value in tables[0]}
    for name, ours in names.items():
        if shown[name] == -1:  # there are no such objects
            assert math.isnan(found[ours])
        else:
            tolerance = 6e-4 if unit == 1 else 6e-3
            assert unit * found[ours] == pytest.approx(shown[name], abs=tolerance)
    assert len(samples[0]) == 4
    for alone, joint in zip(*samples):
        assert alone['img_path'] == joint['img_path']
        if kind == 'segmentor':
            with Image.open(alone['img_path']) as image:
                size = image.size[::-1]
            pixels = [sample['pred_sem_seg']['data'] for sample in (alone, joint)]
            assert torch.equal(*pixels) and len(pixels[0].unique()) > 1
            assert pixels[0].shape[-2:] == size and 'seg_logits' not in alone
            continue
        alone, joint = (sample['pred_instances'] for sample in (alone, joint))
        assert len(joint['labels']) and torch.equal(joint['labels'], alone['labels'])
        torch.testing.assert_close(joint['bboxes'], alone['bboxes'], rtol=0, atol=1e-2)
    assert list(Path('work_dirs', kind, 'test').glob('*/*.json'))


@pytest.mark.parametrize('kind', METRICS)
def test_a_config_has_the_same_metrics_on_its_data_and_on_a_data_yaml(
    untrained, kind, sample_dataset, capsys
):
    """By OpenMMLab, and as any other model."""
    detects = kind == 'detector'
    if detects:
        text = 'format: coco\nval: coco/val2017\n'
        text += 'annotations: {val: coco/annotations/instances_val2017.json}\n'
    else:
        ade = 'ade/ADEChallengeData2016'
        names = dict(enumerate(('background', *CLASSES), 1))
        text = f'format: masks\nval: {ade}/images/validation\nnames: {names}\n'
        text += f'annotations: {ade}/annotations/validation\nignored: [0, 255]\n'
    Path('data.yaml').write_text(f'path: {sample_dataset}\n{text}')
    shown = []
    for more in ([], ['data.yaml']):
        assert test_tool.main([*untrained[kind], *more]) == 0
        said = capsys.readouterr().out
        shown.append({n: float(v) for n, v in re.findall(r'^(\S+) +(-?[\d.e-]+)$', said, re.M)})
    _, names, unit = METRICS[kind]
    theirs, ours = shown
    for name, own in names.items():
        value = theirs[f'coco/bbox_{name}' if detects else name]
        if value != -1:
            assert ours.get(own, 0) * unit / 100 == pytest.approx(value, abs=6e-4 * unit)


@pytest.mark.parametrize('kind', METRICS)
def test_two_processes_find_what_one_finds(untrained, configs, kind):
    """Of an odd number of images of several sizes, of which the second process gets one twice."""
    load_config(configs[kind])  # imports mm once, and not in each process
    command = [*untrained[kind], '--cfg-options', 'test_dataloader.batch_size=2']
    command += ['test_dataloader.dataset.pipeline.1.keep_ratio=True']
    command += ['test_dataloader.dataset.indices=3']
    files = ['--out', 'all.pkl', '--report', 'page.html', '--work-dir', 'work']
    for folder in 'one', 'two':
        Path(folder).mkdir()

    def work(rank: int, folder: str, *options: str) -> int:
        os.chdir(folder)
        with Path(f'out{rank}').open('w') as sys.stdout:
            return test_tool.main([*command, *files, *options])

    assert in_processes(1, partial(work, folder='one')) == [(0, mock.ANY)]
    found = in_processes(2, lambda rank: work(rank, 'two', '--launcher', 'pytorch'))
    assert [status for status, _ in found] == [0, 0], found
    tables = [
        re.findall(r'^[\w/]+ +-?[\d.e-]+$', Path(folder, 'out0').read_text(), re.M)
        for folder in ('one', 'two')
    ]
    assert tables[0] == tables[1] and len(tables[0]) >= 3
    one, two = (pickle.loads(Path(folder, 'all.pkl').read_bytes()) for folder in ('one', 'two'))
    assert len(one) == 3
    assert_same(one, two)
    assert all(Path(folder, 'page.html').is_file() for folder in ('one', 'two'))


def test_a_report_leaves_the_files_of_its_folder(untrained):
    """Predictions are written nowhere but to `--out`."""
    Path('work').mkdir()
    Path('work/predictions.pkl').write_text('mine')
    options = '--work-dir', 'work', '--report', 'page.html'
    assert test_tool.main([*untrained['segmentor'], *options]) == 0
    assert Path('work/predictions.pkl').read_text() == 'mine'
    assert not [*Path('work').rglob('.test-*')] and '<svg' in Path('page.html').read_text()


def test_predictions_are_written_whole_or_not_at_all(untrained, capsys):
    dump = results_dump('mmseg', 'all.pkl')
    assert dump.compute_metrics([{'a': 1}]) == {}
    with pytest.raises(Exception, match='pickle'):
        dump.compute_metrics([{'a': 2}, (i for i in ())])
    assert pickle.loads(Path('all.pkl').read_bytes()) == [{'a': 1}]
    os.remove('all.pkl')
    os.mkdir('all.pkl')
    assert test_tool.main([*untrained['detector'], '--out', 'all.pkl']) == 2
    assert 'cpvt test: all.pkl must be a file to write' in capsys.readouterr().err
    assert os.listdir() == ['all.pkl']  # no folder for a log


def test_a_log_on_a_full_disk_raises_an_error(monkeypatch):
    """By default, logging prints a traceback for each line."""
    runner = CommandRunner.__new__(CommandRunner)
    runner._log_dir, runner._timestamp, runner._experiment_name = '.', 'now', 'name'
    logger = runner.build_logger()
    (file,) = (h for h in logger.handlers if isinstance(h, logging.FileHandler))
    logger.info('one')
    full = mock.Mock(write=mock.Mock(side_effect=OSError(errno.ENOSPC, 'No space left')))
    monkeypatch.setattr(file, 'stream', full)
    with pytest.raises(OSError, match='No space'):
        logger.info('two')
    assert 'one' in Path(file.baseFilename).read_text()


@pytest.mark.parametrize('config', TTA_CONFIGS)
def test_a_shipped_pipeline_of_augmentation_gives_all_sizes_and_flips(config, tmp_path):
    cfg = load_config(ROOT / 'configs' / config)
    loading, augmentation = cfg.tta_pipeline
    image = np.zeros((40, 60, len(loading.get('bands', 'RGB'))), np.uint8)
    path = save_tiff(tmp_path / 'image.tif', image)
    masks = tmp_path / 'masks.png'
    Image.fromarray(image[..., 0]).save(masks)
    sample = {'img_path': str(path), 'img_id': 0, 'instances': []}
    sample |= {'seg_map_path': str(masks), 'seg_fields': [], 'label_map': None}
    sample |= {'reduce_zero_label': True}

    init_default_scope(cfg.default_scope)
    testing.augment(cfg)
    (dataset,) = data_of(cfg, 'test')
    found = Compose(dataset['pipeline'])(sample)['data_samples']
    assert len(found) == math.prod(map(len, augmentation['transforms'])) > 1
    assert 2 * sum(bool(each.flip) for each in found) == len(found)


@METRICS_OF_MM.register_module()
class OddMetric(BaseMetric):
    """With values that are no numbers."""

    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        values = {'a': torch.eye(2), 'b': np.ones(2), 'c': [0.5, 1], 'd': {'x': 1.0}}
        return values | {
            'e': 'two\nlines',
            'f': np.float32(0.25),
            'g': torch.tensor(0.5),
            'h': None,
        }


def test_metrics_that_are_no_numbers(untrained, capsys):
    config = Path('odd.py')
    config.write_text(
        f"_base_ = '{untrained['detector'][0]}'\n"
        "test_evaluator = dict(_delete_=True, type='OddMetric')\n"
    )
    assert test_tool.main([str(config), untrained['detector'][1]]) == 0
    lines = capsys.readouterr().out.splitlines()[-8:]
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        '[[1.0, 0.0], [0.0, 1.0]]',
        '[1.0, 1.0]',
        '[0.5, 1]',
        "{'x': 1.0}",
        'two lines',
        '0.25',
        '0.5',
        'None',
    ]


def test_no_detection_at_all(untrained, capsys):
    """The evaluation of mmdet then has no metrics."""
    command = [*untrained['detector'], '--out', 'found.pkl', '--cfg-options']
    assert test_tool.main([*command, 'model.test_cfg.score_thr=1.1']) == 2
    assert 'cpvt test: the test has computed no metric; ' in capsys.readouterr().err
    assert len(pickle.loads(Path('found.pkl').read_bytes())) == 4
    Path('found.pkl').unlink()  # no command replaces a file
    writes = ['test_evaluator.format_only=True', 'test_evaluator.outfile_prefix=written']
    assert test_tool.main([*command, *writes]) == 0
    assert Path('written.bbox.json').exists()


def test_predictions_of_several_data_sets(untrained):
    """Each with a metric of its own."""
    Path('two.py').write_text(
        f"_base_ = '{untrained['detector'][0]}'\n"
        'data = _base_.test_dataloader.dataset\n'
        'metric = _base_.test_evaluator\n'
        "test_dataloader = dict(dataset=dict(_delete_=True, type='ConcatDataset', "
        'datasets=[data, data]))\n'
        "test_evaluator = dict(_delete_=True, type='MultiDatasetsEvaluator', "
        "dataset_prefixes=['a', 'b'], metrics=[metric, metric])\n"
    )
    assert test_tool.main(['two.py', untrained['detector'][1], '--out', 'found.pkl']) == 0
    assert len(pickle.loads(Path('found.pkl').read_bytes())) == 8
