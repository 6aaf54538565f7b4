"""Trained models by name: the table, and downloads from a server that misbehaves."""

import hashlib
import io
import re
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from cpvt_pyramid import ARCHS, COLUMNAR_ARCHS, CPVTPyramid, load_weights
from cpvt_pyramid.__main__ import main
from cpvt_pyramid.checkpoints import downloads
from cpvt_pyramid.checkpoints.downloads import local_file
from cpvt_pyramid.tasks.trained import (
    CLASSES,
    METRICS,
    TRAINED,
    build_trained,
    load_trained,
    similar_name,
    weights_of,
)

NAME = 'retinanet_pvt_t_coco'


class Handler(BaseHTTPRequestHandler):
    """Sends `content`, which the first part of the path spoils."""

    content = b''
    requests: list[str] = []

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:  # noqa: N802 the name that http.server calls
        how = self.path.split('/')[1]
        self.requests.append(how)
        content = b'<!DOCTYPE html>\n<html>sign in</html>' if how == 'page' else self.content
        if how == 'missing':
            self.send_error(404)
            return
        if how == 'silent':
            time.sleep(3 * downloads.TIMEOUT)
            return
        self.send_response(200)
        if how != 'without-length':
            self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        if how == 'other':
            content = content[::-1]
        if how in ('broken', 'stalled'):
            content = content[: len(content) // 2]
        self.wfile.write(content)
        if how == 'stalled':
            self.wfile.flush()
            time.sleep(6 * downloads.TIMEOUT)


@pytest.fixture
def address(tmp_path, monkeypatch) -> Iterator[str]:
    """Of the server. The file is of a backbone inside of a detector."""
    tensors = CPVTPyramid('pcpvt_nano').state_dict()
    tensors = {f'backbone.{name}': value for name, value in tensors.items()}
    file = io.BytesIO()
    torch.save({'meta': {}, 'state_dict': tensors}, file)
    monkeypatch.setattr(Handler, 'content', file.getvalue())
    monkeypatch.setattr(Handler, 'requests', [])
    monkeypatch.setattr(downloads, 'TIMEOUT', 0.5)
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path / 'torch'))
    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


def file_name() -> str:
    return f'model_20210831-{hashlib.sha256(Handler.content).hexdigest()[:8]}.pth'


def downloads_left() -> list[Path]:
    """All files and folders in the cache."""
    folder = downloads.downloads_folder()
    return list(folder.iterdir()) if folder.is_dir() else []


def set_address(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setitem(TRAINED, NAME, TRAINED[NAME]._replace(url=url))


@pytest.mark.parametrize('how', ['whole', 'without-length'])
def test_a_name_is_downloaded_once(how, address, monkeypatch):
    set_address(monkeypatch, f'{address}/{how}/{file_name()}')
    model = CPVTPyramid('pcpvt_nano')
    for _ in range(2):
        report = load_weights(model, weights_of(NAME))
        assert str(report).endswith('0 missing, 0 unused')
    assert Handler.requests == [how]
    assert [path.name for path in downloads_left()] == [file_name()]


FAULTS = {
    'broken': r'EOFError: \d+ of \d+ bytes arrived',
    'other': 'ValueError: its SHA-256 begins with [0-9a-f]{8}, not [0-9a-f]{8}',
    'page': 'ValueError: its SHA-256 begins with',
    'stalled': f'{socket.timeout.__name__}: timed out',
    'silent': f'{socket.timeout.__name__}: timed out',
    'missing': 'HTTPError: HTTP Error 404: Not Found',
}


@pytest.mark.parametrize('how', FAULTS)
def test_faults_are_one_line_and_leave_nothing(how, address, monkeypatch):
    url = f'{address}/{how}/{file_name()}'
    set_address(monkeypatch, url)
    start = time.monotonic()
    with pytest.raises(ConnectionError) as caught:
        local_file(weights_of(NAME))
    line = str(caught.value)
    assert re.match(rf'cannot download {re.escape(url)} \({FAULTS[how]}', line)
    assert line.endswith(
        f'Download it elsewhere and give the path of the file instead, or put it '
        f'into {downloads.downloads_folder()}'
    )
    assert '\n' not in line and time.monotonic() - start < 2
    assert downloads_left() == []


def test_a_broken_connection_of_a_file_without_a_hash(address):
    with pytest.raises(ConnectionError, match=r'\(EOFError: \d+ of \d+ bytes arrived\)'):
        local_file(f'{address}/broken/model.pth')
    assert downloads_left() == []
    assert local_file(f'{address}/whole/model.pth').read_bytes() == Handler.content
    assert local_file(f'{address}/without-length/other.pth').read_bytes() == Handler.content


def test_processes_that_download_at_the_same_time(address):
    """Each gets the whole file, whichever is the first."""
    url = f'{address}/whole/{file_name()}'
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: downloads.from_address(url).read_bytes(), range(8)))
    assert found == 8 * [Handler.content]
    assert [path.name for path in downloads_left()] == [file_name()]


def test_a_download_that_was_killed_is_begun_again(address, monkeypatch):
    set_address(monkeypatch, f'{address}/whole/{file_name()}')
    folder = downloads.downloads_folder()
    torn = folder / 'tmpkilled' / file_name()
    torn.parent.mkdir(parents=True)
    torn.write_bytes(Handler.content[:100])
    assert local_file(weights_of(NAME)).read_bytes() == Handler.content


def test_an_interrupt_leaves_nothing(address, monkeypatch):
    def interrupt(_url: str, path: Path) -> None:
        path.write_bytes(Handler.content[:100])
        raise KeyboardInterrupt

    set_address(monkeypatch, f'{address}/whole/{file_name()}')
    monkeypatch.setattr(downloads, 'receive', interrupt)
    with pytest.raises(KeyboardInterrupt):
        local_file(weights_of(NAME))
    assert downloads_left() == []


def test_files_come_before_names_and_similar_names_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(NAME).touch()
    assert weights_of(NAME) == NAME and weights_of(Path(NAME)) == Path(NAME)
    assert weights_of('timm://a') == 'timm://a' and weights_of('~nobody/a') == '~nobody/a'
    with pytest.raises(FileNotFoundError, match=f'^no checkpoint at .*; there is .* {NAME}$'):
        weights_of(NAME.replace('retina', 'retinna'))
    with pytest.raises(FileNotFoundError, match='^no checkpoint at work_dirs/epoch_12.pth$'):
        local_file(weights_of('work_dirs/epoch_12.pth'))


@pytest.mark.parametrize(
    'name, meant',
    [
        ('retinanet_pvtv2_b2_coco', 'retinanet_pvt_v2_b2_coco'),
        ('SegFormer_B0_ADE20k', 'segformer_b0_ade20k'),
        ('segformer_b5', 'segformer_b5_ade20k'),
        ('upernet', 'upernet_cpvt_s_ade20k'),
        ('se', ''),
        ('yolo', ''),
    ],
)
def test_similar_names(name, meant):
    assert similar_name(name) == meant


@pytest.mark.parametrize('name', TRAINED)
def test_the_table(name):
    model = TRAINED[name]
    assert name in (model.config, f'{model.config}_{model.data.lower()}')
    assert model.config_path.is_file()
    assert re.search('-[0-9a-f]{8}[.]pth$', model.url) and downloads.DIGEST.search(model.url)
    assert METRICS[model.data] and CLASSES[model.data]


def test_the_command_lists_them(capsys):
    assert main(['models']) == 0
    table, backbones = capsys.readouterr().out.rstrip().split('\n\n')
    head, *lines = table.splitlines()
    columns = ['data', 'classes', 'published', 'parameters', 'download', 'needs', 'weights']
    assert head.split() == columns
    assert [line.split()[0] for line in lines] == list(TRAINED)
    for row in (
        'retinanet_pvt_s_coco COCO 80 40.4 box AP 34.2M 137 MB torchvision Apache-2.0',
        'segformer_b0_cityscapes Cityscapes 19 76.54 mIoU 3.7M 15 MB torch research only',
    ):
        assert row.split() in [line.split() for line in lines]
    names = backbones.removeprefix('architectures of backbones: ').split(', ')
    assert names == [*ARCHS, *COLUMNAR_ARCHS]


# Loading


SEGMENTOR, DETECTOR = 'segformer_b0_ade20k', 'retinanet_pvt_v2_b0_coco'


@pytest.fixture(scope='module')
def files(tmp_path_factory) -> dict[str, Path]:
    """Files with random weights, under the names of our models."""
    folder = tmp_path_factory.mktemp('files')
    paths = {}
    for name in (SEGMENTOR, DETECTOR):
        torch.manual_seed(0)
        paths[name] = folder / f'{name}.pth'
        torch.save({'state_dict': build_trained(TRAINED[name]).state_dict()}, paths[name])
    return paths


@pytest.mark.parametrize('name', [SEGMENTOR, DETECTOR])
def test_a_trained_model(name, files):
    model = load_trained(name, files[name])
    assert not model.training
    assert model.classes == tuple(CLASSES[TRAINED[name].data])
    assert model.image_sides == ((512, 2048) if name == SEGMENTOR else (800, 1333))
    saved = torch.load(files[name])['state_dict']
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, saved[key], rtol=0, atol=0)


@pytest.mark.parametrize('name', [SEGMENTOR, DETECTOR])
def test_other_classes(name, files):
    model = load_trained(name, files[name], num_classes=7, drop_path_rate=0.1)
    assert len(model.classes) == 7
    saved = torch.load(files[name])['state_dict']
    changed = [k for k, v in model.state_dict().items() if v.shape != saved[k].shape]
    classifier = 'decode_head.conv_seg'
    if name == DETECTOR:
        classifier = 'head.classification_head.cls_logits'
    assert changed == [f'{classifier}.weight', f'{classifier}.bias']
    model.train()
    image = torch.rand(3, 64, 64)
    if name == SEGMENTOR:
        loss = model.loss(image[None].repeat(2, 1, 1, 1), torch.full((2, 64, 64), 6))
    else:
        model.transform.min_size, model.transform.max_size = (64,), 64
        target = {'boxes': torch.tensor([[8.0, 8, 40, 40]]), 'labels': torch.tensor([6])}
        loss = sum(model([image], [target]).values())
        scores = model.head.classification_head.cls_logits.bias.sigmoid()
        torch.testing.assert_close(scores, torch.full_like(scores, 0.01))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize('name', [SEGMENTOR, DETECTOR])
def test_a_fine_tuned_model_is_loaded_with_its_classes(name, files, tmp_path):
    path = tmp_path / 'mine.pth'
    tuned = load_trained(name, files[name], num_classes=3)
    torch.save(tuned.state_dict(), path)
    with pytest.warns(UserWarning, match='mine.pth has 3 classes without names; they are called'):
        model = load_trained(name, path)
    assert model.classes == ('class 0', 'class 1', 'class 2')
    for key, value in tuned.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0)

    names = ['oak', 'beech', 'fir']
    meta = {'dataset_meta': {'classes': names}}
    torch.save({'state_dict': tuned.state_dict(), 'meta': meta}, path)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert load_trained(name, path).classes == tuple(names)
        assert len(load_trained(name, path, num_classes=5).classes) == 5

    tensors = dict(tuned.state_dict())
    classifier = next(key for key in tensors if key.endswith(('conv_seg.weight', 'logits.weight')))
    tensors[classifier] = tensors[classifier][:, 1:]
    torch.save(tensors, path)
    with pytest.raises(ValueError, match='does not fit the model'):
        load_trained(name, path)


def prefixed(prefix: str, tensors: dict) -> dict:
    return {f'{prefix}{name}': value for name, value in tensors.items()}


# How trainings save a model, given as its tensors.
SAVED = {
    'a training script': lambda own: {'model': own, 'optimizer': {'state': {}}, 'epoch': 3},
    'compiled': lambda own: prefixed('_orig_mod.', own),
    'compiled, in DDP': lambda own: {'model': prefixed('module._orig_mod.', own)},
    'Lightning': lambda own: {
        'state_dict': prefixed('model.', own) | {'iou.confmat': torch.zeros(3, 3)},
        'optimizer_states': [],
        'epoch': 1,
    },
    'averaged': lambda own: prefixed('module.', own) | {'n_averaged': torch.tensor(2)},
    'mmengine, averaged': lambda own: {
        'state_dict': own,
        'ema_state_dict': prefixed('module.', {k: v + 1 for k, v in own.items()})
        | {'steps': torch.tensor(9)},
        'meta': None,
    },
    'a part compiled': lambda own: {
        name.replace('backbone.', 'backbone._orig_mod.', 1): value for name, value in own.items()
    },
}


@pytest.mark.parametrize('how', SAVED)
@pytest.mark.parametrize('name', [SEGMENTOR, DETECTOR])
@pytest.mark.filterwarnings('ignore:.*taken from state_dict, which is the moving average')
def test_files_as_trainings_save_them(name, how, files, tmp_path):
    own = torch.load(files[name])['state_dict']
    torch.save(SAVED[how](own), tmp_path / 'saved.pth')
    found = load_trained(name, tmp_path / 'saved.pth').state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[key], value) for key, value in own.items())


@pytest.mark.parametrize('name', [SEGMENTOR, DETECTOR])
def test_files_of_several_models(name, files, tmp_path):
    own = torch.load(files[name])['state_dict']
    path = tmp_path / 'saved.pth'
    torch.save(prefixed('student.', own) | prefixed('teacher.', own), path)
    with pytest.raises(ValueError, match='saved.pth holds several models, .*: student., teacher.'):
        load_trained(name, path)
    torch.save({'model': own, 'model_ema': own}, path)
    with pytest.warns(UserWarning, match=r'saved.pth: taken from model_ema \(the moving average\)'):
        load_trained(name, path)


def test_a_single_score_is_not_read_as_a_class(files, tmp_path):
    """MMSegmentation's binary heads have one, and a threshold that the file does not hold."""
    tensors = dict(torch.load(files[SEGMENTOR])['state_dict'])
    for part in ('weight', 'bias'):
        tensors[f'decode_head.conv_seg.{part}'] = tensors[f'decode_head.conv_seg.{part}'][:1]
    path = tmp_path / 'binary.pth'
    torch.save({'state_dict': tensors}, path)
    with pytest.raises(ValueError, match='binary.pth is of a segmentor with one score and a thre'):
        load_trained(SEGMENTOR, path)


@pytest.mark.parametrize('name', [SEGMENTOR, DETECTOR])
def test_bands_need_their_means(name, files, tmp_path):
    bands = dict(in_channels=4, rgb_weights='mean')
    with pytest.raises(ValueError, match='image_mean must have a value for each of the 4 channels'):
        load_trained(name, files[name], **bands)
    bands.update(image_mean=[0.4] * 4, image_std=[0.2] * 4)
    model = load_trained(name, files[name], **bands)
    if name == DETECTOR:
        model.transform.min_size, model.transform.max_size = (64,), 64
    image = torch.rand(4, 64, 64)
    with torch.no_grad():
        model(image[None] if name == SEGMENTOR else [image])
    torch.save(model.state_dict(), tmp_path / 'bands.pth')  # without rgb_weights
    again = load_trained(name, tmp_path / 'bands.pth', **{**bands, 'rgb_weights': None})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_boxes_are_in_pixels_of_the_image(files):
    """Of a list of images, each in its size, also with padding."""
    model = load_trained(DETECTOR, files[DETECTOR])
    model.transform.min_size, model.transform.max_size = (64,), 128
    torch.nn.init.constant_(model.head.classification_head.cls_logits.bias, 0)
    images = [torch.rand(3, 48, 80), torch.rand(3, 90, 33)]
    with torch.no_grad():
        found = model(images)
        alone = [model([image])[0] for image in images]
    for image, a, b in zip(images, found, alone):
        assert len(a['boxes']) == 100
        assert a['boxes'][:, 2].max() <= image.shape[2] + 1e-3
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def damaged(name: str, path: Path, how: str, out: Path) -> Path:
    if how == 'cut':
        out.write_bytes(path.read_bytes()[:100_000])
        return out
    tensors = dict(torch.load(path)['state_dict'])
    last = [name for name, value in tensors.items() if value.dim() == 4][-1]
    if how == 'missing':
        del tensors[last]
    elif how == 'unknown':
        tensors['head.more.weight'] = torch.zeros(3)
    elif how == 'not finite':
        tensors[last] = torch.full_like(tensors[last], torch.nan)
    elif how == 'no tensors':
        tensors = {'state_dict': 3}
    elif how == 'empty':
        tensors = {}
    torch.save(tensors, out)
    return out


DAMAGE = {
    'cut': 'is not a complete checkpoint|is incomplete|is cut',
    'missing': 'does not fit the model; tensors missing:',
    'unknown': 'does not fit the model; tensors not in the model: head.more.weight',
    'not finite': 'is damaged: .* has values that are not finite',
    'no tensors': 'must hold tensors|holds no tensors',
    'empty': 'does not fit the model|is empty',
}


@pytest.mark.parametrize('how', DAMAGE)
@pytest.mark.parametrize('name', [SEGMENTOR, DETECTOR])
def test_damaged_and_foreign_files(name, how, files, tmp_path, capsys):
    path = damaged(name, files[name], how, tmp_path / 'file.pth')
    with pytest.raises(ValueError, match=DAMAGE[how]) as caught:
        load_trained(name, path)
    assert str(path) in str(caught.value)
    assert main(['infer', name, str(path), str(tmp_path), '--out-dir', str(tmp_path / 'out')]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    'name, other',
    [(SEGMENTOR, DETECTOR), (DETECTOR, SEGMENTOR), ('segformer_b1_ade20k', SEGMENTOR)],
)
def test_files_of_other_models(name, other, files):
    with pytest.raises(ValueError, match='does not fit the model'):
        load_trained(name, files[other])


def test_wrong_names_and_numbers(files):
    with pytest.raises(ValueError, match=f'no trained model segformer; did you mean {SEGMENTOR}'):
        load_trained('segformer')
    with pytest.raises(ValueError, match='no trained model yolo; cpvt models lists them'):
        load_trained('yolo')
    with pytest.raises(
        ValueError, match='num_classes of segformer_b0_ade20k must be at least 2, got 0'
    ):
        load_trained(SEGMENTOR, files[SEGMENTOR], num_classes=0)
    with pytest.raises(FileNotFoundError, match='no checkpoint at nowhere.pth'):
        load_trained(SEGMENTOR, 'nowhere.pth')


def test_a_licence_is_told_when_weights_are_downloaded(address, monkeypatch):
    url = f'{address}/whole/{file_name()}'
    monkeypatch.setitem(TRAINED, SEGMENTOR, TRAINED[SEGMENTOR]._replace(url=url))
    with pytest.raises(ValueError, match='does not fit'):
        with pytest.warns(UserWarning, match=f'{SEGMENTOR}: .* for research only'):
            load_trained(SEGMENTOR)
    with warnings.catch_warnings():  # in the cache now
        warnings.simplefilter('error')
        with pytest.raises(ValueError, match='does not fit'):
            load_trained(SEGMENTOR)
