"""Layer norm and attention of kernels.cpp: what their formulas say, on every processor that has
AVX-512."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention_formula

from cpvt_pyramid.acceleration import library
from cpvt_pyramid.acceleration.kernels import fast_attention, fast_layer_norm, has_kernels

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if has_kernels(dtype)]
needs_kernels = pytest.mark.skipif(not DTYPES, reason='the kernels need AVX-512 and a compiler')
# The largest error of attention, relative to the largest of its values.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 0.01}


def assert_near(found, expected, values):
    error = (found.double() - expected).abs().max()
    assert error <= LIMITS[found.dtype] * values.abs().max()


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
        found = fast_layer_norm(x, weight, bias, eps)
    rounding = torch.finfo(dtype).eps * exact.abs() + 2e-6 * (1 + abs(mean))
    assert ((found.double() - exact).abs() <= rounding).all()
    one_by_one = torch.cat([fast_layer_norm(row[None], weight, bias, eps) for row in x])
    assert torch.equal(found, one_by_one)


@needs_kernels
@settings(deadline=None, max_examples=120)
@given(
    images=st.integers(1, 3),
    heads=st.integers(1, 3),
    queries=st.integers(1, 60),
    keys=st.integers(1, 90),
    channels=st.integers(1, 80),
    masked=st.booleans(),
    threads=st.integers(1, 5),
    scale=st.sampled_from([0.1, 1, 20]),
    dtype=st.sampled_from(DTYPES or [None]),
    seed=st.integers(0, 2**31),
)
def test_attention(images, heads, queries, keys, channels, masked, threads, scale, dtype, seed):
    if dtype == torch.bfloat16:
        channels += channels % 2
    torch.manual_seed(seed)
    q = (scale * torch.randn(images, queries, heads, channels)).to(dtype).transpose(1, 2)
    kv = torch.randn(images, keys, 2, heads, channels).to(dtype)
    k, v = kv.transpose(1, 3).unbind(2)
    bias = None
    if masked:
        bias = torch.where(torch.rand(images, keys) < 0.4, -30_000.0, 0.0)
        bias[:, 0] = 0  # no image is all padding
    exact = attention_formula(q.double(), k.double(), v.double(), bias).transpose(1, 2)
    rows = [x[:, :, None] for x in (q, k, v)]
    row_bias = None if bias is None else bias[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        found = fast_attention(*rows, row_bias)[:, 0]
    assert_near(found, exact, v * max(scale, 1))  # large scores round more
    for i in range(images):
        image = slice(i, i + 1)
        image_bias = None if bias is None else row_bias[image]
        alone = fast_attention(*[x[image] for x in rows], image_bias)[:, 0]
        assert torch.equal(alone, found[image])


@needs_kernels
@settings(deadline=None, max_examples=60)
@given(
    images=st.integers(1, 2),
    heads=st.integers(1, 2),
    height=st.integers(1, 16),
    width=st.integers(1, 16),
    window=st.integers(1, 8),
    masked=st.booleans(),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES or [None]),
)
def test_windows(images, heads, height, width, window, masked, threads, dtype):
    """Those at the border are smaller."""
    qkv = torch.randn(images, height, width, 3 * heads * 6).to(dtype)
    q, k, v = qkv.unflatten(3, (3, heads, 6)).permute(3, 0, 4, 1, 2, 5)
    bias = None
    if masked:
        bias = torch.where(torch.rand(images, height, width) < 0.4, -30_000.0, 0.0)
        bias[:, ::window, ::window] = 0  # no window is all padding
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        found = fast_attention(q, k, v, bias, window)
    for top in range(0, height, window):
        for left in range(0, width, window):
            part = (..., slice(top, top + window), slice(left, left + window))
            tokens = [x[(*part, slice(None))].flatten(2, 3).double() for x in (q, k, v)]
            hidden = None if bias is None else bias[part].flatten(1)
            expected = attention_formula(*tokens, hidden).transpose(1, 2)
            assert_near(found[:, part[1], part[2]].flatten(1, 2), expected, v)


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
    found = fast_attention(q[:, :, None], k[:, :, None], v[:, :, None])[:, 0]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    x = torch.randn(4, 40).to(dtype)
    x[1, 30] = value
    weight = torch.ones(40)
    found = fast_layer_norm(x, weight, weight, 1e-5)
    assert torch.equal(found.isnan(), F.layer_norm(x, (40,)).isnan())


@needs_kernels
@pytest.mark.parametrize('dtype', DTYPES)
def test_the_same_with_any_number_of_threads(dtype):
    x = torch.randn(1, 3, 1, 500, 32).to(dtype)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(fast_attention(x, x[..., :77, :], x[..., :77, :]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


MISSING = {
    'compiler': ('no C++ compiler', {'PATH': '/nowhere', 'CXX': ''}),
    'program': ('cannot be compiled', {'CXX': '/nowhere/c++'}),
    'option': ('fails: ', {'CXX': 'c++ -not-an-option'}),
    'folder': ('cannot be compiled', {'XDG_CACHE_HOME': '/dev/null'}),
}


@needs_kernels
@pytest.mark.parametrize('what', MISSING)
def test_without_a_library(monkeypatch, tmp_path, what):
    reason, variables = MISSING[what]
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(library.NoKernels, match=re.escape(reason)):
        library.load_library()
    assert not [path for path in tmp_path.rglob('*') if path.is_file()]


@pytest.mark.parametrize('what', ['system', 'processor'])
def test_on_other_machines(monkeypatch, what):
    if what == 'system':
        monkeypatch.setattr(library.sys, 'platform', 'darwin')
    else:
        monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'AVX2')
    with pytest.raises(library.NoKernels, match='need'):
        library.load_library()


@needs_kernels
def test_processes_that_compile_at_the_same_time(tmp_path):
    """Each finds a complete file, and a later one compiles nothing."""
    program = (
        'from cpvt_pyramid import CPVTPyramid, accelerate\n'
        'accelerate(CPVTPyramid("pcpvt_nano"))\n'
        'from cpvt_pyramid.acceleration.kernels import library\n'
        'print(library() is not None)'
    )
    environment = {**os.environ, 'XDG_CACHE_HOME': str(tmp_path)}
    command = [sys.executable, '-c', program]

    def start(**variables):
        return subprocess.Popen(
            command, env={**environment, **variables}, stdout=subprocess.PIPE, text=True
        )

    first = [start(), start()]
    assert [process.communicate()[0] for process in first] == ['True\n'] * 2
    (compiled,) = (tmp_path / 'cpvt_pyramid').iterdir()
    time = compiled.stat().st_mtime_ns
    assert start().communicate()[0] == 'True\n'
    assert compiled.stat().st_mtime_ns == time
