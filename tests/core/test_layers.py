"""Parts of a stage that the pyramid's tests do not reach."""

import pytest
import torch
import torch.nn.functional as F
from reference import kept

from benchmarks.models.ports import randomize
from cpvt_pyramid import ops
from cpvt_pyramid.layers import GlobalAttention, PatchConv, WindowAttention
from cpvt_pyramid.position import Grid, PositionSettings, attention_position


@pytest.mark.parametrize('position', ['none', 'rope', 'alibi'])
@pytest.mark.parametrize('size', [(7, 8), (6, 4), (4, 6), (2, 7), (1, 1)], ids=str)
def test_smaller_windows_at_the_border_are_padded_ones_without_the_padding(size, position):
    inside = attention_position(PositionSettings(position, None, {}), 2, 8, 0.0)
    attention = randomize(WindowAttention(16, 2, window=3, position=inside)).double()
    x = torch.randn(2, *size, 16, dtype=torch.double, requires_grad=True)
    inputs = [x, *attention.parameters()]
    weights = torch.randn_like(x)
    results = []
    for plain in (False, True):
        with ops.plain(plain):
            out = attention(x, Grid(*size))
            results.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('size', [1, 2, 4])
def test_patch_conv_is_a_convolution(size, dtype):
    """With its gradient."""
    conv = randomize(PatchConv(3, 5, size)).to(dtype)
    x = torch.randn(2, 3, 4 * size - size // 2, 3 * size, dtype=dtype, requires_grad=True)
    found = conv(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    expected = F.conv2d(F.pad(x, (0, 0, 0, size // 2)), conv.weight, conv.bias, size)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    grads = (
        torch.autograd.grad(out.square().sum(), [x, conv.weight, conv.bias])
        for out in (found, expected)
    )
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('trains', ['tokens', 'weight', 'bias', 'nothing'])
def test_patch_conv_has_the_gradients_that_are_asked_for(trains):
    conv, x = randomize(PatchConv(3, 5, 2)).requires_grad_(False), torch.randn(2, 4, 6, 3)
    inputs = {'tokens': x, 'weight': conv.weight, 'bias': conv.bias}
    if trains == 'nothing':
        assert not conv(x).requires_grad
        return
    inputs[trains].requires_grad_()
    conv(x).sum().backward()
    assert [name for name, x in inputs.items() if x.grad is not None] == [trains]


@pytest.mark.parametrize('autocast', [False, True])
def test_training_keeps_the_tokens_of_attention_once(autocast):
    """And neither the patches, which are a copy of them, nor what autocast is given."""
    attention = randomize(GlobalAttention(8, 2, sr_ratio=2))
    x = torch.randn(1, 64, 64, 8, requires_grad=True) * 1
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        maps = {m.untyped_storage().data_ptr(): m for m in kept(attention, x, Grid(64, 64))}
    whole = [m.dtype for m in maps.values() if m.numel() == x.numel()]
    # The tokens, their queries, and what attention makes of them.
    assert whole == [torch.bfloat16 if autocast else torch.float32] * 3
