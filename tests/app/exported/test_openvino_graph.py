"""Graphs for OpenVINO: the same results from other shapes."""

from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest

from cpvt_pyramid.app.predict import sessions
from cpvt_pyramid.app.predict.openvino_graph import to_rows
from cpvt_pyramid.app.predict.sessions import KEY, openvino_core, read_openvino

DIM = 6
# A residual branch of a norm and a product, for maps (B, H, W, C), and a sum that broadcasts.
BODY = """
    normed = LayerNormalization<axis = -1>(x, scale, bias)
    branch = MatMul(normed, weight)
    sum = Add(x, branch)
    means = ReduceMean<keepdims = 1>(sum, sides)
    total = Add(sum, means)
"""


def write(shape: str) -> Path:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> '
        f'tiny (float[{shape}] images) => (float[{shape}] y) {{'
        'sides = Constant<value: tensor = int64[2] {1, 2}>()'
        f'x = Identity(images){BODY}y = Identity(total)}}'
    )
    random = np.random.default_rng(0)
    for name, size in (('scale', [DIM]), ('bias', [DIM]), ('weight', [DIM, DIM])):
        values = random.normal(size=size).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    path = Path('tiny.onnx')
    onnx.save(model, path)
    return path


def run(model, x: np.ndarray) -> np.ndarray:
    compiled = openvino_core().compile_model(model, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})
    (y,) = compiled([x]).values()
    return np.array(y)


def ranks(model, kind: str) -> list[int]:
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == kind]
    return [len(node.get_output_partial_shape(0)) for node in nodes]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize('shape', [f'B,H,W,{DIM}', f'2,5,7,{DIM}'])
def test_norms_and_residuals_take_rows(shape):
    x = np.random.default_rng(1).normal(size=(2, 5, 7, DIM)).astype(np.float32)
    path = write(shape)
    expected = run(read_openvino(path), x)
    model = read_openvino(path)
    assert to_rows(model) == 2  # the sum that broadcasts stays
    assert ranks(model, 'MVN') == [3]
    assert [output.get_any_name() for output in model.outputs] == ['y']
    np.testing.assert_allclose(run(model, x), expected, rtol=1e-5, atol=1e-6)
    assert to_rows(model) == 0


def test_a_value_inside_keeps_its_name_and_shape():
    path = write(f'B,H,W,{DIM}')
    x = np.random.default_rng(1).normal(size=(1, 5, 7, DIM)).astype(np.float32)
    model = read_openvino(path)
    model.add_outputs(['sum'])
    to_rows(model)
    assert [output.get_any_name() for output in model.outputs] == ['y', 'sum']
    results = openvino_core().compile_model(model, 'CPU')([x])
    assert results['sum'].shape == x.shape


@pytest.mark.parametrize('shape', [f'H,W,{DIM}', f'B,T,H,W,{DIM}'])
def test_other_ranks_stay(shape):
    assert to_rows(read_openvino(write(shape))) == 0


@pytest.mark.parametrize('is_ours', [True, False])
def test_only_our_files_run_in_rows(is_ours):
    """The sums of others may broadcast."""
    path = write(f'B,H,W,{DIM}')
    x = np.random.default_rng(1).normal(size=(1, 5, 7, DIM)).astype(np.float32)
    expected = run(read_openvino(path), x)
    if is_ours:
        model = onnx.load(path)
        onnx.helper.set_model_props(model, {KEY: '{}'})
        onnx.save(model, path)
    with mock.patch.object(sessions, 'to_rows', wraps=to_rows) as changes:
        session = sessions.OpenVino(path)
    assert changes.called == is_ours
    (found,) = session.run({'images': x}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
