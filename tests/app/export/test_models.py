"""What is exported gives each image of a batch the result of the original model for it alone."""

from collections.abc import Callable, Sequence
from typing import Optional

import mmdet
import mmseg
import pytest
import reference
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.app.export.base import Exportable
from cpvt_pyramid.app.export.detectors import Detector
from cpvt_pyramid.app.export.models import exportable
from cpvt_pyramid.app.predict.openmmlab.samples import data_sample
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.tasks.detectors import from_mmdetection
from cpvt_pyramid.tasks.trained import TRAINED, build_trained
from tests.models.patches import Patches
from tests.models.small import (
    DIMS,
    NECK,
    dino,
    foreign_model,
    mask2former_detector,
    mask2former_segmentor,
    mask_rcnn,
    retinanet,
    semantic_fpn,
    small,
    upernet,
)

SIZES = ((96, 128), (130, 70), (75, 190))  # one without padding to a multiple of 32
TOGETHER = ((96, 128), (70, 97), (81, 120))  # are padded to one multiple of 32
BATCHES = TOGETHER, ((67, 163),)  # PyTorch refuses maps of one row, at 64 pixels
ORIGINAL = torch.tensor([(201, 250), (101, 66), (75, 191)])  # of label maps

Outputs = dict[str, Tensor]
Compare = Callable[[Outputs, Outputs], None]  # takes what was found in one image, and the expected


def padded(sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A batch of images of these sizes, its `valid`, and each image alone."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *s), generator=generator).float() for s in sizes]
    return reference.padded(images), torch.tensor(sizes), [image[None] for image in images]


def outputs_for(model: Exportable, i: int, outputs: Sequence[Tensor]) -> Outputs:
    return {name: x[i] for name, x in zip(model.output_names, outputs)}


def assert_each_alone(
    model: Exportable, compare: Compare, sizes: Sequence[tuple[int, int]] = SIZES
) -> None:
    """Compare the outputs for each image alone, and for images in a batch, with those of the
    original model for each image alone."""
    model.eval()
    for image in padded(sizes)[2]:
        assert_alone(model, compare, image, None, [image])
    if model.takes_any_padding:
        assert_alone(model, compare, *padded(sizes))
    elif model.preprocessing.divisor > 1:
        assert_alone(model, compare, *padded(TOGETHER))
    else:
        images, _, alone = padded([sizes[-1]] * 3)
        assert_alone(model, compare, images, None, alone)


def assert_alone(
    model: Exportable,
    compare: Compare,
    images: Tensor,
    valid: Optional[Tensor],
    alone: Sequence[Tensor],
) -> None:
    with torch.no_grad():
        together = model(images, valid)
        for i, image in enumerate(alone):
            expected = {name: x[0] for name, x in model.reference(image).items()}
            compare(outputs_for(model, i, together), expected)


def same(boxes: float, others: float, rtol: float = 0, neighbours: bool = False) -> Compare:
    """A comparison with these tolerances; rows after the last box must be unused."""

    def compare(found: Outputs, expected: Outputs) -> None:
        ours = {n: found[n][tuple(slice(side) for side in x.shape)] for n, x in expected.items()}
        if 'boxes' in expected:
            count = len(expected['labels'])
            assert count > 5
            assert (found['labels'][count:] == -1).all() and not found['scores'][count:].any()
        if neighbours:  # the last bit of a score decides between them
            ours = in_the_order_of(expected, ours)
        for name, x in expected.items():
            atol = boxes if name == 'boxes' else others
            torch.testing.assert_close(ours[name], x, rtol=rtol, atol=atol, check_dtype=False)

    return compare


def in_the_order_of(expected: Outputs, found: Outputs) -> Outputs:
    ours, theirs = (
        torch.cat([x['boxes'], 1e3 * x['labels'][:, None], x['scores'][:, None]], dim=1)
        for x in (found, expected)
    )
    order = torch.cdist(theirs, ours).argmin(dim=1)
    assert len(order.unique()) == len(order)
    assert (order - torch.arange(len(order))).abs().max() <= 1
    return {name: x[order] for name, x in found.items()}


SAME = same(1e-3, 1e-3, rtol=1e-4)
BOXES = same(0.02, 2e-4)  # in pixels


@pytest.mark.parametrize('marks_padding', [True, False])
def test_retinanet(marks_padding):
    model = exportable(retinanet(**{'data_preprocessor.valid_region': marks_padding}))
    assert model.reference(padded(SIZES)[2][0])['scores'].shape[1] < 60
    assert_each_alone(model, same(1e-3, 1e-3, rtol=1e-4, neighbours=True))
    assert_each_alone(exportable(model.model, backbone=True), SAME)


@pytest.mark.parametrize('make', [mask_rcnn, dino])
def test_detectors(make):
    assert_each_alone(exportable(make()), BOXES)


def test_masks_of_queries():
    sizes = iter([*SIZES, *TOGETHER])

    def compare(found: Outputs, expected: Outputs) -> None:
        assert list(expected) == ['boxes', 'scores', 'labels']
        same(1e-5, 1e-5, rtol=1e-5)(found, expected)
        # The masks have the boxes that MMDetection has found in the masks of the pixels.
        height, width = next(sizes)
        masks = F.interpolate(found['masks'][None], scale_factor=4, mode='bilinear')[0]
        for mask, box in zip(masks[:, :height, :width] > 0.5, expected['boxes']):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            if len(rows):
                ends = torch.stack([columns.min(), rows.min(), columns.max(), rows.max()])
                assert (ends - box).abs().max() <= 4

    assert_each_alone(exportable(mask2former_detector()), compare)


BLUE_FIRST = {'data_preprocessor.bgr_to_rgb': False, 'data_preprocessor.std': [50.0, 60.0, 70.0]}


@pytest.mark.parametrize(
    'make, changes, compare',
    [
        (semantic_fpn, BLUE_FIRST, SAME),
        (semantic_fpn, {'decode_head.num_classes': 40, 'decode_head.align_corners': True}, SAME),
        (semantic_fpn, {'decode_head.num_classes': 2, 'decode_head.out_channels': 1}, SAME),
        (upernet, {}, SAME),
        (mask2former_segmentor, {}, same(0, 1e-5)),
    ],
)
def test_segmentors(make, changes, compare):
    original = make(**changes)
    resized = 'probabilities' if make == mask2former_segmentor else 'logits'
    for probabilities in (False, True):
        model = exportable(original, probabilities=probabilities)
        assert model.details['resized'] == resized
        assert model.details.get('threshold', 0.3) == 0.3
        assert_each_alone(model, compare)
    assert_original_sizes(exportable(original))


def assert_original_sizes(model: Exportable) -> None:
    """Label maps have the sizes of the original images, and are those of MMSegmentation."""
    padding = model.preprocessing.divisor > 1
    images, valid, alone = padded(TOGETHER if padding else [SIZES[-1]] * 3)
    with torch.no_grad():
        (found,) = model(images, valid if padding else None, ORIGINAL)
        assert tuple(found.shape) == (3, 201, 250)
        for labels, image, size in zip(found, alone, ORIGINAL):
            expected = model.reference(image, size[None])['labels'][0]
            assert tuple(expected.shape) == tuple(size)
            assert len(expected.unique()) > 1 or model.details['resized'] == 'probabilities'
            wrong = labels[: size[0], : size[1]] != expected
            assert wrong.double().mean() < 1e-4  # ties


CANVAS, SMALLER = (96, 160), (50, 70)


def on_a_canvas() -> tuple[Tensor, Tensor, Tensor]:
    """A batch of an image that is smaller than a graph's fixed size, its `valid`, and the image."""
    image = padded([SMALLER])[2][0]
    down, right = CANVAS[0] - SMALLER[0], CANVAS[1] - SMALLER[1]
    return F.pad(image, (0, right, 0, down)), torch.tensor([SMALLER]), image


@pytest.mark.parametrize('make', [mask_rcnn, dino])
def test_a_smaller_image_in_a_detector_of_one_size(make):
    """The result is that of MMDetection in a batch with an image of the fixed size."""
    model = exportable(make()).eval()
    images, valid, image = on_a_canvas()
    blank = torch.zeros(3, *CANVAS)
    samples = [data_sample(False, size) for size in (SMALLER, CANVAS)]
    batch = {'inputs': [image[0].flip(0), blank], 'data_samples': samples}
    with torch.no_grad():
        found = model(images, valid)
        expected = model.model.test_step(batch)[0].pred_instances
    names = {'boxes': 'bboxes', 'scores': 'scores', 'labels': 'labels'}
    BOXES(outputs_for(model, 0, found), {ours: expected[mm] for ours, mm in names.items()})


def test_a_smaller_image_in_a_segmentor_of_one_size():
    model = exportable(semantic_fpn()).eval()
    images, valid, image = on_a_canvas()
    original = torch.tensor([(101, 66)])
    with torch.no_grad():
        (found,) = model(images, valid, original)
        model.model.data_preprocessor.test_cfg = {'size': CANVAS}
        expected = model.reference(image, original)['labels'][0]
    assert found.shape[1:] == expected.shape
    assert (found[0] != expected).double().mean() < 1e-4  # ties


NARROW = dict(in_channels=16, feat_channels=16, num_classes=5)


@pytest.mark.parametrize(
    'package, config, changes',
    [
        (
            mmdet,
            'retinanet/retinanet_r50_fpn_1x_coco',
            {
                'bbox_head': NARROW | {'stacked_convs': 1},
                'test_cfg': dict(score_thr=0.95, nms_pre=500, max_per_img=60),
            },
        ),
        (
            mmdet,
            'faster_rcnn/faster-rcnn_r50_fpn_1x_coco',
            {
                'rpn_head': dict(in_channels=16, feat_channels=16),
                'roi_head.bbox_roi_extractor.out_channels': 16,
                'roi_head.bbox_head': dict(in_channels=16, fc_out_channels=32, num_classes=5),
                'test_cfg.rcnn': dict(score_thr=0.1, max_per_img=20),
            },
        ),
    ],
)
def test_detectors_of_mmdet_with_our_backbone(package, config, changes):
    """Their data preprocessor tells the backbone nothing about the padding."""
    model = exportable(foreign_model(package, config, neck=NECK, **changes))
    assert not model.preprocessing.marks_padding
    assert_each_alone(model, same(0.02, 1e-3, neighbours=True), [(75, 190), (33, 40)])


@pytest.mark.parametrize(
    'config, head',
    [
        ('pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024', dict(in_channels=32, in_index=3)),
        ('segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512', dict(in_channels=DIMS)),
    ],
)
@pytest.mark.parametrize('divisor', [1, 32])
def test_segmentors_of_mmseg_with_our_backbone(config, head, divisor):
    head = head | dict(channels=16, num_classes=5, norm_cfg=dict(type='BN'))
    padding = dict(size_divisor=divisor) if divisor > 1 else None
    changes = {'auxiliary_head': None, 'pretrained': None, 'data_preprocessor.test_cfg': padding}
    original = foreign_model(mmseg, config, decode_head=head, **changes)
    for probabilities in (False, True):
        model = exportable(original, probabilities=probabilities)
        assert_each_alone(model, SAME, [(75, 190), (7, 9)])


@pytest.mark.parametrize(
    'name', ['retinanet_pvt_v2_b0_coco', 'semantic_fpn_cpvt_s_ade20k', 'upernet_cpvt_s_ade20k']
)
def test_trained_models_are_exported_as_the_configs_of_openmmlab(name):
    """The graph of a model in PyTorch gives what that of the config gives, with one backbone."""
    row = TRAINED[name]._replace(arch='pcpvt_nano')
    ours = build_trained(row).eval()
    dims = list(CPVTPyramid('pcpvt_nano').channels)
    changes = {'backbone.arch': 'pcpvt_nano'}
    if row.head == 'upernet':
        changes |= {'decode_head.in_channels': dims, 'auxiliary_head.in_channels': dims[2]}
    else:
        changes['neck.in_channels'] = dims
    theirs = small(row.config, **changes)
    tensors = {k: v for k, v in theirs.state_dict().items() if not k.startswith('backbone.')}
    unused = ours.load_state_dict(from_mmdetection(tensors), strict=False).unexpected_keys
    assert not unused
    theirs.backbone = Patches(theirs.backbone)
    if row.detects:
        ours.backbone.body = Patches(ours.backbone.body)
        ours.backbone.body.convs = theirs.backbone.convs[1:]  # without stride 4
    else:
        ours.backbone = theirs.backbone
    both = exportable(ours), exportable(theirs)
    for attribute in ('task', 'output_names', 'takes_original', 'details'):
        assert getattr(both[0], attribute) == getattr(both[1], attribute)
    one, other = (graph.preprocessing for graph in both)
    assert (one.divisor, one.bgr) == (other.divisor, other.bgr)
    assert [*one.mean, *one.std] == pytest.approx([*other.mean, *other.std])
    images, valid, _ = padded(TOGETHER if row.detects else [SIZES[-1]] * 3)
    with torch.no_grad():
        found, expected = (graph(images, valid if row.detects else None) for graph in both)
    for x, y in zip(found, expected):
        if x.dtype.is_floating_point:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)
        else:
            assert (x != y).double().mean() < 1e-4


def test_an_image_with_fewer_tokens_than_queries():
    """MMDetection raises an error; here it has fewer queries, alone and in a batch."""
    model, sizes = exportable(dino()).eval(), ((31, 32), (96, 200))
    with torch.no_grad(), pytest.raises(RuntimeError, match='out of range'):
        Detector.reference(model, padded(sizes)[2][0])
    assert_each_alone(model, BOXES, sizes)
    assert model.model.num_queries == len(model.model.query_embedding.weight) == 30


def test_results_of_empty_rois_are_not_used(monkeypatch):
    """OpenVINO gives NaN for them."""
    model = exportable(mask_rcnn()).eval()
    images, valid, _ = padded(TOGETHER)
    expected = model(images, valid)
    original, emptied = torchvision.ops.roi_align, []

    def roi_align(x: Tensor, rois: Tensor, *options: object) -> Tensor:
        empty = (rois[:, 3:] <= rois[:, 1:3]).any(1)
        emptied.append(int(empty.sum()))
        return original(x, rois, *options).masked_fill(empty[:, None, None, None], torch.nan)

    monkeypatch.setattr(torchvision.ops, 'roi_align', roi_align)
    for found, x in zip(model(images, valid), expected):
        torch.testing.assert_close(found, x, rtol=0, atol=0)
    assert sum(emptied)


def of_class(name: str, model: nn.Module, part: str = '') -> nn.Module:
    changed = model.get_submodule(part)
    changed.__class__ = type(name, (type(changed),), {})
    return model


@pytest.mark.parametrize(
    ('make', 'options', 'message'),
    [
        (lambda: retinanet(**{'test_cfg.nms.type': 'soft_nms'}), {}, 'plain NMS'),
        (lambda: retinanet(**{'test_cfg.nms_pre': -1}), {}, 'nms_pre'),
        (retinanet, {'probabilities': True}, 'needs a segmentor'),
        (lambda: semantic_fpn(**{'test_cfg.mode': 'slide'}), {}, 'whole'),
        (lambda: nn.Linear(1, 1), {}, 'a Linear cannot be exported'),
        (lambda: of_class('FCOS', retinanet().neck), {}, 'a FCOS cannot be exported; only'),
        (
            lambda: semantic_fpn(**{'data_preprocessor.test_cfg': dict(size=(64, 64))}),
            {},
            'set size_divisor instead',
        ),
        (lambda: of_class('TwoStagePanopticSegmentor', mask_rcnn()), {}, 'a TwoStagePanopticSeg'),
        (lambda: of_class('Cascade', mask_rcnn(), 'roi_head'), {}, 'got Cascade, RPNHead'),
        (lambda: of_class('DDQDETR', dino()), {}, 'a DDQDETR cannot be exported; only .*, DINO'),
        (
            lambda: mask2former_detector(1, '-panoptic', **{'test_cfg.instance_on': False}),
            {},
            'set test_cfg.instance_on=True',
        ),
        (
            lambda: mask2former_segmentor(1, **{'data_preprocessor.test_cfg': None}),
            {},
            'multiple of 32 to be exported, got 1; set size_divisor',
        ),
    ],
)
def test_refusals(make, options, message):
    with pytest.raises(UserError, match=message):
        exportable(make(), **options)
