"""An image's features in MMDetection and MMSegmentation: the same alone and in a padded batch."""

import numpy as np
import pytest
import torch
from mmdet.models.detectors import DINO
from mmdet.registry import MODELS as MMDET
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import MODELS, init_default_scope
from mmseg.structures import SegDataSample
from models.ports import randomize
from models.samples import annotated, random_images
from models.small import dino
from support import ROOT

import cpvt_pyramid.mm.detection  # noqa: F401 registers the RoI extractors
from cpvt_pyramid.masked_map import masked_maps

CONFIGS = ROOT / 'configs'
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
    size = (160, 160)  # what the segmentor pads to, and a multiple of 32 for the detector
    images = [torch.zeros(3, *size, dtype=torch.uint8)] * 2
    assert inputs(model, images).shape == (2, 3, *size)
    images[1] = images[1][:, :150]
    assert inputs(model, images).shape == (2, 4, *size)


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


@pytest.mark.parametrize('augmentation, sizes, insides', [
    # Padding is padding, whatever it is filled with, and also where the batch itself needs none.
    (dict(type='BatchFixedSizePad', size=(320, 320), img_pad_value=114), [(64, 96)] * 2,
     [(64, 96)] * 2),
    (dict(type='BatchSyncRandomResize', random_size_range=(320, 320), interval=1, size_divisor=32),
     [(64, 64), (32, 64)], [(320, 320), (160, 320)]),
])  # fmt: skip
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


@pytest.mark.parametrize('kind', ['SingleRoIExtractor', 'GenericRoIExtractor'])
@pytest.mark.parametrize('aligned, scale', [(True, None), (True, 1.3), (False, None)])
def test_rois_read_the_image_alone(kind, aligned, scale):
    """At the edge, narrower than a cell, and enlarged; values and gradients."""
    layer = dict(type='RoIAlign', output_size=3, sampling_ratio=0, aligned=aligned)
    options = dict(roi_layer=layer, out_channels=2, featmap_strides=[4, 8])
    init_default_scope('mmdet')
    ours, theirs = (MMDET.build(dict(type=f'{x}{kind}', **options)) for x in ('ValidRegion', ''))
    maps = [torch.randn(3, 2, 96 // s, 96 // s, requires_grad=True) for s in (4, 8)]
    rois = [
        [i, *box]
        for i, (h, w) in enumerate(SIZES)
        for box in ([w - 2.5, 5, w, 30], [w - 0.1, h - 0.1, w, h], [0, 0, w, h], [3, 4, 20, 9])
    ]
    rois, valid = torch.tensor(rois)[torch.randperm(len(rois))], torch.tensor(SIZES).clamp(max=96)
    together = masked_maps([x.view_as(x) for x in maps], valid, (96, 96), (4, 8))
    found, expected = ours(together, rois, roi_scale_factor=scale), torch.zeros(len(rois), 2, 3, 3)
    for i, (h, w) in enumerate(valid.tolist()):
        at = rois[:, 0] == i
        alone = [x[i : i + 1, :, : -(-h // s), : -(-w // s)] for x, s in zip(maps, (4, 8))]
        boxes = torch.cat([torch.zeros(at.sum(), 1), rois[at, 1:]], dim=1)
        contiguous = [x.contiguous() for x in alone]
        expected[at] = theirs(contiguous, boxes, roi_scale_factor=scale)
    assert not torch.allclose(theirs(maps, rois, roi_scale_factor=scale), expected, atol=0.1)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(x.square().sum(), maps) for x in (found, expected))
    torch.testing.assert_close(*grads)


def found(model: torch.nn.Module, batch: list) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Boxes and scores of each image."""
    samples = [annotated(False, image.shape[1:]) for image in batch]
    data = model.data_preprocessor(dict(inputs=batch, data_samples=samples))
    with torch.no_grad():
        results = model.predict(data['inputs'], data['data_samples'], rescale=False)
    return [(r.pred_instances.bboxes, r.pred_instances.scores) for r in results]


def test_boxes_of_dino_do_not_depend_on_the_batch():
    """As they do in mmdet's own, which is the same without padding."""
    # Among the proposals that become queries is no padding with these weights; see ValidRegionDINO.
    ours, theirs = dino(), dino(kind='DINO')
    assert type(theirs) is DINO and ours.state_dict().keys() == theirs.state_dict().keys()
    images = random_images(((96, 128), (130, 70), (75, 190)))
    for image, (boxes, scores) in zip(images, found(ours, images)):
        ((own_boxes, own_scores),) = found(ours, [image])
        torch.testing.assert_close(scores, own_scores, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(boxes, own_boxes, rtol=1e-4, atol=1e-2)  # of 190 pixels
    (_, scores), *_ = found(theirs, images)
    ((_, own_scores),) = found(theirs, images[:1])
    assert (scores - own_scores).abs().max() > 1e-4

    equal = random_images([(128, 160)] * 2)
    torch.testing.assert_close(found(ours, equal), found(theirs, equal))
