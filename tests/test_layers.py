"""Parts of a stage that the pyramid's tests do not reach."""

import pytest
import torch
from reference import randomize

from cpvt_pyramid import layers
from cpvt_pyramid.layers import GlobalAttention, PatchConv, WindowAttention


@pytest.mark.parametrize('masked', [False, True])
def test_attention_in_several_calls(monkeypatch, masked):
    """CUDA's kernels refuse more than 65,535 windows at a time."""
    attention = randomize(WindowAttention(8, 2, window=3)).eval()
    x = torch.randn(2, 10 if masked else 9, 12, 8)
    whole = attention(x)
    calls = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        layers.F, 'scaled_dot_product_attention', lambda *a: calls.append(len(a[0])) or fused(*a)
    )
    monkeypatch.setattr(layers, 'MAX_ATTENTION_BATCH', 5)
    torch.testing.assert_close(attention(x), whole)
    assert len(calls) > 1 and max(calls) <= 5


def test_attention_is_on_4d_tensors(monkeypatch):
    """With 5-D windows scaled_dot_product_attention falls back to its slow kernel."""
    shapes = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        layers.F, 'scaled_dot_product_attention', lambda *a: shapes.append(a[0].dim()) or fused(*a)
    )
    WindowAttention(8, 2, window=7)(torch.randn(1, 14, 14, 8))
    assert shapes == [4]


def test_a_window_that_is_wholly_padding_gives_no_nan():
    attention = randomize(WindowAttention(8, 2, window=3))
    x = torch.randn(2, 9, 9, 8, requires_grad=True)
    inside = torch.zeros(2, 9, 9, 1, dtype=torch.bool)
    inside[0, :4, :2] = True
    inside[1, :1, :1] = True
    for dtype in (torch.float, torch.bfloat16, torch.half):
        out = attention.to(dtype)(x.to(dtype), inside)
        out.sum().backward()
        assert out.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize('sr_ratio', [1, 2])
def test_an_image_that_is_wholly_padding_gives_no_nan(sr_ratio):
    attention = randomize(GlobalAttention(8, 2, sr_ratio))
    x = torch.randn(2, 6, 6, 8, requires_grad=True)
    inside = torch.zeros(2, 6, 6, 1, dtype=torch.bool)
    inside[0, :3, :3] = True
    out = attention(x, inside)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize('size', [1, 2, 4])
def test_patch_conv_is_a_convolution(size):
    conv = randomize(PatchConv(3, 5, size))
    x = torch.randn(2, 3, 4 * size, 3 * size)
    out = conv(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, conv.weight, conv.bias, size))
