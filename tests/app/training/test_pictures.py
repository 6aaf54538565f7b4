"""What a training draws: validation images, and the curves at its end."""

import os
import re
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from mmseg.structures import SegDataSample
from PIL import Image
from support import clear_global_instances, in_processes, load_tool, photograph

from cpvt_pyramid.app.training import curves, pictures
from cpvt_pyramid.app.training.pictures import ResultPicturesHook

train = load_tool('train')
NO_VALIDATION = 'val_cfg=None', 'val_dataloader=None', 'val_evaluator=None'
NO_TEST = 'test_cfg=None', 'test_dataloader=None', 'test_evaluator=None'
CLASSES = 'background', 'cat', 'dog'
PALETTE = (0, 0, 0), (255, 0, 0), (0, 0, 255)


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_a_training_draws(name, configs, monkeypatch, capfd):
    """In a folder with a space and letters that are not ASCII, without test data. Files of the user
    stay."""
    monkeypatch.setattr(pictures, 'write_curves', curves.write_curves)
    short = 'train_cfg.max_epochs=1' if name == 'detector' else 'train_cfg.max_iters=2'
    work = Path('mes détecteurs', name)
    work.mkdir(parents=True)
    for picture in ('curves.png', 'validation.html'):
        (work / picture).write_text('drawn by hand')
    command = [str(configs[name]), '--work-dir', str(work), '--cfg-options', short]
    assert train.main([*command, *NO_TEST, 'train_dataloader.dataset.indices=4']) == 0
    page = (work / 'validation.html').read_text()
    assert re.findall('<h2>(.*?)</h2>', page) == sorted(re.findall('<h2>(.*?)</h2>', page))
    assert page.count('<img ') == 4  # all images of the data set
    assert Image.open(work / 'curves.png').size[0] > 1000
    for picture in ('curves.png', 'validation.html'):
        assert (work / f'former_{picture}').read_text() == 'drawn by hand'
    assert 'cannot draw' not in capfd.readouterr().err


def test_a_training_that_draws_nothing(configs):
    short = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=2'
    command = [str(configs['detector']), '--cfg-options', *short]
    assert train.main([*command, *NO_VALIDATION, '--work-dir', 'a']) == 0
    assert train.main([*command, 'default_hooks.pictures.images=0', '--work-dir', 'b']) == 0
    assert not [*Path().rglob('validation.html')] and not [*Path().rglob('curves.png')]


def test_the_first_of_two_processes_draws(configs):
    short = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=4'
    command = [str(configs['detector']), '--work-dir', 'work', '--launcher', 'pytorch']
    ended = in_processes(2, lambda _: train.main([*command, '--cfg-options', *short]))
    assert [status for status, _ in ended] == [0, 0], ended
    assert Path('work/validation.html').read_text().count('<img ') == 2  # those that it evaluates


@pytest.mark.parametrize('images, batches, of_a_batch', [(8, 100, 1), (8, 5, 2), (8, 1, 8)])
def test_images_are_from_evenly_spaced_batches(images, batches, of_a_batch, monkeypatch):
    hook, drawn = ResultPicturesHook(images), []
    monkeypatch.setattr(hook, 'draw', lambda runner, inputs, samples: drawn.append(samples))
    runner = SimpleNamespace(val_dataloader=range(batches))
    for batch in range(batches):
        samples = list(range(10 * batch, 10 * batch + 10))
        hook.after_val_iter(runner, batch, {'inputs': samples}, samples)
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


def picture(sample: BaseDataElement, inputs: Optional[torch.Tensor] = None) -> Image.Image:
    """Of a sample with an image of 200 x 1000 pixels, which the pipeline has reduced."""
    if inputs is None:
        inputs = torch.from_numpy(photograph(150, 750)).permute(2, 0, 1)
    return pictures.truth_and_prediction(inputs, sample, CLASSES, PALETTE, 0.3)


def test_pictures_of_all_kinds_of_samples():
    """Images are reduced to 480 pixels; the truth is on the left."""
    told = {'metainfo': {'img_path': 'image.png', 'ori_shape': (200, 1000)}}
    labels = PixelData(data=torch.ones(1, 200, 1000, dtype=torch.long))

    boxes = DetDataSample(**told, pred_instances=objects(3, scores=True), gt_instances=objects(1))
    assert picture(boxes).size == (2 * 480 + 8, 96)
    masks = DetDataSample(**told, pred_instances=objects(3, True, masks=True))
    masks.gt_instances = objects(2)
    masks.gt_instances.masks = BitmapMasks(np.ones((2, 200, 1000), np.uint8), 200, 1000)
    drawn = np.array(picture(masks))
    assert drawn.shape == (96, 2 * 480 + 8, 3)
    sides = drawn[80, 20], drawn[80, 480 + 8 + 20]
    assert all(red > blue + 50 for red, _, blue in np.int32(sides))  # the mask of a cat
    maps = SegDataSample(**told, pred_sem_seg=labels, gt_sem_seg=labels)
    assert picture(maps).width == 2 * 480 + 8
    # A detector that is also trained with the classes of pixels.
    with_both = DetDataSample(**told, gt_sem_seg=PixelData(sem_seg=labels.data))
    with_both.update(boxes)
    np.testing.assert_array_equal(np.array(picture(with_both)), np.array(picture(boxes)))
    # Without annotations and without objects.
    alone = DetDataSample(**told, pred_instances=objects(0, scores=True, masks=True))
    assert picture(alone).width == 480


@pytest.mark.parametrize('channels', [1, 3, 5])
def test_inputs_of_other_bands_are_shown(channels):
    inputs = torch.rand(channels, 40, 60) * 3000
    shown = pictures.shown_inputs(inputs)
    assert shown.shape == (40, 60, 3) and shown.dtype == np.uint8
    assert shown.min() == 0 and shown.max() == 255
    red = pictures.shown_inputs(torch.tensor([0, 0, 200], dtype=torch.uint8)[:, None, None])
    assert red.tolist() == [[[200, 0, 0]]]  # mm loads BGR


class Loader:
    dataset = SimpleNamespace(metainfo={'classes': CLASSES})

    def __len__(self) -> int:
        return 1


def test_errors_are_warnings(monkeypatch):
    """A prediction that cannot be drawn, a work dir that cannot be written to, a full disk."""
    sample = DetDataSample(metainfo={'img_path': 'a.png'}, pred_instances=objects(1, True))
    hook = ResultPicturesHook()
    Path('work').touch()
    runner = SimpleNamespace(val_dataloader=Loader(), work_dir='work', iter=1)
    batch = {'inputs': [torch.zeros(3, 4, 4, dtype=torch.uint8)]}
    with pytest.warns(UserWarning, match='^cannot draw validation images .AttributeError: '):
        hook.after_val_iter(runner, 0, batch, [sample])
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # once
        hook.after_val_iter(runner, 0, batch, [sample])
    hook.pictures.append(('image.png', Image.new('RGB', (8, 8))))
    with pytest.warns(UserWarning, match='cannot draw validation.html .NotADirectoryError: '):
        hook.after_val_epoch(runner)

    def full(*_: Path) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(pictures, 'write_curves', full)
    monkeypatch.setattr(pictures, 'runs_of', lambda _: [[{'loss': 1}]])
    hook = ResultPicturesHook()
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
