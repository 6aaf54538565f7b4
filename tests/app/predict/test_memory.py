"""Images that do not fit into memory, in whatever step: they are skipped, with one line that says
what to do, and the others are not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import film, save_tiff

from benchmarks import process_memory
from cpvt_pyramid.app.commands.infer import main
from cpvt_pyramid.app.images import reading
from cpvt_pyramid.app.predict import automatic_tiles, exported, running, sessions
from cpvt_pyramid.app.predict.protocol import Prepared, predict_all
from cpvt_pyramid.app.predict.sessions import OnnxRuntime, OpenVino
from cpvt_pyramid.app.predictions.kinds import Detections
from cpvt_pyramid.app.tooling.command import ROOT

WIDE = 211  # pixels: only the image that does not fit


@pytest.fixture
def images(photos) -> list[str]:
    """The second of three is as wide as `WIDE`."""
    for name, photo in zip('abc', [photos[0], photos[3], photos[0]]):
        assert (photo.shape[1] == WIDE) == (name == 'b')
        Image.fromarray(photo).save(f'{name}.png')
    return ['a.png', 'b.png', 'c.png']


def fails_if(is_large: Callable[..., bool], function: Callable, error: Exception) -> Callable:
    def call(*arguments, **options):
        if is_large(*arguments):
            raise error
        return function(*arguments, **options)

    return call


def infer_all_but_one(arguments: list[str], path: str, capsys) -> str:
    """Run `cpvt infer` on three inputs; returns the line for the only one that is skipped."""
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert '2 of 3 done' in said.out
    skipped = [line for line in said.err.splitlines() if 'skipped' in line]
    assert len(skipped) == 1 and f'skipped {path}: ' in skipped[0]
    return skipped[0]


@pytest.mark.parametrize('workers', ['0', '2'])
def test_reading(workers, model, images, monkeypatch, capsys):
    is_large = lambda path, header: 'b.png' in str(path)  # noqa: E731
    monkeypatch.setattr(reading, 'decode', fails_if(is_large, reading.decode, MemoryError()))
    line = infer_all_but_one(
        [str(model('detection')), *images, '--workers', workers], 'b.png', capsys
    )
    assert '211 x 37 pixels do not fit into memory (' in line
    assert line.endswith('GB are free); reduce the image')


def test_reading_by_gdal(monkeypatch):
    save_tiff(Path('a.tif'), np.zeros((40, 50, 3), np.uint16))
    monkeypatch.setattr(reading, 'read_bands', fails_if(lambda *_: True, None, MemoryError()))
    with pytest.raises(OSError, match='do not fit into memory'):
        reading.read_image('a.tif', [1, 2])


@pytest.mark.parametrize('workers', ['0', '2'])
def test_drawing(workers, model, images, monkeypatch, capsys):
    is_large = lambda found: found.image.shape[1] == WIDE  # noqa: E731
    monkeypatch.setattr(Detections, 'draw', fails_if(is_large, Detections.draw, MemoryError()))
    line = infer_all_but_one(
        [str(model('detection')), *images, '--workers', workers], 'b.png', capsys
    )
    assert 'its results do not fit into memory; add --workers 0, or divide' in line
    assert not Path('predictions/b.detections.json').exists()


@pytest.mark.parametrize(
    'error', [MemoryError(), RuntimeError('Failed to allocate memory'), RuntimeError('bad_alloc')]
)
def test_tiles(error, model, images, monkeypatch, capsys):
    is_large = lambda session, inputs: inputs['images'].shape[2] < 64  # noqa: E731
    monkeypatch.setattr(OnnxRuntime, 'run', fails_if(is_large, OnnxRuntime.run, error))
    line = infer_all_but_one([str(model('detection')), *images, '--tile', '128'], 'b.png', capsys)
    assert 'tiles of 128 pixels do not fit into memory (' in line
    assert line.endswith('GB are free); use smaller tiles')


@pytest.mark.parametrize(
    'error, text',
    [
        (RuntimeError('Failed to allocate memory'), 'does not fit into memory'),
        (RuntimeError('no kernel'), 'failed on images of'),
        (MemoryError(), 'does not fit into memory'),
    ],
)
def test_videos(error, text, model, photos, monkeypatch, capsys):
    for name, photo in zip('abc', [photos[0], photos[3], photos[0]]):
        film(f'{name}.mp4', [photo[: photo.shape[0] & ~1, : photo.shape[1] & ~1]] * 3)
    is_large = lambda session, inputs: inputs['images'].shape[3] > 132  # noqa: E731
    monkeypatch.setattr(OnnxRuntime, 'run', fails_if(is_large, OnnxRuntime.run, error))
    arguments = [str(model('detection', resize=None)), 'a.mp4', 'b.mp4', 'c.mp4']
    assert text in infer_all_but_one(arguments, 'b.mp4', capsys)
    assert not list(Path('predictions').glob('b.*'))


def test_few_photographs_wait_for_their_batch():
    """Else the first one, of a size of its own, would let all others wait."""
    held: list[int] = []
    most = 0

    def images():
        nonlocal most
        for number in range(40):
            held.append(number)
            most = max(most, len(held))
            size = 1, 1
            pixels = np.broadcast_to(np.uint8(0), (3000, 4000, 3))
            yield Prepared(pixels, number, size if number else None)

    def predict(batch):
        return [image.data for image in batch]

    for number, found in enumerate(predict_all(predict, images(), 4, threads=1)):
        assert found == number
        held.remove(found)
    assert most <= 7


def test_openvino_returns_nothing_if_memory_is_too_small(model, images, monkeypatch, capsys):
    """It raises no error then."""
    run = OpenVino.run

    def empty_if_large(session, inputs):
        found = run(session, inputs)
        if inputs['images'].shape[3] >= WIDE:
            found = {name: x[:0] for name, x in found.items()}
        return found

    monkeypatch.setattr(OpenVino, 'run', empty_if_large)
    monkeypatch.setattr(running, 'TILE', 64)
    monkeypatch.setattr(exported, 'TILE', 64)
    monkeypatch.setattr(automatic_tiles, 'overlap_for', lambda tile: 0 if tile == 32 else 32)
    arguments = [*images, '--backend', 'openvino', '--overwrite']
    line = infer_all_but_one([str(model('box', resize=None)), *arguments], 'b.png', capsys)
    assert 'an input of 211 x 37 pixels does not fit into memory (' in line
    assert main([str(model('detection', resize=None)), *arguments]) == 0  # in tiles
    said = capsys.readouterr()
    assert '211 x 37 pixels do not fit into memory as a whole; they are taken in' in said.err


@pytest.mark.parametrize('tile, advice', [(64, ', or divide the image with --tile 64'), (128, '')])
@pytest.mark.parametrize('resize', [None, {'short': 37, 'long': 211}])
def test_tiles_are_advised_if_they_are_smaller(
    tile, advice, resize, model, images, monkeypatch, capsys
):
    """They are not resized, so that one of 1024 pixels needs more than an input of 512 x 683."""
    is_large = lambda session, inputs: inputs['images'].shape[3] >= WIDE  # noqa: E731
    monkeypatch.setattr(OnnxRuntime, 'run', fails_if(is_large, OnnxRuntime.run, MemoryError()))
    monkeypatch.setattr(running, 'TILE', tile)
    monkeypatch.setattr(exported, 'TILE', tile)
    monkeypatch.setattr(automatic_tiles, 'overlap_for', lambda tile: 0 if tile == 32 else 32)
    arguments = [str(model('detection', resize=resize)), *images, '--workers', '0']
    if advice and not resize:  # it takes them by itself
        assert main(arguments) == 0
    else:
        line = infer_all_but_one(arguments, 'b.png', capsys)
        assert line.endswith(f'reduce the input with --shorter-side{advice}')


@pytest.mark.parametrize(
    'error', [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_a_model_that_does_not_fit(error, model, images, monkeypatch, capsys):
    monkeypatch.setattr(sessions, 'OnnxRuntime', fails_if(lambda *_: True, None, error))
    assert main([str(model('detection')), *images]) == 2
    line = capsys.readouterr().err
    assert line.startswith('cpvt infer: too little memory (') and 'traceback' not in line


def test_images_of_many_sizes_leave_no_memory_behind():
    """By default, onnxruntime keeps memory for each size of images that it has seen."""
    session = OnnxRuntime(ROOT / 'examples/trees.onnx')
    resident = []
    for number in range(40):
        height, width = 400 - 5 * number, 200 + 4 * number
        size = np.array([[height, width]])
        images = np.zeros((1, 3, height, width), np.float32)
        session.run({'images': images, 'valid': size})
        resident.append(process_memory.resident())
    assert resident[-1] - resident[9] < 30 * 2**20


def test_openvino_keeps_few_operators(monkeypatch):
    """Each is for one size; by default they take over 1 GB after some hundred sizes of images."""
    core = sessions.openvino_core()
    given = []

    class Recorder:
        available_devices = core.available_devices

        def compile_model(self, model, device, settings):
            given.append(settings)
            return core.compile_model(model, device, settings)  # which refuses unknown settings

    monkeypatch.setattr(sessions, 'openvino_core', Recorder)
    OpenVino(ROOT / 'examples/trees.onnx')
    assert given[0]['CPU_RUNTIME_CACHE_CAPACITY'] == sessions.CACHED_OPERATORS == 500
