"""Configs in mm's new style: types are classes, bases are imported, default_scope is None."""

import inspect
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from mmengine import registry
from mmengine.config import Config
from small_data import CLASSES
from support import ORIGINAL_MM, load_tool

from cpvt_pyramid.app.config.check import check_checkpoints
from cpvt_pyramid.app.config.load import SETTINGS, load_config
from cpvt_pyramid.app.config.parts import kind_of
from cpvt_pyramid.app.data.adapt import Code, text_of_settings
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.training.processes import use_launcher

TOOLS = {name: load_tool(name) for name in ('train', 'test', 'infer')}

REGISTRIES = [found for found in vars(registry).values() if isinstance(found, registry.Registry)]
OF_RUNTIME = (
    'default_hooks',
    'env_cfg',
    'log_processor',
    'optim_wrapper',
    'param_scheduler',
    'randomness',
    'train_cfg',
    'visualizer',
)


def class_in_registries(name: Any, scope: str) -> Optional[type]:
    for root in REGISTRIES:
        with root.switch_scope_and_registry(scope) as inner:
            with suppress(ImportError, RuntimeError, TypeError, ValueError):
                found = inner.get(name)  # imports what looks like a module
                if inspect.isclass(found):
                    return found
    return None


def in_new_style(config: Path, *options: str) -> str:
    """Write a config in the new style, with a base runtime.py; returns its path."""
    cfg = load_config(config, options)
    imports = {
        'from mmengine.config import read_base',
        'with read_base():\n    from .runtime import *',
    }

    def with_classes(value: Any) -> Any:
        if isinstance(value, dict):
            value = {key: with_classes(inner) for key, inner in value.items()}
            if kind := class_in_registries(value.get('type', 0), cfg.default_scope):
                imports.add(f'from {kind.__module__} import {kind.__name__}')
                value['type'] = Code(kind.__name__)
        elif isinstance(value, (list, tuple)):
            value = type(value)(map(with_classes, value))
        return value

    settings = with_classes(cfg.to_dict())
    settings = {key: value for key, value in settings.items() if key in SETTINGS}
    settings['default_scope'] = None
    base = {key: settings.pop(key) for key in OF_RUNTIME if key in settings}
    lines = sorted(imports)
    Path('runtime.py').write_text('\n'.join([*lines[:-1], text_of_settings(base)]))
    Path('mine.py').write_text('\n'.join([*lines, text_of_settings(settings)]))
    return 'mine.py'


def test_a_detector_trains_resumes_and_is_tested(configs, sample_dataset, capsys):
    splits = (f'{split}_dataloader.dataset.indices=2' for split in ('train', 'val', 'test'))
    detector = in_new_style(configs['detector'], 'train_cfg.max_epochs=2', *splits)
    command = [detector, '--work-dir', 'work']
    assert TOOLS['train'].main([*command, '--amp']) == 0
    ran = Config.fromfile('work/mine.py')
    assert kind_of(ran.optim_wrapper) == 'BFloat16OptimWrapper'
    assert kind_of(ran.default_hooks.signals) == 'StopOnSignalHook'
    assert ran.default_scope == 'mmdet'

    resumed = [detector, '--work-dir', 'other', '--resume=work/epoch_1.pth']
    assert TOOLS['train'].main(resumed) == 0
    first, second = (
        torch.load(path, weights_only=False)['state_dict']
        for path in ('work/epoch_1.pth', 'other/epoch_2.pth')
    )
    assert not torch.equal(
        first['neck.fpn_convs.0.conv.weight'], second['neck.fpn_convs.0.conv.weight']
    )

    command = [detector, 'work/epoch_2.pth']
    tta = [] if ORIGINAL_MM else ['--tta']  # its configs with classes in lists cannot be printed
    assert TOOLS['test'].main([*command, *tta]) == 0
    assert 'coco/bbox_mAP_50' in capsys.readouterr().out
    image = next((sample_dataset / 'coco/val2017').glob('*.jpg'))
    assert TOOLS['infer'].main([*command, str(image)]) == 0
    found = json.loads(Path(f'predictions/{image.stem}.detections.json').read_text())
    assert all(box['class'] in CLASSES for box in found['detections'])


@pytest.mark.parametrize('launcher', ['none', 'pytorch'])
def test_names_are_those_of_the_classes(launcher, configs, monkeypatch, capsys):
    settings = (
        'backbone.init_cfg.type=Pretrained',
        'backbone.init_cfg.checkpoint=nowhere.pth',
        'decode_head.norm_cfg.type=SyncBN',
    )
    segmentor = in_new_style(configs['segmentor'], *(f'model.{setting}' for setting in settings))
    cfg = load_config(segmentor)
    assert cfg.default_scope == 'mmseg'
    with pytest.raises(UserError, match='no checkpoint at nowhere.pth'):
        check_checkpoints(cfg)
    monkeypatch.setenv('RANK', '0')
    use_launcher(cfg, launcher)
    assert cfg.model.decode_head.norm_cfg.type == 'BN'
    assert 'SyncBN needs GPUs: on CPUs, batch norms use the ' in capsys.readouterr().out
    assert kind_of({'type': 'mmdet.models.RetinaNet'}) == 'RetinaNet'


def test_backbones_are_imported_with_the_data_preprocessor():
    """As a config in the new style does."""
    from cpvt_pyramid import mm
    from cpvt_pyramid.mm import detection, segmentation

    for module in (detection, segmentation):
        assert module.CPVTPyramid is mm.CPVTPyramid and module.DenseCPVT is mm.DenseCPVT
