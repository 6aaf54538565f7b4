"""Predictions as sequences, tables, text and pictures."""

import io
import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from support import ROOT

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.predict.options import InferOptions
from cpvt_pyramid.app.predict.results import Results
from cpvt_pyramid.app.predictions import kinds as predictions
from cpvt_pyramid.app.predictions.kinds import Detections, LabelMap
from cpvt_pyramid.app.predictions.records import mask_of, run_lengths
from cpvt_pyramid.app.tooling.command import UserError

CLASSES, PALETTE = ('cat', 'dog'), [(255, 0, 0), (0, 255, 0)]
IMAGE = np.full((20, 40, 3), 99, np.uint8)
BOXES = np.array([[0, 0, 10, 10], [5, 5, 9, 9], [20, 0, 40, 20]], np.float32)
MASKS = np.arange(3 * 800).reshape(3, 20, 40) % 3 == 0
LABELS = np.repeat([1, 0], [600, 200]).reshape(20, 40)


def detections(count: int = 3, masks: bool = False) -> Detections:
    scores, labels = np.array([0.9, 0.5, 0.25], np.float32), np.array([1, 0, 7])
    given = MASKS[:count] if masks else None
    return Detections(IMAGE, CLASSES, PALETTE, BOXES[:count], scores[:count], labels[:count], given)


ALL = [
    (detections(), 'Detections(3: dog 0.90, cat 0.50, 7 0.25)'),
    (detections(0), 'Detections(0)'),
    (detections(masks=True), 'Detections(3: dog 0.90, cat 0.50, 7 0.25)'),
    (LabelMap(IMAGE, CLASSES, PALETTE, LABELS), 'LabelMap(2: dog 75.0%, cat 25.0%)'),
]


@pytest.mark.parametrize('found, text', ALL)
def test_text_and_sequence(found, text):
    assert repr(found) == text
    assert list(found) == found.items() == [found[i] for i in range(len(found))]
    with pytest.raises(IndexError):
        found[len(found)]


@pytest.mark.parametrize('found, _', ALL)
def test_records_are_json_with_an_entry_for_each_item(found, _):
    records = json.loads(json.dumps(found.records()))
    assert [record['class'] for record in records] == [item['class'] for item in found]


def test_many_objects_are_counted():
    many = replace(detections(), labels=np.array([0, 1, 1]))
    assert many.summary(3) == 'cat 0.90, dog 0.50, dog 0.25'
    assert many.summary(2) == '2 dog, 1 cat'
    assert many.summary(1) == '2 dog, ...'
    mask = LabelMap(IMAGE, CLASSES, PALETTE, LABELS)
    assert mask.summary(1) == 'dog 75.0%, ...'


def test_parts_of_detections():
    for found in (detections(), detections(masks=True)):
        for index in (slice(1, 3), [2, 0], np.array([True, False, True])):
            part = found[index]
            assert part.image is found.image
            assert list(part) == [found[i] for i in np.arange(3)[index]]
        assert list(found.above(0.5)) == list(found[:2])
        assert found[-1] == found[np.int64(2)] == found.items()[2]


ROWS, COLUMNS = np.indices((40, 50))
# As earlier versions wrote them, with a codec of their own.
RUN_LENGTHS = [
    (np.zeros((2, 3), bool), '6'),
    (np.ones((2, 3), bool), '06'),
    (np.arange(9)[None] % 4 < 2, '02200O'),
    ((ROWS - 20) ** 2 + (COLUMNS - 30) ** 2 < 81, 'Pl09n02N2N2N2O0000000000000001N2N2N2NY='),
]


@pytest.mark.parametrize('mask, counts', RUN_LENGTHS)
def test_masks_are_run_lengths(mask, counts):
    encoded = run_lengths(mask)
    assert json.loads(json.dumps(encoded)) == {'size': list(mask.shape), 'counts': counts}
    np.testing.assert_array_equal(mask_of(encoded), mask)


@pytest.mark.parametrize('shape', [(1, 1), (3, 3), (1, 500), (500, 1), (700, 900)])
@pytest.mark.parametrize('share', [0, 0.001, 0.5, 1])
def test_run_lengths_keep_the_mask(shape, share):
    mask = np.random.default_rng(0).random(shape) < share
    for given in (mask, np.asfortranarray(mask), mask.repeat(2, 0)[::2]):
        np.testing.assert_array_equal(mask_of(run_lengths(given)), mask)


def test_records_have_rounded_numbers():
    (record,) = replace(detections(1), boxes=BOXES[1:2] + 0.001).records()
    assert record == {'box': [5.0, 5.0, 9.0, 9.0], 'label': 1, 'class': 'dog', 'score': 0.9}


def test_coco_leaves_out_labels_without_a_class():
    for found, ids in ((detections(), [2, 1]), (replace(ALL[3][0], labels=LABELS * 255), [1])):
        assert [result['category_id'] for result in found.to_coco()] == ids


def test_tables(monkeypatch):
    areas = [100, 16, 400], [], MASKS.sum((1, 2)), [200, 600], [600]
    for (found, _), area in zip(ALL, areas):
        table = found.to_pandas()
        assert table['class'].tolist() == [item['class'] for item in found]
        np.testing.assert_array_equal(table['area'], area)
        if isinstance(found, Detections):
            np.testing.assert_array_equal(table[['x1', 'y1', 'x2', 'y2']], found.boxes)
            np.testing.assert_array_equal(table['score'], found.scores)
    monkeypatch.setitem(sys.modules, 'pandas', None)
    with pytest.raises(UserError, match='pip install pandas'):
        found.to_pandas()


def test_pictures_in_notebooks():
    for found, _ in ALL:
        picture = Image.open(io.BytesIO(found._repr_png_()))
        np.testing.assert_array_equal(np.array(picture), np.array(found.draw()))
    wide = LabelMap(np.zeros((10, 4000, 3), np.uint8), CLASSES, PALETTE, np.zeros((10, 4000), int))
    assert Image.open(io.BytesIO(wide._repr_png_())).width == 1600


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize('form', [None, 'coco', 'geojson'])
def test_each_mask_is_encoded_once(form):
    Path('out').mkdir()
    with mock.patch.object(predictions, 'run_lengths', wraps=run_lengths) as encoded:
        results = Results(InferOptions(out_dir='out', format=form), 'detections', CLASSES)
        results.write((Path('a.png'), 'a'), detections(masks=True))
    assert encoded.call_count == len(MASKS)


@pytest.mark.parametrize('found', [found for found, _ in ALL])
def test_overlays_can_be_left_out(found):
    for folder, no_pictures in (('all', False), ('some', True)):
        Path(folder).mkdir()
        options = InferOptions(out_dir=folder, no_pictures=no_pictures)
        results = Results(options, found.kind, CLASSES)
        results.write((Path('a.png'), 'a'), found)
    written = contents_of(Path('all'))
    del written['a.overlay.jpg']
    assert contents_of(Path('some')) == written


PAGE = (ROOT / 'docs/predict.md').read_text()
TRAINING = (ROOT / 'docs/training.md').read_text()


def test_the_documented_example(capsys, monkeypatch):
    (code,) = re.findall('## From Python\n\n```python\n(.*?)```', PAGE, re.S)
    monkeypatch.setattr(Image.Image, 'save', lambda self, path: None)
    monkeypatch.chdir(ROOT)
    exec(code, {})
    text, *items = capsys.readouterr().out.splitlines()
    assert text == re.search(r'# (Detections\(.*\))', code)[1]
    assert len(items) == 6
    scores = [float(item.split()[1]) for item in items]
    assert scores == sorted(scores, reverse=True) and scores[-1] >= 0.5


def test_the_documented_commands(untrained, sample_dataset):
    config, checkpoint = untrained['detector']
    given = {
        'CONFIG': config,
        'CHECKPOINT': checkpoint,
        'IMAGES': str(min((sample_dataset / 'coco/val2017').iterdir())),
        'MODEL.onnx': str(ROOT / 'examples/trees.onnx'),
        'data.yaml': str(sample_dataset / 'coco'),
    }
    commands = re.findall(r'^    (cpvt .* --(?:format|report) .*)$', PAGE + TRAINING, re.M)
    assert len(commands) == 6
    written = set()
    for command in commands:
        if 'int8.xml' in command:  # tests/app/evaluate evaluates exported models
            continue
        words = [given.get(word, word) for word in shlex.split(command, comments=True)[1:]]
        Path('report.html').unlink(missing_ok=True)
        shutil.rmtree('predictions', ignore_errors=True)
        assert main(words) == 0, command
        if words[0] == 'infer':
            written |= {path.suffix for path in Path('predictions').iterdir()}
            assert Path('predictions/coco.json').is_file() == ('coco' in words)
    assert written >= {'.json', '.geojson', '.jpg'}
    assert Path('report.html').is_file()


def test_equality():
    """Of all values, which are arrays."""
    image = np.zeros((4, 6, 3), np.uint8)
    common = image, ('a', 'b'), ((0, 0, 0), (9, 9, 9))
    boxes = np.array([[0, 0, 3, 3], [1, 1, 2, 2]], np.float32)
    scores = np.array([0.9, 0.5], np.float32)
    labels = np.array([0, 1])
    masks = np.zeros((2, 4, 6), bool)
    maps = np.zeros((4, 6), np.uint8)
    for first, same, others in (
        (
            Detections(*common, boxes, scores, labels),
            Detections(*common, boxes.copy(), scores, labels),
            [
                Detections(*common, boxes + 1, scores, labels),
                Detections(*common, boxes[:1], scores[:1], labels[:1]),
                Detections(*common, boxes, scores, labels, masks),
                Detections(image + 1, *common[1:], boxes, scores, labels),
                Detections(image, ('a', 'c'), common[2], boxes, scores, labels),
                LabelMap(*common, maps),
                'Detections',
            ],
        ),
        (
            Detections(*common, boxes, scores, labels, masks),
            Detections(*common, boxes, scores, labels, masks.copy()),
            [Detections(*common, boxes, scores, labels, ~masks)],
        ),
        (LabelMap(*common, maps), LabelMap(*common, maps + 0), [LabelMap(*common, maps + 1)]),
    ):
        assert first == first and first == same and not first != same
        assert not any(first == other for other in others)
        assert [first, same].index(same) == 0
