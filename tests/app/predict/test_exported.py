"""cpvt infer with exported models, and installations without torch."""

import itertools
import json
import os
import re
import shutil
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import rasterio
from PIL import Image
from support import ROOT, film, run

from cpvt_pyramid.app.commands.infer import main
from cpvt_pyramid.app.images.gate import ORIENTATION
from cpvt_pyramid.app.images.rasters import ReadError
from cpvt_pyramid.app.predict import Predictor, automatic_tiles, exported, running, sessions
from cpvt_pyramid.app.predict.exported import INPUT_BYTES, ExportedModel
from cpvt_pyramid.app.predict.infer import note_about_limit
from cpvt_pyramid.app.predict.opening import ModelFiles
from cpvt_pyramid.app.predict.options import InferOptions
from cpvt_pyramid.app.predict.result_files import OWNERS
from cpvt_pyramid.app.predict.results import Results
from cpvt_pyramid.app.predict.run_record import RUN
from cpvt_pyramid.app.predict.sessions import OnnxRuntime, OpenVino
from cpvt_pyramid.app.predict.tiles import Suppression
from cpvt_pyramid.app.predict.videos import open_video
from cpvt_pyramid.app.predictions.drawing import jpeg_of
from cpvt_pyramid.app.tooling import memory


@pytest.fixture
def folder(photos) -> Path:
    """Four images, of which two have one stem, a torn one, a video and a folder."""
    Path('in').mkdir()
    for name, photo in zip(('a.png', 'a.jpg', 'b.png', 'c.png'), photos):
        Image.fromarray(photo).save(Path('in', name))
    Path('in/torn.jpg').write_bytes(Path('in/a.jpg').read_bytes()[:500])
    Path('in/clip.mp4').write_bytes(b'no video')
    Path('in/folder.png').mkdir()
    return Path('in')


@pytest.mark.parametrize(
    'name, options',
    [
        ('detection', {'batch_size': 3}),
        ('labels', {'batch_size': 3}),
        ('detection', {'backend': 'openvino', 'score_thr': 0.1, 'shorter_side': 20}),
    ],
)
def test_files(model, folder, name, options, capsys):
    path, kind = model(name), 'labels.png' if name == 'labels' else 'detections.json'
    words = (f'--{option.replace("_", "-")}={value}' for option, value in options.items())
    assert main([str(path), 'in', *words]) == 1
    said = capsys.readouterr()
    assert 'cpvt infer: skipped in/torn.jpg: not a complete image' in said.err
    assert 'cpvt infer: skipped in/clip.mp4: not a complete video in one of the' in said.err
    done, found, speed = said.out.splitlines()
    assert done == '4 of 6 done: results in predictions'
    assert found.startswith('found in images: ') and ('%' in found) == (name == 'labels')
    assert float(speed.split(' images per second')[0]) > 0
    names = {'a': 'a.jpg', 'a-2': 'a.png', 'b': 'b.png', 'c': 'c.png'}
    expected = {f'{n}.{end}' for n in names for end in ('overlay.jpg', kind)}
    assert files_of('predictions').keys() == expected | {OWNERS, RUN}
    assert json.loads(Path('predictions', OWNERS).read_text())['a-2'] == '../in/a.png'
    for result, file in names.items():
        expected = Predictor(path, **options)(folder / file)
        overlay = Path(f'predictions/{result}.overlay.jpg').read_bytes()
        assert overlay == jpeg_of(expected.draw())
        if name == 'labels':
            labels = Image.open(f'predictions/{result}.labels.png')
            np.testing.assert_array_equal(np.array(labels), expected.labels)
            assert labels.getpalette()[:6] == [255, 0, 0, 0, 255, 0]
            continue
        content = json.loads(Path(f'predictions/{result}.detections.json').read_text())
        assert content['image'] == f'in/{file}'
        assert len(content['detections']) == len(expected)
        found = content['detections'][0]
        np.testing.assert_allclose(found['box'], expected.boxes[0], atol=0.01)
        assert (found['label'], found['class']) == (1, 'one')


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize('backend', ['onnxruntime', 'openvino'])
@pytest.mark.parametrize('name, size', [('box', 1), ('labels', 1), ('labels', 2)])
def test_workers_change_nothing(model, folder, name, size, backend, capsys):
    said, path = {}, model(name)
    for workers in (1, 3):
        options = ['--workers', str(workers), '--batch-size', str(size), '--backend', backend]
        assert main([str(path), 'in', '--out-dir', f'out-{workers}', *options]) == 1
        said[workers] = capsys.readouterr().err
    assert said[1] == said[3] and said[1].count('skipped') == 2
    assert len(files_of('out-1')) == 10 and files_of('out-1') == files_of('out-3')


def test_without_pictures(model, folder, capsys):
    assert main([str(model('box')), 'in/a.png', '--no-pictures']) == 0
    assert files_of('predictions').keys() == {'a.detections.json', OWNERS, RUN}


def test_batches_have_one_padded_size(model, monkeypatch):
    """Those of images that are far apart, too; results are in order."""
    sizes = [(50, 90), (90, 50), (96, 30), (45, 88), (20, 20), (91, 40), (33, 65), (64, 90)]
    Path('in').mkdir()
    for i, size in enumerate(sizes):
        Image.fromarray(np.full((*size, 3), 50 + i, np.uint8)).save(f'in/{i}.png')
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    Image.fromarray(np.full((90, 50, 3), 200, np.uint8)).save('in/9.jpg', exif=turned)
    given, run = [], OnnxRuntime.run

    def recorded(session, inputs):
        given.append(inputs)
        return run(session, inputs)

    monkeypatch.setattr(OnnxRuntime, 'run', recorded)
    path = str(model('detection', resize=None, score_thr=0.1))
    for workers in ('1', '3'):
        given.clear()
        assert main([path, 'in', '--batch-size', '3', '--workers', workers]) == 0
        assert sorted(len(inputs['images']) for inputs in given) == [1, 1, 2, 2, 3]
        for inputs in given:
            assert len({tuple(-(-side // 32) for side in size) for size in inputs['valid']}) == 1
    for i, size in enumerate(sizes):
        found = json.loads(Path(f'predictions/{i}.detections.json').read_text())['detections'][0]
        assert found['box'] == [0, 0, *size[::-1]]
        assert found['score'] == pytest.approx((50 + i) / 255, abs=1e-4)


def test_an_interrupt_keeps_finished_results(model, folder, monkeypatch, capsys, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    started, count, run = [], itertools.count(1), OnnxRuntime.run

    def interrupted(session, inputs):
        number = next(count)
        started.append(number)
        if number == 8:  # once: another signal would end the process of the test
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.1 * len(started))
        return run(session, inputs)

    monkeypatch.setattr(OnnxRuntime, 'run', interrupted)
    path = model('detection')
    for i in range(20):
        shutil.copy('in/b.png', f'in/{i:02}.png')
    assert main([str(path), 'in', '--workers', '2']) == 130
    assert 'cpvt infer: interrupted; finished results are in predictions' in capsys.readouterr().err
    assert Path('predictions/00.detections.json').exists() and len(started) < 14


@pytest.fixture
def interrupt(request) -> Callable[[], None]:
    """Sends SIGINT to the main thread, where it raises a KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    return partial(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize(
    'backend, session',
    [('onnxruntime', OnnxRuntime), ('openvino', OpenVino)],
    ids=['onnxruntime', 'openvino'],
)
@pytest.mark.parametrize('workers', [0, 1, 2])
def test_an_interrupt_ends_after_the_image(
    workers, backend, session, model, folder, interrupt, monkeypatch, capsys
):
    """Of several, and no other begins."""
    run = session.run
    calls = []

    def run_and_interrupt(session: object, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(inputs)
        if len(calls) == 2:
            interrupt()
            time.sleep(0.2)
        return run(session, inputs)

    monkeypatch.setattr(session, 'run', run_and_interrupt)
    command = [str(model('detection')), 'in', '--workers', str(workers), '--backend', backend]
    assert main(command) == 130
    assert len(calls) <= 2 + 2 * workers
    assert 'cpvt infer: interrupted; finished results are in predictions' in capsys.readouterr().err


def test_a_model_that_fails_in_a_worker(model, folder, monkeypatch, capsys):
    """And on all images, of which the first ones are tried."""
    for i in range(40):
        shutil.copy('in/b.png', f'in/{i:02}.png')
    tried = []

    def fails(session, inputs):
        tried.append(inputs)
        raise RuntimeError('no kernel')

    monkeypatch.setattr(OnnxRuntime, 'run', fails)
    assert main([str(model('detection')), 'in', '--workers', '2']) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].endswith('no kernel')
    assert sum('no kernel' in line for line in error) == running.MOST_FAILURES
    assert running.MOST_FAILURES <= len(tried) < 20


@pytest.mark.parametrize('workers', ['1', '2'])
def test_a_model_that_fails_on_the_first_image(model, photos, monkeypatch, capsys, workers):
    """It is skipped, also if the second image is finished before the first one fails."""
    for i, photo in enumerate([photos[3], photos[0], photos[0]]):
        Image.fromarray(photo).save(f'{i}.png')
    run = OnnxRuntime.run

    def fails(session, inputs):
        if inputs['images'].shape[3] <= photos[0].shape[1]:
            return run(session, inputs)
        time.sleep(0.2)
        raise RuntimeError('an operator refuses it')

    monkeypatch.setattr(OnnxRuntime, 'run', fails)
    path = str(model('detection', resize=None))
    assert main([path, '0.png', '1.png', '2.png', '--workers', workers]) == 1
    said = capsys.readouterr()
    assert 'skipped 0.png: detection.onnx failed on images of (1, 3, ' in said.err
    assert '2 of 3 done' in said.out


@pytest.mark.parametrize('size', [1, 2])
def test_an_image_on_which_a_model_fails_is_skipped(model, photos, monkeypatch, capsys, size):
    """And the others are not."""
    Path('in').mkdir()
    for i, photo in enumerate([photos[0], photos[3], photos[0]]):
        Image.fromarray(photo).save(f'in/{i}.png')
    run = OnnxRuntime.run

    def fails(session, inputs):
        if inputs['images'].shape[3] > photos[0].shape[1]:
            raise RuntimeError('an operator refuses it')
        return run(session, inputs)

    monkeypatch.setattr(OnnxRuntime, 'run', fails)
    path = str(model('detection', resize=None))
    assert main([path, 'in', '--workers', '1', '--batch-size', str(size)]) == 1
    said = capsys.readouterr()
    assert 'skipped in/1.png: detection.onnx failed on images of (1, 3, ' in said.err
    assert '2 of 3 done' in said.out


def test_mistakes(model, folder, monkeypatch, capfd):
    whole = model('detection').read_bytes()
    Path('torn.onnx').write_bytes(whole[: len(whole) // 2])
    model('fixed')
    file = onnx.load(model('labels'))
    del file.metadata_props[:]
    onnx.save(file, 'foreign.onnx')
    Path('box.xml').touch()
    for arguments, complaint in (
        ('no.onnx in', 'no model at no.onnx'),
        ('torn.onnx in', 'torn.onnx cannot be opened by onnxruntime '),
        ('torn.onnx in --backend openvino', 'torn.onnx cannot be opened by openvino '),
        ('foreign.onnx in', 'foreign.onnx has no metadata cpvt_pyramid; export'),
        ('https://host/a.onnx in', 'got the address https://host/a.onnx; download it'),
        (
            'detection.onnx in --cfg-options a=1',
            '--cfg-options is for models with a config, not',
        ),
        (
            'detection.onnx in --dtype bfloat16',
            'onnxruntime does not compute in bfloat16;',
        ),
        ('detection.onnx in --backend openvino --dtype bfloat16', 'has no bfloat16 on CPU here'),
        ('box.xml in/a.png --backend onnxruntime', 'box.xml is a model of OpenVINO; leave out'),
        ('detection.onnx in --device tpu', 'onnxruntime cannot use tpu; choose from'),
        ('labels.onnx in --score-thr 0.5', 'the model predicts labels; leave it out'),
        ('fixed.onnx in/a.png --tile 128', 'takes images of up to 64 x 96'),
        ('in/a.png in', 'in/a.png is an image; the model comes first'),
        ('nowhere.pth in', 'no checkpoint at nowhere.pth'),
        (
            'detection.onnx in --out-dir in/a.png',
            'in/a.png must be a folder to write to',
        ),
        ('detection.onnx in', 'pip install onnxruntime'),
        ('detection.onnx in --backend openvino', 'pip install openvino'),
    ):
        if 'no bfloat16' in complaint:
            monkeypatch.setattr(sessions, 'has_bfloat16', lambda device: False)
        if 'pip install' in complaint:
            for module in ('onnxruntime', 'openvino', 'openvino.frontend'):
                monkeypatch.setitem(sys.modules, module, None)
        assert main(arguments.split()) == 2
        (line,) = capfd.readouterr().err.splitlines()  # also what C++ prints
        assert line.startswith('cpvt infer: ') and complaint in line


# What `pip install cpvt_pyramid[runtime]` does not install.
BARE = f"""
import sys
import warnings
sys.path.insert(0, {str(ROOT)!r})
for name in ('torch', 'torchvision', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'timm',
             'matplotlib', 'onnx', 'openvino', 'scipy', 'rasterio'):
    sys.modules[name] = None
"""


def test_exported_models_run_without_torch(model, folder):
    Path('more').mkdir()
    Path('more/notes.txt').touch()
    path = str(model('box'))
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save('more/b.png')
    done = run(
        sys.executable,
        '-c',
        f'{BARE}from cpvt_pyramid.__main__ import main\n'
        f"print(main(['infer', {path!r}, 'in/a.png', 'more', '--out-dir', 'bare']))\n"
        f'sys.exit(main(["verify", {path!r}]))',
    )
    (line,) = done.stderr.splitlines()  # a warning is one line
    assert line.startswith('cpvt infer: more: left out what is no image') and 'notes.txt' in line
    assert '\n0\n' in done.stdout and ': passed, ' in done.stdout and done.returncode == 0
    assert main(['box.onnx', 'in/a.png', '--out-dir', 'full']) == 0
    for text in ('bare', 'full'):
        assert len(json.loads(Path(text, 'a.detections.json').read_text())['detections']) == 1


def test_tiles_of_a_photograph_need_no_rasterio(model, photos):
    """Only the GeoTIFF that a segmentor writes does; the error says so before it runs."""
    Image.fromarray(photos[0]).save('a.jpg')
    boxes, labels = str(model('detection')), str(model('labels'))
    done = run(
        sys.executable,
        '-c',
        f'{BARE}from cpvt_pyramid.__main__ import main\n'
        f"print(main(['infer', {boxes!r}, 'a.jpg', '--tile', '64', '--format', 'geojson']))\n"
        f"print(main(['infer', {labels!r}, 'a.jpg', '--tile', '64']))",
    )
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ['0', '2']
    assert {'a.detections.json', 'a.geojson', 'a.overlay.jpg'} <= files_of('predictions').keys()
    assert '--tile with a segmentor, which writes GeoTIFFs, needs rasterio' in done.stderr


def test_signals_after_several_models_of_openvino(model):
    done = run(
        sys.executable,
        '-c',
        f'{BARE}import signal; from cpvt_pyramid.app.predict import Predictor\n'
        "del sys.modules['openvino']\n"
        f'path = {str(model("box"))!r}\n'
        'first, second = (Predictor(path, backend="openvino") for _ in range(2))\n'
        'del first; del second\n'
        'signal.signal(signal.SIGINT, lambda *_: print("handled"))\n'
        'signal.raise_signal(signal.SIGINT)',
    )
    assert (done.returncode, done.stdout) == (0, 'handled\n')


def test_videos(model, photos):
    film('clip.mp4', [photos[0][:90, :132]] * 3)  # even, for the format
    assert main([str(model('detection')), 'clip.mp4', '--backend', 'openvino']) == 0
    frames = Path('predictions/clip.detections.jsonl').read_text().splitlines()
    found = [json.loads(frame)['detections'][0]['box'] for frame in frames]
    assert found == [[0, 0, 132, 90]] * 3


def test_frames_of_videos_are_predicted_in_threads(model, photos, monkeypatch):
    """In as many as share the cores, although the videos come one after the other."""
    monkeypatch.setattr(running, 'usable_cores', lambda: 2)
    active, most, lock, run = set(), [], threading.Lock(), OnnxRuntime.run

    def recorded(session, inputs):
        with lock:
            active.add(threading.get_ident())
            most.append(len(active))
        time.sleep(0.05)
        found = run(session, inputs)
        with lock:
            active.discard(threading.get_ident())
        return found

    monkeypatch.setattr(OnnxRuntime, 'run', recorded)
    for name in ('a.mp4', 'b.mp4'):
        film(name, [photos[0][:90, :132]] * 3)
    assert main([str(model('detection')), 'a.mp4', 'b.mp4', '--no-pictures']) == 0
    assert max(most) == 2
    for name in ('a', 'b'):
        lines = Path(f'predictions/{name}.detections.jsonl').read_text().splitlines()
        assert [json.loads(line)['frame'] for line in lines] == [0, 1, 2]


# The matrix in the header of a track (tkhd) of an MP4 file: fixed-point numbers, by quarter turns.
UPRIGHT = struct.pack('>9i', 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
TURNED = {
    1: struct.pack('>9i', 0, 1 << 16, 0, -1 << 16, 0, 0, 90 << 16, 0, 1 << 30),
    2: struct.pack('>9i', -1 << 16, 0, 0, 0, -1 << 16, 0, 132 << 16, 90 << 16, 1 << 30),
    3: struct.pack('>9i', 0, -1 << 16, 0, 1 << 16, 0, 0, 0, 132 << 16, 1 << 30),
}


@pytest.mark.parametrize('turns', [0, *TURNED])
def test_videos_of_phones_are_upright(model, turns):
    """As the rotation says that players apply, clockwise by quarter turns."""
    frame = np.zeros((90, 132, 3), np.uint8)
    frame[:45, :66] = (0, 0, 255)  # BGR, in the corner at the left and at the top
    film('clip.mp4', [frame] * 3)
    content = Path('clip.mp4').read_bytes()
    place = content.index(UPRIGHT, content.index(b'tkhd'))
    matrix = TURNED.get(turns, UPRIGHT)
    Path('clip.mp4').write_bytes(content[:place] + matrix + content[place + len(UPRIGHT) :])
    with open_video(Path('clip.mp4')) as video:
        (first, *_) = video
    expected = np.rot90(frame[..., ::-1], -turns)
    assert first.shape == expected.shape
    assert abs(first.astype(int) - expected).mean() < 10  # of the compression
    path = str(model('detection', resize=None))
    assert main([path, 'clip.mp4']) == 0
    line = Path('predictions/clip.detections.jsonl').read_text().splitlines()[0]
    height, width = expected.shape[:2]
    assert json.loads(line)['detections'][0]['box'] == [0, 0, width, height]


@pytest.mark.parametrize('name', ['labels', 'probabilities'])
def test_label_maps_in_tiles(model, photos, name, capsys):
    """The tiny models decide each pixel by itself, so that tiles must give what the image gives."""
    photo = np.tile(photos[1], (1, 2, 1))
    Image.fromarray(photo).save('big.png')
    path = str(model(name, resize=None))
    assert main([path, 'big.png', '--tile', '64', '--batch-size', '2']) == 0
    summary = capsys.readouterr().out.splitlines()[1]
    with rasterio.open('predictions/big.labels.tif') as labels:
        np.testing.assert_array_equal(labels.read(1), photo.argmax(-1))
    assert Path('predictions/big.overlay.jpg').is_file()
    assert main([path, 'big.png', '--out-dir', 'whole']) == 0
    assert capsys.readouterr().out.splitlines()[1] == summary != 'found in images: nothing'


def test_nothing_is_said_of_images_that_were_all_skipped(model, capsys):
    Path('torn.png').write_bytes(b'torn')
    assert main([str(model('detection')), 'torn.png']) == 1
    assert capsys.readouterr().out == '0 of 1 done: results in predictions\n'


@pytest.mark.parametrize('backend', ['onnxruntime', 'openvino'])
def test_endings_in_capitals(backend, model, photos, capsys):
    """As cameras and old file systems write them."""
    model('detection').rename('A.ONNX')
    Image.fromarray(photos[0]).save('PHOTO.PNG')
    assert main(['A.ONNX', 'PHOTO.PNG', '--backend', backend, '--no-pictures']) == 0
    assert '1 of 1 done' in capsys.readouterr().out
    assert main(['B.ONNX', 'PHOTO.PNG']) == 2
    assert 'no model at B.ONNX' in capsys.readouterr().err


def test_boxes_in_tiles(model, photos):
    Image.fromarray(photos[1]).save('big.png')
    command = [str(model('detection')), 'big.png', '--tile', '96', '--overlap', '32']
    assert main([*command, '--score-thr', '0.01']) == 0
    found = json.loads(Path('predictions/big.detections.json').read_text())['detections']
    # Each tile's first box is the tile, cut by its borders: the boxes join to the whole image.
    height, width = photos[1].shape[:2]
    assert found[0]['box'] == [0, 0, width, height] and found[0]['class'] == 'one'


LIMIT = "reached the model's limit of 2 boxes, so that objects may be missing; use "
AGAIN = (  # a file does not tell whether it is from a config or from a name
    "a larger max_per_img in the config's model.test_cfg, if it was exported from a config, and "
    'export it again'
)


@pytest.mark.parametrize('backend', ['onnxruntime', 'openvino'])
def test_images_that_reach_the_limit_of_a_model(backend, model, photos, capsys):
    """A file with room for two boxes finds both in photographs 2 and 3, at the usual threshold."""
    Path('in').mkdir()
    for i, photo in enumerate(photos):
        Image.fromarray(photo).save(f'in/{i}.png')
    command = ['--backend', backend, '--no-pictures', '--overwrite']
    full = str(model('full'))

    def note(*words: str) -> list[str]:
        assert main([*words, *command]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith('note')]

    advice = f'tiles, such as --tile 1024, or {AGAIN}, or a higher --score-thr'
    assert note(full, 'in') == [f'note: 2 images {LIMIT}{advice}']
    assert note(full, 'in/2.png') == [f'note: 1 image {LIMIT}{advice}']
    assert note(full, 'in', '--score-thr', '0.5') == []
    assert note(str(model('detection')), 'in', '--score-thr', '0.01') == []  # room for three
    assert note(str(model('labels')), 'in') == []


def test_a_predictor_and_the_limit_of_its_model(model, photos):
    """See `test_images_that_reach_the_limit_of_a_model`."""
    full = Predictor(model('full'))
    line = (
        "^2 images reached the model's limit of 2 boxes, so that objects may be missing; `is_full`"
    )
    with pytest.warns(UserWarning, match=line) as caught:
        found = full(photos)
    assert [each.is_full for each in found] == [False, False, True, True]
    assert caught[0].filename == __file__
    assert not found[2].above(0.5).is_full
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        full(photos[:2])
        assert not Predictor(model('detection'), score_thr=0.01)(photos[2]).is_full


def test_tiles_that_reach_the_limit_of_a_model(model, photos, capsys):
    """An image may have more boxes than the limit, which is that of a tile."""
    Path('in').mkdir()
    for i in (0, 2):
        Image.fromarray(np.tile(photos[i], (2, 3, 1))).save(f'in/{i}.png')
    command = [str(model('full')), 'in', '--no-pictures', '--overwrite', '--overlap', '0', '--tile']
    assert main([*command, '96']) == 0
    line = f'note: in 1 image a tile {LIMIT}tiles smaller than --tile 96, or {AGAIN}, or a higher'
    assert line in capsys.readouterr().out
    assert main([*command, '32']) == 0
    assert f'a tile {LIMIT}{AGAIN}, or a higher' in capsys.readouterr().out


def test_a_video_that_reaches_the_limit_of_a_model(model, capsys):
    film('film.mp4', [np.full((48, 64, 3), 250, np.uint8)] * 3)
    assert main([str(model('full')), 'film.mp4']) == 0
    assert f'note: 1 image or video {LIMIT}{AGAIN}, or a' in capsys.readouterr().out


@pytest.mark.parametrize('name, tiles', [('detection', True), ('box', False)])
def test_advice_at_the_limit_names_tiles_where_they_keep_masks(name, tiles, model, photos, capsys):
    Image.fromarray(photos[0]).save('a.png')
    opened = ExportedModel(model(name))
    results = Results(InferOptions(), opened.kind, opened.classes)
    results.full.add(Path('a.png'))
    line = note_about_limit(results, ModelFiles(opened.path), opened, None)
    assert ('--tile' in line) == tiles and line.endswith('or a higher --score-thr')


@pytest.mark.parametrize('size', [(64, 96), (40, 50), (20, 96), (128, 192), (150, 60), (7, 300)])
def test_a_file_of_one_size_that_is_not_told_the_true_ones(size, model):
    """It takes the padding for image, and must not squeeze its labels into the image."""
    stripes = np.zeros((*size, 3), np.uint8)
    for channel in range(3):
        stripes[:, size[1] * channel // 3 : size[1] * (channel + 1) // 3, channel] = 200
    labels = Predictor(model('labels of one size', resize=None))(stripes).labels
    assert labels.shape == size
    expected = stripes.argmax(2)
    wrong = (labels != expected).mean()
    assert wrong <= 0.02  # at the borders, where the image was resized
    if size[0] <= 64 and size[1] <= 96:
        assert wrong == 0


def test_files_that_are_no_videos():
    """FFmpeg would read the files that a list names, and wait for what comes through a pipe."""
    film('film.mp4', [np.zeros((48, 64, 3), np.uint8)] * 3)
    with open_video(Path('film.mp4')) as video:
        assert len(list(video)) == 3
    Path('list.mp4').write_text('ffconcat version 1.0\nfile film.mp4\n')
    Path('playlist.mp4').write_text('#EXTM3U\n#EXTINF:10,\nfilm.mp4\n#EXT-X-ENDLIST\n')
    os.mkfifo('pipe.mp4')
    Path('empty.mp4').touch()
    for name, message in (
        ('list.mp4', 'not a complete video in one of the formats'),
        ('playlist.mp4', 'not a complete video in one of the formats'),
        ('pipe.mp4', 'a pipe or device, not a file'),
        ('empty.mp4', 'the file is empty'),
    ):
        with pytest.raises(ReadError, match=message), open_video(Path(name)):
            pass


def test_the_suppression_in_a_file_merges_tiles(model):
    for nms, expected in (
        (None, Suppression()),
        ({'iou_threshold': 0.7, 'class_agnostic': True}, Suppression(0.7, True)),
    ):
        assert Predictor(model('detection', nms=nms)).model.suppression == expected


def test_memory_of_a_small_image_that_is_enlarged(model):
    opened = ExportedModel(model('detection', resize={'short': 400, 'long': 600}))
    assert opened.memory_estimate([np.zeros((4, 6, 3), np.uint8)]) >= 400 * 600 * INPUT_BYTES


def test_an_image_that_is_too_large_is_skipped(model, photos, capsys, monkeypatch):
    """And the others are not."""
    for name, photo in (('a', photos[0]), ('b', np.zeros((4, 900, 3), np.uint8))):
        Image.fromarray(photo).save(f'{name}.png')
    monkeypatch.setattr(memory, 'available', lambda: 15 * 40 * 3000)
    path = str(model('labels', resize={'short': 40, 'long': 1e6}))
    assert main([path, 'a.png', 'b.png', '--workers', '1']) == 1
    said = capsys.readouterr()
    assert 'skipped b.png: an input of 9000 x 40 pixels does not fit into memory' in said.err
    assert '1 of 2 done' in said.out


# As onnxruntime (two kinds), OpenVINO and oneDNN report it.
NO_MEMORY = {
    'MatMul: bfc_arena.cc:360 Failed to allocate memory for requested buffer of size 35344000000': (
        r'\([0-9.]+ GB are free\)'
    ),
    'Non-zero status code: std::bad_alloc': r'\([0-9.]+ GB are free\)',
    'Exception from src/inference: bad allocation': r'\([0-9.]+ GB are free\)',
    'could not create a primitive': r'\([0-9.]+ GB are free\)',
}


@pytest.mark.parametrize('text', NO_MEMORY)
def test_an_image_that_needs_too_much_memory(text, model, photos, capsys, monkeypatch):
    """A detector that does not resize it takes it in tiles, and others are told what to do."""
    Path('in').mkdir()
    for name, photo in zip('abc', photos):
        Image.fromarray(photo).save(f'in/{name}.png')
    run_session = OnnxRuntime.run

    def run_small(session, inputs):
        if inputs['images'][..., 0].size > limit:
            raise RuntimeError(text)
        return run_session(session, inputs)

    monkeypatch.setattr(OnnxRuntime, 'run', run_small)
    monkeypatch.setattr(running, 'TILE', 64)
    monkeypatch.setattr(exported, 'TILE', 64)
    monkeypatch.setattr(automatic_tiles, 'overlap_for', lambda tile: 0 if tile == 32 else 32)
    limit = 3 * 64
    for batch in ('1', '3'):
        assert main([str(model('detection', resize=None)), 'in', '--batch-size', batch]) == 0
        said = capsys.readouterr()
        for size in ('133 x 91', '77 x 160'):
            line = (
                f'cpvt infer: {size} pixels do not fit into memory as a whole; they are taken in '
            )
            assert said.err.count(line) == 1
        assert said.err.count('as a whole') == 2 and '3 of 3 done' in said.out
        found = json.loads(Path('predictions/a.detections.json').read_text())['detections']
        assert found[0]['box'] == [0, 0, 133, 91]
    told = (
        'skipped in/a.png: an input of 58 x 40 pixels does not fit into memory ' + NO_MEMORY[text]
    )
    limit = 1
    monkeypatch.setattr(running, 'TILE', 32)
    for name, advice in (
        ('detection', ', or divide the image with --tile 32\n'),
        ('labels', ', or divide the image with --tile 32\n'),
        ('box', '\n'),
    ):
        inputs = [f'in/{name}.png' for name in 'abc']
        assert main([str(model(name)), *inputs, '--overwrite']) == 1
        said = capsys.readouterr().err
        assert re.search(f'{told}; reduce the input with --shorter-side{advice}', said), said
        assert said.count('skipped') == 3
    film('film.mp4', [np.zeros((48, 64, 3), np.uint8)] * 3)
    assert main([str(model('detection', resize=None)), 'film.mp4', '--overwrite']) == 1
    said = capsys.readouterr().err  # its frames are smaller than a tile
    assert '64 x 48 pixels does not fit into memory' in said and '--tile' not in said


def test_a_batch_that_needs_too_much_memory_is_divided(model, photos, monkeypatch, capsys):
    for name, photo in zip('abc', photos):
        Image.fromarray(np.resize(photo, (40, 60, 3))).save(f'{name}.png')
    run_session = OnnxRuntime.run

    def run_alone(session, inputs):
        if len(inputs['images']) > 1:
            raise RuntimeError('Failed to allocate memory')
        return run_session(session, inputs)

    monkeypatch.setattr(OnnxRuntime, 'run', run_alone)
    assert main([str(model('labels')), *(f'{n}.png' for n in 'abc'), '--batch-size', '3']) == 0
    assert '3 of 3 done' in capsys.readouterr().out


def test_what_needs_torch():
    Path('a.pth').touch()
    for code, line, fix in (
        (
            'import cpvt_pyramid; assert "CPVTPyramid" in dir(cpvt_pyramid)\n'
            'from cpvt_pyramid import CPVTPyramid',
            'ImportError: CPVTPyramid needs PyTorch, which is not installed',
            '; pip install torch',
        ),
        (
            "from cpvt_pyramid.app.predict import Predictor; Predictor('a.pth')",
            'cpvt_pyramid.app.tooling.command.UserError: a.pth is not an exported model',
            "run make setup in a clone of cpvt_pyramid, or pip install '.[mm]' there",
        ),
    ):
        told = run(sys.executable, '-c', BARE + code).stderr.splitlines()[-1]
        assert told.startswith(line) and fix in told
