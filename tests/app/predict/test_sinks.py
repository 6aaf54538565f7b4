"""A new command: options, a sink, and a call of the loop."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import ROOT, film

from cpvt_pyramid.app.predict import Predictor
from cpvt_pyramid.app.predict.options import RunOptions
from cpvt_pyramid.app.predict.running import run_on_files
from cpvt_pyramid.app.predict.sinks import Sink
from cpvt_pyramid.app.tooling.command import run_command

TREES = ROOT / 'examples/trees.onnx'


class Found(Sink):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.found: dict = {}
        self.done: Sequence = ()

    def write(self, entry, found) -> None:
        self.found[entry] = found

    def finish(self, done) -> None:
        self.done = done


sinks: list[Found] = []


def count(model: str, inputs: Sequence[str], *, options: RunOptions) -> int:
    sinks.append(Found())
    return run_on_files('cpvt count', model, inputs, options, sinks[-1])


@pytest.fixture
def photos() -> dict[str, Path]:
    """Two of one name, and a third one whose name differs in its case alone."""
    photo = Image.open(ROOT / 'examples/trees/florida.jpg')
    paths = {}
    for corner, name in enumerate(('x/a.png', 'y/a.png', 'A.png')):
        Path(name).parent.mkdir(exist_ok=True)
        photo.crop((64 * corner, 0, 64 * corner + 128, 128)).save(name)
        paths[name] = Path(name)
    return paths


@pytest.mark.parametrize('options', ['', '--workers 2', '--batch-size 2', '--tile 96'])
def test_each_image_comes_once_under_its_own_name(options, photos, capsys):
    Path('torn.png').write_bytes(photos['A.png'].read_bytes()[:-30])
    words = [str(TREES), *photos, 'torn.png', '--score-thr', '0.1', *options.split()]
    assert run_command(count, words) == 1
    sink = sinks[-1]
    assert sink.done == [
        (photos['x/a.png'], 'a'),
        (photos['y/a.png'], 'a-2'),
        (photos['A.png'], 'A-3'),
    ]
    assert {*sink.found} == {*sink.done}
    assert 'cpvt count: skipped torn.png: not a complete image' in capsys.readouterr().err
    tile = 96 if 'tile' in options else None
    predictor = Predictor(TREES, score_thr=0.1, tile=tile)
    for (path, _), found in sink.found.items():
        assert len(found) > 1
        np.testing.assert_allclose(found.boxes, predictor(path).boxes, rtol=1e-3, atol=1e-2)
        assert np.array_equal(found.image, np.asarray(Image.open(path)))


def test_a_sink_without_videos_refuses_them(capsys):
    film('a.mp4', [np.zeros((48, 64, 3), np.uint8)])
    assert run_command(count, [str(TREES), 'a.mp4']) == 2
    assert capsys.readouterr().err.endswith(
        ': images are wanted, but a.mp4 is a video; leave it out\n'
    )


@pytest.mark.filterwarnings('ignore:. left out')
def test_a_folder_keeps_its_names(photos):
    """Its videos are left out."""
    film('x/film.mp4', [np.zeros((48, 64, 3), np.uint8)])
    assert run_command(count, [str(TREES), '.']) == 0
    assert sorted(name for _, name in sinks[-1].done) == ['A', 'x/a', 'y/a']


@pytest.mark.parametrize('error', [MemoryError(), OSError(28, 'No space left on device')])
def test_errors_of_a_sink(error, photos, monkeypatch, capsys):
    """Too little memory is of an image; other errors end the command in a line."""

    def fail(self: Sink, *given: object) -> None:
        raise error

    monkeypatch.setattr(Found, 'write', fail)
    status = run_command(count, [str(TREES), *photos, '--workers', '2'])
    said = capsys.readouterr().err.splitlines()
    if isinstance(error, MemoryError):
        assert status == 1 and sinks[-1].done == [] and len(said) == 3
        assert all('its results do not fit into memory' in line for line in said)
    else:
        assert status == 2 and 'no space left on the disk' in said[-1]
