"""3x3 convolutions with fewer multiplications against direct ones in double precision."""

import copy
import pickle
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

from benchmarks.models.ports import randomize
from cpvt_pyramid import ops
from cpvt_pyramid.ops import winograd
from cpvt_pyramid.ops.winograd import FEWEST_CHANNELS as C
from cpvt_pyramid.ops.winograd import WinogradConv2d, transform_weight, use_winograd, winograd_conv


class OtherPeoples(torch.Tensor):
    """A subclass that keeps to itself what functions of PyTorch return."""


ran = mock.patch.object(winograd, 'winograd_conv', wraps=winograd_conv)


def random_conv(**options: object) -> nn.Module:
    return randomize(nn.Conv2d(C, C, 3, **{'padding': 1, **options}))


@settings(max_examples=60, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    channels=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    batch=st.integers(1, 5),
    bias=st.booleans(),
    channels_last=st.booleans(),
    at_a_time=st.sampled_from([1, 5000, 50_000, 2**21]),
)
def test_every_size(sides, channels, batch, bias, channels_last, at_a_time):
    conv = randomize(nn.Conv2d(*channels, 3, padding=1, bias=bias))
    x = torch.randn(batch, channels[0], *sides)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    with torch.no_grad(), mock.patch.object(winograd, 'AT_A_TIME', at_a_time):
        found = winograd_conv(x, transform_weight(conv.weight), conv.bias)
        assert found.is_contiguous() if x.is_contiguous() else found.stride(1) == 1
        torch.testing.assert_close(found, conv.double()(x.double()).float())


@torch.no_grad()
def test_modules_of_others():
    """What computes the same is replaced, by its own parameters, under its own hooks."""
    model = nn.Sequential(
        nn.Conv2d(3, C, 3, padding=1),  # few channels
        *(nn.Sequential(random_conv(), nn.BatchNorm2d(C), nn.ReLU()) for _ in range(2)),
        random_conv(stride=2),
        random_conv(dilation=2, padding=2),
        random_conv(groups=2),
        random_conv(padding_mode='reflect'),
        random_conv(padding='same'),
        parametrizations.weight_norm(random_conv()),
        prune.l1_unstructured(random_conv(), 'weight', 0.5),
    ).eval()
    randomize(model)
    as_before, x = copy.deepcopy(model), torch.randn(2, 3, 30, 41)
    seen = []
    hook = model[1][0].register_forward_hook(lambda *call: seen.append(call[2].shape))
    use_winograd(model)
    use_winograd(model)  # once more does no harm
    names = [name for name, module in model.named_modules() if type(module) is WinogradConv2d]
    assert names == ['1.0', '2.0']
    assert list(model.state_dict()) == list(as_before.state_dict())
    with ran as call:
        torch.testing.assert_close(model(x), as_before(x), rtol=1e-4, atol=1e-4)
        hook.remove()
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model[1:3])))
        copied[0][0].weight.zero_()
        assert not torch.equal(copied(as_before[0](x)), model[1:3](as_before[0](x)))
    assert call.call_count == 6 and seen[0] == (2, C, 30, 41)


@torch.no_grad()
def test_weights_that_change():
    conv, other, x = random_conv(), random_conv(), torch.randn(1, C, 9, 9)
    use_winograd(conv)
    conv(x)
    conv.weight.data.copy_(other.weight.data)  # as mmengine's EMAHook
    conv.bias = other.bias
    torch.testing.assert_close(conv(x), other(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('why', ['gradient', 'plain', 'autocast', 'double', 'compiled', 'subclass'])
def test_steps_aside(why):
    conv, x = random_conv(), torch.randn(1, C, 9, 9)
    use_winograd(conv)
    contexts = {'plain': ops.plain(), 'autocast': torch.autocast('cpu', torch.bfloat16)}
    gradients = nullcontext() if why == 'gradient' else torch.no_grad()
    if why == 'double':
        conv, x = conv.double(), x.double()
    if why == 'subclass':
        x = x.as_subclass(OtherPeoples)
    with contexts.get(why, nullcontext()), gradients, ran as call:
        if why == 'compiled':
            torch.export.export(conv, (x,))
        else:
            out, expected = conv(x), nn.Conv2d.forward(conv, x)
            assert torch.equal(out, expected) and out.requires_grad == expected.requires_grad
    call.assert_not_called()


@pytest.mark.parametrize('outlier', [190, 1e3, 1e4, 1e6, -3e37, float('inf'), float('nan')])
@torch.no_grad()
def test_what_does_not_see_an_outlier(outlier):
    """In a direct convolution 9 outputs do. Of other maps, the results hardly change."""
    conv, x = random_conv(), torch.randn(1, C, 18, 18)
    fast = copy.deepcopy(conv)
    use_winograd(fast)
    usual = (fast(x).double() - copy.deepcopy(conv).double()(x.double())).abs().max()
    x[0, 7, 8, 10] = outlier
    sees = torch.zeros(18, 18, dtype=torch.bool)
    sees[7:10, 9:12] = True
    exact = copy.deepcopy(conv).double()(x.double()).masked_fill(sees, 0)
    assert (fast(x).masked_fill(sees, 0) - exact).abs().max() < 6 * usual
    assert torch.equal(fast(x).isfinite(), conv(x).isfinite())


@torch.no_grad()
def test_large_values_everywhere():
    conv, x = random_conv(), 3e37 * torch.rand(1, C, 9, 9)
    use_winograd(conv)
    assert torch.equal(conv(x), nn.Conv2d.forward(conv, x))
    assert not conv(torch.zeros_like(x)).isnan().any()


@pytest.mark.filterwarnings('ignore:.torch.jit.script. is deprecated')
@torch.no_grad()
def test_scripts_compute_directly():
    model, x = nn.Sequential(random_conv(), nn.ReLU()), torch.randn(2, C, 9, 9)
    expected = model(x)
    use_winograd(model)
    assert torch.equal(torch.jit.script(model)(x), expected)
    assert not torch.equal(model(x), expected)


@torch.no_grad()
def test_torch_fx_traces_the_direct_convolution():
    conv = random_conv()
    x = torch.randn(2, C, 9, 9)
    expected = conv(x)
    use_winograd(conv)
    assert torch.equal(torch.fx.symbolic_trace(conv)(x), expected)


def test_empty_and_wrong_maps():
    conv = random_conv()
    use_winograd(conv)
    with torch.no_grad():
        assert conv(torch.randn(0, C, 5, 5)).shape == (0, C, 5, 5)  # no boxes
        assert conv(torch.randn(C, 5, 5)).shape == (C, 5, 5)
        with pytest.raises(RuntimeError, match='channels'):
            conv(torch.randn(1, C + 1, 5, 5))
