"""The trained models that OpenMMLab has published, as models of ours.

No file can be downloaded here. MMDetection's and MMSegmentation's own models are built from their
own configs, with random weights, and saved in the layout of the published files. Ours load them by
name, from the cache where a download would be, and find what theirs find, each with its own test
pipeline.
"""

import copy
import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import cv2
import mmdet
import mmseg
import numpy as np
import pytest
import skimage.data
import torch
import yaml
from mmdet.apis import inference_detector
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData
from mmseg.apis import inference_model
from mmseg.structures import SegDataSample
from PIL import Image
from torch import nn

from cpvt_pyramid import CPVTPyramid, load_weights
from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.parts import dataset_meta
from cpvt_pyramid.app.predict.opening import ModelFiles, open_model
from cpvt_pyramid.app.predict.openmmlab.loading import fetch_checkpoint
from cpvt_pyramid.app.predict.options import ModelOptions
from cpvt_pyramid.app.predict.predictor import Predictor
from cpvt_pyramid.app.predictions.kinds import Detections
from cpvt_pyramid.checkpoints import downloads
from cpvt_pyramid.meta import without_values
from cpvt_pyramid.tasks.trained import CLASSES, METRICS, TRAINED, WINDOWS, build_trained, weights_of
from tests.models.ports import randomize

pytestmark = pytest.mark.usefixtures('quick_training')
PACKAGES = {'mmdet': mmdet, 'mmseg': mmseg}
METAFILES = (('mmdet', 'pvt'), ('mmseg', 'twins'), ('mmseg', 'segformer'))
# The smallest of each family; `make test-foreign` tests all.
SMALLEST = (
    'retinanet_pvt_t_coco',
    'retinanet_pvt_v2_b0_coco',
    'semantic_fpn_cpvt_s_ade20k',
    'semantic_fpn_svt_s_ade20k',
    'segformer_b0_ade20k',
    'segformer_b0_cityscapes',
)
NAMES = [
    pytest.param(name, marks=[] if name in SMALLEST else pytest.mark.foreign) for name in TRAINED
]
# Shorter side of the resized images; larger in the pipelines, which have a test of their own.
SIDE = 96
WINDOW = 64, 48  # side and stride, where a recipe has windows


class Published(NamedTuple):
    """An entry of a metafile."""

    package: str
    config: Path
    metrics: dict[str, float]
    data: str


def published() -> dict[str, Published]:
    """The entries of the metafiles by the path in the address of their weights."""
    found = {}
    for package, family in METAFILES:
        root = Path(PACKAGES[package].__file__).parent / '.mim'
        (path,) = root.glob(f'configs/{family}/metafile.y*ml')
        for model in yaml.safe_load(path.read_text())['Models']:
            (results,) = model['Results'] if family == 'pvt' else [model['Results']]
            config = model['Config']
            if 'svt-l_uperhead' in model['Weights']:  # whose entry names the config of PCPVT-L
                config = config.replace('pcpvt', 'svt')
            address = urlsplit(model['Weights']).path
            assert address not in found
            found[address] = Published(
                package, root / config, results['Metrics'], results['Dataset']
            )
    return found


PUBLISHED = published()


def published_of(name: str) -> Published:
    return PUBLISHED[urlsplit(TRAINED[name].url).path]


def test_the_table_is_that_of_the_metafiles():
    addresses = [urlsplit(model.url).path for model in TRAINED.values()]
    assert sorted(addresses) == sorted(PUBLISHED)
    for name, model in TRAINED.items():
        theirs = published_of(name)
        assert theirs.data == model.data
        assert float(model.result) == theirs.metrics[METRICS[model.data]]


# Theirs


def their_config(name: str) -> Config:
    theirs = published_of(name)
    cfg = Config.fromfile(theirs.config)
    cfg.model.backbone.init_cfg = None
    if theirs.package == 'mmseg':
        heads = (cfg.model.decode_head, cfg.model.get('auxiliary_head'))
        for head in filter(None, heads):
            head.norm_cfg = dict(type='BN', requires_grad=True)  # a CPU has no kernel for SyncBN
    return cfg


def their_model(name: str) -> nn.Module:
    """With random weights, and the config that their functions of inference read."""
    cfg = their_config(name)
    init_default_scope(published_of(name).package)
    model = randomize(MODELS.build(cfg.model), seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    model.cfg = cfg
    return model


def save_as_published(model: nn.Module, name: str, new: bool) -> Path:
    """Write the weights to where a download would be.

    Args:
        new: with the classes as MMEngine stores them; the published files are older.
    """
    classes = [f'class {i}' for i in range(len(CLASSES[TRAINED[name].data]))]
    meta = {
        'env_info': 'sys.platform: linux',
        'config': model.cfg.pretty_text,
        'seed': np.int64(0),
        'exp_name': 'x.py',
        'epoch': 12,
        'iter': 87960,
        'time': 'Tue Aug 31 10:31:10 2021',
        'hook_msgs': {'best_score': np.float64(0.5)},
    }
    if new:
        meta['dataset_meta'] = {'CLASSES': tuple(classes), 'PALETTE': None}
    else:
        meta['CLASSES'] = tuple(classes)
    state = OrderedDict((key, value.clone()) for key, value in model.state_dict().items())
    path = downloads.downloads_folder() / Path(urlsplit(TRAINED[name].url).path).name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({'meta': meta, 'state_dict': state}, path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path / 'torch'))
    # The files have random weights, and so not the hashes in their names.
    monkeypatch.setattr(downloads, 'checked', lambda path: path)


def photograph(height: int, width: int) -> np.ndarray:
    """A part of a photograph, (H, W, 3) BGR."""
    whole = skimage.data.astronaut()
    top = (whole.shape[0] - height) // 2
    left = (whole.shape[1] - width) // 2
    return np.ascontiguousarray(whole[top : top + height, left : left + width, ::-1])


@pytest.mark.parametrize('name', TRAINED)
def test_parameters_and_pipelines_are_theirs(name):
    model = TRAINED[name]
    cfg = load_config(model.config_path)
    init_default_scope(cfg.default_scope)
    with without_values():
        ours = MODELS.build(copy.deepcopy(cfg.model))
        plain = build_trained(model)
    for each in (ours, plain):
        assert sum(parameter.numel() for parameter in each.parameters()) == model.parameters
    theirs = their_config(name)
    assert cfg.model.test_cfg == theirs.model.test_cfg
    steps = [
        [step for step in each.test_dataloader.dataset.pipeline if 'Load' not in step.type]
        for each in (cfg, theirs)
    ]
    assert steps[0] == steps[1]
    preprocessors = cfg.model.data_preprocessor, theirs.model.data_preprocessor
    for key in ('mean', 'std', 'bgr_to_rgb', 'pad_size_divisor', 'size'):
        assert preprocessors[0].get(key) == preprocessors[1].get(key)


# Heights and widths of images: resized, 32 divides both sides, the height alone, or neither.
SIZES = ((96, 160), (96, 125), (131, 101))


@pytest.mark.parametrize('name', NAMES)
def test_results_are_those_of_their_models(name):
    """From an image in a file to boxes and labels, each by its own code, but at a smaller size."""
    theirs = smaller(their_model(name))
    save_as_published(theirs, name, new=False)
    score_thr = 0.05 if TRAINED[name].detects else None
    ours = open_model(ModelFiles(trained=name), ModelOptions('cpu', score_thr=score_thr))
    ours.resize = SIDE, 2 * SIDE
    if WINDOWS.get(TRAINED[name].data):
        ours.session.model.window = WINDOW
    for size in SIZES:
        image = photograph(*size)
        prepared = ours.prepare(np.ascontiguousarray(image[..., ::-1]))
        [found] = ours.predict([prepared])
        if TRAINED[name].detects:
            assert_same_boxes(found, inference_detector(theirs, image).pred_instances)
        else:
            assert_same_labels(found.labels, inference_model(theirs, image))


def smaller(model: nn.Module) -> nn.Module:
    """The model with `SIDE` in its test pipeline, and smaller windows."""
    for pipeline in (model.cfg.test_pipeline, model.cfg.test_dataloader.dataset.pipeline):
        for step in pipeline:
            if step.type == 'Resize':
                step.scale = (2 * SIDE, SIDE)
    if model.test_cfg.get('mode') == 'slide':
        side, stride = WINDOW
        model.test_cfg.update(crop_size=(side, side), stride=(stride, stride))
    return model


def assert_same_boxes(ours: Detections, theirs: InstanceData) -> None:
    """Each of at least 99.9 % of the boxes has one of the same label within 0.05 pixels and a score
    of 1e-4, except for those whose score is that of the last ones, of which rounding decides."""
    assert len(ours.scores) == len(theirs.scores) == 100
    a = [torch.from_numpy(part) for part in (ours.boxes, ours.scores, ours.labels)]
    b = [theirs.bboxes, theirs.scores, theirs.labels]
    last = theirs.scores.min() + 1e-4
    alike = 0
    for one, other in ((a, b), (b, a)):
        for box, score, label in zip(*one):
            near = (other[0] - box).abs().amax(1) < 0.05
            same = near & ((other[1] - score).abs() < 1e-4) & (other[2] == label)
            alike += bool(same.any() or score < last)
    assert alike >= 0.999 * 200


def assert_same_labels(labels: np.ndarray, theirs: SegDataSample) -> None:
    expected = theirs.pred_sem_seg.data[0].numpy()
    assert labels.shape == expected.shape
    assert (labels == expected).mean() >= 0.9999
    assert len(np.unique(expected)) > 2  # not one class everywhere


@pytest.mark.parametrize('new', [True, False])
def test_classes_are_those_of_the_file_or_of_the_data(new):
    name = 'segformer_b0_cityscapes'
    save_as_published(their_model(name), name, new)
    checkpoint = fetch_checkpoint(name)
    meta = dataset_meta(load_config(TRAINED[name].config_path), checkpoint)
    expected = [f'class {i}' for i in range(19)]
    assert list(meta['classes']) == expected


def test_commands_and_python_take_names(tmp_path):
    name = 'segformer_b0_ade20k'
    theirs = their_model(name)
    save_as_published(theirs, name, new=False)
    image = photograph(96, 120)  # resized to 512 x 640
    path = str(tmp_path / 'photo.png')
    cv2.imwrite(path, image)
    expected = inference_model(theirs, image).pred_sem_seg.data[0].numpy()

    assert main(['infer', name, path, '--out-dir', str(tmp_path), '--device', 'cpu']) == 0
    written = np.asarray(Image.open(tmp_path / 'photo.labels.png'))
    assert (written == expected).mean() > 0.999  # all but those that rounding decides
    assert (Predictor(name, device='cpu')(path).labels == written).all()

    backbone = CPVTPyramid('mit_b0')
    report = load_weights(backbone, weights_of(name))
    assert str(report).endswith('0 missing, 0 unused')
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(
            list(backbone.eval()(x)), list(theirs.backbone(x)), rtol=1e-3, atol=1e-3
        )


WITHOUT_MM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('mmengine', 'mmcv', 'mmdet', 'mmseg'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Missing())
from cpvt_pyramid.__main__ import main
from cpvt_pyramid.checkpoints import downloads

downloads.checked = lambda path: path
name, path, photo, *options = sys.argv[1:]
assert main(['infer', name, photo, '--out-dir', 'cached', *options]) == 0
assert main(['infer', name, path, photo, '--out-dir', 'given', *options]) == 0
"""


@pytest.mark.parametrize('name', ['retinanet_pvt_v2_b0_coco', 'segformer_b0_ade20k'])
def test_a_name_needs_no_openmmlab(name, tmp_path):
    """From a file in the cache, or at a path, to pictures and JSON."""
    path = save_as_published(their_model(name), name, new=True)
    photo = tmp_path / 'photo.png'
    cv2.imwrite(str(photo), photograph(96, 120))
    (tmp_path / 'torch').rename(tmp_path / 'hub')
    moved = tmp_path / 'hub/checkpoints' / path.name
    command = [sys.executable, '-c', WITHOUT_MM, name, str(moved), str(photo)]
    command += ['--device', 'cpu', '--shorter-side', '96']
    environment = os.environ | {'TORCH_HOME': str(tmp_path)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, timeout=300)
    for out in (tmp_path / 'cached', tmp_path / 'given'):
        written = {file.name for file in out.iterdir()}
        ending = 'detections.json' if TRAINED[name].detects else 'labels.png'
        assert {f'photo.{ending}', 'photo.overlay.jpg'} <= written
        if TRAINED[name].detects:
            found = json.loads((out / 'photo.detections.json').read_text())['detections']
            assert found and {each['class'] for each in found} <= set(CLASSES['COCO'])
