"""Checkpoints in every format, made here by instantiating the foreign models."""

import pytest
import timm
import torch
from mmseg.models.backbones import PCPVT, SVT
from reference import randomize, same_maps
from safetensors.torch import save_file

from cpvt_pyramid import CPVTPyramid, load_weights
from cpvt_pyramid.archs import ARCHS


@pytest.fixture(scope='module')
def published() -> dict:
    """A classification checkpoint with the official names, of PCPVT-S."""
    return randomize(timm.create_model('twins_pcpvt_small'), seed=3).state_dict()


def assert_loaded(model, published):
    for name, value in model.state_dict().items():
        assert torch.equal(value, published[name]), name


@pytest.mark.parametrize('strict', [True, False])
def test_official_weights_load_as_they_are(published, strict):
    model = CPVTPyramid('pcpvt_small')
    model.load_state_dict(published, strict=strict)
    assert_loaded(model, published)
    assert not model.load_report.kept and not model.load_report.unused


@pytest.mark.parametrize(
    'wrap',
    [
        lambda w: {'state_dict': w},
        lambda w: {'model': w, 'epoch': 3},
        lambda w: {'model_ema': w, 'model': {}},
        lambda w: {f'module.{k}': v for k, v in w.items()},
        lambda w: {'state_dict': {f'module.backbone.{k}': v for k, v in w.items()}},
        lambda w: {f'backbone.{k}': v for k, v in w.items()} | {'neck.conv.weight': torch.ones(1)},
    ],
)
def test_wrappers_and_prefixes(published, wrap, tmp_path):
    torch.save(wrap(published), tmp_path / 'checkpoint.pth')
    model = CPVTPyramid('pcpvt_small')
    report = load_weights(model, tmp_path / 'checkpoint.pth')
    assert_loaded(model, published)
    assert str(report).startswith('loaded 300 of 300 tensors')


def test_safetensors(published, tmp_path):
    save_file(published, tmp_path / 'model.safetensors')
    model = CPVTPyramid('pcpvt_small')
    load_weights(model, tmp_path / 'model.safetensors')
    assert_loaded(model, published)


def test_classification_weights_of_svt_leave_the_stage_norms(tmp_path):
    theirs = randomize(timm.create_model('twins_svt_small')).state_dict()
    model = CPVTPyramid('svt_small')
    model.load_state_dict(theirs)  # strict: what the checkpoint cannot have is not missed
    assert torch.equal(model.norm_list[2].weight, torch.ones(256))
    assert [name for name in model.load_report.kept if not name.startswith('norm_list')] == []


def mmseg_model(arch: str) -> torch.nn.Module:
    a = ARCHS[arch]
    options = dict(
        embed_dims=list(a.dims),
        num_heads=list(a.heads),
        mlp_ratios=list(a.mlp_ratios),
        depths=list(a.depths),
        sr_ratios=list(a.sr_ratios),
        norm_after_stage=a.stage_norm,
        qkv_bias=True,
    )
    return SVT(windiow_sizes=[a.window] * 4, **options) if a.window else PCPVT(**options)


@pytest.mark.parametrize('arch', ['pcpvt_small', 'svt_small'])
def test_equals_mmsegmentation_with_its_converted_weights(arch):
    theirs = randomize(mmseg_model(arch)).eval()
    ours = CPVTPyramid(arch).eval()
    ours.load_state_dict(theirs.state_dict())
    for model in (ours, theirs):  # mmseg has one eps where the published code has two
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-6
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        same_maps(ours(image), theirs(image))


def test_mmpretrain_names(published):
    model = CPVTPyramid('pcpvt_small')
    renamed = {
        'backbone.' + name.replace('blocks.', 'stages.', 1): value
        for name, value in published.items()
    }
    model.load_state_dict(renamed)
    assert_loaded(model, published)


def test_a_checkpoint_of_something_else_is_an_error():
    resnet = timm.create_model('resnet18').state_dict()
    with pytest.raises(ValueError, match='no tensor of this backbone, but conv1.weight'):
        CPVTPyramid('pcpvt_small').load_state_dict(resnet, strict=False)


def test_a_checkpoint_of_another_size_is_an_error(tmp_path):
    torch.save(CPVTPyramid('pcpvt_nano').state_dict(), tmp_path / 'nano.pth')
    with pytest.raises(ValueError, match='another architecture, pcpvt_nano; the model is svt_'):
        load_weights(CPVTPyramid('svt_small'), tmp_path / 'nano.pth')


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match='no checkpoint at .*nothing.pth'):
        load_weights(CPVTPyramid('pcpvt_nano'), tmp_path / 'nothing.pth')


def test_own_weights_round_trip(tmp_path):
    model = randomize(CPVTPyramid('svt_small'))
    torch.save(model.state_dict(), tmp_path / 'own.pth')
    again = CPVTPyramid('svt_small')
    again.load_state_dict(torch.load(tmp_path / 'own.pth'))
    assert_loaded(again, model.state_dict())
