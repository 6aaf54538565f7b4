"""Necks and heads of MMDetection and MMSegmentation on padded batches: an image's outputs are those
that it has alone, also when compiled, checkpointed, and with RoIs."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, init_default_scope
from models import families
from models.families import FAMILIES
from models.ports import randomize
from models.samples import random_data
from reference import padded
from support import ROOT
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from cpvt_pyramid import masked_map
from cpvt_pyramid.masked_map import MaskedMap
from cpvt_pyramid.mm import backbone
from cpvt_pyramid.mm.valid_region import with_validity

SIZES = [(50, 70), (97, 41), (64, 96)]
OTHER = [(128, 96), (33, 20), (70, 90)]  # padded to the same size


def batch_of(images: Sequence[Tensor], divisor: int = 32) -> Tensor:
    """The images stacked and padded, as the data preprocessors do it."""
    more = [-max(sides) % divisor for sides in zip(*(x.shape[1:] for x in images))]
    return with_validity(padded(images, more), [image.shape[1:] for image in images])


def images_of(sizes: Sequence[tuple[int, int]] = SIZES) -> list[Tensor]:
    return [torch.randn(3, *size) for size in sizes]


def flat(outputs: object) -> list[Tensor]:
    return [x.as_subclass(Tensor) for x in tree_flatten(outputs)[0]]


def size_at(image: Tensor, stride: int) -> tuple[int, int]:
    return -(-image.shape[-2] // stride), -(-image.shape[-1] // stride)


def drift(model: Callable[[Tensor], object], divisor: int = 32) -> float:
    """How far the maps of an image in a batch are from its own, relative to the largest value."""
    images = images_of()
    farthest = 0.0
    with torch.no_grad():
        together = flat(model(batch_of(images, divisor)))
        for i, image in enumerate(images):
            own = batch_of([image], divisor)
            for alone, joint in zip(flat(model(own)), together):
                strides = (2**k for k in range(2, 9))
                stride = next(s for s in strides if size_at(own, s) == alone.shape[2:])
                h, w = size_at(image, stride)
                far = (alone[0, :, :h, :w] - joint[i, :, :h, :w]).abs().max()
                farthest = max(farthest, (far / alone[0, :, :h, :w].abs().max()).item())
    return farthest


NECKS = 'RetinaNet', 'Faster R-CNN, GN and WS', 'PAFPN', 'HRFPN', 'DINO'
HEADS = 'UPerNet', 'PSPNet', 'DeepLabV3', 'FCN', 'SegFormer'


@pytest.mark.parametrize('name', NECKS + HEADS)
def test_necks_and_heads(name, monkeypatch):
    model = families.build(FAMILIES[name])
    last = model.neck if name in NECKS else model.decode_head
    # At a divisor of 1 sizes are not multiples of the strides, which some necks do not take.
    for divisor in (32, 1) if name == 'DINO' else (32,):
        assert drift(lambda batch: last(model.backbone(batch)), divisor) < 1e-5
    monkeypatch.setattr(backbone, 'masked_maps', lambda maps, *_: maps)
    assert drift(lambda batch: last(model.backbone(batch))) > (1e-2 if name in NECKS else 1e-3)


def test_heads_that_are_not_about_the_grid_alone_still_run():
    """OCRNet gathers class vectors, ISANet permutes cells: they drift, and nothing is erased."""
    batch, contexts = batch_of(images_of()), []
    isa, ocr = (families.build(FAMILIES[name]) for name in ('ISANet', 'OCRNet, one map'))
    first, second = ocr.decode_head
    second.spatial_gather_module.register_forward_hook(lambda *of: contexts.append(of[2]))
    with torch.no_grad():
        assert isa.decode_head(isa.backbone(batch)).isfinite().all()
        maps = ocr.backbone(batch)
        assert second(maps, first(maps)).isfinite().all()
    assert contexts[0].abs().sum(1).min() > 0  # of each class


@pytest.mark.parametrize('padded', [False, True])
def test_roi_features(padded):
    """RoIAlign reads raw NCHW memory: of channels-last maps it took other cells, silently."""
    mask_rcnn = families.build(FAMILIES['Mask R-CNN'])
    images = images_of(SIZES if padded else [(64, 96)] * 2)
    batch = batch_of(images)
    rois = torch.tensor([[0, 3, 4, 40, 45], [1, 0, 10, 30, 60], [1, 5, 5, 12, 14]]).float()
    extractor = mask_rcnn.roi_head.bbox_roi_extractor
    maps = mask_rcnn.neck(mask_rcnn.backbone(batch))
    plain = [x.detach().as_subclass(Tensor) for x in maps]
    inputs = [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in plain]
    features = extractor(maps[:4], rois)
    expected = extractor(tuple(inputs[:4]), rois)
    torch.testing.assert_close(features, expected, rtol=0, atol=0)
    weight = torch.rand_like(expected)
    gradients = torch.autograd.grad((features * weight).sum(), maps[:4], allow_unused=True)
    references = torch.autograd.grad((expected * weight).sum(), inputs[:4], allow_unused=True)
    assert any(x is not None for x in references)
    for ours, theirs in zip(gradients, references):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours.as_subclass(Tensor), theirs)


def data_for(sizes: Sequence[tuple[int, int]], seed: int = 0, segmentor: bool = False) -> dict:
    return random_data(segmentor, sizes, seed, boxes=[(2, 3, 18, 16)], classes=5)


@pytest.fixture
def retinanet() -> nn.Module:
    cfg = Config.fromfile(ROOT / 'configs/retinanet_cpvt_s.py')
    init_default_scope(cfg.default_scope)
    model = cfg.model
    ones = (1, 1, 1)
    arch = dict(dims=(8, 16, 24), heads=ones, mlp_ratios=ones, depths=ones, sr_ratios=(8, 4, 1))
    model.backbone.update(arch=arch, out_indices=[0, 1, 2], init_cfg=None, drop_path_rate=0.0)
    model.neck.update(in_channels=[8, 16, 24], out_channels=16)
    model.bbox_head.update(in_channels=16, feat_channels=16, stacked_convs=1, num_classes=3)
    return randomize(MODELS.build(model)).eval()


def test_compiled_parts_of_a_detector(retinanet):
    """On padded batches one after the other; a thread-local region was silently the last one's."""
    torch._dynamo.reset()
    compiled = copy.deepcopy(retinanet)
    for part in (compiled.neck, compiled.bbox_head):
        part.compile(backend='aot_eager')
    with torch.no_grad():
        for sizes in (SIZES, OTHER):
            data = retinanet.data_preprocessor(data_for(sizes))
            ours, theirs = (flat(model(**data, mode='tensor')) for model in (compiled, retinanet))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class OneBlock(BaseModel):
    """A model that compiles in seconds."""

    def __init__(self) -> None:
        super().__init__(dict(type='ValidRegionSegDataPreProcessor', size=(128, 96)))
        arch = dict(dims=(8,), heads=(1,), mlp_ratios=(2,), depths=(1,), sr_ratios=(4,))
        self.backbone = MODELS.build(dict(type='CPVTPyramid', arch=arch, out_indices=(0,)))
        self.neck = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1))

    def forward(self, inputs: Tensor, data_samples: list, mode: str) -> dict[str, Tensor]:
        return dict(loss=self.neck(self.backbone(inputs)[0]).square().mean())


def test_compiled_training_steps():
    """`train_step` is what mmengine's `compile` key compiles."""
    torch._dynamo.reset()
    init_default_scope('mmseg')
    first, losses = randomize(OneBlock()), []
    for compiled in (False, True):
        model = copy.deepcopy(first)
        wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        step = torch.compile(model.train_step, backend='eager', disable=not compiled)
        for seed, sizes in enumerate((SIZES[:2], OTHER[:2])):
            losses.append(step(data_for(sizes, seed, segmentor=True), wrapper)['loss'].item())
    assert losses[0] != losses[1]
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-4)


def test_predictions_are_plain_tensors(retinanet):
    """As soon as they are used, after the maps of the batch are gone."""
    data = retinanet.data_preprocessor(data_for(SIZES))
    with torch.no_grad():
        assert {type(x) for x in retinanet.extract_feat(data['inputs'])} == {MaskedMap}
        found = retinanet(**data, mode='predict')
    for sample in found:
        for value in sample.pred_instances.values():
            value = value.tensor if hasattr(value, 'tensor') else value
            assert type(value.clone()) is type(value) is Tensor


def test_an_unpadded_batch_meets_no_subclass(retinanet, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError('a MaskedMap')

    monkeypatch.setattr(masked_map, 'masked', refuse)
    data = retinanet.data_preprocessor(data_for([(64, 96)] * 2))
    with torch.no_grad():
        assert {type(x) for x in flat(retinanet(**data, mode='tensor'))} == {Tensor}
