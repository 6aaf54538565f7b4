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

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import winograd
from cpvt_pyramid.acceleration.winograd import FEWEST_CHANNELS as C
from cpvt_pyramid.acceleration.winograd import WinogradConv2d, transform_weight, winograd_conv
from tests.models.ports import randomize


class OtherPeoples(torch.Tensor):
    """A subclass that keeps to itself what functions of PyTorch return."""


ran = mock.patch.object(winograd, 'winograd_conv', wraps=winograd_conv)


def random_conv(**options: object) -> nn.Module:
    return randomize(nn.Conv2d(C, C, 3, **{'padding': 1, **options}))


@settings(max_examples=30, deadline=None)
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
        expected = conv.double()(x.double()).float()
        # Tiles round more than sums do: 4 to 7 times in the mean, now and then one value by 1e-5.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_modules_of_others():
    """What computes the same is accelerated, with its own parameters and hooks."""
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
    accelerate(model)
    accelerate(model)  # once more does no harm
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


@pytest.mark.parametrize(
    'change',
    ['copied', 'loaded', 'replaced', 'assigned', 'vector', 'trained', 'fused', 'averaged'],
)
def test_weights_that_change(change):
    conv = random_conv()
    other = randomize(nn.Conv2d(C, C, 3, padding=1), seed=1)
    x = torch.randn(1, C, 9, 9)
    accelerate(conv.eval())
    with torch.no_grad():
        conv(x)
    if change == 'copied':
        with torch.no_grad():
            conv.weight.copy_(other.weight)
            conv.bias.copy_(other.bias)
    elif change == 'loaded':
        conv.load_state_dict(other.state_dict())
    elif change == 'replaced':
        conv.weight, conv.bias = other.weight, other.bias
    elif change == 'assigned':
        conv.load_state_dict(other.state_dict(), assign=True)
    elif change == 'vector':  # it assigns views of the vector to `weight.data`
        vector = nn.utils.parameters_to_vector(other.parameters()).detach()
        nn.utils.vector_to_parameters(vector, conv.parameters())
    elif change in ('trained', 'fused'):
        conv(x).sum().backward()
        torch.optim.SGD(conv.parameters(), 0.1, fused=change == 'fused').step()
        other = nn.Conv2d(C, C, 3, padding=1)
        other.load_state_dict(conv.state_dict())
    else:  # as MMDetection's MeanTeacherHook, whose teacher is in evaluation throughout
        conv.weight.data.mul_(0).add_(other.weight.data)
        conv.bias.data.mul_(0).add_(other.bias.data)
    with torch.no_grad(), ran as call:
        torch.testing.assert_close(conv(x), other(x), rtol=1e-4, atol=1e-4)
    call.assert_called_once()


@torch.no_grad()
def test_the_weight_is_transformed_once(monkeypatch):
    conv, x = accelerate(random_conv().eval()), torch.randn(1, C, 9, 9)
    call = mock.Mock(wraps=transform_weight)
    monkeypatch.setattr(winograd, 'transform_weight', call)
    for _ in range(3):
        conv(x)
    call.assert_not_called()  # it was when the model was accelerated
    copied = copy.deepcopy(conv)
    assert 'transformed' not in vars(copied) and 'transformed' in vars(conv)
    for _ in range(3):
        copied(x)
    call.assert_called_once()


@pytest.mark.parametrize('why', ['gradient', 'autocast', 'double', 'exported', 'subclass'])
def test_steps_aside(why):
    conv, x = random_conv(), torch.randn(1, C, 9, 9)
    accelerate(conv)
    gradients = nullcontext() if why == 'gradient' else torch.no_grad()
    cast = torch.autocast('cpu', torch.bfloat16) if why == 'autocast' else nullcontext()
    if why == 'double':
        conv, x = conv.double(), x.double()
    if why == 'subclass':
        x = x.as_subclass(OtherPeoples)
    with cast, gradients, ran as call:
        if why == 'exported':
            torch.export.export(conv, (x,))
        else:
            out, expected = conv(x), nn.Conv2d.forward(conv, x)
            assert torch.equal(out, expected) and out.requires_grad == expected.requires_grad
    call.assert_not_called()


@torch.no_grad()
def test_torch_fx_traces_the_direct_convolution():
    conv = random_conv()
    x = torch.randn(2, C, 9, 9)
    expected = conv(x)
    accelerate(conv)
    assert torch.equal(torch.fx.symbolic_trace(conv)(x), expected)


@torch.no_grad()
def test_another_default_device(request):
    conv = accelerate(random_conv().eval())
    x = torch.randn(1, C, 9, 9)
    expected = conv(x)
    request.getfixturevalue('cuda_is_default')
    with ran as call:
        assert torch.equal(conv(x), expected)
    call.assert_called_once()


def test_empty_and_wrong_maps():
    conv = random_conv()
    accelerate(conv)
    with torch.no_grad():
        assert conv(torch.randn(0, C, 5, 5)).shape == (0, C, 5, 5)  # no boxes
        assert conv(torch.randn(C, 5, 5)).shape == (C, 5, 5)
        with pytest.raises(RuntimeError, match='channels'):
            conv(torch.randn(1, C + 1, 5, 5))
