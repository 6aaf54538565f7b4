"""Every published layout, into every class that can hold it, whole or damaged, in any wrapper:
nothing loads silently in part."""

import random

import pytest
import timm
import torch
from foreign import TINY
from published_files import SOURCES, tensors_from
from support import assert_loaded
from torch import Tensor, nn

from cpvt_pyramid import CPVT, CPVTPyramid, DenseCPVT, load_weights
from cpvt_pyramid.checkpoints.formats import FORMATS, to_ours
from cpvt_pyramid.checkpoints.loading import fit_checkpoint
from cpvt_pyramid.checkpoints.reading import tensors_of
from cpvt_pyramid.mm import CPVTPyramid as Backbone
from cpvt_pyramid.timm_models import PyramidClassifier, checkpoint_filter_fn
from tests.models.ports import randomize

FILES = {name: tensors_from(name) for name in SOURCES}
OURS = {name: to_ours(tensors_of(tensors)) for name, tensors in FILES.items()}
COLUMN = dict(dim=16, heads=2, depth=2, patch_size=4)
every_source = pytest.mark.parametrize('source', SOURCES)


def is_classifiers(name: str) -> bool:
    return name.startswith(('norm.', 'head.', 'cls_'))


def assert_fits(tensors: dict[str, Tensor], source: str) -> None:
    """All tensors of the backbone; others are said to be unused."""
    arch = SOURCES[source][0]
    expected = {k: v for k, v in OURS[source].items() if not is_classifiers(k)}
    fitting, report = fit_checkpoint(CPVTPyramid(TINY[arch]), tensors)
    assert expected.keys() == set(report.loaded)
    assert fitting.keys() - expected.keys() == set(report.unused) <= REST.keys()
    assert all(torch.equal(fitting[name], value) for name, value in expected.items())
    assert all(name.startswith('norm_list.') for name in report.kept) and not report.mismatched


# Classes


@every_source
def test_core_mm_and_timm(source, tmp_path):
    arch = SOURCES[source][0]
    expected = OURS[source]
    torch.save({'state_dict': FILES[source]}, tmp_path / 'a.pth')
    core = CPVTPyramid(TINY[arch])
    load_weights(core, tmp_path / 'a.pth')
    direct = CPVTPyramid(TINY[arch])
    direct.load_state_dict(FILES[source], strict=arch != 'svt')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'))
    backbone = Backbone(TINY[arch], init_cfg=init_cfg)
    backbone.init_weights()
    classifier = PyramidClassifier(TINY[arch], num_classes=5)
    options = dict(strict=False) if arch == 'svt' else {}
    path = tmp_path / 'a.pth'
    timm.models.load_checkpoint(classifier, path, filter_fn=checkpoint_filter_fn, **options)
    for model in (core, direct, backbone, classifier):
        state = model.state_dict()
        for name, value in expected.items():
            if name in state:
                assert torch.equal(state[name], value), name
            else:
                assert is_classifiers(name) or name.startswith('norm_list.'), name
        lacking = state.keys() - expected.keys()
        assert all(is_classifiers(n) or n.startswith('norm_list.') for n in lacking)


@every_source
def test_other_architectures_are_refused(source, tmp_path):
    """Also by the columnar models; each is as it was."""
    arch = SOURCES[source][0]
    torch.save(FILES[source], tmp_path / 'a.pth')
    models = {other: CPVTPyramid(row) for other, row in TINY.items() if other != arch}
    models['fewer blocks'] = CPVTPyramid(TINY[arch]._replace(depths=(1, 1, 1, 1)))
    models['more blocks'] = CPVTPyramid(TINY[arch]._replace(depths=(2, 2, 1, 2)))
    models['column'] = CPVT(COLUMN)
    models['dense'] = DenseCPVT(COLUMN)
    for name, model in models.items():
        if {arch, name} == {'pcpvt', 'pvt'} or name == 'pvt_v2' and arch == 'mit':
            continue  # they differ in position alone, or in the width of MLPs
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(ValueError) as caught:
            load_weights(model, tmp_path / 'a.pth')
        assert '\n' not in str(caught.value) and len(str(caught.value)) < 1000
        assert_loaded(model, before)
        with pytest.raises(RuntimeError):
            model.load_state_dict(FILES[source])


# Wrappers

PREFIXES = (
    'module.',
    'model.',
    'backbone.',
    'encoder.',
    'backbone.body.',
    'module.backbone.',
    'module._orig_mod.encoder.model.',
    '_fsdp_wrapped_module.backbone._fsdp_wrapped_module.',
    'ema_model.module.net.backbone.',
    'segformer.',
    'layers.0.',
    'stages.0.',
    'patch_embed.',
)
WRAPPERS = (
    lambda tensors: tensors,
    lambda tensors: {'state_dict': tensors, 'epoch': 3},
    lambda tensors: {'model': {'state_dict': tensors}, 'optimizer': {}},
    lambda tensors: {'ema_state_dict': {'steps': torch.tensor(3)} | tensors},
)
REST = {
    'neck.conv.weight': torch.ones(2, 2, 1, 1),
    'bbox_head.layers.0.0.norm1.weight': torch.ones(3),
    'decode_head.blocks.0.norm1.bias': torch.ones(3),
    'n_averaged': torch.tensor(3),
}


@every_source
def test_prefixes(source):
    for i, prefix in enumerate(PREFIXES):
        tensors = {prefix + name: value for name, value in FILES[source].items()}
        rest = {prefix.split('.')[0] + '.' + name: value for name, value in REST.items()}
        more = ({}, REST, rest)[i % 3]
        assert_fits(WRAPPERS[i % len(WRAPPERS)](tensors | more), source)


@pytest.mark.parametrize('source', ['timm-pcpvt', 'mmseg-mit', 'transformers-mit'])
def test_several_backbones(source, tmp_path):
    """One that fits is taken; between several, the user has the choice."""
    arch = SOURCES[source][0]
    other = CPVTPyramid(TINY['svt' if arch != 'svt' else 'pcpvt'])
    tensors = {f'student.{k}': v for k, v in FILES[source].items()}
    assert_fits(tensors | {f'teacher.{k}': v for k, v in other.state_dict().items()}, source)
    randomized = {f'teacher.{k}': torch.randn_like(v) for k, v in FILES[source].items()}
    torch.save({'state_dict': tensors | randomized}, tmp_path / 'a.pth')
    model = CPVTPyramid(TINY[arch])
    with pytest.raises(ValueError, match='several backbones, with the prefixes s.*, t.*; give the'):
        load_weights(model, tmp_path / 'a.pth')
    with pytest.raises(ValueError, match='no tensor has the prefix pupil., but there are student'):
        load_weights(model, tmp_path / 'a.pth', prefix='pupil.')
    report = load_weights(model, tmp_path / 'a.pth', prefix='student')
    assert not report.kept
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in OURS[source].items() if k in state)


# Damage


def damaged(tensors: dict[str, Tensor], name: str) -> dict[str, dict[str, Tensor]]:
    """Files with one defect each: a tensor missing, misspelled, or of another shape."""
    others = {k: v for k, v in tensors.items() if k != name}
    stem, _, leaf = name.rpartition('.')
    return {
        'cut': others,
        'typo': others | {f'{stem}.{leaf}s': tensors[name]},
        'another index': others | {f'9.{name}': tensors[name]},
        'shape': others | {name: torch.cat([tensors[name], tensors[name]])},
    }


@every_source
@pytest.mark.parametrize('prefix', ['', 'module.backbone.'])
def test_damaged_files_are_refused(source, prefix):
    model = CPVTPyramid(TINY[SOURCES[source][0]])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    names = [n for n, v in FILES[source].items() if not is_of_no_backbone(n) and v.dim()]
    for name in random.Random(source).sample(names, 8):
        for kind, tensors in damaged(FILES[source], name).items():
            wrapped = {prefix + k: v for k, v in tensors.items()}
            with pytest.raises(ValueError):
                fit_checkpoint(model, wrapped)
            if not prefix:
                with pytest.raises(RuntimeError):
                    model.load_state_dict(tensors)
                assert kind == 'shape' or unchanged_but(model, before)
    # More than the file should have is said.
    extra = {f'{prefix}blocks.0.0.typo.weight': torch.ones(3)}
    wrapped = {prefix + k: v for k, v in FILES[source].items()}
    try:
        _, report = fit_checkpoint(model, wrapped | extra)
    except ValueError:
        return
    assert report.unused or report.ignored


def is_of_no_backbone(name: str) -> bool:
    """True for what a checkpoint may lack: a classifier, and stage norms of SVT."""
    return name.startswith(('norm', 'head', 'classifier', 'cls_', 'backbone.norm_after'))


def unchanged_but(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """True if a strict load that failed left the shapes of a model."""
    return all(value.shape == before[name].shape for name, value in model.state_dict().items())


# Maps of timm's models


@pytest.mark.parametrize('arch', ['pcpvt', 'svt', 'pvt_v2', 'pvt_v2_li'])
def test_timm_with_features_only(arch):
    row = TINY[arch]
    kind = 'pvt_v2_b0' if row.mlp == 'ConvMLP' else f'twins_{arch}_small'
    options = dict(
        embed_dims=row.dims,
        num_heads=row.heads,
        mlp_ratios=row.mlp_ratios,
        depths=row.depths,
        sr_ratios=row.sr_ratios,
    )
    if row.window:
        options['wss'] = (row.window,) * 4
    if row.attention == 'LinearAttention':
        options['linear'] = True
    theirs = randomize(timm.create_model(kind, features_only=True, **options))
    model = CPVTPyramid(row)
    _, report = fit_checkpoint(model, theirs.state_dict())
    assert not report.unused and all(name.startswith('norm_list.') for name in report.kept)
    assert not report.kept or arch == 'svt'


def test_timm_vit_with_features_only():
    options = dict(embed_dim=16, depth=2, num_heads=2, patch_size=4, img_size=16, out_indices=[1])
    theirs = timm.create_model('vit_tiny_patch16_224', features_only=True, **options)
    model = CPVT(COLUMN, position='learned', pretrain_img_size=16)
    _, report = fit_checkpoint(model, theirs.state_dict())
    assert not report.unused and {name.split('.')[0] for name in report.kept} <= {'head', 'norm'}


def test_the_sources_are_all_formats_of_pyramids():
    of_columns = {'vit', 'mmpretrain_vit'}
    keys = {key for _, key, _ in SOURCES.values()} | {'timm_pvt_v2_maps'}
    assert keys == {'ours', *FORMATS} - of_columns
