"""cpvt infer with models of OpenMMLab: images, folders, patterns, lists and videos, and tiles."""

import inspect
import io
import json
import os
import pickle
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import cv2
import mmdet
import numpy as np
import pytest
import rasterio
import torch
from mmengine.config import Config
from PIL import Image
from pycocotools import mask as coco
from rasterio.transform import from_origin
from small_data import CLASSES
from support import ROOT, film, in_processes, load_tool, photograph, save_tiff

from benchmarks import process_memory
from cpvt_pyramid.acceleration.accelerate import what_is_missing
from cpvt_pyramid.acceleration.processor import multiplies_bfloat16
from cpvt_pyramid.acceleration.products import OneDNNLinear
from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.images.rasters import ReadError
from cpvt_pyramid.app.images.reading import read_image
from cpvt_pyramid.app.predict import running
from cpvt_pyramid.app.predict.openmmlab.loading import build_model
from cpvt_pyramid.app.predict.openmmlab.model import OpenMMLabModel, open_trained
from cpvt_pyramid.app.predict.options import ModelOptions, RunOptions
from cpvt_pyramid.app.predict.result_files import OWNERS
from cpvt_pyramid.app.predict.run_record import RUN
from cpvt_pyramid.app.tooling import threads
from cpvt_pyramid.app.tooling.command import parser_of
from cpvt_pyramid.tasks.trained import TRAINED

TOOLS = ROOT / 'tools'
infer, test_tool = load_tool('infer'), load_tool('test')


@pytest.fixture
def images() -> list[Path]:
    """Two of one stem, one gray, one of a pixel, one truncated and one empty."""
    noise = photograph(90, 130)
    Path('in').mkdir()
    for name, array in (
        ('a.jpg', noise),
        ('a.png', noise[:, :51]),
        ('gray.png', noise[..., 0]),
        ('pixel.png', noise[:1, :1]),
        ('torn.jpg', noise),
    ):
        Image.fromarray(array).save(Path('in', name))
    os.truncate('in/torn.jpg', 1500)
    Path('in/void.png').touch()
    return sorted(Path('in').iterdir())


SIZES = {'a': (130, 90), 'a-2': (51, 90), 'gray': (130, 90), 'pixel': (1, 1)}


def written(folder: str) -> list[str]:
    return sorted({*os.listdir(folder)} - {OWNERS, RUN})


def boxes(path: str) -> list[dict]:
    return json.loads(Path(path).read_text())['detections']


# Images


def test_a_detector(untrained, images, capsys):
    before = [path.read_bytes() for path in images]
    command = [*untrained['detector'], 'in', '--score-thr', '0.01']
    assert infer.main([*command, '--out-dir', 'in']) == 1
    said = capsys.readouterr()
    assert re.search('cpvt infer: skipped in/torn.jpg: not a complete image.*\n', said.err)
    assert 'cpvt infer: skipped in/void.png: the file is empty\n' in said.err
    assert '4 of 6 done: results in in\nfound in images: ' in said.out
    assert [path.read_bytes() for path in images] == before
    for name, (width, height) in SIZES.items():
        with Image.open(f'in/{name}.overlay.jpg') as overlay:
            factor, rest = divmod(overlay.width, width)
            assert factor and not rest
            # Below an image with many boxes is a legend, on white.
            below = np.array(overlay)[height * factor :]
            assert below.size and below[-3:].mean() > 250
        for found in boxes(f'in/{name}.detections.json'):
            x1, y1, x2, y2 = found['box']
            assert 0 <= x1 <= x2 <= width and 0 <= y1 <= y2 <= height
            assert CLASSES[found['label']] == found['class'] and found['score'] >= 0.01
    for options in (
        ['0', '--workers', '0'],
        ['3', '--workers', '3'],
        ['rounded', '--dtype', 'bfloat16'],
    ):
        assert infer.main([*command, '--out-dir', *options]) == 1
    for path in Path('0').iterdir():
        assert path.read_bytes() == Path('3', path.name).read_bytes()
    exact, rounded = (boxes(f'{x}/a.detections.json')[0]['score'] for x in ('0', 'rounded'))
    assert rounded == pytest.approx(exact, rel=0.05) and rounded != exact


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_models_are_accelerated(untrained, dtype, recwarn):
    config, checkpoint = untrained['detector']
    opened = open_trained(checkpoint, config, ModelOptions('cpu', dtype=dtype))
    is_slow = dtype == 'bfloat16' and not multiplies_bfloat16()
    assert any('does not multiply bfloat16' in str(each.message) for each in recwarn) == is_slow
    found = {type(module) for module in opened.model.modules()}
    assert (OneDNNLinear in found) == (what_is_missing() is None)


def test_a_segmentor_and_a_list_on_stdin(untrained, images, monkeypatch, capsys):
    """One is too thin to be resized as the pipeline says, and one does not exist."""
    Image.fromarray(photograph(3000, 8)[:, :2]).save('in/thin.png')
    listed = ''.join(f'{path}\n' for path in [*images, 'in/none.png', 'in/thin.png'])
    monkeypatch.setattr(sys, 'stdin', io.StringIO(listed))
    assert infer.main([*untrained['segmentor'], '-']) == 1
    said = capsys.readouterr().err
    assert 'cpvt infer: skipped in/none.png: no such file\n' in said
    assert 'cpvt infer: skipped in/thin.png: 2 x 3000 pixels are too thin to be' in said
    assert 'OpenCV' not in said
    for name, size in SIZES.items():
        with Image.open(f'predictions/{name}.labels.png') as labels:
            assert labels.size == size and np.array(labels).max() < 11
        assert Path(f'predictions/{name}.overlay.jpg').is_file()


@pytest.mark.parametrize('kind', ['detector', 'segmentor'])
def test_batches_give_what_single_images_give(untrained, kind, sample_dataset):
    """Of several sizes."""
    resize = 'test_dataloader.dataset.pipeline.1.keep_ratio=True'
    Path('in').mkdir()
    for i, size in enumerate([(90, 130), (64, 130), (90, 130), (120, 90), (64, 130), (90, 130)]):
        Image.fromarray(photograph(*size, seed=i)).save(f'in/{i}.png')
    for size in ('1', '4'):
        options = ['in', '--out-dir', size, '--batch-size', size]
        options += ['--score-thr', '0'] if kind == 'detector' else []
        assert infer.main([*untrained[kind], *options, '--cfg-options', resize]) == 0
    for i in range(6):
        if kind == 'segmentor':
            one, four = (np.array(Image.open(f'{n}/{i}.labels.png')) for n in (1, 4))
            assert len(np.unique(one)) > 1 and (one == four).mean() > 0.9999
        else:
            one, four = (boxes(f'{n}/{i}.detections.json') for n in (1, 4))
            assert one[0]['box'] == pytest.approx(four[0]['box'], abs=0.02)
            assert one[0]['score'] == pytest.approx(four[0]['score'], abs=2e-4)


@pytest.mark.parametrize('kind', ['detector', 'segmentor'])
def test_without_pictures(untrained, kind, capsys):
    """Of images, whole and in tiles, and of a video, of which a segmentor's is a picture only."""
    Image.fromarray(photograph(90, 130)).save('a.png')
    film('b.avi', frames(2, 96, 128))
    assert infer.main([*untrained[kind], 'a.png', '--no-pictures', '--out-dir', 'whole']) == 0
    assert written('whole') == ['a.detections.json' if kind == 'detector' else 'a.labels.png']
    for options in (['--no-pictures'], []):  # pictures are made up for
        assert infer.main([*untrained[kind], 'a.png', '--tile', '64', *options]) == 0
        assert Path('predictions/a.overlay.jpg').exists() == (not options)
    capsys.readouterr()
    status = infer.main([*untrained[kind], 'b.avi', '--no-pictures', '--out-dir', 'film'])
    if kind == 'detector':
        assert status == 0 and written('film') == ['b.detections.jsonl']
    else:
        assert status == 2 and 'drop --no-pictures' in capsys.readouterr().err


@pytest.mark.parametrize('kind', ['detector', 'segmentor'])
def test_the_rest_of_a_run(untrained, images, kind, capsys):
    """What has all of its results is left out; the summary is of the rest."""
    film('in/film.avi', frames(2, 96, 128))
    command = [*untrained[kind], 'in', '--skip-existing']
    first = [*command, '--no-pictures'] if kind == 'detector' else command
    assert infer.main(first) == 1
    found = capsys.readouterr().out
    assert '0 of 7 are already done\n5 of 7 done' in found
    before = {path.name: path.read_bytes() for path in Path('predictions').iterdir()}
    ending = 'detections.json' if kind == 'detector' else 'labels.png'
    Path(f'predictions/gray.{ending}').unlink()
    with mock.patch.object(running, 'predict_video') as video:
        assert infer.main(first) == 1
    assert not video.called
    said = capsys.readouterr()
    assert '4 of 7 are already done\n5 of 7 done' in said.out
    assert said.err.count('cpvt infer: skipped') == 2
    assert 'found in images: ' in said.out
    assert {path.name: path.read_bytes() for path in Path('predictions').iterdir()} == before
    if kind == 'detector':  # now with pictures
        assert infer.main(command) == 1
        assert '0 of 7 are already done' in capsys.readouterr().out


def test_an_image_of_too_many_pixels_is_for_tiles(monkeypatch):
    Image.fromarray(photograph(90, 130)).save('a.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 5000)
    with pytest.raises(ReadError, match='pixels; cut or reduce it, or use cpvt infer --tile'):
        read_image(Path('a.png'))


def test_images_are_sorted_by_size_to_fill_batches():
    """Upright ones by their upright size; a file that cannot be read comes first."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    for name, size, turned in (
        ('a', (40, 30), {}),
        ('b', (20, 30), {}),
        ('c', (20, 30), {}),
        ('d', (30, 40), {'exif': exif}),
    ):
        Image.new('RGB', size).save(f'{name}.jpg', **turned)
    Path('e.jpg').touch()
    named = [(Path(f'{name}.jpg'), name) for name in 'abcde']
    for batch_size, order in ((2, 'ebcad'), (1, 'abcde')):
        options = RunOptions(batch_size=batch_size)
        model = mock.Mock(prepare=mock.Mock(side_effect=ReadError('torn')), threads=1)
        skip = mock.Mock()
        assert not [*running.predicted_images(model, named, options, skip)]
        assert ''.join(call.args[0].stem for call in skip.call_args_list) == order


def test_images_are_read_ahead_in_order():
    """No more than one besides those of the threads, and an error comes where its item does."""
    started, most = [], 0

    def read(item: int) -> int:
        started.append(item)
        time.sleep(0.002 * (item % 3))
        return 1 // (item % 5)

    for done, result in enumerate(threads.prefetch(read, iter(range(20)), 3)):
        if done % 5:
            assert result() == 1 // (done % 5)
        else:
            pytest.raises(ZeroDivisionError, result)
        most = max(most, len(started) - done)
    assert 1 < most <= 4


# As PyTorch (on a GPU, on a CPU, in oneDNN), OpenCV and NumPy report it.
NO_MEMORY = {
    'GPU': torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.\nSee also'),
    'CPU': RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
    'oneDNN': RuntimeError('could not create a primitive'),
    'C++': RuntimeError('std::bad_alloc'),
    'OpenCV': cv2.error('(-4:Insufficient memory) Failed to allocate 9 bytes'),
    'NumPy': MemoryError('Unable to allocate 3 GiB'),
}


@pytest.mark.parametrize('kind', NO_MEMORY)
def test_an_image_that_needs_too_much_memory_is_skipped(kind, untrained, monkeypatch, capsys):
    """In the pipeline, in the model, in tiles; the others are not."""
    for name, width in (('a', 130), ('b', 120)):
        Image.fromarray(photograph(90, width)).save(f'{name}.png')
    monkeypatch.setattr(running, 'TILE', 64)
    place = 'the memory of the GPU' if kind == 'GPU' else r'memory \([0-9.]+ GB are free\)'
    whole = f'130 x 90 pixels do not fit into {place}; reduce the image, or divide the image with'
    in_tiles = f'tiles of 130 x 90 pixels do not fit into {place}; use smaller tiles'
    for step, options, line in (
        ('mmcv.transforms.Resize.transform', [], whole),
        ('mmseg.models.EncoderDecoder.extract_feat', [], whole),
        ('mmseg.models.EncoderDecoder.extract_feat', ['--tile', '160'], in_tiles),
    ):
        with mock.patch(step, side_effect=NO_MEMORY[kind]) as failing:
            arguments = [*untrained['segmentor'], 'a.png', 'b.png', *options, '--overwrite']
            assert infer.main(arguments) == 1
            said = capsys.readouterr().err
            assert re.search(f'cpvt infer: skipped a.png: {line}', said), said
            assert said.count('skipped') == failing.call_count == 2


# Instance masks


MASK_RCNN = {
    'backbone.arch': 'pcpvt_nano',
    'backbone.init_cfg': None,
    'neck.in_channels': [32, 64, 128, 192],
    'neck.out_channels': 16,
    'rpn_head.in_channels': 16,
    'rpn_head.feat_channels': 16,
    'roi_head.bbox_roi_extractor.out_channels': 16,
    'roi_head.mask_roi_extractor.out_channels': 16,
    'roi_head.bbox_head': dict(in_channels=16, fc_out_channels=16, num_classes=10),
    'roi_head.mask_head': dict(in_channels=16, conv_out_channels=16, num_convs=1, num_classes=10),
    'test_cfg.rcnn.max_per_img': 20,
}


def edited(path: Path, changes: dict) -> Config:
    """A config with changes of its model."""
    cfg = Config.fromfile(path)
    cfg.merge_from_dict({f'model.{name}': value for name, value in changes.items()})
    return cfg


def masks_of(items: list[dict]) -> np.ndarray:
    return np.stack([coco.decode(item['mask']) for item in items]).astype(bool)


def box_of(mask: np.ndarray) -> list[int]:
    rows, columns = np.nonzero(mask)
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_instance_masks(configs, sample_dataset):
    cfg = edited(ROOT / 'configs/mask_rcnn_cpvt_s.py', MASK_RCNN)
    data = Config.fromfile(configs['detector'])
    cfg.test_dataloader = data.test_dataloader
    cfg.test_evaluator.ann_file = data.test_evaluator.ann_file
    cfg.test_dataloader.dataset.pipeline[2].with_mask = True
    cfg.dump('mask_rcnn.py')
    model = build_model(load_config('mask_rcnn.py'), 'cpu')
    for name in ('bbox_head.fc_cls', 'mask_head.conv_logits'):
        torch.nn.init.normal_(model.roi_head.get_submodule(name).weight)
    torch.save(model.state_dict(), 'mask_rcnn.pth')
    command = ['mask_rcnn.py', 'mask_rcnn.pth']
    assert infer.main([*command, f'{sample_dataset}/coco/val2017']) == 0
    assert test_tool.main([*command, '--out', 'all.pkl']) == 0
    for sample in pickle.loads(Path('all.pkl').read_bytes()):
        name = Path(sample['img_path']).stem
        items, expected = boxes(f'predictions/{name}.detections.json'), sample['pred_instances']
        masks, count = masks_of(items), (expected['scores'] >= 0.3).sum()
        assert len(items) == count > 0 and masks.any()
        evaluated = sorted(mask['counts'].decode() for mask in expected['masks'][:count])
        assert sorted(item['mask']['counts'] for item in items) == evaluated  # scores may be equal


# Panoptic models


WHEEL = Path(mmdet.__file__).parent / '.mim/configs'
WIDTHS = [32, 64, 128, 192]
MASK2FORMER = {
    'panoptic_head': dict(in_channels=WIDTHS, num_queries=20),
    'panoptic_head.pixel_decoder.encoder.num_layers': 1,
    'panoptic_head.transformer_decoder.num_layers': 1,
}
PREPROCESSOR = dict(_delete_=True, type='ValidRegionDetDataPreprocessor', pad_size_divisor=32)
BACKBONE = dict(_delete_=True, type='CPVTPyramid', arch='pcpvt_nano')


def test_a_panoptic_model_predicts_instances(capsys):
    """There are no results for its segments."""
    panoptic = ['panoptic.py', 'panoptic.pth']
    common = {'data_preprocessor': PREPROCESSOR, 'backbone': BACKBONE}
    config = WHEEL / 'mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py'
    cfg = edited(config, {**common, **MASK2FORMER})
    cfg.custom_imports = dict(imports=['cpvt_pyramid.mm', 'cpvt_pyramid.mm.detection'])
    cfg.test_dataloader.dataset.pipeline[1].scale = (96, 96)
    cfg.dump('panoptic.py')
    model = build_model(load_config('panoptic.py'), 'cpu')
    for name, module in model.named_modules():
        if name.endswith(('cls_embed', 'query_feat')):
            torch.nn.init.normal_(module.weight)
    torch.save({'state_dict': model.state_dict()}, 'panoptic.pth')
    Image.fromarray(photograph(90, 130)).save('a.png')
    assert infer.main([*panoptic, 'a.png']) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('cpvt infer: Mask2Former predicts panoptic segments, for which there')
    options = line.partition('--cfg-options ')[2].split()
    command = [*panoptic, 'a.png', '--score-thr', '0', '--cfg-options', *options]
    assert infer.main(command) == 0
    items = boxes('predictions/a.detections.json')
    for mask, item in zip(masks_of(items), items):
        assert mask.shape == (90, 130)
        assert not mask.any() or item['box'] == box_of(mask)


# Videos


def frames(count: int, height: int, width: int) -> list[np.ndarray]:
    return [photograph(height, width, seed=i // 4) for i in range(count)]


def test_videos(untrained, monkeypatch, capsys):
    """Each batch of frames is predicted before the frames of the next are read."""
    events = []

    def record(name: str) -> None:
        method = getattr(OpenMMLabModel, name)
        patched = lambda self, *inputs: events.append(name) or method(self, *inputs)  # noqa: E731
        monkeypatch.setattr(OpenMMLabModel, name, patched)

    record('prepare')
    record('predict')
    Path('in').mkdir()
    film('in/a.mp4', frames(7, 96, 128))
    film('in/torn.mp4', frames(7, 96, 128))
    os.truncate('in/torn.mp4', 3000)
    Image.fromarray(photograph(96, 128)).save('in/b.png')
    command = [*untrained['detector'], 'in', '--batch-size', '3', '--score-thr', '0.05']
    assert infer.main(command) == 1
    prepare, predict = 'prepare', 'predict'
    batch = [*[prepare] * 3, predict]
    assert events[:12] == [prepare, predict, *batch, *batch, prepare, predict]
    said = capsys.readouterr()
    assert re.search('cpvt infer: skipped in/torn.mp4: .+\n', said.err)
    assert '2 of 3 done: results in predictions\n' in said.out
    assert written('predictions') == [
        'a.detections.jsonl',
        'a.overlay.mp4',
        'b.detections.json',
        'b.overlay.jpg',
    ]
    lines = [json.loads(x) for x in Path('predictions/a.detections.jsonl').read_text().splitlines()]
    assert [line['frame'] for line in lines] == list(range(7))
    assert any(line['detections'] for line in lines)
    overlay = cv2.VideoCapture('predictions/a.overlay.mp4')
    assert overlay.get(cv2.CAP_PROP_FRAME_COUNT) == 7 and overlay.get(cv2.CAP_PROP_FPS) == 10
    assert overlay.get(cv2.CAP_PROP_FRAME_WIDTH) % 128 == 0


# Images in tiles


PLACE = {'crs': 'EPSG:32633', 'transform': from_origin(500_000, 5_000_000, 0.5, 0.5)}


def read_labels(path: str) -> np.ndarray:
    with rasterio.open(path) as file:
        return file.read(1)


@pytest.mark.parametrize('kind', ['segmentor', 'detector'])
def test_an_image_of_one_tile_has_the_results_of_the_untiled(untrained, kind):
    Image.fromarray(photograph(96, 96)).save('a.png')
    command = [*untrained[kind], 'a.png']
    command += ['--score-thr', '0.05'] if kind == 'detector' else []
    assert infer.main([*command, '--out-dir', 'whole']) == 0
    assert infer.main([*command, '--out-dir', 'tiled', '--tile', '128']) == 0
    if kind == 'detector':
        assert len(boxes('whole/a.detections.json')) > 3
        assert boxes('tiled/a.detections.json') == boxes('whole/a.detections.json')
        return
    untiled = np.array(Image.open('whole/a.labels.png'))
    assert len(np.unique(untiled)) > 1
    np.testing.assert_array_equal(read_labels('tiled/a.labels.tif'), untiled)


def test_labels_keep_the_georeference_and_do_not_depend_on_batches(untrained, capsys):
    save_tiff('a.tif', photograph(300, 410), photometric='rgb', **PLACE)
    command = [*untrained['segmentor'], 'a.tif', '--tile', '128', '--overlap', '32', '--out-dir']
    results = []
    for size in ('1', '2', '5'):
        assert infer.main([*command, size, '--batch-size', size]) == 0
        results.append(Path(size, 'a.labels.tif').read_bytes())
    assert results[0] == results[1] == results[2]
    with rasterio.open('1/a.labels.tif') as file:
        assert file.crs.to_epsg() == 32633 and file.transform == PLACE['transform']
        assert file.profile['tiled'] and file.profile['compress'] == 'deflate'
        assert json.loads(file.tags()['classes']) == ['background', *CLASSES]
        assert file.colormap(1)[0] == (0, 0, 0, 255) and len(np.unique(file.read(1))) > 1
    with Image.open('1/a.overlay.jpg') as overlay:
        assert overlay.width == 410
    capsys.readouterr()
    assert infer.main([*command, '1', '--skip-existing']) == 0
    assert '1 of 1 are already done\n' in capsys.readouterr().out
    assert written('1') == ['a.labels.tif', 'a.overlay.jpg']


def test_kinds_of_images_and_files_that_are_not_images(untrained, capsys):
    grey = photograph(70, 90)[..., 0]
    Path('in').mkdir()
    Image.fromarray(grey).save('in/grey.png')
    opaque = np.full_like(grey, 255)
    Image.fromarray(np.dstack([grey, grey, grey, opaque]), 'RGBA').save('in/alpha.png')
    Image.fromarray(np.dstack([grey] * 4), 'RGBA').save('in/glass.png')
    Image.fromarray(photograph(70, 90)).quantize(16).save('in/palette.png')
    save_tiff('in/deep.tif', grey.astype(np.float32))
    Image.fromarray(photograph(700, 90)).save('in/torn.png')
    os.truncate('in/torn.png', 40_000)
    Path('in/void.png').touch()
    for kind in ('jpg', 'png', 'tif', 'webp'):
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(grey).save(f'in/turned.{kind}', exif=exif)
    assert infer.main([*untrained['segmentor'], 'in', '--tile', '64']) == 1
    said = capsys.readouterr().err
    assert re.findall('cpvt infer: skipped (.*?): (.{11})', said) == [
        ('in/deep.tif', 'a TIFF of f'),
        ('in/glass.png', 'an image wh'),
        ('in/torn.png', 'not a compl'),
        ('in/turned.png', 'PNG that it'),
        ('in/turned.tif', 'a TIFF that'),
        ('in/turned.webp', 'WEBP that i'),
        ('in/void.png', 'the file is'),
    ]
    assert {name.split('.')[0] for name in written('predictions') if name[0] != '.'} == {
        'alpha',
        'grey',
        'palette',
        'turned',
    }
    assert read_labels('predictions/turned.labels.tif').shape == (90, 70)
    assert not [name for name in os.listdir('predictions') if name[0] == '.']
    np.testing.assert_array_equal(
        read_labels('predictions/grey.labels.tif'), read_labels('predictions/alpha.labels.tif')
    )


@pytest.mark.parametrize('kind', ['segmentor', 'detector'])
def test_a_killed_run_leaves_no_result(untrained, kind):
    """And the same command begins the image again; its results are those of a run in one go."""
    Image.fromarray(photograph(400, 150)).save('a.png')
    command = [*untrained[kind], 'a.png', '--tile', '128', '--skip-existing', '--out-dir']
    command[-1:-1] = ['--score-thr', '0.05'] * (kind == 'detector')
    assert infer.main([*command, 'whole']) == 0
    predict = OpenMMLabModel.predict_tiles
    calls = iter(range(4))

    def killed(model: OpenMMLabModel, tiles: list) -> list:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return predict(model, tiles)

    with mock.patch.object(OpenMMLabModel, 'predict_tiles', killed):
        work = lambda rank: infer.main([*command, 'killed'])  # noqa: E731
        assert in_processes(1, work)[0][0] == -signal.SIGKILL
    assert not [name for name in written('killed') if name[0] != '.']
    assert infer.main([*command, 'killed']) == 0
    assert written('killed') == written('whole')  # no temporary files are left
    for name in written('whole'):
        assert Path('killed', name).read_bytes() == Path('whole', name).read_bytes()


def test_memory_is_that_of_some_tiles(untrained):
    """The scores of 150 classes would take 0.5 GiB. The classes are named as in checkpoints of
    earlier versions of mm."""
    config, _ = untrained['segmentor']
    classes = 'model.decode_head.num_classes=150'
    model = build_model(load_config(config, [classes]), 'cpu')
    names = list(map(str, range(150)))
    meta = {'dataset_meta': {'CLASSES': names}}
    torch.save({'state_dict': model.state_dict(), 'meta': meta}, 'many.pth')
    save_tiff('a.tif', photograph(800, 1100), photometric='rgb')
    command = [config, 'many.pth', 'a.tif', '--tile', '256', '--overlap', '32']

    def work(rank: int) -> int:
        process_memory.restart_peak()
        limit = process_memory.resident() + 300 * 2**20
        status = infer.main([*command, '--cfg-options', classes])
        assert process_memory.peak() < limit
        return status

    status, said = in_processes(1, work)[0]
    assert status == 0 and 'skipped' not in said
    with rasterio.open('predictions/a.labels.tif') as labels:
        assert json.loads(labels.tags()['classes']) == names and 11 < labels.read().max() < 150


def test_options_that_do_not_fit(untrained, capsys):
    Image.fromarray(photograph(60, 80)).save('a.png')
    Path('b.mp4').touch()
    for options, error in (
        ('--workers -1', '--workers must be at least 0, got -1'),
        ('--ray-workers 0', '--ray-workers must be at least 1, got 0'),
        ('--ray photos', '--ray must be local, auto or HOST:PORT, got photos'),
        ('--ray 127.0.0.1:1', 'no Ray cluster answers at 127.0.0.1:1: [Errno 111]'),
        ('--overlap 32', '--overlap needs --tile'),
        ('--ray-workers 4', '--ray-workers needs --ray'),
        ('--ray local --workers 2', '--workers has no effect with --ray, whose'),
        ('--tile 64 --workers 2', '--workers has no effect with --tile, on which'),
        (
            '--tile 64 --shorter-side 100',
            '--shorter-side has no effect with --tile, which does not',
        ),
        ('b.mp4 --tile 64', '--tile is for images, but b.mp4 is a video; run it without'),
        ('--shorter-side 100', '--shorter-side is for exported models and trained models by'),
        ('--backend openvino', '--backend is for exported models, not for models with a'),
        ('--score-thr 0.5', '--score-thr is for scores of boxes, but the model predicts labels'),
    ):
        assert infer.main([*untrained['segmentor'], 'a.png', *options.split()]) == 2
        assert capsys.readouterr().err.startswith(f'cpvt infer: {error}')
    Path('a.py').touch()
    for words, error in (
        (['missing.py', 'a.png'], 'no config at missing.py; those of this package are in'),
        (['a.py', 'a.png'], 'a.png was taken as the checkpoint of a.py, so that'),
        (['missing.py', 'b.pth', 'a.png'], 'no config at missing.py'),
        (['a.png', 'a.png'], 'a.png is an image; the model comes first, and must be CONFIG CHECK'),
        (['retinanet_pvt_v2_b2_coc', 'a.png'], 'no model at retinanet_pvt_v2_b2_coc, and none of'),
        (['nothing', 'a.png'], 'no model at nothing, and none of this name in cpvt models; the'),
    ):
        assert infer.main(words) == 2
        assert capsys.readouterr().err.startswith(f'cpvt infer: {error}')


def test_a_file_of_another_kind_among_the_images(untrained, capsys):
    """The first word decides what the model is: a VOC annotation is no OpenVINO model."""
    Path('in').mkdir()
    Image.fromarray(photograph(60, 80)).save('in/a.png')
    Path('in/a.xml').write_text('<annotation/>')
    assert infer.main([*untrained['segmentor'], 'in/a.xml', 'in/a.png', '--out-dir', 'o.onnx']) == 1
    assert 'skipped in/a.xml: not an image in one of the formats' in capsys.readouterr().err
    assert Path('o.onnx/a-2.labels.png').is_file() or Path('o.onnx/a.labels.png').is_file()


# Names


def test_names_and_files_of_every_kind(untrained, capsys):
    """A long name, one of many bytes, links that lead nowhere or to themselves, and a pipe."""
    Path('in').mkdir()
    image = Image.fromarray(photograph(60, 80))
    for name in ('l' * 251, '猫' * 79):
        image.save(f'in/{name}.png')
    Path('in/gone.png').symlink_to('nowhere.png')
    Path('in/ring.png').symlink_to('ring.png')
    os.mkfifo('in/pipe.png')
    assert infer.main([*untrained['segmentor'], 'in', '--workers', '2']) == 1
    said = capsys.readouterr()
    assert sorted(said.err.splitlines()) == [
        'cpvt infer: skipped in/gone.png: a link to nowhere.png, which does not exist',
        'cpvt infer: skipped in/pipe.png: a pipe or device, not a file',
        'cpvt infer: skipped in/ring.png: a link to ring.png, which does not exist',
    ]
    assert '2 of 5 done' in said.out
    names = json.loads(Path('predictions', OWNERS).read_text())
    for name, source in names.items():
        result = Path(f'predictions/{name}.labels.png')
        assert result.exists() == (len(Path(source).name) > 20)


def test_help_has_examples_that_parse():
    """As they would be typed, and real names of models."""
    text = inspect.getdoc(infer)
    lines = re.findall(r'^ {4}cpvt infer (.*)$', text, re.M)
    assert len(lines) >= 4
    for line in lines:
        options = parser_of(infer.infer).parse_args(shlex.split(line))
        assert options.inputs
        is_name = '.' not in options.model
        assert not is_name or options.model in TRAINED
