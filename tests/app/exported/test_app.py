"""The web page: what its server answers, what it refuses, and mistakes on the command line.

tests/app/page has what a person sees in a browser.
"""

import base64
import http.client
import io
import json
import math
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from support import ROOT

from cpvt_pyramid.app.commands.app import main
from cpvt_pyramid.app.commands.infer import main as infer_main
from cpvt_pyramid.app.images.formats import readable_formats
from cpvt_pyramid.app.page import server as app
from cpvt_pyramid.app.page.start import samples_of
from cpvt_pyramid.app.predict import Predictor, automatic_tiles, exported
from cpvt_pyramid.app.predict.exported import ExportedModel
from cpvt_pyramid.app.predict.options import ModelOptions
from cpvt_pyramid.app.predictions.drawing import jpeg_of

SECRET = b'-----BEGIN OPENSSH PRIVATE KEY-----'


class Answer(NamedTuple):
    """What the server sends."""

    status: int
    body: bytes
    headers: http.client.HTTPMessage

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a server, each time with a new connection."""

    def __init__(self, server: app.Server) -> None:
        self.server, self.address = server, server.listener.getsockname()[:2]

    def ask(
        self, method: str, path: str, body: Any = b'', headers: Optional[dict] = None
    ) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        connection.request(method, path, body or None, headers or {})
        response = connection.getresponse()
        answer = Answer(response.status, response.read(), response.headers)
        connection.close()
        return answer

    def get(self, path: str) -> Answer:
        return self.ask('GET', path)

    def predict(self, image: bytes = b'', query: str = '') -> Answer:
        return self.ask('POST', f'/predict?{query}', image)

    def send_raw(self, data: bytes, closes: bool = True) -> bytes:
        """Send bytes as they are; returns all that comes back."""
        with socket.create_connection(self.address, timeout=30) as connection:
            connection.sendall(data)
            if closes:
                connection.shutdown(socket.SHUT_WR)
            return b''.join(iter(lambda: connection.recv(65536), b''))


@contextmanager
def serving(model: Path, folder: Path = Path(), host: str = '127.0.0.1') -> Iterator[Client]:
    page = app.Page(ExportedModel(model), app.read_samples(folder))
    server = app.Server(page, host, 0)
    thread = threading.Thread(target=server.run, args=([server.listener],))
    thread.start()
    try:
        yield Client(server)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(model, photos) -> Iterator[Client]:
    """Of a detector in a folder with one sample, in which colours are smooth."""
    Image.fromarray(photos[0]).save('sample.png')
    with serving(model('detection')) as client:
        yield client


def encoded(image: Image.Image, kind: str = 'PNG', **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture_of(answer: Answer) -> bytes:
    head, _, data = answer.json['picture'].partition(',')
    assert answer.status == 200 and head == 'data:image/jpeg;base64'
    return base64.b64decode(data)


def huge_png(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims a large image."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack('>I', len(data)) + name + data + struct.pack('>I', zlib.crc32(name + data))
        )

    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    chunks = [(b'IHDR', header), (b'IDAT', zlib.compress(b'\0' * 99)), (b'IEND', b'')]
    return b'\x89PNG\r\n\x1a\n' + b''.join(chunk(*each) for each in chunks)


def test_the_page_begins_with_the_options_of_the_command(model):
    options = ModelOptions(score_thr=0.6, shorter_side=50)
    about = app.Page(ExportedModel(model('detection'), options)).about()
    assert about['score_thr'] == 0.6 and about['shorter_side'] == 50


@pytest.mark.filterwarnings('ignore:dark.png', 'ignore:pages.tif')
def test_predictions_are_those_of_the_predictor(model, photos):
    images = [Image.fromarray(photo) for photo in photos]
    files = {
        'plain.png': encoded(images[0]),
        'palette.png': encoded(images[1].quantize(64)),
        'grey.tif': encoded(images[0].convert('L'), 'TIFF'),
    }
    for name, data in files.items():
        Path(name).write_bytes(data)
    Path('nothing').mkdir()
    for kind in ('detection', 'box', 'labels', 'two'):
        path, detects = model(kind), kind in ('detection', 'box')
        with serving(path, Path('nothing')) as client:
            about = client.get('/about').json
            assert about['name'] == path.name and about['classes'] == ['zero', 'one', 'two']
            assert about['shorter_side'] == 40 and about['sizes'] == [32, 1024]
            assert about['score_thr'] == (0.3 if detects else None)
            for name, data in files.items():
                answer, expected = client.predict(data), Predictor(path)(name)
                assert answer.json['summary'] == (expected.summary() or 'nothing')
                assert picture_of(answer) == jpeg_of(expected.draw())
                assert answer.json.get('detections') == (expected.records() if detects else None)
            if detects:
                expected = Predictor(path, score_thr=0.05, shorter_side=50)('plain.png')
                answer = client.predict(files['plain.png'], 'shorter_side=50&score_thr=0.05')
                assert answer.json['detections'] == expected.records() != []
    assert not list(Path(tempfile.gettempdir()).glob('cpvt_page_*'))


def test_a_threshold_below_that_of_the_model_is_told(model, photos):
    nms = {'score_thr': 0.05, 'iou_threshold': 0.5, 'class_agnostic': False}
    path = model('detection', nms=nms)
    image = encoded(Image.fromarray(photos[0]))
    with serving(path) as client:
        assert client.get('/about').json['least_score'] == 0.05
        assert client.predict(image, 'score_thr=0.05').json['warnings'] == []
        (line,) = client.predict(image, 'score_thr=0.02').json['warnings']
        assert line.startswith('a score threshold of 0.02 has the effect of 0.05')


@pytest.mark.filterwarnings('ignore:left out the sample')
def test_nothing_is_served_but_the_page_and_small_pictures_of_samples(model, photos, tmp_path):
    home = tmp_path / 'home of "me" ü 数'
    for folder in (home / '.ssh', home / 'sub', tmp_path / 'outside'):
        folder.mkdir(parents=True)
    photo = Image.fromarray(photos[0].repeat(4, 0).repeat(4, 1))
    location = Image.Exif()
    location[0x010E] = 'taken at home'
    for name in ('a b.jpg', 'q\'"#?&%41.JPG', 'ü数.png', '.hidden.jpg', 'sub/inner.jpg'):
        photo.save(home / name, exif=location)
    photo.save(tmp_path / 'outside/photo.jpg')
    (home / '.ssh/id_rsa').write_bytes(SECRET)
    (home / 'text.jpg').write_bytes(SECRET)
    (home / 'bomb.png').write_bytes(huge_png(60000, 60000))
    (home / 'key.jpg').symlink_to('.ssh/id_rsa')
    (home / 'link.jpg').symlink_to(tmp_path / 'outside/photo.jpg')
    (home / 'inner.jpg').symlink_to('sub/inner.jpg')
    (home / 'inside.jpg').symlink_to('a b.jpg')
    (home / 'loop.jpg').symlink_to('loop.jpg')
    (home / 'folder.jpg').symlink_to('sub')
    (home / 'broken.jpg').symlink_to('nothing.jpg')
    os.mkfifo(home / 'pipe.jpg')
    path = model('detection').rename(home / 'model.onnx')
    (tmp_path / 'link to home').symlink_to(home)

    names = ['a b.jpg', 'inside.jpg', 'q\'"#?&%41.JPG', 'ü数.png']
    with pytest.warns(UserWarning, match='left out the sample') as notes:
        samples = app.read_samples(tmp_path / 'link to home')
    left_out = {str(note.message).partition(': ')[0].rpartition('/')[2] for note in notes}
    assert left_out == {'bomb.png', 'inner.jpg', 'key.jpg', 'link.jpg', 'text.jpg'}
    assert [sample.name for sample in samples] == names

    inside = [str(file) for file in home.rglob('*')] + [str(tmp_path / 'outside/photo.jpg')]
    inside += ['/etc/passwd', str(Path(app.__file__)), tempfile.gettempdir()]
    forms = (
        '{}',
        '/gradio_api/file={}',
        '/file={}',
        '/samples{}',
        '/samples/..{}',
        '/page{}',
        '//{}',
    )
    attacks = [form.format(quote(file)) for form in forms for file in inside]
    attacks += [form.format(quote(file, safe='')) for form in forms for file in inside]
    attacks += [
        f'{where}/{up * 9}etc/passwd'
        for where in ('', '/samples', '/page', '/about')
        for up in ('../', '%2e%2e/', '..%2f', '%252e%252e/', '..\\')
    ]
    attacks += [
        '/.',
        '/..',
        '/page/',
        '/page/page.js',
        '/page.py',
        '/server.py',
        '/samples',
        '/samples/',
        '/samples/4',
        '/samples/-1',
        '/samples/0/',
        '/samples/00',
        '/samples/0.0',
        '/samples/a',
        '/samples/0/../../model.onnx',
        '/model.onnx',
        '/a%20b.jpg',
        '/upload',
        '/tmp',
        '/proxy=http://x',
        '/gradio_api/file=http://127.0.0.1/',
        '/gradio_api/upload',
        '/config',
        '/about/',
        '/ABOUT',
    ]
    with serving(path, tmp_path / 'link to home') as client:
        for attack in attacks:
            for method in ('GET', 'POST'):
                answer = client.ask(method, attack)
                assert answer.status == 404 and answer.json['error'], attack
                assert SECRET not in answer.body and str(tmp_path) not in answer.body.decode()
        for address in ('/', '/page.css', '/page.js', '/about'):
            answer = client.get(address)
            assert answer.status == 200 and str(tmp_path) not in answer.body.decode()
            assert "default-src 'self'" in answer.headers['Content-Security-Policy']
        assert client.get('/about').json['samples'] == names
        for number, name in enumerate(names):
            answer = client.get(f'/samples/{number}')
            small = Image.open(io.BytesIO(answer.body))
            assert answer.headers['Content-Type'] == 'image/jpeg' and max(small.size) == 240
            assert not small.getexif()
            answer = client.predict(query=f'sample={number}')
            expected = Predictor(path)(home / name)
            assert picture_of(answer) == jpeg_of(expected.draw())
        # A path in the place of an image is not opened.
        for body in (b'/etc/passwd', b'{"path": "/etc/passwd"}', b'http://127.0.0.1/'):
            assert 'not an image' in client.predict(body).json['error']
        for number in ('4', '-1', '/etc/passwd', '..', '1e0'):
            assert client.predict(query=f'sample={number}').status == 400


def test_at_most_24_samples_are_read():
    for number in range(30):
        Image.new('RGB', (8, 8)).save(f'{number:02}.png')
    Path('24.png').write_bytes(b'')  # would give a warning
    assert [sample.name for sample in app.read_samples(Path())][-1] == '23.png'


def test_mistakes_are_answered_with_the_line_of_the_command(client, photos, capsys):
    photo = Image.fromarray(photos[0])
    whole = encoded(photo)
    bad = {
        'text.jpg': b'no image',
        'empty.jpg': b'',
        'bomb.png': huge_png(60000, 60000),
        'cut.png': whole[: len(whole) // 2],
        'float.tif': encoded(photo.convert('F'), 'TIFF'),
        'noise.jpg': encoded(photo, 'JPEG')[:200] + b'\0' * 99,
        'svg.jpg': b'<svg></svg>',
        'wide.png': huge_png(2**31 - 1, 1),
        'thin.png': huge_png(0, 1),
    }
    for name, data in bad.items():
        Path(name).write_bytes(data)
    assert infer_main(['detection.onnx', *bad]) == 1
    lines = dict(
        line.partition('skipped ')[2].split(': ', 1)
        for line in capsys.readouterr().err.splitlines()
        if 'skipped ' in line
    )
    assert lines.keys() == bad.keys()
    for name, data in bad.items():
        answer = client.predict(data)
        said, _, advice = answer.json['error'].partition('; convert it: ')
        assert answer.status == 400 and said == lines[name].partition('; convert it: ')[0]
        assert bool(advice) == (name == 'float.tif')
    for query, line in (
        ('shorter_side=', "shorter_side must be a whole number, got ''"),
        ('shorter_side=null', "shorter_side must be a whole number, got 'null'"),
        ('shorter_side=40.5', "shorter_side must be a whole number, got '40.5'"),
        ('shorter_side=0', 'shorter_side must be from 32 to 1024, got 0'),
        ('shorter_side=100000', 'shorter_side must be from 32 to 1024, got 100000'),
        ('shorter_side=' + '9' * 5000, 'shorter_side must be '),
        ('score_thr=null', "score_thr must be a number, got 'null'"),
        ('score_thr=nan', 'score_thr must be in [0, 1], got nan'),
        ('score_thr=2', 'score_thr must be in [0, 1], got 2.0'),
        ('shorter_side=40&shorter_side=50', 'shorter_side is given twice'),
        ('sise=40', "unknown parameter 'sise'; one of shorter_side, score_thr, sample"),
        ('sample=1', 'no sample 1; there are 1'),
    ):
        answer = client.predict(whole, query)
        assert answer.status == 400 and answer.json['error'].startswith(line)
        assert '\n' not in answer.json['error'] and len(answer.json['error']) < 320
    captured = capsys.readouterr()
    assert not captured.out and not captured.err  # no tracebacks
    assert client.predict(whole).status == 200


def test_an_error_of_the_program_is_shown_in_the_terminal_only(client, monkeypatch, capsys):
    def fail(*_given: object) -> None:
        raise RuntimeError('/home/me/secret')

    monkeypatch.setattr(client.server.page.model, 'predict', fail)
    answer = client.predict(Path('sample.png').read_bytes())
    assert answer.status == 500 and answer.json == {
        'error': 'an error of the program; its terminal shows more'
    }
    assert 'RuntimeError: /home/me/secret' in capsys.readouterr().err


def test_requests_out_of_the_ordinary(client, capsys):
    port, image = client.address[1], Path('sample.png').read_bytes()
    for host, status in (
        ('127.0.0.1', 200),
        (f'localhost:{port}', 200),
        ('[::1]:9', 200),
        ('', 400),
        ('evil.example', 400),
        ('127.0.0.1.evil.example', 400),
        ('[', 400),
        ('0.0.0.0', 400),
    ):
        assert client.ask('GET', '/about', headers={'Host': host}).status == status
    head = client.ask('HEAD', '/')
    assert head.status == 200 and not head.body and int(head.headers['Content-Length']) > 1000
    for method, path, status in (
        ('GET', '/predict', 405),
        ('POST', '/', 405),
        ('PUT', '/', 405),
        ('DELETE', '/samples/0', 405),
        ('OPTIONS', '/predict', 405),
        ('TRACE', '/', 405),
    ):
        answer = client.ask(method, path)
        assert answer.status == status and answer.json['error']
    head = b'POST /predict HTTP/1.1\r\nHost: localhost\r\n'
    last = b'Connection: close\r\n\r\n'
    for request, status in (
        (head + b'Content-Length: -1\r\n\r\n', b' 400 '),
        (head + b'Content-Length: ' + b'9' * 5000 + b'\r\n\r\n', b' 400 '),
        (head + b'Transfer-Encoding: chunked\r\n' + last + b'0\r\n\r\n', b'the file is empty'),
        (b'GET / HTTP/9.9\r\n' + last, b' 400 '),
        (b'GET ' + b'a' * 70000, b' 400 '),
        (b'GET / HTTP/1.1\r\n' + b'a: b\r\n' * 20000, b' 400 '),
        (b'GET / HTTP/1.1\r\n' + last, b' 400 '),
        (b'GET //[ HTTP/1.1\r\nHost: localhost\r\n' + last, b' 404 '),
        (b'GET http://[/ HTTP/1.1\r\nHost: localhost\r\n' + last, b' 404 '),
        (b'\x16\x03\x01\x02\x00\x01\x00\r\n\r\n', b' 400 '),
    ):
        assert status in client.send_raw(request, closes=False), request[:99]
    assert client.send_raw(head + b'Content-Length: 100\r\n\r\nabc') == b''  # it hung up
    # Several requests on one connection.
    connection = http.client.HTTPConnection(*client.address, timeout=30)
    for path, status in (
        ('/predict', 200),
        ('/nothing', 404),
        ('/predict?shorter_side=1', 400),
    ) * 2:
        connection.request('POST', path, image)
        response = connection.getresponse()
        assert response.status == status and response.read()
    connection.close()
    chance = random.Random(0)
    for _ in range(50):
        client.send_raw(chance.randbytes(chance.randrange(200)) + b'\r\n\r\n')
    assert client.predict(image).status == 200
    assert not capsys.readouterr().err


def test_an_upload_has_a_limit(client, monkeypatch):
    monkeypatch.setattr(app, 'UPLOAD_BYTES', 2**20)
    image = Path('sample.png').read_bytes()
    largest = image + bytes(2**20 - len(image))
    assert client.predict(largest).status == 200
    line = b'an image file may have up to 1 MB'
    head = b'POST /predict HTTP/1.1\r\nHost: localhost\r\n'
    # Refused before the body comes, and the connection is closed, so that it need not come.
    declared = client.send_raw(head + b'Content-Length: 1048577\r\n\r\n', closes=False)
    assert b' 413 ' in declared and line in declared
    chunk = b'100001\r\n' + largest + b'0\r\n'
    in_chunks = client.send_raw(head + b'Transfer-Encoding: chunked\r\n\r\n' + chunk, closes=False)
    assert b' 413 ' in in_chunks and line in in_chunks
    assert not list(Path(tempfile.gettempdir()).glob('cpvt_page_*'))


def test_slow_clients_do_not_fill_the_server(client, monkeypatch):
    """One that waits for the next request of a connection is left, and more than the limit at a
    time are refused until some have gone."""
    client.server.config.timeout_keep_alive = 0.2
    first = b'GET /about HTTP/1.1\r\nHost: localhost\r\n\r\n'
    assert b' 200 ' in client.send_raw(first, closes=False)
    with ExitStack() as stack:
        for _ in range(app.REQUESTS):
            idle = stack.enter_context(socket.create_connection(client.address))
            idle.sendall(b'POST /predict HTTP/1.1\r\nHost: local')
        time.sleep(0.2)
        assert client.get('/about').status == 503
    time.sleep(0.2)
    assert client.get('/about').status == 200


def test_pages_of_other_servers_cannot_ask(client):
    port = client.address[1]
    for headers, status in (
        ({}, 200),
        ({'Origin': f'http://127.0.0.1:{port}'}, 200),
        ({'Origin': 'http://127.0.0.1:1'}, 403),
        ({'Origin': 'https://evil.example'}, 403),
        ({'Origin': 'null'}, 403),
        ({'Origin': 'http://[::'}, 403),
        ({'Sec-Fetch-Site': 'same-origin'}, 200),
        ({'Sec-Fetch-Site': 'none'}, 200),
        ({'Sec-Fetch-Site': 'same-site'}, 403),  # another port
        ({'Sec-Fetch-Site': 'cross-site'}, 403),
    ):
        headers = {'Host': f'127.0.0.1:{port}'} | headers
        answer = client.ask('POST', '/predict?sample=0', headers=headers)
        assert answer.status == status, headers
    answer = client.get('/')
    assert "frame-ancestors 'none'" in answer.headers['Content-Security-Policy']
    assert answer.headers['X-Frame-Options'] == 'DENY'


def test_samples_are_read_once(client, photos):
    before = client.predict(query='sample=0').body
    Path('outside').mkdir()
    Image.fromarray(photos[1]).save('outside/secret.png')
    Path('sample.png').unlink()
    Path('sample.png').symlink_to('outside/secret.png')
    assert client.predict(query='sample=0').body == before


def test_names_that_are_not_utf8_are_shown_escaped(model, photos):
    folder = Path(os.fsdecode(b'folder-\xff'))
    folder.mkdir()
    Image.fromarray(photos[0]).save(folder / os.fsdecode(b'a\xff.png'))
    with serving(model('detection'), folder) as client:
        assert client.get('/about').json['samples'] == ['a\\udcff.png']
        assert client.predict(query='sample=0').status == 200


@pytest.mark.parametrize('changes', [{}, {'resize': None}])
def test_large_images_are_reduced_and_boxes_stay_in_their_pixels(changes, model, monkeypatch):
    """Also those in tiles, in which each has the size of a tile."""
    monkeypatch.setattr(exported, 'TILE', 1024)
    Path('nothing').mkdir()
    with serving(model('detection', **changes), Path('nothing')) as client:
        check_large_images(client)


def check_large_images(client):
    answer = client.predict(encoded(Image.new('RGB', (4000, 1500), 'white')))
    picture = Image.open(io.BytesIO(picture_of(answer)))
    assert math.prod(picture.size) <= 1.1 * app.PICTURE_PIXELS < 4000 * 1500  # with a legend
    assert answer.json['detections'][0]['box'] == pytest.approx([0, 0, 4000, 1500], abs=1)
    thin = client.predict(encoded(Image.new('RGB', (20000, 2), 'white')))
    assert max(Image.open(io.BytesIO(picture_of(thin))).size) <= app.PICTURE_SIDE


@pytest.mark.parametrize('name', ['detection', 'labels'])
def test_images_much_larger_than_tiles_are_divided(name, model, monkeypatch):
    """Results are those of the whole image in its own pixels, and the picture is small."""
    monkeypatch.setattr(exported, 'TILE', 64)
    random = np.random.default_rng(0)
    image = Image.fromarray(
        random.integers(0, 250, (70, 100, 3), np.uint8).repeat(4, 0).repeat(4, 1)
    )
    Path('nothing').mkdir()
    with serving(model(name, resize=None), Path('nothing')) as client:
        answer = client.predict(encoded(image))
        whole = client.predict(encoded(image.resize((100, 100))))
        with_side = client.predict(encoded(image), 'shorter_side=100')
        assert client.get('/progress').json == {'done': 0, 'tiles': 0}
    (line,) = answer.json['warnings']
    assert 'are taken in tiles of 64 pixels, because the model does not resize them; a s' in line
    assert whole.json['warnings'] == with_side.json['warnings'] == []
    image.save('a.png')
    with pytest.warns(UserWarning, match='in tiles of 64'):
        expected = Predictor(model(name, resize=None))('a.png')
    if name == 'detection':
        assert answer.json['detections'] == expected.records() != []
    else:
        assert answer.json['summary'] == expected.summary()


def test_photographs_of_telephones(client, photos):
    """HEIC, which browsers send as it is, has the results that `cpvt infer` gives."""
    readable_formats()  # with pillow-heif
    photo = encoded(Image.fromarray(photos[0]), 'HEIF', quality=-1)
    Path('a.heic').write_bytes(photo)
    assert infer_main(['detection.onnx', 'a.heic', '--no-pictures']) == 0
    found = json.loads(Path('predictions/a.detections.json').read_text())['detections']
    assert client.predict(photo).json['detections'] == found != []


def test_how_many_tiles_are_done_is_told(model, monkeypatch):
    monkeypatch.setattr(exported, 'TILE', 64)
    told = []
    predict_tiles = ExportedModel.predict_tiles

    def asking(self, tiles):
        told.append(client.get('/progress').json)
        return predict_tiles(self, tiles)

    monkeypatch.setattr(ExportedModel, 'predict_tiles', asking)
    Path('nothing').mkdir()
    with serving(model('detection', resize=None), Path('nothing')) as client:
        assert client.predict(encoded(Image.new('RGB', (200, 160)))).status == 200
        assert client.get('/progress').json == {'done': 0, 'tiles': 0}
    assert told == [{'done': i, 'tiles': 24} for i in range(24)]  # 6 x 4, which overlap by half


def resident_mb() -> float:
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE') / 1e6


def test_what_requests_cost_is_bounded(monkeypatch):
    """Before there were limits, each of these took 2 to 12 GB and the server kept most of it."""
    thin = encoded(Image.new('RGB', (20000, 1)))
    large = encoded(Image.new('RGB', (2000, 2000)))  # as a whole, it would take 20 seconds
    monkeypatch.setattr(automatic_tiles, 'MUCH_LARGER', 1)
    monkeypatch.setattr(app, 'takes_in_tiles', lambda model, size: False)
    small = encoded(Image.new('RGB', (320, 240)))
    refused = [
        (
            large,
            '',
            'this page takes up to 1.0 megapixels; a shorter side of the input of 1024 fits',
        ),
        (huge_png(9000, 9000), '', 'up to 67 megapixels, got 9000 x 9000'),
        # By its header: decoded, it would not be a complete image.
        (
            huge_png(8190, 8190),
            '',
            'this page takes up to 1.0 megapixels; a shorter side of the input of 1024 fits',
        ),
        (huge_png(8190, 8190), 'shorter_side=2000', 'shorter_side must be from'),
    ]
    Path('nothing').mkdir()
    with serving(ROOT / 'examples/trees.onnx', Path('nothing')) as client:
        assert client.predict(small).status == 200
        before = resident_mb()
        for number in range(48):
            data, query, line = refused[number % len(refused)]
            answer = client.predict(data, query)
            assert answer.status == 400 and line in answer.json['error']
        # Their shorter side would be 100 pixels, and the longer one 2 million.
        assert client.predict(thin, 'shorter_side=100').status == 200
        assert client.predict(large, 'shorter_side=512').status == 200
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(client.predict, [small] * 20))
        assert {answer.status for answer in answers} == {200}
        assert resident_mb() - before < 300


def test_requests_whose_client_has_gone_are_skipped(client, monkeypatch):
    predict = ExportedModel.predict
    calls = []

    def slowly(model: ExportedModel, *given: Any) -> list:
        calls.append(given)
        time.sleep(0.3)
        return predict(model, *given)

    monkeypatch.setattr(ExportedModel, 'predict', slowly)
    request = b'POST /predict?sample=0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n'
    for _ in range(30):
        with socket.create_connection(client.address) as connection:
            connection.sendall(request)
            time.sleep(0.01)
    assert client.predict(query='sample=0').status == 200
    assert len(calls) <= 3  # the first, and one that came while it ran


def test_names_of_other_machines_are_answered_with_host(model):
    with serving(model('detection'), host='0.0.0.0') as client:
        assert client.ask('GET', '/about', headers={'Host': 'gpu-server:7860'}).status == 200


def test_ipv6(model):
    try:
        socket.create_server(('::1', 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip('this machine has no IPv6')
    with serving(model('detection'), host='::1') as client:
        assert client.get('/about').status == 200
        assert client.server.url == f'http://[::1]:{client.address[1]}'


def test_requests_at_the_same_time(client, photos, monkeypatch):
    images = [encoded(Image.fromarray(photo)) for photo in photos]
    for number, data in enumerate(images):
        Path(f'{number}.png').write_bytes(data)
    expected = [
        Predictor('detection.onnx', shorter_side=size, score_thr=0.05)(f'{number}.png').records()
        for number in range(4)
        for size in (32, 50, 64)
    ]
    assert len({json.dumps(each) for each in expected}) > 3

    # One after the other, because each may take all cores, and warnings belong to the process.
    running = threading.Lock()
    predict = ExportedModel.predict

    def predict_alone(model: ExportedModel, *given: Any) -> list:
        assert running.acquire(blocking=False)
        time.sleep(0.02)
        running.release()
        return predict(model, *given)

    monkeypatch.setattr(ExportedModel, 'predict', predict_alone)

    def ask(index: int) -> Answer:
        size = (32, 50, 64)[index % 3]
        return client.predict(images[index // 3], f'shorter_side={size}&score_thr=0.05')

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    assert [answer.json['detections'] for answer in answers] == expected


@pytest.mark.parametrize(
    ('number', 'status', 'end'),
    [(signal.SIGINT, 130, 'interrupted'), (signal.SIGTERM, 143, 'terminated')],
)
def test_serving_until_a_signal(number, status, end, model, monkeypatch, capsys):
    startup = app.Server.startup

    async def start_and_stop(server: app.Server, *given: Any, **options: Any) -> None:
        await startup(server, *given, **options)
        signal.raise_signal(number)

    monkeypatch.setattr(app.Server, 'startup', start_and_stop)
    assert main([str(model('detection')), '--port', '0']) == status
    captured = capsys.readouterr()
    assert captured.out.startswith('http://127.0.0.1:') and ':0,' not in captured.out
    assert captured.out.endswith(f'no images in {Path.cwd()}; stop it with Ctrl-C\n')
    (line,) = captured.err.splitlines()
    assert line.endswith(f'{end}; the page is closed')


def test_without_its_packages_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'uvicorn', None)
    for name in ('server', 'start'):
        monkeypatch.delitem(sys.modules, f'cpvt_pyramid.app.page.{name}')
    with pytest.raises(SystemExit) as stopped:
        main(['model.onnx'])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert line.startswith('cpvt app: ') and line.endswith("; pip install '.[app]'")


def test_mistakes_on_the_command_line(model, capsys):
    path = str(model('detection'))
    Path('a.pth').touch()
    with socket.create_server(('127.0.0.1', 0)) as other:
        port = str(other.getsockname()[1])
        for arguments, complaint in (
            (['no.onnx'], 'no model at no.onnx'),
            (['a.pth'], 'a.pth must be an exported model (.onnx, .xml), or the name of a'),
            ([path, '--samples', 'nowhere'], 'a folder of images, got nowhere: there is none'),
            ([path, '--port', port], f'cannot listen on 127.0.0.1:{port}: '),
            ([path, '--port', '99999'], 'cannot listen on 127.0.0.1:99999: '),
            ([path, '--host', '203.0.113.1'], 'cannot listen on 203.0.113.1:7860: '),
        ):
            assert main(arguments) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert complaint in line
            assert ('--port 0' in line) == (port in arguments)
    with pytest.raises(SystemExit, match='2'):  # it would be all addresses
        main([path, '--host', ''])
    assert 'argument --host: it is empty' in capsys.readouterr().err


def test_an_image_that_reaches_the_limit_of_the_model(model, photos):
    page = app.Page(ExportedModel(model('full')))
    line = "this image reached the model's limit of 2 boxes, so that objects may be missing"
    assert [page.predict(photo)['warnings'] for photo in photos[1:3]] == [[], [line]]


def test_samples_are_in_the_folder_with_the_name_of_the_model(model, photos, monkeypatch, capsys):
    monkeypatch.setattr(app.Server, 'run', lambda server, sockets: sockets[0].close())
    path = model('detection').absolute()
    assert samples_of(path) == path.parent
    folder = path.with_suffix('')
    folder.mkdir()
    assert samples_of(path) == folder
    Image.fromarray(photos[0]).save(folder / 'sample.png')
    main([str(path), '--port', '0'])
    assert f', with 1 sample of {folder}; stop' in capsys.readouterr().out
    Path(folder, 'sample.png').unlink()
    monkeypatch.chdir(folder)
    main([str(path), '--port', '0', '--samples', '.'])
    said = f', without samples, as there are no images in {folder.resolve()}; stop it with Ctrl-C'
    assert said in capsys.readouterr().out
