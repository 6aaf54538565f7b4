"""What is exported gives each image of a padded batch the result of the original model alone."""

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from models.ports import randomize
from support import ROOT
from tiny_export import assert_each_alone, padded
from torch import Tensor, nn

from cpvt_pyramid.export.base import Exportable
from cpvt_pyramid.export.models import exportable
from cpvt_pyramid.tooling.command import UserError

# The first is a multiple of 32, the others are odd; all need padding in the batch.
SIZES = (96, 128), (131, 70), (75, 191)
ARCH = dict(dims=(8, 16, 16, 32), heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2), depths=(2, 1, 1, 1))
DIMS = list(ARCH['dims'])


def built(name: str, **changes: dict) -> nn.Module:
    """The model of a config, tiny and with random weights."""
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    init_default_scope(cfg.default_scope)
    package = 'detection' if cfg.default_scope == 'mmdet' else 'segmentation'
    __import__(f'cpvt_pyramid.mm.{package}')
    cfg.model.backbone.update(arch=ARCH, init_cfg=None)
    cfg.merge_from_dict({f'model.{key}': value for key, value in changes.items()})
    return randomize(MODELS.build(cfg.model), seed=1).eval()


def retinanet(**changes: object) -> nn.Module:
    head = dict(in_channels=16, feat_channels=16, stacked_convs=1, num_classes=5)
    # Cells in the padding have equal scores, in no particular order: less than the threshold.
    test_cfg = dict(score_thr=0.95, nms_pre=500, max_per_img=60)
    return built(
        'retinanet_cpvt_s', neck=dict(in_channels=DIMS, out_channels=16), bbox_head=head,
        test_cfg=test_cfg, **changes,
    )  # fmt: skip


def semantic_fpn(**changes: object) -> nn.Module:
    head = dict(in_channels=[16] * 4, channels=16, num_classes=5)
    return built(
        'semantic_fpn_cpvt_s', neck=dict(in_channels=DIMS, out_channels=16), decode_head=head,
        **changes,
    )  # fmt: skip


def upernet(**changes: object) -> nn.Module:
    return built(
        'upernet_svt_s', decode_head=dict(in_channels=DIMS, channels=16, num_classes=5),
        auxiliary_head=None, **{'backbone.arch': {**ARCH, 'window': 7}}, **changes,
    )  # fmt: skip


def panoptic_fpn() -> nn.Module:
    from mmdet.models import PanopticFPN

    return PanopticFPN.__new__(PanopticFPN)  # its class is all that matters


def assert_alone(model: Exportable) -> None:
    """The outputs are those of the original model for each image, in a padded batch and alone."""
    batch = padded(SIZES)
    assert_each_alone(model, batch, assert_same)
    for image in batch[2]:
        with torch.no_grad():
            alone = dict(zip(model.output_names, model(image)))
            expected = {name: x[0] for name, x in model.reference(image).items()}
        assert_same({name: x[0] for name, x in alone.items()}, expected)


def assert_original_sizes(model: Exportable) -> None:
    """Label maps of the size before resizing are those of MMSegmentation, in a padded batch too."""
    images, valid, alone = padded(SIZES)
    original = torch.tensor([(201, 250), (101, 66), (75, 191)])
    with torch.no_grad():
        (found,) = model(images, valid, original)
        assert tuple(found.shape) == (3, 201, 250)
        for labels, image, size in zip(found, alone, original):
            expected = model.reference(image, size[None])['labels'][0]
            assert tuple(expected.shape) == tuple(size) and len(expected.unique()) > 1
            wrong = labels[: size[0], : size[1]] != expected
            assert wrong.double().mean() < 1e-4  # ties


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    found = {n: found[n][tuple(slice(side) for side in x.shape)] for n, x in expected.items()}
    if 'boxes' in found:
        found = in_the_order_of(expected, found)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-3, check_dtype=False)


def in_the_order_of(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Detections in another order: the last bit of a score decides between neighbours."""
    ours, theirs = (
        torch.cat([x['boxes'], 1e3 * x['labels'][:, None], x['scores'][:, None]], dim=1)
        for x in (found, expected)
    )
    order = torch.cdist(theirs, ours).argmin(dim=1)
    assert len(order.unique()) == len(order)
    assert (order - torch.arange(len(order))).abs().max() <= 1
    return {name: x[order] for name, x in found.items()}


@pytest.mark.parametrize('marks_padding', [True, False])
def test_retinanet(marks_padding):
    model = exportable(retinanet(**{'data_preprocessor.valid_region': marks_padding}))
    assert model.reference(padded(SIZES)[2][0])['scores'].shape[1] > 5
    assert_alone(model)


def test_retinanet_returns_unused_rows_as_such():
    model = exportable(retinanet())
    with torch.no_grad():
        found = model.reference(padded(SIZES)[2][0])['scores'].shape[1]
        boxes, scores, labels = model(padded(SIZES)[2][0])
    assert found < 60 and boxes.shape == (1, 60, 4)
    assert (labels[0, :found] >= 0).all() and (labels[0, found:] == -1).all()
    assert not scores[0, found:].any() and not boxes[0, found:].any()


def test_raw_boxes_become_those_of_mmdet_by_its_suppression():
    from mmcv.ops import batched_nms

    original = retinanet(**{'test_cfg.nms_pre': 100_000})
    model = exportable(original, raw=True)
    (image,) = padded(SIZES[1:2])[2]
    with torch.no_grad():
        boxes, scores = (x[0] for x in model(image))
        expected = exportable(original).reference(image)
    keep = (scores > 0.95) & (boxes[:, 2:] > boxes[:, :2]).all(-1, keepdim=True)
    index, labels = keep.nonzero().unbind(1)
    kept, _ = batched_nms(boxes[index], scores[keep], labels, original.test_cfg['nms'])
    torch.testing.assert_close(kept[:60, :4], expected['boxes'][0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('make', [semantic_fpn, upernet])
def test_segmentors(make):
    original = make()
    assert len(exportable(original).reference(padded(SIZES)[2][0])['labels'].unique()) > 1
    for probabilities in (False, True):
        model = exportable(original, probabilities=probabilities)
        assert model.details == {'resized': 'logits'}
        assert_alone(model)
    assert_original_sizes(exportable(original))


def test_more_classes_than_are_resized_at_a_time():
    assert_original_sizes(exportable(semantic_fpn(**{'decode_head.num_classes': 40})))


def test_aligned_corners():
    assert_original_sizes(exportable(semantic_fpn(**{'decode_head.align_corners': True})))


def test_two_classes_with_one_output():
    changes = {'decode_head.num_classes': 2, 'decode_head.out_channels': 1}
    model = exportable(semantic_fpn(**changes))
    assert model.details['threshold'] == 0.3
    assert_original_sizes(model)


def test_backbone_of_a_detector():
    assert_alone(exportable(retinanet(), backbone=True))


def test_channels_of_a_model_that_takes_blue_first():
    changes = {'data_preprocessor.bgr_to_rgb': False, 'data_preprocessor.std': [50.0, 60.0, 70.0]}
    model = exportable(semantic_fpn(**changes), probabilities=True)
    assert list(model.preprocessing.std) == [70.0, 60.0, 50.0]  # of red, green, blue
    assert_alone(model)


@pytest.mark.parametrize(
    ('make', 'options', 'message'),
    [
        (lambda: retinanet(**{'test_cfg.nms.type': 'soft_nms'}), {}, 'plain NMS'),
        (lambda: retinanet(**{'test_cfg.nms_pre': -1}), {}, 'nms_pre'),
        (retinanet, {'probabilities': True}, 'needs a segmentor'),
        (semantic_fpn, {'raw': True}, 'needs a detector'),
        (lambda: semantic_fpn(**{'test_cfg.mode': 'slide'}), {}, 'whole'),
        (lambda: nn.Linear(1, 1), {}, 'a Linear cannot be exported'),
        (panoptic_fpn, {}, 'a PanopticFPN cannot be exported'),
    ],
)
def test_refusals(make, options, message):
    with pytest.raises(UserError, match=message):
        exportable(make(), **options)
