"""Patch embeddings that are one function: parts that are changed later are called."""

import copy

import pytest
import torch
from torch import nn

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import embeddings
from cpvt_pyramid.acceleration.kernels import has_kernels
from cpvt_pyramid.model import OverlapPatchEmbed, PatchEmbed
from tests.models.ports import randomize

needs_kernels = pytest.mark.skipif(
    not has_kernels(torch.float32), reason='the kernels need AVX2 and a compiler'
)


def hook(part):
    return lambda model: getattr(model, part).register_forward_hook(lambda m, x, out: 2 * out)


def forward_of(part):
    def change(model):
        module = getattr(model, part)
        forward = module.forward
        module.forward = lambda x: 2 * forward(x)

    return change


def hide_weight(model):
    vars(model.norm)['weight'] = torch.linspace(0, 1, 8)


CHANGES = {
    **{f'hook of {part}': hook(part) for part in ('proj', 'norm')},
    **{f'forward of {part}': forward_of(part) for part in ('proj', 'norm')},
    'padding': lambda model: setattr(model.proj, 'padding', (2, 2)),
    'dilation': lambda model: setattr(model.proj, 'dilation', (2, 2)),
    'circular': lambda model: vars(model.proj).update(
        padding_mode='circular', padding=(1, 1), _reversed_padding_repeated_twice=[1] * 4
    ),
    'stride': lambda model: setattr(model.proj, 'stride', (1, 1)),
    'no bias': lambda model: setattr(model.proj, 'bias', None),
    'hidden weight': hide_weight,
    'epsilon': lambda model: setattr(model.norm, 'eps', 1.0),
    'identity': lambda model: setattr(model, 'norm', nn.Identity()),
    'dropout': lambda model: setattr(model, 'drop', nn.Hardtanh(-0.1, 0.1)),
    'weights': lambda model: model.proj.weight.mul_(-2),
}


@needs_kernels
@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('build', [PatchEmbed, OverlapPatchEmbed])
@torch.no_grad()
def test_parts_that_are_changed_later(build, change):
    plain = randomize(build(3, 8, 2)).eval()
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(2, 9, 12, 3)
    before = plain(x)
    for model in (plain, fast):
        torch.manual_seed(0)
        CHANGES[change](model)
    expected = plain(x)
    assert expected.shape != before.shape or not torch.equal(expected, before)
    torch.testing.assert_close(fast(x), expected)


@needs_kernels
@pytest.mark.parametrize('build', [PatchEmbed, OverlapPatchEmbed])
@pytest.mark.parametrize('order', ['tokens', 'image', 'channels last', 'part of an image'])
@torch.no_grad()
def test_orders_in_memory(build, order, monkeypatch):
    made = []

    def recorded(*args):
        made.append(args)
        return fast_embed_patches(*args)

    fast_embed_patches = embeddings.fast_embed_patches
    monkeypatch.setattr(embeddings, 'fast_embed_patches', recorded)
    plain = randomize(build(3, 8, 4)).eval()
    image = torch.randn(2, 3, 30, 41)
    if order == 'channels last':
        image = image.contiguous(memory_format=torch.channels_last)
    elif order == 'part of an image':
        image = image[:, :, 3:, 5:]
    x = image.permute(0, 2, 3, 1)
    x = x.contiguous() if order == 'tokens' else x
    torch.testing.assert_close(accelerate(copy.deepcopy(plain))(x), plain(x))
    assert len(made) == 1
