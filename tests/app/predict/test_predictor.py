"""Predictions at the size of each image, alone and in padded batches."""

import io
import json
import math
import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from cpvt_pyramid.app.images.reading import rescaled_size, resize_image, resize_scores
from cpvt_pyramid.app.predict import Predictor, UserError, exported
from cpvt_pyramid.app.predict.masks import paste_masks
from cpvt_pyramid.app.predict.options import RuntimeOptions
from cpvt_pyramid.app.predict.sessions import OnnxRuntime, open_session, padded_inputs
from cpvt_pyramid.app.tooling import memory


def assert_same(first, second):
    for name in ('boxes', 'scores', 'labels', 'masks'):
        np.testing.assert_array_equal(getattr(first, name, None), getattr(second, name, None))


@pytest.mark.parametrize('backend', ['onnxruntime', 'openvino'])
def test_boxes_are_in_pixels_of_the_image(model, photos, backend):
    both = Predictor(model('detection'), backend=backend, score_thr=0.1)(photos[0])
    height, width = photos[0].shape[:2]
    small = resize_image(photos[0], rescaled_size((height, width), 40, 60))
    centre = [width / 4, height / 4, width * 3 / 4, height / 2]
    np.testing.assert_allclose(both.boxes, [[0, 0, width, height], centre], rtol=1e-6)
    np.testing.assert_allclose(both.scores, small.max() / 255 * np.array([1, 0.4]), rtol=1e-6)
    assert both.labels.tolist() == [1, 0] and both.masks is None
    found = Predictor(model('detection'), backend=backend)(photos[0])  # the threshold in the file
    assert len(found) == 1
    assert_same(both.above(found.scores[0]), found)


NAMES = (
    'detection',
    'box',
    'image',
    'labels',
    'probabilities',
    'labels without valid',
    'fixed',
)


@pytest.mark.parametrize(
    'name, backend, workers',
    [
        *((name, 'onnxruntime', 1) for name in NAMES),
        ('box', 'onnxruntime', 3),
        ('box', 'openvino', 1),
        ('box', 'openvino', 3),
        ('labels without valid', 'openvino', 1),
    ],
)
def test_a_batch_and_threads_change_nothing(model, photos, name, backend, workers):
    path, given = model(name), [*photos, *photos[:3]]
    predictor = Predictor(path, backend=backend, batch_size=3, workers=workers)
    assert predictor.model.threads == workers
    together = predictor(given)
    assert len(together) == len(given)
    alone = Predictor(path, backend=backend)
    for photo, result in zip(given, together):
        assert result.image is photo
        assert_same(alone(photo), result)


def test_onnxruntime_sends_no_telemetry_unless_allowed(model, monkeypatch):
    for given, used in ((None, '1'), ('0', '0')):
        monkeypatch.delenv('ORT_DISABLE_TELEMETRY', raising=False)
        if given:
            monkeypatch.setenv('ORT_DISABLE_TELEMETRY', given)
        Predictor(model('labels'))
        assert os.environ['ORT_DISABLE_TELEMETRY'] == used


def test_images_of_every_kind_and_files_without_permission(model, photos, monkeypatch):
    Image.fromarray(photos[0]).save('a.png')
    path, predictor = model('labels'), Predictor(model('labels'))
    expected = predictor(photos[0])
    for source in ('a.png', Image.open('a.png')):
        assert_same(predictor(source), expected)
    assert predictor([]) == []
    with pytest.raises(OSError, match='^b.png: no such file'):
        predictor(['a.png', 'b.png'])

    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, 'Permission denied', str(self))  # root is never denied

    monkeypatch.setattr(Path, 'open', denied)
    with pytest.raises(PermissionError, match='labels.onnx'):
        Predictor(path)
    with pytest.raises(OSError, match='^a.png: permission denied$'):
        predictor('a.png')


def test_the_size_of_the_input(model, photos):
    """Also in a file of fixed size, into which images are reduced."""
    found = Predictor(model('fixed', resize={'short': 100, 'long': 300}))(photos)
    for photo, result in zip(photos, found):
        height, width = photo.shape[:2]
        np.testing.assert_allclose(result.boxes[0], [0, 0, width, height], rtol=1e-6)
    predictor = Predictor(model('labels'), shorter_side=20)
    assert predictor.model.to_input_size(photos[0]).shape == (20, 29, 3)
    assert predictor.model.to_input_size(photos[3]).shape == (5, 30, 3)  # at most 60 / 40 of 20
    unresized = Predictor(model('labels', resize=None))
    assert unresized.model.to_input_size(photos[0]) is photos[0]
    wide = Predictor(model('labels', resize=None), shorter_side=20).model
    assert wide.to_input_size(photos[0]).shape == (20, 29, 3)
    assert wide.input_size((1, 20_000)) == (1, 200)  # at most ten times the shorter side


@pytest.mark.parametrize('resized', ['logits', 'probabilities'])
def test_what_is_resized(model, photos, resized):
    predictor = Predictor(model('probabilities', resized=resized))
    for photo in photos:
        scores = predictor.model.to_input_size(photo).transpose(2, 0, 1) / np.float32(8)
        if resized == 'probabilities':
            scores = np.exp(scores) / np.exp(scores).sum(0)
        planes = np.stack([resize_scores(plane, photo.shape[:2]) for plane in scores])
        labels = predictor(photo).labels
        assert labels.shape == photo.shape[:2] and labels.dtype == np.uint8
        best = np.take_along_axis(planes, labels[None].astype(int), 0)[0]
        np.testing.assert_allclose(best, planes.max(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('resize', [None, {'short': 40, 'long': 60}])
def test_the_threshold_of_two_classes(model, photos, resize):
    about = {'classes': ['no', 'yes'], 'threshold': 0.3, 'resize': resize}
    predictor = Predictor(model('two', **about))
    small = predictor.model.to_input_size(photos[0])[..., 0] / np.float32(16) - 3
    logits = resize_scores(small, photos[0].shape[:2]) if resize else small
    share = 1 / (1 + np.exp(-logits))
    clear = abs(share - 0.3) > 1e-4
    labels = predictor(photos[0]).labels
    np.testing.assert_array_equal(labels[clear], share[clear] > 0.3)
    assert 0 < labels.mean() < 1


@pytest.mark.parametrize('score_thr', [None, 0.2, 0.05, 0.02, 0.0])
def test_a_threshold_below_that_of_the_model_is_told(score_thr, model):
    """It has no effect: the file itself leaves out lower scores."""
    nms = {'score_thr': 0.05, 'iou_threshold': 0.5, 'class_agnostic': False}
    path = model('detection', nms=nms)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        Predictor(path, score_thr=score_thr)
    said = [str(warning.message) for warning in caught]
    if score_thr is None or score_thr >= 0.05:
        assert not said
    else:
        (line,) = said
        assert line.startswith(f'a score threshold of {score_thr:g} has the effect of 0.05')


def test_masks_inside_boxes_are_those_of_mmdet():
    from mmdet.models.roi_heads.mask_heads.fcn_mask_head import _do_paste_mask

    rng = np.random.default_rng(0)
    corners = rng.uniform(-5, 60, (20, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(1, 40, (20, 2))], 1).clip(0, 70)
    boxes = boxes.astype(np.float32)
    grids = rng.random((20, 28, 28)).astype(np.float32)
    image = torch.from_numpy(grids)[:, None]
    expected = _do_paste_mask(image, torch.from_numpy(boxes), 70, 90, False)[0] >= 0.5
    actual = paste_masks(grids, boxes, (70, 90))
    assert expected.any() and (actual == expected.numpy()).mean() > 0.9999


def test_masks(model, photos):
    found = Predictor(model('box'), score_thr=0.1)(photos[0])
    height, width = photos[0].shape[:2]
    assert found.masks.shape == (2, height, width) and found.masks.dtype == bool
    np.testing.assert_array_equal(found.masks[0, height // 2], np.arange(width) + 0.5 <= width / 2)
    photo = np.zeros((40, 60, 3), np.uint8)
    photo[:, 20:40, 0], photo[8:16, :, 1] = 255, 255
    found = Predictor(model('image'), score_thr=0.1)(photo)
    np.testing.assert_array_equal(found.masks, np.moveaxis(photo, -1, 0)[:2] > 0)


def test_results_for_coco_and_supervision(model, photos, monkeypatch):
    found = Predictor(model('box'), score_thr=0.1)(photos[0])
    labels = Predictor(model('labels'))(photos[0])
    first, second = found.to_coco(image_id=7, category_ids=(4, 5, 6))
    assert (first['image_id'], first['category_id'], second['category_id']) == (7, 5, 4)
    assert [result['category_id'] for result in found.to_coco()] == [2, 1]
    height, width = photos[0].shape[:2]
    np.testing.assert_allclose(second['bbox'], [width / 4, height / 4, width / 2, height / 4])
    assert second['score'] == pytest.approx(found.scores[1])
    assert [result['category_id'] for result in labels.to_coco()] == [1, 2, 3]
    masks = [*found.masks, *(labels.labels == i for i in range(3))]
    for result, mask in zip([first, second, *labels.to_coco()], masks):
        np.testing.assert_array_equal(coco_mask.decode(result['segmentation']), mask)

    monkeypatch.setitem(sys.modules, 'supervision', None)
    with pytest.raises(UserError, match='pip install supervision'):
        found.to_supervision()
    monkeypatch.setitem(sys.modules, 'supervision', SimpleNamespace(Detections=SimpleNamespace))
    given = found.to_supervision()
    for field, expected in (('xyxy', found.boxes), ('mask', found.masks)):
        np.testing.assert_array_equal(getattr(given, field), expected)
    assert given.data['class_name'].tolist() == ['one', 'zero']
    given = labels.to_supervision()
    assert given.class_id.tolist() == [0, 1, 2] and given.mask.sum() == labels.labels.size
    for (x1, y1, x2, y2), mask in zip(given.xyxy.astype(int), given.mask):
        assert mask[y1:y2, x1:x2].sum() == mask.sum() and mask[y1].any() and mask[:, x2 - 1].any()


# For each key, values that it must not have.
EDITED = {
    'classes': [None, [], 'one', [1, 2, 3]],
    'palette': [None, [['red', 0, 0]], [[0, 0, 256]]],
    'resize': [
        {'short': 0, 'long': 60},
        {'short': '40', 'long': 60},
        [40, 60],
        {'short': float('nan'), 'long': 60},
        {'short': 61, 'long': 60},
    ],
    'stride': [0, 32.0, None, True],
    'score_thr': ['0.3', None, 2],
    'masks': ['pixels', {}],
    'size': [[0, 0]],
    'resized': ['labels'],
    'threshold': ['0.5', 1],
    'nms': [5, {}, {'iou_threshold': 'x', 'class_agnostic': False}],
    'task': ['features', [], {}],
    'format': [2, '1', None],
}


def test_damaged_metadata(model):
    for key, values in EDITED.items():
        for value in values:
            with pytest.raises(UserError, match=f'^detection.onnx: .*{key} must be .*, got '):
                Predictor(model('detection', **{key: value}))
    file = onnx.load(model('detection'))
    whole = json.loads(file.metadata_props[0].value)
    missing = [json.dumps({k: v for k, v in whole.items() if k != key}) for key in whole]
    for text in ('{', '3', '{"task": "detection"}', *missing):
        onnx.helper.set_model_props(file, {'cpvt_pyramid': text})
        onnx.save(file, 'damaged.onnx')
        with pytest.raises(UserError, match='^damaged.onnx: damaged metadata: '):
            Predictor('damaged.onnx')


def test_files_that_do_not_fit_their_metadata(model, photos):
    for name, changes, complaint in (
        ('detection', {'masks': 'box'}, 'must have the outputs boxes, labels, masks, scores, got'),
        ('box', {'masks': None}, 'masks of instances box or image, got'),
        ('detection', {'classes': ['zero']}, 'returns 2 classes, but its metadata names 1'),
        ('labels', {'classes': ['zero']}, 'returns 3 classes, but its metadata names 1'),
        ('probabilities', {'classes': ['zero']}, 'returns 3 classes, but its metadata names 1'),
    ):
        with pytest.raises(UserError, match=complaint):
            Predictor(model(name, **changes))(photos[0])
    for path in map(model, ('box', 'labels')):  # without their last output
        file = onnx.load(path)
        file.graph.output[-1].name = file.graph.node[0].output[0]
        file.graph.output[-1].ClearField('type')
        onnx.save(file, path)
        with pytest.raises(UserError, match=f'^{path} must have the outputs .*, got '):
            Predictor(path)
    path = model('detection')
    file = onnx.load(path)
    file.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(file, path)
    with pytest.raises(UserError, match='batches of any size, got the fixed batch size 2'):
        Predictor(path)


@pytest.mark.parametrize(
    'name, output', [('detection', 'scores'), ('box', 'masks'), ('probabilities', 'probabilities')]
)
def test_nan_is_reported(model, photos, name, output):
    predictor = Predictor(model(name))
    run = predictor.model.session.run

    def damaged(inputs: dict) -> dict:
        outputs = run(inputs)
        return {**outputs, output: np.full_like(outputs[output], np.nan)}

    predictor.model.session.run = damaged
    with pytest.warns(RuntimeWarning, match=f'returned NaN in {output}'):
        predictor(photos[0])


def test_mistakes(model, photos):
    for options, complaint in (
        ({'batch_size': 0}, 'batch_size must be at least 1, got 0'),
        ({'workers': 0}, 'workers must be at least 1, got 0'),
        ({'shorter_side': -1}, 'shorter_side must be at least 1, got -1'),
        ({'score_thr': float('nan')}, r'score_thr must be in \[0, 1\], got nan'),
        ({'score_thr': 0.5}, '^score_thr is for .*, but the model predicts labels; leave it out'),
        ({'tile': -1}, '^tile must be at least 0, got -1'),
        ({'tile': 48}, '^tile must be a multiple of 32, got 48'),
        (
            {'tile': 64, 'shorter_side': 300},
            '^shorter_side has no effect with tile, which',
        ),
        ({'backend': 'tensorrt'}, "one of onnxruntime, openvino, got 'tensorrt'"),
    ):
        with pytest.raises(UserError, match=complaint):
            Predictor(model('labels'), **options)
    path = model('fixed')
    predictor = Predictor(path)
    predictor.model.session.shapes['images'] = [None, 3, None, None]  # believes in any size
    with pytest.raises(UserError, match=rf'{path} failed on images of \(1, 3, 40, 58\): '):
        predictor(photos[0])


def test_what_is_no_image(model):
    """One line says what an image can be."""
    predictor = Predictor(model('labels'))
    for given in (b'', io.BytesIO(), None, 3, torch.zeros(3, 8, 8), [[]]):
        name = type(given[0] if isinstance(given, list) else given).__name__
        with pytest.raises(TypeError, match=f'^an image must be a path, .* got {name}; PIL.Image'):
            predictor(given)
    image = np.zeros((8, 9, 3), np.uint8)
    for array in (image / 255, image[..., 0], image.transpose(2, 0, 1), image[None], image[:0]):
        with pytest.raises(ValueError, match=r'^an image array must be \(height, width, 3\) RGB'):
            predictor(array)


def test_openvinos_own_format(model, photos):
    import openvino

    openvino.save_model(openvino.Core().read_model(model('box')), 'box.xml', False)
    assert_same(
        Predictor('box.xml')(photos[0]), Predictor(model('box'), backend='openvino')(photos[0])
    )


def test_inputs_that_do_not_fit_into_memory(model, photos, monkeypatch):
    path = model('labels', resize={'short': 1e6, 'long': 1e6})
    told = 'an input of 1000000 x 684211 pixels does not fit into memory; reduce it with --shorter'
    for known in (True, False):
        if not known:
            monkeypatch.setattr(memory, 'available', Mock(return_value=math.inf))
            monkeypatch.setattr(exported, 'resize_image', Mock(side_effect=MemoryError))
        with pytest.raises(OSError, match=told):
            Predictor(path)(photos[0])
    with pytest.raises(OSError, match='an input of 100000 x 68421 pixels does not fit'):
        Predictor(path, shorter_side=100_000)(photos[0])


def test_who_shares_a_batch(model, photos, monkeypatch):
    """Images of one padded size; of one size where the file is not told the true ones; all where
    its size is fixed."""
    images = [photos[2], photos[2][:40, :50], photos[0][:60, :90], photos[2]]
    given, run = [], OnnxRuntime.run

    def recorded(session, inputs):
        given.append(len(inputs['images']))
        return run(session, inputs)

    monkeypatch.setattr(OnnxRuntime, 'run', recorded)
    for name, expected in (
        ('detection', [1, 3]),
        ('labels without valid', [1, 1, 2]),
        ('fixed', [4]),
    ):
        predictor = Predictor(model(name, resize=None), batch_size=4)
        given.clear()
        found = predictor(images)
        assert sorted(given) == expected
        for image, result in zip(images, found):
            assert_same(predictor(image), result)


@pytest.mark.parametrize('backend', ['onnxruntime', 'openvino'])
@pytest.mark.parametrize('requests', [1, 2])
def test_more_threads_than_a_session_serves_take_turns(
    model, photos, monkeypatch, backend, requests
):
    """As the threads of a run do on a GPU, which read and write images meanwhile."""
    session = open_session(Path(model('detection')), RuntimeOptions(backend=backend), requests)
    inputs = padded_inputs(photos[:1], session.shapes)
    expected = session.run(inputs)['scores']
    lock = threading.Lock()
    running = []
    together = []

    class Watched:
        """What a session runs, with the number of threads that are inside."""

        def __init__(self, run):
            self.run = self.infer = partial(self.watch, run)

        def watch(self, run, *arguments, **options):
            with lock:
                running.append(1)
                together.append(len(running))
            time.sleep(0.02)
            found = run(*arguments, **options)
            running.pop()
            return found

    if backend == 'onnxruntime':
        monkeypatch.setattr(session, 'session', Watched(session.session.run))
    else:
        for _ in range(requests):
            session.free.put(Watched(session.free.get().infer))
    with ThreadPoolExecutor(5) as pool:
        for found in pool.map(session.run, [inputs] * 10):
            np.testing.assert_array_equal(found['scores'], expected)
    assert max(together) == requests
