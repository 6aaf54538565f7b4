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
from mmengine.registry import init_default_scope
from PIL import Image
from support import ROOT, assert_same, in_processes, load_tool, save_tiff

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.config.parts import data_of
from cpvt_pyramid.training import test as testing
from cpvt_pyramid.training.predictions import results_dump
from cpvt_pyramid.training.report.page import analyse
from cpvt_pyramid.training.runner import CommandRunner

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
    """Its metrics are those of its report."""
    files = ['--out', 'found/all.pkl', '--report', 'page.html']
    assert test_tool.main([*untrained[kind], *files, *tta]) == 0
    table = capsys.readouterr().out
    assert table.endswith('\npage.html\n') and '<svg' in Path('page.html').read_text()
    metric, names, unit = METRICS[kind]
    found = analyse(load_config(untrained[kind][0]), Path('found/all.pkl')).numbers[metric]
    for name, ours in names.items():
        reported = float(re.search(rf'\n(?:coco/bbox_)?{name} +([\d.e-]+)\n', table)[1])
        if reported == -1:  # there are no such objects
            assert math.isnan(found[ours])
        else:
            assert unit * found[ours] == pytest.approx(reported, abs=6e-4 if unit == 1 else 6e-3)
    samples = pickle.loads(Path('found/all.pkl').read_bytes())
    assert len(samples) == 4
    for sample in samples:
        if kind == 'detector':
            assert len(sample['pred_instances']['bboxes'])
        else:
            with Image.open(sample['img_path']) as image:
                assert sample['pred_sem_seg']['data'].shape[-2:] == image.size[::-1]
            assert 'seg_logits' not in sample
    assert list(Path('work_dirs', kind, 'test').glob('*/*.json'))


@pytest.mark.parametrize('tta', [(), ('--tta',)])
@pytest.mark.parametrize('kind', METRICS)
def test_metrics_do_not_depend_on_the_batch_size(untrained, kind, tta, capsys):
    """Of images of several sizes."""
    resize = 'test_dataloader.dataset.pipeline.1.keep_ratio=True'
    tables, samples = [], []
    for size in (1, 4):
        command = [*untrained[kind], *tta, '--out', f'{size}.pkl', '--cfg-options', resize]
        assert test_tool.main([*command, f'test_dataloader.batch_size={size}']) == 0
        tables.append(capsys.readouterr().out.splitlines()[-3:])
        samples.append(pickle.loads(Path(f'{size}.pkl').read_bytes()))
    assert tables[0] == tables[1]
    for alone, found in zip(*samples):
        assert alone['img_path'] == found['img_path']
        if kind == 'segmentor':
            pixels = [sample['pred_sem_seg']['data'] for sample in (alone, found)]
            assert torch.equal(*pixels) and len(pixels[0].unique()) > 1
            continue
        alone, found = (sample['pred_instances'] for sample in (alone, found))
        assert len(found['labels']) and torch.equal(found['labels'], alone['labels'])
        torch.testing.assert_close(found['bboxes'], alone['bboxes'], rtol=0, atol=1e-2)


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
