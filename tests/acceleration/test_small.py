"""Small maps, which plain layers compute."""

import copy

import pytest
import torch
import torch.nn.functional as F
from reference import same_maps
from torch import nn

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import attention, norms, ordinary, products
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.layers import LayerNorm
from cpvt_pyramid.model import MLP, GlobalAttention
from tests.models.ours import BACKBONES, VALID, images, maps_and_gradients


@pytest.fixture(autouse=True)
def as_large_maps():
    """Here small maps are small."""


@pytest.mark.parametrize('valid', [None, VALID], ids=['whole', 'padded'])
@pytest.mark.parametrize('name', BACKBONES)
def test_models_of_small_images(name, valid):
    model = BACKBONES[name]().train()
    fast = accelerate(copy.deepcopy(model))
    maps, grads = maps_and_gradients(model, images(), valid)
    fast_maps, fast_grads = maps_and_gradients(fast, images(), valid)
    same_maps(fast_maps, maps, rtol=1.3e-6, atol=2e-5)  # patches are summed in another order
    for a, b in zip(fast_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5 * b.abs().max().item())


def layers() -> dict:
    """For each part a layer, and a function that calls it with a map."""
    grid = Grid(1, 1)
    return {
        'linear': (nn.Linear(64, 64), lambda layer, x: layer(x)),
        'norm': (LayerNorm(64), lambda layer, x: layer(x)),
        'MLP': (MLP(64, 256), lambda layer, x: layer(x, grid)),
        'attention': (GlobalAttention(64, 2, sr_ratio=1), lambda layer, x: layer(x, grid)),
    }


@pytest.mark.parametrize('part', layers())
@torch.no_grad()
def test_which_layers_are_plain(part, monkeypatch):
    """Bit-identical if the map is small; others are computed by the functions of acceleration."""
    layer, call = layers()[part]
    x = torch.randn(1, 4, 8, 64)
    expected = call(layer, x)
    accelerate(layer)
    called = []

    def recorded(function):
        return lambda *args, **kwargs: (called.append(function), function(*args, **kwargs))[1]

    for module, function in (
        (products, products.affine),
        (norms, norms.fast_layer_norm),
        (attention, attention.forward_attention),
    ):
        monkeypatch.setattr(module, function.__name__, recorded(function))
    monkeypatch.setattr(norms, 'has_kernels', lambda dtype: True)
    monkeypatch.setattr(
        norms, 'fast_layer_norm', recorded(lambda x, norm: F.layer_norm(x, x.shape[-1:], *norm))
    )
    assert torch.equal(call(layer, x), expected) and not called
    call(layer, torch.randn(1, 64, 64, 64))
    assert called


@torch.no_grad()
def test_few_tokens_of_many_channels():
    """The weight is large, and read for few tokens."""
    layer = nn.Linear(1024, 1024)
    x = torch.randn(1, 4, 4, 1024)
    assert x.numel() * 1024 > ordinary.FEW_OPERATIONS
    expected = layer(x)
    assert torch.equal(accelerate(layer)(x), expected)
