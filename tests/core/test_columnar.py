"""The columnar CPVT against timm's DeiT and the slow version, and in padded batches."""

import copy

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmpretrain.models import VisionTransformer
from models.ports import randomize
from reference import bicubic, padded, reference_levels, reference_tokens, same_maps
from support import load

from cpvt_pyramid import COLUMNAR_ARCHS, CPVT, PEG, ColumnarArch, DenseCPVT, load_weights, ops
from cpvt_pyramid.weights import format_of, tensors_of, to_format, to_ours

# Small enough to try many sizes on; patches of 4 pixels make maps on which distances are clipped.
TINY = ColumnarArch(dim=16, heads=2, depth=3, mlp_ratio=2, patch_size=4)
# A row each of the CPVT paper's study, with the arguments of the slow version that it needs.
POSITIONS = {
    'peg': (dict(), {}),
    'peg at -1': (dict(peg=PEG(after=-1, kernel_size=5)), {}),
    'peg at -1 to 1': (dict(peg=PEG(after=range(-1, 2))), {}),
    'four separable pegs': (dict(peg=PEG(conv='separable', layers=4)), {}),
    'dense 1x1': (dict(peg=PEG(after='all', conv='dense', kernel_size=1)), {}),
    'border repeated': (dict(peg=PEG(zero_padding=False)), dict(zero_padding=False)),
    'queries and keys': (dict(peg=PEG(after=(-1, 1), qk_only=True)), {}),
    'learned': (dict(position='learned', pretrain_img_size=20), {}),
    'learned+peg': (dict(position='learned+peg', pretrain_img_size=20), {}),
    'sincos': (dict(position='sincos'), dict(sincos=True)),
    'relative': (dict(position='relative'), {}),
    'relative+peg': (dict(position='relative+peg'), {}),
    'rope': (dict(position='rope'), dict(inside=dict(kind='rope'))),
    'rope, normalized': (
        dict(position='rope', position_options=dict(normalized=True)),
        dict(inside=dict(kind='rope', normalized=True)),
    ),
    'rope-mixed': (dict(position='rope-mixed'), dict(inside=dict(kind='rope-mixed'))),
    'rope-mixed+peg': (
        dict(position='rope-mixed+peg', position_options=dict(normalized=True)),
        dict(inside=dict(kind='rope-mixed', normalized=True)),
    ),
    'alibi': (dict(position='alibi'), dict(inside=dict(kind='alibi'))),
    'alibi+peg': (dict(position='alibi+peg'), dict(inside=dict(kind='alibi'))),
    'lookhere': (dict(position='lookhere'), dict(inside=dict(kind='lookhere', depth=3))),
    'lookhere+peg': (
        dict(position='lookhere+peg', position_options=dict(view=180)),
        dict(inside=dict(kind='lookhere', depth=3, view=180)),
    ),
    'none': (dict(position='none'), {}),
}


def tiny(cls: type = CPVT, **options: object) -> torch.nn.Module:
    head = dict(num_classes=7) if cls is CPVT else dict(out_channels=12)
    return randomize(cls(TINY, **head, **options)).eval()


# --- against timm ------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['tiny', 'small'])
def test_with_a_learned_table_it_is_timms_deit(name):
    theirs = randomize(timm.create_model(f'deit_{name}_patch16_224')).eval()
    ours = CPVT(f'cpvt_{name}', position='learned').eval()
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image))


def test_is_timms_deit_at_another_size():
    theirs = randomize(timm.create_model('deit_tiny_patch16_224'))
    ours = CPVT('cpvt_tiny', position='learned').eval()
    ours.load_state_dict(theirs.state_dict())
    weights = theirs.state_dict()
    first, table = weights['pos_embed'].split([1, 196], dim=1)
    table = bicubic(table[0].T.unflatten(1, (14, 14)), (10, 18)).flatten(1).T[None]
    weights['pos_embed'] = torch.cat([first, table], dim=1)
    theirs = timm.create_model('deit_tiny_patch16_224', img_size=(160, 288)).eval()
    theirs.load_state_dict(weights)
    image = torch.randn(1, 3, 160, 288)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image))


@pytest.mark.parametrize('mixed', [False, True])
@pytest.mark.parametrize('size', [(96, 64), (224, 224)])
def test_with_rope_it_is_timms_rope_vit(mixed, size):
    """Its layer scales are folded into the weights before them."""
    theirs = timm.create_model(
        f'vit_small_patch16_rope{"_mixed" * mixed}_224',
        depth=2, embed_dim=32, num_heads=4, num_classes=7, img_size=size,
    )  # fmt: skip
    weights = randomize(theirs).eval().state_dict()
    frequencies = weights.pop('rope.freqs', None)
    for i in range(2):
        for name, last in (('gamma_1', 'attn.proj'), ('gamma_2', 'mlp.fc2')):
            scale = weights.pop(f'blocks.{i}.{name}')
            weights[f'blocks.{i}.{last}.weight'] = (
                scale[:, None] * weights[f'blocks.{i}.{last}.weight']
            )
            weights[f'blocks.{i}.{last}.bias'] = scale * weights[f'blocks.{i}.{last}.bias']
        if mixed:
            weights[f'blocks.{i}.attn.position.frequencies'] = frequencies[:, i]
    arch = ColumnarArch(dim=32, heads=4, depth=2)
    ours = CPVT(arch, position='rope-mixed' if mixed else 'rope', num_classes=7).eval()
    ours.load_state_dict(weights)
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image))


# --- against the slow version ------------------------------------------------------------------


@pytest.mark.parametrize('class_token', [True, False], ids=['class token', 'GAP'])
@pytest.mark.parametrize('name', POSITIONS)
def test_equals_the_slow_version(name, class_token):
    options, slow = POSITIONS[name]
    model = tiny(class_token=class_token, **options)
    for size in ((1, 1), (20, 20), (43, 38)):
        image = torch.randn(1, 3, *size)
        first, x = reference_tokens(model, image[0], **slow)
        pooled = model.norm(x.permute(1, 2, 0)).mean((0, 1))
        logits = model.head(model.norm(first[:, 0]) if class_token else pooled)
        with torch.no_grad():
            ours_first, ours, mask = model.features(image)
            torch.testing.assert_close(ours[0].permute(2, 0, 1), x)
            torch.testing.assert_close(model(image)[0], logits)
        assert mask is None
        if class_token:
            torch.testing.assert_close(ours_first[0], first[:, 0])
        else:
            assert ours_first is None


@pytest.mark.parametrize('name', POSITIONS)
def test_feature_pyramid_equals_the_slow_version(name):
    options, slow = POSITIONS[name]
    model = tiny(DenseCPVT, **options)
    assert model.channels == (12,) * 4 and model.strides == (1, 2, 4, 8)
    for size in ((1, 1), (9, 14), (21, 19)):
        image = torch.randn(1, 3, *size)
        with torch.no_grad():
            same_maps([x[0] for x in model(image)], reference_levels(model, image[0], **slow))


@settings(deadline=None, max_examples=20)
@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    name=st.sampled_from(list(POSITIONS)),
)
def test_equals_the_slow_version_at_any_size(size, name):
    options, slow = POSITIONS[name]
    model = tiny(**options).double()
    image = torch.randn(1, 3, *size, dtype=torch.double)
    with torch.no_grad():
        x = model.features(image)[1][0].permute(2, 0, 1)
        torch.testing.assert_close(x, reference_tokens(model, image[0], **slow)[1])


def test_maps_of_the_paper_s_models():
    model = DenseCPVT('cpvt_tiny', peg=PEG(after=range(6)))
    assert model.strides == (4, 8, 16, 32) and model.channels == (256,) * 4
    shapes = [tuple(x.shape[1:]) for x in model(torch.randn(1, 3, 65, 97))]
    assert shapes == [(256, 17, 25), (256, 9, 13), (256, 5, 7), (256, 3, 4)]


# --- padded batches ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    more=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    name=st.sampled_from(list(POSITIONS)),
    class_token=st.booleans(),
)
def test_features_are_those_of_the_image_alone(sizes, more, name, class_token):
    options = dict(class_token=class_token, **POSITIONS[name][0])
    model, dense = tiny(**options).double(), tiny(DenseCPVT, **options).double()
    images = [torch.randn(3, *size, dtype=torch.double) for size in sizes]
    batch = padded(images, more)
    with torch.no_grad():
        logits, maps = model(batch, torch.tensor(sizes)), dense(batch, torch.tensor(sizes))
        for i, image in enumerate(images):
            torch.testing.assert_close(logits[i], model(image[None])[0])
            for alone, joint in zip(dense(image[None]), maps):
                h, w = alone.shape[-2:]
                torch.testing.assert_close(joint[i, :, :h, :w], alone[0])
                assert not joint[i, :, h:].any() and not joint[i, :, :, w:].any()


@pytest.mark.parametrize('name', ['peg', 'learned', 'relative'])
def test_in_single_precision_they_agree_to_1e5(name):
    model = randomize(DenseCPVT('cpvt_tiny', **POSITIONS[name][0])).eval()
    sizes = [(100, 150), (161, 70)]
    images = [torch.randn(3, *size) for size in sizes]
    with torch.no_grad():
        together = model(padded(images, (31, 10)), torch.tensor(sizes))
        without = model(padded(images, (31, 10)))
        for i, image in enumerate(images):
            for alone, joint, blind in zip(model(image[None]), together, without):
                h, w = alone.shape[-2:]
                largest = alone.abs().max()
                assert (joint[i, :, :h, :w] - alone[0]).abs().max() < 1e-5 * largest
                assert (blind[i, :, :h, :w] - alone[0]).abs().max() > 1e-2 * largest


@pytest.mark.parametrize('name', POSITIONS)
@pytest.mark.parametrize('class_token', [True, False])
def test_an_image_that_is_wholly_padding_gives_no_nan(name, class_token):
    options = POSITIONS[name][0]
    model = tiny(DenseCPVT, class_token=class_token, **options)
    maps = model(torch.randn(2, 3, 20, 24), torch.tensor([[9, 17], [0, 0]]))
    sum(x.square().sum() for x in maps).backward()
    assert all(x.isfinite().all() for x in maps) and not any(x[1].any() for x in maps)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize('cls', [CPVT, DenseCPVT])
@pytest.mark.parametrize('name', POSITIONS)
@pytest.mark.parametrize('valid', [None, torch.tensor([[50, 60], [45, 64]])], ids=['', 'valid'])
def test_gradient_reaches_every_parameter(cls, name, valid):
    model = tiny(cls, **POSITIONS[name][0])
    out = model(torch.randn(2, 3, 50, 64), valid)
    sum(x.square().sum() for x in ([out] if cls is CPVT else out)).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without
    if cls is CPVT and 'relative' in name:  # each distance has a vector of its own
        assert model.blocks[0].attn.position.rows.grad.any(dim=1).all()


def test_checkpointing_changes_nothing_but_memory():
    image, valid = torch.randn(2, 3, 30, 22), torch.tensor([[30, 20], [25, 22]])
    results = []
    for with_cp in (False, True):
        model = tiny(DenseCPVT, with_cp=with_cp, drop_path_rate=0.5, attn_drop_rate=0.1).train()
        torch.manual_seed(1)
        maps = model(image, valid)
        sum(x.square().mean() for x in maps).backward()
        results.append([*maps, *(p.grad for p in model.parameters())])
    same_maps(*results, rtol=0, atol=0)


def test_checkpointing_recomputes_every_block(monkeypatch):
    calls = []
    checkpoint = ops.checkpoint
    monkeypatch.setattr(
        ops, 'checkpoint', lambda *a, **k: (calls.append(a[0].__self__), checkpoint(*a, **k))[1]
    )
    model = tiny(with_cp=True).train()
    model(torch.randn(1, 3, 8, 8))
    assert calls == list(model.blocks)


def test_drop_rates_reach_their_places():
    model = CPVT(TINY, drop_rate=0.1, attn_drop_rate=0.2, drop_path_rate=0.4)
    assert [block.drop_path.rate for block in model.blocks] == [0.0, 0.2, 0.4]
    assert all(block.attn.attn_drop == 0.2 for block in model.blocks)
    rates = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p]
    assert rates == [0.1] * (1 + 2 * TINY.depth)


def test_frozen_peg_and_peg_from_zero():
    for qk_only in (False, True):
        frozen = CPVT(TINY, peg=PEG(after=(0, 1), frozen=True, qk_only=qk_only))
        names = [n for n, p in frozen.named_parameters() if not p.requires_grad]
        assert len(names) == 4 and all('proj.0' in name for name in names)
        plain = tiny(position='none')
        model = CPVT(TINY, num_classes=7, peg=PEG(zero_init=True, qk_only=qk_only)).eval()
        model.load_state_dict(
            plain.state_dict()
        )  # strict: the PEG starts at zero, and is not missed
        image = torch.randn(1, 3, 20, 20)
        assert torch.equal(model(image), plain(image))


# --- what position does ------------------------------------------------------------------------


def shuffled(image: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The image with its 4 x 4 patches of 4 pixels in another order."""
    patches = image.unflatten(3, (4, 4)).unflatten(2, (4, 4)).transpose(3, 4).flatten(2, 3)
    patches = patches[:, :, order].unflatten(2, (4, 4)).transpose(3, 4)
    return patches.flatten(4).flatten(2, 3)


@pytest.mark.parametrize('name', POSITIONS)
def test_position_is_what_tells_patches_apart(name):
    """Without, a permutation of the patches permutes the features (CPVT, section 3.1)."""
    model = tiny(**POSITIONS[name][0])
    image, order = torch.randn(1, 3, 16, 16), torch.randperm(16)
    with torch.no_grad():
        first, x, _ = model.features(image)
        first_of_shuffled, of_shuffled, _ = model.features(shuffled(image, order))
    same = [
        torch.allclose(first_of_shuffled, first, atol=1e-5),
        torch.allclose(of_shuffled.flatten(1, 2), x.flatten(1, 2)[:, order], atol=1e-5),
    ]
    assert all(same) if name in ('none', 'dense 1x1') else not any(same)


def test_peg_is_equivariant_to_translation_away_from_the_border():
    """CPVT, section 3.2: but for what the zeros beyond the border tell, a moved image has moved
    features. Of the first block, whose attention sees the same set of patches."""
    one_block = TINY._replace(depth=1)
    model = randomize(CPVT(one_block, class_token=False)).eval()
    image = torch.zeros(1, 3, 40, 40)
    image[:, :, 8:24, 8:24] = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        x, moved = (model.features(im)[1] for im in (image, image.roll((8, 4), (2, 3))))
        learned = randomize(CPVT(one_block, position='learned')).eval()
        y, moved_y = (learned.features(im)[1] for im in (image, image.roll((8, 4), (2, 3))))
    inner = (slice(None), slice(1, 7), slice(1, 8))
    by = (slice(None), slice(3, 9), slice(2, 9))
    torch.testing.assert_close(moved[by], x[inner])
    assert (moved_y[by] - y[inner]).abs().max() > 0.1


@pytest.mark.parametrize('after, qk_only', [(-1, False), (2, False), (1, True)])
def test_class_token_passes_the_peg_untouched(after, qk_only):
    """After the last block it stays as it is; elsewhere it learns of PEG from the tokens alone."""
    model = tiny(DenseCPVT, peg=PEG(after=after, qk_only=qk_only))
    image = torch.randn(1, 3, 20, 20)
    with torch.no_grad():
        first, x, _ = model.features(image)
        for name, parameter in model.named_parameters():
            if 'pos_block' in name or '.attn.peg.' in name:
                parameter.zero_()
        first_without, x_without, _ = model.features(image)
    assert not torch.equal(x, x_without)
    assert torch.equal(first, first_without) == (after == TINY.depth - 1)


# --- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'arch, deit', [('tiny', 5_717_416), ('small', 22_050_664), ('base', 86_567_656)]
)
def test_number_of_parameters(arch, deit):
    """DeiT's, and CPVT's with PEGs in the place of the table: 6M, 23M and 88M in the paper."""

    def count(**options: object) -> int:
        with torch.device('meta'):
            return sum(p.numel() for p in CPVT(f'cpvt_{arch}', **options).parameters())

    dim = COLUMNAR_ARCHS[f'cpvt_{arch}'].dim
    assert count(position='learned') == deit
    assert count(position='none') == deit - 197 * dim
    assert count() == deit - 197 * dim + 10 * dim
    assert count(peg=PEG(after=range(6))) == deit - 197 * dim + 6 * 10 * dim
    assert count(peg=PEG(after=range(6)), class_token=False) == deit - 198 * dim + 6 * 10 * dim
    if arch == 'tiny':  # as the paper counts, without bias and class token
        model = CPVT('cpvt_tiny', position='learned+peg')
        assert model.pos_block['0'].proj[0].weight.numel() == 1_728
        assert model.pos_embed.table.numel() == 37_632


def test_the_dense_backbone_takes_a_classifier_s_weights(tmp_path):
    weights = randomize(timm.create_model('deit_tiny_patch16_224')).state_dict()
    torch.save({'model': weights}, tmp_path / 'deit.pth')
    model = DenseCPVT('cpvt_tiny', position='learned')
    report = load_weights(model, tmp_path / 'deit.pth')
    assert not report.unused and all(name.startswith('levels.') for name in report.kept)
    assert torch.equal(model.blocks[3].mlp.fc1.weight, weights['blocks.3.mlp.fc1.weight'])
    gap = DenseCPVT('cpvt_tiny', position='learned', class_token=False)
    assert not load_weights(gap, tmp_path / 'deit.pth').unused


def test_positions_are_a_choice_of_the_model():
    """Weights of DeiT start any of them; what they lack keeps its value, and is reported."""
    weights = tiny(position='learned').state_dict()
    for options in (
        dict(),
        dict(position='relative'),
        dict(position='rope-mixed'),
        dict(peg=PEG(qk_only=True)),
    ):
        model = CPVT(TINY, num_classes=7, **options)
        report = load(model, weights, strict=False)
        assert report.kept
        assert set(report.unused) == {'cls_pos', 'pos_embed.table'}


def test_a_table_of_another_size_is_named():
    weights = tiny(position='learned', pretrain_img_size=20).state_dict()
    with pytest.raises(ValueError, match='5, 5.* in the checkpoint and .*6, 6.*pretrain_img_size'):
        tiny(position='learned', pretrain_img_size=24).load_state_dict(weights, strict=False)


def test_mmpretrain_names():
    arch = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32)
    theirs = randomize(VisionTransformer(arch, img_size=20, patch_size=4))
    theirs.eval()  # which returns nothing
    model = tiny(position='learned', pretrain_img_size=20)
    weights = {f'backbone.{name}': value for name, value in theirs.state_dict().items()}
    assert sorted(load(model, weights, strict=False).kept) == ['head.bias', 'head.weight']
    image = torch.randn(1, 3, 20, 20)
    with torch.no_grad():
        first = model.norm(model.features(image)[0])
        torch.testing.assert_close(first, theirs(image)[0])


@pytest.mark.parametrize('key', ['vit', 'mmpretrain_vit'])
@pytest.mark.parametrize('class_token', [True, False])
def test_formats_are_read_back_as_they_were(key, class_token):
    weights = tiny(DenseCPVT, position='learned', class_token=class_token).state_dict()
    weights = {name: value for name, value in weights.items() if not name.startswith('levels.')}
    theirs = tensors_of(to_format(weights, key))
    assert format_of(theirs) == key
    back = to_ours(theirs)
    assert set(back) == set(weights)
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_copy_is_whole():
    model = tiny(peg=PEG(after='all'))
    copied = copy.deepcopy(model)
    randomize(copied, seed=1)
    image = torch.randn(1, 3, 9, 9)
    assert not torch.equal(copied(image), model(image))
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied(image), model(image))


def test_layers_for_layer_wise_rates():
    model = DenseCPVT(TINY, position='learned+peg', peg=PEG(after=(-1, 1)))
    layers = {}
    for name, _ in model.named_parameters():
        layers.setdefault(model.layer_of(name), set()).add('.'.join(name.split('.')[:2]))
    assert layers == {
        0: {'patch_embed.proj', 'pos_embed.table', 'cls_token', 'cls_pos'},
        1: {'blocks.0', 'pos_block.-1'},
        2: {'blocks.1', 'pos_block.1'},
        3: {'blocks.2'},
        4: {f'levels.{i}' for i in range(4)},
    }
    assert model.num_layers == 5


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(arch='cpvt_huge'), 'unknown arch .*cpvt_tiny'),
        (dict(arch='pcpvt_small'), 'is a pyramid; use the class CPVTPyramid'),
        (dict(arch=TINY._replace(heads=3)), 'dim=16 must be divisible by heads=3'),
        (dict(drop_rate=1.0), 'drop rates'),
        (dict(position='rotary'), "unknown position 'rotary'.*relative"),
        (dict(position='none', peg=PEG()), 'needs a position with a PEG'),
        (dict(peg=PEG(after=12), class_token=False), 'from -1 to 11'),
        (dict(peg=PEG(after=(0, 12))), 'from -1 to 10'),
        (dict(peg=PEG(after=11)), 'from -1 to 10'),  # the class token would not see it
        (dict(peg=PEG(after=11, qk_only=True), class_token=False), 'from -1 to 10'),
        (dict(peg=PEG(kernel_size=4)), 'odd'),
        (dict(position='lookhere', position_options=dict(views=90)), 'can hold view, got'),
        (dict(position='lookhere', position_options=dict(view=0)), 'from 0 to 360 degrees, got 0'),
        (dict(position='relative', position_options=dict(reach=0)), 'at least 1, got 0'),
        (dict(position='peg', position_options=dict(base=10)), 'can hold nothing, got'),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CPVT(**arguments)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(arch=TINY._replace(patch_size=6)), 'multiples of 4, got 6 and 16'),
        (dict(out_indices=(0, 4)), 'levels from 0 to 3'),
        (dict(out_indices=()), 'levels from 0 to 3'),
    ],
)
def test_mistakes_of_the_backbone_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        DenseCPVT(**arguments)


@pytest.mark.parametrize('cls', [CPVT, DenseCPVT])
def test_unknown_arguments_fail(cls):
    with pytest.raises(TypeError, match='drop_path'):
        cls(TINY, drop_path=0.2)


def test_levels_that_are_not_used_are_not_built():
    whole = tiny(DenseCPVT)
    part = DenseCPVT(TINY, out_channels=12, out_indices=(1, 3)).eval()
    part.load_state_dict(whole.state_dict())
    image = torch.randn(1, 3, 20, 20)
    with torch.no_grad():
        same_maps(part(image), [whole(image)[i] for i in (1, 3)], rtol=0, atol=0)
    assert part.strides == (2, 8) and set(part.levels) == {'1', '3'}
