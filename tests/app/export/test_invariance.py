"""The probes of batch invariance, on models with known defects and on the promise itself."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.app.export.invariance import (
    BATCH,
    IDENTICAL,
    ORDER,
    PADDED,
    REPEATED,
    assert_batch_invariant,
    batch_report,
)

RNG = np.random.default_rng(0)
SIZES = ((32, 48), (32, 48), (32, 48), (20, 30))
ARRAYS = [RNG.random((3, *size), np.float32) for size in SIZES]
TENSORS = [torch.from_numpy(array) for array in ARRAYS]


def failed(*given: object, **options: object) -> dict[str, tuple[int, ...]]:
    report = batch_report(*given, **options)
    return {probe.name: probe.images for probe in report.probes if not probe.passed}


@pytest.fixture(scope='module')
def pyramid() -> CPVTPyramid:
    torch.manual_seed(0)
    return CPVTPyramid('pcpvt_nano').eval()


def test_the_promise_and_that_it_can_fail(pyramid):
    """Our maps pass with the true sizes. Where the model ignores them, the padded batch fails."""
    assert_batch_invariant(pyramid, TENSORS, sizes='valid')
    table = 'the results of an image depend on its batch\nprobe .*\npadded batch .* 3$'
    with pytest.raises(AssertionError, match=f'(?s){table}'):
        assert_batch_invariant(lambda x, valid: pyramid(x), TENSORS, sizes='valid')
    with pytest.raises(AssertionError):
        assert_batch_invariant(pyramid, TENSORS)


def means(x: np.ndarray) -> np.ndarray:
    return x.mean((2, 3))


NUMBERS = np.arange(10, dtype=np.float32)[:, None]
DEFECTS = {
    'none': (lambda x: means(x[:, :, :4, :4]), []),
    'a mean over the batch': (lambda x: means(x) + x.mean() / 9, [BATCH, PADDED]),
    'the number of rows': (lambda x: means(x) * len(x), [BATCH, PADDED]),
    'a random number': (
        lambda x: means(x) + RNG.random((len(x), 1)),
        [REPEATED, BATCH, ORDER, IDENTICAL, PADDED],
    ),
    'the number of the row': (
        lambda x: means(x) + NUMBERS[: len(x)],
        [BATCH, ORDER, IDENTICAL, PADDED],
    ),
    'the next row': (lambda x: means(x) + np.roll(means(x), 1, 0), [BATCH, ORDER, PADDED]),
    'padding': (means, [PADDED]),
    'padding of a map': (lambda x: [x, {'centred': x - means(x)[..., None, None]}], [PADDED]),
    'rows that get lost': (lambda x: means(x)[:1], [BATCH, PADDED]),
    'beside a large value': (
        lambda x: np.pad(means(x) * len(x), ((0, 0), (0, 1)), constant_values=-1e9),
        [BATCH, PADDED],
    ),
    'labels': (lambda x: (x[:, 0] > 0.5 / len(x)).astype(int), [BATCH, PADDED]),
}


@pytest.mark.parametrize('name', DEFECTS)
def test_defects_are_named(name):
    model, expected = DEFECTS[name]
    report = batch_report(model, ARRAYS)
    assert [probe.name for probe in report.probes if not probe.passed] == expected
    assert report.passed == (not expected)


def table(x: np.ndarray) -> np.ndarray:
    """(B, 10, 12), as tables of boxes: values of each image between 0 and 1."""
    return x[:, :, :20, :30].reshape(len(x), -1)[:, :1200].reshape(len(x), 10, 12, 10).mean(3)


def rows_before(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, 0)


def numbered(x: np.ndarray) -> np.ndarray:
    return np.arange(len(x), dtype=np.float32).reshape(-1, *[1] * (x.ndim - 1))


# What happens to the small values of a tensor of mixed scale. The last changes one image in ten.
SMALL_DEFECTS = {
    'the mean of the batch is subtracted': lambda x: x - x.mean(0),
    'a tenth of the mean of the batch is subtracted': lambda x: x - 0.1 * x.mean(0),
    'the number of rows': lambda x: x * (1 + 0.01 * (len(x) - 1)),
    'the number of the row': lambda x: x + 0.01 * numbered(x),
    'the row before': lambda x: 0.99 * x + 0.01 * rows_before(x),
    'a random number': lambda x: x + 0.01 * RNG.random(x.shape),
    'zero alone': lambda x: x * (len(x) > 1),
    'NaN in a batch': lambda x: np.where(len(x) > 1, np.nan, x),
    'one place in one batch': lambda x: x + 0.1 * (len(x) == 3) * (np.arange(x.shape[-1]) == 3),
}
# Large and small values (B, 10, 12) in one tensor.
MIXTURES = {
    'two halves of columns': lambda large, small: np.concatenate([large, small], 2)[:, 0],
    'columns in turn': lambda large, small: np.stack([large, small], 3).reshape(len(large), 10, 24),
    'flattened': lambda large, small: np.stack([large, small], 3).reshape(len(large), -1),
    'two channels': lambda large, small: np.stack([large, small], 1),
    'channels last': lambda large, small: np.stack([large, small], 3),
    'an axis in the middle': lambda large, small: np.stack([large, small], 2),
    'one small column of many': lambda large, small: np.concatenate(
        [*[large] * 7, small[..., :4]], 2
    ),
}


@pytest.mark.parametrize('ratio', [1e3, 1e6])
@pytest.mark.parametrize('mixture', MIXTURES)
@pytest.mark.parametrize('defect', SMALL_DEFECTS)
def test_large_values_hide_no_defect_of_small_ones(defect, mixture, ratio):
    """Boxes and scores in one tensor are the ordinary case."""
    mix = MIXTURES[mixture]
    images = ARRAYS[:3]

    def model(x: np.ndarray, change: Callable = lambda x: x) -> np.ndarray:
        values = table(x)
        return mix(ratio * values, change(values)).astype(np.float32)

    assert failed(model, images) == {}
    assert failed(lambda x: model(x, SMALL_DEFECTS[defect]), images)


@pytest.mark.parametrize('dtype', [np.uint8, np.float16])
@pytest.mark.parametrize(
    'defect', ['the mean of the batch is subtracted', 'a random number', 'zero alone']
)
def test_mixed_scales_of_other_types(defect, dtype):
    images = [(array * 255).astype(dtype) for array in ARRAYS[:3]]
    tolerance = 1e-2 if dtype == np.float16 else 1e-4

    def model(x: np.ndarray, change: Callable = lambda x: x) -> np.ndarray:
        values = table(x.astype(np.float32)) / 255
        return np.concatenate([1e4 * values, change(values)], 2).astype(np.float32)

    assert failed(model, images, tolerance=tolerance) == {}
    assert failed(lambda x: model(x, SMALL_DEFECTS[defect]), images, tolerance=tolerance)


def test_rounding_of_small_differences_is_no_defect():
    """Values that are differences of larger ones change by a larger share. Noise of the size of the
    tolerance shows by how much."""

    def model(x: np.ndarray, rounding: float = 1e-7) -> np.ndarray:
        values = table(x) * (1 + rounding * len(x))
        return np.concatenate([values, 1e-4 * np.sin(1e3 * values)], 2)

    report = batch_report(model, ARRAYS[:3])
    assert report.passed and report[BATCH].relative > 1e-6
    assert failed(lambda x: model(x, rounding=1e-5), ARRAYS[:3]) == {BATCH: (0, 1, 2)}


def test_what_is_compared_of_a_padded_batch():
    """Maps inside the image, also with channels last; everything else as it is."""
    wide = [np.pad(ARRAYS[0], ((0, 0), (0, 0), (0, 16))), ARRAYS[3]]
    for images in (ARRAYS, wide):
        assert failed(lambda x: x.transpose(0, 2, 3, 1), images) == {}
        assert failed(lambda x: x[:, 0] > 0.5, images) == {}
    report = batch_report(lambda x: x.reshape(len(x), 3, -1).swapaxes(1, 2), ARRAYS)
    assert report[PADDED].relative == np.inf and report[PADDED].images == (3,)
    assert 'shape (1536, 3) instead of (600, 3)' in str(report)


def test_bits():
    """Rounding passes, unless the same bits are asked for; NaN equals NaN; 0 is not -0."""

    def rounding(x: Tensor) -> Tensor:
        return x.mean((2, 3)) + len(x) * 1e-7

    assert failed(rounding, TENSORS[:2]) == {}
    assert failed(rounding, TENSORS[:2], bitwise=True) == {BATCH: (0, 1)}
    assert failed(rounding, TENSORS[:2], tolerance=1e-9) == {BATCH: (0, 1)}
    report = batch_report(rounding, TENSORS[:2])
    assert report.passed and not report.is_bitwise
    assert report[BATCH].absolute == pytest.approx(1e-7, rel=0.3)
    assert failed(lambda x: np.where(x > 0.5, x, np.nan), ARRAYS[:2], bitwise=True) == {}
    signed = batch_report(lambda x: np.where(x > 0.5, x, np.copysign(0, 1.5 - len(x))), ARRAYS[:2])
    assert signed.passed and not signed.is_bitwise
    half = batch_report(lambda x: x.bfloat16(), TENSORS[:2], bitwise=True)
    assert half.passed and half.is_bitwise
    lost = batch_report(lambda x: np.where(len(x) > 1, np.nan, x), ARRAYS[:2])
    assert lost[BATCH].relative == np.inf and lost[BATCH].note == 'NaN in one of the two'


def test_lists_of_images():
    """As torchvision's detectors take them: a result for each image, of any length."""

    def boxes(images: list[np.ndarray], extra: int = 0) -> list[dict]:
        return [{'boxes': np.argwhere(i[0] > 0.9)[: 99 + extra * len(images)]} for i in images]

    assert failed(boxes, ARRAYS, stack=False) == {}
    report = batch_report(lambda images: boxes(images, extra=5), ARRAYS, stack=False)
    assert report[BATCH].note.startswith('shape ') and not report.passed


def test_outputs_that_prove_nothing():
    report = batch_report(lambda x: (x.mean((2, 3)), x[:, 0] * 0, x.mean(0)), TENSORS[:2])
    assert (report.skipped, report.constant) == (('2',), ('1',))
    anchors = batch_report(lambda x: (x.mean((2, 3)), torch.ones(1, 8, 4)), TENSORS[:2])
    assert anchors.passed and anchors.constant == ('1',)
    assert str(report).endswith('2\nthe same for all images, and so no evidence: 1')


def test_mistakes():
    for model, images, options, complaint in (
        (means, [], {}, 'at least one image'),
        (means, [ARRAYS[0][0]], {}, r'images must be \(C, H, W\), got \(32, 48\)'),
        (
            means,
            ARRAYS,
            {'sizes': 'valid', 'stack': False},
            'sizes is for models that take a batch',
        ),
        (lambda x: x.sum(), ARRAYS, {}, 'a row for each image, got the outputs output'),
        (lambda x: None, ARRAYS, {}, 'a row for each image, got the outputs none'),
        (lambda x: x * 0, ARRAYS[:3], {}, 'the results are the same for all images'),
        (lambda x: (x - 0.5) * 0, ARRAYS[:3], {}, 'the results are the same for all images'),
        (
            lambda x: x + np.inf,
            ARRAYS[:3],
            {},
            'the results are infinite for each image alone; check',
        ),
        (
            lambda x: (x - 0.5) * np.inf,
            ARRAYS[:3],
            {},
            'the results are infinite for each image alone',
        ),
        (lambda x: x * np.nan, ARRAYS[:3], {}, 'the results are NaN for each image alone'),
        (
            lambda x: (x + np.inf, x * np.nan),
            ARRAYS[:3],
            {},
            'are NaN or infinite for each image alone',
        ),
        (lambda images: images[:1], ARRAYS, {'stack': False}, 'must return 3 results, got 1'),
    ):
        with pytest.raises(ValueError, match=complaint):
            batch_report(model, images, **options)
    with pytest.raises(TypeError, match='got object; pass a function that takes the arrays out'):
        batch_report(lambda x: object(), ARRAYS)
