"""Blocks whose second branch is one function: what it computes, and when their parts are called."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from cpvt_pyramid import CPVTPyramid, accelerate
from cpvt_pyramid.acceleration import blocks
from cpvt_pyramid.acceleration.kernels import has_kernels, has_products
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import MLP, Block, ConvMLP
from tests.models.ports import randomize

GRID = Grid(5, 7)


class NoAttention(nn.Module):
    def forward(self, x, grid):
        return x


def block(mlp=MLP):
    return randomize(Block(32, NoAttention(), mlp(32, 96, drop=0.1), drop_path=0.2)).eval()


@pytest.fixture
def calls(monkeypatch):
    """The calls of the function that computes a whole branch."""
    made = []

    def recorded(function):
        return lambda *args: (made.append(args), function(*args))[1]

    for function in (blocks.prepare_mlp, blocks.prepare_conv_mlp):
        monkeypatch.setattr(blocks, function.__name__, recorded(function))
    return made


needs_kernels = pytest.mark.skipif(
    not has_kernels(torch.float32), reason='the kernels need AVX2 and a compiler'
)


@needs_kernels
@torch.no_grad()
def test_it_computes_the_branch(calls):
    plain = block()
    x = torch.randn(2, 5, 7, 32)
    torch.testing.assert_close(accelerate(copy.deepcopy(plain))(x, GRID), plain(x, GRID))
    assert len(calls) == 1


@pytest.mark.skipif(
    not has_products(torch.bfloat16, 32, 96), reason='the kernels do not multiply bfloat16'
)
@pytest.mark.parametrize('mlp', [MLP, ConvMLP])
@torch.no_grad()
def test_autocast_casts_the_weights(mlp, calls):
    plain = block(mlp)
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(2, 5, 7, 32).bfloat16()
    with torch.autocast('cpu', torch.bfloat16):
        found, expected = fast(x, GRID), plain(x, GRID)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
    assert len(calls) == 1


@needs_kernels
@pytest.mark.parametrize('shape', [(2, 5, 32), (2, 5, 7, 1, 32)])
@torch.no_grad()
def test_tokens_that_form_no_map(shape):
    """No memory of others is read."""
    plain = block(ConvMLP)
    fast = accelerate(copy.deepcopy(plain))
    for model in (plain, fast):
        with pytest.raises((RuntimeError, ValueError), match='permute|unpack'):
            model(torch.randn(shape), GRID)


@needs_kernels
@pytest.mark.parametrize('name', ['pcpvt_nano', 'svt_small'])
@torch.no_grad()
def test_all_blocks_of_a_model_are_fused(name, calls):
    model = accelerate(CPVTPyramid(name).eval())
    model(torch.randn(1, 3, 40, 60))
    assert len(calls) == sum(map(len, model.blocks))


def hook(part):
    return lambda model: getattr(model, part).register_forward_hook(lambda m, x, out: 2 * out)


def forward_of(part):
    def change(model):
        module = getattr(model, part)
        forward = module.forward
        module.forward = lambda *args: 2 * forward(*args)

    return change


def set_to(part, **attributes):
    def change(model):
        module = model.get_submodule(part)
        for name, value in attributes.items():
            setattr(module, name, value)

    return change


def narrower(model):
    model.mlp.fc1 = randomize(nn.Linear(32, 48))
    model.mlp.fc2 = randomize(nn.Linear(48, 32))


def hide_weight(model):
    vars(model.norm2)['weight'] = torch.linspace(0, 1, 32)


CHANGES = {
    **{f'hook of {part}': hook(part) for part in ('norm2', 'mlp', 'drop_path')},
    **{f'forward of {part}': forward_of(part) for part in ('norm2', 'mlp', 'drop_path')},
    'layers': narrower,
    'method of mlp': set_to('mlp', contract=lambda wide: wide[..., :32]),
    'hidden weight': hide_weight,
    'no bias': set_to('mlp.fc2', bias=None),
    'no bias of the norm': set_to('norm2', bias=None),
    'identity': set_to('', norm2=nn.Identity()),
    'stochastic depth': set_to('', drop_path=nn.Hardtanh(-0.1, 0.1)),
    'dropout': set_to('mlp', drop=nn.Hardtanh(-0.1, 0.1)),
    'epsilon': set_to('norm2', eps=1.0),
    'epsilon of a tensor': set_to('norm2', eps=torch.tensor(1.0)),
}


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('change', CHANGES)
def test_parts_that_are_changed_later(change, grad):
    plain = block()
    fast = accelerate(copy.deepcopy(plain))
    for model in (plain, fast):
        torch.manual_seed(0)
        CHANGES[change](model)
    x = torch.randn(2, 5, 7, 32)
    before = block()
    with torch.set_grad_enabled(grad):
        expected, found = plain(x, GRID), fast(x, GRID)
    assert not torch.equal(expected, before(x, GRID))
    torch.testing.assert_close(found, expected)
    if grad:
        assert_same_gradients(fast, found, plain, expected)


def assert_same_gradients(fast, found, plain, expected):
    """Of the parameters of two blocks by their results."""
    grads = [
        torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
        for model, out in ((fast, found), (plain, expected))
    ]
    for a, b in zip(*grads):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize('frozen', ['', 'norm2', 'norm2.bias', 'mlp', 'mlp.fc1', 'mlp.fc2'])
@pytest.mark.parametrize('mlp', [MLP, ConvMLP])
def test_frozen_parameters(mlp, frozen):
    plain = block(mlp).train()
    plain.drop_path.rate = 0.5
    plain.mlp.drop = None
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    fast = accelerate(copy.deepcopy(plain))
    found = []
    for model in (plain, fast):
        torch.manual_seed(0)
        x = torch.randn(8, 5, 7, 32, requires_grad=True)
        out = model(x, GRID)
        inputs = [x, *(p for n, p in model.named_parameters() if p.requires_grad)]
        grads = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
        found.append([out, *(grad for grad in grads if grad is not None)])
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5 * a.abs().max().item())


@pytest.mark.parametrize('autocast', [False, True], ids=['weights', 'autocast'])
@pytest.mark.parametrize('mlp', [MLP, ConvMLP])
def test_gradients_of_a_norm_are_summed_in_float32(mlp, autocast):
    """PyTorch loses nine tenths of the bias's in bfloat16."""
    exact = Block(32, NoAttention(), mlp(32, 64)).double()
    low = copy.deepcopy(exact).float()
    low = accelerate(low if autocast else low.bfloat16())
    x = torch.rand(1, 128, 128, 32).bfloat16()
    grads = []
    for model in (low, exact):
        dtype = torch.bfloat16 if model is low else torch.float64
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast and model is low):
            out = model(x.to(dtype), Grid(128, 128))
        loss = out.double().sum()
        grads.append(torch.autograd.grad(loss, [model.norm2.weight, model.norm2.bias]))
    for a, b in zip(*grads):
        assert (a.double() - b).norm() <= 0.05 * b.norm()


@torch.no_grad()
def test_stochastic_depth_in_training(calls):
    plain = block()
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(9, 5, 7, 32)
    results = []
    for model in (plain, fast):
        torch.manual_seed(0)
        results.append(model.train()(x, GRID))
    torch.testing.assert_close(*results)
    assert not calls


@torch.no_grad()
def test_parts_that_stay_plain(calls):
    model = accelerate(block(), filter_fn=lambda module, name: name != 'mlp.fc1')
    model(torch.randn(1, 5, 7, 32), GRID)
    assert not calls


@needs_kernels
@pytest.mark.parametrize('name', ['pvt_v2_b0', 'svt_small'])
@torch.no_grad()
def test_another_default_device(name, calls, request):
    model = accelerate(CPVTPyramid(name).eval())
    image = torch.randn(1, 3, 40, 60)
    expected = model(image)
    count = len(calls)
    request.getfixturevalue('cuda_is_default')
    for x, y in zip(model(image), expected):
        assert torch.equal(x, y)
    assert len(calls) == 2 * count > 0


@needs_kernels
@pytest.mark.parametrize('relu', [np.True_, 1.0, nn.ReLU()], ids=str)
@torch.no_grad()
def test_a_relu_by_other_truths(relu, calls):
    plain = block(ConvMLP)
    plain.mlp.relu = relu
    x = torch.randn(2, 5, 7, 32)
    torch.testing.assert_close(accelerate(copy.deepcopy(plain))(x, GRID), plain(x, GRID))
    assert len(calls) == 1


@needs_kernels
def test_training_calls_the_parts(calls):
    model = accelerate(block())
    model(torch.randn(1, 5, 7, 32), GRID).sum().backward()
    assert not calls and model.norm2.weight.grad is not None


@needs_kernels
@torch.no_grad()
def test_infinite_tokens(calls):
    model = accelerate(block())
    x = torch.randn(1, 5, 7, 32)
    x[0, 2, 3, 4] = math.inf
    found = model(x, GRID)
    assert found[0, 2, 3].isnan().all() and found.isnan().sum() == 32 and calls
