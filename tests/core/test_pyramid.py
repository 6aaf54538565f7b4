"""The pyramid against the slow version, against timm's Twins, and one contract for all variants."""

import copy
import subprocess
import sys

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.ports import randomize
from reference import TINY_SVT, padded, reference_maps, same_maps

from cpvt_pyramid import ARCHS, CPVT, Arch, ColumnarArch, CPVTPyramid, DenseCPVT, ops
from cpvt_pyramid.masked_map import padded_batch
from cpvt_pyramid.position import Grid

TWINS = [name for name in ARCHS if name.startswith(('pcpvt', 'svt')) and name != 'pcpvt_nano']


def shallow(name: str) -> Arch:
    """The first two blocks of each stage: one with windows, if there are any, and one without."""
    return ARCHS[name]._replace(depths=(2, 2, 2, 2))


# What differs in more than depth, with the name of the first such row.
SHALLOW = {arch: name for name in reversed(ARCHS) for arch in [shallow(name)]}


# --- against the slow version ------------------------------------------------------------------


@pytest.mark.parametrize('name', ['pcpvt_nano', 'svt_small'])
@pytest.mark.parametrize(
    'size', [(1, 1), (1, 64), (7, 5), (31, 33), (64, 96), (225, 150), (4096, 64)], ids=str
)
def test_equals_the_slow_version(name, size):
    arch = shallow(name)
    model = randomize(CPVTPyramid(arch)).eval()
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        ours, slow = model(image), reference_maps(model, arch, image[0])
    for stride, a, b in zip(model.strides, ours, slow):
        assert a.shape[-2:] == (-(-size[0] // stride), -(-size[1] // stride))
        torch.testing.assert_close(a[0], b)


# A row each of the CPVT paper's study, with the arguments of the slow version that it needs.
POSITIONS = {
    'none': (dict(position='none'), {}),
    'learned': (dict(position='learned'), {}),
    'sincos': (dict(position='sincos'), dict(sincos=True)),
    'learned+peg': (dict(position='learned+peg'), {}),
    'before': (dict(peg=dict(after=-1)), {}),
    'before and after': (dict(peg=dict(after=(-1, 0, 1))), {}),
    'after each': (dict(peg=dict(after='all')), {}),
    'large kernel': (dict(peg=dict(after=-1, kernel_size=27)), {}),
    'separable': (dict(peg=dict(conv='separable', layers=4)), {}),
    '1x1': (dict(peg=dict(after='all', conv='dense', kernel_size=1)), {}),
    'no zeros': (dict(peg=dict(zero_padding=False)), dict(zero_padding=False)),
    'rope': (dict(position='rope'), dict(inside=dict(kind='rope'))),
    'rope-mixed+peg': (dict(position='rope-mixed+peg'), dict(inside=dict(kind='rope-mixed'))),
    'alibi': (dict(position='alibi'), dict(inside=dict(kind='alibi'))),
}


@pytest.mark.parametrize('options, slow', POSITIONS.values(), ids=POSITIONS)
def test_every_position_equals_the_slow_version(options, slow):
    options = dict(options, pretrain_img_size=64)
    model = randomize(CPVTPyramid('pcpvt_nano', **options)).eval()
    for size in ((64, 64), (50, 75)):
        image = torch.randn(1, 3, *size)
        with torch.no_grad():
            maps = reference_maps(model, 'pcpvt_nano', image[0], **slow)
            same_maps([x[0] for x in model(image)], maps)


@settings(deadline=None, max_examples=30)
@given(h=st.integers(1, 150), w=st.integers(1, 150), name=st.sampled_from(['pcpvt_nano', 'tiny']))
def test_equals_the_slow_version_at_any_size(h, w, name):
    arch = TINY_SVT if name == 'tiny' else ARCHS[name]
    model = randomize(CPVTPyramid(arch)).double().eval()
    image = torch.randn(1, 3, h, w, dtype=torch.double)
    with torch.no_grad():
        same_maps([x[0] for x in model(image)], reference_maps(model, arch, image[0]))


@pytest.mark.parametrize('size', [(224, 240), (240, 224), (56, 56)], ids=str)
def test_window_padding_is_masked_when_one_side_alone_needs_it(size):
    """56 x 60 tokens: the mask of Twins' segmentation code, mmseg and mmpretrain hides nothing
    there (`mask[:, -0:]` is everything), and timm's has none."""
    model = randomize(CPVTPyramid('svt_small', out_indices=(0,))).eval()
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        ours, slow = model(image)[0][0], reference_maps(model, 'svt_small', image[0], stages=1)[0]
    torch.testing.assert_close(ours, slow)


def test_zero_window_padding_is_another_result():
    image = torch.randn(1, 3, 224, 240)
    masked, zero = (
        randomize(CPVTPyramid(shallow('svt_small'), window_padding=padding)).eval()(image)[0]
        for padding in ('mask', 'zero')
    )
    assert (masked - zero).abs().max() > 0.01 * masked.abs().max()


# --- against timm ------------------------------------------------------------------------------


def timm_pair(name: str, **options) -> tuple[torch.nn.Module, torch.nn.Module]:
    arch = shallow(name)
    theirs = randomize(timm.create_model(f'twins_{name}', depths=arch.depths)).eval()
    ours = CPVTPyramid(arch, stage_norm=False, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize('arch', TWINS)
def test_all_parameters_are_timms(arch):
    """Of every block; that the first ones compute the same is tested below."""
    with torch.device('meta'):
        theirs = timm.create_model(f'twins_{arch}')
        ours = CPVTPyramid(arch, stage_norm=False)
    ours.load_state_dict(theirs.state_dict())


def assert_same_as_timm(ours, theirs, size):
    image = torch.randn(2, 3, *size)
    with torch.no_grad():
        maps = theirs.forward_intermediates(image, intermediates_only=True)
        same_maps(ours(image), maps)


@pytest.mark.parametrize('arch', [name for name in TWINS if name in SHALLOW.values()])
def test_equals_timm(arch):
    # timm's Twins has no stage norm, and pads windows with zeros: at 224 nothing is padded.
    ours, theirs = timm_pair(arch)
    assert_same_as_timm(ours, theirs, (224, 224))
    if arch.startswith('pcpvt'):
        assert_same_as_timm(ours, theirs, (96, 160))


@pytest.mark.parametrize('arch', [name for name in TWINS if name.startswith('svt')])
def test_equals_timm_where_windows_are_padded_with_zeros(arch):
    assert_same_as_timm(*timm_pair(arch, window_padding='zero'), (96, 160))


@pytest.mark.parametrize(
    'arch, parameters',
    [
        ('pcpvt_small', 23_592_192),
        ('pcpvt_base', 43_314_432),
        ('pcpvt_large', 60_475_648),
        ('svt_small', 23_546_752),
        ('svt_base', 55_300_416),
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


# --- the contract of every variant -------------------------------------------------------------


@pytest.mark.parametrize('arch', SHALLOW, ids=SHALLOW.values())
class TestEveryVariant:
    def test_maps_and_gradients(self, arch):
        """Ceil-sized maps of the promised channels, and a gradient for every parameter."""
        model = randomize(CPVTPyramid(arch, drop_path_rate=0.0))
        maps = model(torch.randn(2, 3, 65, 97))
        assert model.channels == arch.dims and model.strides == (4, 8, 16, 32)
        for x, channels, stride in zip(maps, model.channels, model.strides):
            assert x.shape == (2, channels, -(-65 // stride), -(-97 // stride))
            assert x.is_contiguous(memory_format=torch.channels_last)
        sum(x.square().mean() for x in maps).backward()
        without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert not without

    @pytest.mark.parametrize('out_indices', [(1,), (0, 2)])
    def test_stages_that_are_not_used_are_not_built(self, arch, out_indices):
        whole = randomize(CPVTPyramid(arch)).eval()
        part = CPVTPyramid(arch, out_indices=out_indices).eval()
        part.load_state_dict(whole.state_dict())
        image = torch.randn(1, 3, 40, 72)
        maps = part(image)
        with torch.no_grad():
            same_maps(maps, [whole(image)[i] for i in out_indices], rtol=0, atol=0)
        assert part.channels == tuple(arch.dims[i] for i in out_indices)
        maps[-1].sum().backward()
        assert all(p.grad is not None for p in part.parameters())


def test_checkpointing_changes_nothing_but_memory():
    image = torch.randn(2, 3, 70, 50)
    results = []
    for with_cp in (False, True):
        model = randomize(CPVTPyramid(TINY_SVT, with_cp=with_cp, drop_path_rate=0.5))
        torch.manual_seed(1)
        maps = model(image)
        sum(x.square().mean() for x in maps).backward()
        results.append([*maps, *(p.grad for p in model.parameters())])
    same_maps(*results, rtol=0, atol=0)


def test_checkpointing_recomputes_every_block(monkeypatch):
    calls = []
    checkpoint = ops.checkpoint
    monkeypatch.setattr(
        ops, 'checkpoint', lambda *a, **k: (calls.append(a[0].__self__), checkpoint(*a, **k))[1]
    )
    model = CPVTPyramid('pcpvt_nano', with_cp=True)
    model(torch.randn(1, 3, 32, 32))
    assert calls == [block for blocks in model.blocks for block in blocks]
    calls.clear()
    model.eval()(torch.randn(1, 3, 32, 32))
    assert not calls


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
    trainable = sum(p.requires_grad for p in model.parameters())
    assert trainable == (0 if frozen == 4 else trainable) and (trainable > 0) == (frozen < 4)


def test_norm_eval():
    model = CPVTPyramid('svt_small', norm_eval=True, out_indices=(0,)).train()
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert norms and not any(m.training for m in norms)
    assert model.blocks[0][0].mlp.training


def test_drop_path_is_applied_once_to_a_branch():
    """mmseg and mmpretrain draw twice, so that a branch survives with (1 - p)^2."""
    rate = 0.5
    model = randomize(CPVTPyramid('pcpvt_nano', drop_path_rate=rate))
    block = model.blocks[3][-1]
    assert block.drop_path.rate == rate
    x, grid = torch.randn(4000, 1, 1, 192), Grid(1, 1)
    with torch.no_grad():
        left = block.drop_path(block.attn(x, grid))
        kept = left.flatten(1).any(1)
        assert abs(kept.float().mean() - (1 - rate)) < 0.04
        torch.testing.assert_close(left[kept], block.attn(x, grid)[kept] / (1 - rate))
        # The whole block: both branches kept in a quarter, both dropped in a quarter.
        untouched = (block(x, grid) == x).flatten(1).all(1).float().mean()
    assert abs(untouched - 0.25) < 0.04


def test_drop_path_rate_grows_linearly():
    model = CPVTPyramid('pcpvt_nano', drop_path_rate=0.7)
    rates = [block.drop_path.rate for blocks in model.blocks for block in blocks]
    torch.testing.assert_close(torch.tensor(rates), torch.linspace(0, 0.7, 8))


@pytest.mark.parametrize('option', ['drop_rate', 'attn_drop_rate', 'drop_path_rate'])
def test_dropout_acts_in_training_alone(option):
    model = randomize(CPVTPyramid(TINY_SVT, **{option: 0.5}))
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        first, second = model(image)[-1], model(image)[-1]
        assert not torch.equal(first, second)
        model.eval()
        plain = randomize(CPVTPyramid(TINY_SVT)).eval()
        same_maps(model(image), plain(image), rtol=0, atol=0)


@pytest.mark.parametrize(
    'model',
    [CPVTPyramid('pcpvt_nano'), CPVTPyramid(TINY_SVT), DenseCPVT(ColumnarArch(8, 2, 2))],
    ids=['pcpvt', 'svt', 'columnar'],
)
@pytest.mark.parametrize('valid', [None, torch.zeros(0, 2)], ids=['', 'valid'])
def test_no_images(model, valid):
    one, none = torch.randn(1, 3, 50, 70), torch.randn(0, 3, 50, 70, requires_grad=True)
    maps = model(none, valid)
    assert [x.shape[1:] for x in maps] == [x.shape[1:] for x in model(one)]
    assert all(len(x) == 0 for x in maps)
    sum(x.sum() for x in maps).backward()
    assert none.grad.shape == none.shape


def test_other_channels_and_memory_formats():
    model = randomize(CPVTPyramid('pcpvt_nano', in_channels=5)).eval()
    image = torch.randn(2, 5, 50, 70)
    with torch.no_grad():
        same_maps(model(image.to(memory_format=torch.channels_last)), model(image))


@pytest.mark.parametrize('channels', [1, 2, 4])
def test_an_image_of_other_channels_is_an_error(channels):
    """oneDNN's own message names neither the image nor the option."""
    image = torch.randn(1, channels, 32, 32)
    for model in (CPVTPyramid('pcpvt_nano'), DenseCPVT(ColumnarArch(16, 2, 2))):
        with pytest.raises(ValueError, match=f'must have in_channels=3 channels, got {channels}'):
            model(image)


def test_initial_weights():
    model = CPVTPyramid('pcpvt_small')
    std = model.blocks[2][3].mlp.fc1.weight.std()
    assert abs(std - 0.02) < 0.001
    peg = model.pos_block[2].proj[0]
    assert abs(peg.weight.std() - (2 / 9) ** 0.5) < 0.03 and not peg.bias.any()
    assert not model.blocks[0][0].attn.q.bias.any()


# --- padded batches ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=3),
    more=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    arch=st.sampled_from(['pcpvt_nano', TINY_SVT]),
    position=st.sampled_from(list(POSITIONS)),
)
def test_features_are_those_of_the_image_alone(sizes, more, arch, position):
    options = dict(POSITIONS[position][0], pretrain_img_size=40)
    model = randomize(CPVTPyramid(arch, **options)).double()
    images = [torch.randn(3, *size, dtype=torch.double) for size in sizes]
    batch = padded(images, more)
    together = model(batch, valid=torch.tensor(sizes))
    apart = [model(image[None]) for image in images]
    for i, maps in enumerate(apart):
        for alone, joint in zip(maps, together):
            h, w = alone.shape[-2:]
            torch.testing.assert_close(joint[i, :, :h, :w], alone[0])
            assert not joint[i, :, h:].any() and not joint[i, :, :, w:].any()

    # What the parameters learn from a batch is what they learn from its images one by one.
    parameters = list(model.parameters())
    joint = torch.autograd.grad(loss(together), parameters)
    alone = torch.autograd.grad(sum(loss(maps) for maps in apart), parameters)
    for a, b in zip(joint, alone):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9 * max(1, b.abs().max().item()))


def test_normalized_coordinates_are_those_of_each_image():
    """The windows of SVT have none, so that this is apart from the other positions."""
    options = dict(position='rope', position_options=dict(normalized=True))
    model = randomize(CPVTPyramid('pcpvt_nano', **options)).double().eval()
    sizes = [(70, 45), (33, 100)]
    images = [torch.randn(3, *size, dtype=torch.double) for size in sizes]
    with torch.no_grad():
        together = model(padded(images), torch.tensor(sizes))
        for i, image in enumerate(images):
            slow = reference_maps(
                model, 'pcpvt_nano', image, inside=dict(kind='rope', normalized=True)
            )
            for joint, expected in zip(together, slow):
                h, w = expected.shape[-2:]
                torch.testing.assert_close(joint[i, :, :h, :w], expected)


def loss(maps):
    return sum(x.square().sum() for x in maps)


@pytest.mark.parametrize('dtype', [torch.float, torch.bfloat16, torch.half])
@pytest.mark.parametrize('position', POSITIONS)
@pytest.mark.parametrize('arch', ['pcpvt_nano', TINY_SVT], ids=['pcpvt', 'svt'])
def test_no_nan_in_any_precision(arch, position, dtype):
    """Nor where an image is wholly padding."""
    model = randomize(CPVTPyramid(arch, **POSITIONS[position][0])).to(dtype)
    maps = model(torch.randn(2, 3, 70, 50, dtype=dtype), torch.tensor([[41, 50], [0, 0]]))
    loss([x.float() for x in maps]).backward()
    assert all(x.isfinite().all() for x in maps) and not any(x[1].any() for x in maps)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_without_valid_the_padding_leaks():
    model = randomize(CPVTPyramid('pcpvt_nano')).eval()
    image = torch.randn(1, 3, 64, 64)
    batch = torch.nn.functional.pad(image, (0, 32, 0, 32))
    with torch.no_grad():
        alone, joint = model(image)[0], model(batch)[0][..., :16, :16]
    assert (alone - joint).abs().max() > 0.01


# --- position ----------------------------------------------------------------------------------


def test_pvt_with_peg_is_cpvt():
    """The paper's step: the same pyramid, with PEG in the place of the tables."""
    with torch.device('meta'):
        step, cpvt = CPVTPyramid('pvt_small', position='peg'), CPVTPyramid('pcpvt_small')
    shapes = [{k: v.shape for k, v in x.state_dict().items()} for x in (step, cpvt)]
    assert shapes[0] == shapes[1]


def test_pegs_added_at_zero_change_nothing_until_they_train():
    published = randomize(CPVTPyramid('pcpvt_nano')).eval()
    peg = dict(after='all', kernel_size=3, zero_init=True)
    model = CPVTPyramid('pcpvt_nano', peg=peg).eval()
    model.load_state_dict(published.state_dict())
    image = torch.randn(1, 3, 60, 84)
    maps = model(image)
    with torch.no_grad():
        same_maps(maps, published(image), rtol=0, atol=0)
    loss(maps).backward()
    added = list(model.more_pos_block.parameters())
    assert len(added) == 2 * 4 and all(p.grad.any() for p in added)
    with pytest.raises(RuntimeError, match='more_pos_block'):  # at random, they change a lot
        CPVTPyramid('pcpvt_nano', peg=dict(after='all')).load_state_dict(published.state_dict())


def test_frozen_pegs():
    model = CPVTPyramid('pcpvt_nano', peg=dict(after=(0, 1), frozen=True)).train()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if 'pos_block' in n} and frozen
    assert all(model.pos_block[i].proj[0].weight.any() for i in range(4))


def test_layers_are_counted_from_the_image():
    model = CPVTPyramid(TINY_SVT, position='learned+peg', peg=dict(after=(-1, 0, 1)))
    layers = {name: model.layer_of(name) for name, _ in model.named_parameters()}
    assert layers['patch_embeds.0.proj.weight'] == layers['pos_embeds.0.table'] == 0
    assert layers['blocks.0.0.norm1.weight'] == layers['pos_block.0.proj.0.weight'] == 1
    assert layers['more_pos_block.0.-1.proj.0.bias'] == 1
    assert layers['blocks.0.1.mlp.fc1.weight'] == layers['norm_list.0.weight'] == 2
    assert layers['patch_embeds.3.norm.weight'] == layers['blocks.3.0.attn.qkv.bias'] == 7
    assert max(layers.values()) == 8 and model.num_layers == 10
    # Depth grows along the forward pass.
    order = []
    for name, module in model.named_modules():
        if name and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(lambda *_, name=name: order.append(layers_of(name)))

    def layers_of(name):
        return layers[next(p for p in layers if p.startswith(name + '.'))]

    model(torch.randn(1, 3, 64, 64))
    assert order == sorted(order) and set(order) == set(layers.values())


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(arch='pcpvt_huge'), 'unknown arch .*pcpvt_small'),
        (dict(arch='cpvt_small'), 'is a columnar model; use the class CPVT'),
        (dict(out_indices=(0, 4)), 'stages from 0 to 3'),
        (dict(out_indices=()), 'stages from 0 to 3'),
        (dict(frozen_stages=5), 'from -1 to 4'),
        (dict(window_padding='reflect'), "'mask' or 'zero'"),
        (dict(drop_path_rate=1.0), 'drop rates'),
        (dict(arch=TINY_SVT._replace(depths=(2, 2))), '4 dims and 2 depths'),
        (dict(arch=Arch((8,) * 5, (1,) * 5, (1,) * 5, (1,) * 5, (1,) * 5)), '1 to 4 stages, got 5'),
        (dict(position='rotary'), "unknown position 'rotary'; one of peg, learned"),
        (dict(position='relative'), "'relative' needs the columnar model"),
        (dict(position='rope', position_options=dict(bass=10)), 'can hold base, normalized, got'),
        (dict(position='alibi', position_options=dict(base=10)), 'can hold nothing, got'),
        (dict(position='rope', position_options=dict(base=1)), 'base of RoPE must be greater'),
        (dict(arch=TINY_SVT._replace(heads=(4, 2, 3, 4)), position='rope'), 'multiple of 4 for'),
        (
            dict(arch='svt_small', position='rope', position_options=dict(normalized=True)),
            'need attention over the whole map, got .*window=7',
        ),
        (dict(position='none+peg'), 'unknown position'),
        (dict(position='learned', peg=dict(after=-1)), 'needs a position with a PEG'),
        (dict(arch='pvt_tiny', peg=dict(kernel_size=5)), 'needs a position with a PEG'),
        (dict(peg=dict(kernel_size=4)), 'must be odd, got'),
        (dict(peg=dict(conv='grouped')), 'one of depthwise, separable, dense'),
        (dict(peg=dict(layers=0)), 'layers=0'),
        (dict(peg=dict(after=())), 'must be blocks from -1'),
        (dict(peg=dict(after=(0, 40))), 'must be blocks from -1 to 5'),
        (dict(peg=dict(after='every')), 'must be blocks from -1'),
        (dict(peg=dict(qk_only=True)), 'columnar'),
        (dict(arch=TINY_SVT._replace(heads=(3, 2, 3, 4))), 'dim=8 must be divisible by heads=3'),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CPVTPyramid(**arguments)


@pytest.mark.parametrize(
    'valid, got',
    [
        (torch.tensor([[30, 40]]), r'\(1, 2\)'),
        (torch.tensor([30, 40]), r'\(2,\)'),
        (torch.ones(2, 64, 64), r'\(2, 64, 64\)'),
        ([(30, 40), (64, 64)], 'list'),
    ],
)
def test_sizes_must_be_those_of_each_image(valid, got):
    images = torch.randn(2, 3, 64, 64)
    for use in (CPVTPyramid('pcpvt_nano'), CPVT(ColumnarArch(8, 2, 2)), padded_batch):
        with pytest.raises(ValueError, match=rf'valid must be .* \(2, 2\), .* got {got}'):
            use(images, valid)


def test_unknown_arguments_fail():
    """Twins' registered variants swallow them, and with them drop_path_rate."""
    with pytest.raises(TypeError, match='drop_path'):
        CPVTPyramid('pcpvt_nano', drop_path=0.2)


def test_a_copy_is_whole(tmp_path):
    """As averaging of weights copies a model, and saving of whole models pickles it."""
    model = randomize(CPVTPyramid(TINY_SVT)).eval()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save(model, tmp_path / 'model.pth')
    pickled = torch.load(tmp_path / 'model.pth', weights_only=False)
    for copied in (copy.deepcopy(model), pickled):
        randomize(copied, seed=1)
        assert torch.equal(model.state_dict()['norm_list.0.weight'], weights['norm_list.0.weight'])
        copied.load_state_dict({f'module.{k}': v for k, v in weights.items()})
        assert all(torch.equal(v, weights[k]) for k, v in copied.state_dict().items())


def test_arch_from_a_dict():
    assert CPVTPyramid(TINY_SVT._asdict()).channels == TINY_SVT.dims


def test_the_core_imports_torch_alone():
    code = (
        'import sys, cpvt_pyramid, cpvt_pyramid.masked_map\n'
        'cpvt_pyramid.CPVTPyramid, cpvt_pyramid.DenseCPVT\n'
        'others = "timm", "mmengine", "mmcv", "mmdet", "mmseg"\n'
        'print([name for name in sys.modules'
        ' if name.split(".")[0] in others or name.startswith("cpvt_pyramid.mm")])'
    )
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == '[]'
