"""Files that test themselves: what PyTorch gave, compared on this device."""

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from cpvt_pyramid.app.commands.verify import main
from cpvt_pyramid.app.export.comparison import is_detection
from cpvt_pyramid.app.export.self_test import SIZES, draw, pack, thinned, verify_session
from cpvt_pyramid.app.predict.exported import ExportedModel
from cpvt_pyramid.app.predict.sessions import open_session

NAMES = ['detection', 'box', 'image', 'labels', 'probabilities', 'labels without valid']


def changed(path: object, change: Callable[[onnx.ModelProto], None]) -> str:
    """The name of a copy of a file with a change."""
    file = onnx.load(path)
    change(file)
    onnx.save(file, 'changed.onnx')
    return 'changed.onnx'


def with_test(path: Path) -> str:
    """A file with what it gives in onnxruntime as its test data."""
    predictor = ExportedModel(path)
    samples = []
    for seed, size in enumerate(SIZES):
        image, original = draw(seed, *size), (size[0] + 50, size[1] - 20)
        (outputs,) = predictor.run_batch([image], [original])
        shapes = {name: np.array(x.shape) for name, x in outputs.items()}
        if 'masks' in shapes and predictor.about['masks'] == 'image':
            shapes['masks'][1:] = [-(-side // 4) for side in size]
            outputs['masks'] = outputs['masks'][:, : shapes['masks'][1], : shapes['masks'][2]]
        if is_detection(outputs):
            outputs = {name: x[outputs['labels'] >= 0] for name, x in outputs.items()}
        facts = {'seed': seed, 'size': size, 'original': original}
        samples.append(
            {
                'image': {k: np.array(v) for k, v in facts.items()},
                'shapes': shapes,
                'outputs': thinned(outputs),
            }
        )

    def add(file: onnx.ModelProto) -> None:
        about = file.metadata_props[0]
        about.value = about.value.replace('{', '{"dtype": "float32", ', 1)
        file.metadata_props.add(key='cpvt_pyramid_test', value=pack(samples))

    return changed(path, add)


@pytest.mark.parametrize('backend', ['onnxruntime', 'openvino'])
@pytest.mark.parametrize('name', NAMES)
def test_right_results_pass_and_a_wrong_constant_fails(model, name, backend, capsys):
    """One number or operator of the graph, as a weight of a real model."""
    wanted = {'detection': 'factors', 'box': 'left', 'image': 'white', 'probabilities': 'eight'}

    def damage(file: onnx.ModelProto) -> None:
        for node in file.graph.node:
            if node.op_type == 'ArgMax':
                node.op_type = 'ArgMin'
            if node.output[0] == wanted.get(name) and node.op_type == 'Constant':
                value = onnx.numpy_helper.to_array(node.attribute[0].t).copy()
                value[...] = value * 3 if name != 'box' else 1 - value
                node.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(value))

    path = with_test(model(name))
    assert main([path, '--backend', backend]) == 0
    said = capsys.readouterr().out
    table = said.partition('\nprobe ')[0].splitlines()  # before the comparison with batches
    verdict = table[-1]
    assert verdict.startswith(f'{path}, {backend} on CPU') and ': passed, all ' in verdict
    # Each image alone and, if the file takes padding, two images that are padded to one size.
    assert ('131x97 150x123' in str(table)) == ('without' not in name)
    assert main([changed(path, damage), '--backend', backend]) == 1
    said = capsys.readouterr().out
    assert said.count('FAILED, ') == 1 and ' comparisons with PyTorch' in said


def test_a_batch_that_is_wrong_fails(model):
    """As from a runtime that takes the size of the batch for that of each image."""
    session = open_session(Path(with_test(model('detection'))))
    run = session.run
    session.run = lambda inputs: run(
        inputs | {'valid': inputs['valid'].max(0, keepdims=True) + 0 * inputs['valid']}
    )
    checks = verify_session(Path('changed.onnx'), session)
    failed = {tuple(check.sizes) for check in checks if not check.passed}
    assert failed == {('131x97', '150x123')}


def test_a_fixed_batch_is_refused_before_anything_is_compared(model, capsys):
    def fix(file: onnx.ModelProto) -> None:
        for value in file.graph.input:
            value.type.tensor_type.shape.dim[0].dim_value = 1

    assert main([changed(with_test(model('detection')), fix)]) == 2
    said = capsys.readouterr()
    assert 'has the fixed batch size 1; export it with' in said.err and not said.out


def test_damaged_test_data_and_devices_that_are_not_there(model, capsys):
    def tested(text: str) -> str:
        return changed(
            model('detection'),
            lambda file: file.metadata_props.add(key='cpvt_pyramid_test', value=text),
        )

    plain, damaged = str(model('labels')), pack([{'image': {'seed': np.array(0)}}])[:-99]
    for words, complaint in (
        (f'{plain} --backend openvino --device GPU', 'openvino cannot use GPU; choose from CPU'),
        (f'{plain} --device cuda', 'cannot use CUDAExecutionProvider; choose '),
        (tested(''), 'changed.onnx: damaged test data'),
        (tested(damaged), 'changed.onnx: damaged test data'),
    ):
        assert main(words.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert complaint in line
    assert main([plain]) == 0  # the batches alone
    assert 'has no outputs of PyTorch to compare with' in capsys.readouterr().out


def test_images_are_the_same_everywhere():
    """Also with another NumPy or processor: a file is tested elsewhere."""
    checksums = [zlib.crc32(draw(seed, *size).tobytes()) for seed, size in enumerate(SIZES)]
    assert checksums == [3203182506, 144150849, 79004540]
    image = draw(0, *SIZES[0]).astype(float)
    assert image.std() > 40 and np.unique(image).size > 200


def test_packed_samples_are_small():
    """The largest: 300 results with masks, of three images."""
    random = np.random.default_rng(0)
    boxes = {
        'boxes': random.random((300, 4), np.float32),
        'scores': random.random(300, np.float32),
        'labels': random.integers(0, 80, 300),
    }
    outputs = thinned(boxes | {'masks': random.random((300, 28, 28)) > 0.5})
    assert len(pack([{'outputs': outputs}] * 3)) < 200_000
