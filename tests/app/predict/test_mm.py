"""Checkpoints with their config inside, and predictions of whole folders."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from PIL import Image
from support import load_tool

from cpvt_pyramid.app.config.load import config_in_checkpoint, load_config
from cpvt_pyramid.app.predict import UserError
from cpvt_pyramid.app.predict.openmmlab.model import own_tile_of
from cpvt_pyramid.app.predict.run_record import RUN
from cpvt_pyramid.app.predict.tiles import TILE

infer = load_tool('infer')


@pytest.fixture
def in_files(photos) -> None:
    Path('in').mkdir()
    for i, photo in enumerate(photos):
        Image.fromarray(photo).save(f'in/{i}.png')


def assert_same_files(first: str, second: str) -> None:
    one, two = ({p.name: p.read_bytes() for p in Path(f).iterdir()} for f in (first, second))
    assert one.pop(RUN) != two.pop(RUN)  # which name the model
    assert one == two and len(one) == 2 * 4 + 1


@pytest.mark.parametrize('kind', ['detector', 'segmentor'])
def test_a_checkpoint_of_a_training(untrained, in_files, kind):
    config, weights = untrained[kind]
    checkpoint = torch.load(weights)
    checkpoint['meta'] = {'cfg': load_config(config).pretty_text}
    torch.save(checkpoint, 'epoch_1.pth')
    options = ['in', '--batch-size', '2']
    options += ['--score-thr', '0.01'] if kind == 'detector' else []
    assert infer.main(['epoch_1.pth', *options, '--out-dir', 'ours']) == 0
    assert infer.main([config, weights, *options, '--out-dir', 'theirs']) == 0
    assert_same_files('ours', 'theirs')


def test_the_config_in_a_checkpoint_is_not_executed():
    text = "model = dict(type='mmdet.models.DINO')\na = dict(b=[-1, (2.5, None)], c={'d e': True})"
    assert config_in_checkpoint({'meta': {'cfg': text}}, '')._cfg_dict.to_dict() == {
        'model': {'type': 'mmdet.models.DINO'},
        'a': {'b': [-1, (2.5, None)], 'c': {'d e': True}},
        'default_scope': 'mmdet',
    }
    for text in ('import os', "a = open('x')", 'a = dict(b=exit())', 'a.b = 1', 'a =', '-' * 10**5):
        with pytest.raises(UserError, match='x.pth: the config inside is not readable'):
            config_in_checkpoint({'meta': {'cfg': text}}, 'x.pth')
    for text, message in (
        ('a = 1', 'x.pth: the config inside has no model'),
        ('model = 3', 'x.pth: the config inside has no model'),
        ("model = dict(type='DINO')", 'x.pth must set default_scope to mmdet or mmseg'),
    ):
        with pytest.raises(UserError, match=message):
            config_in_checkpoint({'meta': {'cfg': text}}, 'x.pth')
    for checkpoint in ({}, {'meta': {}}, {'meta': {'cfg': 3}}, {'meta': 5}):
        with pytest.raises(UserError, match='must be a checkpoint of a training'):
            config_in_checkpoint(checkpoint, 'x.pth')


@pytest.mark.parametrize(
    'steps, mode, tile',
    [
        ([], 'whole', TILE),
        ([{'type': 'Resize', 'scale_factor': 1.0}], 'whole', TILE),
        ([], 'slide', None),  # the model moves a window over the image
        ([{'type': 'Resize', 'scale': (64, 64)}], 'whole', None),
        ([{'type': 'mmdet.Pad', 'size_divisor': 32}], 'whole', None),
    ],
)
def test_models_that_do_not_resize_take_tiles(steps, mode, tile):
    pipeline = [{'type': 'LoadImageFromFile'}, *steps, {'type': 'PackSegInputs'}]
    cfg = Config({'test_dataloader': {'dataset': {'type': 'X', 'pipeline': pipeline}}})
    assert own_tile_of(SimpleNamespace(test_cfg={'mode': mode}), cfg) == tile
