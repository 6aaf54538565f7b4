"""torchvision's detectors on our backbones: an image's boxes, masks and losses are those that it
has alone, and each part that sees to it is needed."""

import ast
import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from cpvt_pyramid import ARCHS, ColumnarArch, CPVTPyramid, DenseCPVT, torchvision_models
from cpvt_pyramid.masked_map import masked_maps
from cpvt_pyramid.torchvision_models import (
    RegionRoIAlign,
    faster_rcnn,
    fcos,
    mask_rcnn,
    retinanet,
    semantic_fpn,
)

DETECTORS = dict(retinanet=retinanet, fcos=fcos, faster_rcnn=faster_rcnn, mask_rcnn=mask_rcnn)


def detector(kind: str, backbone: object = 'pcpvt_nano') -> nn.Module:
    """A model whose random weights give many boxes of many scores."""
    options = dict(num_classes=4, out_channels=64, min_size=48, max_size=140)
    if kind.endswith('rcnn'):
        options |= dict(box_detections_per_img=12, box_batch_size_per_image=16)
        options |= dict(rpn_post_nms_top_n_test=100, rpn_post_nms_top_n_train=50)
    model = DETECTORS[kind](backbone, **options)
    for name, layer in model.named_modules():
        leaf = name.rpartition('.')[2]
        if leaf in ('cls_logits', 'cls_score'):
            nn.init.normal_(layer.weight, std=0.3 if leaf == 'cls_logits' else 0.1)
            nn.init.zeros_(layer.bias)
        if leaf in ('bbox_reg', 'bbox_pred'):
            nn.init.normal_(layer.weight, std=0.05)
    return model.eval()


def images() -> list[torch.Tensor]:
    return [torch.rand(3, 61, 118), torch.rand(3, 131, 70), torch.rand(3, 48, 48)]


@torch.no_grad()
def difference(model: nn.Module, batch: list[torch.Tensor]) -> float:
    """The largest one between predictions alone and in a batch: of boxes in pixels, of scores and
    masks in percent; 1e9 if a box has no counterpart."""
    largest = 0.0
    for image, together in zip(batch, model(batch)):
        (alone,) = model([image])
        assert len(alone['boxes']) > 3
        if len(alone['boxes']) != len(together['boxes']):
            return 1e9
        values = [
            torch.cat([found['boxes'], 100 * found['scores'][:, None]], dim=1)
            for found in (alone, together)
        ]
        distances = (values[0][:, None] - values[1]).abs().amax(2)
        distances[alone['labels'][:, None] != together['labels']] = 1e9
        nearest, index = distances.min(1)
        largest = max(largest, nearest.max().item())
        if 'masks' in alone:
            masks = (alone['masks'] - together['masks'][index]).abs().amax()
            largest = max(largest, 100 * masks.item())
    return largest


@pytest.mark.parametrize(
    ('kind', 'backbone'),
    [*((kind, 'pcpvt_nano') for kind in DETECTORS), ('retinanet', 'cpvt_tiny')],
)
def test_predictions_are_those_of_the_image_alone(kind, backbone):
    assert difference(detector(kind, backbone), images()) < 0.01


def test_boxes_at_the_edge_read_the_image_alone():
    """Also those that RoIAlign widens to a cell, so that it reads further than one cell outside."""
    sizes, strides = [(40, 40), (64, 96), (37, 75), (1, 90)], (4, 8)
    batch = [torch.randn(4, 2, 64 // stride, 96 // stride) for stride in strides]
    boxes = []
    for height, width in sizes:
        ends = torch.tensor([width, height]) - torch.tensor([[0.0], [0.5], [0], [0.3], [1]])
        sides = torch.tensor([[2.5, 25], [0.1, 0.1], [9, 0.5], [60, 40], [0, 0]])
        boxes.append(torch.cat([ends - sides, ends], dim=1).clamp(min=0))
    pool = RegionRoIAlign(7, strides)
    maps = masked_maps([x.clone() for x in batch], torch.tensor(sizes), (64, 96), strides)
    together = pool(dict(zip('01', maps)), boxes, sizes).split([len(x) for x in boxes])
    for i, (size, found) in enumerate(zip(sizes, together)):
        maps = {
            name: x[i : i + 1, :, : -(-size[0] // stride), : -(-size[1] // stride)]
            for name, x, stride in zip('01', batch, strides)
        }
        torch.testing.assert_close(found, pool(maps, boxes[i : i + 1], [size]), rtol=0, atol=0)


def test_maps_of_one_cell():
    model = detector('faster_rcnn')
    model.transform.min_size = (1,)
    with torch.no_grad():
        predictions = model([torch.rand(3, 1, 1), torch.rand(3, 1, 9)])
    assert all(len(found['boxes']) for found in predictions)


def with_plain_roi_align(model: nn.Module) -> None:
    pool = model.roi_heads.box_roi_pool
    model.roi_heads.box_roi_pool = MultiScaleRoIAlign(pool.featmap_names, 7, 2)


def with_guessed_strides(model: nn.Module) -> None:
    ours = model.anchor_generator
    model.anchor_generator = AnchorGenerator(ours.sizes, ours.aspect_ratios)


DAMAGE = [
    ('retinanet', lambda m: m.transform._forward_hooks.clear()),
    ('retinanet', lambda m: m.head.classification_head.cls_logits._forward_hooks.clear()),
    ('retinanet', with_guessed_strides),
    ('faster_rcnn', with_plain_roi_align),
]


@pytest.mark.parametrize('kind, damage', DAMAGE)
def test_every_part_is_needed(kind, damage):
    model = detector(kind)
    damage(model)
    assert difference(model, images()) > 0.05


def targets(batch: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Two boxes for each image, one of them at its bottom right corner."""
    result = []
    for _, height, width in (image.shape for image in batch):
        boxes = torch.tensor([[2, 3, 30, 40], [width - 30, height - 40, width, height]]).float()
        masks = torch.ones(2, height, width, dtype=torch.uint8)
        result.append(dict(boxes=boxes, labels=torch.tensor([1, 3]), masks=masks))
    return result


@pytest.mark.parametrize('kind', ['retinanet', 'fcos', 'mask_rcnn'])
def test_losses_do_not_depend_on_the_padding_and_train_every_parameter(kind):
    """RetinaNet's is the mean of its images'; Mask R-CNN draws boxes at random."""
    model, batch = copy.deepcopy(detector(kind)).train(), images()  # hooks survive copies
    losses = model(batch, targets(batch))
    assert all(loss.isfinite() and loss < 100 for loss in losses.values())
    if kind == 'retinanet':
        alone = [model([image], [target]) for image, target in zip(batch, targets(batch))]
        for name, loss in losses.items():
            torch.testing.assert_close(loss, sum(found[name] for found in alone) / len(batch))
    if kind != 'mask_rcnn':
        model.transform.size_divisible = 256
        torch.testing.assert_close(model(batch, targets(batch)), losses)
    sum(losses.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_logits_are_those_of_the_image_alone():
    model = semantic_fpn(CPVTPyramid('pcpvt_nano'), num_classes=5, out_channels=16).eval()
    sizes = torch.tensor([[61, 118], [131, 70], [32, 32]])
    batch = torch.randn(3, 3, 131, 118)
    with torch.no_grad():
        together = model(batch, valid=sizes)['out']
        assert together.shape == (3, 5, 131, 118) and type(together) is torch.Tensor
        for image, logits, (height, width) in zip(batch, together, sizes.tolist()):
            alone = model(image[None, :, :height, :width])['out'][0]
            assert alone.std() > 1e-3
            torch.testing.assert_close(logits[:, :height, :width], alone, atol=1e-4, rtol=1e-4)


class Strided(nn.ModuleList):
    """Maps of a pyramid's sizes, which are captured in no time."""

    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        return [conv(nn.functional.pad(image, (0, s - 1, 0, s - 1)))
                for conv, s in zip(self, (4, 8, 16, 32))]  # fmt: skip


def test_a_graph_of_semantic_fpn_takes_other_sizes():
    model = semantic_fpn('pcpvt_nano', num_classes=3, out_channels=8, head_channels=8).eval()
    channels = model.backbone.body.channels
    model.backbone.body = Strided(
        nn.Conv2d(3, c, 4 * 2**i, 4 * 2**i) for i, c in enumerate(channels)
    )
    image, shapes = torch.randn(2, 3, 70, 90), dict(image={2: torch.export.Dim.DYNAMIC})
    graph = torch.export.export(model, (image,), dynamic_shapes=shapes, strict=False).module()
    with torch.no_grad():
        for size in ((2, 3, 96, 90), (2, 3, 131, 90)):
            image = torch.randn(size)
            torch.testing.assert_close(graph(image)['out'], model(image)['out'])
    with pytest.raises(ValueError, match='leave out valid'):
        torch.export.export(model, (image, torch.tensor([[96, 64]] * 2)), strict=False)


@pytest.mark.parametrize(
    ('backbone', 'kind'),
    [
        (dict(arch='pcpvt_nano', position='learned'), CPVTPyramid),
        (dict(arch=dict(ARCHS['pcpvt_nano']._asdict(), depths=[1, 1, 1, 1])), CPVTPyramid),
        (dict(arch='cpvt_tiny', out_channels=8), DenseCPVT),
        (dict(arch=dict(dim=16, heads=2, depth=1)), DenseCPVT),
        (dict(arch=ColumnarArch(16, 2, 1)), DenseCPVT),
    ],
)
def test_backbone_by_its_options(backbone, kind):
    with torch.device('meta'):
        body = semantic_fpn(backbone, num_classes=3).backbone.body
        assert retinanet(backbone, num_classes=3).backbone.strides == (8, 16, 32, 64, 128)
        expected = kind(**backbone)
    assert type(body) is kind
    shapes = {name: x.shape for name, x in body.state_dict().items()}
    assert shapes == {name: x.shape for name, x in expected.state_dict().items()}


def test_mistakes_name_the_way_out():
    with pytest.raises(ValueError, match=f'unknown arch .resnet50.; one of {next(iter(ARCHS))}'):
        retinanet('resnet50', num_classes=3)
    with pytest.raises(ValueError, match=r'must be \(8, 16, 32\), got \(4, 8, 16, 32\)'):
        retinanet(CPVTPyramid('pcpvt_nano'), num_classes=3)
    with torch.device('meta'):
        for build in DETECTORS.values():
            with pytest.raises(TypeError, match='has no option box_nms_tresh'):
                build('pcpvt_nano', num_classes=3, box_nms_tresh=0.5)
            with pytest.raises(TypeError, match=r"min_size of \w+ must be a number, got \('96',\)"):
                build('pcpvt_nano', num_classes=3, min_size=('96',))


def test_torchvision_is_all_that_is_imported_besides_the_core():
    tree = ast.parse(Path(torchvision_models.__file__).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    roots = {node.module.split('.')[0] for node in nodes if not node.level}
    assert roots <= {*sys.stdlib_module_names, 'torch', 'torchvision'}
