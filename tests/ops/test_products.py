"""Linear layers and MLP against their formulas, with their gradients and what is kept for them; and
where oneDNN does their products."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import kept
from torch.utils.flop_counter import FlopCounterMode

from cpvt_pyramid.ops import attend, attention, dispatch, patch_conv, products
from cpvt_pyramid.ops.products import fused_mlp


def plain_linear(x, weight, bias):
    return x @ weight.t() + bias


def plain_mlp(x, weight1, bias1, weight2, bias2):
    hidden = plain_linear(x, weight1, bias1)
    return plain_linear(hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5)), weight2, bias2)


def operands(tokens, sizes, dtype=torch.float32):
    """Tokens of the first size and, for each step to the next, a weight and a bias."""
    out = [torch.randn(*tokens, sizes[0], dtype=dtype)]
    for ci, co in zip(sizes, sizes[1:]):
        out += [torch.randn(co, ci, dtype=dtype) / ci**0.5, torch.randn(co, dtype=dtype)]
    return [x.requires_grad_() for x in out]


FUNCTIONS = {'linear': (products.linear, plain_linear, 2), 'mlp': (fused_mlp, plain_mlp, 3)}


@pytest.mark.parametrize('name', FUNCTIONS)
@settings(deadline=None, max_examples=30)
@given(
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    at_a_time=st.sampled_from([products.AT_A_TIME, 1, 100]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_torch(name, tokens, sizes, at_a_time, dtype):
    torch.manual_seed(0)  # what hypothesis finds must fail again
    ours, plain, layers = FUNCTIONS[name]
    inputs = operands(tokens, sizes[:layers], dtype)
    assert dispatch.use_onednn(inputs[0]) == (dtype == torch.float32)
    grad = torch.randn(*tokens, sizes[layers - 1], dtype=dtype)
    results = []
    with mock.patch.object(products, 'AT_A_TIME', at_a_time):
        for function in (ours, plain):
            out = function(*inputs)
            results.append([out, *torch.autograd.grad(out, inputs, grad)])
            with torch.no_grad():
                results[-1].append(function(*inputs))
    # Gradients of weights are sums over up to 729 tokens of values of both signs.
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('function', [attend, fused_mlp, products.linear, patch_conv])
def test_gradients_of_gradients_are_refused(function, monkeypatch):
    """Not silently wrong. Plain operations have them."""
    monkeypatch.setattr(attention, 'WORTH_ONEDNN', 1)
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    inputs = (x, x, x, None, 0.0) if function is attend else operands((2, 4), (4, 4, 4))
    inputs = (x, torch.randn(3, 4, 2, 2), torch.ones(3)) if function is patch_conv else inputs
    inputs = inputs[:3] if function is products.linear else inputs
    with pytest.raises(RuntimeError, match='gradients of gradients need .*plain'):
        torch.autograd.grad(function(*inputs).sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize('at_a_time', [products.AT_A_TIME, 20])
@pytest.mark.parametrize('trains', [0, 1, 2, 3, 4])
def test_what_is_frozen_gets_no_gradient(monkeypatch, trains, at_a_time):
    monkeypatch.setattr(products, 'AT_A_TIME', at_a_time)
    inputs = operands((7,), (5, 6, 4))
    for i, x in enumerate(inputs):
        x.requires_grad_(i == trains)
    fused_mlp(*inputs).sum().backward()
    (expected,) = torch.autograd.grad(plain_mlp(*inputs).sum(), [inputs[trains]])
    torch.testing.assert_close(inputs[trains].grad, expected, rtol=1e-4, atol=1e-5)
    assert all(x.grad is None for i, x in enumerate(inputs) if i != trains)


@pytest.mark.parametrize('slow', [False, True], ids=['fast-MKL', 'slow-MKL'])
@pytest.mark.parametrize('sides', [(5, 9), (9, 5), (5, 5)])
def test_gradients_of_weights(monkeypatch, sides, slow):
    """As parameters lie, so that autograd need not copy them, unless that would be slower."""
    monkeypatch.setattr(products, 'MKL_IS_SLOW', slow)
    grad, x = (torch.randn(2, 7, side) for side in sides)
    found = products.summed_outer(grad, x)
    torch.testing.assert_close(found, torch.einsum('abo,abi->oi', grad, x))
    assert found.is_contiguous() == (not slow or sides != (9, 5))


def values_kept(function, *inputs):
    """How many values are kept for the gradient, beside the inputs."""
    storages = [x.untyped_storage() for x in kept(function, *inputs)]
    assert storages
    own = {x.untyped_storage().data_ptr() for x in inputs}
    beside = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in own}
    return sum(beside.values()) // inputs[0].itemsize


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_training_keeps_the_hidden_map_once(dtype, monkeypatch):
    """The output of the GELU is as large as its input, and autograd would keep both. With oneDNN a
    large one is not kept at all."""
    inputs = operands((100,), (8, 64, 8), dtype)
    assert values_kept(fused_mlp, *inputs) == 100 * 64
    assert values_kept(products.plain_mlp, *inputs) == 2 * 100 * 64
    monkeypatch.setattr(products, 'AT_A_TIME', 50 * 64)
    assert values_kept(fused_mlp, *inputs) == (0 if dtype == torch.float32 else 100 * 64)


@pytest.mark.parametrize('name', FUNCTIONS)
def test_autocast(name):
    ours, _, layers = FUNCTIONS[name]
    torchs = {'linear': F.linear, 'mlp': products.plain_mlp}[name]
    inputs = operands((9,), (8, 16, 8)[:layers])
    grad = torch.randn(9, inputs[-1].shape[0])
    results = []
    for function in (ours, torchs):
        with torch.autocast('cpu', torch.bfloat16):
            out = function(*inputs)
        assert out.dtype == torch.bfloat16
        results.append([out, *torch.autograd.grad(out, inputs, grad.bfloat16())])
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
    with torch.autocast('cpu', torch.bfloat16):
        assert ours(*operands((9,), (8, 16, 8)[:layers], torch.float64)).dtype == torch.float64


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason='oneDNN needs AVX-512 for bfloat16'
)
def test_bfloat16_gets_its_gelu_in_the_product():
    inputs = [x.detach() for x in operands((9,), (8, 16, 8), torch.bfloat16)]
    slow = products.plain_mlp(*(x.float() for x in inputs))
    for supported in (True, False):
        with torch.no_grad(), torch.profiler.profile() as profiler:
            with mock.patch.object(dispatch, 'MULTIPLIES_BFLOAT16', supported):
                found = fused_mlp(*inputs)
        torch.testing.assert_close(found.float(), slow, rtol=0.02, atol=0.1)  # of sums up to 16
        operators = {event.key for event in profiler.key_averages()}
        assert ('aten::gelu_' in operators) == (not supported)


def test_other_types_and_modes_are_torchs():
    x, weight, bias = (t.detach() for t in operands((3,), (4, 4)))
    assert dispatch.use_onednn(x)
    assert not dispatch.use_onednn(x.double())
    assert not dispatch.use_onednn(x.bfloat16())
    assert not dispatch.use_onednn(x.to('meta'))
    assert not dispatch.use_onednn(x[:0])
    with torch.autocast('cpu', torch.bfloat16):
        assert products.linear(x, weight, bias).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert not dispatch.use_onednn(x)
    with FlopCounterMode(display=False) as counter:
        products.linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 3 * 4 * 4
    traced = torch.jit.trace(products.linear, (x, weight, bias))
    assert 'aten::linear' in str(traced.graph)


@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.parametrize('trains', [False, True])
def test_a_product_of_two_dtypes_is_torchs_error(name, trains):
    """As of an image in float32 and a model in bfloat16."""
    function, _, layers = FUNCTIONS[name]
    x, *weights = operands((3,), (4, 5, 6)[:layers])
    with torch.set_grad_enabled(trains), pytest.raises(RuntimeError, match='same dtype'):
        function(x, *(weight.bfloat16() for weight in weights))
