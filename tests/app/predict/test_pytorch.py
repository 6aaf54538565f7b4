"""Trained models in PyTorch in commands and in `Predictor`, here small ones of random weights.

`tests/mm/foreign/test_trained.py` compares the published ones with OpenMMLab's.
"""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.acceleration import processor
from cpvt_pyramid.app.page.server import Server
from cpvt_pyramid.app.predict import Predictor, UserError
from cpvt_pyramid.app.predict.pytorch import model as pytorch_model
from cpvt_pyramid.tasks.detectors import retinanet
from cpvt_pyramid.tasks.segmentors import segformer
from cpvt_pyramid.tasks.trained import CLASSES

DETECTOR, SEGMENTOR = 'retinanet_pvt_v2_b0_coco', 'segformer_b0_ade20k'
SIDES = 64, 128
DTYPES = 'float32', 'bfloat16'


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    def load(name: str, checkpoint: object = None) -> torch.nn.Module:
        torch.manual_seed(0)
        backbone = {'arch': 'pcpvt_nano', 'drop_border': True}
        if name == SEGMENTOR:
            model = segformer(backbone, num_classes=150, channels=16)
            torch.nn.init.normal_(model.decode_head.conv_seg.weight)
            model.classes = tuple(CLASSES['ADE20K'])
        else:
            model = retinanet(backbone, num_classes=80, out_channels=32, mmdetection=True)
            for parameter in model.head.classification_head.parameters():
                if parameter.dim() == 4:
                    torch.nn.init.kaiming_normal_(parameter)
            model.classes = tuple(CLASSES['COCO'])
        model.image_sides = SIDES
        return model.eval()

    monkeypatch.setattr(pytorch_model, 'load_trained', load)


def photographs(folder, sizes=((48, 80), (90, 70), (48, 80), (61, 83))) -> list[str]:
    random = np.random.default_rng(0)
    paths = []
    for i, (height, width) in enumerate(sizes):
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        paths.append(str(folder / f'{i}.png'))
        Image.fromarray(pixels).save(paths[-1])
    return paths


@pytest.mark.parametrize('name', [DETECTOR, SEGMENTOR])
def test_results_do_not_depend_on_the_batch(name, tmp_path):
    paths = photographs(tmp_path)
    alone = [Predictor(name, device='cpu')(path) for path in paths]
    together = Predictor(name, device='cpu', batch_size=4)(paths)
    for a, b in zip(alone, together):
        if name == SEGMENTOR:
            assert (a.labels == b.labels).mean() > 0.999
            assert a.labels.shape == a.image.shape[:2]
            assert len(np.unique(a.labels)) > 1
        else:
            assert len(a.scores) > 0
            np.testing.assert_allclose(a.boxes, b.boxes, atol=1e-2)
            np.testing.assert_array_equal(a.labels, b.labels)


@pytest.mark.parametrize('name', [DETECTOR, SEGMENTOR])
@pytest.mark.parametrize(
    'options',
    [[], ['--tile', '64', '--overlap', '32'], ['--shorter-side', '96'], ['--dtype', 'bfloat16']],
)
def test_the_command_writes_results(name, options, tmp_path):
    paths = photographs(tmp_path)
    out = tmp_path / 'out'
    arguments = ['infer', name, *paths, '--out-dir', str(out), '--device', 'cpu', *options]
    assert main(arguments) == 0
    for i in range(len(paths)):
        assert (out / f'{i}.overlay.jpg').is_file()
        if name == DETECTOR:
            found = json.loads((out / f'{i}.detections.json').read_text())['detections']
            assert found and {each['class'] for each in found} <= set(CLASSES['COCO'])
        else:
            ending = 'tif' if '--tile' in options else 'png'
            assert (out / f'{i}.labels.{ending}').is_file()


def test_more_classes_than_a_byte_has_values(tmp_path, monkeypatch):
    def load(name: str, checkpoint: object = None) -> torch.nn.Module:
        model = segformer('pcpvt_nano', num_classes=300, channels=16)
        with torch.no_grad():
            model.decode_head.conv_seg.bias[290] = 100
        model.classes = tuple(map(str, range(300)))
        model.image_sides = SIDES
        return model.eval()

    monkeypatch.setattr(pytorch_model, 'load_trained', load)
    found = Predictor(SEGMENTOR, device='cpu')(photographs(tmp_path)[0])
    assert (found.labels == 290).all()


def test_the_last_layers_of_a_detector_stay_in_float32(tmp_path):
    """In bfloat16 its logits are near those in float32, and not rounded to 8 bits."""
    path = photographs(tmp_path)[0]
    exact, near = (Predictor(DETECTOR, device='cpu', dtype=x)(path) for x in DTYPES)
    logits = torch.from_numpy(near.scores).double().logit()
    moved = (logits - logits.bfloat16()).abs() > 1e-4
    assert len(logits) > 5 and moved.double().mean() > 0.8
    np.testing.assert_allclose(near.scores[:5], exact.scores[:5], rtol=0.05)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('multiplies', [False, True])
def test_a_processor_without_bfloat16(multiplies, dtype, monkeypatch, recwarn):
    """One line says why it takes so long."""
    monkeypatch.setattr(processor, 'multiplies_bfloat16', lambda: multiplies)
    Predictor(DETECTOR, device='cpu', dtype=dtype)
    said = [str(each.message) for each in recwarn if 'bfloat16' in str(each.message)]
    assert len(said) == (dtype == 'bfloat16' and not multiplies)


def test_thresholds(tmp_path):
    path = photographs(tmp_path)[0]
    scores = Predictor(DETECTOR, device='cpu')(path).scores
    middle = float(np.median(scores))
    found = Predictor(DETECTOR, device='cpu', score_thr=middle)(path).scores
    assert 0 < len(found) < len(scores) and found.min() >= middle
    assert Predictor(DETECTOR, device='cpu').model.score_thr == 0.3


@pytest.mark.parametrize(
    'options, line',
    [
        (dict(backend='openvino'), 'backend is for exported models'),
        (dict(device='nowhere'), 'no device nowhere'),
        (dict(checkpoint='photo.jpg'), 'a checkpoint belongs to'),
    ],
)
def test_mistakes(options, line):
    with pytest.raises(UserError, match=line):
        Predictor(SEGMENTOR, **options)


def test_the_page_takes_a_name(tmp_path, monkeypatch, capsys):
    about = []

    def run(server: Server, _sockets: list) -> None:
        about.append(server.page.about())
        server.listener.close()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Server, 'run', run)
    assert main(['app', DETECTOR, '--port', '0']) == 0
    assert about[0]['name'] == DETECTOR and about[0]['shorter_side'] == SIDES[0]
    assert capsys.readouterr().out.startswith('http://')


def test_the_limit_of_boxes(tmp_path, capsys):
    """Random weights find 100 boxes in every image at a threshold of 0."""
    paths = photographs(tmp_path)
    command = ['infer', DETECTOR, *paths[:2], '--out-dir', str(tmp_path / 'out'), '--device', 'cpu']
    assert main([*command, '--score-thr', '0']) == 0
    line = "note: 2 images reached the model's limit of 100 boxes, so that objects may be missing; "
    line += 'use tiles, such as --tile 1024, or a higher --score-thr\n'
    assert line in capsys.readouterr().out
    assert Predictor(SEGMENTOR, device='cpu').model.most_boxes is None
