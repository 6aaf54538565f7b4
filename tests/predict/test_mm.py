"""Where torch and mm are installed: checkpoints of a training in the runtime, and exported models
in cpvt infer."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import rasterio
import torch
from PIL import Image
from support import ROOT, film, load_tool

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.cli.run import main
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
    assert main(['epoch_1.pth', *options, '--out-dir', 'ours']) == 0
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


@pytest.mark.parametrize('name', ['box', 'labels'])
def test_infer_writes_what_the_runtime_writes(model, in_files, name):
    options = [str(model(name)), 'in', '--batch-size', '3']
    options += ['--score-thr', '0.1'] if name == 'box' else []
    assert infer.main([*options, '--out-dir', 'tool']) == 0
    assert main([*options, '--out-dir', 'runtime']) == 0
    assert_same_files('tool', 'runtime')


def test_videos(model, photos):
    film('clip.mp4', [photos[0][:90, :132]] * 3)  # even, for the format
    assert infer.main([str(model('detection')), 'clip.mp4', '--backend', 'openvino']) == 0
    frames = Path('predictions/clip.detections.jsonl').read_text().splitlines()
    found = [json.loads(frame)['detections'][0]['box'] for frame in frames]
    assert found == [[0, 0, 132, 90]] * 3


@pytest.mark.parametrize('name', ['labels', 'probabilities'])
def test_label_maps_in_tiles(model, photos, name):
    """The tiny models decide each pixel by itself, so that tiles must give what the image gives."""
    photo = np.tile(photos[1], (1, 2, 1))
    Image.fromarray(photo).save('big.png')
    assert infer.main([str(model(name)), 'big.png', '--tile', '64', '--batch-size', '2']) == 0
    with rasterio.open('predictions/big.labels.tif') as labels:
        np.testing.assert_array_equal(labels.read(1), photo.argmax(-1))
    assert Path('predictions/big.overlay.jpg').is_file()


def test_boxes_in_tiles(model, photos, capsys):
    Image.fromarray(photos[1]).save('big.png')
    command = [str(model('detection')), 'big.png', '--tile', '96', '--overlap', '32']
    command += ['--score-thr', '0.01']
    assert infer.main(command) == 0
    found = json.loads(Path('predictions/big.detections.json').read_text())['detections']
    # Each tile's first box is the tile, cut by its borders: the boxes join to the whole image.
    height, width = photos[1].shape[:2]
    assert found[0]['box'] == [0, 0, width, height] and found[0]['class'] == 'one'
    for same in (True, False):
        if not same:
            model('detection', score_thr=0.2)  # another file under the name
        capsys.readouterr()
        assert infer.main(command) == 0
        assert ('already done' in capsys.readouterr().out) == same


def test_mistakes(model, in_files, capsys):
    model('labels'), model('fixed')
    for arguments, complaint in (
        ('labels.onnx in --score-thr 0.5', 'but the model predicts labels; leave it out'),
        ('fixed.onnx in --tile 128', 'takes images of up to 64 x 96'),
    ):
        assert infer.main(arguments.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith('cpvt infer: ') and complaint in line
    for arguments, complaint in (
        ('labels.onnx in --dtype bfloat16', 'unrecognized arguments: --dtype bfloat16'),
        ('config.py a.png', 'the following arguments are required: INPUTS'),
    ):
        with pytest.raises(SystemExit):
            infer.main(arguments.split())
        assert complaint in capsys.readouterr().err.splitlines()[-1]


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
