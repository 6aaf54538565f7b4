"""Necks and heads of MMDetection and MMSegmentation on padded batches: an image's outputs are those
that it has alone, also when compiled, checkpointed, and with RoIs."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from mmengine.config import Config, ConfigDict
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


def build(part: dict, scope: str) -> nn.Module:
    init_default_scope(scope)
    return randomize(MODELS.build(part)).eval()


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


ONE_BLOCK_EACH = dict(  # compiles in seconds
    dims=(8, 16, 24), heads=(1, 2, 3), mlp_ratios=(2, 2, 2), depths=(1, 1, 1), sr_ratios=(8, 4, 1),
)  # fmt: skip


def small_config(name: str) -> ConfigDict:
    """The model of a config, on a backbone of three blocks."""
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    init_default_scope(cfg.default_scope)
    cfg.model.backbone.update(arch=ONE_BLOCK_EACH, out_indices=[0, 1, 2], init_cfg=None)
    cfg.model.backbone.drop_path_rate = 0.0
    cfg.model.neck.in_channels = list(ONE_BLOCK_EACH['dims'])
    return cfg.model


@pytest.fixture
def retinanet() -> nn.Module:
    model = small_config('retinanet_cpvt_s')
    model.neck.out_channels = 16
    model.bbox_head.update(in_channels=16, feat_channels=16, stacked_convs=1, num_classes=3)
    return randomize(MODELS.build(model)).eval()


@pytest.mark.parametrize('part', ['neck', 'head'])
def test_compiled_parts_of_a_detector(part, retinanet):
    """On padded batches one after the other; a thread-local region was silently the last one's."""
    torch._dynamo.reset()
    compiled = copy.deepcopy(retinanet)
    (compiled.neck if part == 'neck' else compiled.bbox_head).compile(backend='aot_eager')
    with torch.no_grad():
        for sizes in (SIZES, OTHER):
            data = retinanet.data_preprocessor(data_for(sizes))
            ours, theirs = (flat(model(**data, mode='tensor')) for model in (compiled, retinanet))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_compiled_training_steps():
    """`train_step` is what mmengine's `compile` key compiles."""
    torch._dynamo.reset()
    config = small_config('semantic_fpn_cpvt_s')
    config.data_preprocessor.size = (128, 96)
    config.neck.update(out_channels=8, num_outs=3)
    config.decode_head.update(in_channels=[8] * 3, in_index=[0, 1, 2], feature_strides=[4, 8, 16])
    config.decode_head.update(channels=8, num_classes=5, dropout_ratio=0)
    segmentor = randomize(MODELS.build(config))
    losses = []
    for compiled in (False, True):
        model = copy.deepcopy(segmentor)
        wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=1e-2))
        step = model.train_step
        if compiled:
            step = torch.compile(step, backend='eager')
        for seed, sizes in enumerate((SIZES, OTHER)):
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
