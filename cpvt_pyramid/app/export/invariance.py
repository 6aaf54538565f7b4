"""Testing whether the results for an image depend on the other images of its batch.

    from cpvt_pyramid.app.export.invariance import assert_batch_invariant, batch_report

    print(batch_report(model, images))                     # a table of differences
    assert_batch_invariant(model, images)                  # equal to rounding
    assert_batch_invariant(model, images, bitwise=True)    # the same bits in a batch of one size

The model is any callable on images: a torch module, or a function that runs one of OpenMMLab or a
session of onnxruntime. docs/invariance.md describes the two levels. This file imports numpy alone;
torch is used if the images are tensors.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import numpy as np

# What a model returns for one image, by name; None where a batch has no row for it.
Result = Mapping[str, Optional[np.ndarray]]

TOLERANCE = 1e-4  # of the relative difference, see `BatchProbe`
CELLS = 2  # by which a side of a map may deviate from the image's share, because of strides
LIMIT = 100  # see `_Scale`
FILLER = 1000.0  # a filler is at least as large, and as many times larger than other values


class SameForAll(ValueError):
    """The results do not depend on the images."""


# The probes, in the order in which they run.
REPEATED = 'repeated runs'
BATCH = 'batch of one size'
ORDER = 'reversed order'
IDENTICAL = 'identical images'
PADDED = 'padded batch'
HEAD = ('probe', 'largest difference', 'relative', 'same bits', 'in output', 'images that differ')


@dataclass(frozen=True)
class BatchProbe:
    """The largest differences that a probe has found.

    Args:
        name: `REPEATED`, `BATCH`, `ORDER`, `IDENTICAL` or `PADDED`.
        absolute: largest absolute difference of two values.
        relative: largest difference of a value / its scale, the largest of the value itself and
            of those with the same place on an axis, such as all scores or all widths of boxes.
            Fillers, such as -1e9, and values that all images share do not count. Where rounding of
            the image changes values by more, the scale is larger (docs/invariance.md). Of integers
            and text, such as labels, the share of values that differ. Infinite where shapes differ.
        same_bits: whether all bits are equal.
        output: the output with the largest relative difference.
        images: indices of the images that differ by more than is allowed.
        note: what differs besides values.

    Examples:
        >>> images = [torch.rand(3, 8, 8), torch.rand(3, 8, 8)]
        >>> probe = batch_report(lambda batch: batch - batch.mean(), images)['batch of one size']
        >>> probe.passed, probe.images
        (False, (0, 1))
    """

    name: str
    absolute: float
    relative: float
    same_bits: bool
    output: str
    images: tuple[int, ...]
    note: str = ''

    @property
    def passed(self) -> bool:
        return not self.images


@dataclass(frozen=True)
class BatchReport:
    """What `batch_report` has found. As text, it is a table.

    Args:
        probes: in the order of the table.
        skipped: outputs that have no row for each image, and so are not compared.
        constant: outputs that are the same for all images, alone and in batches, so that comparing
            them proves nothing.
        flat: outputs with one row for the whole batch, which was divided among its images.
        not_finite: outputs with NaN or infinite values for an image alone.

    Examples:
        >>> images = [torch.rand(3, 8, 8), torch.rand(3, 8, 8)]
        >>> report = batch_report(torch.nn.Identity(), images)
        >>> report.passed, report.is_bitwise
        (True, True)
    """

    probes: tuple[BatchProbe, ...]
    skipped: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(probe.passed for probe in self.probes)

    @property
    def is_bitwise(self) -> bool:
        """Whether each image has the same bits alone and in a batch of one size."""
        return all(probe.same_bits for probe in self.probes if probe.name != PADDED)

    def __getitem__(self, name: str) -> BatchProbe:
        return {probe.name: probe for probe in self.probes}[name]

    def __str__(self) -> str:
        rows = [HEAD]
        for probe in self.probes:
            differing = ', '.join(map(str, probe.images)) or 'none'
            if probe.note:
                differing += f' ({probe.note})'
            bits = 'yes' if probe.same_bits else 'no'
            numbers = f'{probe.absolute:.2g}', f'{probe.relative:.2g}'
            rows.append((probe.name, *numbers, bits, probe.output, differing))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths)]
            lines.append('  '.join(cells).rstrip())
        if self.skipped:
            lines.append(f'not compared, without a row for each image: {", ".join(self.skipped)}')
        if self.constant:
            lines.append(f'the same for all images, and so no evidence: {", ".join(self.constant)}')
        if self.flat:
            lines.append(f'divided, one row for the whole batch: {", ".join(self.flat)}')
        if self.not_finite:
            lines.append(f'NaN or infinite for an image alone: {", ".join(self.not_finite)}')
        return '\n'.join(lines)


def assert_batch_invariant(
    model: Callable[..., Any], images: Sequence[Any], **options: Any
) -> None:
    """Raise an AssertionError with the table of `batch_report` unless all its probes pass.

    Args:
        model: see `batch_report`.
        images: see `batch_report`.
        options: the other arguments of `batch_report`.

    Examples:
        >>> model = CPVTPyramid('pcpvt_nano').eval()
        >>> images = [torch.rand(3, 64, 96), torch.rand(3, 64, 96), torch.rand(3, 40, 50)]
        >>> assert_batch_invariant(model, images, sizes='valid')
    """
    report = batch_report(model, images, **options)
    if not report.passed:
        raise AssertionError(f'the results of an image depend on its batch\n{report}')


def batch_report(
    model: Callable[..., Any],
    images: Sequence[Any],
    *,
    sizes: Optional[str] = None,
    stack: bool = True,
    tolerance: float = TOLERANCE,
    bitwise: bool = False,
) -> BatchReport:
    """Run a model on images alone and in batches, and compare the results of each image.

    | probe | compares |
    |---|---|
    | repeated runs | a second run with the first |
    | batch of one size | each image in batches of 2, 3, ... images with the image alone |
    | reversed order | the batch in reverse with the batch |
    | identical images | the rows of a batch of copies with its first row |
    | padded batch | each image in a batch of all sizes with the image alone |

    An image that is the only one of its size shares batches with its mirror image. The last probe
    needs images of several sizes; they are padded with zeros at the right and bottom. Outputs whose
    height and width, the last two dimensions or the two before the last, grow with those of the
    image are maps, compared inside the image. Others must have the same shape alone and in a batch.

    Args:
        model: called with a batch (B, C, H, W), of the type of the images. It returns arrays or
            tensors with B rows, by themselves or in lists, tuples and dicts, or lists with a result
            for each image. Put modules in evaluation mode first.
        images: (C, H, W) each, tensors or arrays.
        sizes: name of the argument by which the model takes the true heights and widths (B, 2).
        stack: if False, the model is called with a list of images, of any shape, and returns a list
            with a result for each of them, as torchvision's detectors do.
        tolerance: largest relative difference that passes, see `BatchProbe`.
        bitwise: in batches of one size, only the same bits pass.

    Raises:
        ValueError: nothing can be compared, or the results of all images are the same or NaN, or
            the arguments do not fit each other.
        TypeError: the model returns something else than arrays, tensors, numbers and text.

    Examples:
        >>> images = [torch.rand(3, 8, 8), torch.rand(3, 8, 8), torch.rand(3, 4, 6)]
        >>> print(batch_report(torch.nn.Identity(), images))
        probe              largest difference  relative  same bits  in output  images that differ
        repeated runs      0                   0         yes                   none
        batch of one size  0                   0         yes                   none
        reversed order     0                   0         yes                   none
        identical images   0                   0         yes                   none
        padded batch       0                   0         yes                   none
    """
    _check_arguments(images, sizes, stack)
    groups = _groups_of_one_size(images)
    run = _Runner(model, sizes, stack)
    run.find_lists(max((group.images for group in groups), key=len))
    alone = [_run_alone(run, group, tolerance) for group in groups]
    outputs = _compared_outputs(alone, stack, tolerance)

    def new_probe(name: str) -> _Probe:
        return _Probe(name, tolerance, bitwise and name != PADDED, outputs)

    found = {name: new_probe(name) for name in (REPEATED, BATCH, ORDER, IDENTICAL)}
    for group, own in zip(groups, alone):
        _compare_batches(run, group, own, found)
    if len(groups) > 1:
        found[PADDED] = new_probe(PADDED)
        mixed = run(list(images))
        for group, own in zip(groups, alone):
            for index, expected in zip(group.indices[: group.given], own.first):
                share = _share_of(images[index], images) if stack else None
                found[PADDED].add(index, mixed[index], expected, share)
    changed = {name for probe in found.values() for name in probe.changed}
    constant = [name for name in outputs.constant if name not in changed]
    if len(constant) == len(outputs.scales):
        raise SameForAll('the results are the same for all images; give images that they depend on')
    return BatchReport(
        probes=tuple(probe.result() for probe in found.values()),
        skipped=tuple(outputs.skipped),
        constant=tuple(constant),
        flat=tuple(name for name in outputs.scales if name in run.flat),
        not_finite=tuple(outputs.not_finite),
    )


def _check_arguments(images: Sequence[Any], sizes: Optional[str], stack: bool) -> None:
    if not images:
        raise ValueError('at least one image is needed, got none')
    if sizes and not stack:
        raise ValueError('sizes is for models that take a batch, got stack=False')
    if stack and any(len(image.shape) != 3 for image in images):
        shapes = ', '.join(str(tuple(image.shape)) for image in images)
        raise ValueError(f'images must be (C, H, W), got {shapes}')


def _batch_sizes(most: int) -> list[int]:
    """The sizes of batches that are tested: all from 2 to 8, and the largest."""
    return sorted({*range(2, min(most, 8) + 1), most})


class _Group(NamedTuple):
    """Images of one size, at least two."""

    indices: list[int]  # of each image in the arguments
    images: list[Any]
    given: int  # how many are arguments; the others are mirror images


def _groups_of_one_size(images: Sequence[Any]) -> list[_Group]:
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, image in enumerate(images):
        by_shape.setdefault(tuple(image.shape), []).append(index)
    groups = []
    for indices in by_shape.values():
        members = [images[index] for index in indices]
        given = len(members)
        if given == 1:
            members.append(_mirrored(members[0]))
            indices = indices * 2
        groups.append(_Group(indices, members, given))
    return groups


class _Alone(NamedTuple):
    """The results of each image of a group by itself."""

    first: list[Result]
    second: list[Result]  # of a second run
    disturbed: list[Result]  # of the image with a little noise
    noise: list[float]  # mean size of the noise / mean size of the pixels


def _run_alone(run: '_Runner', group: _Group, tolerance: float) -> _Alone:
    noisy = [_disturbed(image, tolerance) for image in group.images]
    return _Alone(
        first=[run([image])[0] for image in group.images],
        second=[run([image])[0] for image in group.images],
        disturbed=[run([image])[0] for image in noisy],
        noise=list(map(_relative_change, noisy, group.images)),
    )


def _compare_batches(
    run: '_Runner', group: _Group, alone: _Alone, found: Mapping[str, '_Probe']
) -> None:
    """Run the batches of a group, and add the differences to each probe."""
    together = run(group.images)
    again = run(group.images)
    from_last = run(group.images[::-1])[::-1]
    copies = run(group.images[:1] * len(group.images))
    for i, index in enumerate(group.indices):
        found[REPEATED].add(index, alone.second[i], alone.first[i])
        found[REPEATED].add(index, again[i], together[i])
        found[ORDER].add(index, from_last[i], together[i])
        found[IDENTICAL].add(group.indices[0], copies[i], copies[0])
    for count in _batch_sizes(len(group.images)):
        results = run(group.images[:count])
        for index, result, expected in zip(group.indices, results, alone.first):
            found[BATCH].add(index, result, expected)


class _Outputs(NamedTuple):
    """What is compared of the results, by the names of outputs; see `BatchReport`."""

    scales: dict[str, '_Scale']  # of the outputs that are compared
    skipped: list[str]
    constant: list[str]
    not_finite: list[str]


def _compared_outputs(alone: Sequence[_Alone], stack: bool, tolerance: float) -> _Outputs:
    """Decide from the results of each image alone what can be compared.

    Raises:
        ValueError: nothing can.
    """
    results = [result for group in alone for result in group.first]
    names = list(dict.fromkeys(name for result in results for name in result))
    skipped = []
    if stack:
        skipped = [name for name in names if any(result.get(name) is None for result in results)]
    scales: dict[str, _Scale] = {}
    constant = []
    not_finite = []
    never_finite: dict[str, str] = {}  # NaN or infinite
    for name in names:
        if name in skipped:
            continue
        given = [result.get(name) for result in results]
        values = [x for x in given if x is not None]
        scales[name] = _scale_of(values, _changes_by_noise(alone, name), tolerance)
        if _is_constant(given):
            constant.append(name)
        floats = [x for x in values if x.dtype.kind == 'f' and x.size]
        if not all(np.isfinite(x).all() for x in floats):
            not_finite.append(name)
        if len(floats) == len(given) and not any(np.isfinite(x).any() for x in floats):
            is_nan = all(np.isnan(x).all() for x in floats)
            never_finite[name] = 'NaN' if is_nan else 'infinite'
    if not scales:
        found = ', '.join(names) or 'none'
        raise ValueError(f'the model must return a row for each image, got the outputs {found}')
    if len(never_finite) == len(scales):
        what = ' or '.join(sorted({*never_finite.values()}))
        raise ValueError(
            f'the results are {what} for each image alone; check the weights and the range of '
            'pixels'
        )
    return _Outputs(scales, skipped, constant, not_finite)


def _is_constant(values: Sequence[Optional[np.ndarray]]) -> bool:
    """Whether an output has the same values for all images."""
    first = values[0]
    return all(_compare(x, first, _Scale(1.0), None).absolute == 0 for x in values[1:])


@dataclass
class _Runner:
    """Calls a model with a list of images; returns a result for each. See `batch_report`."""

    model: Callable[..., Any]
    sizes: Optional[str]
    stack: bool
    lists: set[str] = field(default_factory=set)  # outputs that are lists with an item per image
    # The shape of an output's row for an image alone, by the output and the image's shape.
    shapes: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    flat: set[str] = field(default_factory=set)  # outputs with one row for the whole batch

    def __call__(self, images: list[Any]) -> list[Result]:
        with _no_grad(images[0]):
            return self.rows_of_batch(images) if self.stack else self.results_of_list(images)

    def find_lists(self, images: list[Any]) -> None:
        """Find the outputs that are lists with an item for each image, such as sequences of ONNX,
        and not lists of outputs with a row for each image."""
        if not self.stack:
            return
        with _no_grad(images[0]):
            if any(_lists(self.call(images[:1]))):
                for name, items in _lists(self.call(images)):
                    if _is_list_of_results(items, len(images)):
                        self.lists.add(name)

    def call(self, images: list[Any]) -> Any:
        options = {}
        if self.sizes:
            options[self.sizes] = _sizes_of(images)
        return self.model(_padded(images), **options)

    def results_of_list(self, images: list[Any]) -> list[Result]:
        found = list(self.model(images))
        if len(found) != len(images):
            raise ValueError(f'the model must return {len(images)} results, got {len(found)}')
        return [dict(_leaves(result)) for result in found]

    def rows_of_batch(self, images: list[Any]) -> list[Result]:
        results: list[dict[str, Optional[np.ndarray]]] = [{} for _ in images]
        output = self.call(images)
        for name, x in _leaves(output, skipped=self.lists):
            for result, row in zip(results, self.rows_of(name, x, images)):
                result[name] = row
        for name, items in _lists(output):
            if name in self.lists and len(items) == len(images):
                for result, item in zip(results, items):
                    result.update(_leaves(item, name))
        return list(results)

    def rows_of(
        self, name: str, x: np.ndarray, images: list[Any]
    ) -> Sequence[Optional[np.ndarray]]:
        """The row of each image in an output; None where there is none."""
        count = len(images)
        key = name, tuple(images[0].shape)
        if x.ndim > 0 and len(x) == count:
            if count == 1:
                self.shapes[key] = x.shape[1:]
            return [np.asarray(row) for row in x]
        own = self.shapes.get(key)
        if own and x.shape == (1, count * own[0], *own[1:]):
            self.flat.add(name)
            return list(x.reshape(count, *own))
        return [None] * count


def _is_list_of_results(items: Sequence[Any], count: int) -> bool:
    """Whether a list has a result for each image: items of one kind, not all with `count` rows."""
    kinds = [[(name, x.dtype, x.ndim) for name, x in _leaves(item)] for item in items]
    arrays = [x for item in items for _, x in _leaves(item)]
    have_rows = all(x.ndim > 0 and len(x) == count for x in arrays)
    return len(items) == count and not have_rows and all(kind == kinds[0] for kind in kinds)


class _Difference(NamedTuple):
    """The difference of one output of an image; the fields are those of `BatchProbe`."""

    absolute: float
    relative: float
    same_bits: bool
    note: str = ''

    @classmethod
    def total(cls, note: str) -> '_Difference':
        """Between results that cannot be compared."""
        return cls(math.inf, math.inf, False, note)


class _Probe:
    """A probe in progress: compares results, and collects what a `BatchProbe` says of them.

    Args:
        name: of the probe.
        tolerance: see `batch_report`.
        bitwise: only the same bits pass.
        outputs: that are compared. Those that are the same for all images alone may have one row in
            any batch.
    """

    def __init__(self, name: str, tolerance: float, bitwise: bool, outputs: _Outputs) -> None:
        self.name = name
        self.tolerance = tolerance
        self.bitwise = bitwise
        self.outputs = outputs
        self.absolute = 0.0
        self.relative = 0.0
        self.same_bits = True
        self.output = ''
        self.note = ''
        self.images: set[int] = set()
        self.changed: set[str] = set()  # outputs

    def add(
        self,
        index: int,
        found: Result,
        expected: Result,
        share: Optional[tuple[float, float]] = None,
    ) -> None:
        """Compare two results of an image.

        Args:
            index: of the image.
            found: its result in a batch.
            expected: its result alone.
            share: its height and width, divided by those of the padded batch.
        """
        for name, scale in self.outputs.scales.items():
            ours = found.get(name)
            theirs = expected.get(name)
            if ours is None and (theirs is None or name in self.outputs.constant):
                continue
            difference = _compare(ours, theirs, scale, share)
            lacks_bits = self.bitwise and not difference.same_bits
            if lacks_bits or difference.relative > self.tolerance:
                self.images.add(index)
                self.changed.add(name)
            is_largest = difference.relative > self.relative or not self.output
            if not difference.same_bits and is_largest:
                self.relative = difference.relative
                self.output = name
                self.note = difference.note
            self.absolute = max(self.absolute, difference.absolute)
            self.same_bits = self.same_bits and difference.same_bits

    def result(self) -> BatchProbe:
        return BatchProbe(
            name=self.name,
            absolute=self.absolute,
            relative=self.relative,
            same_bits=self.same_bits,
            output=self.output,
            images=tuple(sorted(self.images)),
            note=self.note,
        )


def _compare(
    found: Optional[np.ndarray],
    expected: Optional[np.ndarray],
    scale: '_Scale',
    share: Optional[tuple[float, float]],
) -> _Difference:
    """Compare one output of an image with what is expected, see `_Probe.add`."""
    if found is None or expected is None:
        return _Difference.total('not one row for each image')
    if found.shape != expected.shape:
        if share is None or not _is_map(found.shape, expected.shape, share):
            return _Difference.total(f'shape {found.shape} instead of {expected.shape}')
        found = found[tuple(slice(length) for length in expected.shape)]
    is_text = expected.dtype.kind in 'OSU'
    if not is_text and found.dtype == expected.dtype and found.tobytes() == expected.tobytes():
        return _Difference(0.0, 0.0, True)
    both_nan = (found != found) & (expected != expected)
    differs = (found != expected) & ~both_nan
    if not differs.any():  # text, or such as 0 and -0
        return _Difference(0.0, 0.0, is_text)
    if is_text:
        return _Difference(1.0, float(differs.mean()), False)
    with np.errstate(invalid='ignore'):
        distance = np.abs(found[differs].astype(np.float64) - expected[differs].astype(np.float64))
    absolute = float(distance.max())
    if math.isnan(absolute):
        return _Difference.total('NaN in one of the two')
    if expected.dtype.kind != 'f':
        return _Difference(absolute, float(differs.mean()), False)
    if math.isinf(absolute):
        return _Difference(absolute, math.inf, False)
    scales = np.maximum(scale.of(expected)[differs], np.abs(expected[differs].astype(np.float64)))
    with np.errstate(divide='ignore'):
        relative = float((distance / scales).max())
    return _Difference(absolute, relative, False)


def _is_map(padded: tuple[int, ...], alone: tuple[int, ...], share: tuple[float, float]) -> bool:
    """Whether an output is a map of an image, and so may be smaller than that of a padded batch.

    The height and width of a map are its last two dimensions or the two before the last. Their
    share of those of the padded map is the image's, to within `CELLS`.
    """
    if len(padded) != len(alone):
        return False
    for first in (len(padded) - 2, len(padded) - 3):
        if first < 0:
            continue
        sides = slice(first, first + 2)
        same_rest = padded[:first] == alone[:first] and padded[first + 2 :] == alone[first + 2 :]
        fits = all(
            own <= side and abs(own - side * part) <= CELLS
            for own, side, part in zip(alone[sides], padded[sides], share)
        )
        if same_rest and fits:
            return True
    return False


def _lists(output: Any, name: str = '') -> Iterator[tuple[str, Sequence[Any]]]:
    """The lists in nested outputs, named as in `_leaves`."""
    prefix = f'{name}.' if name else ''
    if isinstance(output, Mapping):
        for key, value in output.items():
            yield from _lists(value, f'{prefix}{key}')
    elif isinstance(output, (list, tuple)):
        yield name, output
        for place, value in enumerate(output):
            yield from _lists(value, f'{prefix}{place}')


def _leaves(
    output: Any, name: str = '', skipped: Collection[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays in nested outputs, with names such as `maps.0`, without those in lists that are
    skipped."""
    if output is None or isinstance(output, (list, tuple)) and name in skipped:
        return
    prefix = f'{name}.' if name else ''
    if isinstance(output, Mapping):
        for key, value in output.items():
            yield from _leaves(value, f'{prefix}{key}', skipped)
    elif isinstance(output, (list, tuple)):
        for place, value in enumerate(output):
            yield from _leaves(value, f'{prefix}{place}', skipped)
    elif hasattr(output, 'detach'):
        yield name or 'output', _from_tensor(output)
    elif isinstance(output, (np.ndarray, np.generic, bool, int, float, str)):
        yield name or 'output', np.asarray(output)
    else:
        raise TypeError(
            'the model must return arrays or tensors, also in lists, tuples and dicts, got '
            f'{type(output).__name__}; pass a function that takes the arrays out of it'
        )


class _Scale(NamedTuple):
    """What differences of an output are divided by: for each value the largest one of the same
    meaning.

    What has the same place on an axis often has one meaning: a class, a side of a box, a channel.
    Of the scales of all axes the smallest one counts, so that in tables such as those of YOLO a
    score is not hidden by the coordinates of boxes next to it.

    Values may also be all but zero, differences of larger ones, which rounding changes by more than
    a small share. How much is measured, by noise in the image whose size is the tolerance: a scale
    is at least what such noise changes / the noise, but at most `LIMIT` * tolerance of the largest
    value, because noise may also decide between results.
    """

    whole: float  # for outputs without axes, and where no axis has one length in all results
    axes: tuple[Optional[np.ndarray], ...] = ()  # for each place on an axis

    def of(self, x: np.ndarray) -> np.ndarray:
        """The scale of each value."""
        scales = np.full(x.shape, self.whole)
        for axis, scale in enumerate(self.axes):
            if scale is not None:
                around = [1] * x.ndim
                around[axis] = -1
                scales = np.minimum(scales, scale.reshape(around))
        return scales


def _scale_of(
    values: Sequence[np.ndarray], changes: Sequence[np.ndarray], tolerance: float
) -> _Scale:
    """The scale of an output, from its values for all images and `_changes_by_noise`.

    Where results have the same shape, cells with one value for all of them do not count, and
    fillers never do: a filler such as -1e9 would hide every difference.
    """
    if any(x.dtype.kind not in 'fiu' for x in values):
        return _Scale(1.0)
    sizes = [np.abs(x.astype(np.float64)) for x in values]
    filler = _smallest_filler(sizes)
    counted = [np.isfinite(size) & (size < filler) for size in sizes]
    if len({x.shape for x in values}) == 1:
        varies = np.any([x != values[0] for x in values[1:]], axis=0) if len(values) > 1 else False
        if np.any(varies):
            counted = [mask & varies for mask in counted]
    if not any(mask.any() for mask in counted):
        counted = [np.isfinite(size) for size in sizes]
    known = [np.where(mask, size, 0.0) for size, mask in zip(sizes, counted)]
    whole = max(float(size.max(initial=0)) for size in known)
    limit = min(LIMIT * tolerance, 1.0) * whole
    ranks = {x.ndim for x in values}
    if len(ranks) > 1:
        return _Scale(whole)
    axes: list[Optional[np.ndarray]] = []
    for axis in range(ranks.pop()):
        if len({x.shape[axis] for x in known}) > 1:
            axes.append(None)
            continue
        by_noise = np.minimum(_largest_along(axis, changes), limit)
        axes.append(np.maximum(_largest_along(axis, known), by_noise))
    return _Scale(whole, tuple(axes))


def _largest_along(axis: int, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The largest value at each place of an axis, whose length is that of all arrays."""
    largest = [np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).max(1, initial=0) for x in arrays]
    return np.max(largest, axis=0)


def _changes_by_noise(alone: Sequence[_Alone], name: str) -> list[np.ndarray]:
    """How much noise in each image changes each value of an output / the size of the noise."""
    changes = []
    for group in alone:
        for *results, noise in zip(group.first, group.second, group.disturbed, group.noise):
            first, second, disturbed = (result.get(name) for result in results)
            if first is not None:  # else the output has no value, either
                changes.append(_change_by_noise(first, second, disturbed, noise))
    return changes


def _change_by_noise(
    first: np.ndarray,
    second: Optional[np.ndarray],
    disturbed: Optional[np.ndarray],
    noise: float,
) -> np.ndarray:
    """See `_changes_by_noise`; infinite where it is not known, such as for a list of boxes that has
    another length after the noise."""
    unknown = np.full(first.shape, np.inf)
    if second is None or disturbed is None or first.dtype.kind not in 'fiu' or not noise:
        return unknown
    if not first.shape == second.shape == disturbed.shape:
        return unknown
    with np.errstate(invalid='ignore'):
        change = np.abs(disturbed.astype(np.float64) - first.astype(np.float64))
    # What differs in a second run without noise, too, says nothing.
    return np.where(np.isnan(change) | (first != second), 0.0, change / noise)


def _smallest_filler(sizes: Sequence[np.ndarray]) -> float:
    """The absolute value from which on values are fillers, such as -1e9 of what is masked: large,
    far from all others, and more than one of them. Infinite if there are none."""
    present = np.concatenate([x[np.isfinite(x) & (x > 0)] for x in sizes])
    smallest = math.inf
    powers = np.unique(np.frexp(present)[1])  # of two
    for lower, upper in zip(powers[:-1], powers[1:]):
        start = math.ldexp(1.0, int(upper) - 1)
        below = math.ldexp(1.0, int(lower))
        if start >= max(FILLER, FILLER * below) and (present >= start).sum() > 1:
            smallest = min(smallest, start)
    return smallest


# Tensors and arrays


def _from_tensor(x: Any) -> np.ndarray:
    x = x.detach().cpu()
    if x.is_floating_point() and x.element_size() == 2:  # NumPy has no bfloat16
        x = x.float()
    return x.numpy()


def _no_grad(image: Any) -> Any:
    if not hasattr(image, 'detach'):
        return nullcontext()
    import torch

    return torch.no_grad()


def _mirrored(image: Any) -> Any:
    if hasattr(image, 'detach'):
        return image.flip(-1)
    return np.ascontiguousarray(np.flip(image, -1))


def _disturbed(image: Any, share: float) -> Any:
    """An image with noise: each value is larger or smaller by a share of it, or a whole number by
    one. The noise is always the same."""
    values = _from_tensor(image) if hasattr(image, 'detach') else image
    signs = np.random.RandomState(0).choice((-1, 1), size=values.shape)
    if values.dtype.kind == 'f':
        noisy = values * (1 + share * signs)
    else:
        noisy = np.clip(values.astype(np.int64) + signs, values.min(), values.max())
    if not hasattr(image, 'detach'):
        return noisy.astype(image.dtype)
    import torch

    return torch.from_numpy(noisy).to(image)


def _relative_change(noisy: Any, image: Any) -> float:
    """The mean size of a change / the mean size of the values; 0 for an image of zeros."""
    before, after = (
        (_from_tensor(x) if hasattr(x, 'detach') else x).astype(np.float64) for x in (image, noisy)
    )
    size = np.abs(before).mean()
    return float(np.abs(after - before).mean() / size) if size else 0.0


def _canvas(images: Sequence[Any]) -> tuple[int, int]:
    """The largest height and width."""
    return max(image.shape[-2] for image in images), max(image.shape[-1] for image in images)


def _share_of(image: Any, images: Sequence[Any]) -> tuple[float, float]:
    """The height and width of an image, divided by those of the padded batch."""
    height, width = _canvas(images)
    return image.shape[-2] / height, image.shape[-1] / width


def _padded(images: Sequence[Any]) -> Any:
    """A batch (B, C, H, W) of images (C, h, w), with zeros at the right and bottom."""
    first = images[0]
    shape = len(images), first.shape[0], *_canvas(images)
    batch = first.new_zeros(shape) if hasattr(first, 'detach') else np.zeros(shape, first.dtype)
    for place, image in zip(batch, images):
        place[:, : image.shape[1], : image.shape[2]] = image
    return batch


def _sizes_of(images: Sequence[Any]) -> Any:
    """(B, 2), heights and widths."""
    sizes = [tuple(image.shape[1:]) for image in images]
    if not hasattr(images[0], 'detach'):
        return np.array(sizes, np.int64)
    import torch

    return torch.tensor(sizes, device=images[0].device)
