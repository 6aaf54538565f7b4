"""The configs in docs/mm.md train as they stand, on top of the mm packages' own."""

import re
import shutil
from pathlib import Path

import mmseg
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from models.samples import random_data
from support import ROOT

BLOCKS = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/mm.md').read_text(), re.S)
CONFIGS = Path(mmseg.__file__).parent / '.mim/configs'


@pytest.mark.parametrize('scope, plugin', [('mmdet', 'detection'), ('mmseg', 'segmentation')])
def test_the_configs_train(scope, plugin, tmp_path):
    (text,) = [block for block in BLOCKS if f'cpvt_pyramid.mm.{plugin}' in block]
    shutil.copytree(CONFIGS / '_base_', tmp_path / '_base_')
    shutil.copytree(CONFIGS / 'sem_fpn', tmp_path / 'sem_fpn')
    (tmp_path / 'sem_fpn/mine.py').write_text(text)
    cfg = Config.fromfile(tmp_path / 'sem_fpn/mine.py')
    assert cfg.train_dataloader and cfg.test_evaluator and cfg.train_cfg
    init_default_scope(scope)
    cfg.model.backbone.init_cfg = None  # the weights are on a hub
    if scope == 'mmseg':  # a CPU has no kernel for SyncBN
        cfg.model.decode_head.norm_cfg = dict(type='BN')
        cfg.model.data_preprocessor.size = None
        cfg.model.data_preprocessor.size_divisor = 32
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
