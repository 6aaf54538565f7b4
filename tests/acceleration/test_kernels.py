"""The functions of kernels.cpp: what their formulas say, on every processor that has AVX2."""

import copy
import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_attention_near, attention_formula, random_attention
from support import in_processes
from torch import nn

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import kernels, library
from cpvt_pyramid.acceleration.attention import forward_attention
from cpvt_pyramid.acceleration.kernels import (
    Depthwise,
    KeyLayers,
    Linear,
    Norm,
    NormAndMLP,
    fast_attention,
    fast_convolve_add,
    fast_convolve_gelu,
    fast_embed_patches,
    fast_join_patches,
    fast_layer_norm,
    fast_split_patches,
    has_kernels,
    has_products,
    multiplies_tiles,
    prepare_conv_mlp,
    prepare_global_attention,
    prepare_keys_of_patches,
    prepare_mlp,
    prepare_window_attention,
)
from cpvt_pyramid.acceleration.patches import join_patches, split_patches
from cpvt_pyramid.acceleration.processor import has_avx512
from cpvt_pyramid.grid import Grid, grid_of_windows
from cpvt_pyramid.layers import LayerNorm
from cpvt_pyramid.model import WindowAttention

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if has_kernels(dtype)]
# In how many ways products are computed on this processor: with floats, in bfloat16 with floats,
# with pairs and, where there is AMX, with tiles.
PRODUCTS = [
    (dtype, products)
    for dtype in DTYPES
    for products in ('floats', 'pairs', 'tiles')
    if products == 'floats' or dtype == torch.bfloat16
    if products != 'tiles' or multiplies_tiles()
]
# Channels that are multiplied at once.
TOGETHER = dict(floats=1, pairs=2, tiles=32)
needs_kernels = pytest.mark.skipif(not DTYPES, reason='the kernels need AVX2 and a compiler')


def multiply(patch, products):
    """Let the functions multiply floats, pairs or tiles."""
    patch.setattr(kernels, 'multiplies_pairs', lambda: products == 'pairs')
    patch.setattr(kernels, 'multiplies_tiles', lambda: products == 'tiles')


@needs_kernels
@settings(deadline=None, max_examples=80)
@given(
    rows=st.integers(1, 40),
    channels=st.integers(1, 150),
    threads=st.integers(1, 5),
    mean=st.sampled_from([0, 3, -50]),
    dtype=st.sampled_from(DTYPES or [None]),
    seed=st.integers(0, 2**31),
)
def test_layer_norm(rows, channels, threads, mean, dtype, seed):
    torch.manual_seed(seed)
    x = (torch.randn(rows, channels) + mean).to(dtype)
    weight = torch.randn(channels)
    bias = torch.randn(channels)
    eps = 0.1
    exact = F.layer_norm(x.double(), (channels,), weight.double(), bias.double(), eps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        found = fast_layer_norm(x, Norm(weight, bias, eps))
    rounding = torch.finfo(dtype).eps * exact.abs() + 2e-6 * (1 + abs(mean))
    assert ((found.double() - exact).abs() <= rounding).all()
    one_by_one = torch.cat([fast_layer_norm(row[None], Norm(weight, bias, eps)) for row in x])
    assert torch.equal(found, one_by_one)


@needs_kernels
@pytest.mark.parametrize('value', [0.1, 3.3, 1234.567, 1e5])
@pytest.mark.parametrize('channels', [50, 320, 512, 5000])
def test_layer_norms_of_large_values_that_differ_little(channels, value):
    norm = Norm(torch.ones(channels), torch.zeros(channels), 1e-6)
    equal = torch.full((9, channels), value)
    assert not fast_layer_norm(equal, norm).any()
    torch.manual_seed(0)
    near = equal + 1e-3 * value * torch.randn(9, channels)
    exact = F.layer_norm(near.double(), (channels,), eps=1e-6)
    by_torch = F.layer_norm(near, (channels,), eps=1e-6)
    error = (fast_layer_norm(near, norm) - exact).abs().max()
    assert error <= 1.5 * (by_torch - exact).abs().max()


@needs_kernels
@settings(deadline=None, max_examples=120)
@given(
    images=st.integers(1, 3),
    heads=st.integers(1, 3),
    queries=st.integers(1, 60),
    keys=st.integers(1, 90),
    channels=st.integers(1, 80) | st.sampled_from([32, 64]),  # these fill panels
    masked=st.booleans(),
    threads=st.integers(1, 5),
    scale=st.sampled_from([0.1, 1, 20]),
    how=st.sampled_from(PRODUCTS or [(None, None)]),
    seed=st.integers(0, 2**31),
)
def test_attention(images, heads, queries, keys, channels, masked, threads, scale, how, seed):
    dtype, products = how
    together = TOGETHER[products]
    channels = math.ceil(channels / together) * together
    torch.manual_seed(seed)
    rows, bias, exact = random_attention(
        images, heads, queries, keys, channels, masked, dtype, scale
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        multiply(patch, products)
        found = fast_attention(*rows, bias)
    assert_attention_near(found, exact, rows[2] * max(scale, 1))  # large scores round more
    for i in range(images):
        image = slice(i, i + 1)
        image_bias = None if bias is None else bias[image]
        with pytest.MonkeyPatch.context() as patch:
            multiply(patch, products)
            alone = fast_attention(*[x[image] for x in rows], image_bias)
        assert torch.equal(alone, found[image])


@needs_kernels
def random_mlp(channels, width, dtype):
    """Tokens, a layer norm and two linear layers whose values are of the size of 1."""
    return NormAndMLP(
        random_norm(channels),
        random_linear(channels, width, dtype),
        random_linear(width, channels, dtype),
    )


def random_norm(channels, dtype=torch.float32):
    return Norm(torch.randn(channels).to(dtype), torch.randn(channels).to(dtype), 0.1)


def norm_formula(x, norm):
    """In float64; None: x."""
    x = x.double()
    if norm is None:
        return x
    return F.layer_norm(x, x.shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps)


def random_linear(channels, out_channels, dtype):
    """A linear layer whose results are of the size of its input."""
    weight = torch.randn(out_channels, channels) / channels**0.5
    return Linear(weight.to(dtype), torch.randn(out_channels).to(dtype))


def mlp_formula(x, parameters, factors):
    """x + the MLP of the normalized x in float64. Maps that are multiplied are in a dtype."""
    norm, *layers = parameters
    weight1, bias1, weight2, bias2 = [values.double() for layer in layers for values in layer]
    x = x.double()
    normal = norm_formula(x, norm)
    wide = F.gelu(F.linear(normal.to(factors).double(), weight1, bias1))
    return x + F.linear(wide.to(factors).double(), weight2, bias2)


@needs_kernels
@settings(deadline=None, max_examples=120)
@given(
    rows=st.integers(1, 150) | st.just(1500),  # more than a part
    channels=st.integers(1, 80) | st.sampled_from([32, 64, 96]),  # these fill panels and tiles
    width=st.integers(1, 300) | st.sampled_from([32, 128, 160, 256]),
    threads=st.integers(1, 5),
    how=st.sampled_from(PRODUCTS or [(None, None)]),
    seed=st.integers(0, 2**31),
)
def test_mlps(rows, channels, width, threads, how, seed):
    dtype, products = how
    together = TOGETHER[products]
    channels, width = [math.ceil(count / together) * together for count in (channels, width)]
    torch.manual_seed(seed)
    x = torch.randn(rows, channels).to(dtype)
    attended = torch.randn(rows, channels).to(dtype)
    parameters = random_mlp(channels, width, dtype)
    factors = torch.float32 if products == 'floats' else torch.bfloat16
    exact = mlp_formula(x + attended, parameters, factors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        multiply(patch, products)
        found = prepare_mlp(x, attended, parameters).run()
        for part in (slice(1), slice(rows // 2, rows)):
            assert torch.equal(prepare_mlp(x[part], attended[part], parameters).run(), found[part])
    # Values between two of the factors' dtype may be rounded to either.
    roundings = 30 if has_avx512() else 60  # the GELU of AVX2 rounds more
    rounding = torch.finfo(dtype).eps * exact.abs() + roundings * torch.finfo(torch.float32).eps
    if factors != torch.float32:
        rounding += 10 * torch.finfo(factors).eps / min(channels, width) ** 0.5
    assert ((found.double() - exact).abs() <= rounding).all()


def conv_mlp_formula(x, layers, kernel, kernel_bias, relu, outside, factors):
    """As `mlp_formula`, with a convolution before the GELU."""
    norm, *linear = layers
    weight1, bias1, weight2, bias2 = [values.double() for layer in linear for values in layer]
    x = x.double()
    normal = norm_formula(x, norm)
    wide = F.linear(normal.to(factors).double(), weight1, bias1)
    wide = wide.relu() if relu else wide
    wide = wide if outside is None else wide.masked_fill(outside, 0)
    wide = convolution_formula(wide.to(factors).double(), kernel.double(), kernel_bias)
    activated = F.gelu(wide).to(factors).double()
    return x + F.linear(activated, weight2, bias2)


@needs_kernels
@settings(deadline=None, max_examples=120)
@given(
    images=st.integers(1, 3),
    height=st.integers(1, 14),
    map_width=st.integers(1, 70) | st.just(500),  # of which a part has one row
    channels=st.integers(1, 40) | st.sampled_from([32, 64]),
    width=st.integers(1, 150) | st.sampled_from([64, 160]),
    relu=st.booleans(),
    masked=st.booleans(),
    threads=st.integers(1, 5),
    how=st.sampled_from(PRODUCTS or [(None, None)]),
    seed=st.integers(0, 2**31),
)
def test_conv_mlps(images, height, map_width, channels, width, relu, masked, threads, how, seed):
    dtype, products = how
    together = TOGETHER[products]
    channels, width = [math.ceil(count / together) * together for count in (channels, width)]
    torch.manual_seed(seed)
    x = torch.randn(images, height, map_width, channels).to(dtype)
    attended = torch.randn(x.shape).to(dtype)
    layers = random_mlp(channels, width, dtype)
    kernel = (torch.randn(width, 1, 3, 3) / 3).to(dtype)
    bias = torch.randn(width).to(dtype)
    outside = torch.rand(images, height, map_width, 1) < 0.3 if masked else None
    factors = torch.float32 if products == 'floats' else torch.bfloat16
    exact = conv_mlp_formula(x + attended, layers, kernel, bias, relu, outside, factors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        multiply(patch, products)
        found = prepare_conv_mlp(x, attended, layers, Depthwise(kernel, bias), relu, outside).run()
        last = None if outside is None else outside[-1:]
        conv = Depthwise(kernel, bias)
        alone = prepare_conv_mlp(x[-1:], attended[-1:], layers, conv, relu, last).run()
    assert torch.equal(alone, found[-1:])
    rounding = torch.finfo(dtype).eps * exact.abs() + 60 * torch.finfo(torch.float32).eps
    if factors != torch.float32:
        rounding += 12 * torch.finfo(factors).eps / min(channels, width) ** 0.5
    assert ((found.double() - exact).abs() <= rounding).all()


@needs_kernels
@pytest.mark.parametrize('row', [0, 1, 4, 9])
@pytest.mark.parametrize('how', PRODUCTS, ids=str)
def test_a_conv_mlp_changes_only_the_tokens_around(how, row, monkeypatch):
    """NaN reaches 3 x 3 tokens, though the convolution multiplies two rows at once."""
    dtype, products = how
    multiply(monkeypatch, products)
    torch.manual_seed(0)
    x = torch.randn(2, 10, 7, 64).to(dtype)
    parameters = random_mlp(64, 128, dtype)
    kernel = torch.randn(128, 1, 3, 3).to(dtype)
    bias = torch.randn(128).to(dtype)
    attended = torch.zeros_like(x)
    expected = prepare_conv_mlp(x, attended, parameters, Depthwise(kernel, bias)).run()
    x[0, row, 3, 5] = math.nan
    found = prepare_conv_mlp(x, attended, parameters, Depthwise(kernel, bias)).run()
    near = torch.zeros(x.shape[:3], dtype=torch.bool)
    near[0, max(row - 1, 0) : row + 2, 2:5] = True
    assert found[near].isnan().all()
    assert torch.equal(found[~near], expected[~near])


@needs_kernels
@pytest.mark.parametrize('value', [math.nan, math.inf, 3e38])
@pytest.mark.parametrize('how', PRODUCTS, ids=str)
def test_an_mlp_changes_no_other_token(how, value, monkeypatch):
    dtype, products = how
    multiply(monkeypatch, products)
    torch.manual_seed(0)
    x = torch.randn(70, 64).to(dtype)
    parameters = random_mlp(64, 128, dtype)
    attended = torch.zeros_like(x)
    expected = prepare_mlp(x, attended, parameters).run()
    x[33, 5] = value
    found = prepare_mlp(x, attended, parameters).run()
    others = torch.arange(70) != 33
    assert torch.equal(found[others], expected[others])
    assert value == 3e38 or found[33].isnan().all()


@needs_kernels
@pytest.mark.parametrize('wrong', range(6))
def test_an_mlp_with_parameters_that_do_not_fit(wrong):
    norm, fc1, fc2 = random_mlp(64, 128, torch.float32)
    values = [*norm[:2], *fc1, *fc2]
    values[wrong] = torch.randn(3, 3)
    layers = NormAndMLP(Norm(*values[:2], norm.eps), Linear(*values[2:4]), Linear(*values[4:]))
    with pytest.raises(ValueError, match='shape'):
        prepare_mlp(torch.randn(5, 64), torch.randn(5, 64), layers)


@needs_kernels
@pytest.mark.parametrize('compiled', [False, True])
def test_where_there_is_amx(compiled, monkeypatch):
    """PyTorch's functions use it with any number of channels, and by any compiler."""
    monkeypatch.setattr(kernels, 'has_amx', lambda: True)
    monkeypatch.setattr(kernels, 'multiplies_tiles', lambda: compiled)
    assert has_products(torch.float32, 40)
    if has_kernels(torch.bfloat16):
        assert not has_products(torch.bfloat16, 64, 40)
        assert has_products(torch.bfloat16, 64, 32) == compiled


def linear_formula(x, layer):
    return F.linear(x.double(), layer.weight.double(), layer.bias.double())


def by_head(x, heads):
    """Tokens (B, ..., C) as (B, heads, N, d)."""
    return x.flatten(1, -2).unflatten(2, (heads, -1)).transpose(1, 2)


def rounded(x, products):
    """Values in float64, as factors of products in bfloat16 hold them."""
    return x if products == 'floats' else x.to(torch.bfloat16).double()


def assert_near(found, exact, products):
    """Errors are those of sums of values of the size of 1, and of the roundings before them."""
    size = exact.abs().max()
    allowed = 0.03 if found.dtype == torch.bfloat16 or products != 'floats' else 3e-6
    assert (found.double() - exact).abs().max() <= allowed * size


LAYERS = dict(
    images=st.integers(1, 3),
    heads=st.integers(1, 3),
    channels=st.integers(1, 40) | st.sampled_from([32, 64]),  # of a head
    norm=st.sampled_from([None, 'in float32', 'in the dtype of the tokens']),
    masked=st.booleans(),
    threads=st.integers(1, 4),
    how=st.sampled_from(PRODUCTS or [(None, None)]),
    seed=st.integers(0, 2**31),
)


@needs_kernels
@settings(deadline=None, max_examples=100)
@given(
    height=st.integers(1, 16) | st.just(40),
    width=st.integers(1, 16) | st.just(40),
    window=st.integers(1, 8) | st.just(50),
    **LAYERS,
)
def test_windows(images, heads, channels, norm, masked, threads, how, seed, height, width, window):
    """Those at the border are smaller."""
    dtype, products = how
    channels = math.ceil(channels / TOGETHER[products]) * TOGETHER[products]
    torch.manual_seed(seed)
    dim = heads * channels
    x = torch.randn(images, height, width, dim).to(dtype)
    qkv, proj = random_linear(dim, 3 * dim, dtype), random_linear(dim, dim, dtype)
    norm = norm and random_norm(dim, torch.float32 if norm == 'in float32' else dtype)
    bias = None
    if masked:
        bias = torch.where(torch.rand(images, height, width) < 0.4, -30_000.0, 0.0)
        bias[:, ::window, ::window] = 0  # no window is all padding
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        multiply(patch, products)
        found = prepare_window_attention(x, norm, qkv, proj, heads, window, bias).run()
        last = None if bias is None else bias[-1:]
        alone = prepare_window_attention(x[-1:], norm, qkv, proj, heads, window, last).run()
    assert torch.equal(alone, found[-1:])
    normal = rounded(norm_formula(x, norm), products)
    tokens = rounded(linear_formula(normal, qkv), products).chunk(3, -1)
    attended = torch.empty_like(x, dtype=torch.double)
    for top in range(0, height, window):
        for left in range(0, width, window):
            part = (slice(None), slice(top, top + window), slice(left, left + window))
            hidden = None if bias is None else bias[part].flatten(1)
            result = attention_formula(*[by_head(t[part], heads) for t in tokens], hidden)
            attended[part] = result.transpose(1, 2).reshape(attended[part].shape)
    assert_near(found, linear_formula(rounded(attended, products), proj), products)


@needs_kernels
@settings(deadline=None, max_examples=100)
@given(
    height=st.integers(1, 12) | st.just(90),
    width=st.integers(1, 12) | st.just(90),  # more than a part
    keys=st.integers(1, 90),
    **LAYERS,
)
def test_attention_to_the_keys_of_an_image(
    images, heads, channels, norm, masked, threads, how, seed, height, width, keys
):
    dtype, products = how
    channels = math.ceil(channels / TOGETHER[products]) * TOGETHER[products]
    torch.manual_seed(seed)
    dim = heads * channels
    x = torch.randn(images, height, width, dim).to(dtype)
    kv = torch.randn(images, keys, 2 * dim).to(dtype)
    q, proj = random_linear(dim, dim, dtype), random_linear(dim, dim, dtype)
    norm = norm and random_norm(dim, torch.float32 if norm == 'in float32' else dtype)
    bias = None
    if masked:
        bias = torch.where(torch.rand(images, keys) < 0.4, -30_000.0, 0.0)
        bias[:, 0] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        multiply(patch, products)
        found = prepare_global_attention(x, norm, kv, q, proj, heads, bias).run()
        last = None if bias is None else bias[-1:]
        alone = prepare_global_attention(x[-1:], norm, kv[-1:], q, proj, heads, last).run()
    assert torch.equal(alone, found[-1:])
    normal = rounded(norm_formula(x, norm), products)
    queries = by_head(rounded(linear_formula(normal, q), products), heads)
    k, v = [by_head(tokens.double(), heads) for tokens in kv.chunk(2, -1)]
    attended = attention_formula(queries, k, v, bias).transpose(1, 2).reshape(x.shape)
    assert_near(found, linear_formula(rounded(attended, products), proj), products)


@needs_kernels
@pytest.mark.parametrize('wrong', ['first weight', 'first bias', 'proj', 'key bias', 'norm'])
@pytest.mark.parametrize('has_windows', [False, True])
def test_attention_with_layers_that_do_not_fit(has_windows, wrong):
    """No memory of others is read."""
    x = torch.randn(2, 6, 6, 8)
    kv = torch.randn(2, 5, 16)
    bias = torch.zeros(2, 6, 6) if has_windows else torch.zeros(2, 5)
    first = random_linear(8, 24 if has_windows else 8, torch.float32)
    proj = random_linear(8, 8, torch.float32)
    norm = random_norm(4 if wrong == 'norm' else 8)
    if wrong == 'first weight':
        first = first._replace(weight=first.weight[:, :4])
    elif wrong == 'first bias':
        first = first._replace(bias=first.bias[:4])
    elif wrong == 'proj':
        proj = random_linear(4, 8, torch.float32)
    elif wrong == 'key bias':
        bias = bias[..., :4]
    with pytest.raises((RuntimeError, ValueError), match='expanded size|of shape'):
        if has_windows:
            prepare_window_attention(x, norm, first, proj, 2, 3, bias).run()
        else:
            prepare_global_attention(x, norm, kv, first, proj, 2, bias).run()


@needs_kernels
def test_keys_and_heads_that_do_not_fit():
    x = torch.randn(2, 6, 6, 8)
    layer = random_linear(8, 8, torch.float32)
    for kv in (torch.randn(2, 5, 12), torch.randn(1, 5, 16)):
        with pytest.raises(ValueError, match=r'shape \(2, 5, 16\) is needed'):
            prepare_global_attention(x, None, kv, layer, layer, 2).run()
    with pytest.raises(ValueError, match='3 heads do not divide 8 channels'):
        prepare_global_attention(x, None, torch.randn(2, 5, 16), layer, layer, 3).run()


@needs_kernels
@settings(deadline=None, max_examples=80)
@given(
    images=st.integers(1, 3),
    height=st.integers(1, 6),
    width=st.sampled_from([1, 2, 5, 31, 32, 33, 70]),
    channels=st.integers(1, 80),
    part=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    has_bias=st.booleans(),
    threads=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES or [None]),
    seed=st.integers(0, 2**31),
)
def test_convolution(images, height, width, channels, part, has_bias, threads, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(images, height, width, channels).to(dtype)
    kernel = torch.randn(channels, 1, 3, 3).to(dtype)
    bias = torch.randn(channels).to(dtype) if has_bias else None
    top = min(part[0], height - 1)
    rows = slice(top, max(height - part[1], top + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        found = fast_convolve_gelu(x, kernel, bias, rows)
    exact = F.gelu(convolution_formula(x.double(), kernel.double(), bias))[:, rows]
    rounding = torch.finfo(dtype).eps * exact.abs() + 5e-6
    assert ((found.double() - exact).abs() <= rounding).all()
    one_by_one = [
        fast_convolve_gelu(x[i : i + 1], kernel, bias, slice(y, y + 1))
        for i in range(images)
        for y in range(rows.start, rows.stop)
    ]
    assert torch.equal(torch.cat(one_by_one).view(found.shape), found)


@needs_kernels
@settings(deadline=None, max_examples=60)
@given(
    images=st.integers(1, 3),
    height=st.integers(1, 6),
    width=st.sampled_from([1, 2, 31, 33, 70]),
    channels=st.integers(1, 80),
    padded=st.booleans(),
    threads=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES or [None]),
    seed=st.integers(0, 2**31),
)
def test_a_convolution_and_a_sum(images, height, width, channels, padded, threads, dtype, seed):
    torch.manual_seed(seed)
    others = torch.randn(images, height, width, channels).to(dtype)
    x = others * (torch.rand(images, height, width, 1) < 0.5) if padded else others
    kernel = torch.randn(channels, 1, 3, 3).to(dtype)
    bias = torch.randn(channels).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        found = fast_convolve_add(x, others, Depthwise(kernel, bias))
    exact = others.double() + convolution_formula(x.double(), kernel.double(), bias)
    rounding = torch.finfo(dtype).eps * exact.abs() + 5e-6
    assert ((found.double() - exact).abs() <= rounding).all()
    for i in range(images):
        image = slice(i, i + 1)
        alone = fast_convolve_add(x[image], others[image], Depthwise(kernel, bias))
        assert torch.equal(alone, found[image])


def convolution_formula(x, kernel, bias):
    """A zero-padded depthwise convolution of a map (B, H, W, C), tap by tap."""
    _, height, width, _ = x.shape
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    out = torch.zeros_like(x) if bias is None else bias.double().expand_as(x)
    for i in range(3):
        for j in range(3):
            out = out + padded[:, i : i + height, j : j + width] * kernel[:, 0, i, j]
    return out


@needs_kernels
@settings(deadline=None, max_examples=80)
@given(
    images=st.integers(1, 3),
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    channels=st.integers(1, 70),
    side=st.integers(1, 9),
    threads=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES or [None]),
    seed=st.integers(0, 2**31),
)
def test_patches(images, height, width, channels, side, threads, dtype, seed):
    """Every bit is copied, also of values that a processor may take for zero."""
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    limits = torch.iinfo(integers)
    shape = (images, height * side, width * side, channels)
    generator = torch.manual_seed(seed)
    bits = torch.randint(limits.min, limits.max, shape, dtype=integers, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        rows = fast_split_patches(bits.view(dtype), side)
        map_of_rows = fast_join_patches(rows, shape, side)
    assert torch.equal(rows.view(integers), split_patches(bits, side))
    assert torch.equal(map_of_rows.view(integers), bits)
    assert torch.equal(join_patches(rows.view(integers), shape, side), bits)


@needs_kernels
@settings(deadline=None, max_examples=100)
@given(
    images=st.integers(1, 3),
    height=st.integers(1, 20),
    width=st.integers(1, 20) | st.just(150),
    channels=st.integers(1, 40) | st.sampled_from([32, 64]),
    side=st.integers(1, 9),
    drops_border=st.booleans(),
    masked=st.booleans(),
    threads=st.integers(1, 5),
    how=st.sampled_from(PRODUCTS or [(None, None)]),
    seed=st.integers(0, 2**31),
)
def test_keys_of_patches(
    images, height, width, channels, side, drops_border, masked, threads, how, seed
):
    """Patches are zeros beyond the map and outside of images."""
    dtype, products = how
    channels = math.ceil(channels / TOGETHER[products]) * TOGETHER[products]
    torch.manual_seed(seed)
    x = torch.randn(images, height, width, channels).to(dtype)
    norm = random_norm(channels, dtype)
    sr = random_linear(channels * side**2, channels, dtype)
    layers = KeyLayers(sr, random_norm(channels), random_linear(channels, 2 * channels, dtype))
    outside = torch.rand(images, height, width, 1) < 0.3 if masked else None
    rows, columns = [
        max(length // side, 1) if drops_border else math.ceil(length / side)
        for length in (height, width)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        multiply(patch, products)
        found = prepare_keys_of_patches(x, norm, layers, side, rows, columns, outside).run()
        last = None if outside is None else outside[-1:]
        alone = prepare_keys_of_patches(x[-1:], norm, layers, side, rows, columns, last).run()
    assert torch.equal(alone, found[-1:])
    normal = rounded(norm_formula(x, norm), products)
    if masked:
        normal = normal.masked_fill(outside, 0)
    down = max(rows * side - height, 0)
    right = max(columns * side - width, 0)
    normal = F.pad(normal, (0, 0, 0, right, 0, down))[:, : rows * side, : columns * side]
    reduced = linear_formula(split_patches(normal, side), sr).to(dtype)
    tokens = rounded(norm_formula(reduced, layers.norm), products)
    assert_near(found.flatten(0, 1), linear_formula(tokens, layers.kv), products)


@needs_kernels
@settings(deadline=None, max_examples=120)
@given(
    images=st.integers(1, 3),
    height=st.integers(1, 20),
    width=st.integers(1, 20) | st.just(150),
    channels=st.integers(1, 40) | st.sampled_from([3, 32]),
    out_channels=st.integers(1, 70),
    step=st.integers(1, 17),
    overlaps=st.booleans(),
    has_norm=st.booleans(),
    has_planes=st.booleans(),
    threads=st.integers(1, 5),
    how=st.sampled_from(PRODUCTS or [(None, None)]),
    seed=st.integers(0, 2**31),
)
def test_embedded_patches(
    images,
    height,
    width,
    channels,
    out_channels,
    step,
    overlaps,
    has_norm,
    has_planes,
    threads,
    how,
    seed,
):
    """A convolution and a layer norm. Beyond the map, patches are zeros."""
    dtype, products = how
    torch.manual_seed(seed)
    side = min(2 * step - 1, 17) if overlaps else step
    border = side // 2 if overlaps else 0
    x = torch.randn(images, channels, height, width).to(dtype)
    tokens = x.permute(0, 2, 3, 1)
    tokens = tokens if has_planes else tokens.contiguous()
    layer = random_linear(channels * side**2, out_channels, dtype)
    norm = random_norm(out_channels) if has_norm else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        multiply(patch, products)
        found = fast_embed_patches(tokens, layer, norm, side, step, border)
        alone = fast_embed_patches(tokens[-1:], layer, norm, side, step, border)
        before_norm = fast_embed_patches(tokens, layer, None, side, step, border)
    assert torch.equal(alone, found[-1:])
    rows, columns = math.ceil(height / step), math.ceil(width / step)
    assert found.shape == (images, rows, columns, out_channels)
    down, right = [(n - 1) * step + side for n in (rows, columns)]
    after = [max(right - width - border, 0), max(down - height - border, 0)]
    padded = F.pad(x, (border, after[0], border, after[1]))
    patches = F.unfold(padded.float(), side, stride=step)[..., : rows * columns].transpose(1, 2)
    reduced = linear_formula(patches.flatten(0, 1).to(dtype), layer)
    assert_near(before_norm.flatten(0, 2), reduced, products)
    assert torch.equal(found, before_norm if norm is None else fast_layer_norm(before_norm, norm))


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
def test_prepared_calls_keep_what_they_read(dtype):
    """Copies that only they have, too."""

    def apart(*shape):
        return torch.randn(*shape, 2)[..., 0].to(dtype)  # the function needs another copy

    def linear(in_channels, out_channels):
        return Linear(apart(out_channels, in_channels), apart(out_channels))

    def calls():
        torch.manual_seed(0)
        norm = Norm(apart(32), apart(32), 1e-6)
        if dtype == torch.bfloat16:  # one in another dtype: both are converted
            norm = norm._replace(weight=norm.weight.float())
        x, attended = apart(1, 20, 20, 32), apart(1, 20, 20, 32)
        bias = torch.randn(1, 20, 20, 2)[..., 0].double()
        outside = torch.rand(1, 20, 20, 2)[..., :1] < 0.3
        keys = KeyLayers(linear(32 * 4, 32), norm, linear(32, 64))
        mlp = NormAndMLP(norm, linear(32, 64), linear(64, 32))
        conv = Depthwise(apart(64, 1, 3, 3), apart(64))
        kv = apart(1, 9, 64)
        return [
            prepare_window_attention(x, norm, linear(32, 96), linear(32, 32), 2, 7, bias),
            prepare_global_attention(
                x, norm, kv, linear(32, 32), linear(32, 32), 2, bias[:, 0, :9]
            ),
            prepare_keys_of_patches(x, norm, keys, 2, 10, 10, outside),
            prepare_mlp(x, attended, mlp),
            prepare_conv_mlp(x, attended, mlp, conv, False, outside),
        ]

    expected = [call.run() for call in calls()]
    prepared = calls()
    others = [torch.full((count,), math.nan) for count in range(1, 20000, 7)]  # in freed memory
    for call, result in zip(prepared, expected):
        assert torch.equal(call.run(), result)
    assert others and all(result.isfinite().all() for result in expected)


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
def test_gelu(dtype):
    """Of each value that a map can have, also far from 0."""
    special = [0.0, -0.0, math.nan, math.inf, 1e30, -1e30, 1e-30, -1e-30]
    x = torch.cat([torch.linspace(-12, 12, 2**16), torch.tensor(special)]).to(dtype)
    center = torch.zeros(1, 1, 3, 3, dtype=dtype)
    center[..., 1, 1] = 1
    found = fast_convolve_gelu(x.view(-1, 1, 1, 1), center, None, slice(0, 1)).flatten()
    exact = F.gelu(x.double())
    # Relative in a wide range: the share left of -5 is less than 3e-7.
    rounding = torch.finfo(dtype).eps * exact.abs() + 4e-7 * x.double().abs().clamp(max=6)
    is_near = (found.double() - exact).abs() <= rounding
    same = found.double() == exact
    assert (is_near | same | (found.isnan() & x.isnan())).all()


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason='the processor has no avx512_bf16')
def test_gelu_in_bfloat16_rounds_as_the_exact_one():
    """Its approximation is coarser than that of float32, but finer than what bfloat16 rounds."""
    x = torch.randn(2**16, generator=torch.manual_seed(0)).bfloat16()
    center = torch.zeros(1, 1, 3, 3, dtype=torch.bfloat16)
    center[..., 1, 1] = 1
    found = fast_convolve_gelu(x.view(-1, 1, 1, 1), center, None, slice(0, 1)).flatten()
    exact = F.gelu(x.double())
    rounded_exact = exact.bfloat16()
    assert (found != rounded_exact).double().mean() < 0.02
    error = (found.double() - exact).square().mean().sqrt()
    assert error < 1.001 * (rounded_exact.double() - exact).square().mean().sqrt()


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_a_convolution_of_values_that_are_not_finite(dtype, value):
    """They reach the 3 x 3 values around them, in their own channel."""
    x = torch.randn(1, 6, 7, 40, generator=torch.manual_seed(0)).to(dtype)
    x[0, 2, 3, 20] = value
    kernel = torch.rand(40, 1, 3, 3, generator=torch.manual_seed(1)).to(dtype)
    found = fast_convolve_gelu(x, kernel, None, slice(0, 6))
    expected = F.gelu(convolution_formula(x.double(), kernel.double(), None))
    assert torch.equal(found.isfinite(), expected.isfinite())


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(dtype, value):
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.manual_seed(0)).to(dtype).unbind(0)
    q[0, 0, 1, 2] = value
    k[0, 1, 3, 4] = value
    v[0, 1, 4, 5] = value
    # Not PyTorch's fused kernel, which makes 0 of a query that is NaN.
    expected = attention_formula(q, k, v).transpose(1, 2)
    found = fast_attention(q, k, v)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    x = torch.randn(4, 40).to(dtype)
    x[1, 30] = value
    weight = torch.ones(40)
    found = fast_layer_norm(x, Norm(weight, weight, 1e-5))
    assert torch.equal(found.isnan(), F.layer_norm(x, (40,)).isnan())


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('value', [math.nan, math.inf, 1e30])
@pytest.mark.parametrize('channels', [1, 40, 5000])
def test_a_layer_norm_changes_no_other_row(channels, value, dtype):
    """Eight rows are computed at a time."""
    x = torch.randn(11, channels).to(dtype)
    norm = random_norm(channels)
    expected = fast_layer_norm(x, norm)
    for row in (0, 5, 10):
        changed = x.clone()
        changed[row, channels // 2] = value
        found = fast_layer_norm(changed, norm)
        others = torch.arange(11) != row
        assert torch.equal(found[others], expected[others])


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
def test_the_same_with_any_number_of_threads(dtype):
    x = torch.randn(1, 3, 500, 32).to(dtype)
    tokens = torch.randn(2, 41, 23, 64).to(dtype)
    kv = torch.randn(2, 77, 128).to(dtype)
    qkv, proj = random_linear(64, 192, dtype), random_linear(64, 64, dtype)
    mlp = random_mlp(64, 128, dtype)
    norm = random_norm(64)
    sr = random_linear(64 * 16, 64, dtype)
    keys = KeyLayers(sr, norm, random_linear(64, 128, dtype))
    conv = Depthwise(torch.randn(128, 1, 3, 3).to(dtype), torch.randn(128).to(dtype))
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(
                [
                    fast_attention(x, x[..., :77, :], x[..., :77, :]),
                    prepare_window_attention(tokens, norm, qkv, proj, 2, 7).run(),
                    prepare_global_attention(tokens, norm, kv, proj, proj, 2).run(),
                    prepare_keys_of_patches(tokens, norm, keys, 4, 11, 6).run(),
                    prepare_mlp(tokens, tokens, mlp).run(),
                    prepare_conv_mlp(tokens, tokens, mlp, conv).run(),
                ]
            )
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*found):
        assert all(torch.equal(one, other) for other in others)


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('value', [-math.inf, torch.finfo(torch.float32).min, math.nan])
@pytest.mark.parametrize('masked', [slice(None), slice(3, None)])
def test_masks_of_others(dtype, value, masked):
    q, k, v = torch.randn(3, 1, 2, 20, 8, generator=torch.manual_seed(0)).to(dtype).unbind(0)
    bias = torch.zeros(1, 20)
    bias[:, masked] = value
    found = forward_attention(q, k, v, bias.to(dtype))
    expected = F.scaled_dot_product_attention(q, k, v, bias[:, None, None].to(dtype))
    if bias.max() == -math.inf:
        expected = torch.zeros_like(expected)  # older versions of PyTorch: NaN
    torch.testing.assert_close(
        found, expected.transpose(1, 2), equal_nan=True, rtol=0.02, atol=0.02
    )


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
def test_keys_and_bias_are_broadcast(dtype):
    q, k, v = torch.randn(3, 2, 4, 9, 32, generator=torch.manual_seed(0)).to(dtype).unbind(0)
    bias = torch.randn(1, 9).to(dtype)
    few = k[:1, :1], v[:1, :1], bias
    all_of_them = k[:1, :1].repeat(2, 4, 1, 1), v[:1, :1].repeat(2, 4, 1, 1), bias.repeat(2, 1)
    assert torch.equal(forward_attention(q, *few), forward_attention(q, *all_of_them))


@needs_kernels
@pytest.mark.parametrize('wrong', ['k', 'v', 'channels', 'bias'])
def test_attention_of_shapes_that_do_not_fit(wrong):
    """No memory of others is read."""
    q = torch.randn(2, 2, 9, 8)
    k = v = q
    bias = torch.zeros(2, 9)
    if wrong == 'k':
        k = v = torch.cat([k, k, k])
    elif wrong == 'v':
        v = v[..., :4, :]
    elif wrong == 'channels':
        k = v = v[..., :4]
    else:
        bias = bias[..., :4]
    with pytest.raises(RuntimeError, match='expanded size'):
        fast_attention(q, k, v, bias)


@pytest.mark.parametrize('name', ['weight', 'bias'])
@pytest.mark.parametrize('shape', [(0,), (8,), (32,), (1, 16)])
def test_a_layer_norm_with_weights_that_do_not_fit(name, shape):
    norm = accelerate(nn.Sequential(LayerNorm(16)))
    setattr(norm[0], name, nn.Parameter(torch.ones(shape)))
    with torch.no_grad(), pytest.raises(RuntimeError, match=f'{name} to be of same shape'):
        norm(torch.randn(3, 16))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_windows_of_heads_with_an_odd_number_of_channels(dtype):
    torch.manual_seed(0)
    plain = WindowAttention(2 * 33, 2, 4).to(dtype)
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(1, 6, 7, 2 * 33).to(dtype)
    grid = Grid(6, 7, windows=grid_of_windows(x, None, 4))
    with torch.no_grad():
        torch.testing.assert_close(fast(x, grid), plain(x, grid), rtol=0.01, atol=0.005)


@pytest.fixture
def short_source(monkeypatch, tmp_path):
    """A source that is compiled at once, in place of kernels.cpp."""
    source = tmp_path / 'short.cpp'
    source.write_text('extern "C" int kernels_fit_processor() { return 1; }\n')
    monkeypatch.setattr(library, 'SOURCE', source)


MISSING = {
    'compiler': ('no C++ compiler', {'PATH': '/nowhere', 'CXX': ''}),
    'program': ('cannot be compiled', {'CXX': '/nowhere/c++'}),
    'quote': ('No closing quotation', {'CXX': 'c++ "'}),
    'result': ('cannot be compiled', {'CXX': 'true'}),
    'function': ('undefined symbol', {'CXX': 'c++ -Dkernels_fit_processor=another_name'}),
    'end': ('did not end in 1 seconds', {'CXX': 'sh -c "sleep 100"'}),
    'option': ('fails: ', {'CXX': 'c++ -not-an-option'}),
    'folder': ('cannot be compiled', {'XDG_CACHE_HOME': '/dev/null'}),
}


@needs_kernels
@pytest.mark.parametrize('what', MISSING)
def test_without_a_library(monkeypatch, tmp_path, short_source, what):
    reason, variables = MISSING[what]
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'caches'))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if what == 'end':
        monkeypatch.setattr(library, 'COMPILER_SECONDS', 1)
    with pytest.raises(library.NoKernels, match=re.escape(reason)):
        library.load_library()
    files = [path for path in (tmp_path / 'caches').rglob('*') if path.is_file()]
    assert len(files) == (what == 'function')  # compiled once, though of no use


@needs_kernels
def test_a_user_without_a_folder(monkeypatch):
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.delenv('HOME')
    monkeypatch.setattr(os, 'getuid', lambda: 2**31 - 9)
    with pytest.raises(library.NoKernels, match='set XDG_CACHE_HOME'):
        library.load_library()


@needs_kernels
@pytest.mark.parametrize('damage', ['cut off', 'zeros', 'of another'])
def test_a_damaged_library_is_compiled_again(monkeypatch, tmp_path, short_source, damage):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'ä folder'))
    options = library.options_of_processor()
    path = library.compiled_file(options)
    content = path.read_bytes()
    damaged = {
        'cut off': content[:5000],
        'zeros': content[:5000] + bytes(len(content) - 5000),
        'of another': b'a text',
    }
    path.write_bytes(damaged[damage])
    assert library.compiled_file(options) == path
    assert path.stat().st_size == len(content)
    library.load_library()


@pytest.mark.parametrize(
    'what, reason',
    [
        ('system', 'need Linux'),
        ('processor', 'the CPU capability of PyTorch is DEFAULT'),  # perhaps by its environment
    ],
)
def test_on_other_machines(monkeypatch, what, reason):
    if what == 'system':
        monkeypatch.setattr(library.sys, 'platform', 'darwin')
    else:
        monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'DEFAULT')
    with pytest.raises(library.NoKernels, match=reason):
        library.load_library()


@needs_kernels
def test_processes_that_compile_at_the_same_time(monkeypatch, tmp_path, short_source):
    """Each finds a complete file, and a later one compiles nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'caches'))

    def load(rank):
        library.load_library()
        return 0

    assert in_processes(2, load) == [(0, ''), (0, '')]
    (compiled,) = (tmp_path / 'caches' / 'cpvt_pyramid').iterdir()
    time = compiled.stat().st_mtime_ns
    library.load_library()
    assert compiled.stat().st_mtime_ns == time


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason='the processor has no avx512_bf16')
def test_bfloat16_is_multiplied_in_the_same_way_in_each_process(tmp_path):
    """As if each were loaded by a process of its own."""
    compiled = library.compiled_file(library.options_of_processor())
    found = set()
    for i in range(30):
        path = shutil.copy(compiled, tmp_path / f'{i}.so')
        found.add(bool(ctypes.CDLL(str(path)).kernels_have_fast_pairs()))
    assert found == {'AuthenticAMD' in Path('/proc/cpuinfo').read_text()}


@pytest.mark.skipif(
    not (DTYPES and has_avx512()), reason='the tests above are those of the processor: it has AVX2'
)
def test_those_for_processors_with_avx2():
    """The tests of results, in a process that computes without AVX-512."""
    chosen = 'layer_norm or attention or windows or convolution or mlps or gelu or patches'
    environment = os.environ | {'ATEN_CPU_CAPABILITY': 'avx2'}
    # Without kernels the tests would be skipped.
    program = f"""
import sys
import pytest
from cpvt_pyramid.acceleration.library import load_library

load_library()
sys.exit(pytest.main(['-q', '-n0', {__file__!r}, '-k', {chosen!r}]))
"""
    subprocess.run([sys.executable, '-c', program], env=environment, check=True)


@needs_kernels
@pytest.mark.parametrize('shape', [(60, 8), (2, 60, 8), (1, 2, 6, 5, 8)])
def test_tokens_that_are_no_map(shape):
    """No memory of others is written."""
    x = torch.randn(shape)
    layer = random_linear(8, 8, torch.float32)
    with pytest.raises(ValueError, match='unpack'):
        prepare_window_attention(x, None, random_linear(8, 24, torch.float32), layer, 2, 3)
    with pytest.raises(ValueError, match='unpack'):
        prepare_global_attention(x, None, torch.randn(2, 5, 16), layer, layer, 2)
    with pytest.raises(ValueError, match='unpack'):
        prepare_keys_of_patches(x, random_norm(8), KeyLayers(layer, random_norm(8), layer), 1, 3, 3)
    with pytest.raises(ValueError, match='unpack'):
        fast_convolve_add(x, x, Depthwise(torch.randn(8, 1, 3, 3), torch.randn(8)))


@needs_kernels
def test_too_little_memory():
    """It is an error of Python's, and not the end of the process."""
    program = """
import resource
import torch
from cpvt_pyramid.acceleration.kernels import Linear, Norm, NormAndMLP, prepare_mlp

weight = torch.zeros(8192, 8192)
bias = torch.zeros(8192)
layer = Linear(weight, bias)
x = torch.zeros(1, 8192)
with open('/proc/self/statm') as file:
    pages = int(file.read().split()[0])
limit = pages * resource.getpagesize() + 2**28  # both weights are packed in twice as much
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    prepare_mlp(x, x, NormAndMLP(Norm(bias, bias, 1e-6), layer, layer)).run()
except MemoryError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, check=True
    )
    assert done.stdout == 'there is not enough memory\n'
