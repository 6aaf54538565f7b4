"""Attention by oneDNN against the formula, with its gradients, and where it steps aside."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import kept

from benchmarks.models.ports import randomize
from cpvt_pyramid import ops
from cpvt_pyramid.layers import WindowAttention
from cpvt_pyramid.ops import attention, dispatch
from cpvt_pyramid.ops.attention import attend
from cpvt_pyramid.padding.mask import key_mask
from cpvt_pyramid.position import Grid


def formula(q, k, v, mask):
    """Image by image and head by head, in double precision."""
    out = []
    for b in range(len(q)):
        for head in range(q.shape[1]):
            scores = q[b, head].double() @ k[b, head].double().t() / q.shape[-1] ** 0.5
            if mask is not None:
                scores = scores.where(mask[b, 0, 0], float('-inf'))
            out.append(scores.exp() / scores.exp().sum(1, keepdim=True) @ v[b, head].double())
    return torch.stack(out).view(q.shape).transpose(1, 2).flatten(2).float()


def operands(batch, heads, queries, keys, masked, dim=8):
    """Tokens as layers hand them on: views of (B, N, heads, d) and of (B, M, 2, heads, d)."""
    q = torch.randn(batch, queries, heads, dim, requires_grad=True)
    kv = torch.randn(batch, keys, 2, heads, dim, requires_grad=True)
    k, v = kv.unbind(2)
    mask = key_mask(torch.rand(batch, keys) < 0.6) if masked else None
    return (q, kv), (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)


sizes = dict(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    queries=st.integers(1, 40),
    keys=st.integers(1, 20),
    masked=st.booleans(),
)


def assert_formula(ours, leaves, inputs):
    """In values and gradients."""
    slow = formula(*inputs)
    grad = torch.randn_like(slow)
    torch.testing.assert_close(ours, slow)
    found, expected = (torch.autograd.grad(out, leaves, grad) for out in (ours, slow))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Every attention by oneDNN, some queries at a time.
@mock.patch.multiple(attention, WORTH_ONEDNN=1, AT_A_TIME=32)
@settings(deadline=None, max_examples=40)
@given(**sizes)
def test_equals_the_formula(**size):
    leaves, inputs = operands(**size)
    assert_formula(attend(*inputs, 0.0), leaves, inputs)
    with torch.no_grad():
        torch.testing.assert_close(attend(*inputs, 0.0), formula(*inputs))


@settings(deadline=None, max_examples=60)
@given(**sizes, threads=st.integers(1, 9), least=st.integers(1, 9))
def test_groups_of_queries_equal_the_formula(threads, least, **size):
    leaves, inputs = operands(**size)
    fused = mock.Mock(wraps=attention.plain_attention)
    with (
        mock.patch.multiple(attention, MIN_GROUP=least, plain_attention=fused),
        mock.patch.object(torch, 'get_num_threads', lambda: threads),
    ):
        ours = attend(*inputs, 0.0)
        groups = attention.groups_for(size['batch'] * size['heads'], size['queries'], threads)
    fused.assert_called_once()
    assert len(fused.call_args.args[0]) == size['batch'] * groups
    assert_formula(ours, leaves, inputs)


def test_gradients_of_queries_keys_and_values_are_joined_in_one_pass():
    windows = WindowAttention(8, 2, window=3)
    qkv = torch.randn(4, 9, 24, requires_grad=True)
    out = windows.attend_inside(qkv, 3, 3)
    with torch.profiler.profile() as profiler:
        torch.autograd.grad(out, qkv, torch.randn(out.shape))
    calls = {event.key: event.count for event in profiler.key_averages()}
    assert calls['aten::cat'] == 1 and 'aten::clone' not in calls


def bfloat16_hardware(there):
    return mock.patch.object(dispatch, 'MULTIPLIES_BFLOAT16', there)


@settings(deadline=None, max_examples=40)
@given(**sizes, at_a_time=st.sampled_from([16, 64, 1000]))
def test_bfloat16_in_batches_equals_the_formula(at_a_time, **size):
    _, (*inputs, mask) = operands(**size)
    inputs = [x.detach().bfloat16() for x in inputs]
    scores = []
    softmax = mock.patch.object(
        torch, 'softmax', lambda x, **a: scores.append(x.numel()) or x.softmax(-1)
    )
    constants = mock.patch.multiple(attention, AT_A_TIME=at_a_time, WORTH_BATCHES=1)
    with bfloat16_hardware(True), constants, softmax:
        with torch.no_grad():
            ours = attend(*inputs, mask, 0.0)
    slow = formula(*inputs, mask).float()
    torch.testing.assert_close(ours.float(), slow, rtol=0.02, atol=0.02)  # 2^-8, a few times
    # A part is a row of all heads of one image at least.
    assert scores and max(scores) <= max(at_a_time, size['heads'] * size['keys'])
    total = size['batch'] * size['heads'] * size['queries'] * size['keys']
    assert sum(scores) == total


@pytest.mark.parametrize(
    ('expected', 'options'),
    [
        ('attention', dict(queries=8)),
        ('attention', dict(queries=8, trains=True)),
        ('plain_attention', dict(queries=8, dropout=0.5)),
        ('plain_attention', dict(queries=8, plain=True)),
        ('plain_attention', dict()),  # too small for oneDNN
        ('grouped_attention', dict(trains=True)),
        ('plain_attention', dict(trains=True, dropout=0.5)),
        ('batched_attention', dict(dtype=torch.bfloat16)),
        ('batched_attention', dict(dtype=torch.bfloat16, keys=3, masked=False)),
        ('plain_attention', dict(dtype=torch.bfloat16, keys=3)),  # few keys, with a mask
        ('grouped_attention', dict(dtype=torch.bfloat16, trains=True)),
        ('plain_attention', dict(dtype=torch.bfloat16, hardware=False)),
        ('plain_attention', dict(dtype=torch.bfloat16, bias=True)),
    ],
)
def test_which_version_runs(monkeypatch, expected, options):
    """Of a CPU's. The limits depend on the processor."""
    options = dict(queries=6, keys=4, masked=True, trains=False) | options
    constants = dict(WORTH_ONEDNN=8 * 4, WORTH_BATCHES=4, MIN_GROUP=1)
    _, (*inputs, mask) = operands(1, 1, options['queries'], options['keys'], options['masked'])
    inputs = [x.detach().to(options.get('dtype', torch.float)) for x in inputs]
    if options.get('bias'):
        mask = torch.zeros(1, 1, options['queries'], options['keys'], dtype=inputs[0].dtype)
    calls = []
    for name in ('attention', 'grouped_attention', 'batched_attention', 'plain_attention'):
        version = getattr(attention, name)
        call = lambda *a, name=name, version=version: calls.append(name) or version(*a)  # noqa: E731
        monkeypatch.setattr(attention, name, call)
    with (
        mock.patch.multiple(attention, **constants),
        mock.patch.object(torch, 'get_num_threads', lambda: 2),
        bfloat16_hardware(options.get('hardware', True)),
        ops.plain(options.get('plain', False)),
        torch.set_grad_enabled(options['trains']),
    ):
        attend(*inputs, mask, options.get('dropout', 0.0))
    assert calls[0] == expected


def test_training_keeps_no_scores():
    _, inputs = operands(1, 1, 2048, 1024, False)
    sizes = [x.numel() for x in kept(attend, *inputs, 0.0)]
    assert sizes and max(sizes) <= 2048 * 8


@pytest.mark.parametrize('masked', [False, True])
def test_in_several_calls(monkeypatch, masked):
    """CUDA's kernels refuse more than 65,535 windows at a time, and with 5-D windows
    scaled_dot_product_attention falls back to its slow kernel."""
    windows = randomize(WindowAttention(8, 2, window=3)).eval()
    x = torch.randn(2, 10 if masked else 9, 12, 8)
    grid = Grid(*x.shape[1:3])
    whole = windows(x, grid)
    fused = mock.Mock(wraps=attention.F.scaled_dot_product_attention)
    monkeypatch.setattr(attention.F, 'scaled_dot_product_attention', fused)
    monkeypatch.setattr(attention, 'MAX_BATCH', 5)
    torch.testing.assert_close(windows(x, grid), whole)
    shapes = [call.args[0].shape for call in fused.call_args_list]
    assert len(shapes) > 1 and all(len(shape) == 4 and shape[0] <= 5 for shape in shapes)
