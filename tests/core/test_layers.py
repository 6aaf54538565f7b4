"""What an MLP saves for its gradient, means of linear attention, and masks of windows."""

import pytest
import torch
import torch.nn.functional as F
from reference import kept
from torch import nn
from torch.nn.utils import parametrizations, prune

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.model import (
    MLP,
    ConvMLP,
    FrugalConvMLP,
    FrugalMLP,
    GELULinear,
    Grid,
    WindowAttention,
    pooling_weights,
)
from cpvt_pyramid.padding.mask import Padding
from tests.models.ours import VALID, images, svt
from tests.models.ports import randomize


def wide_maps(mlp, x):
    """The maps of the hidden channels that a training step saves, each storage once."""
    saved = {m.untyped_storage().data_ptr(): m for m in kept(mlp, x, Grid(x))}
    return [m for m in saved.values() if m.numel() == x.numel() * 4]


@pytest.mark.parametrize('autocast', [False, True])
def test_a_frugal_mlp_saves_one_wide_map(autocast):
    x = torch.randn(2, 9, 7, 8, requires_grad=True)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        assert len(wide_maps(MLP(8, 32), x)) == 2
        assert len(wide_maps(FrugalMLP(8, 32), x)) == 1


@pytest.mark.parametrize('trains', ['all', 'x', 'weight', 'bias'])
@pytest.mark.parametrize(('plain', 'frugal'), [(MLP, FrugalMLP), (ConvMLP, FrugalConvMLP)])
def test_a_frugal_mlp_has_the_same_gradients(plain, frugal, trains):
    expected = randomize(plain(8, 32)).double()
    found = frugal(8, 32).double()
    found.load_state_dict(expected.state_dict())
    results = []
    for mlp in (expected, found):
        x = torch.ones(2, 5, 6, 8, dtype=torch.double).cumsum(1).sin()
        chosen = {'x': x, 'weight': mlp.fc2.weight, 'bias': mlp.fc2.bias}
        if trains == 'all':
            chosen.update(mlp.named_parameters())
        else:
            mlp.requires_grad_(False)
            chosen = {trains: chosen[trains]}
        for leaf in chosen.values():
            leaf.requires_grad_()
        out = mlp(x, Grid(x))
        results.append([out, *torch.autograd.grad(out.square().sum(), list(chosen.values()))])
    torch.testing.assert_close(*results)


def test_a_frugal_mlp_calls_a_layer_of_another_class():
    """An adapter, as LoRA's, shows the weight of the layer that it wraps, and must be called."""
    mlp = FrugalMLP(8, 32)
    x = torch.randn(1, 3, 3, 8)

    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    before = mlp(x, Grid(x))
    mlp.fc2.__class__ = Adapted
    torch.testing.assert_close(mlp(x, Grid(x)), before + 1)


@pytest.mark.parametrize(
    'change',
    [
        lambda layer: prune.l1_unstructured(layer, 'weight', 0.5),
        lambda layer: nn.utils.spectral_norm(layer),
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: setattr(layer, 'bias', None),
    ],
    ids=['pruned', 'spectral norm', 'weight norm', 'no bias'],
)
def test_a_frugal_mlp_with_a_changed_layer(change):
    """Some change the layer's weight in a hook, before each call."""
    torch.manual_seed(0)
    expected = randomize(MLP(8, 32))
    found = FrugalMLP(8, 32)
    found.load_state_dict(expected.state_dict())
    x = torch.randn(1, 3, 3, 8)
    results = []
    for mlp in (expected, found):
        torch.manual_seed(0)
        change(mlp.fc2)
        for _ in range(2):
            mlp.zero_grad()
            mlp(x, Grid(x)).square().sum().backward()
        results.append({name: p.grad for name, p in mlp.named_parameters()})
    torch.testing.assert_close(*results)


def test_a_frugal_mlp_under_autocast_and_twice():
    """Weights in float32, maps in bfloat16; gradients of gradients."""
    model = randomize(CPVTPyramid('pcpvt_nano', recompute_gelu=True))
    image = torch.randn(1, 3, 40, 36)
    with torch.autocast('cpu', torch.bfloat16):
        model(image)[-1].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    x, weight, bias = (torch.randn(4, 4).double().requires_grad_() for _ in range(3))
    assert torch.autograd.gradgradcheck(GELULinear.apply, (x, weight, bias[0]))


@pytest.mark.parametrize('size', [(7, 7), (3, 20), (1, 1), (15, 8)], ids=str)
def test_means_are_those_of_adaptive_pooling(size):
    x = torch.randn(2, *size, 4)
    padding = Padding.of_batch(torch.empty(2, 1, 20, 20), torch.tensor([size, (20, 20)]))
    for weights in (pooling_weights(x, None), pooling_weights(torch.empty(2, 20, 20, 4), padding)):
        rows, columns = (w[:1, :, :side] for w, side in zip(weights, size))
        found = torch.einsum('bih,bjw,bhwc->bijc', rows, columns, x[:1])
        expected = F.adaptive_avg_pool2d(x[:1].permute(0, 3, 1, 2), 7).permute(0, 2, 3, 1)
        torch.testing.assert_close(found, expected)


def test_windows_have_a_mask_only_where_they_are_filled_up():
    assert Grid(torch.empty(1, 14, 21, 8), window=7).windows.hidden is None
    assert Grid(torch.empty(1, 14, 20, 8), window=7).windows.hidden.any()


@pytest.mark.parametrize('valid', [None, VALID], ids=['', 'valid'])
@pytest.mark.parametrize('options', [dict(), dict(position='rope')], ids=['', 'rope'])
def test_windows_beyond_the_limit_of_a_kernel_are_attended_to_in_parts(monkeypatch, options, valid):
    model = svt(**options).eval()
    batch = images()
    with torch.no_grad():
        whole = model(batch, valid)

    counts = []
    attend = WindowAttention.attend

    def counted(attention, q, *rest):
        counts.append(len(q))
        return attend(attention, q, *rest)

    monkeypatch.setattr(WindowAttention, 'attend', counted)
    monkeypatch.setattr('cpvt_pyramid.model.MAX_BATCH', 3)
    with torch.no_grad():
        in_parts = model(batch, valid)
    assert len(counts) > 8 and max(counts) == 3
    for a, b in zip(in_parts, whole):
        torch.testing.assert_close(a, b)
