"""Parts of a stage that the pyramid's tests do not reach."""

import pytest
import torch
from reference import randomize

from cpvt_pyramid.layers import GlobalAttention, PatchConv, WindowAttention


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
