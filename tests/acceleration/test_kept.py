"""What an accelerated layer keeps for the gradient, against its formula's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention_formula, kept, mask_of_some
from torch import nn

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import attention, conv_mlp, products
from cpvt_pyramid.acceleration.attention import grouped_attention, groups_for
from cpvt_pyramid.acceleration.patches import PatchConv
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import MLP, Block, ConvMLP, GlobalAttention, PatchEmbed
from tests.models.ours import BACKBONES


def values_kept(function, *inputs, but_for):
    """How many values a call keeps for its gradient, without those of some tensors."""
    own = {x.untyped_storage().data_ptr() for x in but_for}
    found = {}
    for x in kept(function, *inputs):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes() // x.itemsize
    return sum(found.values())


def test_an_mlp_keeps_its_wide_map_once(monkeypatch):
    """And a large one not at all."""
    mlp = MLP(8, 64)
    x = torch.randn(1, 10, 10, 8, requires_grad=True)
    own = [x, *mlp.parameters()]
    assert values_kept(mlp, x, None, but_for=own) == 2 * 100 * 64
    accelerate(mlp)
    assert values_kept(mlp, x, None, but_for=own) == 100 * 64
    monkeypatch.setattr(products, 'AT_A_TIME', 50 * 64)
    monkeypatch.setattr(products, 'LARGEST_SAVED', 50 * 64)
    assert values_kept(mlp, x, None, but_for=own) == 0


def test_a_large_convolution_mlp_keeps_no_wide_map(monkeypatch):
    mlp = ConvMLP(8, 64)
    x = torch.randn(1, 10, 10, 8, requires_grad=True)
    inputs = (x, Grid(10, 10))
    own = [x, *mlp.parameters()]
    assert values_kept(mlp, *inputs, but_for=own) == 3 * 100 * 64
    accelerate(mlp)
    assert values_kept(mlp, *inputs, but_for=own) == 100 * 64
    monkeypatch.setattr(conv_mlp, 'AT_A_TIME', 50 * 64)
    assert values_kept(mlp, *inputs, but_for=own) == 0


@pytest.mark.parametrize('build', [MLP, ConvMLP])
def test_a_block_keeps_one_map_for_its_norm_and_mlp(build, monkeypatch):
    """The sum that both read, but not the result of the norm."""
    monkeypatch.setattr(products, 'AT_A_TIME', 50 * 64)
    monkeypatch.setattr(products, 'LARGEST_SAVED', 50 * 64)
    monkeypatch.setattr(conv_mlp, 'AT_A_TIME', 50 * 64)
    block = Block(8, nn.Identity(), build(8, 64))
    inputs = (torch.randn(1, 10, 10, 8, requires_grad=True), Grid(10, 10))
    own = list(block.parameters())
    tokens = 100
    wide_maps = 3 if build is ConvMLP else 2
    statistics = 2  # the norm's mean and deviation
    plain = tokens * (8 + statistics + 8 + wide_maps * 64)
    assert values_kept(block.normed_mlp, *inputs, but_for=own) == plain
    accelerate(block)
    assert values_kept(block.normed_mlp, *inputs, but_for=own) == tokens * 8


def test_patches_are_not_kept():
    embed = PatchEmbed(3, 8, 4, norm=False)
    x = torch.randn(1, 16, 16, 3, requires_grad=True)
    accelerate(embed)
    assert type(embed.proj) is PatchConv
    assert values_kept(embed, x, but_for=[x, *embed.parameters()]) == 0


def test_attention_keeps_no_scores(monkeypatch):
    monkeypatch.setattr(attention, 'fused_attention_is_slow', lambda dtype: True)
    layer = accelerate(GlobalAttention(8, 1, sr_ratio=1))
    x = torch.randn(1, 32, 64, 8, requires_grad=True)
    assert 2048**2 >= attention.WORTH_PRODUCTS
    sizes = [y.numel() for y in kept(layer, x, Grid(*x.shape[1:3]))]
    assert sizes and max(sizes) <= 2 * 2048 * 8


def test_gradients_lie_as_their_weights():
    """Which DDP asks for."""
    for build in BACKBONES.values():
        model = accelerate(build().train())
        sum(y.sum() for y in model(torch.randn(1, 3, 64, 64))).backward()
        for module in model.modules():
            is_patch = isinstance(module, PatchConv) and module.kernel_size != (1, 1)
            if is_patch or isinstance(module, nn.Linear):
                assert module.weight.grad.stride() == module.weight.stride()


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    queries=st.integers(1, 40),
    keys=st.integers(1, 20),
    masked=st.booleans(),
    threads=st.integers(1, 9),
)
def test_attention_is_the_formula(batch, heads, queries, keys, masked, threads):
    q = torch.randn(batch, queries, heads, 8, requires_grad=True)
    kv = torch.randn(batch, keys, 2, heads, 8, requires_grad=True)
    hidden = mask_of_some(batch, keys) if masked else None
    inputs = (q.transpose(1, 2), *(x.transpose(1, 2) for x in kv.unbind(2)))
    slow = attention_formula(*inputs, hidden).float()
    noise = torch.randn_like(slow)
    expected = torch.autograd.grad(slow, (q, kv), noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, 'SCORES_AT_A_TIME', 32)
        patch.setattr(attention, 'MIN_GROUP', 2)
        patch.setattr(torch, 'get_num_threads', lambda: threads)
        keys_hidden = None if hidden is None else hidden[:, None, None]
        found = [
            attention.PartsOfAttention.apply(*inputs, hidden).transpose(1, 2),
            grouped_attention(*inputs, keys_hidden),
        ]
        with torch.no_grad():
            out = attention.forward_attention(*inputs, hidden).transpose(1, 2)
            torch.testing.assert_close(out, slow)
    for out in found:
        torch.testing.assert_close(out, slow)
        grads = torch.autograd.grad(out, (q, kv), noise)
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_groups_keep_threads_busy():
    assert groups_for(heads=1, queries=10_000, threads=2) == 2
    assert groups_for(heads=4, queries=10_000, threads=2) == 1
    assert groups_for(heads=1, queries=800, threads=8) == 1  # too few for two groups
