"""The pyramid against timm's Twins, and what it alone has (`test_contract.py` has the rest)."""

import copy
import re
import sys

import pytest
import timm
import torch
from reference import TINY_SVT, reference_maps, same_maps
from support import run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from cpvt_pyramid import CPVT, CPVTPyramid, DenseCPVT
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import init_weights
from cpvt_pyramid.names import count_layers, layer_of
from tests.models.ours import images, pcpvt, pvt_v2, shallow
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
        pegs = [model.pos_block[i], *model.more_pos_block[i].values()]
        assert len(pegs) == 3
        others = (model.patch_embeds, model.pos_embeds, model.blocks, model.norm_list)
        for part in (*pegs, *(parts[i] for parts in others)):
            assert all(p.requires_grad == (i >= frozen) for p in part.parameters())
            assert all(m.training == (i >= frozen) for m in part.modules())


class Adapter(nn.Module):
    """A layer with an update of low rank and dropout (LoRA)."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(self.dropout(x)))


def test_adapters_of_frozen_stages_train():
    """They are added later, in the place of a frozen layer."""
    model = CPVTPyramid('pcpvt_nano', frozen_stages=2, drop_rate=0.1)
    mlp = model.blocks[0][1].mlp
    mlp.fc1 = Adapter(mlp.fc1)
    for mode in (False, True):
        assert model.train(mode) is model
        assert mlp.fc1.dropout.training is mode
        for name, parameter in model.named_parameters():
            is_frozen = name.split('.')[1] in '01' and not re.search('down|up', name)
            assert parameter.requires_grad is not is_frozen
    model(torch.randn(1, 3, 32, 32))[0].sum().backward()
    assert mlp.fc1.up.weight.grad.any()


class Wrapper(nn.Module):
    """A module around another one, under whose name it is registered."""

    def __init__(self, module):
        super().__init__()
        self.wrapped = module

    def forward(self, *inputs):
        return self.wrapped(*inputs)


@pytest.mark.parametrize('copied', [False, True], ids=['', 'copied'])
@pytest.mark.parametrize('wrap', [Wrapper, checkpoint_wrapper, torch.compile])
def test_wrapped_parts_of_frozen_stages_stay_frozen(wrap, copied):
    model = randomize(CPVTPyramid('pcpvt_nano', out_indices=(0,), frozen_stages=1, drop_rate=0.5))
    if copied:
        model = copy.deepcopy(model)
    expected = model.eval()(images())
    model.pos_block[0] = wrap(model.pos_block[0])
    model.blocks[0][0].mlp.fc1 = wrap(model.blocks[0][0].mlp.fc1)
    for j in range(2):
        model.blocks[0][j] = wrap(model.blocks[0][j])
    model.requires_grad_(True)
    model.train()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    if wrap is not torch.compile:  # which takes seconds
        torch.testing.assert_close(model(images()), expected)
    assert not any(module.training for module in model.modules() if not list(module.children()))


def test_frozen_stages_stay_frozen():
    """OpenMMLab calls `train` before each epoch, and weights are replaced by some loaders."""
    model = CPVTPyramid('pcpvt_nano', frozen_stages=1)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert not model.train().patch_embeds[0].proj.weight.requires_grad
    model.requires_grad_(True)
    assert not model.train().patch_embeds[0].proj.weight.requires_grad
    assert model.patch_embeds[1].proj.weight.requires_grad


@pytest.mark.parametrize('kind', [CPVTPyramid, CPVT, DenseCPVT])
def test_a_derived_class_may_have_a_train_of_its_own(kind):
    """Which reads what its constructor sets after the base's."""

    class Derived(kind):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.calls = []

        def train(self, mode=True):
            self.calls.append(mode)
            return super().train(mode)

    options = dict(frozen_stages=1) if kind is CPVTPyramid else {}
    model = Derived('pcpvt_nano' if options else 'cpvt_tiny', **options)
    assert not model.calls
    assert model.eval().calls == [False]


@pytest.mark.parametrize('assigned', [False, True])
@pytest.mark.parametrize('build', [pcpvt, pvt_v2])
def test_depthwise_weights_lie_as_their_gradients(build, assigned):
    """DDP warns where strides differ. Loaders that assign put others in their place."""
    model = build()
    before = model.state_dict()
    if assigned:
        weights = {k: v.clone(memory_format=torch.contiguous_format) for k, v in before.items()}
        model.load_state_dict(weights, assign=True)
    sum(x.square().mean() for x in model(torch.randn(1, 3, 64, 64))).backward()
    depthwise = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert len(depthwise) >= 4
    for conv in depthwise:
        assert conv.weight.stride() == conv.weight.grad.stride()
        assert conv.weight.is_contiguous() and conv.weight.requires_grad
    for name, value in copy.deepcopy(model).state_dict().items():
        assert torch.equal(value, before[name]) and value.stride() == before[name].stride()


def test_drop_path_is_applied_once_to_a_branch():
    """mmseg and mmpretrain draw twice, so that a branch survives with (1 - p)^2."""
    rate = 0.5
    model = randomize(CPVTPyramid('pcpvt_nano', drop_path_rate=rate))
    block = model.blocks[3][-1]
    assert block.drop_path.rate == rate
    x = torch.randn(4000, 1, 1, 192)
    grid = Grid(*x.shape[1:3])
    with torch.no_grad():
        left = block.drop_path(block.attn(x, grid))
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
    assert count_layers(model) == 3 + 4 + 6 + 2
    assert layer_of(model, 'blocks.2.5.mlp.fc1.weight') == count_layers(model) - 2


def test_initial_weights_of_layers_without_a_bias_and_of_levels():
    init_weights(nn.Linear(4, 4, bias=False))
    conv = DenseCPVT('cpvt_tiny').levels['0'].conv
    assert abs(conv.weight.std() - (2 / (9 * 256)) ** 0.5) < 1e-3
