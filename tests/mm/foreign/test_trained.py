"""The trained models that OpenMMLab has published, as models of ours.

No file can be downloaded here. MMDetection's and MMSegmentation's own models are built from their
own configs, with random weights, and saved in the layout of the published files. Ours load them by
name, from the cache where a download would be, and find what theirs find, each with its own test
pipeline.
"""

import copy
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
from mmseg.apis import inference_model
from PIL import Image
from torch import nn

from cpvt_pyramid import CPVTPyramid, load_weights
from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.parts import dataset_meta
from cpvt_pyramid.app.predict.openmmlab.models import (
    build_model,
    fetch_checkpoint,
    load_whole_model,
)
from cpvt_pyramid.app.predict.predictor import Predictor
from cpvt_pyramid.checkpoints import downloads
from cpvt_pyramid.trained import CLASSES, METRICS, TRAINED
from tests.models.meta import without_values
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
    classes = [f"class {i}" for i in range(len(CLASSES[TRAINED[name].data]))]
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
    path.parent.mkdir(parents=True)
    torch.save({'meta': meta, 'state_dict': state}, path)
    return path


# Ours


def our_model(name: str, *options: str) -> nn.Module:
    """Loaded by name, by what all commands call."""
    cfg = load_config(TRAINED[name].config_path, options)
    cfg.model.backbone.init_cfg = None
    model = build_model(cfg, 'cpu')
    load_whole_model(model, fetch_checkpoint(name), name)
    model.cfg = cfg
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path / 'torch'))


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
    assert sum(parameter.numel() for parameter in ours.parameters()) == model.parameters
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


# Longer sides / shorter sides. Their sub-sampling drops rows and columns at the border, ours does
# not; both agree where 32 divides the sides, and SVT's windows are padded on both sides or on none.
SHAPES = ((1, 1), (4 / 3, 1), (1, 5 / 3))


@pytest.mark.parametrize('name', NAMES)
def test_results_are_those_of_their_models(name):
    theirs = their_model(name)
    save_as_published(theirs, name, new=False)
    ours = our_model(name)
    detects = published_of(name).package == 'mmdet'
    assert_same = assert_same_boxes if detects else assert_same_labels
    for height, width in SHAPES:
        image = photograph(round(96 * height), round(96 * width))
        assert_same(smaller(ours), smaller(theirs), image)
    if detects:  # elsewhere, too, if the padding to a multiple of 32 is not masked
        ours = our_model(name, 'model.data_preprocessor.valid_region=False')
        assert_same(smaller(ours), theirs, photograph(96, 125))


def smaller(model: nn.Module) -> nn.Module:
    """The model with `SIDE` in its test pipeline."""
    for pipeline in (model.cfg.test_pipeline, model.cfg.test_dataloader.dataset.pipeline):
        for step in pipeline:
            if step.type == 'Resize':
                step.scale = (2 * SIDE, SIDE)
    return model


def assert_same_boxes(ours: nn.Module, theirs: nn.Module, image: np.ndarray) -> None:
    """Except for those whose score is that of the last ones, of which rounding decides."""
    a, b = (inference_detector(model, image).pred_instances for model in (ours, theirs))
    assert len(a) == len(b) == 100
    torch.testing.assert_close(a.scores, b.scores, rtol=0, atol=1e-4)
    last = b.scores.min() + 1e-4
    for one, other in ((a, b), (b, a)):
        for box, score, label in zip(one.bboxes, one.scores, one.labels):
            near = (other.bboxes - box).abs().amax(1) < 0.05
            same = near & ((other.scores - score).abs() < 1e-4) & (other.labels == label)
            assert same.any() or score < last


def assert_same_labels(ours: nn.Module, theirs: nn.Module, image: np.ndarray) -> None:
    """Except for pixels of which two classes have the same logit, but for rounding."""
    a, b = (inference_model(model, image) for model in (ours, theirs))
    assert a.pred_sem_seg.data.shape[-2:] == image.shape[:2]
    scores = b.seg_logits.data
    spread = scores.std()
    torch.testing.assert_close(a.seg_logits.data / spread, scores / spread, rtol=0, atol=1e-3)
    first, labels = scores.max(dim=0)
    second = scores.scatter(0, labels[None], -torch.inf).amax(dim=0)
    is_clear = first - second > 1e-3 * spread
    assert is_clear.float().mean() > 0.99
    assert torch.equal(b.pred_sem_seg.data[0], labels)
    assert torch.equal(a.pred_sem_seg.data[0][is_clear], labels[is_clear])
    assert len(labels.unique()) > 2  # not one class everywhere


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
    report = load_weights(backbone, name)
    assert str(report).endswith('0 missing, 0 unused')
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(
            list(backbone.eval()(x)), list(theirs.backbone(x)), rtol=1e-3, atol=1e-3
        )
