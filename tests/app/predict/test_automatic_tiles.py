"""Images much larger than what a model has seen are taken in tiles, by every command alike."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import CLASSES, SCENES, SIZE, coco, fill, label_map, write
from PIL import Image
from support import ROOT, film, load_tool
from tifffile import imread

from cpvt_pyramid.app.predict import Predictor, automatic_tiles, exported, infer
from cpvt_pyramid.app.predict.exported import ExportedModel
from cpvt_pyramid.app.predict.protocol import Model
from cpvt_pyramid.app.predict.sessions import OnnxRuntime
from cpvt_pyramid.app.predict.tiles import overlap_for

command = load_tool('infer')
evaluate = load_tool('test')
LINE = (
    'images of more than 0.1 megapixels are taken in tiles of 128 pixels, because the model does '
    'not resize them; --tile 0 takes them as a whole'
)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(exported, 'TILE', 128)


@pytest.fixture
def seen(monkeypatch) -> list[tuple[int, int]]:
    """Heights and widths of all that a session runs on."""
    sizes: list[tuple[int, int]] = []
    run = OnnxRuntime.run

    def recording(session: Any, inputs: Any) -> Any:
        sizes.append(inputs['images'].shape[2:])
        return run(session, inputs)

    monkeypatch.setattr(OnnxRuntime, 'run', recording)
    return sizes


def save_image(name: str, height: int, width: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    cells = random.integers(0, 250, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    Image.fromarray(cells.repeat(8, 0).repeat(8, 1)[:height, :width]).save(name)


def detections(folder: str, name: str) -> Any:
    return json.loads(Path(folder, f'{name}.detections.json').read_text())['detections']


def test_a_model_that_divides_images_has_all_of_a_model(model):
    opened = ExportedModel(model('detection', resize=None))
    divides = automatic_tiles.with_tiles(opened, 128)
    names = {*Model.__annotations__, *(name for name in vars(Model) if name[0] != '_')}
    assert {'bands', 'own_tile', 'predict_tiles'} < names
    for name in names - {'prepare', 'predict'}:
        assert getattr(divides, name) == getattr(opened, name), name


def test_a_large_image_has_the_results_of_tiles(model, seen, capsys):
    """The line comes once, and images up to four times a tile are taken as a whole."""
    for name, size in (('a', (300, 413)), ('b', (256, 256)), ('c', (301, 280))):
        save_image(f'{name}.png', *size)
    path = str(model('detection', resize=None))
    images = ['a.png', 'b.png', 'c.png']
    assert command.main([path, *images]) == 0
    assert capsys.readouterr().err.splitlines() == [f'cpvt infer: {LINE}']
    assert max(seen) == (256, 256) and seen.count((256, 256)) == 1
    assert command.main([path, *images, '--tile', '128', '--out-dir', 'tiles']) == 0
    assert command.main([path, *images, '--tile', '0', '--out-dir', 'whole']) == 0
    assert capsys.readouterr().err == '' and max(seen) == (301, 280)
    for name in 'ac':
        assert detections('predictions', name) == detections('tiles', name)
    assert detections('predictions', 'b') == detections('whole', 'b')
    assert detections('predictions', 'a') != detections('whole', 'a')
    width, height = Image.open('predictions/a.overlay.jpg').size
    assert width >= 413 and height >= 300  # with a legend


@pytest.mark.parametrize('name', ['labels', 'probabilities'])
def test_a_label_map_is_a_png_as_always(name, model):
    save_image('a.png', 300, 413)
    path = str(model(name, resize=None))
    assert command.main([path, 'a.png']) == 0
    assert command.main([path, 'a.png', '--tile', '128', '--out-dir', 'tiles']) == 0
    labels = np.asarray(Image.open('predictions/a.labels.png'))
    np.testing.assert_array_equal(labels, imread('tiles/a.labels.tif'))


@pytest.mark.parametrize(
    'name, changes', [('detection', {}), ('box', {'resize': None}), ('image', {'resize': None})]
)
def test_no_tiles_where_results_would_differ_or_be_lost(name, changes, model, seen, capsys):
    save_image('a.png', 300, 413)
    assert command.main([str(model(name, **changes)), 'a.png']) == 0
    assert len(seen) == 1 and 'tiles' not in capsys.readouterr().err
    assert json.loads(Path('predictions/run.json').read_text())['tile'] == 0


def test_a_file_of_a_fixed_size_takes_tiles_of_it(model, seen):
    save_image('a.png', 300, 413)
    assert ExportedModel(model('fixed', resize=None)).own_tile == 64
    assert command.main([str(model('fixed', resize=None)), 'a.png']) == 0
    assert len(seen) > 20 and {*seen} == {(64, 96)}


def test_a_shorter_side_turns_tiles_off(model, seen):
    save_image('a.png', 300, 413)
    arguments = [str(model('detection', resize=None)), 'a.png', '--shorter-side', '64']
    assert command.main(arguments) == 0
    assert len(seen) == 1 and seen[0][0] == 64


def test_the_record_has_the_tiles_that_were_used(model, capsys):
    save_image('a.png', 300, 413)
    arguments = [str(model('detection', resize=None)), 'a.png']
    records = []
    for more in ((), ('--tile', '128'), ('--tile', '0')):
        assert command.main([*arguments, *more, '--overwrite']) == 0
        records.append(json.loads(Path('predictions/run.json').read_text()))
    found = [(each['tile'], each['overlap'], each['tiled_above']) for each in records]
    assert found == [(128, 32, 4 * 128**2), (128, 32, 0), (0, 0, None)]
    capsys.readouterr()
    assert command.main(arguments) == 2
    assert 'tiles of images above None pixels, now 65536' in capsys.readouterr().err


def test_frames_of_a_video_are_images(model, seen):
    frames = [np.full((300, 416, 3), 99, np.uint8)] * 2
    film('a.mp4', frames)
    assert command.main([str(model('detection', resize=None)), 'a.mp4']) == 0
    assert max(seen) == (128, 128)


def test_a_tile_that_reaches_the_limit_is_told(model, capsys):
    save_image('a.png', 300, 413)
    assert command.main([str(model('full', resize=None)), 'a.png', '--score-thr', '0.1']) == 0
    said = capsys.readouterr().out
    assert "1 image reached the model's limit of 2 boxes" in said and '--tile 64' in said


def test_a_tile_that_does_not_fit_into_memory_is_told(model, monkeypatch, capsys):
    save_image('a.png', 300, 413)

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(OnnxRuntime, 'run', fails)
    assert command.main([str(model('detection', resize=None)), 'a.png']) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert 'skipped a.png: tiles of 128 pixels do not fit into memory' in line
    assert line.endswith('use smaller tiles')


def test_of_ray_the_line_is_printed_by_the_command(model, monkeypatch, capsys):
    """Warnings of its workers are in files."""
    save_image('a.png', 300, 413)
    monkeypatch.setattr(infer, 'predict_on_ray', lambda *_, **__: None)
    assert command.main([str(model('detection', resize=None)), 'a.png', '--ray', 'local']) == 0
    assert f'{LINE}\n' in capsys.readouterr().out


def test_a_predictor_takes_tiles(model, seen):
    save_image('a.png', 300, 413)
    path = model('detection', resize=None)
    predictor = Predictor(path)
    with pytest.warns(UserWarning, match='128 pixels, .* tile=0 takes them as a whole'):
        found = predictor('a.png')
    assert max(seen) == (128, 128)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        predictor('a.png')  # told once
        whole = Predictor(path, tile=0)('a.png')
        tiles = Predictor(path, tile=128)('a.png')
        opened = pickle.loads(pickle.dumps(Predictor(path, tile=0)))
        assert opened('a.png') == whole
    assert found == tiles and len(found) > len(whole)


def trees_data(side: int) -> None:
    """A data set of one photograph, four times as many pixels as a tile and more."""
    Path('data/images').mkdir(parents=True)
    photograph = Image.open(ROOT / 'examples/trees/florida.jpg').resize((side, side))
    photograph.save('data/images/a.png')
    boxes = [[20 * i, 20 * i, 15, 15] for i in range(10)]
    content = {
        'images': [{'id': 1, 'file_name': 'images/a.png', 'width': side, 'height': side}],
        'categories': [{'id': 1, 'name': 'tree'}],
        'annotations': [
            {'id': i, 'image_id': 1, 'category_id': 1, 'bbox': box, 'area': 225, 'iscrowd': 0}
            for i, box in enumerate(boxes, 1)
        ],
    }
    Path('data/train.json').write_text(json.dumps(content))


def test_cpvt_test_takes_the_tiles_of_cpvt_infer(seen, capsys):
    trees_data(320)
    trees = str(ROOT / 'examples/trees.onnx')
    metrics = {}
    for more in ((), ('--tile', '128'), ('--tile', '128', '--overlap', '64'), ('--tile', '0')):
        seen.clear()
        assert evaluate.main([trees, 'data', *more]) == 0
        said = capsys.readouterr()
        metrics[more] = said.out
        assert (LINE in said.err) == (not more)
        assert max(seen) == ((320, 320) if '0' in more else (128, 128))
    assert metrics[()] == metrics['--tile', '128'] != metrics['--tile', '0']


@pytest.mark.parametrize('kind', ['detector', 'segmentor'])
def test_cpvt_test_takes_tiles_for_a_config(kind, untrained, capsys, monkeypatch):
    """Those that the user asks for: the test pipeline resizes images."""
    Path('data').mkdir()
    if kind == 'detector':
        fill(Path('data'), SCENES, 'images/{}.png')
        coco(Path('data/train.json'), SCENES)
    else:
        fill(Path('data'), SCENES, 'images/{}.png', label_map, 'masks/{}.png')
        names = dict(enumerate(('ground', *CLASSES)))
        settings = f'format: masks\ntrain: images\nannotations: masks\nnames: {names}\n'
        write(Path('data/data.yaml'), settings)
    divided: list[tuple[int, int]] = []
    divide = automatic_tiles.TilingModel.predict_divided

    def recording(model: Any, image: Any) -> Any:
        divided.append(image.image.shape[:2])
        return divide(model, image)

    monkeypatch.setattr(automatic_tiles.TilingModel, 'predict_divided', recording)
    assert evaluate.main([*untrained[kind], 'data', '--tile', '64']) == 0
    assert divided == [SIZE] * len(SCENES)


def test_mistakes(capsys):
    trees_data(64)
    trees = str(ROOT / 'examples/trees.onnx')
    for words, line in (
        (['--tile', '100'], '--tile must be a multiple of 32, got 100'),
        (['--tile', '-1'], '--tile must be at least 0'),
        (['--tile', '64', '--overlap', '16'], '--overlap must be a multiple of 32, got 16'),
        (['--tile', '64', '--overlap', '64'], '--overlap must be less than --tile 64, got 64'),
        (['--overlap', '32'], '--overlap needs --tile'),
        (['--overlap', '32', '--tile', '0'], '--overlap needs --tile'),
    ):
        assert evaluate.main([trees, 'data', *words]) == 2
        assert line in capsys.readouterr().err
        assert command.main([trees, 'data/images', *words]) == 2
        assert line in capsys.readouterr().err


def test_the_overlap_is_a_quarter():
    sides = 32, 64, 96, 128, 160, 1024
    assert [overlap_for(side) for side in sides] == [0, 32, 32, 32, 32, 256]
