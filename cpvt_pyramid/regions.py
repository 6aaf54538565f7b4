"""Operations that give each image of a padded batch the result that it has alone.

A map of a padded batch carries an `Extent`: how many of its rows and columns belong to each image.
`RULES` lists the functions of PyTorch that keep it. A rule clears the padding before cells mix, so
that values inside the images, and the gradients that flow back from them, are those of each image
alone. Values in the padding are arbitrary. `masked_map.py` applies the rules.

Shapes: B batch, C channels, H x W image in pixels, h x w map.
"""

import math
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops.dispatch import graph_is_captured
from .ops.winograd import conv3x3

# The length of a map along one axis, as a function of the length n of the image in pixels: steps
# (factor, addend, divisor), each n -> (n * factor + addend) // divisor, or a set of formulas, of
# which the shortest length counts (with CROP, also where one is 1). Equal formulas mean equal
# lengths, whatever the image.
Step = Union[tuple[int, int, int], frozenset]
Formula = tuple[Step, ...]
PIXELS: Formula = ((1, 0, 1),)
ONE: Formula = ((0, 1, 1),)
CROP = 'crop'


def then(formula: Formula, factor: int, addend: int, divisor: int) -> Formula:
    """`formula` followed by a step, in a form that is equal for equal functions."""
    *before, last = formula
    if isinstance(last, frozenset):
        before.append(last)
    else:
        f, a, d = last
        if d == 1:
            factor, addend = f * factor, a * factor + addend
        elif factor == 1:
            factor, addend, divisor = f, a + addend * d, d * divisor
        else:
            before.append(last)
    common = math.gcd(factor, divisor)
    step = (factor // common, addend // common, divisor // common)
    if step[0] == 0:
        return (step,)
    return tuple(before) if before and step == (1, 0, 1) else (*before, step)


def is_constant(formula: Formula) -> bool:
    """True if the length does not depend on the image."""
    return formula[0][0] == 0 if isinstance(formula[0], tuple) else False


def length(formula: Formula, pixels: Any, known: Optional[dict] = None) -> Any:
    """The length that a formula gives for an image of this many pixels.

    A neck of many fusions has formulas that contain the same ones many times; `known` has those
    that are computed. Only the first step can be a set, so that they start from the pixels.
    """
    n, known = pixels, {} if known is None else known
    for step in formula:
        if isinstance(step, frozenset):
            for f in step - known.keys() - {CROP}:
                known[f] = length(f, pixels, known)
            n = shortest([known[f] for f in step if f != CROP], CROP in step)
        else:
            factor, addend, divisor = step
            n = (n * factor + addend) // divisor
    return n.clamp(min=0) if isinstance(n, Tensor) else max(n, 0)


def shortest(lengths: Sequence[Any], cropped: bool) -> Any:
    """The least of some lengths; unless cropped, 0 where they differ and one is 1, which would be
    broadcast in the image alone."""
    if not isinstance(lengths[0], Tensor):
        broadcast = len(set(lengths)) > 1 and 1 in lengths and not cropped
        return 0 if broadcast else min(lengths)
    each = torch.stack(list(lengths))
    least = each.amin(0)
    if cropped:
        return least
    return torch.where((least == 1) & (each.amax(0) > 1), torch.zeros_like(least), least)


def joint(a: Formula, b: Formula) -> Optional[Formula]:
    """The length of two operands of one element-wise operation; None if they do not go together.

    Where two lengths of an image differ, the image alone has no result. It has what both have: a
    decoder adds a map of ceil(n / 4) cells to one of 2 * ceil(n / 8).
    """
    if a == b or b == ONE:
        return a
    if a == ONE:
        return b
    if is_constant(a) or is_constant(b):
        return None
    return (frozenset({a, b}),)


class Side(int):
    """Height or width of a map, which knows the length of each image.

    `F.interpolate(x, size=y.shape[2:])` resizes each image to its own size in `y`.
    """

    formula: Optional[Formula]  # None: the map has lost its region

    @classmethod
    def of(cls, value: int, formula: Optional[Formula], *step: int) -> 'Side':
        side = cls(value)
        side.formula = then(formula, *step) if formula and step else formula
        return side

    def after(self, value: int, other: Any, *step: int) -> Any:
        """The value after a step with another number; a `Side` if that is a plain one."""
        known = type(other) is int and step[2] > 0
        return self.of(value, self.formula, *step) if known else value

    def __mul__(self, other: Any) -> Any:
        return self.after(int(self) * other, other, other, 0, 1)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self.after(int(self) // other, other, 1, 0, other)

    def __add__(self, other: Any) -> Any:
        return self.after(int(self) + other, other, 1, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.after(int(self) - other, other, 1, -other, 1)


class Region:
    """The images of a padded batch, each in the top left corner.

    Args:
        valid: (B, 2), true height and width of each image in pixels; 0 for none.
        size: H and W of the batch in pixels; None in graphs, where it is a symbol.
    """

    def __init__(self, valid: Tensor, size: Optional[Sequence[int]] = None) -> None:
        self.valid = valid.long()
        self.size = None if size is None else (int(size[0]), int(size[1]))
        self.made: dict[Any, Any] = {}  # what `once` returned
        self.known: dict[str, tuple[Formula, Formula]] = {}  # by the size of the map

    def at_stride(self, stride: int) -> 'Extent':
        """The extent of a map of ceil(H / stride) x ceil(W / stride) cells."""
        formula = then(PIXELS, 1, stride - 1, stride)
        return Extent(self, formula, formula)

    def to(self, device: torch.device) -> 'Region':
        """The region on another device, one object for all maps of this region."""
        return self.once(device, lambda: Region(self.valid.to(device), self.size))

    def equals(self, other: 'Region') -> bool:
        """True if the images have the same sizes. Reads the sizes once for each pair of regions."""
        if self is other:
            return True
        if self.size != other.size or self.valid.shape != other.valid.shape:
            return False
        same_device = self.valid.device == other.valid.device
        return self.once(other, lambda: same_device and torch.equal(self.valid, other.valid))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, computed once. Autograd does not save inference tensors."""
        if key not in self.made:
            with nullcontext() if self.size is None else torch.inference_mode(False):
                self.made[key] = make()
        return self.made[key]


class Extent(NamedTuple):
    """Which cells of a map belong to each image.

    Args:
        region: the images of the batch.
        rows: how many rows an image has, as a function of its height.
        columns: how many columns, as a function of its width.
    """

    region: Region
    rows: Formula
    columns: Formula

    @property
    def whole(self) -> bool:
        """True if every cell belongs to its image, as after adaptive pooling."""
        return is_constant(self.rows) and is_constant(self.columns)

    @property
    def size(self) -> tuple[int, int]:
        """h and w of the map."""
        height, width = self.region.size or (0, 0)
        return length(self.rows, height), length(self.columns, width)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """(B,) each, rows and columns of each image; an image without pixels has none."""

        def side(axis: int, formula: Formula) -> Tensor:
            pixels = self.region.valid[:, axis]
            n = length(formula, pixels)
            always = is_constant(formula) or self.region.size is None
            return n if always else n * (pixels > 0)

        return (
            self.region.once((0, self.rows), lambda: side(0, self.rows)),
            self.region.once((1, self.columns), lambda: side(1, self.columns)),
        )

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Rows and columns of each image, as numbers. Reads the sizes of the images once."""
        pixels = self.region.once('pixels', self.region.valid.tolist)
        return [
            (length(self.rows, height), length(self.columns, width)) if height and width else (0, 0)
            for height, width in pixels
        ]

    def fits(self, x: Tensor) -> bool:
        """True if a tensor can have this extent. One of other than four axes must be whole."""
        if self.region.size is None:
            return x.dim() == 4 or self.whole
        valid = self.region.valid
        if x.dim() == 0 or len(x) != len(valid) or x.device != valid.device:
            return False
        return tuple(x.shape[2:]) == self.size if x.dim() == 4 else self.whole

    def outside(self, size: Sequence[Any]) -> Tensor:
        """(B, 1, h, w) booleans, True in the padding of a map of this size."""

        def make() -> Tensor:
            rows, columns = (
                torch.arange(n, device=side.device) >= side[:, None]
                for n, side in zip(size, self.sides)
            )
            return rows[:, None, :, None] | columns[:, None, None]

        return self.region.once((str(tuple(size)), self.rows, self.columns), make)

    def changed(self, rows: tuple[int, int, int], columns: tuple[int, int, int]) -> 'Extent':
        """The extent after a step (factor, addend, divisor) along each axis."""
        return Extent(self.region, then(self.rows, *rows), then(self.columns, *columns))


def extent_of(x: Any) -> Optional[Extent]:
    """The extent of a map inside a rule."""
    return getattr(x, 'extent', None) if isinstance(x, Tensor) else None


def map_extent(x: Tensor) -> Optional[Extent]:
    """The extent of a map (B, C, h, w); None for vectors, too."""
    return extent_of(x) if x.dim() == 4 else None


def mark(x: Any, extent: Optional[Extent]) -> Any:
    """Set the extent of a map, or None if the map cannot have it; returns the map."""
    if isinstance(x, Tensor):
        if extent is not None and not extent.fits(x):
            extent = None
        if extent is not None or extent_of(x) is not None:
            x.extent = extent  # type: ignore[attr-defined]
        if extent is not None and x.dim() == 4 and not extent.whole:
            extent.region.known.setdefault(str(tuple(x.shape[2:])), extent[1:])
    return x


def clear(x: Tensor, extent: Extent, value: float = 0) -> Tensor:
    """The map with this value in the padding."""
    return x if extent.whole else x.masked_fill(extent.outside(x.shape[2:]), value)


def lowest(dtype: torch.dtype) -> float:
    """The identity of a maximum."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def joint_extent(operands: Iterable[Any]) -> Optional[Extent]:
    """The extent of an element-wise operation's result; None if it has none.

    All maps must be of one region, and of sizes that go together. A tensor without an extent must
    be constant over the map, and not come from a padded batch through functions without a rule.
    """
    found: Optional[Extent] = None
    plain = []
    for x in operands:
        if not isinstance(x, Tensor):
            continue
        extent = extent_of(x)
        if extent is None:
            plain.append(x)
        elif found is None:
            found = extent
        elif found.region.size is not None:  # in a graph, operands are taken to go together
            rows, columns = joint(found.rows, extent.rows), joint(found.columns, extent.columns)
            if rows is None or columns is None or not found.region.equals(extent.region):
                return None
            found = Extent(found.region, rows, columns)
    if found is None or found.region.size is None:
        return found
    for x in plain:
        over_map = x.numel() and (x.dim() > 4 or any(n != 1 for n in x.shape[-2:]))
        if getattr(x, 'origin', None) is not None or (over_map and not found.whole):
            return None
    return found


# Rules: each is called with the function and its arguments, and marks what it returns.


def element_wise(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Each cell of the result depends on the same cell of the operands."""
    extent = joint_extent((*args, *kwargs.values()))
    return mark(function(*args, **kwargs), extent)


def element_wise_with_poles(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """As `element_wise`, for functions whose value or derivative may be infinite.

    In the padding they must not be: zero times infinity is NaN, and reaches weights in the backward
    pass. At 0.5 all of these functions are smooth.
    """

    def harmless(x: Any, fill: Callable = Tensor.masked_fill) -> Any:
        own = extent_of(x)
        if own is None or own.whole or not x.is_floating_point():
            return x
        return fill(x, own.outside(x.shape[2:]), 0.5)

    extent = joint_extent((*args, *kwargs.values()))
    saved = not torch.is_inference_mode_enabled()  # perhaps, by what takes the result
    if extent is not None and extent.region.size is not None and saved:
        fills = [Tensor.masked_fill] * len(args)
        if is_in_place(function):
            fills[0] = Tensor.masked_fill_
        args = tuple(map(harmless, args, fills))
        kwargs = {name: harmless(x) for name, x in kwargs.items()}
    return mark(function(*args, **kwargs), extent)


def is_in_place(function: Callable) -> bool:
    """True for methods such as `add_` and `__iadd__`."""
    name = getattr(function, '__name__', '')
    return name.startswith('__i') if name.startswith('__') else name.endswith('_')


def cast(function: Callable, input: Any, *args: Any, **kwargs: Any) -> Any:
    """The same values, or equal ones, in another dtype, in other memory or on another device."""
    extent = extent_of(input)
    result = function(input, *args, **kwargs)
    if extent is not None and isinstance(result, Tensor) and result.device != input.device:
        extent = extent._replace(region=extent.region.to(result.device))
    return result if result is input else mark(result, extent)


def conv2d(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Padding of the batch reads as zeros, like the padding of the convolution."""
    options = by_name('weight bias stride padding dilation groups', args, kwargs)
    extent = with_parameters(map_extent(input), *options.values())
    if extent is not None:
        input = clear(input, extent)
        extent = extent.changed(*windows(options['weight'].shape[2:], **options))
    return mark(function(input, *args, **kwargs), extent)


def conv_transpose2d(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    options = dict(stride=1, padding=0, output_padding=0, dilation=1)
    names = 'weight bias stride padding output_padding groups dilation'
    options |= by_name(names, args, kwargs)
    extent = with_parameters(map_extent(input), *options.values())
    if extent is not None:
        input = clear(input, extent)
        per_axis = [pair(options[n]) for n in ('stride', 'padding', 'output_padding', 'dilation')]
        extent = extent.changed(
            *(
                (s, d * (k - 1) + more + 1 - s - 2 * p, 1)
                for k, s, p, more, d in zip(options['weight'].shape[2:], *per_axis)
            )
        )
    return mark(function(input, *args, **kwargs), extent)


def max_pool2d(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = 'kernel_size stride padding dilation ceil_mode return_indices'
    options = by_name(names, args, kwargs)
    options['stride'] = options.get('stride') or options['kernel_size']
    if options.pop('return_indices', False):
        return function(input, return_indices=True, **options)
    extent = map_extent(input)
    if extent is not None:
        input = clear(input, extent, lowest(input.dtype))
        extent = extent.changed(*windows(**options))
    return cleared(function(input, **options), extent)


def avg_pool2d(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    names = 'kernel_size stride padding ceil_mode count_include_pad divisor_override'
    options = by_name(names, args, kwargs)
    options['stride'] = options.get('stride') or options['kernel_size']
    extent = map_extent(input)
    if extent is None:
        return mark(function(input, **options), None)
    new = extent.changed(*windows(**options))
    return each_alone(lambda x, _: function(x, **options), input, extent, new, new.size)


def group_norm(
    function: Callable,
    input: Tensor,
    num_groups: int,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    *options: Any,
) -> Tensor:
    """Mean and variance over the cells of each image."""
    extent = with_parameters(extent_of(input), weight, bias)
    if extent is None or extent.whole:
        return mark(function(input, num_groups, weight, bias, eps, *options), extent)
    x = input.unflatten(1, (num_groups, -1))  # (B, groups, C / groups, h, w)
    x, _, _ = standardized(x, extent.outside(input.shape[2:])[:, :, None], (2, 3, 4), eps)
    return mark(affine(x.flatten(1, 2), input, weight, bias), extent)


def instance_norm(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A `group_norm` of one channel a group."""
    names = 'running_mean running_var weight bias use_input_stats momentum eps'
    options = dict(running_mean=None, weight=None, bias=None, use_input_stats=True, eps=1e-5)
    options |= by_name(names, args, kwargs)
    if options['running_mean'] is not None or not options['use_input_stats']:
        return mark(function(input, **options), None)
    parameters = (options[name] for name in ('weight', 'bias', 'eps'))
    return group_norm(F.group_norm, input, input.shape[1], *parameters)


def batch_norm(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In training, statistics over the cells of all images. These depend on the batch, but not on
    its padding."""
    names = 'running_mean running_var weight bias training momentum eps'
    options = dict(weight=None, bias=None, training=False, momentum=0.1, eps=1e-5)
    options |= by_name(names, args, kwargs)
    extent = with_parameters(extent_of(input), *options.values())
    if extent is None or extent.whole or not options['training']:
        return mark(function(input, **options), extent)
    outside = extent.outside(input.shape[2:])
    x, mean, variance = standardized(input, outside, (0, 2, 3), options['eps'])
    if options['running_mean'] is not None and options['running_var'] is not None:
        rows, columns = extent.sides
        count = (rows * columns).sum()
        unbiased = variance * (count / (count - 1).clamp(min=1))
        with torch.no_grad():
            for name, new in (('running_mean', mean), ('running_var', unbiased)):
                running = options[name]
                running.lerp_(new.flatten().to(running.dtype), options['momentum'])
    return mark(affine(x, input, options['weight'], options['bias']), extent)


def interpolate(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Each image by its own factor.

    A size is that of the map from whose `shape` it is read, else of the first map of this size, or
    of the map at a stride of a power of two that has it.
    """
    names = 'size scale_factor mode align_corners recompute_scale_factor antialias'
    options = by_name(names, args, kwargs)
    old, factor, new, one_factor = map_extent(input), options.get('scale_factor'), None, True
    if old is not None and factor is not None:
        fractions = [Fraction(f).limit_denominator(64) for f in pair(factor)]
        new = old.changed(*((q.numerator, 0, q.denominator) for q in fractions))
        size = tuple(int(n * f) for n, f in zip(input.shape[2:], pair(factor)))
        exact = fractions == [Fraction(f) for f in pair(factor)]
        one_factor = exact and not options.get('recompute_scale_factor')
    elif old is not None:
        size = pair(options['size'])
        new = of_size(old.region, size)
        if new is not None:
            factors = [b // a if a else 0 for a, b in zip(input.shape[2:], size)]
            one_factor = old.changed(*((k, 0, 1) for k in factors)) == new
            one_factor |= new.changed((1, 1, 2), (1, 1, 2)) == old
    if old is None or new is None:
        return mark(function(input, **options), None)
    if new == old and factor is None:
        return mark(input.clone(), old)
    if one_factor and options.get('mode', 'nearest') == 'nearest':
        return mark(function(input, **options), new)

    def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
        return function(x, **options | (dict(size=size) if factor is None else {}))

    return each_alone(resized, input, old, new, size)


def adaptive_pool2d(
    function: Callable,
    input: Tensor,
    output_size: Union[int, Sequence[Optional[int]]],
    return_indices: bool = False,
) -> Any:
    """Means or maxima over equal parts of each image."""
    old, new, size = map_extent(input), None, pair(output_size)
    is_size = not isinstance(output_size, int) and None not in size and size != (1, 1)
    if old is not None and compiler_is_used() and is_size:
        new = of_size(old.region, size)
    elif old is not None:
        formulas = [
            own if n is None else n.formula if isinstance(n, Side) else ((0, n, 1),)
            for n, own in zip(size, old[1:])
        ]
        new = None if None in formulas else Extent(old.region, *formulas)
    if old is None or new is None or return_indices:
        more = (return_indices,) if return_indices else ()
        return mark(function(input, output_size, *more), None)
    size = tuple(side if n is None else int(n) for n, side in zip(size, input.shape[2:]))
    return each_alone(function, input, old, new, size)


def over_axes(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Sums, means and extrema: over axes of the map, those of each image."""
    extent = extent_of(input)
    options = {k: v for k, v in by_name('dim keepdim', args, kwargs).items() if v is not None}
    dim, keepdim = options.pop('dim', options.pop('axis', ())), options.pop('keepdim', False)
    dims = {d % max(input.dim(), 1) for d in (dim if isinstance(dim, Sequence) else [dim])}
    if extent is None or input.dim() != 4 or not dims or 0 in dims or options:
        result = function(input, *args, **kwargs)
        return mark(result, extent if extent and dims and 0 not in dims and extent.whole else None)
    name = function.__name__
    if dims & {2, 3}:
        least = lowest(input.dtype) if name in ('amax', 'amin') else 0.0
        input = clear(input, extent, -least if name == 'amin' else least)
    result = function(input, *args, **kwargs)
    if name in ('amax', 'amin') and dims & {2, 3}:  # 0 where an image has no cells
        empty = (extent.sides[0] == 0) | (extent.sides[1] == 0)
        result = result.masked_fill(empty.view(-1, *[1] * (result.dim() - 1)), 0)
    if name == 'mean' and not extent.whole:
        for axis, side in zip((2, 3), extent.sides):
            if axis in dims:
                count = side.clamp(min=1).view(-1, *[1] * (result.dim() - 1))
                count = count.to(torch.promote_types(result.dtype, torch.float32))
                result = result * (input.shape[axis] / count).to(result.dtype)
    if not keepdim and not {2, 3} <= dims:  # (B, w), (B, h, w)
        return mark(result, None)
    formulas = (ONE if axis in dims else own for axis, own in zip((2, 3), extent[1:]))
    return cleared(result, Extent(extent.region, *formulas))


def over_channels(position: int) -> Callable:
    """The rule of functions that keep the extent where their `dim` is that of the channels.

    `position` is that of `dim` among the arguments.
    """

    def rule(function: Callable, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        first = args[0] if args else kwargs.get('tensors', kwargs.get('input'))
        dim = args[position] if len(args) > position else kwargs.get('dim', kwargs.get('axis'))
        operands = first if isinstance(first, (tuple, list)) else [first]
        extent = joint_extent(operands)
        axes = {x.dim() for x in operands}
        of_maps = axes == {4} or (extent is not None and extent.whole and min(axes) > 1)
        if not of_maps or not isinstance(dim, int) or {dim % n for n in axes} != {1}:
            extent = None
        for part in [result] if isinstance(result, Tensor) else result:
            mark(part, extent)
        return result

    return rule


def index(function: Callable, input: Tensor, index: Any) -> Tensor:
    """Slices of channels, and the top left corner of the size of another map."""
    extent = extent_of(input)
    result = function(input, index)
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(i is None or i is Ellipsis or isinstance(i, (slice, int)) for i in parts)
    if extent is None or not plain:
        return mark(result, None)
    if extent.whole:
        return mark(result, vector_extent(extent, result) if parts[:1] == (slice(None),) else None)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (5 - len(parts)), *parts[at + 1 :])
    parts = (*parts, *[slice(None)] * (4 - len(parts)))
    if len(parts) != 4 or parts[0] != slice(None) or not all(isinstance(i, slice) for i in parts):
        return mark(result, None)
    if parts[2:] == (slice(None), slice(None)):
        return mark(result, extent)
    size = tuple(part.stop for part in parts[2:])
    sized = all(isinstance(n, Side) or (compiler_is_used() and isinstance(n, int)) for n in size)
    cut = of_size(extent.region, size) if sized else None
    if cut is None or any(part.start is not None or part.step is not None for part in parts[2:]):
        return mark(result, None)
    formulas = (a if a == b else (frozenset({a, b, CROP}),) for a, b in zip(extent[1:], cut[1:]))
    return mark(result, Extent(extent.region, *formulas))


def overwrite(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Random numbers in place of all values."""
    extent = joint_extent((input, *args, *kwargs.values()))
    result = function(input, *args, **kwargs)
    if not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
        result.origin = None  # type: ignore[attr-defined]
    return mark(result, extent)


def constant(function: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor that does not depend on the values of the map."""
    return function(*args, **kwargs)


def reshape(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The shape of vectors, and of maps whose cells all belong to their image, may change."""
    extent = extent_of(input)
    result = function(input, *args, **kwargs)
    if function.__name__.startswith('squeeze'):
        # Without an axis, the batch of an image alone goes, too.
        dims = pair((args or tuple(kwargs.values()) or (0,))[0])
        extent = None if any(dim % max(input.dim(), 1) == 0 for dim in dims) else extent
    if extent is None or result.shape == input.shape:
        return mark(result, extent)
    if not extent.whole or result.dim() == 0 or len(result) != len(input):
        return mark(result, None)
    return mark(result, vector_extent(extent, result))


def over_features(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    extent = with_parameters(extent_of(input), *args, *kwargs.values())
    result = function(input, *args, **kwargs)
    if extent is None or not extent.whole or input.dim() < 2:
        return mark(result, None)
    return mark(result, vector_extent(extent, result))


def pad(
    function: Callable,
    input: Tensor,
    pad: Sequence[int],
    mode: str = 'constant',
    value: Optional[float] = None,
) -> Tensor:
    """A constant at the border of each image."""
    own = map_extent(input)
    if own is None or mode != 'constant' or len(pad) > 6:
        return mark(function(input, pad, mode, value), None)
    left, right, top, bottom = (*pad, 0, 0, 0, 0)[:4]
    extent = own.changed((1, top + bottom, 1), (1, left + right, 1))
    return mark(function(clear(input, own, value or 0), pad, mode, value), extent)


def shape(function: Callable, input: Tensor, *args: Any) -> Any:
    """`x.shape` and `x.size()`, of `Side`s.

    The compiler takes only numbers: where it is used, a size is always that of a known map.
    """
    result = function(input, *args)
    extent = extent_of(input)
    sizeless = extent is not None and (input.dim() != 4 or extent.region.size is None)
    if sizeless or compiler_is_used():
        return result
    formulas = (extent.rows, extent.columns) if extent else (None,) * input.dim()
    sides = [*input.shape[:2], *(Side.of(n, f) for n, f in zip(input.shape[2:], formulas))]
    return torch.Size(sides) if isinstance(result, torch.Size) else sides[args[0]]


# What the rules compute with.


def compiler_is_used() -> bool:
    """True if something was compiled in this process."""
    backends = getattr(sys.modules.get('torch._dynamo.eval_frame'), 'cached_backends', {})
    return any(backend is not None for backend in backends.values())  # None: of `disable`


def by_name(names: str, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a function after its input, by their names."""
    return dict(zip(names.split(), args)) | kwargs


def pair(value: Any) -> tuple:
    """A number for both axes, or one for each."""
    value = tuple(value) if isinstance(value, Sequence) else (value,)
    return value * 2 if len(value) == 1 else value


def with_parameters(extent: Optional[Extent], *parameters: Any) -> Optional[Extent]:
    """The extent, or None if a parameter comes from a padded batch."""
    lost = any(
        isinstance(x, Tensor) and (extent_of(x) or getattr(x, 'origin', None)) for x in parameters
    )
    return None if lost else extent


def each_alone(
    call: Callable, input: Tensor, old: Extent, new: Extent, size: tuple[int, int]
) -> Tensor:
    """A map (B, C, *size) of what `call` returns for each image without its padding.

    Its arguments are the image's cells (1, C, h, w) and the size that its result should have. The
    map loses the region if that is another: 25 * 4.6 is less than 115.
    """
    if 0 in (len(input), *size):  # PyTorch's result or error
        return mark(call(input, size), new)
    images, claimed = [], True
    for x, (rows, columns), its_size in zip(input.split(1), old.lengths, new.lengths):
        if rows * columns * its_size[0] * its_size[1] == 0:
            y = x[..., :0, :0]
        else:
            y = call(x[..., :rows, :columns], its_size)
            claimed &= y.shape[2:] == its_size
        images.append(F.pad(y, (0, size[1] - y.shape[3], 0, size[0] - y.shape[2])))
    return mark(torch.cat(images), new if claimed else None)


def cleared(x: Any, extent: Optional[Extent]) -> Any:
    """The map with this extent, zero in the padding."""
    if extent is None or not isinstance(x, Tensor) or not extent.fits(x):
        return mark(x, None)
    return mark(clear(x, extent) if x.dim() == 4 else x, extent)


def vector_extent(extent: Extent, x: Tensor) -> Extent:
    """The extent of one vector or small map for each image."""
    height, width = x.shape[2:] if x.dim() == 4 else (1, 1)
    return Extent(extent.region, ((0, int(height), 1),), ((0, int(width), 1),))


def standardized(
    x: Tensor, outside: Tensor, dims: tuple[int, ...], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / std over the cells inside, in at least float32; mean and variance."""
    x = x.masked_fill(outside, 0).to(torch.promote_types(x.dtype, torch.float32))
    cells = (~outside).expand(x.shape[0], *[1] * (x.dim() - 3), *x.shape[-2:]).to(x.dtype)
    count = cells.sum(dims, keepdim=True)
    if x.dim() == 5:
        count = count * x.shape[2]
    count = count.clamp(min=1)
    mean = x.sum(dims, keepdim=True) / count
    x = x - mean
    variance = x.masked_fill(outside, 0).square().sum(dims, keepdim=True) / count
    return x * (variance + eps).rsqrt(), mean, variance


def affine(x: Tensor, input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    """x * weight + bias, in the dtype of the norm's input (float32 under autocast)."""
    if weight is not None:
        x = x * weight.to(x.dtype).view(-1, 1, 1)
    if bias is not None:
        x = x + bias.to(x.dtype).view(-1, 1, 1)
    if graph_is_captured():
        return x.to(input.dtype)
    return x.to(torch.group_norm(input[:1, :1, :1, :1], 1).dtype)


def windows(
    kernel_size: Union[int, Sequence[int]],
    stride: Union[int, Sequence[int]] = 1,
    padding: Union[int, Sequence[int], str] = 0,
    dilation: Union[int, Sequence[int]] = 1,
    ceil_mode: bool = False,
    **_: Any,
) -> list[tuple[int, int, int]]:
    """Steps of `Extent.changed` for convolution and pooling, from their options."""
    kernels, strides, dilations = pair(kernel_size), pair(stride), pair(dilation)
    if isinstance(padding, str):
        both = [d * (k - 1) if padding == 'same' else 0 for k, d in zip(kernels, dilations)]
    else:
        both = [2 * p for p in pair(padding)]
    steps = []
    for k, s, p, d in zip(kernels, strides, both, dilations):
        addend = p - d * (k - 1) - 1 + s
        if ceil_mode:  # the last window must begin inside the image or the padding before it
            addend = min(addend + s - 1, p // 2 + s - 1)
        steps.append((1, addend, s))
    return steps


def of_size(region: Region, size: Sequence[Any]) -> Optional[Extent]:
    """The extent of a map of this size."""
    if any(isinstance(side, Side) for side in size):
        formulas = [getattr(side, 'formula', None) for side in size]
        return None if None in formulas else Extent(region, *formulas)
    known = region.known.get(str(tuple(size)))
    if known is None and region.size is not None and min(size) > 0:
        stride = 1 << (region.size[0] // size[0]).bit_length() - 1
        extent = region.at_stride(max(stride, 1))
        return extent if extent.size == tuple(size) else None
    return known and Extent(region, *known)


# Functions and methods by name; those in place end in an underscore.
ELEMENT_WISE = """
    add sub subtract mul multiply neg negative abs absolute square positive
    __radd__ __rsub__ __rmul__ lerp where maximum minimum clamp clamp_min clamp_max clip
    masked_fill fill zero copy nan_to_num sign sgn round floor ceil trunc frac
    relu relu6 leaky_relu prelu rrelu elu celu selu gelu silu mish hardtanh hardswish hardshrink
    softshrink tanhshrink hardsigmoid sigmoid logsigmoid tanh softplus softsign threshold
    sin cos atan arctan asinh arcsinh erf
    dropout feature_dropout dropout1d dropout2d alpha_dropout expand_as
    eq ne gt ge lt le greater less isnan isinf isfinite logical_and logical_or logical_not
    logical_xor signbit bitwise_and bitwise_or bitwise_xor bitwise_not
    __and__ __or__ __xor__ __invert__
""".split()
WITH_POLES = """
    div divide true_divide floor_divide __rdiv__ __rfloordiv__ __rpow__ __ipow__ __idiv__ pow
    float_power __pow__ sqrt rsqrt exp exp2 expm1 log log2 log10 log1p reciprocal addcmul addcdiv
    hypot atan2 arctan2 logaddexp logaddexp2 xlogy logit erfc erfinv lgamma digamma sinh cosh tan
    asin arcsin acos arccos atanh arctanh fmod remainder fmax fmin sinc i0 deg2rad
    rad2deg heaviside copysign ldexp
""".split()
CASTS = """
    clone contiguous detach to type type_as float half bfloat16 double cpu cuda pin_memory
    requires_grad_ view_as
""".split()


def named(names: Sequence[str]) -> list[Callable]:
    """The functions and methods with these names, and those in place."""
    kinds = (
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
    )
    homes = (torch, Tensor, F, torch._C._nn, torch.special)
    names = [f'{name}{suffix}' for name in names for suffix in ('', '_')]
    found = (getattr(home, name, None) for home in homes for name in names)
    return [function for function in found if isinstance(function, kinds)]


# Rules by the names of their functions.
NAMES: dict[Callable, list[str]] = {
    element_wise: ELEMENT_WISE,
    element_wise_with_poles: WITH_POLES,
    cast: [*CASTS, 'zeros_like', 'ones_like', 'full_like'],
    overwrite: ['uniform_', 'normal_', 'bernoulli_', 'exponential_', 'random_'],
    constant: ['new_ones', 'new_full', 'new_tensor'],
    reshape: ['view', 'reshape', 'flatten', 'unsqueeze', 'squeeze', 'unflatten'],
    adaptive_pool2d: ['adaptive_avg_pool2d'],
    over_axes: ['sum', 'mean', 'amax', 'amin'],
    over_channels(1): ['softmax', 'log_softmax', 'cat', 'concat', 'concatenate'],
    over_channels(2): ['split', 'chunk'],
    over_features: ['linear'],
}
SAME_NAME = (conv2d, conv_transpose2d, max_pool2d, avg_pool2d, group_norm, pad)
NAMES |= {rule: [rule.__name__] for rule in SAME_NAME}

# The functions that keep the extent.
RULES: dict[Callable, Callable] = {
    **{function: rule for rule, names in NAMES.items() for function in named(names)},
    conv3x3: conv2d,
    F.adaptive_max_pool2d: adaptive_pool2d,
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
    F.interpolate: interpolate,
    Tensor.__getitem__: index,
    Tensor.shape.__get__: shape,
    Tensor.size: shape,
}
