"""The configs in docs/mm.md and docs/coming_from.md, on top of those that they start from."""

import re
import shutil
from pathlib import Path

import mmseg
import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from support import ROOT

from benchmarks.models.samples import random_data
from cpvt_pyramid import ARCHS

MM, COMING_FROM = ((ROOT / f'docs/{name}.md').read_text() for name in ('mm', 'coming_from'))
SECTIONS = dict(re.findall(r'^## (.*?)\n.*?```python\n(.*?)```', COMING_FROM, re.M | re.S))
CONFIGS = Path(mmseg.__file__).parent / '.mim/configs'
TWINS = CONFIGS / 'twins'


def load(text: str, path: Path) -> Config:
    """A config without the weights of its backbone, which are on a hub."""
    path.write_text(re.sub(r"_base_ = '(twins.*)'", rf"_base_ = '{TWINS}/\1'", text))
    cfg = Config.fromfile(path)
    cfg.model.backbone.init_cfg = None
    if 'decode_head' in cfg.model:
        cfg.model.decode_head.norm_cfg = dict(type='BN')  # a CPU has no kernel for SyncBN
    return cfg


@pytest.mark.parametrize('scope, plugin', [('mmdet', 'detection'), ('mmseg', 'segmentation')])
def test_the_configs_train(scope, plugin, tmp_path):
    for folder in ('_base_', 'sem_fpn'):
        shutil.copytree(CONFIGS / folder, tmp_path / folder)
    blocks = re.findall(r'```python\n(.*?)```', MM, re.S)
    (text,) = [block for block in blocks if f'cpvt_pyramid.mm.{plugin}' in block]
    cfg = load(text, tmp_path / 'sem_fpn/mine.py')
    assert cfg.train_dataloader and cfg.test_evaluator and cfg.train_cfg
    init_default_scope(scope)
    if scope == 'mmseg':
        cfg.model.data_preprocessor.update(size=None, size_divisor=32)
    model = MODELS.build(cfg.model)
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    assert type(optim_wrapper.optimizer) is torch.optim.AdamW
    assert {g['lr'] for g in optim_wrapper.param_groups} == {1e-4}
    last = cfg.param_scheduler[-1]
    assert last['type'] == 'MultiStepLR' or last['eta_min'] < 1e-4  # the rate falls
    inputs = random_data(scope == 'mmseg', [(64, 96), (80, 64)], boxes=[(8, 10, 50, 60)])
    before = model.backbone.pos_block[0].proj[0].weight.detach().clone()
    losses = model.train_step(inputs, optim_wrapper)
    assert all(torch.isfinite(value).all() for value in losses.values())
    assert not torch.equal(model.backbone.pos_block[0].proj[0].weight, before)


def test_timm():
    names = {}
    exec(SECTIONS["timm's Twins"].replace('pretrained=True', 'pretrained=False'), names)
    theirs = timm.create_model('twins_pcpvt_small').eval()
    names['model'].load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(names['model'].eval()(x), theirs(x), rtol=1e-3, atol=1e-4)
        assert len(names['backbone'].eval()(x[..., :100, :90])) == 4


def test_a_segmentor_of_mmseg_keeps_its_outputs(tmp_path):
    text = SECTIONS["MMSegmentation's PCPVT and SVT"]
    original = (TWINS / Path(re.search(r"'(.*?\.py)'", text)[1]).name).read_text()
    shutil.copytree(CONFIGS / '_base_', tmp_path / '_base_')
    (tmp_path / 'theirs').mkdir()
    init_default_scope('mmseg')
    old, new = (
        MODELS.build(load(each, tmp_path / 'theirs/mine.py').model).eval()
        for each in (original, text)
    )
    new.load_state_dict(old.state_dict())  # as `load_from` does
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = old(x, mode='tensor')
        torch.testing.assert_close(new(x, mode='tensor'), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('section', ['Swin', 'ResNet'])
def test_detectors(section, tmp_path):
    cfg = load(SECTIONS[section], tmp_path / 'mine.py')
    init_default_scope('mmdet')
    assert cfg.optim_wrapper.optimizer.lr == 1e-4 and 'momentum' not in cfg.optim_wrapper.optimizer
    assert cfg.param_scheduler[-1].milestones == [8, 11]
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert model.backbone.arch == ARCHS[cfg.model.backbone.arch]
    assert tuple(cfg.model.neck.in_channels) == model.backbone.channels
    if section == 'Swin':
        for key in ('pos_block', 'norm'):  # which the recipe does not decay
            assert cfg.optim_wrapper.paramwise_cfg.custom_keys[key].decay_mult == 0
            assert any(key in name for name, _ in model.named_parameters())
