"""torchvision's detectors on our backbones: an image's boxes and masks are those that it has alone,
its maps also in training; and both fail without what sees to it."""

import ast
import copy
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign

from cpvt_pyramid import ARCHS, ColumnarArch, CPVTPyramid, DenseCPVT
from cpvt_pyramid.padding.mask import split_validity
from cpvt_pyramid.tasks import detectors
from cpvt_pyramid.tasks.detectors import (
    BySize,
    StrideAnchors,
    StrideRoIAlign,
    faster_rcnn,
    fcos,
    mask_rcnn,
    retinanet,
)

DETECTORS = dict(retinanet=retinanet, fcos=fcos, faster_rcnn=faster_rcnn, mask_rcnn=mask_rcnn)


def detector(kind: str, backbone: object = 'pcpvt_nano') -> nn.Module:
    """A model whose random weights give many boxes of many scores."""
    options = dict(num_classes=4, out_channels=64, min_size=64, max_size=140)
    if kind.endswith('rcnn'):
        options |= dict(box_detections_per_img=12, box_batch_size_per_image=16)
        options |= dict(rpn_post_nms_top_n_test=100, rpn_post_nms_top_n_train=50)
    model = DETECTORS[kind](backbone, **options)
    for layer in model.backbone.fpn.modules():
        if isinstance(layer, nn.Conv2d):  # or padding would stay zero
            nn.init.normal_(layer.bias)
    for name, layer in model.named_modules():
        leaf = name.rpartition('.')[2]
        if leaf in ('cls_logits', 'cls_score'):
            nn.init.normal_(layer.weight, std=0.3 if leaf == 'cls_logits' else 0.1)
            nn.init.zeros_(layer.bias)
        if leaf in ('bbox_reg', 'bbox_pred'):
            nn.init.normal_(layer.weight, std=0.05)
    return model.eval()


def images() -> list[torch.Tensor]:
    """Of three padded sizes: the first two are padded to one size, the last has no padding."""
    sizes = [(61, 118), (50, 97), (131, 70), (64, 96)]
    return [torch.rand(3, *size) for size in sizes]


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
    [
        *((kind, 'pcpvt_nano') for kind in DETECTORS),
        ('retinanet', 'cpvt_tiny'),
        ('fcos', 'pvt_v2_b0'),
    ],
)
@pytest.mark.parametrize('order', [(3, 1, 2, 0), (2, 1)])
def test_predictions_are_those_of_the_image_alone(kind, backbone, order):
    batch = images()
    assert difference(detector(kind, backbone), [batch[i] for i in order]) < 0.01


@pytest.mark.parametrize('kind', DETECTORS)
def test_in_one_batch_they_would_not_be(kind, monkeypatch):
    monkeypatch.setattr(BySize, 'padded_size', lambda *_: (0, 0))
    assert difference(detector(kind), images()) > 0.05


def test_images_of_one_padded_size_are_one_batch():
    model, batch = detector('retinanet'), images()
    sizes = []
    model.backbone.register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape)))
    with torch.no_grad():
        model([batch[2], batch[0], batch[3], batch[1]])
    # 3 channels and that which marks the padding.
    assert sizes == [(1, 4, 128, 64), (2, 4, 64, 128), (1, 3, 64, 96)]


@torch.no_grad()
def test_other_calls():
    """No images, a tensor of them, targets in evaluation, and copies of a model."""
    model, batch = detector('faster_rcnn'), images()
    expected = model(batch)
    assert model([]) == []
    torch.testing.assert_close(model(torch.stack([batch[0]] * 2))[1], expected[0])
    torch.testing.assert_close(model(batch, targets(batch)), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = [detector('faster_rcnn'), copy.deepcopy(model), torch.load(file, weights_only=False)]
    others[0].load_state_dict(model.state_dict())
    for other in others:
        torch.testing.assert_close(other.train().eval()(batch), expected)


@torch.no_grad()
@pytest.mark.parametrize('size', [(1, 1), (1, 500), (500, 2), (3, 420), (4, 560)])
@pytest.mark.parametrize('kind', ['retinanet', 'mask_rcnn'])
def test_very_narrow_images(kind, size):
    """Scaled to the longest side of 140 pixels, the short side would have none."""
    model, narrow = detector(kind), torch.rand(3, *size)
    ordinary = images()[0]
    found = model([ordinary, narrow])
    torch.testing.assert_close(found, model([ordinary]) + model([narrow]))
    boxes = found[1]['boxes']
    assert boxes.isfinite().all()
    assert (boxes >= 0).all() and (boxes <= torch.tensor(size).flip(0).repeat(2)).all()


def test_hooks_of_the_transform_see_each_batch_once():
    model, seen = detector('retinanet'), []
    model.transform.register_forward_hook(lambda _, __, out: seen.append(out[0].tensors.device))
    with torch.no_grad():
        model(images()[:2])
    assert seen == [torch.device('cpu')]


@torch.no_grad()
def test_memory_formats():
    model, batch = detector('mask_rcnn').to(memory_format=torch.channels_last), images()
    assert difference(model, batch) < 0.01


# The layers of heads before the last, which compute in half precision.
HIDDEN = (
    'head.classification_head.conv',
    'head.regression_head.conv',
    'rpn.head.conv',
    'roi_heads.box_head',
    'roi_heads.mask_predictor.relu',
)


def hidden_layers(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name in HIDDEN]


def replaying(model: nn.Module, recorded: list[torch.Tensor]) -> nn.Module:
    """A copy in double precision whose hidden layers give recorded results, one after the other."""
    exact = copy.deepcopy(model).double()
    results = iter(recorded)
    for layer in hidden_layers(exact):
        layer.register_forward_hook(lambda *_: next(results).double())
    return exact


@pytest.mark.parametrize(
    ('kind', 'autocast', 'training'),
    [
        *((kind, False, False) for kind in DETECTORS),
        *((kind, True, True) for kind in DETECTORS),
        ('retinanet', True, False),
    ],
)
def test_in_bfloat16_what_follows_the_hidden_layers_is_exact(kind, autocast, training):
    """At 1,340 pixels bfloat16 has steps of 8. Boxes, scores, masks and losses are those of a model
    in double precision, given the results of the hidden layers."""
    model = detector(kind)
    model.transform.min_size = (32,)
    model.transform.max_size = 1344
    if kind == 'mask_rcnn':
        model.roi_heads.detections_per_img = 4
    model.train(training)
    dtype = torch.float32 if autocast else torch.bfloat16
    model.to(dtype)
    image = torch.rand(3, 32, 1340)
    boxes = torch.tensor([[1261.0, 2, 1290, 30], [1307, 5, 1338, 27]])
    target = dict(boxes=boxes, labels=torch.tensor([1, 3]), masks=torch.ones(2, 32, 1340))

    def run(model, image):
        torch.manual_seed(0)  # anchors are sampled
        return model([image], [target]) if training else model([image])[0]

    recorded: list[torch.Tensor] = []
    exact = replaying(model, recorded)
    hooks = [
        layer.register_forward_hook(lambda module, given, out: recorded.append(out.detach()))
        for layer in hidden_layers(model)
    ]
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        found = run(model, image.to(dtype))
    for hook in hooks:
        hook.remove()
    assert all(x.dtype == torch.bfloat16 for x in recorded)
    expected = run(exact, image.double())
    assert found.keys() == expected.keys()
    if training:
        for name, loss in found.items():
            torch.testing.assert_close(loss, expected[name].float(), rtol=1e-4, atol=1e-5)
        sum(found.values()).backward()
        return
    assert len(found['boxes']) == len(expected['boxes']) > 3
    # Scores that are nearly equal may come in another order, and boxes may be nearly equal, too.
    scored_boxes = [
        torch.cat([of['boxes'], of['scores'][:, None]], dim=1).double() for of in (found, expected)
    ]
    distances = torch.cdist(*scored_boxes)
    distances[found['labels'][:, None] != expected['labels']] = torch.inf
    distance, index = distances.min(1)
    assert distance.max() < 1e-2
    torch.testing.assert_close(found['scores'], expected['scores'][index].float())
    if 'masks' in found:
        torch.testing.assert_close(found['masks'], expected['masks'][index].float())


@torch.no_grad()
def test_predictors_of_others_are_decoded_in_float32():
    """torchvision's tutorial replaces this layer."""
    model = detector('faster_rcnn')
    model.roi_heads.box_predictor = FastRCNNPredictor(1024, 4)
    (found,) = model.bfloat16()([torch.rand(3, 64, 96).bfloat16()])
    assert found['boxes'].dtype == found['scores'].dtype == torch.float32


def test_anchors_are_a_stride_apart():
    """In torchvision's 120 pixels, 1088 // 9."""
    maps, batch = [torch.zeros(1, 8, 2, 9)], ImageList(torch.zeros(1, 3, 256, 1088), [(256, 1088)])
    (anchors,) = StrideAnchors([128], [[100.0]], [1.0])(batch, maps)
    assert anchors[:3].tolist() == [[-50, -50, 50, 50], [78, -50, 178, 50], [206, -50, 306, 50]]


def test_roi_align_does_not_depend_on_the_first_batch():
    boxes = [torch.tensor([[3.0, 5, 60, 61]])]

    def pooled(pool: nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        return pool(
            {str(i): torch.randn(1, 2, 64 >> i, 64 >> i) for i in (0, 1)}, boxes, [(256, 256)]
        )

    for kind, same in (
        (lambda: StrideRoIAlign(7, (4, 8)), True),
        (lambda: MultiScaleRoIAlign(['0', '1'], 7, 2), False),
    ):
        used = kind()
        used({str(i): torch.randn(1, 2, 8 >> i, 8 >> i) for i in (0, 1)}, boxes, [(9, 9)])
        assert torch.equal(pooled(used), pooled(kind())) is same


def test_maps_of_one_cell():
    model = detector('faster_rcnn')
    model.transform.min_size, model.transform.size_divisible = (1,), 1
    with torch.no_grad():
        predictions = model([torch.rand(3, 1, 1), torch.rand(3, 1, 9)])
    assert all(len(found['boxes']) for found in predictions)


def targets(batch: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Two boxes for each image, one of them at its bottom right corner."""
    result = []
    for _, height, width in (image.shape for image in batch):
        boxes = torch.tensor([[2, 3, 30, 40], [width - 30, height - 40, width, height]]).float()
        masks = torch.ones(2, height, width, dtype=torch.uint8)
        result.append(dict(boxes=boxes, labels=torch.tensor([1, 3]), masks=masks))
    return result


@pytest.mark.parametrize('kind', DETECTORS)
def test_training_reaches_every_parameter(kind):
    model, batch = detector(kind).train(), images()
    losses = model(batch, targets(batch))
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def flat_gradient(body: nn.Module, maps: list[list[torch.Tensor]]) -> torch.Tensor:
    """Of a sum in which each value has its own weight, by channel, row and column."""
    total = 0
    for x in (x for levels in maps for x in levels):
        weights = [torch.arange(side).add(1).sin() for side in x.shape]
        total = total + torch.einsum('chw,c,h,w->', x, *weights)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(body.parameters()))])


def test_in_training_maps_and_gradients_are_those_of_the_image_alone():
    model, batch, seen = detector('retinanet').train(), images(), []
    body = model.backbone.body
    body.register_forward_hook(lambda _, __, maps: seen.append(maps))
    model(batch, targets(batch))
    for image in batch:
        model([image], targets([image]))
    together, *alone = seen
    alone = [[x[0] for x in maps] for maps in alone]
    parts = []
    for i, image in enumerate(batch):
        height, width = model.transform([image])[0].image_sizes[0]
        parts.append([])
        for x, expected, stride in zip(together, alone[i], body.strides):
            rows, columns = -(-height // stride), -(-width // stride)
            part = x[i, :, :rows, :columns]
            torch.testing.assert_close(part, expected[:, :rows, :columns], atol=1e-5, rtol=1e-4)
            assert x[i, :, rows:].eq(0).all() and x[i, :, :, columns:].eq(0).all()
            parts[i].append(part)
    torch.testing.assert_close(
        flat_gradient(body, parts), flat_gradient(body, alone), atol=1e-4, rtol=1e-4
    )


def test_the_mark_is_exact_in_half_precision():
    """The sum of 300 ones in bfloat16 is 256."""
    model = detector('retinanet')
    model.transform.min_size, model.transform.max_size = (300,), 400
    batch, _ = model.transform([torch.rand(3, 300, 333).bfloat16()])
    assert batch.tensors.dtype == torch.bfloat16
    assert split_validity(batch.tensors)[2].tolist() == [[300, 333]]


def test_images_of_other_channels_are_refused():
    """Also of one channel more, whose last one would be taken for the mark of the padding."""
    options = dict(num_classes=3, image_mean=[0.5], image_std=[0.5], min_size=48)
    model = retinanet(dict(arch='pcpvt_nano', in_channels=2), **options).eval()
    assert len(model([torch.rand(2, 48, 64)])) == 1
    with pytest.raises(ValueError, match='takes images of 2 channels, got 3'):
        model([torch.rand(3, 48, 64)])
    with pytest.raises(ValueError, match='takes images of 3 channels, got 1'):
        detector('fcos')([torch.rand(1, 48, 64)])
    with pytest.raises(ValueError, match=r'image_mean must have .* 4 channels .* got 3: \(0.485'):
        faster_rcnn(dict(arch='pcpvt_nano', in_channels=4), num_classes=3)


class Strided(nn.ModuleList):
    """Maps of a pyramid's sizes, which are captured in no time."""

    def forward(self, image: torch.Tensor, valid: object = None) -> list[torch.Tensor]:
        maps = []
        for conv in self:
            padding = conv.stride[0] - 1
            maps.append(conv(nn.functional.pad(image, (0, padding, 0, padding))))
        return maps


def test_compiled():
    options = dict(out_channels=8, extra_levels=0, head_convs=1, min_size=32, max_size=64)
    model = retinanet('pcpvt_nano', num_classes=1, **options).eval()
    model.backbone.body = Strided(
        nn.Conv2d(3, c, s, s) for c, s in zip(model.backbone.body.channels, (8, 16, 32))
    )
    nn.init.zeros_(model.head.classification_head.cls_logits.bias)
    batch = [torch.rand(3, 32, 32), torch.rand(3, 32, 64)]
    compiled = torch.compile(model, backend='eager', dynamic=False)
    with torch.no_grad():
        expected = model(batch)
        assert all(len(found['boxes']) for found in expected)
        torch.testing.assert_close(compiled(batch), expected)


@pytest.mark.parametrize(
    ('backbone', 'kind'),
    [
        (dict(arch='pcpvt_nano', position='learned'), CPVTPyramid),
        (dict(arch='pvt_v2_b0'), CPVTPyramid),
        (dict(arch='mit_b0', drop_path_rate=0.1), CPVTPyramid),
        (dict(arch=dict(ARCHS['pcpvt_nano']._asdict(), depths=[1, 1, 1, 1])), CPVTPyramid),
        (dict(arch='cpvt_tiny', out_channels=8), DenseCPVT),
        (dict(arch=dict(dim=16, heads=2, depth=1)), DenseCPVT),
        (dict(arch=ColumnarArch(16, 2, 1)), DenseCPVT),
    ],
)
def test_backbone_by_its_options(backbone, kind):
    with torch.device('meta'):
        body = faster_rcnn(backbone, num_classes=3).backbone.body
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


@pytest.mark.parametrize('out_channels', [32, 48])
def test_fcos_needs_groups_of_several_channels(out_channels):
    """With one channel a group, an image of up to 128 pixels a side failed in GroupNorm: its last
    map has one cell."""
    with pytest.raises(ValueError, match=f'at least 64, got {out_channels}: the head of FCOS'):
        fcos('pcpvt_nano', num_classes=3, out_channels=out_channels)
    options = dict(num_classes=3, out_channels=64, min_size=48, max_size=64)
    assert len(fcos('pcpvt_nano', **options).eval()([torch.rand(3, 48, 64)])) == 1


def test_torchvision_is_all_that_is_imported_besides_the_core():
    tree = ast.parse(Path(detectors.__file__).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    roots = {node.module.split('.')[0] for node in nodes if not node.level}
    assert roots <= {*sys.stdlib_module_names, 'torch', 'torchvision'}
