"""Which version of an operation runs, and how a user selects the plain ones."""

import importlib.util
import os
from types import ModuleType
from unittest import mock

import pytest
import torch
from reference import TINY_SVT, same_maps

import cpvt_pyramid
from benchmarks.models.ports import randomize
from cpvt_pyramid import CPVTPyramid, ops
from cpvt_pyramid.ops import dispatch

OURS = ('_LinearBackward', '_MLPBackward', '_PatchConvBackward', '_AttentionBackward')


def nodes_of(loss: torch.Tensor) -> set[str]:
    """The names of the functions in a graph of autograd."""
    seen, queue = set(), [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [parent for parent, _ in node.next_functions]
    return {node.name() for node in seen}


def step(model: CPVTPyramid) -> tuple[set[str], set[str]]:
    """Functions of ours in the graph of a training step, and operators of oneDNN in inference."""
    image = torch.randn(1, 3, 64, 64)
    names = nodes_of(sum(x.sum() for x in model(image)))
    with torch.no_grad(), torch.profiler.profile() as profiler:
        model(image)
    private = {e.key for e in profiler.key_averages() if e.key.startswith('mkldnn::')}
    return {n for n in names if n.startswith(OURS)}, private


@pytest.mark.parametrize('arch', ['pcpvt_nano', TINY_SVT], ids=['pcpvt', 'svt'])
def test_plain_is_pytorchs_public_functions(arch):
    model = CPVTPyramid(arch)
    assert all(step(model))
    with ops.plain():
        assert step(model) == (set(), set())
        with ops.plain(False):
            assert all(step(model))
        assert ops.dispatch.plain_selected()
    assert all(step(model))
    with pytest.raises(RuntimeError, match='mine'), ops.plain():
        raise RuntimeError('mine')
    assert all(step(model))


def test_without_the_private_operator():
    """As in a PyTorch that does not have it, or was built without oneDNN."""
    model = randomize(CPVTPyramid('pcpvt_nano'))
    image = torch.randn(1, 3, 64, 64)
    maps = model(image)
    with mock.patch.object(dispatch, 'HAS_ONEDNN_LINEAR', False):
        _, private = step(model)
        assert not private
        same_maps(model(image), maps)


def test_plain_holds_in_the_recomputation_of_a_checkpoint():
    """The backward pass may run outside of the context."""
    grads = []
    for _ in range(2):
        model = randomize(CPVTPyramid('pcpvt_nano', with_cp=True))
        with ops.plain():
            loss = sum(x.square().sum() for x in model(torch.ones(1, 3, 64, 64)))
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def with_torch(version: str) -> ModuleType:
    """The module `dispatch` as an older torch would import it."""
    spec = importlib.util.spec_from_file_location('dispatch', dispatch.__file__)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(torch, '__version__', version):
        spec.loader.exec_module(module)
    return module


def test_the_environment_selects_plain():
    for value in '10':
        with mock.patch.dict(os.environ, CPVT_PLAIN_OPS=value):
            assert with_torch(torch.__version__).plain_selected() == (value == '1')


def test_older_torch():
    older = with_torch('2.1.2+cpu')
    with older.plain(False):
        assert older.use_plain()
    assert older.opaque_when_compiled(None)(len) is len and not older.graph_is_exported()
    older.require_torch((2, 1), 'this')
    with pytest.raises(ImportError, match='^that needs torch 2.4 or newer, found .*; pip install '):
        older.require_torch((2, 4), 'that')
    # One that is too old is named, in place of "cannot import name".
    with pytest.raises(ImportError, match=r'cpvt_pyramid needs torch 2.1 .*, found 1.13.1\+cu'):
        with_torch('1.13.1+cu117')
    error = AttributeError("module 'torch' has no attribute 'compiler'")
    with mock.patch.object(cpvt_pyramid, 'import_module', side_effect=error):
        with pytest.raises(ImportError, match="CPVTPyramid cannot be imported: module 'torch' has"):
            from cpvt_pyramid import CPVTPyramid  # noqa: F401
