"""The columnar CPVT against timm's ViTs, and what it alone has; see `test_contract.py`."""

import copy

import pytest
import timm
import torch
from mmpretrain.models import VisionTransformer
from reference import resized
from support import load

from cpvt_pyramid import COLUMNAR_ARCHS, CPVT, ColumnarArch, PEGConfig, load_weights
from cpvt_pyramid.checkpoints.formats import backbones_in, to_format, to_ours
from cpvt_pyramid.checkpoints.reading import tensors_of
from tests.models.ours import TINY_COLUMN, classifier, dense
from tests.models.ports import randomize

# --- against timm ------------------------------------------------------------------------------


@pytest.mark.parametrize('name, size', [('small', (224, 224)), ('tiny', (160, 288))])
def test_with_a_learned_table_it_is_timms_deit(name, size):
    theirs = randomize(timm.create_model(f'deit_{name}_patch16_224')).eval()
    weights = theirs.state_dict()
    ours = CPVT(f'cpvt_{name}', position='learned').eval()
    ours.load_state_dict(weights)
    if size != (224, 224):
        first, table = weights['pos_embed'].split([1, 196], dim=1)
        cells = [side // 16 for side in size]
        table = resized(table.unflatten(1, (14, 14)), cells, 'bicubic').flatten(1).T[None]
        theirs = timm.create_model(f'deit_{name}_patch16_224', img_size=size).eval()
        theirs.load_state_dict(weights | {'pos_embed': torch.cat([first, table], dim=1)})
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image))


@pytest.mark.parametrize('size', [(96, 64), (224, 224)])
def test_with_rope_it_is_timms_rope_vit(size):
    """Its layer scales are folded into the weights before them."""
    theirs = timm.create_model(
        'vit_small_patch16_rope_224',
        depth=2,
        embed_dim=32,
        num_heads=4,
        num_classes=7,
        img_size=size,
    )
    weights = copy.deepcopy(randomize(theirs).eval().state_dict())
    for i in range(2):
        for name, last in (('gamma_1', 'attn.proj'), ('gamma_2', 'mlp.fc2')):
            scale = weights.pop(f'blocks.{i}.{name}')
            weights[f'blocks.{i}.{last}.weight'] *= scale[:, None]
            weights[f'blocks.{i}.{last}.bias'] *= scale
    arch = ColumnarArch(dim=32, heads=4, depth=2)
    ours = CPVT(arch, position='rope', num_classes=7).eval()
    ours.load_state_dict(weights)
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), theirs(image))


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
    six = PEGConfig(after=range(6))
    assert count(peg=six) == deit - 197 * dim + 6 * 10 * dim
    assert count(peg=six, class_token=False) == deit - 198 * dim + 6 * 10 * dim
    if arch == 'tiny':  # as the paper counts, without bias and class token
        model = CPVT('cpvt_tiny', position='learned+peg')
        assert model.pos_block['0'].proj[0].weight.numel() == 1_728
        assert model.pos_embed.table.numel() == 37_632


def test_the_dense_backbone_takes_a_classifier_s_weights(tmp_path):
    weights = classifier(position='learned').state_dict()
    torch.save({'model': weights}, tmp_path / 'deit.pth')
    for class_token in (True, False):
        model = dense(position='learned', class_token=class_token)
        report = load_weights(model, tmp_path / 'deit.pth')
        assert not report.unused and all(name.startswith('levels.') for name in report.kept)
        assert torch.equal(model.blocks[2].mlp.fc1.weight, weights['blocks.2.mlp.fc1.weight'])


def test_positions_are_a_choice_of_the_model():
    """Weights of DeiT start any of them; what they lack keeps its value, and is reported."""
    weights = classifier(position='learned').state_dict()
    for options in (dict(), dict(position='relative'), dict(peg=PEGConfig(qk_only=True))):
        model = CPVT(TINY_COLUMN, num_classes=7, **options)
        report = load(model, weights, strict=False)
        assert report.kept
        assert set(report.unused) == {'cls_pos', 'pos_embed.table'}


def test_mmpretrain_names():
    arch = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32)
    theirs = randomize(VisionTransformer(arch, img_size=20, patch_size=4))
    theirs.eval()  # which returns nothing
    model = classifier(position='learned', pretrain_img_size=20)
    weights = {f'backbone.{name}': value for name, value in theirs.state_dict().items()}
    assert sorted(load(model, weights, strict=False).kept) == ['head.bias', 'head.weight']
    image = torch.randn(1, 3, 20, 20)
    with torch.no_grad():
        first = model.norm(model.features(image)[0])
        torch.testing.assert_close(first, theirs(image)[0])


@pytest.mark.parametrize('key', ['vit', 'mmpretrain_vit'])
@pytest.mark.parametrize('class_token', [True, False])
def test_formats_are_read_back_as_they_were(key, class_token):
    weights = dense(position='learned', class_token=class_token).state_dict()
    weights = {name: value for name, value in weights.items() if not name.startswith('levels.')}
    theirs = tensors_of(to_format(weights, key))
    assert backbones_in(theirs)[0].key == key
    torch.testing.assert_close(to_ours(theirs), weights, rtol=0, atol=0)


def test_the_mlp_has_a_fraction_of_the_channels():
    model = CPVT(ColumnarArch(16, 2, 2, mlp_ratio=2.7), num_classes=3)
    assert model.blocks[0].mlp.fc1.out_features == 43  # rounded down, as in the pyramids
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 3)
