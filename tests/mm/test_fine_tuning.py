"""Trainings that start from a trained model, by its name."""

import logging
import re
from pathlib import Path
from urllib.parse import urlsplit

import mmdet
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from support import ROOT
from tiny_mm import write_configs

import cpvt_pyramid.mm.detection  # noqa: F401 (it registers classes)
from cpvt_pyramid.checkpoints import downloads
from cpvt_pyramid.tasks.trained import TRAINED
from tests.models.ports import randomize
from tests.models.samples import random_data

pytestmark = pytest.mark.usefixtures('quick_training')
NAME = 'retinanet_pvt_t_coco'
CLASS_HEAD = {'bbox_head.retina_cls.weight', 'bbox_head.retina_cls.bias'}
NAMED = "load_from = 'retinanet_pvt_v2_b2_coco'"
LATERAL = 'lateral_convs.0.conv.weight'
BOX = (8, 10, 50, 60)


@pytest.fixture(autouse=True)
def _random_weights(monkeypatch):
    """The files have random weights, and so not the hashes in their names."""
    monkeypatch.setattr(downloads, 'checked', lambda path: path)


@pytest.fixture
def config(sample_dataset, tmp_path, monkeypatch) -> Config:
    """Of a tiny detector of 10 classes, that starts from one of 80."""
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path / 'torch'))
    path = write_configs(tmp_path, sample_dataset)['detector']
    cfg = Config.fromfile(path)
    cfg.load_from = NAME
    cfg.work_dir = str(tmp_path / 'work_dir')
    cfg.model.backbone.init_cfg = None
    return cfg


def save_trained(cfg: Config, classes: int) -> dict[str, torch.Tensor]:
    """Write the weights of such a detector to where a download would be."""
    init_default_scope('mmdet')
    model_cfg = cfg.model.copy()
    model_cfg.bbox_head = dict(cfg.model.bbox_head, num_classes=classes)
    tensors = MODELS.build(model_cfg).state_dict()
    save_as_published(NAME, tensors, classes)
    return tensors


def save_as_published(name: str, tensors: dict[str, torch.Tensor], classes: int) -> None:
    """Write weights to where a download of this name would be."""
    path = downloads.downloads_folder() / Path(urlsplit(TRAINED[name].url).path).name
    path.parent.mkdir(parents=True)
    torch.save({'meta': {'CLASSES': ('a',) * classes}, 'state_dict': tensors}, path)


def test_heads_of_other_classes_are_left_out_in_one_line(config, caplog):
    tensors = save_trained(config, classes=80)
    runner = Runner.from_cfg(config)
    with caplog.at_level(logging.INFO):
        runner.logger.addHandler(caplog.handler)
        runner.load_or_resume()
    for name, value in runner.model.state_dict().items():
        if name in CLASS_HEAD:
            assert value.shape != tensors[name].shape
        else:
            assert torch.equal(value, tensors[name]), name
    lines = [line for record in caplog.records for line in record.getMessage().splitlines()]
    (line,) = [line for line in lines if 'bbox_head' in line]
    assert line.startswith('left out 2 tensors that have other shapes')
    assert all(name in line for name in CLASS_HEAD)
    assert not [line for line in lines if 'do not match' in line]


def test_heads_of_as_many_classes_are_loaded(config, caplog):
    tensors = save_trained(config, classes=10)
    runner = Runner.from_cfg(config)
    with caplog.at_level(logging.INFO):
        runner.logger.addHandler(caplog.handler)
        runner.load_or_resume()
    assert 'left out' not in caplog.text
    for name, value in runner.model.state_dict().items():
        assert torch.equal(value, tensors[name]), name


def test_a_backbone_must_fit(config):
    save_trained(config, classes=80)
    config.model.backbone.arch = 'svt_small'
    config.model.neck.in_channels = [64, 128, 256, 512]
    with pytest.raises(ValueError, match='architecture'):
        Runner.from_cfg(config).load_or_resume()


def test_the_config_of_the_page(tmp_path, monkeypatch, caplog):
    """MMDetection's own RetinaNet with PVTv2-B2, saved as the published file is; a flat config of
    a RetinaNet with ResNet for 10 classes; and the config of docs/mm.md next to it."""
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path / 'torch'))
    configs = Path(mmdet.__file__).parent / '.mim/configs'
    init_default_scope('mmdet')
    their_cfg = Config.fromfile(configs / 'pvt/retinanet_pvtv2-b2_fpn_1x_coco.py')
    their_cfg.model.backbone.init_cfg = None
    theirs = randomize(MODELS.build(their_cfg.model), seed=1).eval()
    save_as_published('retinanet_pvt_v2_b2_coco', theirs.state_dict(), classes=80)

    base = Config.fromfile(configs / 'retinanet/retinanet_r50_fpn_1x_coco.py')
    base.model.bbox_head.num_classes = 10
    base.dump(tmp_path / 'my_config.py')
    page = (ROOT / 'docs/mm.md').read_text()
    (snippet,) = [text for text in re.findall(r'```python\n(.*?)```', page, re.S) if NAMED in text]
    (tmp_path / 'mine.py').write_text(snippet)
    cfg = Config.fromfile(tmp_path / 'mine.py')
    cfg.work_dir = str(tmp_path / 'work_dir')

    runner = Runner.from_cfg(cfg)
    with caplog.at_level(logging.INFO):
        runner.logger.addHandler(caplog.handler)
        runner.load_or_resume()
    ours = runner.model.eval()
    assert 'left out 2 tensors' in caplog.text and 'do not match' not in caplog.text
    for name, value in theirs.state_dict().items():
        if name.startswith(('neck.', 'bbox_head.')) and name not in CLASS_HEAD:
            assert torch.equal(ours.state_dict()[name], value), name
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        maps = list(ours.backbone(x)), list(theirs.backbone(x))
    torch.testing.assert_close(*maps, rtol=1e-3, atol=1e-3)

    optim_wrapper = runner.build_optim_wrapper(cfg.optim_wrapper)
    losses = ours.train().train_step(random_data(False, [(64, 160)], boxes=[BOX]), optim_wrapper)
    assert all(torch.isfinite(value).all() for value in losses.values())
    assert not torch.equal(ours.neck.state_dict()[LATERAL], theirs.neck.state_dict()[LATERAL])
