"""Trainings that start from a trained model, by its name."""

import logging
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from tiny_mm import write_configs

import cpvt_pyramid.mm.detection  # noqa: F401 (it registers classes)
from cpvt_pyramid.checkpoints.downloads import downloads_folder
from cpvt_pyramid.trained import TRAINED

NAME = 'retinanet_pvt_t_coco'
CLASS_HEAD = {'bbox_head.retina_cls.weight', 'bbox_head.retina_cls.bias'}


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
    path = downloads_folder() / Path(urlsplit(TRAINED[NAME].url).path).name
    path.parent.mkdir(parents=True)
    torch.save({'meta': {'CLASSES': ('a',) * classes}, 'state_dict': tensors}, path)
    return tensors


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
