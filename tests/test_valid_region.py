"""An image's features in MMDetection and MMSegmentation: the same alone and in a padded batch."""

from pathlib import Path

import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData
from mmseg.structures import SegDataSample
from reference import randomize

CONFIGS = Path(__file__).parents[1] / 'configs'
DEMOS = ['demo/retinanet_cpvt_nano.py', 'demo/semantic_fpn_cpvt_nano.py']
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
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in SIZES]
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
    assert drift(build(name)) < 1e-5
    assert drift(build(name, valid_region=False)) > 1e-2


@pytest.mark.parametrize('name', DEMOS)
def test_a_batch_without_padding_has_no_channel(name):
    model = build(name)
    size = (160, 160)  # what the segmentor pads to, and a multiple of 32 for the detector
    images = [torch.zeros(3, *size, dtype=torch.uint8)] * 2
    assert inputs(model, images).shape == (2, 3, *size)
    images[1] = images[1][:, :150]
    assert inputs(model, images).shape == (2, 4, *size)


def test_batch_augmentations_take_the_channel_along():
    augmentation = dict(
        type='BatchSyncRandomResize', random_size_range=(320, 320), interval=1, size_divisor=32
    )
    model = build(DEMOS[0], batch_augments=[augmentation])
    images = [torch.full((3, h, w), 200, dtype=torch.uint8) for h, w in ((64, 64), (32, 64))]
    samples = []
    for image in images:
        sample = DetDataSample(metainfo=dict(img_shape=image.shape[-2:]))
        sample.gt_instances = InstanceData(bboxes=torch.zeros(1, 4))
        samples.append(sample)
    data = {'inputs': images, 'data_samples': samples}
    MessageHub.get_current_instance().update_info('iter', 0)
    for _ in range(2):  # the new size holds from the second batch on
        batch = model.data_preprocessor({**data}, training=True)['inputs']
    assert batch.shape == (2, 4, 320, 320)
    inside = batch[:, 3] > 0.5
    assert inside[0].all() and inside[1, :160].all() and not inside[1, 161:].any()
