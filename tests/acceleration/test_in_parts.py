"""Convolution MLPs and windows that are computed in parts: what a plain layer computes."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention_formula, mask_of_some
from torch import nn

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import attention, conv_mlp, products, windows
from cpvt_pyramid.acceleration.attention import PartsOfAttention
from cpvt_pyramid.acceleration.conv_mlp import FusedConvMLP
from cpvt_pyramid.acceleration.ordinary import is_supported
from cpvt_pyramid.grid import Grid, grid_of_windows
from cpvt_pyramid.model import MLP, ConvMLP, WindowAttention
from cpvt_pyramid.padding.mask import Padding
from tests.models.ours import BACKBONES
from tests.models.ports import randomize

# Those in which oneDNN has products on this processor: not all have them in bfloat16.
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if is_supported(dtype)]

FROZEN = {
    'nothing': lambda name: False,
    'the convolution': lambda name: name.startswith('dwconv'),
    'the linear layers': lambda name: name.startswith('fc'),
    'everything': lambda name: True,
    'biases': lambda name: name.endswith('bias'),
}


def results(mlp, x, padding, noise):
    """What an MLP returns, and the gradients of everything that needs one."""
    grid = Grid(*x.shape[1:3], padding=padding)
    out = mlp(x, grid)
    leaves = [leaf for leaf in (x, *mlp.parameters()) if leaf.requires_grad]
    if not leaves:
        return [out]
    return [out, *torch.autograd.grad(out, leaves, noise)]


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    height=st.integers(1, 19),
    width=st.integers(1, 9),
    at_a_time=st.sampled_from([1, 100, 500, 2000, 10**6]),
    fewest_rows=st.integers(1, 5),
    masked=st.booleans(),
    relu=st.booleans(),
    without_bias=st.booleans(),
    frozen=st.sampled_from(sorted(FROZEN)),
    needs_x=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_convolution_mlps(
    batch,
    height,
    width,
    at_a_time,
    fewest_rows,
    masked,
    relu,
    without_bias,
    frozen,
    needs_x,
    dtype,
):
    # Rounded to the dtype that the fast one has: else a ReLU could see values of another sign.
    plain = randomize(ConvMLP(8, 32, relu=relu)).to(dtype).float()
    if without_bias:
        for layer in (plain.fc1, plain.dwconv, plain.fc2):
            layer.bias = None
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    fast = accelerate(copy.deepcopy(plain).to(dtype))
    assert type(fast) is FusedConvMLP
    padding = None
    if masked:
        sizes = torch.stack([torch.randint(n + 1, (batch,)) for n in (height, width)], 1)
        padding = Padding.of_batch(torch.empty(batch, 3, height, width), sizes)
    x = torch.randn(batch, height, width, 8).to(dtype).float().requires_grad_(needs_x)
    fast_x = x.detach().to(dtype).requires_grad_(needs_x)
    noise = torch.randn(x.shape).to(dtype).float()
    expected = results(plain, x, padding, noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_mlp, 'AT_A_TIME', at_a_time)
        patch.setattr(conv_mlp, 'FEWEST_ROWS', fewest_rows)
        found = results(fast, fast_x, padding, noise.to(dtype))
        with torch.no_grad():
            found.append(fast(fast_x, Grid(height, width, padding=padding)))
    expected.append(expected[0])
    for a, b in zip(found, expected):
        assert a.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item() + 1e-6)
        else:
            assert (a.float() - b).norm() <= 0.05 * b.norm() + 1e-3


def test_gradients_of_many_parts_are_summed_in_float32(monkeypatch):
    """Those of weights in bfloat16: each sum of two of them would round."""
    monkeypatch.setattr(products, 'AT_A_TIME', 64 * 16)
    monkeypatch.setattr(products, 'LARGEST_SAVED', 64 * 16)
    torch.manual_seed(0)
    plain = MLP(8, 64).bfloat16()
    fast = accelerate(copy.deepcopy(plain))
    exact = copy.deepcopy(plain).double()
    x = torch.randn(1, 64, 64, 8).bfloat16()  # 256 parts
    found = []
    for mlp in (plain, fast, exact):
        out = mlp(x.to(mlp.fc1.weight.dtype), Grid(64, 64))
        grads = torch.autograd.grad(out.square().sum(), list(mlp.parameters()))
        found.append([grad.double() for grad in grads])
    for of_plain, of_fast, of_exact in zip(*found):
        error = (of_fast - of_exact).norm()
        assert error <= 1.5 * (of_plain - of_exact).norm() + 1e-3 * of_exact.norm()


def hooked(mlp):
    mlp.dwconv.register_forward_hook(lambda module, given, out: 2 * out)


def derived(mlp):
    mlp.dwconv.__class__ = OtherPeoplesConv


class OtherPeoplesConv(nn.Conv2d):
    def forward(self, x):
        return 3 * super().forward(x)


def wider(mlp):
    mlp.dwconv = randomize(nn.Conv2d(32, 32, 5, padding=2, groups=32))


def dilated(mlp):
    mlp.dwconv = randomize(nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32))


def dense(mlp):
    mlp.dwconv = randomize(nn.Conv2d(32, 32, 3, padding=1))


def replicated(mlp):
    mlp.dwconv = randomize(nn.Conv2d(32, 32, 3, padding=1, groups=32, padding_mode='replicate'))


@pytest.mark.parametrize('change', [hooked, derived, wider, dilated, dense, replicated])
def test_other_convolutions_are_called(change):
    """Also those that are changed or put in after the model was accelerated."""
    plain = randomize(ConvMLP(8, 32))
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(2, 7, 5, 8)
    for mlp in (plain, fast):
        torch.manual_seed(0)
        change(mlp)
    torch.testing.assert_close(fast(x, Grid(7, 5)), plain(x, Grid(7, 5)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('window_padding', ['mask', 'zero', 'mmseg'])
@settings(deadline=None, max_examples=30)
@given(
    height=st.integers(1, 14),
    width=st.integers(1, 14),
    batch=st.integers(1, 2),
    padded=st.booleans(),
    fused=st.booleans(),
)
def test_windows(window_padding, height, width, batch, padded, fused):
    plain = randomize(WindowAttention(8, 2, 3, window_padding))
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(batch, height, width, 8)
    padding = None
    if padded:
        sizes = torch.stack([torch.randint(1, n + 1, (batch,)) for n in (height, width)], 1)
        padding = Padding.of_batch(torch.empty(batch, 3, height, width), sizes)
    windows_grid = grid_of_windows(x, padding, 3, window_padding)
    grid = Grid(height, width, padding=padding, windows=windows_grid)
    inside = slice(None) if padding is None else ~padding.outside.bool().expand_as(x)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, 'FEWEST_TOKENS', 0 if fused else math.inf)
        patch.setattr(torch, 'get_num_threads', lambda: 2)
        found = fast(x, grid)[inside]
        torch.testing.assert_close(found, plain(x, grid)[inside], rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 5),
    queries=st.integers(1, 40),
    keys=st.integers(1, 20),
    masked=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    at_a_time=st.sampled_from([50, 1000, 10**6]),
)
def test_attention_and_its_gradients(batch, heads, queries, keys, masked, dtype, at_a_time):
    """Some heads at a time where they are small, else some queries of one."""
    q = torch.randn(batch, queries, heads, 8).to(dtype).requires_grad_()
    kv = torch.randn(batch, keys, 2, heads, 8).to(dtype).requires_grad_()
    noise = torch.randn(batch, queries, heads, 8).to(dtype)
    bias = mask_of_some(batch, keys).to(dtype) if masked else None

    def results(attention, *tensors):
        q, kv, *others = tensors
        k, v = kv.transpose(1, 3).unbind(2)
        out = attention(q.transpose(1, 2), k, v, *others)
        return [out, *torch.autograd.grad(out, (q, kv), noise.to(out.dtype))]

    def formula(*tensors):
        return attention_formula(*tensors).transpose(1, 2)

    exact = [x.detach().double().requires_grad_() for x in (q, kv)]
    expected = results(formula, *exact, None if bias is None else bias.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, 'SCORES_AT_A_TIME', at_a_time)
        found = results(PartsOfAttention.apply, q, kv, bias)
    for a, b in zip(found, expected):
        assert a.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
        else:
            assert (a.double() - b).norm() <= 0.02 * b.norm() + 1e-3


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason='oneDNN has no products in bfloat16')
@pytest.mark.parametrize('name', ['svt', 'pvt_v2'])
def test_gradients_in_bfloat16_are_products(name, monkeypatch):
    """On any processor: in windows PyTorch's fused kernel takes most of a training step."""
    monkeypatch.setattr(attention, 'is_worth_products', lambda q, k: True)
    monkeypatch.setattr(windows, 'FEWEST_IN_WINDOW', 1)
    model = accelerate(BACKBONES[name]().bfloat16().train())
    image = torch.randn(1, 3, 64, 64).bfloat16()
    with torch.profiler.profile() as profile:
        sum(x.sum() for x in model(image)).backward()
    called = {event.key for event in profile.key_averages()}
    assert 'PartsOfAttentionBackward' in called
    assert not any('flash_attention' in name and 'backward' in name for name in called)
