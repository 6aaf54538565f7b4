"""Checkpoints with their config inside, and the examples of docs/invariance.md."""

import re
from pathlib import Path

import onnx
import pytest
import torch
from PIL import Image
from support import ROOT, load_tool

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.config.load import config_in_checkpoint, load_config
from cpvt_pyramid.predict import UserError
from cpvt_pyramid.predict.openmmlab.models import build_model, load_whole_model

infer = load_tool('infer')


@pytest.fixture
def in_files(photos) -> None:
    Path('in').mkdir()
    for i, photo in enumerate(photos):
        Image.fromarray(photo).save(f'in/{i}.png')


def assert_same_files(first: str, second: str) -> None:
    one, two = ({p.name: p.read_bytes() for p in Path(f).iterdir()} for f in (first, second))
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
    text = "a = dict(b=[-1, (2.5, None)], c={'d e': True})"
    assert config_in_checkpoint({'meta': {'cfg': text}}, '')._cfg_dict.to_dict() == {
        'a': {'b': [-1, (2.5, None)], 'c': {'d e': True}}
    }
    for text in ('import os', "a = open('x')", 'a = dict(b=exit())', 'a.b = 1', 'a ='):
        with pytest.raises(UserError, match='x.pth: the config inside is not readable'):
            config_in_checkpoint({'meta': {'cfg': text}}, 'x.pth')
    for checkpoint in ({}, {'meta': {}}, {'meta': {'cfg': 3}}):
        with pytest.raises(UserError, match='must be a checkpoint of a training'):
            config_in_checkpoint(checkpoint, 'x.pth')


ONNX_FILE = """<ir_version: 10, opset_import: ["" : 18]>
    relu (float[B,3,H,W] images) => (float[B,3,H,W] maps) { maps = Relu(images) }"""


def test_the_examples_of_the_page_on_invariance(untrained):
    """Of a backbone, an ONNX file, and a detector of mm, which in padded batches is no example."""
    page = (ROOT / 'docs/invariance.md').read_text()
    blocks = re.findall(r'^```python\n(.*?)^```', page, re.M | re.S)
    config, weights = untrained['detector']
    sizes = ((64, 96), (64, 96), (48, 60))
    images = [255 * torch.rand(3, *size) for size in sizes]
    onnx.save(onnx.parser.parse_model(ONNX_FILE), 'model.onnx')
    names = {'torch': torch, 'CPVTPyramid': CPVTPyramid, 'images': images[:2]}
    names['arrays'] = [image.numpy() for image in images[:2]]
    names['detector'] = build_model(load_config(config), None)
    load_whole_model(names['detector'], torch.load(weights), weights)
    backbone, onnx_file, detector = blocks
    exec(backbone, names)
    names['images'] = images[:2]
    exec(onnx_file, names)
    exec(detector, names)
    with pytest.raises(AssertionError, match='\npadded batch .* 2$'):
        names['assert_batch_invariant'](names['predict'], images, stack=False)
