"""Captured graphs are right at sizes that they were not captured at. Elsewhere a conditional pad
bakes "no pad" in, and other sizes come out in the wrong shape without an error."""

import re

import pytest
import torch
from reference import TINY_SVT, same_maps
from support import PINNED_TORCH, ROOT

from cpvt_pyramid import Arch, CPVTPyramid, DenseCPVT
from cpvt_pyramid.archs import ColumnarArch
from cpvt_pyramid.versions import VERSION
from tests.models.ours import TINY_LINEAR, TINY_PVT_V2
from tests.models.ports import randomize

SIZES = [(1, 3, 64, 64), (3, 3, 70, 45), (2, 3, 128, 128), (2, 3, 33, 129)]
# Windows of 7 tokens fill the height, the width, and both.
WHOLE_WINDOWS = [(1, 3, 56, 50), (1, 3, 50, 56), (1, 3, 56, 84)]
NAMED = dict(batch=1, height=33, width=33)  # below, an image may have one key
# More stages are captured in the same way and take longer; `tests/app/export` has whole models.
TWO_STAGES = Arch((32, 64), (1, 2), (4, 4), (1, 1), sr_ratios=(8, 1))
# Few stages and maps, and several encodings in one model: symbolic sizes take seconds for each.
LEARNED = dict(position='learned+peg', pretrain_img_size=64)
MODELS = {
    'pcpvt': lambda: CPVTPyramid(TWO_STAGES, out_indices=(0, 1), **LEARNED),
    'one stage': lambda: CPVTPyramid(TWO_STAGES, out_indices=(0,)),
    'learned': lambda: CPVTPyramid(TWO_STAGES, out_indices=(0,), **LEARNED),
    'rope': lambda: CPVTPyramid(TWO_STAGES, out_indices=(0,), position='rope'),
    'svt': lambda: CPVTPyramid(TINY_SVT, out_indices=(0,)),
    'svt of mmseg': lambda: CPVTPyramid(TINY_SVT, out_indices=(0,), window_padding='mmseg'),
    'pvt_v2': lambda: CPVTPyramid(TINY_PVT_V2, out_indices=(0,)),
    'linear': lambda: CPVTPyramid(TINY_LINEAR, out_indices=(0,)),
    'column': lambda: DenseCPVT(ColumnarArch(16, 2, 2), out_indices=(1,)),
}


def as_module(program):
    """Without the guards that PyTorch adds since 2.9."""
    return program.module(check_guards=False) if VERSION >= (2, 9) else program.module()


def assert_same(model, graph, sizes=SIZES):
    with torch.no_grad():
        for size in sizes:
            image = torch.randn(size)
            same_maps(graph(image), model(image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', ['pcpvt', 'rope', 'svt of mmseg', 'pvt_v2', 'column'])
def test_torch_export(name):
    model = randomize(MODELS[name]()).eval()
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    with torch.no_grad():
        graph = torch.export.export(model, (torch.randn(2, 3, 75, 90),), dynamic_shapes=(sizes,))
    assert_same(model, as_module(graph), SIZES + WHOLE_WINDOWS)


def test_torch_export_without_borders():
    """A graph that leaves out rows and columns that fill no patch keeps a map that has no patch."""
    model = CPVTPyramid(TWO_STAGES, out_indices=(0,), drop_border=True)
    model = randomize(model).eval()
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    with torch.no_grad():
        graph = torch.export.export(model, (torch.randn(2, 3, 75, 90),), dynamic_shapes=(sizes,))
    assert_same(model, as_module(graph), [*SIZES, (1, 3, 9, 129), (2, 3, 64, 31), (1, 3, 5, 6)])


def test_the_graph_of_the_docs_at_ten_sizes():
    page = (ROOT / 'docs/export.md').read_text()
    (code,) = (b for b in re.findall(r'```python\n(.*?)```', page, re.S) if 'torch.export' in b)
    names = {'TINY': TINY_SVT}
    exec(code.replace("'svt_small'", 'TINY, out_indices=(0,)'), names)
    with torch.no_grad():
        for i in range(10):
            image = torch.randn(1 + i % 3, 3, 40 + 61 * i, 500 - 37 * i)
            same_maps(names['graph'](image), names['model'](image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', ['svt', 'svt of mmseg', 'learned', 'linear'])
def test_torch_export_of_a_padded_batch(name):
    model = randomize(MODELS[name]()).eval()
    dynamic = torch.export.Dim.DYNAMIC
    inputs = torch.randn(2, 3, 75, 90), torch.tensor([[60, 70], [75, 90]])
    shapes = ({0: dynamic, 2: dynamic, 3: dynamic}, {0: dynamic})
    with torch.no_grad():
        graph = as_module(torch.export.export(model, inputs, dynamic_shapes=shapes))
        for batch, channels, height, width in SIZES + WHOLE_WINDOWS:
            image = torch.randn(batch, channels, height, width)
            valid = torch.tensor([[height, width - 5], [9, width], [height - 1, 30]])[:batch]
            same_maps(graph(image, valid), model(image, valid), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not PINNED_TORCH, reason='the guards of torch.export differ')
def test_sizes_by_named_dimensions_of_a_padded_batch():
    """Views of a mask made torch.export refuse names; it then takes `Dim.DYNAMIC` alone, as it does
    for windows (SVT) and for `DenseCPVT`."""
    model = randomize(MODELS['one stage']()).eval()
    batch, height, width = (torch.export.Dim(name, min=low) for name, low in NAMED.items())
    valid = torch.tensor([[60, 70], [75, 90]])
    shapes = ({0: batch, 2: height, 3: width}, {0: batch})
    with torch.no_grad():
        inputs = torch.randn(2, 3, 75, 90), valid
        graph = torch.export.export(model, inputs, dynamic_shapes=shapes).module()
        image = torch.randn(3, 3, 64, 97)
        valid = torch.tensor([[64, 50], [33, 97], [1, 1]])
        same_maps(graph(image, valid), model(image, valid), rtol=1e-4, atol=1e-5)


def compiled_into_graphs(model, dynamic=True):
    graphs = []
    torch._dynamo.reset()
    backend = lambda graph, _inputs: graphs.append(graph) or graph  # noqa: E731
    return torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True), graphs


# A graph takes 5 seconds, even of so small a model: PyTorch derives the sizes of each operation as
# formulas (by sympy).
@pytest.mark.parametrize('name', ['one stage', 'column'])
def test_compiled_once_for_all_sizes(name):
    """No graph break, and no new graph from size to size; a batch of one is a graph of its own."""
    model = randomize(MODELS[name]()).eval()
    compiled, graphs = compiled_into_graphs(model)
    assert_same(model, compiled)
    if PINNED_TORCH:  # PyTorch 2.7 makes a third one for the columnar model
        assert len(graphs) <= 2


def test_a_compiled_model_has_no_mask_where_no_window_needs_one():
    """`torch.compile` may specialize sizes: at 224 x 224 all windows are whole."""
    model, graphs = compiled_into_graphs(CPVTPyramid(TINY_SVT, out_indices=(0,)).eval(), False)
    with torch.no_grad():
        model(torch.randn(1, 3, 224, 224))
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if 'scaled_dot_product' in str(node.target)]
    assert calls and all(node.args[3] is None for node in calls)
