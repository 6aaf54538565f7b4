"""Attention by tiles (AMX), which kernels.cpp multiplies on processors that have them.

Here the instructions are emulated, so that every processor with avx512_bf16 runs these tests.
"""

import ctypes
import functools
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_attention_near, random_attention

from cpvt_pyramid.acceleration import attention, kernels, library
from cpvt_pyramid.acceleration.kernels import fast_attention, has_kernels

pytestmark = pytest.mark.skipif(
    not has_kernels(torch.bfloat16), reason='the kernels need avx512_bf16 and a compiler'
)


@pytest.fixture(scope='module')
def compiled(tmp_path_factory):
    """The kernels with emulated tiles."""
    path = tmp_path_factory.mktemp('tiles') / 'kernels.so'
    emulation = Path(__file__).with_name('emulated_tiles.h')
    compiler = library.find_compiler()
    command = [*compiler, *library.OPTIONS, '-include', emulation, '-c', library.SOURCE]
    subprocess.run([*command, '-o', path.with_suffix('.o')], check=True)
    subprocess.run([*compiler, '-shared', path.with_suffix('.o'), '-o', path], check=True)
    functions = ctypes.CDLL(str(path))
    if not functions.kernels_have_tiles():
        pytest.skip('the compiler has no tiles')
    return functions


def use_tiles(patch, compiled):
    """As on a processor that has tiles."""
    functions = functools.cache(kernels.kernel_function.__wrapped__)
    patch.setattr(kernels, 'library', lambda: compiled)
    patch.setattr(kernels, 'kernel_function', functions)
    patch.setattr(kernels, 'has_tiles', lambda: True)


@settings(deadline=None, max_examples=60)
@given(
    images=st.integers(1, 2),
    heads=st.integers(1, 3),
    queries=st.integers(1, 50),
    keys=st.integers(1, 70),
    channels=st.sampled_from([32, 64, 96, 34]),
    masked=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_attention(compiled, images, heads, queries, keys, channels, masked, threads, seed):
    torch.manual_seed(seed)
    rows, bias, exact = random_attention(
        images, heads, queries, keys, channels, masked, torch.bfloat16
    )
    with pytest.MonkeyPatch.context() as patch:
        use_tiles(patch, compiled)
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        before = compiled.tile_products()
        found = fast_attention(*rows, bias)[:, 0]
        used = compiled.tile_products() > before
        for i in range(images):
            image_bias = None if bias is None else bias[i : i + 1]
            alone = fast_attention(*[x[i : i + 1] for x in rows], image_bias)[:, 0]
            assert torch.equal(alone, found[i : i + 1])
        patch.setattr(torch, 'get_num_threads', lambda: 1)
        assert torch.equal(fast_attention(*rows, bias)[:, 0], found)
    assert used == (channels % 32 == 0)
    assert compiled.tile_faults() == 0
    assert_attention_near(found, exact, rows[2])


@settings(deadline=None, max_examples=20)
@given(height=st.integers(1, 16), width=st.integers(1, 16), window=st.integers(1, 8))
def test_windows(compiled, height, width, window):
    qkv = torch.randn(1, height, width, 3 * 2 * 32).bfloat16()
    q, k, v = qkv.unflatten(3, (3, 2, 32)).permute(3, 0, 4, 1, 2, 5)
    expected = fast_attention(q, k, v, None, window)
    with pytest.MonkeyPatch.context() as patch:
        use_tiles(patch, compiled)
        found = fast_attention(q, k, v, None, window)
    assert compiled.tile_faults() == 0
    assert_attention_near(found, expected.double(), v)


def test_float32_is_computed_by_vectors(compiled, monkeypatch):
    q = torch.randn(1, 2, 1, 50, 32)
    expected = fast_attention(q, q, q)
    use_tiles(monkeypatch, compiled)
    assert torch.equal(fast_attention(q, q, q), expected)


def test_tiles_of_others_stay(compiled, monkeypatch):
    """oneDNN's functions and PyTorch's can have configured those of a thread."""
    use_tiles(monkeypatch, compiled)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 1)
    x = torch.randn(1, 1, 1, 20, 32).bfloat16()
    fast_attention(x, x, x)
    assert not compiled.has_configuration()
    compiled.configure_as_others()
    fast_attention(x, x, x)
    assert compiled.is_configured_as_others()
    compiled.release_tiles()


def test_tiles_that_compute_something_else_are_not_used(compiled, monkeypatch):
    use_tiles(monkeypatch, compiled)
    assert kernels.tiles_are_right()
    compiled.break_tiles(1)
    try:
        assert not kernels.tiles_are_right()
    finally:
        compiled.break_tiles(0)


@pytest.mark.parametrize('missing', ['', 'kernels', 'AMX', 'products', 'permission'])
def test_has_tiles(compiled, monkeypatch, missing):
    """False without a kernel that runs where the processor, or a virtual one, lacks something."""
    monkeypatch.setattr(kernels, 'library', lambda: compiled)
    monkeypatch.setattr(kernels, 'kernel_function', kernels.kernel_function.__wrapped__)
    monkeypatch.setattr(kernels, 'has_kernels', lambda dtype: missing != 'kernels')
    monkeypatch.setattr(kernels, 'has_amx', lambda: missing != 'AMX')
    monkeypatch.setattr(torch.cpu, '_init_amx', lambda: missing != 'permission')
    compiled.multiply_bfloat16(missing != 'products')
    before = compiled.tile_products()
    try:
        assert kernels.has_tiles.__wrapped__() == (not missing)
    finally:
        compiled.multiply_bfloat16(1)
    assert (compiled.tile_products() > before) == (not missing)


def test_the_processor_is_asked():
    assert library.library().processor_multiplies_tiles() == torch.cpu._is_amx_tile_supported()


def test_an_assembler_without_tiles(monkeypatch, tmp_path):
    """The other kernels are compiled."""
    script = tmp_path / 'compiler'
    compiler = shlex.join(library.find_compiler())
    lines = (
        '#!/bin/sh',
        'case " $* " in',
        f'*" -shared "* | *" -DNO_TILES "*) exec {compiler} -O0 "$@" ;;',
        'esac',
        'exit 1',
    )
    script.write_text('\n'.join(lines))
    script.chmod(0o755)
    monkeypatch.setenv('CXX', str(script))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    functions = library.load_library()
    assert not functions.kernels_have_tiles()
    assert functions.attention_bfloat16


@pytest.mark.parametrize('has_tiles', [True, False])
def test_which_attention_is_ours(has_tiles, monkeypatch):
    """With AMX: all, or what PyTorch's attention does not pack."""
    monkeypatch.setattr(attention, 'has_amx', lambda: True)
    monkeypatch.setattr(attention, 'has_tiles', lambda: has_tiles)
    q = torch.randn(1, 1, 1, 64).bfloat16()
    assert attention.takes_kernels(q, 49, 49)
    assert attention.takes_kernels(q, 64, 64) == has_tiles
    assert not attention.takes_kernels(q[..., :48], 64, 64)
    assert attention.takes_kernels(q.float(), 64, 64)
