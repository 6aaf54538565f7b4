"""The configs in the README train as they stand, on top of the mm packages' own."""

import re
import shutil
from pathlib import Path

import mmseg
import pytest
import torch
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from support import ROOT

BLOCKS = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)
CONFIGS = Path(mmseg.__file__).parent / '.mim/configs'


def segmentation_inputs() -> dict:
    """Two images of different sizes, so that the batch is padded."""
    data = dict(inputs=[], data_samples=[])
    for height, width in ((64, 96), (80, 64)):
        sample = SegDataSample(metainfo=dict(img_shape=(height, width), ori_shape=(height, width)))
        labels = torch.randint(0, 150, (1, height, width))
        sample.gt_sem_seg = PixelData(data=labels)
        data['inputs'].append(torch.randint(0, 256, (3, height, width), dtype=torch.uint8))
        data['data_samples'].append(sample)
    return data


@pytest.mark.parametrize('scope, plugin', [('mmdet', 'detection'), ('mmseg', 'segmentation')])
def test_the_readmes_configs_train(scope, plugin, tmp_path):
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
    inputs = segmentation_inputs()
    if scope == 'mmdet':
        inputs = demo_mm_inputs(2, [[3, 64, 96], [3, 96, 64]], num_classes=80)
    before = model.backbone.pos_block[0].proj[0].weight.detach().clone()
    losses = model.train_step(inputs, optim_wrapper)
    assert all(torch.isfinite(value).all() for value in losses.values())
    assert not torch.equal(model.backbone.pos_block[0].proj[0].weight, before)
