"""Testing whether the results for an image depend on the other images of its batch.

    from cpvt_pyramid.padding.invariance import assert_batch_invariant, batch_report

    print(batch_report(model, images))                     # a table of differences
    assert_batch_invariant(model, images)                  # equal to rounding
    assert_batch_invariant(model, images, bitwise=True)    # the same bits in a batch of one size

The model is any callable on images: a torch module, or a function that runs one of OpenMMLab or a
session of onnxruntime. docs/invariance.md describes the two levels. This file imports numpy alone;
torch is used if the images are tensors.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np

# What a model returns for one image, by name; None where a batch has no row for it.
Result = Mapping[str, Optional[np.ndarray]]

TOLERANCE = 1e-4  # of the relative difference, see `BatchProbe`
CELLS = 2  # by which a side of a map may deviate from the image's share, because of strides

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
        relative: largest absolute difference / largest absolute value of the output, without the
            values that all images share. Of integers, such as labels, the share of values that
            differ. Infinite where shapes differ.
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
        constant: outputs that are the same for all images, so that comparing them proves nothing.

    Examples:
        >>> images = [torch.rand(3, 8, 8), torch.rand(3, 8, 8)]
        >>> report = batch_report(torch.nn.Identity(), images)
        >>> report.passed, report.is_bitwise
        (True, True)
    """

    probes: tuple[BatchProbe, ...]
    skipped: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()

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
            tensors with B rows, by themselves or in lists, tuples and dicts. Put modules in
            evaluation mode first.
        images: (C, H, W) each, tensors or arrays.
        sizes: name of the argument by which the model takes the true heights and widths (B, 2).
        stack: if False, the model is called with a list of images, of any shape, and returns a list
            with a result for each of them, as torchvision's detectors do.
        tolerance: largest relative difference that passes, see `BatchProbe`.
        bitwise: in batches of one size, only the same bits pass.

    Raises:
        ValueError: nothing can be compared, or the results of all images are the same, or the
            arguments do not fit each other.
        TypeError: the model returns something else than arrays and tensors.

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
    if sizes and not stack:
        raise ValueError('sizes is for models that take a batch, got stack=False')
    if stack and any(len(image.shape) != 3 for image in images):
        shapes = ', '.join(str(tuple(image.shape)) for image in images)
        raise ValueError(f'images must be (C, H, W), got {shapes}')
    run = _Runner(model, sizes, stack)
    groups = _groups_of_one_size(images)
    alone: list[list[Result]] = []  # by group
    results: list[Result] = []
    for group in groups:
        own = [run([image])[0] for image in group.images]
        alone.append(own)
        results += own
    scales, skipped = _compared_outputs(results, stack)
    constant = [name for name in scales if _is_constant([result.get(name) for result in results])]
    if len(constant) == len(scales):
        raise ValueError('the results are the same for all images; give images that they depend on')

    def differences(probe: str) -> _Differences:
        return _Differences(probe, tolerance, bitwise and probe != PADDED, scales, constant)

    repeated = differences(REPEATED)
    batched = differences(BATCH)
    backwards = differences(ORDER)
    identical = differences(IDENTICAL)
    for group, own in zip(groups, alone):
        together = run(group.images)
        again = run(group.images)
        from_last = run(group.images[::-1])[::-1]
        copies = run(group.images[:1] * len(group.images))
        for i, index in enumerate(group.indices):
            repeated.add(index, run([group.images[i]])[0], own[i])
            repeated.add(index, again[i], together[i])
            backwards.add(index, from_last[i], together[i])
            identical.add(group.indices[0], copies[i], copies[0])
        for count in _batch_sizes(len(group.images)):
            for index, found, expected in zip(group.indices, run(group.images[:count]), own):
                batched.add(index, found, expected)
    probes = [repeated, batched, backwards, identical]
    if len(groups) > 1:
        padded = differences(PADDED)
        mixed = run(list(images))
        for group, own in zip(groups, alone):
            for i, index in enumerate(group.indices[: group.given]):
                share = _share_of(images[index], images) if stack else None
                padded.add(index, mixed[index], own[i], share)
        probes.append(padded)
    return BatchReport(tuple(found.probe() for found in probes), tuple(skipped), tuple(constant))


def _batch_sizes(most: int) -> list[int]:
    """The sizes of batches that are tested: all from 2 to 8, and the largest."""
    return sorted({*range(2, min(most, 8) + 1), most})


class _Group(NamedTuple):
    """Images of one size, at least two."""

    indices: list[int]  # of each image in the arguments
    images: list[Any]
    given: int  # how many are arguments; the others are mirror images


def _groups_of_one_size(images: Sequence[Any]) -> list[_Group]:
    if not images:
        raise ValueError('at least one image is needed, got none')
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


def _compared_outputs(alone: Sequence[Result], stack: bool) -> tuple[dict[str, float], list[str]]:
    """The outputs that are compared, each with its scale, and those that are not."""
    names = list(dict.fromkeys(name for result in alone for name in result))
    compared: dict[str, float] = {}
    skipped: list[str] = []
    for name in names:
        values = [result.get(name) for result in alone]
        if stack and any(x is None for x in values):
            skipped.append(name)
        else:
            compared[name] = _scale([x for x in values if x is not None])
    if not compared:
        found = ', '.join(names) or 'none'
        raise ValueError(f'the model must return a row for each image, got the outputs {found}')
    return compared, skipped


def _is_constant(values: Sequence[Optional[np.ndarray]]) -> bool:
    """Whether an output is the same for all images."""
    return all(_difference(x, values[0], 1.0, None).same_bits for x in values[1:])


class _Runner(NamedTuple):
    """Calls a model with a list of images; returns a result for each. See `batch_report`."""

    model: Callable[..., Any]
    sizes: Optional[str]
    stack: bool

    def __call__(self, images: list[Any]) -> list[Result]:
        with _no_grad(images[0]):
            return self.rows_of_batch(images) if self.stack else self.results_of_list(images)

    def results_of_list(self, images: list[Any]) -> list[Result]:
        found = list(self.model(images))
        if len(found) != len(images):
            raise ValueError(f'the model must return {len(images)} results, got {len(found)}')
        return [dict(_leaves(result)) for result in found]

    def rows_of_batch(self, images: list[Any]) -> list[Result]:
        options = {}
        if self.sizes:
            options[self.sizes] = _sizes_of(images)
        outputs = dict(_leaves(self.model(_padded(images), **options)))
        results: list[dict[str, Optional[np.ndarray]]] = [{} for _ in images]
        for name, x in outputs.items():
            has_rows = x.ndim > 0 and len(x) == len(images)
            for row, result in enumerate(results):
                result[name] = x[row] if has_rows else None
        return list(results)


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


class _Differences:
    """Collects the differences of a probe; see `BatchProbe`.

    Args:
        name: of the probe.
        tolerance: see `batch_report`.
        bitwise: only the same bits pass.
        scales: the outputs that are compared, each with its scale, see `_scale`.
        constant: outputs that are the same for all images. They may have one row in any batch.
    """

    def __init__(
        self,
        name: str,
        tolerance: float,
        bitwise: bool,
        scales: Mapping[str, float],
        constant: Sequence[str],
    ) -> None:
        self.name = name
        self.tolerance = tolerance
        self.bitwise = bitwise
        self.scales = scales
        self.constant = constant
        self.absolute = 0.0
        self.relative = 0.0
        self.same_bits = True
        self.output = ''
        self.note = ''
        self.images: set[int] = set()

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
        for name, scale in self.scales.items():
            ours = found.get(name)
            theirs = expected.get(name)
            if ours is None and (theirs is None or name in self.constant):
                continue
            difference = _difference(ours, theirs, scale, share)
            lacks_bits = self.bitwise and not difference.same_bits
            if lacks_bits or difference.relative > self.tolerance:
                self.images.add(index)
            is_largest = difference.relative > self.relative or not self.output
            if not difference.same_bits and is_largest:
                self.relative = difference.relative
                self.output = name
                self.note = difference.note
            self.absolute = max(self.absolute, difference.absolute)
            self.same_bits = self.same_bits and difference.same_bits

    def probe(self) -> BatchProbe:
        return BatchProbe(
            name=self.name,
            absolute=self.absolute,
            relative=self.relative,
            same_bits=self.same_bits,
            output=self.output,
            images=tuple(sorted(self.images)),
            note=self.note,
        )


def _difference(
    found: Optional[np.ndarray],
    expected: Optional[np.ndarray],
    scale: float,
    share: Optional[tuple[float, float]],
) -> _Difference:
    """Compare one output of an image with what is expected, see `_Differences.add`."""
    if found is None or expected is None:
        return _Difference.total('not one row for each image')
    if found.shape != expected.shape:
        if share is None or not _is_map(found.shape, expected.shape, share):
            return _Difference.total(f'shape {found.shape} instead of {expected.shape}')
        found = found[tuple(slice(length) for length in expected.shape)]
    if found.dtype == expected.dtype and found.tobytes() == expected.tobytes():
        return _Difference(0.0, 0.0, True)
    both_nan = (found != found) & (expected != expected)
    differs = (found != expected) & ~both_nan
    if not differs.any():  # such as 0 and -0
        return _Difference(0.0, 0.0, False)
    with np.errstate(invalid='ignore'):
        distance = np.abs(found[differs].astype(np.float64) - expected[differs].astype(np.float64))
    absolute = float(distance.max())
    if math.isnan(absolute):
        return _Difference.total('NaN in one of the two')
    if expected.dtype.kind != 'f':
        return _Difference(absolute, float(differs.mean()), False)
    return _Difference(absolute, absolute / scale if scale else math.inf, False)


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


def _leaves(output: Any, name: str = '') -> Iterator[tuple[str, np.ndarray]]:
    """The arrays in nested outputs, with names such as `maps.0`."""
    if output is None:
        return
    prefix = f'{name}.' if name else ''
    if isinstance(output, Mapping):
        for key, value in output.items():
            yield from _leaves(value, f'{prefix}{key}')
    elif isinstance(output, (list, tuple)):
        for place, value in enumerate(output):
            yield from _leaves(value, f'{prefix}{place}')
    elif hasattr(output, 'detach'):
        yield name or 'output', _from_tensor(output)
    elif isinstance(output, (np.ndarray, np.generic, bool, int, float)):
        yield name or 'output', np.asarray(output)
    else:
        raise TypeError(
            'the model must return arrays or tensors, also in lists, tuples and dicts, got '
            f'{type(output).__name__}; pass a function that takes the arrays out of it'
        )


def _scale(values: Sequence[np.ndarray]) -> float:
    """The largest absolute value, by which differences are divided.

    Where results have the same shape, cells with one value for all of them do not count: a filler
    such as -1e9 would hide every difference.
    """
    alike = [np.asarray(x) for x in values if x.shape == values[0].shape]
    varies = np.zeros(alike[0].shape, bool)
    for x in alike[1:]:
        varies |= x != alike[0]
    if varies.any():
        values = [x[varies] for x in alike]
    return max(_largest(x) for x in values)


def _largest(x: np.ndarray) -> float:
    """The largest finite absolute value."""
    if x.dtype.kind not in 'fiu':
        return 1.0
    finite = x[np.isfinite(x)]
    return float(np.abs(finite.astype(np.float64)).max(initial=0))


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
