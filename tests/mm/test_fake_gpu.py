"""Backbone, neck and head of a padded batch on tensors of a GPU that is not there."""

import pytest
import torch
from fake_gpu import place
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_flatten

from tests.models.small import mask_rcnn, retinanet, semantic_fpn

MODELS = {'RetinaNet': retinanet, 'Mask R-CNN': mask_rcnn, 'Semantic FPN': semantic_fpn}
HEADS = {'RetinaNet': 'bbox_head', 'Mask R-CNN': 'rpn_head', 'Semantic FPN': 'decode_head'}
by_name = pytest.mark.parametrize('name', MODELS)


def results(model: nn.Module, head: str, images: Tensor) -> list[Tensor]:
    maps = model.neck(model.backbone(images))
    return tree_flatten(getattr(model, head)(maps))[0]


def padded_batch(device: str) -> Tensor:
    """Images with the validity channel of the data preprocessor."""
    return torch.empty(2, 4, 96, 128, device=device)


@by_name
def test_the_forward_pass_never_reads_a_value(name):
    model = MODELS[name]().eval()
    model.backbone.validity_checked = True  # by the first padded batch of a process
    with FakeTensorMode():
        place(model, 'cuda')
        found = results(model, HEADS[name], padded_batch('cuda'))
    assert {x.device.type for x in found} == {'cuda'}


@by_name
def test_forward_and_backward_never_read_a_value(name):
    model = MODELS[name]().train()
    model.backbone.validity_checked = True
    place(model, 'meta')
    found = results(model, HEADS[name], padded_batch('meta'))
    sum(x.sum() for x in found).backward()
    parts = [model.backbone, model.neck, getattr(model, HEADS[name])]
    without = [x for part in parts for x in part.parameters() if x.requires_grad and x.grad is None]
    assert without == []


def test_only_the_first_padded_batch_is_read():
    model = retinanet().eval()
    with FakeTensorMode():
        place(model, 'cuda')
        with pytest.raises(DataDependentOutputException):
            model.backbone(padded_batch('cuda'))
        model.backbone(torch.empty(2, 3, 96, 128, device='cuda'))
