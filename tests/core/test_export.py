"""Captured graphs are right at sizes that they were not captured at. Elsewhere a conditional pad
bakes "no pad" in, and other sizes come out in the wrong shape without an error."""

import pytest
import torch
from reference import same_maps
from support import PINNED_TORCH

from benchmarks.models.ports import randomize
from cpvt_pyramid import Arch, CPVTPyramid, DenseCPVT
from cpvt_pyramid.archs import ColumnarArch

SIZES = [(1, 3, 64, 64), (3, 3, 70, 45), (2, 3, 128, 128), (2, 3, 33, 129)]
NAMED = dict(batch=1, height=33, width=33)  # below, an image may have one key
# More stages are captured in the same way and take longer; `tests/export` has whole models.
TWO_STAGES = Arch((32, 64), (1, 2), (4, 4), (1, 1), sr_ratios=(8, 1))
MODELS = {
    'pcpvt': lambda **options: CPVTPyramid(TWO_STAGES, out_indices=(0, 1), **options),
    'learned': lambda: MODELS['pcpvt'](position='learned', pretrain_img_size=64),
    'column': lambda: DenseCPVT(ColumnarArch(16, 2, 2)),
}


def assert_same(model, graph):
    with torch.no_grad():
        for size in SIZES:
            image = torch.randn(size)
            same_maps(graph(image), model(image), rtol=1e-4, atol=1e-5)


def whole_functions(graph):
    """Functions of the package that are one operator of a graph."""
    names = [str(node.target) for node in graph.graph.nodes]
    return {name.split('.')[1] for name in names if name.startswith('cpvt_pyramid.')}


@pytest.mark.parametrize('name', MODELS)
def test_torch_export(name):
    model = randomize(MODELS[name]()).eval()
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    with torch.no_grad():
        graph = torch.export.export(model, (torch.randn(2, 3, 75, 90),), dynamic_shapes=(sizes,))
    assert_same(model, graph.module())
    assert not whole_functions(graph)


@pytest.mark.skipif(not PINNED_TORCH, reason='the guards of torch.export differ')
def test_sizes_by_named_dimensions_of_a_padded_batch():
    """Views of a mask made torch.export refuse names; it then takes `Dim.DYNAMIC` alone, as it does
    for windows (SVT) and for `DenseCPVT`."""
    model = randomize(CPVTPyramid(TWO_STAGES, out_indices=(0,))).eval()
    batch, height, width = (torch.export.Dim(name, min=low) for name, low in NAMED.items())
    valid = torch.tensor([[60, 70], [75, 90]])
    shapes = ({0: batch, 2: height, 3: width}, {0: batch})
    with torch.no_grad():
        inputs = torch.randn(2, 3, 75, 90), valid
        graph = torch.export.export(model, inputs, dynamic_shapes=shapes).module()
        image = torch.randn(3, 3, 64, 97)
        valid = torch.tensor([[64, 50], [33, 97], [1, 1]])
        same_maps(graph(image, valid), model(image, valid), rtol=1e-4, atol=1e-5)


def compiled_into_graphs(model):
    graphs = []
    torch._dynamo.reset()
    backend = lambda graph, _inputs: graphs.append(graph) or graph  # noqa: E731
    return torch.compile(model, backend=backend, dynamic=True, fullgraph=True), graphs


@pytest.mark.parametrize('name', ['pcpvt', 'column'])
def test_compiled_once_for_all_sizes(name):
    """No graph break, and no new graph from size to size; a batch of one is a graph of its own."""
    model = randomize(MODELS[name]()).eval()
    compiled, graphs = compiled_into_graphs(model)
    assert_same(model, compiled)
    if PINNED_TORCH:  # PyTorch 2.7 makes a third one for the columnar model
        assert len(graphs) <= 2


@pytest.mark.parametrize('infers', [True, False])
def test_compiled_for_inference_on_a_cpu_keeps_functions_whole(infers):
    """In training they are taken apart: as operators they have no gradient."""
    model, graphs = compiled_into_graphs(MODELS['pcpvt']())
    with torch.set_grad_enabled(not infers):
        model(torch.randn(1, 3, 64, 96))
    (graph,) = graphs
    whole = {'attend', 'convolve', 'fused_mlp', 'layer_norm', 'linear', 'patch_conv'}
    if PINNED_TORCH or not infers:  # PyTorch 2.7 traces through them: as exact, but slower
        assert whole_functions(graph) == (whole if infers else set())
