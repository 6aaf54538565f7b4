"""An image's features in MMDetection and MMSegmentation: the same alone and in a padded batch."""

import warnings

import numpy as np
import pytest
import torch
from mmdet.registry import MODELS as MMDET
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import MODELS, init_default_scope
from mmseg.structures import SegDataSample
from support import ROOT

from cpvt_pyramid.mm.valid_region import with_validity
from cpvt_pyramid.padding.mask import Padding
from tests.models.ports import randomize
from tests.models.samples import annotated, random_images

CONFIGS = ROOT / 'configs'
DEMOS = ['demo/pages_retinanet_cpvt_nano.py', 'demo/pages_semantic_fpn_cpvt_nano.py']
SIZES = [(50, 70), (97, 41), (64, 96)]


def build(name: str, **preprocessor: object) -> torch.nn.Module:
    cfg = Config.fromfile(CONFIGS / name)
    cfg.model.backbone.init_cfg = None
    init_default_scope(cfg.default_scope)
    cfg.model.data_preprocessor.update(preprocessor)
    return randomize(MODELS.build(cfg.model)).eval()


def inputs(model: torch.nn.Module, images: list) -> torch.Tensor:
    """The batch that the backbone is given, as in training: mmseg pads to a size there."""
    segmentor = hasattr(model, 'decode_head')
    sample = SegDataSample if segmentor else DetDataSample
    data = {'inputs': images, 'data_samples': [sample() for _ in images]}
    return model.data_preprocessor(data, training=segmentor)['inputs']


def drift(model: torch.nn.Module) -> float:
    """How far the features of an image in a batch are from its own, relative to the largest."""
    images = random_images(SIZES)
    with torch.no_grad():
        together = model.backbone(inputs(model, images))
        farthest = 0.0
        for i, image in enumerate(images):
            normed = (image[[2, 1, 0]] - model.data_preprocessor.mean) / model.data_preprocessor.std
            for alone, joint in zip(model.backbone(normed[None]), together):
                h, w = alone.shape[-2:]
                far = (joint[i, :, :h, :w] - alone[0]).abs().max() / alone.abs().max()
                farthest = max(farthest, far.item())
    return farthest


@pytest.mark.parametrize('name', DEMOS)
def test_features_do_not_depend_on_the_batch(name):
    """A batch without padding has no channel."""
    model = build(name)
    assert drift(model) < 1e-5
    assert drift(build(name, valid_region=False)) > 1e-2
    size = (256, 256)  # what the segmentor pads to, and a multiple of 32 for the detector
    images = [torch.zeros(3, *size, dtype=torch.uint8)] * 2
    assert inputs(model, images).shape == (2, 3, *size)
    images[1] = images[1][:, :150]
    assert inputs(model, images).shape == (2, 4, *size)


@pytest.mark.parametrize('images', [1, 2])
def test_images_of_one_size_run_without_masks(images, monkeypatch):
    """And have the same maps as with masks. A part of the batch, a window, runs with masks."""
    model = build(DEMOS[0])
    batch = inputs(model, random_images([(50, 70)]) * images)
    assert batch.shape == (images, 4, 64, 96)
    with torch.no_grad():
        masked = model.backbone(batch.clone())
        monkeypatch.setattr(Padding, 'of_batch', None)  # would be called for a mask
        cropped = model.backbone(batch)
        with pytest.raises(TypeError):
            model.backbone(batch[:, :, :60])
    for a, b in zip(cropped, masked):
        torch.testing.assert_close(a, b)
    assert [x.is_contiguous() for x in cropped] == [True] * 4


CHANGES = {
    'the mark of an image': lambda batch: batch[1, :, 30:].zero_(),
    'its pixels': lambda batch: batch[:, :3].mul_(2),
    'nothing': lambda batch: batch,
}


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize('change', CHANGES)
def test_a_batch_that_was_changed_in_place_runs_with_masks(change, mode):
    """The size of its images was noted before."""
    model = build(DEMOS[0]).backbone
    with mode():
        batch = with_validity(torch.rand(2, 3, 64, 64), [(50, 40)] * 2)
        CHANGES[change](batch)
        found = model(batch)
        for a, b in zip(found, model(batch.clone())):
            torch.testing.assert_close(a, b)


def labelled(images: list) -> list:
    samples = [annotated(False, x.shape[-2:], boxes=[(4, 4, 20, 20)]) for x in images]
    for sample in samples:
        sample.set_metainfo(dict(homography_matrix=np.eye(3, dtype=np.float32)))
    return samples


def test_semi_supervised_training():
    """mmdet's MultiBranchDataPreprocessor around ours: each branch is a batch of its own."""
    ours = Config.fromfile(CONFIGS / DEMOS[0]).model.data_preprocessor
    init_default_scope('mmdet')
    preprocessor = MMDET.build(dict(type='MultiBranchDataPreprocessor', data_preprocessor=ours))
    a, b, c = random_images(SIZES)
    branches = dict(sup=[a, None, None], unsup_teacher=[None, b, c], unsup_student=[None, c, c])
    samples = {k: [x if x is None else labelled([x])[0] for x in v] for k, v in branches.items()}
    data = preprocessor({'inputs': branches, 'data_samples': samples}, training=True)
    shapes = {name: tuple(batch.shape) for name, batch in data['inputs'].items()}
    assert shapes == {
        'sup': (1, 4, 64, 96),
        'unsup_teacher': (2, 4, 128, 96),
        'unsup_student': (2, 3, 64, 96),  # 64 x 96: nothing to pad
    }


@pytest.mark.parametrize(
    'augmentation, sizes, insides',
    [
        # Padding is padding, whatever fills it, and also where the batch itself needs none.
        (
            dict(type='BatchFixedSizePad', size=(320, 320), img_pad_value=114),
            [(64, 96)] * 2,
            [(64, 96)] * 2,
        ),
        (
            dict(
                type='BatchSyncRandomResize',
                random_size_range=(320, 320),
                interval=1,
                size_divisor=32,
            ),
            [(64, 64), (32, 64)],
            [(320, 320), (160, 320)],
        ),
    ],
)
def test_batch_augmentations(augmentation, sizes, insides):
    model = build(DEMOS[0], batch_augments=[augmentation])
    images = [torch.full((3, *size), 200, dtype=torch.uint8) for size in sizes]
    data = {'inputs': images, 'data_samples': labelled(images)}
    MessageHub.get_current_instance().update_info('iter', 0)
    for _ in range(2):  # a new size holds from the second batch on
        batch = model.data_preprocessor({**data}, training=True)['inputs']
    assert batch.shape == (2, 4, 320, 320)
    for channel, (height, width) in zip(batch[:, 3], insides):
        assert (channel[:height, :width] == 1).all() and channel.sum() == height * width


def test_inference_on_mixed_sizes_warns():
    """Of images that others pad, and not in training."""
    preprocessor = build(DEMOS[0]).data_preprocessor
    mixed, one_size = random_images([(50, 70), (97, 41)]), random_images([(50, 70), (64, 96)])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        preprocessor({'inputs': one_size, 'data_samples': labelled(one_size)})
        preprocessor({'inputs': mixed, 'data_samples': labelled(mixed)}, training=True)
    with pytest.warns(UserWarning, match='images of different sizes are in one batch'):
        preprocessor({'inputs': mixed, 'data_samples': labelled(mixed)})


CAFFE = dict(mean=[103.53, 116.28, 123.675], std=[1.0, 1.0, 1.0], bgr_to_rgb=False)
RTMDET = dict(mean=[103.53, 116.28, 123.675], std=[57.375, 57.12, 58.395], bgr_to_rgb=False)
IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True)
OF_ONE = dict(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ('normalization', 'classes', 'warns'),
    [
        (CAFFE, 1000, True),
        (RTMDET, 1000, True),
        (IMAGENET, 1000, False),
        (OF_ONE, 1000, False),  # images in 0 to 1
        (RTMDET, 0, False),  # weights of a detector, which may have been trained with it
        (RTMDET, 10, False),
    ],
)
def test_weights_of_imagenet_expect_its_normalization(normalization, classes, warns, tmp_path):
    backbone = dict(type='CPVTPyramid', arch='pcpvt_nano')
    weights = MODELS.build(backbone).state_dict()
    if classes:
        weights |= {'head.weight': torch.rand(classes, 192), 'head.bias': torch.rand(classes)}
    path = str(tmp_path / 'weights.pth')
    torch.save(weights, path)
    model = MODELS.build(backbone | dict(init_cfg=dict(type='Pretrained', checkpoint=path)))
    model.init_weights()
    preprocessor = MODELS.build(dict(type='ValidRegionDetDataPreprocessor', **normalization))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for sizes in ([(64, 64)], [(64, 64), (32, 64)]):
            images = [torch.zeros(3, *size, dtype=torch.uint8) for size in sizes]
            model(preprocessor({'inputs': images, 'data_samples': None}, True)['inputs'])
    lines = [str(each.message) for each in caught if 'ImageNet' in str(each.message)]
    assert len(lines) == int(warns)
    if warns:
        assert lines[0].endswith(f'has mean={normalization["mean"]}, std={normalization["std"]}')
