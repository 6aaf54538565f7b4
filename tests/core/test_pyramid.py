"""The pyramid against timm's Twins, and what it alone has (`test_contract.py` has the rest)."""

import sys

import pytest
import timm
import torch
from reference import TINY_SVT, reference_maps, same_maps
from support import run
from torch import nn

from cpvt_pyramid import CPVTPyramid, DenseCPVT
from cpvt_pyramid.model import Grid, drop_path, init_weights
from tests.models.ours import shallow
from tests.models.ports import randomize


@pytest.mark.parametrize('size', [(224, 240), (240, 224), (56, 56)], ids=str)
def test_window_padding_is_masked_when_one_side_alone_needs_it(size):
    """56 x 60 tokens: the mask of Twins' segmentation code, mmseg and mmpretrain hides nothing
    there (`mask[:, -0:]` is everything), and timm's has none."""
    model = randomize(CPVTPyramid('svt_small', out_indices=(0,))).eval()
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        ours, slow = model(image)[0][0], reference_maps(model, 'svt_small', image[0], stages=1)[0]
    torch.testing.assert_close(ours, slow)


# --- against timm ------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['pcpvt_small', 'svt_small'])
@torch.no_grad()
def test_equals_timm(name):
    """`test_timm_models.py` has the larger ones."""
    arch = shallow(name)
    theirs = randomize(timm.create_model(f'twins_{name}', depths=arch.depths)).eval()
    # timm's Twins has no stage norm, and pads windows with zeros: at 224 nothing is padded.
    whole = (96, 160) if name.startswith('pcpvt') else (224, 224)
    for options, size in (({}, whole), (dict(window_padding='zero'), (96, 64))):
        ours = CPVTPyramid(arch, stage_norm=False, **options).eval()
        image = torch.randn(2, 3, *size)
        ours.load_state_dict(theirs.state_dict())
        same_maps(ours(image), theirs.forward_intermediates(image, intermediates_only=True))
        assert epsilons(ours) == epsilons(theirs)


def epsilons(model):
    norms = {n: m.eps for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    norms.pop('norm', None)  # of timm's classifier
    return norms


@pytest.mark.parametrize(
    'arch, parameters',
    [
        ('pcpvt_small', 23_592_192),
        ('svt_small', 23_546_752),
        ('pcpvt_base', 43_314_432),
        ('svt_base', 55_300_416),
        ('pcpvt_large', 60_475_648),
        ('svt_large', 98_244_352),
        # The tables of PVT, (56^2 * 64 + 28^2 * 128 + 14^2 * 320 + 7^2 * 512 values), for the PEGs.
        ('pvt_small', 23_592_192 - 10_240 + 388_864),
        ('pvt_medium', 43_314_432 - 10_240 + 388_864),
        ('pvt_large', 60_475_648 - 10_240 + 388_864),
    ],
)
def test_number_of_parameters_is_the_published_one(arch, parameters):
    with torch.device('meta'):
        model = CPVTPyramid(arch, stage_norm=False)
    assert sum(p.numel() for p in model.parameters()) == parameters


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize('frozen', [0, 1, 3, 4])
def test_frozen_stages_survive_train(frozen):
    model = CPVTPyramid(
        TINY_SVT,
        frozen_stages=frozen,
        drop_path_rate=0.5,
        stage_norm=True,
        position='learned+peg',
        peg=dict(after=(-1, 0, 1)),
    )
    model.train()
    for i in range(4):
        pegs = [model.peg(i, j) for j in (-1, 0, 1)]
        others = (model.patch_embeds, model.pos_embeds, model.blocks, model.norm_list)
        for part in (*pegs, *(parts[i] for parts in others)):
            assert all(p.requires_grad == (i >= frozen) for p in part.parameters())
            assert all(m.training == (i >= frozen) for m in part.modules())


def test_drop_path_is_applied_once_to_a_branch():
    """mmseg and mmpretrain draw twice, so that a branch survives with (1 - p)^2."""
    rate = 0.5
    model = randomize(CPVTPyramid('pcpvt_nano', drop_path_rate=rate))
    block = model.blocks[3][-1]
    assert block.drop_path == rate
    x = torch.randn(4000, 1, 1, 192)
    grid = Grid(x)
    with torch.no_grad():
        left = drop_path(block.attn(x, grid), block.drop_path, True)
        kept = left.flatten(1).any(1)
        assert abs(kept.float().mean() - (1 - rate)) < 0.04
        torch.testing.assert_close(left[kept], block.attn(x, grid)[kept] / (1 - rate))
        # The whole block: both branches kept in a quarter, both dropped in a quarter.
        untouched = (block(x, grid) == x).flatten(1).all(1).float().mean()
    assert abs(untouched - 0.25) < 0.04


def test_initial_weights():
    model = CPVTPyramid('pcpvt_small')
    std = model.blocks[2][3].mlp.fc1.weight.std()
    assert abs(std - 0.02) < 0.001
    peg = model.pos_block[2].proj[0]
    assert abs(peg.weight.std() - (2 / 9) ** 0.5) < 0.03 and not peg.bias.any()
    assert not model.blocks[0][0].attn.q.bias.any()


def test_the_core_imports_torch_alone():
    """And no compiler, which takes seconds."""
    code = (
        'import sys, cpvt_pyramid\n'
        'cpvt_pyramid.CPVTPyramid, cpvt_pyramid.DenseCPVT\n'
        'others = "timm", "mmengine", "mmcv", "mmdet", "mmseg"\n'
        'print([name for name in sys.modules if name.split(".")[0] in others'
        ' or name.startswith(("cpvt_pyramid.mm", "torch._dynamo"))])'
    )
    assert run(sys.executable, '-c', code).stdout.strip() == '[]'


def test_layers_of_stages_that_are_not_built_do_not_count():
    """The last block that is built is one layer before the end."""
    model = CPVTPyramid('pcpvt_small', out_indices=(0, 1, 2))
    assert model.num_layers == 3 + 4 + 6 + 2
    assert model.layer_of('blocks.2.5.mlp.fc1.weight') == model.num_layers - 2


def test_initial_weights_of_layers_without_a_bias_and_of_levels():
    init_weights(nn.Linear(4, 4, bias=False))
    conv = DenseCPVT('cpvt_tiny').levels['0'].conv
    assert abs(conv.weight.std() - (2 / (9 * 256)) ** 0.5) < 1e-3
