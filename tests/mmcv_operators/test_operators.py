"""Each operator against a slow, obvious version of it, or one of another library."""

import itertools
import math

import mmcv_calls as calls
import pytest
import torch
import torch.nn.functional as F
from mmcv import ops
from mmcv.ops.multi_scale_deform_attn import (
    MultiScaleDeformableAttnFunction,
    multi_scale_deformable_attn_pytorch,
)
from torch import Tensor
from torch.testing import assert_close

from cpvt_pyramid.mmcv_operators import ext
from tests.models.mmcv_extension import operators


@pytest.fixture(autouse=True)
def _ours():
    with operators(ext):
        yield


def overlap(a: Tensor, b: Tensor, offset: float) -> float:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    areas = [(x[2] - x[0] + offset) * (x[3] - x[1] + offset) for x in (a, b)]
    return float(width * height / (sum(areas) - width * height))


@pytest.mark.parametrize('offset', [0, 1])
def test_nms(offset):
    boxes, scores = calls.boxes(60), calls.scores(60)
    kept = []
    for i in scores.argsort(descending=True).tolist():
        if all(overlap(boxes[i], boxes[j], offset) <= 0.4 for j in kept):
            kept.append(i)
    dets, index = ops.nms(boxes, scores, 0.4, offset)
    assert index.tolist() == kept and 1 < len(kept) < 60
    assert torch.equal(dets, torch.cat([boxes, scores[:, None]], 1)[kept])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_nms_of_other_types(dtype):
    boxes = calls.boxes(60).to(dtype)
    scores = calls.scores(60).to(dtype)
    expected = ops.nms(boxes.float(), scores.float(), 0.4)[1]
    dets, index = ops.nms(boxes, scores, 0.4)
    assert torch.equal(index, expected) and dets.dtype == dtype


@pytest.mark.parametrize('method', ['naive', 'linear', 'gaussian'])
def test_soft_nms(method):
    boxes, scores = calls.boxes(40), calls.scores(40)
    left = dict(enumerate(scores.tolist()))
    kept = []
    while left:
        best = max(left, key=left.get)
        kept.append((best, left.pop(best)))
        for i in list(left):
            iou = overlap(boxes[best], boxes[i], 0)
            if method == 'gaussian':
                left[i] *= math.exp(-(iou**2) / 0.5)
            elif iou >= 0.3:
                left[i] *= 1 - iou if method == 'linear' else 0
            if left[i] < 0.05:
                del left[i]
    dets, index = ops.soft_nms(boxes, scores, 0.3, 0.5, 0.05, method)
    assert index.tolist() == [i for i, _ in kept] and 1 < len(kept) < 40
    assert_close(dets[:, 4], torch.tensor([score for _, score in kept]))
    assert torch.equal(dets[:, :4], boxes[index])


def test_nms_match():
    boxes, scores = calls.boxes(40), calls.scores(40)
    left = scores.argsort(descending=True).tolist()
    expected = []
    while left:
        best = left[0]
        group = [i for i in left if i == best or overlap(boxes[best], boxes[i], 0) >= 0.4]
        left = [i for i in left if i not in group]
        expected.append(group)
    groups = ops.nms_match(torch.cat([boxes, scores[:, None]], 1), 0.4)
    assert [group.tolist() for group in groups] == expected


@pytest.mark.parametrize('mode', ['iou', 'iof'])
@pytest.mark.parametrize('aligned', [False, True])
def test_bbox_overlaps(mode, aligned):
    """mmcv calls the operator on a GPU only."""
    first, second = calls.boxes(5), calls.boxes(5)
    expected = ops.bbox_overlaps(first, second, mode, aligned, offset=1)
    found = torch.zeros_like(expected)
    ext.bbox_overlaps(first, second, found, ['iou', 'iof'].index(mode), aligned, 1)
    assert_close(found, expected)


def value_at(plane: Tensor, y: float, x: float) -> float:
    """The bilinear interpolation of a map whose border reaches one pixel further, in which 0 is."""
    height, width = plane.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return 0.0
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = plane[top, left] * (1 - (x - left)) + plane[top, right] * (x - left)
    lower = plane[bottom, left] * (1 - (x - left)) + plane[bottom, right] * (x - left)
    return float(upper * (1 - (y - top)) + lower * (y - top))


def mean_of_cell(
    plane: Tensor, start: tuple[float, float], cell: tuple[float, float], samples: int
) -> float:
    """The mean over a grid of samples of a cell from `start`, y and x."""
    return sum(
        value_at(
            plane,
            start[0] + (i + 0.5) * cell[0] / samples,
            start[1] + (j + 0.5) * cell[1] / samples,
        )
        for i, j in itertools.product(range(samples), repeat=2)
    ) / (samples**2)


@pytest.mark.parametrize('aligned', [False, True])
def test_roi_align(aligned):
    x = torch.randn(2, 2, 8, 10)
    rois = calls.regions(5, 2, 44)  # some reach outside of the image, 32 x 40
    found = ops.roi_align(x, rois, (3, 4), 0.25, 2, 'avg', aligned)
    for k, (image, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (0.25 * c - 0.5 * aligned for c in corners)
        height, width = y2 - y1, x2 - x1
        if not aligned:
            height, width = max(height, 1), max(width, 1)
        for c, i, j in itertools.product(range(2), range(3), range(4)):
            start = (y1 + i * height / 3, x1 + j * width / 4)
            cell = mean_of_cell(x[int(image), c], start, (height / 3, width / 4), 2)
            assert found[k, c, i, j] == pytest.approx(cell, abs=1e-5)


def test_roi_align_of_maxima_must_be_compiled():
    with pytest.raises(NotImplementedError, match="pool_mode='max' must be compiled"):
        ops.roi_align(torch.ones(1, 1, 4, 4), calls.regions(1, 1, 4), 2, 1, 0, 'max')


def test_roi_pool():
    x = torch.randn(2, 2, 9, 11)
    rois = calls.regions(6, 2, 50)
    rois[1, 3:] = rois[1, 1:3] - 5  # no area
    found = ops.roi_pool(x, rois, (3, 2), 0.25)
    for k, (image, x1, y1, x2, y2) in enumerate(rois.tolist()):
        top, height = 0.25 * y1, 0.25 * (y2 + 1 - y1)
        left, width = 0.25 * x1, 0.25 * (x2 + 1 - x1)
        for c, i, j in itertools.product(range(2), range(3), range(2)):
            rows = slice(int(top + i * height / 3), math.ceil(top + (i + 1) * height / 3))
            columns = slice(int(left + j * width / 2), math.ceil(left + (j + 1) * width / 2))
            cell = x[int(image), c, rows, columns] if height > 0 and width > 0 else x[0, 0, :0]
            assert found[k, c, i, j] == (cell.max() if cell.numel() else 0)


@pytest.mark.parametrize('samples', [2, 0])
@pytest.mark.parametrize('has_offset', [False, True])
def test_deform_roi_pool(samples, has_offset):
    x = torch.randn(2, 2, 8, 10)
    rois = calls.regions(4, 2, 44)
    offset = torch.randn(4, 2, 3, 2) if has_offset else None
    found = ops.deform_roi_pool(x, rois, offset, (3, 2), 0.25, samples, 0.3)
    for k, (image, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (0.25 * c - 0.5 for c in corners)
        height, width = y2 - y1, x2 - x1
        if samples == 0 and math.ceil(height / 3) != math.ceil(width / 2):
            continue  # the slow version takes as many rows as columns
        count = samples or math.ceil(height / 3)
        for c, i, j in itertools.product(range(2), range(3), range(2)):
            moved = offset[k, :, i, j].tolist() if has_offset else (0, 0)
            start = (
                y1 + i * height / 3 + 0.3 * height * moved[1],
                x1 + j * width / 2 + 0.3 * width * moved[0],
            )
            cell = mean_of_cell(x[int(image), c], start, (height / 3, width / 2), count)
            assert found[k, c, i, j] == pytest.approx(cell, abs=1e-5)


def deformed(
    x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    """One group, a kernel of 3 x 3."""
    output = torch.zeros(len(x), len(weight), *offset.shape[2:])
    for n, o, i, j in itertools.product(*map(range, output.shape)):
        for c, k in itertools.product(range(x.shape[1]), range(9)):
            y = i * stride - padding + k // 3 + float(offset[n, 2 * k, i, j])
            at = j * stride - padding + k % 3 + float(offset[n, 2 * k + 1, i, j])
            framed = F.pad(x[n, c], (1, 1, 1, 1))  # outside of the map there are zeros
            value = value_at(framed, y + 1, at + 1)
            output[n, o, i, j] += weight[o, c].flatten()[k] * value * mask[n, k, i, j]
    return output


def test_deformable_convolutions():
    x = torch.randn(1, 2, 5, 6)
    offset, mask = torch.randn(1, 18, 3, 3), torch.rand(1, 9, 3, 3)
    weight, bias = torch.randn(3, 2, 3, 3), torch.randn(3)
    found = ops.deform_conv2d(x, offset, weight, 2, 1)
    assert_close(found, deformed(x, offset, torch.ones_like(mask), weight, 2, 1))
    found = ops.modulated_deform_conv2d(x, offset, mask, weight, bias, 2, 1)
    assert_close(found, deformed(x, offset, mask, weight, 2, 1) + bias[:, None, None])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_that_of_float32(dtype):
    x = torch.randn(2, 4, 8, 8).to(dtype)
    weight = torch.randn(3, 4, 3, 3).to(dtype)
    offset = torch.randn(2, 18, 8, 8).to(dtype)
    rois = calls.regions(5, 2, 30).to(dtype)
    for function in (
        lambda x, offset, weight, rois: ops.deform_conv2d(x, offset, weight, 1, 1),
        lambda x, offset, weight, rois: ops.roi_align(x, rois, 3, 0.25),
    ):
        half = function(x, offset, weight, rois)
        full = function(x.float(), offset.float(), weight.float(), rois.float())
        assert half.dtype == dtype and torch.equal(half, full.to(dtype))


def test_no_regions_and_no_images():
    x, none = torch.randn(2, 3, 8, 8), torch.zeros(0, 5)
    for pool in (ops.RoIAlign(4, 0.25), ops.RoIPool(4, 0.25), ops.DeformRoIPool(4, 0.25)):
        leaf = x.clone().requires_grad_()
        args = (leaf, none, None) if isinstance(pool, ops.DeformRoIPool) else (leaf, none)
        pooled = pool(*args)
        assert pooled.shape == (0, 3, 4, 4)
        pooled.sum().backward()
        assert torch.equal(leaf.grad, torch.zeros_like(x))
    assert ops.nms(none[:, :4], none[:, 0], 0.5)[1].numel() == 0
    assert ops.nms_match(none, 0.5) == []
    assert ops.soft_nms(none[:, :4], none[:, 0])[0].shape == (0, 5)


def test_masked_convolution():
    convolution = ops.MaskedConv2d(3, 5, 3, padding=1)
    x, mask = torch.randn(1, 3, 6, 7), torch.rand(1, 6, 7) > 0.6
    with torch.no_grad():
        found = convolution(x, mask.float())
        expected = F.conv2d(x, convolution.weight, convolution.bias, padding=1)
    assert_close(found, expected * mask)
    assert not convolution(x, torch.zeros(1, 6, 7)).any()


def test_carafe():
    features, masks = torch.randn(1, 4, 3, 4), torch.rand(1, 2 * 9, 6, 8)
    expected = torch.zeros(1, 4, 6, 8)
    for c, y, x, i, j in itertools.product(range(4), range(6), range(8), range(3), range(3)):
        row, column = y // 2 + i - 1, x // 2 + j - 1
        if 0 <= row < 3 and 0 <= column < 4:
            weight = masks[0, c // 2 * 9 + i * 3 + j, y, x]
            expected[0, c, y, x] += weight * features[0, c, row, column]
    assert_close(ops.carafe(features, masks, 3, 2, 2), expected)
    assert_close(ops.carafe_naive(features, masks, 3, 2, 2), expected)


@pytest.mark.parametrize('kind', ['collect', 'distribute'])
def test_psa_mask(kind):
    x = torch.randn(1, 15, 3, 4)  # neighborhoods of 3 x 5
    expected = torch.zeros(1, 12, 12)
    for own, i, j in itertools.product(range(12), range(3), range(5)):
        row, column = own // 4 + i - 1, own % 4 + j - 2
        if 0 <= row < 3 and 0 <= column < 4:
            other = row * 4 + column
            at = (other, own) if kind == 'collect' else (own, other)
            expected[(0, *at)] = x[0, i * 5 + j].flatten()[own]
    assert torch.equal(ops.PSAMask(kind, (3, 5))(x), expected.view(1, 12, 3, 4))


def test_deformable_attention_is_that_of_mmcv_on_a_cpu():
    shapes = torch.tensor([[6, 7], [3, 4]])
    start = torch.tensor([0, 42])
    value = torch.randn(2, 54, 2, 5, dtype=torch.float64)
    locations = 1.4 * torch.rand(2, 9, 2, 2, 3, 2, dtype=torch.float64) - 0.2
    weights = torch.rand(2, 9, 2, 2, 3, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (value, locations, weights)]
    found = MultiScaleDeformableAttnFunction.apply(value, shapes, start, locations, weights, 64)
    expected = multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)
    assert_close(found, expected)
    grad = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, grad)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, inputs, grad)):
        assert_close(mine, theirs)


def focal(p: Tensor, gamma: float, alpha: float) -> Tensor:
    return -alpha * (1 - p) ** gamma * p.log()


@pytest.mark.parametrize('reduction', ['none', 'mean', 'sum'])
@pytest.mark.parametrize('has_weights', [False, True])
def test_sigmoid_focal_loss(reduction, has_weights):
    logits = (3 * torch.randn(7, 4)).requires_grad_()
    target = torch.tensor([0, 1, 2, 3, 4, 4, 1])  # 4 is the background
    weights = torch.rand(4) if has_weights else None
    found = ops.sigmoid_focal_loss(logits, target, 1.5, 0.3, weights, reduction)
    p = logits.sigmoid()
    is_class = F.one_hot(target, 5)[:, :4].bool()
    expected = torch.where(is_class, focal(p, 1.5, 0.3), focal(1 - p, 1.5, 0.7))
    if has_weights:
        expected = expected * torch.cat([weights, torch.ones(1)])[target][:, None]
    assert_reduced(found, expected, reduction, logits)


@pytest.mark.parametrize('reduction', ['none', 'mean', 'sum'])
@pytest.mark.parametrize('has_weights', [False, True])
def test_softmax_focal_loss(reduction, has_weights):
    logits = torch.randn(7, 4, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, -1, 0, 1])  # -1 is ignored
    weights = torch.rand(4) if has_weights else None
    p = logits.softmax(1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    expected = focal(p, 1.5, 0.3) * (target >= 0)
    if has_weights:
        expected = expected * weights[target.clamp(min=0)]
    if reduction == 'none':  # mmcv's gradient multiplies (N, C) by (N,)
        found = ops.softmax_focal_loss(logits, target, 1.5, 0.3, weights, 'none')
        assert_close(found, expected)
        return
    found = ops.softmax_focal_loss(logits, target, 1.5, 0.3, weights, reduction)
    assert_reduced(found, expected, reduction, logits)


def assert_reduced(found: Tensor, losses: Tensor, reduction: str, logits: Tensor) -> None:
    """The values and the gradients."""
    if reduction == 'mean':
        expected = losses.sum() / len(logits)
    else:
        expected = losses.sum() if reduction == 'sum' else losses
    assert_close(found, expected)
    grads = [torch.autograd.grad(x.sum(), logits)[0] for x in (found, expected)]
    assert_close(*grads)


def test_certain_predictions_have_finite_losses():
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    for target in (0, 1, 2):
        loss = ops.sigmoid_focal_loss(logits, torch.tensor([target]), 2.0, 0.25, None, 'sum')
        loss.backward()
        assert loss.isfinite() and logits.grad.isfinite().all()


GRADIENTS = {
    'roi_align': (lambda x, r: ops.roi_align(x, r, 3, 0.25, 2), (2, 2, 6, 7)),
    'roi_pool': (lambda x, r: ops.roi_pool(x, r, 3, 0.25), (2, 2, 6, 7)),
    'deform_roi_pool': (
        lambda x, r: ops.deform_roi_pool(x, r, None, (3, 3), 0.25, 2),
        (2, 2, 6, 7),
    ),
    'carafe': (lambda x, r: ops.carafe(x, CARAFE_MASKS, 3, 2, 2), (1, 4, 3, 4)),
    'carafe, masks': (lambda m, r: ops.carafe(CARAFE_FEATURES, m, 3, 2, 2), (1, 18, 6, 8)),
    'psa_mask': (lambda x, r: ops.PSAMask('collect', (3, 5))(x), (1, 15, 3, 4)),
    'deform_roi_pool, offset': (
        lambda o, r: ops.deform_roi_pool(FEATURES, r, o, (3, 3), 0.25, 2),
        (4, 2, 3, 3),
    ),
}
GENERATOR = torch.Generator().manual_seed(0)
CARAFE_MASKS = torch.rand(1, 18, 6, 8, dtype=torch.float64, generator=GENERATOR)
CARAFE_FEATURES = torch.randn(1, 4, 3, 4, dtype=torch.float64, generator=GENERATOR)
FEATURES = torch.randn(2, 2, 8, 9, dtype=torch.float64, generator=GENERATOR)


@pytest.mark.parametrize('name', GRADIENTS)
def test_gradients_are_those_of_small_differences(name):
    function, shape = GRADIENTS[name]
    rois = calls.regions(4, 2, 24).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, rois), x, atol=1e-4)
