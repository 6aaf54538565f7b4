"""The configs of docs/coming_from.md, on top of those that they start from."""

import re
from pathlib import Path

import mmseg
import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from support import ROOT

from cpvt_pyramid import ARCHS

PAGE = (ROOT / 'docs/coming_from.md').read_text()
BLOCKS = dict(re.findall(r'^## (.*?)\n.*?```python\n(.*?)```', PAGE, re.M | re.S))
TWINS = Path(mmseg.__file__).parent / '.mim/configs/twins'


def load(section: str, folder: Path) -> Config:
    """A section's config, without the weights of its backbone, which are on a hub."""
    text = BLOCKS[section]
    local = re.match(r"_base_ = '(twins.*)'", text)
    if local:
        text = text.replace(local[1], str(TWINS / local[1]))
    (folder / 'mine.py').write_text(text)
    cfg = Config.fromfile(folder / 'mine.py')
    cfg.model.backbone.init_cfg = None
    return cfg


def test_timm(monkeypatch):
    names = {}
    exec(BLOCKS["timm's Twins"].replace('pretrained=True', 'pretrained=False'), names)
    theirs = timm.create_model('twins_pcpvt_small').eval()
    names['model'].load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(names['model'].eval()(x), theirs(x), rtol=1e-3, atol=1e-4)
        assert len(names['backbone'].eval()(x[..., :100, :90])) == 4


def test_a_segmentor_of_mmseg_keeps_its_outputs(tmp_path):
    cfg = load("MMSegmentation's PCPVT and SVT", tmp_path)
    init_default_scope('mmseg')
    theirs = Config.fromfile(TWINS / Path(re.search(r"'(.*?\.py)'", PAGE)[1]).name).model
    theirs.backbone.init_cfg = None
    models = []
    for model in (theirs, cfg.model):
        model.decode_head.norm_cfg = dict(type='BN')  # a CPU has no kernel for SyncBN
        models.append(MODELS.build(model).eval())
    old, new = models
    new.load_state_dict(old.state_dict())  # as `load_from` does
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = old(x, mode='tensor')
        torch.testing.assert_close(new(x, mode='tensor'), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('section', ['Swin', 'ResNet'])
def test_detectors(section, tmp_path):
    cfg = load(section, tmp_path)
    init_default_scope('mmdet')
    assert cfg.optim_wrapper.optimizer.lr == 1e-4 and 'momentum' not in cfg.optim_wrapper.optimizer
    assert cfg.param_scheduler[-1].milestones == [8, 11]
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert model.backbone.arch == ARCHS[cfg.model.backbone.arch]
    assert tuple(cfg.model.neck.in_channels) == model.backbone.channels
    keys = cfg.optim_wrapper.get('paramwise_cfg', {}).get('custom_keys', {})
    matched = {key: [n for n, _ in model.named_parameters() if key in n] for key in keys}
    if section == 'Swin':
        assert matched['pos_block'] and matched['norm'], 'the recipe decays no norm and no PEG'
