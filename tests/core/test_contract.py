"""One contract for every model, whatever its shape and its position encoding."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import TINY_SVT, padded, same_maps
from support import assert_loaded
from torch import Tensor, nn

from cpvt_pyramid import ARCHS, CPVT, Arch, CPVTPyramid, DenseCPVT, PEGConfig, PosCNN, model
from cpvt_pyramid.layers import DropPath
from cpvt_pyramid.model import Block
from cpvt_pyramid.names import count_layers, layer_of
from tests.models.ours import (
    BACKBONES,
    BORDERS,
    CASES,
    POSITIONS,
    SHALLOW,
    TINY_COLUMN,
    classifier,
    cropped,
    dense,
    images,
    linear,
    outputs,
    pcpvt,
    pvt_v2,
    shallow,
    slow_outputs,
    svt,
)
from tests.models.ports import randomize

KINDS = {build.__name__: build for build in (pcpvt, svt, pvt_v2, linear, classifier, dense)}
every_kind = pytest.mark.parametrize('build', KINDS.values(), ids=KINDS)
# Not each placement of PEGs.
PLACEMENTS = (
    'large',
    'pegs',
    'peg after',
    'separable',
    'dense 1x1',
    'learned+',
    'rope+',
    'relative+',
)
MECHANISMS = {
    name: case for name, case in CASES.items() if not name.split(', ')[1].startswith(PLACEMENTS)
}
every_mechanism = pytest.mark.parametrize(('build', 'options'), MECHANISMS.values(), ids=MECHANISMS)
every_case = pytest.mark.parametrize(('build', 'options'), CASES.values(), ids=CASES)


def loss_of(maps: list[Tensor]) -> Tensor:
    return sum(x.float().square().sum() for x in maps)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def without_gradient(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


# --- against the slow version ------------------------------------------------------------------


@every_case
def test_equals_the_slow_version(build, options):
    small = build in (classifier, dense)  # whose patches are
    for size in ((1, 1), (20, 20), (21, 19) if small else (50, 75)):
        model, image = build(**options).eval(), torch.randn(1, 3, *size)
        with torch.no_grad():
            same_maps(outputs(model, image), slow_outputs(model, image, **options))


@settings(deadline=None, max_examples=30)
@given(
    case=st.sampled_from(list(CASES)),
    class_token=st.booleans(),
    size=st.tuples(st.integers(1, 120), st.integers(1, 120)),
)
@example('pcpvt, peg', True, (4096, 64))
@example('svt, peg', True, (225, 150))
@example('svt, peg', True, (1, 64))
def test_equals_the_slow_version_at_any_size(case, class_token, size):
    build, options = CASES[case]
    if build in (classifier, dense):  # whose patches are small
        size = tuple(-(-side // 3) for side in size)
        options = options | dict(class_token=class_token)
    model = build(**options).double().eval()
    image = torch.randn(1, 3, *size, dtype=torch.double)
    with torch.no_grad():
        maps = outputs(model, image)
        slow = slow_outputs(model, image, **options)
    same_maps(maps, slow)
    if build is not classifier:
        for x, stride in zip(maps, model.strides):
            assert x.shape[2:] == tuple(-(-side // stride) for side in size)


# --- shapes and gradients ----------------------------------------------------------------------


# The larger SVTs are wider than the small one, and slow.
SHAPES = [name for name in SHALLOW.values() if name not in ('svt_base', 'svt_large')]


@pytest.mark.parametrize('name', [*SHAPES, 'cpvt_tiny'])
def test_maps_and_gradients_of_every_shape(name):
    """Ceil-sized maps of the promised channels, and a gradient for every parameter."""
    if name in ARCHS:
        model, dims = randomize(CPVTPyramid(shallow(name))), ARCHS[name].dims
    else:
        model, dims = randomize(DenseCPVT(name, peg=PEGConfig(after=range(6)))), (256,) * 4
    maps = model(torch.randn(2, 3, 65, 97))
    assert model.channels == dims and model.strides == (4, 8, 16, 32)
    for x, channels, stride in zip(maps, dims, model.strides):
        assert x.shape == (2, channels, -(-65 // stride), -(-97 // stride))
    loss_of(maps).backward()
    assert not without_gradient(model)


@pytest.mark.parametrize('threads', [1, 2])
@pytest.mark.parametrize('name', ['separable pegs', 'dense 1x1', *KINDS])
def test_gradients_have_the_strides_of_their_parameters(name, threads):
    """Otherwise DDP warns: "Grad strides do not match bucket view strides". Those of PyTorch's
    convolutions depend on sizes and threads."""
    model = KINDS[name]() if name in KINDS else pcpvt(**POSITIONS[name])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loss_of(outputs(model, images())).backward()
    finally:
        torch.set_num_threads(before)
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name


@pytest.mark.parametrize('out_indices', [(1,), (0, 2), (1, 3)])
@pytest.mark.parametrize('build', [pcpvt, svt, pvt_v2, linear, dense])
def test_what_is_not_used_is_not_built(build, out_indices):
    rate = dict(drop_path_rate=0.3)
    whole, part = build(**rate).eval(), build(out_indices=out_indices, **rate).eval()
    part.load_state_dict(whole.state_dict())
    parts = dict(whole.named_modules())
    for name, module in part.named_modules():
        if isinstance(module, Block):
            assert rate_of(module) == rate_of(parts[name])
    image = torch.randn(1, 3, 40, 72)
    maps = part(image)
    with torch.no_grad():
        same_maps(maps, [whole(image)[i] for i in out_indices], rtol=0, atol=0)
    assert part.channels == tuple(whole.channels[i] for i in out_indices)
    assert part.strides == tuple(whole.strides[i] for i in out_indices)
    loss_of(maps).backward()
    assert all(p.grad is not None for p in part.parameters())


@pytest.mark.parametrize('dtype', [torch.float, torch.bfloat16, torch.half])
@every_mechanism
def test_no_nan_in_any_precision(build, options, dtype):
    """Nor where an image is wholly padding. Every parameter gets a gradient."""
    model = build(**options).to(dtype)
    sizes = torch.tensor([[41, 50], [0, 0]])
    maps = outputs(model, torch.randn(2, 3, 50, 55, dtype=dtype), sizes)
    loss_of(maps).backward()
    assert all(x.isfinite().all() for x in maps)
    assert not any(x[1].any() for x in maps if x.dim() == 4)
    assert not without_gradient(model) or dtype != torch.float
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_mean_of_an_image_that_is_padding_is_no_nan():
    model = classifier(class_token=False)
    sizes = torch.tensor([[41, 50], [0, 0]])
    assert outputs(model, torch.randn(2, 3, 50, 55), sizes)[0].isfinite().all()


@every_kind
@pytest.mark.parametrize('valid', [None, torch.zeros(0, 2)], ids=['', 'valid'])
def test_no_images(build, valid):
    model = build()
    one, none = torch.randn(1, 3, 50, 70), torch.randn(0, 3, 50, 70, requires_grad=True)
    maps = outputs(model, none, valid)
    assert [x.shape for x in maps] == [(0, *x.shape[1:]) for x in outputs(model, one)]
    loss_of(maps).backward()
    assert none.grad.shape == none.shape


@every_kind
def test_a_batch_of_one_size_is_its_images(build):
    model = build().eval()
    batch = images(2)
    with torch.no_grad():
        together = outputs(model, batch)
        apart = [outputs(model, image[None]) for image in batch]
        for maps, *alone in zip(together, *apart):
            torch.testing.assert_close(maps, torch.cat(alone))


# --- padded batches ----------------------------------------------------------------------------


@every_case
def test_features_are_those_of_the_image_alone(build, options):
    same_features_alone(build, options, True, [(61, 40), (33, 90)], more=(3, 0))


@pytest.mark.parametrize('build', [pcpvt, svt, classifier])
def test_padding_is_hidden_from_large_scores(build):
    model = build().double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if '.attn.q' in name:  # q, or qkv
                parameter.mul_(100)
        image = torch.randn(1, 3, 33, 40, dtype=torch.double)
        alone = outputs(model, image)
        together = outputs(model, padded([image[0]], (30, 30)), torch.tensor([(33, 40)]))
    for a, b in zip(alone, together):
        torch.testing.assert_close(cropped(b, a), a)


# Sides in pixels: windows of 28 and patches of 8 to 32 fit into both, one or none of them.
@pytest.mark.parametrize('sizes', [[(56, 40), (33, 84), (61, 90)], [(56, 84), (5, 3)]], ids=str)
@pytest.mark.parametrize('case', BORDERS)
def test_borders_of_other_ports_are_those_of_the_image_alone(case, sizes):
    same_features_alone(*BORDERS[case], False, sizes, more=(3, 0))


@settings(deadline=None, max_examples=30)
@given(
    case=st.sampled_from([*CASES, *BORDERS]),
    class_token=st.booleans(),
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=3),
    more=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_features_are_those_of_the_image_alone_at_any_size(case, class_token, sizes, more):
    same_features_alone(*(CASES | BORDERS)[case], class_token, sizes, more)


def same_features_alone(build, options, class_token, sizes, more):
    """Maps and gradients of images in a padded batch, with `more` pixels of padding for all."""
    if build in (classifier, dense):  # whose patches are small
        sizes = [(-(-height // 2), -(-width // 2)) for height, width in sizes]
        options = options | dict(class_token=class_token)
    model = build(**options).double()
    images = [torch.randn(3, *size, dtype=torch.double) for size in sizes]
    together = outputs(model, padded(images, more), torch.tensor(sizes))
    apart = [outputs(model, image[None]) for image in images]
    for i, maps in enumerate(apart):
        for alone, joint in zip(maps, together):
            torch.testing.assert_close(cropped(joint[i : i + 1], alone), alone)
            if joint.dim() == 4:
                assert not joint[i, :, alone.shape[2] :].any()
                assert not joint[i, :, :, alone.shape[3] :].any()

    # What the parameters learn from a batch is what they learn from its images one by one.
    options = dict(inputs=list(model.parameters()), allow_unused=True, materialize_grads=True)
    totals = (
        sum(x.square().sum() for x in together),
        sum(x.square().sum() for m in apart for x in m),
    )
    for a, b in zip(*(torch.autograd.grad(total, **options) for total in totals)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9 * max(1, b.abs().max().item()))


@every_kind
def test_in_single_precision_they_agree_to_1e5(build):
    """And without their sizes they do not."""
    model, sizes = build().eval(), [(100, 150), (161, 70)]
    images = [torch.randn(3, *size) for size in sizes]
    batch = padded(images, (31, 10))
    with torch.no_grad():
        together, blind = outputs(model, batch, torch.tensor(sizes)), outputs(model, batch)
        for i, image in enumerate(images):
            for alone, *others in zip(outputs(model, image[None]), together, blind):
                joint, without = (cropped(x[i : i + 1], alone) - alone for x in others)
                assert joint.abs().max() < 1e-5 * alone.abs().max()
                assert without.abs().max() > 1e-3 * alone.abs().max()


def test_sizes_must_be_those_of_each_image():
    images = torch.randn(2, 3, 64, 64)
    wrong = (torch.ones(1, 2), r'\(1, 2\)'), (torch.ones(2), r'\(2,\)'), ([(3, 4), (6, 6)], 'list')
    for use, (valid, got) in product((pcpvt(), classifier()), wrong):
        with pytest.raises(ValueError, match=rf'valid must be .* \(2, 2\), .* got {got}'):
            use(images, valid)


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize('name', BACKBONES)
@pytest.mark.parametrize('valid', [None, torch.tensor([[70, 41], [61, 50]])], ids=['', 'valid'])
def test_checkpointing_changes_nothing_but_memory(name, valid, monkeypatch):
    results, checkpoint = [], mock.Mock(wraps=model.checkpoint)
    monkeypatch.setattr(model, 'checkpoint', checkpoint)
    for with_cp in (False, True):
        backbone = BACKBONES[name](with_cp=with_cp, drop_path_rate=0.5, attn_drop_rate=0.1)
        torch.manual_seed(1)
        maps = backbone(torch.ones(2, 3, 70, 50), valid)
        loss_of(maps).backward()
        results.append([*maps, *(p.grad for p in backbone.parameters())])
    same_maps(*results, rtol=0, atol=0)
    calls = [call.args[0].__self__ for call in checkpoint.call_args_list]
    assert calls == [m for m in backbone.modules() if isinstance(m, Block)]
    backbone.eval()(torch.randn(1, 3, 32, 32))
    assert checkpoint.call_count == len(calls)


@every_kind
@torch.no_grad()
def test_dropout_acts_at_its_places_in_training_alone(build):
    """The rate of stochastic depth grows linearly."""
    plain, image = build().eval(), torch.randn(2, 3, 64, 64)
    for option in ('drop_rate', 'attn_drop_rate', 'drop_path_rate'):
        model = build(**{option: 0.5})
        assert not torch.equal(outputs(model, image)[-1], outputs(model, image)[-1])
        same_maps(outputs(model.eval(), image), outputs(plain, image), rtol=0, atol=0)
    model = build(drop_rate=0.1, attn_drop_rate=0.2, drop_path_rate=0.7)
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    rates = torch.tensor([rate_of(block) for block in blocks])
    torch.testing.assert_close(rates, torch.linspace(0, 0.7, len(blocks)))
    assert {block.attn.attn_drop.p for block in blocks} == {0.2}
    assert {(block.attn.drop.p, block.mlp.drop.p) for block in blocks} == {(0.1, 0.1)}


def rate_of(block: Block) -> float:
    """The rate of stochastic depth of a block; one that never drops its branches has no layer."""
    return 0 if block.drop_path is None else block.drop_path.rate


@every_kind
@torch.no_grad()
def test_dropout_is_made_of_layers_that_are_found_and_switched_one_by_one(build):
    """As for Monte Carlo dropout: all but the dropout is in evaluation mode."""
    image = torch.randn(1, 3, 64, 64)
    assert not [m for m in build().modules() if isinstance(m, (nn.Dropout, DropPath))]
    for option, kind in (
        ('drop_rate', nn.Dropout),
        ('attn_drop_rate', nn.Dropout),
        ('drop_path_rate', DropPath),
    ):
        model = build(**{option: 0.5}).eval()
        assert model.state_dict().keys() == build().state_dict().keys()
        layers = [module for module in model.modules() if isinstance(module, kind)]
        assert len(layers) >= len([m for m in model.modules() if isinstance(m, Block)]) - 1
        for layer in layers:
            layer.train()
        assert not torch.equal(outputs(model, image)[-1], outputs(model, image)[-1])
        model = pickle.loads(pickle.dumps(copy.deepcopy(model.train()))).eval()
        same_maps(outputs(model, image), outputs(build().eval(), image), rtol=0, atol=0)


@pytest.mark.parametrize('recompute_gelu', [False, True])
@pytest.mark.parametrize('build', [pcpvt, svt, pvt_v2, linear])
def test_dropout_comes_after_each_layer(monkeypatch, build, recompute_gelu):
    """After patch embeddings, projections, and both layers of MLPs."""
    rates = []
    monkeypatch.setattr(F, 'dropout', lambda x, rate, *_: rates.append(rate) or x)
    model = build(drop_rate=0.1, attn_drop_rate=0.2, recompute_gelu=recompute_gelu)
    model(torch.randn(1, 3, 64, 64))
    blocks = sum(isinstance(module, Block) for module in model.modules())
    assert rates == [0.1] * (4 + 3 * blocks)


@pytest.mark.parametrize('build', [pcpvt, svt, dense])
def test_depth_grows_along_the_forward_pass(build):
    """For learning rates that grow layer by layer."""
    model = build(position='learned+peg', peg=PEGConfig(after=(-1, 0, 1)))
    layers = {name: layer_of(model, name) for name, _ in model.named_parameters()}
    blocks = [n for n, m in model.named_modules() if isinstance(m, Block)]
    of_blocks = [layers[f'{name}.attn.proj.weight'] for name in blocks]
    assert of_blocks == list(range(1, len(blocks) + 1)) and count_layers(model) == len(blocks) + 2
    order = []
    for name, module in model.named_modules():
        first = next((n for n in layers if n.startswith(f'{name}.')), None)
        if name and first and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(lambda *_, layer=layers[first]: order.append(layer))
    outputs(model, torch.randn(1, 3, 64, 64))
    assert order == sorted(order) and set(order) == set(layers.values())
    assert order[0] == 0 and layers.get('cls_token', 0) == 0


@pytest.mark.parametrize(
    ('build', 'before', 'peg'),
    [
        (pcpvt, {}, PEGConfig(after='all')),
        (classifier, dict(position='none'), PEGConfig(after=(0, 1))),
        (classifier, dict(position='none'), PEGConfig(after=(0, 1), qk_only=True)),
    ],
)
def test_pegs_from_zero_and_frozen_ones(build, before, peg):
    """Pegs added to a trained model at zero change nothing until they train."""
    published = build(**before).eval()
    model = type(published)(published.arch, peg=peg._replace(zero_init=True)).eval()
    if build is classifier:
        model.head = copy.deepcopy(published.head)
    missing, unexpected = model.load_state_dict(published.state_dict(), strict=False)
    assert missing and not unexpected
    image = torch.randn(1, 3, 60, 84)
    maps = outputs(model, image)
    with torch.no_grad():
        same_maps(maps, outputs(published, image), rtol=0, atol=0)
    loss_of(maps).backward()
    added = {n: p for n, p in model.named_parameters() if n not in published.state_dict()}
    assert added and all(p.grad.any() for p in added.values())
    with pytest.raises((RuntimeError, ValueError)):  # at random, they change a lot
        build(peg=peg).load_state_dict(published.state_dict())
    frozen = build(peg=peg._replace(frozen=True)).train()
    names = {n for n, p in frozen.named_parameters() if not p.requires_grad}
    assert names == {n for n in frozen.state_dict() if 'pos_block' in n or '.attn.peg.' in n}
    assert all(frozen.get_parameter(name).any() for name in names)


# --- use ---------------------------------------------------------------------------------------


@every_kind
def test_a_copy_is_whole(build, tmp_path):
    """As averaging of weights copies a model, and saving of whole models pickles it."""
    model = build().eval()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save(model, tmp_path / 'model.pth')
    pickled = torch.load(tmp_path / 'model.pth', weights_only=False)
    for copied in (copy.deepcopy(model), pickled):
        randomize(copied, seed=1)
        assert_loaded(model, weights)
        copied.load_state_dict(weights)
        assert_loaded(copied, weights)


@every_kind
def test_other_channels_and_memory_formats(build):
    model, image = build(in_channels=5).eval(), torch.randn(2, 5, 50, 70)
    with torch.no_grad():
        maps = outputs(model, image)
        same_maps(outputs(model, image.to(memory_format=torch.channels_last)), maps)
    for channels in (1, 3, 4):  # oneDNN's own message names neither the image nor the option
        with pytest.raises(ValueError, match=f'must have in_channels=5 channels, got {channels}'):
            model(image[:, :channels])


@every_case
def test_the_default_dtype_changes_nothing(build, options):
    """Of a model whose own dtype is another, as where several models share a program."""
    model, image = build(**options).eval(), torch.randn(1, 3, 40, 52)
    sizes = torch.tensor([[31, 40]])
    with torch.no_grad():
        expected = [*outputs(model, image), *outputs(model, image, sizes)]
        with default_dtype(torch.bfloat16):
            found = [*outputs(model, image), *outputs(model, image, sizes)]
    same_maps(found, expected, rtol=0, atol=0)


# --- mistakes ----------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize('size', [(0, 32), (32, 0)], ids=['height', 'width'])
def test_empty_images_are_named(build, size):
    with pytest.raises(ValueError, match=f'of at least 1, got {size[0]} x {size[1]}'):
        build()(torch.ones(1, 3, *size))


@every_kind
def test_unknown_arguments_fail(build):
    """Twins' registered variants swallow them, and with them drop_path_rate."""
    with pytest.raises(TypeError, match='drop_path'):
        build(drop_path=0.2)


MISTAKES = {
    CPVTPyramid: [
        (dict(arch='pcpvt_huge'), 'unknown arch .*pcpvt_small'),
        (dict(arch='cpvt_small'), 'is a columnar model; use the class CPVT'),
        (dict(arch=3), 'arch must be a name, a row of the class Arch or a dict .*, got 3'),
        (
            dict(arch=TINY_SVT._replace(window=0)),
            'window of WindowAttention must be at least 1, got 0',
        ),
        (dict(arch=TINY_SVT._replace(window=None)), 'must be at least 1, got None'),
        (dict(arch=ARCHS['pcpvt_nano']._replace(window=7)), 'window=7 needs an .* WindowAttention'),
        (dict(arch=ARCHS['svt_small']._replace(mlp_relu=True)), 'mlp_relu=True needs .* ConvMLP'),
        (dict(arch=ARCHS['svt_small']._replace(mlp='MLPs')), "unknown part 'MLPs' .* one of Patch"),
        (dict(position='rope', drop_border=True), 'rope needs keys for the whole map'),
        (dict(position='rope', position_options=dict(base='x')), "greater than 1, got 'x'"),
        (dict(out_indices=(0, 4)), 'stages from 0 to 3'),
        (dict(out_indices=(1.0,)), r'stages from 0 to 3, got \(1.0,\)'),
        (dict(frozen_stages=5), 'from -1 to 4'),
        (dict(frozen_stages=1.5), 'from -1 to 4'),
        (dict(window_padding='reflect'), 'one of mask, zero, mmseg'),
        (dict(drop_path_rate=1.0), 'drop rates'),
        (dict(arch=TINY_SVT._replace(depths=(2, 2))), 'one depths per stage, got 4 dims, 2'),
        (dict(arch=Arch(*[(8,) * 5] * 5)), '1 to 4 stages, got 5'),
        (dict(position='rotary'), "unknown position 'rotary'; one of peg, none"),
        (dict(position=''), "unknown position ''; one of peg, none"),
        (dict(position='relative'), "'relative' needs .* the columnar models"),
        (dict(position='rope', position_options=dict(bass=10)), 'can hold base, normalized, got'),
        (dict(position='rope', position_options=dict(base=1)), 'base of RoPE must be greater'),
        (dict(arch=TINY_SVT._replace(heads=(4, 2, 3, 4)), position='rope'), 'multiple of 4 for'),
        (
            dict(arch='svt_small', position='rope', position_options=dict(normalized=True)),
            'need attention over the whole map, and not in windows',
        ),
        (dict(arch='pvt_tiny', peg=dict(kernel_size=5)), 'needs a position with a PEG'),
        (dict(peg=dict(after=(0, 40))), 'must be blocks from -1 to 5'),
        (dict(peg=dict(qk_only=True)), 'columnar'),
    ],
    CPVT: [
        (dict(arch='pcpvt_small'), 'is a pyramid; use the class CPVTPyramid'),
        (dict(arch=TINY_COLUMN._replace(heads=3)), 'dim=16 must be divisible by heads=3'),
        (dict(peg=PEGConfig(after=12), class_token=False), 'from -1 to 11'),
        (dict(peg=PEGConfig(after=11)), 'from -1 to 10'),  # the class token would not see it
        (dict(peg=PEGConfig(after=11, qk_only=True), class_token=False), 'from -1 to 10'),
        (dict(position='relative', position_options=dict(reach=0)), 'at least 1, got 0'),
    ],
    DenseCPVT: [
        (dict(arch=TINY_COLUMN._replace(patch_size=6)), 'multiples of 4, got 6 and 16'),
        (dict(out_indices=(0, 4)), 'levels from 0 to 3'),
        (dict(out_indices=(1.0,)), r'levels from 0 to 3, got \(1.0,\)'),
    ],
    PosCNN: [
        (dict(dim=8, kernel_size=4), 'must be odd, got'),
        (dict(dim=8, conv='sparse'), 'depthwise, separable or dense'),
        (dict(dim=8, layers=0), 'at least 1, got 0'),
    ],
}


@pytest.mark.parametrize(
    ('model', 'arguments', 'message'), [(k, *row) for k, rows in MISTAKES.items() for row in rows]
)
def test_mistakes_are_named(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**arguments)
