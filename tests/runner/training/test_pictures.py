"""What a training draws: validation images, and the curves at its end."""

import os
import re
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.structures import InstanceData, PixelData
from mmseg.structures import SegDataSample
from PIL import Image
from support import clear_global_instances, in_processes, load_tool, photograph

from cpvt_pyramid.runner.training import curves, pictures
from cpvt_pyramid.runner.training.pictures import DrawResultsHook

train = load_tool('train')
NO_VALIDATION = 'val_cfg=None', 'val_dataloader=None', 'val_evaluator=None'
NO_TEST = 'test_cfg=None', 'test_dataloader=None', 'test_evaluator=None'
META = {'classes': ['background', 'cat', 'dog'], 'palette': [(0, 0, 0), (255, 0, 0), (0, 0, 255)]}


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_a_training_draws(name, configs, monkeypatch, capfd):
    """In a folder with a space and letters that are not ASCII, without test data."""
    monkeypatch.setattr(pictures, 'write_curves', curves.write_curves)
    short = 'train_cfg.max_epochs=1' if name == 'detector' else 'train_cfg.max_iters=2'
    work = Path('mes détecteurs', name)
    command = [str(configs[name]), '--work-dir', str(work), '--cfg-options', short]
    assert train.main([*command, *NO_TEST, 'train_dataloader.dataset.indices=4']) == 0
    page = (work / 'validation.html').read_text()
    assert re.findall('<h2>(.*?)</h2>', page) == sorted(re.findall('<h2>(.*?)</h2>', page))
    assert page.count('<img ') == 4  # all images of the data set
    assert Image.open(work / 'curves.png').size[0] > 1000
    assert 'cannot draw' not in capfd.readouterr().err


def test_a_training_that_draws_nothing(configs):
    short = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=2'
    command = [str(configs['detector']), '--cfg-options', *short]
    assert train.main([*command, *NO_VALIDATION, '--work-dir', 'a']) == 0
    assert train.main([*command, '--work-dir', 'b', '--no-pictures']) == 0
    assert not [*Path().rglob('validation.html')] and not [*Path().rglob('curves.png')]
    assert 'DrawResultsHook' not in Path('b/detector.py').read_text()


def test_the_first_of_two_processes_draws(configs):
    short = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=4'
    command = [str(configs['detector']), '--work-dir', 'work', '--launcher', 'pytorch']
    ended = in_processes(2, lambda _: train.main([*command, '--cfg-options', *short]))
    assert [status for status, _ in ended] == [0, 0], ended
    assert Path('work/validation.html').read_text().count('<img ') == 2  # those that it evaluates


@pytest.mark.parametrize('images, batches, of_a_batch', [(8, 100, 1), (8, 5, 2), (8, 1, 8)])
def test_images_are_from_evenly_spaced_batches(images, batches, of_a_batch, monkeypatch):
    hook, drawn = DrawResultsHook(images), []
    monkeypatch.setattr(hook, 'draw', lambda runner, samples: drawn.append(samples))
    runner = SimpleNamespace(val_dataloader=range(batches))
    for batch in range(batches):
        hook.after_val_iter(runner, batch, list(range(10 * batch, 10 * batch + 10)))
    firsts = [samples[0] // 10 for samples in drawn]
    assert len(set(np.diff(firsts))) <= 1 and firsts[0] == 0
    assert all(len(samples) == of_a_batch for samples in drawn)
    assert images / 2 < len(drawn) * of_a_batch <= images


def objects(count: int, scores: bool = False, masks: bool = False) -> InstanceData:
    corners = torch.tensor([[0.0, 0.0, 300.0, 200.0]]).repeat(count, 1)
    found = InstanceData(bboxes=corners, labels=torch.ones(count, dtype=torch.long))
    if scores:
        found.scores = torch.linspace(0.9, 0.1, count)
    if masks:
        found.masks = torch.ones(count, 200, 1000, dtype=torch.bool)
    return found


def test_pictures_of_all_kinds_of_samples():
    """Images are reduced to 480 pixels; the truth is on the left."""
    Image.fromarray(photograph(200, 1000)).save('image.png')
    told = {'metainfo': {'img_path': 'image.png', 'ori_shape': (200, 1000)}}
    labels = PixelData(data=torch.ones(1, 200, 1000, dtype=torch.long))

    boxes = DetDataSample(**told, pred_instances=objects(3, scores=True), gt_instances=objects(1))
    assert pictures.truth_and_prediction(boxes, META, 0.3).size == (2 * 480 + 8, 96)
    masks = DetDataSample(**told, pred_instances=objects(3, True, masks=True))
    masks.gt_instances = objects(2)
    masks.gt_instances.masks = BitmapMasks(np.ones((2, 200, 1000), np.uint8), 200, 1000)
    drawn = np.array(pictures.truth_and_prediction(masks, META, 0.3))
    assert drawn.shape == (96, 2 * 480 + 8, 3)
    sides = drawn[80, 20], drawn[80, 480 + 8 + 20]
    assert all(red > blue + 50 for red, _, blue in np.int32(sides))  # the mask of a cat
    maps = SegDataSample(**told, pred_sem_seg=labels, gt_sem_seg=labels)
    assert pictures.truth_and_prediction(maps, META, 0.3).width == 2 * 480 + 8
    panoptic = DetDataSample(**told, gt_sem_seg=PixelData(sem_seg=labels.data))
    panoptic.pred_panoptic_seg = PixelData(sem_seg=labels.data)
    assert pictures.truth_and_prediction(panoptic, META, 0.3).width == 2 * 480 + 8
    # Without annotations and without objects.
    alone = DetDataSample(**told, pred_instances=objects(0, scores=True, masks=True))
    assert pictures.truth_and_prediction(alone, META, 0.3).width == 480


def test_errors_are_warnings(monkeypatch):
    """An image that is gone, a work dir that cannot be written to, a full disk."""
    sample = DetDataSample(metainfo={'img_path': 'gone.png'}, pred_instances=objects(1, True))
    monkeypatch.setattr(pictures, 'dataset_meta', lambda *_: META)
    hook, runner = DrawResultsHook(), SimpleNamespace(val_dataloader=range(1), work_dir='gone')
    runner.cfg, runner.iter = Config(), 1
    with pytest.warns(UserWarning, match='^cannot draw validation images .ReadError: '):
        hook.after_val_iter(runner, 0, [sample])
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # once
        hook.after_val_iter(runner, 0, [sample])
    hook.pictures.append(('image.png', Image.new('RGB', (8, 8))))
    with pytest.warns(UserWarning, match='cannot draw validation.html .FileNotFoundError: '):
        hook.after_val_epoch(runner)

    def full(*_: Path) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(pictures, 'write_curves', full)
    monkeypatch.setattr(pictures, 'runs_of', lambda _: [[{'loss': 1}]])
    with pytest.warns(UserWarning, match='cannot draw curves.png .OSError: .*No space left'):
        hook.after_train(runner)


@pytest.mark.parametrize('number, status', [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_curves_are_drawn(number, status, configs, monkeypatch):
    """The training is complete; SIGTERM does not break off the drawing. The same command with
    --resume draws again, and trains no further."""
    monkeypatch.setattr(pictures, 'write_curves', lambda *_: os.kill(os.getpid(), number))
    short = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=2', *NO_VALIDATION
    command = [str(configs['detector']), '--work-dir', 'work', '--cfg-options', *short]
    assert train.main(command) == status
    written = Path('work/epoch_1.pth').stat().st_mtime_ns
    monkeypatch.setattr(pictures, 'write_curves', curves.write_curves)
    clear_global_instances()
    assert train.main([*command, '--resume']) == 0
    assert Path('work/curves.png').is_file()
    assert Path('work/epoch_1.pth').stat().st_mtime_ns == written
