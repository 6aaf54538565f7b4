"""Padded batches in MMDetection and MMSegmentation: RoIs, and compiled training steps."""

import copy
from collections.abc import Sequence

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, init_default_scope
from reference import padded
from torch import Tensor, nn

from cpvt_pyramid.mm.valid_region import with_validity
from tests.models import families
from tests.models.families import FAMILIES
from tests.models.ports import randomize
from tests.models.samples import random_data

SIZES = [(50, 70), (97, 41), (64, 96)]
OTHER = [(128, 96), (33, 20), (70, 90)]  # padded to the same size


def batch_of(images: Sequence[Tensor], divisor: int = 32) -> Tensor:
    """The images stacked and padded, as the data preprocessors do it."""
    more = [-max(sides) % divisor for sides in zip(*(x.shape[1:] for x in images))]
    return with_validity(padded(images, more), [image.shape[1:] for image in images])


def images_of(sizes: Sequence[tuple[int, int]] = SIZES) -> list[Tensor]:
    return [torch.randn(3, *size) for size in sizes]


@pytest.mark.parametrize('padded', [False, True])
def test_roi_features(padded):
    """RoIAlign reads raw NCHW memory: of channels-last maps it took other cells, silently."""
    mask_rcnn = families.build(FAMILIES['Mask R-CNN'])
    images = images_of(SIZES if padded else [(64, 96)] * 2)
    batch = batch_of(images)
    rois = torch.tensor([[0, 3, 4, 40, 45], [1, 0, 10, 30, 60], [1, 5, 5, 12, 14]]).float()
    extractor = mask_rcnn.roi_head.bbox_roi_extractor
    maps = mask_rcnn.neck(mask_rcnn.backbone(batch))
    inputs = [x.detach().clone(memory_format=torch.contiguous_format) for x in maps]
    for x in inputs:
        x.requires_grad_()
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
            torch.testing.assert_close(ours, theirs)


def data_for(sizes: Sequence[tuple[int, int]], seed: int = 0, segmentor: bool = False) -> dict:
    return random_data(segmentor, sizes, seed, boxes=[(2, 3, 18, 16)], classes=5)


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
