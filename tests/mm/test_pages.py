"""The configs in docs/mm.md and the README, on top of those that they start from."""

import re
import textwrap
from pathlib import Path

import mmdet
import mmseg
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import (
    HOOKS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    VISBACKENDS,
    init_default_scope,
)
from support import ROOT

import cpvt_pyramid.app.training.hooks
import cpvt_pyramid.mm.detection  # noqa: F401 (they register classes)
from cpvt_pyramid import ARCHS
from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.mm.valid_region import Normalization
from tests.models.samples import random_data

MM = (ROOT / 'docs/mm.md').read_text()
README = (ROOT / 'README.md').read_text()
EDITED, INPUTS, KEYS, SEGMENTOR, FINE_TUNING = re.findall(r'```python\n(.*?)```', MM, re.S)
(DETECTOR,) = (
    code for code in re.findall(r'```python\n(.*?)```', README, re.S) if '_base_' in code
)
DETECTORS = Path(mmdet.__file__).parent / '.mim/configs'
SEGMENTORS = Path(mmseg.__file__).parent / '.mim/configs'
RETINANET = DETECTORS / 'retinanet/retinanet_r50_fpn_1x_coco.py'
SWIN = DETECTORS / 'swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'
SEMANTIC_FPN = SEGMENTORS / 'sem_fpn/fpn_r50_4xb4-160k_ade20k-512x512.py'
TWINS = SEGMENTORS / 'twins/twins_svt-s_fpn_fpnhead_8xb4-80k_ade20k-512x512.py'

pytestmark = pytest.mark.usefixtures('quick_training')


def load(path: Path) -> Config:
    """A config without the weights of its backbone, which are on a hub."""
    cfg = Config.fromfile(path)
    cfg.model.backbone.init_cfg = None
    if 'decode_head' in cfg.model:
        cfg.model.decode_head.norm_cfg = dict(type='BN')  # a CPU has no kernel for SyncBN
        cfg.model.data_preprocessor.update(size=None, size_divisor=32)
    return cfg


def next_to_flat(snippet: str, original: Path, folder: Path) -> Config:
    """The snippet as a config next to my_config.py, which has all settings itself."""
    Config.fromfile(original).dump(folder / 'my_config.py')
    assert '\n_base_' not in (folder / 'my_config.py').read_text()
    (folder / 'mine.py').write_text(snippet)
    return load(folder / 'mine.py')


def next_to_inheriting(snippet: str, original: Path, folder: Path) -> Config:
    """The snippet as a config next to my_config.py, which has a `_base_` itself."""
    (folder / 'my_config.py').write_text(f'_base_ = {str(original)!r}\nrandomness = dict(seed=1)\n')
    (folder / 'mine.py').write_text(snippet)
    return load(folder / 'mine.py')


def at_the_end(snippet: str, original: Path, folder: Path) -> Config:
    """The snippet at the end of a flat config."""
    Config.fromfile(original).dump(folder / 'my_config.py')
    with open(folder / 'my_config.py', 'a') as file:
        file.write(snippet)
    return load(folder / 'my_config.py')


@pytest.mark.parametrize(
    'snippet, original, place',
    [
        (DETECTOR, RETINANET, next_to_flat),
        (DETECTOR, RETINANET, next_to_inheriting),
        (EDITED, RETINANET, at_the_end),
        (SEGMENTOR, SEMANTIC_FPN, next_to_flat),
    ],
    ids=['flat', 'inheriting', 'at the end', 'segmentor'],
)
def test_the_configs_train(snippet, original, place, tmp_path):
    cfg = place(snippet, original, tmp_path)
    assert cfg.train_dataloader and cfg.test_evaluator and cfg.train_cfg
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    assert type(optim_wrapper.optimizer) is torch.optim.AdamW
    assert {group['lr'] for group in optim_wrapper.param_groups} == {1e-4}
    last = cfg.param_scheduler[-1]
    assert last['type'] == 'MultiStepLR' or last['eta_min'] < 1e-4  # the rate falls
    is_segmentor = cfg.default_scope == 'mmseg'
    inputs = random_data(is_segmentor, [(64, 96), (80, 64)], boxes=[(8, 10, 50, 60)])
    before = model.backbone.pos_block[0].proj[0].weight.detach().clone()
    losses = model.train_step(inputs, optim_wrapper)
    assert all(torch.isfinite(value).all() for value in losses.values())
    assert not torch.equal(model.backbone.pos_block[0].proj[0].weight, before)


@pytest.mark.parametrize(
    'name', ['fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py', 'rtmdet/rtmdet_s_8xb32-300e_coco.py']
)
def test_other_means_become_those_of_the_weights(name, tmp_path):
    snippet = EDITED + textwrap.dedent(INPUTS)
    cfg = at_the_end(snippet, DETECTORS / name, tmp_path)
    init_default_scope('mmdet')
    preprocessor = MODELS.build(cfg.model.data_preprocessor)
    mean, std = (value.flatten().tolist() for value in (preprocessor.mean, preprocessor.std))
    assert Normalization(tuple(mean), tuple(std)).is_of_imagenet()
    assert preprocessor._channel_conversion  # mmengine's name for BGR to RGB


@pytest.mark.parametrize(
    'name',
    [
        'dino/dino-4scale_r50_8xb2-12e_coco.py',
        'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    ],
)
def test_detrs_keep_their_optimizers(name, tmp_path):
    """The snippet without its last line."""
    *lines, last = EDITED.splitlines()
    assert last.startswith('optim_wrapper')
    optim_wrapper = at_the_end('\n'.join(lines), DETECTORS / name, tmp_path).optim_wrapper
    assert optim_wrapper.optimizer.type == 'AdamW'
    assert optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mult == 0.1


def test_swin_keeps_its_optimizer(tmp_path):
    (line,) = re.findall(r'`(optim_wrapper = .*paramwise_cfg.*)`', MM)
    snippet = DETECTOR.replace('pcpvt_small', 'svt_small')
    snippet = snippet.replace('[64, 128, 320, 512]', '[64, 128, 256, 512]')
    before, _ = snippet.split('optim_wrapper = ')
    cfg = next_to_flat(before + line, SWIN, tmp_path)
    assert cfg.optim_wrapper.optimizer.lr == 1e-4
    init_default_scope('mmdet')
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert model.backbone.arch == ARCHS['svt_small']
    assert tuple(cfg.model.neck.in_channels) == model.backbone.channels
    for key in ('pos_block', 'norm'):  # which are not decayed
        assert cfg.optim_wrapper.paramwise_cfg.custom_keys[key].decay_mult == 0
        assert any(key in name for name, _ in model.named_parameters())


def test_a_segmentor_of_mmseg_keeps_its_outputs(tmp_path):
    *lines, _, _ = SEGMENTOR.splitlines()
    cfg = next_to_flat('\n'.join(lines), TWINS, tmp_path)
    original = load(TWINS)
    assert cfg.optim_wrapper == original.optim_wrapper
    assert cfg.param_scheduler == original.param_scheduler
    init_default_scope('mmseg')
    old, new = (MODELS.build(each.model).eval() for each in (original, cfg))
    new.load_state_dict(old.state_dict())  # as `load_from` does
    x = torch.randn(1, 3, 224, 448)  # windows need no padding
    with torch.no_grad():
        expected = old(x, mode='tensor')
        torch.testing.assert_close(new(x, mode='tensor'), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('page', ['docs/training.md', 'configs/README.md'])
def test_the_settings_of_a_page_name_classes(page):
    init_default_scope('mmdet')
    registries = HOOKS, OPTIM_WRAPPERS, OPTIM_WRAPPER_CONSTRUCTORS, VISBACKENDS
    names = re.findall(r"(?:type|constructor)='(\w+)'", (ROOT / page).read_text())
    assert len(names) >= 3
    for name in names:
        assert any(registry.get(name) for registry in registries), name


def test_the_settings_of_training():
    """The lines of docs/training.md for a config are a part of one."""
    page = (ROOT / 'docs/training.md').read_text()
    (lines,) = re.findall(r'\n\n((?:    .*\n)*?    visualizer = (?:.*\n)+?)\n', page)
    cfg = Config.fromstring(re.sub('^    ', '', lines, flags=re.M), '.py')
    assert [backend.type for backend in cfg.visualizer.vis_backends][0] == 'LocalVisBackend'
    assert cfg.optim_wrapper.accumulative_counts == 4
    (hook,) = cfg.custom_hooks
    assert HOOKS.build(hook).patience == 3


RECIPES = (ROOT / 'configs/README.md').read_text()
OPTIONS = re.findall(r'^\| [^|]+ \| `([^`]+)` \| `([^`]+)` \|$', RECIPES, re.M)


@pytest.mark.parametrize('line, arguments', [option for option in OPTIONS if ' = ' in option[0]])
def test_an_option_is_the_same_in_a_config_and_as_an_argument(line, arguments, tmp_path):
    base = ROOT / 'configs/retinanet_cpvt_s.py'
    (tmp_path / 'mine.py').write_text(f'_base_ = {str(base)!r}\n{line}\n')
    in_config = load_config(tmp_path / 'mine.py')
    assert in_config.to_dict() == load_config(base, arguments.split()).to_dict()
    assert in_config.to_dict() != load_config(base).to_dict()
