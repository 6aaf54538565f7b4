"""`cpvt verify`: whether a model file gives PyTorch's results, and an image the same ones alone and
in batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from ...padding.batching import padded_size
from ..images.reading import resize_image
from ..predict.metadata import parse_metadata, reference_name
from ..predict.options import DEFAULTS, RuntimeOptions
from ..predict.sessions import Session, open_session
from ..tooling.command import UserError, one_line
from ..tooling.progress import working
from ..tooling.report import text_table
from .comparison import HEAD, Arrays, Tolerances, is_detection, matched, verdict
from .comparison import TOLERANCES as RESULTS_TOLERANCES
from .invariance import PADDED, TOLERANCE, BatchReport, SameForAll, batch_report
from .self_test import draw, verify_session
from .tones import toned

SIZE = (256, 320)  # height and width where the file takes any
# By the precision of the file, or that of OpenVINO; others TOLERANCE
TOLERANCES = {'float16': 1e-2, 'int8': 5e-2, 'bfloat16': 5e-2}
SMALLER = (192, 256)  # in a padded batch with the others
CHANNELS = (1, 3, 4)  # that tell images (B, C, H, W) from (B, H, W, C)


class BatchError(UserError):
    """A file takes one image, but not a batch."""

    status = 1


class VerifyOptions(NamedTuple):
    """See the arguments of `cpvt verify`."""

    runtime: RuntimeOptions = DEFAULTS
    size: Optional[tuple[int, int]] = None
    value_range: tuple[float, float] = (0.0, 1.0)
    batch_size: int = 8
    tolerance: Optional[float] = None
    bitwise: bool = False
    photographs: Sequence[np.ndarray] = ()  # (H, W, 3) RGB uint8; empty: synthetic images


def verify_file(path: Path, options: VerifyOptions) -> bool:
    """Compare a model file with the outputs of PyTorch that it carries, and images alone with
    images in batches; prints tables and verdicts. Returns whether both passed.

    Raises:
        UserError: the file cannot be run, or nothing can be compared.
    """
    session = open_session(path, options.runtime)
    file = ImageModel(path, session)  # raises an error of what cannot be in batches
    is_as_in_pytorch = compare_with_pytorch(path, session, options.runtime.dtype)
    is_invariant = compare_with_batches(file, options)
    return is_as_in_pytorch and is_invariant


def compare_with_pytorch(path: Path, session: Session, dtype: str) -> bool:
    """Run the test data in a file; true if it has none."""
    if session.test is None:
        if session.metadata is not None:
            print(f'{path} has no outputs of PyTorch to compare with; export it again for that\n')
        return True
    with working('comparing with PyTorch'):
        checks = verify_session(path, session, dtype)
    print(text_table(HEAD, [check.cells for check in checks]))
    reference = reference_name(parse_metadata(path, session))
    print(f'{path}, {session.device}: {verdict(checks, reference)}\n')
    return all(check.passed for check in checks)


def compare_with_batches(file: 'ImageModel', options: VerifyOptions) -> bool:
    """Run images alone and in batches."""
    path, session = file.path, file.session
    is_ours = session.metadata is not None
    value_range = (0, 255) if is_ours else options.value_range
    images = file.images(options.batch_size, options.size, value_range, options.photographs)
    sizes = 'valid' if 'valid' in file.sizes else None
    tolerance = options.tolerance
    if tolerance is None:
        dtype = options.runtime.dtype
        is_given = dtype != 'float32'
        tolerance = TOLERANCES[dtype] if is_given else file.tolerance
    try:
        with working('comparing images alone and in batches'):
            report = batch_report(
                file, images, sizes=sizes, tolerance=tolerance, bitwise=options.bitwise
            )
    except ValueError as error:  # nothing to compare
        advice = ''
        if isinstance(error, SameForAll) and not options.photographs:
            advice = ' with --images'
        raise UserError(f'{path}: {error}{advice}') from error
    print(report)
    sentence, is_invariant = conclusion(report, knows_sizes=sizes is not None)
    print(f'{path}, {session.device}: {sentence}')
    return is_invariant


class ImageModel:
    """A model file as `batch_report` takes it: called with a batch (B, C, H, W).

    Args:
        path: for messages.
        session: the opened file.

    Raises:
        UserError: it takes something else than images, or batches of one size only.
    """

    def __init__(self, path: Path, session: Session) -> None:
        self.path, self.session = path, session
        own = {'valid', 'original'} if session.metadata is not None else set()
        inputs = {name: shape for name, shape in session.shapes.items() if name not in own}
        self.sizes = [name for name in session.shapes if name in own]
        if len(inputs) != 1 or len(next(iter(inputs.values()))) != 4:
            described = ', '.join(f'{name} {shape}' for name, shape in inputs.items()) or 'none'
            raise UserError(
                f'{path} must take images of 4 dimensions and nothing else, got {described}; in '
                'Python, give assert_batch_invariant of cpvt_pyramid.app.export.invariance a '
                'function that runs it'
            )
        ((self.name, (batch, *dimensions)),) = inputs.items()
        if batch is not None:
            raise UserError(
                f'{path} has the fixed batch size {batch}; export it with a batch of any size'
            )
        self.dtype = session.dtypes[self.name]
        if self.dtype.kind not in 'fiu':
            kind = (
                'a type that NumPy lacks, such as bfloat16' if self.dtype == object else self.dtype
            )
            raise UserError(
                f'{path}: its images must be float32, float16 or integers, got {kind}; export it '
                'with float32 inputs'
            )
        precision = str(self.dtype)
        if session.metadata is not None:
            precision = str(parse_metadata(path, session).get('dtype'))
        self.limits = RESULTS_TOLERANCES.get(precision, RESULTS_TOLERANCES['float32'])
        self.tolerance = TOLERANCES.get(precision, TOLERANCE)
        # Detections of each image by its pixels, when it was first seen
        self.first: dict[tuple[tuple[int, ...], bytes], Arrays] = {}
        self.is_channels_last = dimensions[0] not in CHANNELS and dimensions[2] in CHANNELS
        if self.is_channels_last:
            dimensions = [dimensions[2], *dimensions[:2]]
        self.channels = dimensions[0] or 3
        self.fixed_size = dimensions[1:]  # None for any

    def __call__(self, batch: np.ndarray, valid: Optional[np.ndarray] = None) -> dict[str, Any]:
        if valid is None:
            valid = np.array([batch.shape[2:]] * len(batch), np.int64)
        given = self.padded_to_fixed_size(batch) if 'valid' in self.sizes else batch
        if self.is_channels_last:
            given = np.moveaxis(given, 1, -1)
        inputs = {self.name: np.ascontiguousarray(given)}
        for name in self.sizes:
            inputs[name] = valid
        try:
            outputs = self.session.run(inputs)
        except Exception as error:  # the backends' own kinds
            count, _, height, width = batch.shape
            if count > 1:
                text = f'{self.path} fails on a batch of {count} images, but not on one'
                raise BatchError(f'{text}: {one_line(error)}') from error
            raise UserError(
                f'{self.path} fails on an image of {height} x {width}; --size gives another: '
                f'{one_line(error)}'
            ) from error
        if self.session.metadata is not None and is_detection(outputs):
            return self.in_first_order(batch, valid, outputs)
        return outputs

    def in_first_order(
        self, batch: np.ndarray, valid: np.ndarray, outputs: Arrays
    ) -> dict[str, Any]:
        """The detections of each image in the order of its first result. Rounding decides the order
        of those with almost the same score."""
        ordered = {name: x.copy() for name, x in outputs.items()}
        for place, (image, (height, width)) in enumerate(zip(batch, valid.tolist())):
            pixels = image[:, :height, :width]
            found = {name: x[place] for name, x in outputs.items()}
            first = self.first.setdefault((pixels.shape, pixels.tobytes()), found)
            rows = rows_in_order(found, first, self.limits)
            for name, x in found.items():
                ordered[name][place] = x[rows]
        return ordered

    def padded_to_fixed_size(self, batch: np.ndarray) -> np.ndarray:
        """A batch (B, C, H, W) with zeros at the right and bottom, for a file of one size."""
        padding = [(0, 0), (0, 0)]
        for side, fixed in zip(batch.shape[2:], self.fixed_size):
            padding.append((0, max((fixed or side) - side, 0)))
        return np.pad(batch, padding)

    def images(
        self,
        count: int,
        size: Optional[tuple[int, int]],
        value_range: tuple[float, float],
        photographs: Sequence[np.ndarray] = (),
    ) -> list[np.ndarray]:
        """Photographs (H, W, 3), resized, or synthetic images, in different tones: `count` of one
        size, and one of another where the file takes it."""
        wanted = size or SIZE
        height, width = (fixed or own for fixed, own in zip(self.fixed_size, wanted))
        sizes = [(height, width)] * count
        other = self.other_size((height, width))
        if other not in (None, (height, width)):
            sizes.append(other)
        is_integer = self.dtype.kind in 'iu'
        low, high = (0, 255) if is_integer else value_range
        images = []
        for number, (height, width) in enumerate(sizes):
            if photographs:
                pixels = resize_image(photographs[number % len(photographs)], (height, width))
            else:
                pixels = draw(number, height, width)
            channels = np.resize(pixels.transpose(2, 0, 1), (self.channels, height, width))
            values = toned(channels / 255, number) * (high - low) + low
            images.append((np.rint(values) if is_integer else values).astype(self.dtype))
        return images

    def other_size(self, size: tuple[int, int]) -> Optional[tuple[int, int]]:
        """The size of an image in a padded batch: of a file that is told the true sizes, one that
        is padded to the same size."""
        if 'valid' in self.sizes:
            if all(self.fixed_size):
                return size[0] * 2 // 3, size[1] * 3 // 4
            stride = parse_metadata(self.path, self.session).get('stride', 1)
            height, width = padded_size(size, stride)
            return height - stride + 1, width - stride + 1
        if any(self.fixed_size):
            return None
        return SMALLER if size == SIZE else (size[0] // 2, size[1] // 2)


def rows_in_order(found: Arrays, first: Arrays, tolerances: Tolerances) -> list[int]:
    """The rows of detections in the order of those in another result; rows without counterpart take
    the places that are left."""
    counterparts = {theirs: ours for ours, theirs in matched(found, first, tolerances)}
    count = len(found['labels'])
    others = sorted(set(range(count)) - set(counterparts.values()))
    left = iter(others)
    return [counterparts[row] if row in counterparts else next(left) for row in range(count)]


def conclusion(report: BatchReport, knows_sizes: bool) -> tuple[str, bool]:
    """What a report shows, in words, and whether the file passes. One that is not told the true
    sizes of images cannot tell padding from image, and need not."""
    of_one_size = [probe for probe in report.probes if probe.name != PADDED]
    padded = [probe for probe in report.probes if probe.name == PADDED]
    if failed := [probe.name for probe in of_one_size if not probe.passed]:
        return f'FAILED, results depend on the batch ({", ".join(failed)})', False
    if knows_sizes and not all(probe.passed for probe in padded):
        return 'FAILED, results depend on the padding of the batch', False
    if report.is_bitwise:
        text = 'passed, an image has the same bits alone and in batches of one size'
    else:
        largest = max(probe.relative for probe in of_one_size)
        text = f'passed, batches of one size change results by at most {largest:.1g} of their scale'
    if not all(probe.passed for probe in padded):
        text += (
            '; padding changes them, because the file is not told the true sizes: batch images of '
            'one size'
        )
    return text, True
