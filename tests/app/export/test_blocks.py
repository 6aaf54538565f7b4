"""Attention and MLPs in ONNX: as PyTorch, in blocks of tokens, with bounded memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Optional

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from cpvt_pyramid.app.export import onnx_attention, onnx_mlp
from cpvt_pyramid.app.export.onnx_file import translate
from cpvt_pyramid.app.predict.openvino_graph import join_blocks
from cpvt_pyramid.app.predict.sessions import KEY, openvino_core, read_openvino

INPUTS = ('q', 'k', 'v', 'bias')


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias)


def given(
    batch: int, queries: int, keys: int, bias: str, channels: int = 12, seed: int = 0
) -> tuple[Tensor, ...]:
    """Queries, keys and values of 3 heads, and perhaps a bias."""
    random = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(batch, 3, queries, channels, generator=random)
    k, v = torch.randn(2, batch, 3, keys, channels, generator=random)
    if not bias:
        return q, k, v
    rows = queries if bias == 'of queries' else 1
    hidden = torch.rand(batch, 1, rows, keys, generator=random) < 0.3
    hidden[..., 0] = False
    return q, k, v, ~hidden if bias == 'boolean' else -1e4 * hidden


def attention_model(bias: str) -> onnx.ModelProto:
    """`Attention` for every batch, number of queries and of keys."""
    sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    shapes = [sizes] * 3
    if bias:
        shapes.append({0: Dim.DYNAMIC, 3: Dim.DYNAMIC})
    if bias == 'of queries':
        shapes[3][2] = Dim.DYNAMIC
    arguments = given(2, 40, 30, bias)
    program = torch.export.export(Attention(), arguments, dynamic_shapes=tuple(shapes))
    return translate(program, ['y'])


def run_in_both(model: onnx.ModelProto, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The output in onnxruntime, in OpenVINO, and there as our session runs it."""
    arrays = {name: x.numpy() for name, x in inputs.items()}
    file = model.SerializeToString()
    session = onnxruntime.InferenceSession(file, providers=['CPUExecutionProvider'])
    found = session.run(None, arrays)
    settings = {'INFERENCE_PRECISION_HINT': 'f32'}
    core = openvino_core()
    for change in (lambda graph: None, join_blocks):
        graph = core.read_model(file)
        change(graph)
        found.append(core.compile_model(graph, 'CPU', settings)(arrays)[0])
    return [torch.from_numpy(np.array(x)) for x in found]


@pytest.mark.parametrize('bias', ['', 'of keys', 'boolean', 'of queries'])
def test_attention_is_that_of_pytorch(bias, monkeypatch):
    """Less than a block, one, several that divide the queries or not, blocks of a query."""
    monkeypatch.setattr(onnx_attention, 'SCORES', 200)
    model = attention_model(bias)
    loops = [node for node in model.graph.node if node.op_type == 'If']
    assert len(loops) == (bias != 'of queries')
    for batch, queries, keys in [(1, 5, 7), (2, 20, 10), (1, 60, 10), (3, 83, 17), (2, 3, 250)]:
        arguments = given(batch, queries, keys, bias)
        expected = Attention()(*arguments)
        for found in run_in_both(model, dict(zip(INPUTS, arguments))):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_small_attention_of_known_size_has_no_branches():
    program = torch.export.export(Attention(), given(2, 49, 49, ''))  # of windows
    assert {'If', 'Loop'}.isdisjoint(node.op_type for node in translate(program, ['y']).graph.node)


class OtherAttention(nn.Module):
    """Attention of a user's own head."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


@pytest.mark.parametrize('option', ['is_causal', 'enable_gqa'])
def test_other_attention_is_translated_by_pytorch(option):
    model = OtherAttention(**{option: True})

    def arguments(queries: int, keys: int) -> tuple[Tensor, ...]:
        q, k, v = given(2, queries, keys, '')
        if option == 'enable_gqa':
            k, v = k[:, :1], v[:, :1]
        return q, k, v

    shapes = ({2: Dim.DYNAMIC},) * 3
    program = torch.export.export(model, arguments(40, 30), dynamic_shapes=shapes)
    file = translate(program, ['y'])
    for sizes in ((5, 5), (20, 33)):
        inputs = arguments(*sizes)
        for found in run_in_both(file, dict(zip(INPUTS, inputs))):
            torch.testing.assert_close(found, model(*inputs), rtol=1e-5, atol=1e-5)


MEASURE = """
import json, resource, sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])
x = numpy.ones(json.loads(sys.argv[3]), numpy.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session.run(None, {name: x for name in sys.argv[2]})
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def peak_of(path: Path, inputs: str, shape: tuple[int, ...]) -> int:
    """Bytes that onnxruntime takes for inputs of one letter each, in a process of its own."""
    command = [sys.executable, '-c', MEASURE, str(path), inputs, json.dumps(shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return int(done.stdout)


def test_there_is_no_matrix_of_all_queries_and_keys(tmp_path: Path):
    onnx.save(attention_model(''), path := tmp_path / 'model.onnx')
    assert peak_of(path, 'qkv', (1, 3, 9000, 12)) < 3 * 9000 * 9000 * 4 / 5


@pytest.mark.parametrize('is_ours', [True, False])
def test_openvino_takes_all_queries_at_once(is_ours, tmp_path: Path):
    """Branches of other files may differ in their results."""
    file = attention_model('of keys')
    if is_ours:
        onnx.helper.set_model_props(file, {KEY: '{}'})
    onnx.save(file, path := tmp_path / 'model.onnx')
    model = read_openvino(path)
    kinds = [node.get_type_name() for node in model.get_ordered_ops()]
    assert ('If' in kinds) == (not is_ours) and kinds.count('Softmax') == is_ours
    assert [output.get_any_name() for output in model.outputs] == ['y']


@pytest.mark.parametrize('approximate', ['none', 'tanh'])
def test_gelu_is_that_of_pytorch(approximate):
    x = torch.linspace(-6, 6, 301)[None]
    layer = nn.GELU(approximate)
    model = translate(torch.export.export(layer, (x,)), ['y'])
    for found in run_in_both(model, {'input': x}):
        torch.testing.assert_close(found, layer(x), rtol=1e-5, atol=1e-5)


def test_onnxruntime_fuses_a_gelu(tmp_path: Path):
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model = translate(torch.export.export(layers, (torch.rand(2, 5, 8),)), ['y'])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / 'optimized.onnx')
    options.log_severity_level = 3
    providers = ['CPUExecutionProvider']
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers)
    used = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    assert {'Gelu', 'BiasGelu'} & set(used) and 'Erf' not in used


class MLP(nn.Module):
    """`model.MLP`, whose result is added to its input."""

    def __init__(self, dim: int = 8, width: int = 32, activation: str = 'none') -> None:
        super().__init__()
        self.first = nn.Linear(dim, width)
        self.gelu = nn.GELU(activation)
        self.second = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.gelu(self.first(x)))


def mlp_model(layer: nn.Module) -> onnx.ModelProto:
    """A layer for maps (B, H, W, 8) of every size."""
    sizes = dict.fromkeys((0, 1, 2), Dim.DYNAMIC)
    arguments = (torch.rand(2, 5, 6, 8),)
    return translate(torch.export.export(layer, arguments, dynamic_shapes=(sizes,)), ['y'])


@pytest.mark.parametrize('activation', ['none', 'tanh'])
def test_an_mlp_is_that_of_pytorch(activation, monkeypatch):
    """Less than a block of 10 tokens, one, several that divide the tokens or not."""
    monkeypatch.setattr(onnx_mlp, 'VALUES', 330)
    layer = MLP(activation=activation).eval()
    model = mlp_model(layer)
    assert [node.op_type for node in model.graph.node].count('If') == (activation == 'none')
    for batch, height, width in [(1, 1, 1), (1, 2, 5), (2, 5, 4), (3, 7, 9)]:
        x = torch.randn(batch, height, width, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = layer(x)
        for found in run_in_both(model, {'x': x}):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class ReadTwice(MLP):
    """The wide map has another reader."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.gelu(self.first(x))
        return self.second(wide) + wide.mean(-1, keepdim=True)


def test_an_mlp_whose_wide_map_has_another_reader_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(onnx_mlp, 'VALUES', 330)
    layer = ReadTwice().eval()
    model = mlp_model(layer)
    assert 'If' not in [node.op_type for node in model.graph.node]
    x = torch.randn(2, 5, 4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = layer(x)
    for found in run_in_both(model, {'x': x}):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_there_is_no_wide_map_of_all_tokens(tmp_path: Path):
    onnx.save(mlp_model(MLP(8, 800)), path := tmp_path / 'model.onnx')
    assert peak_of(path, 'x', (1, 200, 200, 8)) < 200 * 200 * 800 * 4 / 4
