"""Operations that give each image of a padded batch the result that it has alone.

`cpvt_pyramid.masked_map` does the same for eager inference, with a tensor subclass that graphs
cannot hold, and at multiples of the stride. In a graph the sizes of the images are tensors, so that
resizing and adaptive pooling are products with matrices of weights (B, out, in) computed from them.
The latter have no other form in ONNX, either.

Shapes: B batch, C channels, H x W map.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..masked_map import CASTS, ELEMENT_WISE, named, pair

Sizes = Sequence[Union[int, torch.SymInt]]


class Extent:
    """How many rows and columns of a map belong to each image of a padded batch.

    Args:
        rows: (B,) integers.
        columns: (B,) integers.
    """

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        self.sides = rows, columns
        self.made: dict[Any, Any] = {}  # masks and other extents, each once in a graph

    def outside(self, size: Sizes) -> Tensor:
        """(B, 1, H, W) booleans, True in the padding of a map of this size."""
        key = str(tuple(size))  # of symbols, in a graph
        if key not in self.made:
            rows, columns = (
                torch.arange(length, device=side.device) >= side[:, None]
                for length, side in zip(size, self.sides)
            )
            self.made[key] = (rows[:, None, :, None]) | columns[:, None, None]
        return self.made[key]

    def clear(self, x: Tensor, value: float = 0) -> Tensor:
        """The map (B, C, H, W) with this value in the padding."""
        return x.masked_fill(self.outside(x.shape[2:]), value)

    def changed(self, *formula: tuple[int, int, int]) -> 'Extent':
        """(n * factor + add) // divisor for each axis, from triples of these."""
        if formula == ((1, 0, 1), (1, 0, 1)):
            return self
        if formula not in self.made:
            self.made[formula] = Extent(
                *((n * factor + add) // divisor
                  for n, (factor, add, divisor) in zip(self.sides, formula))
            )  # fmt: skip
        return self.made[formula]


class EachImage(TorchFunctionMode):
    """Inside this context, functions of maps with an extent give each image its own result.

    Functions that are not in `RULES` return maps without one. A map that is resized to a height and
    width gets the extent of the first map that had this size.

    Args:
        maps: (B, C, H, W) each, where the padding begins.
        valid: (B, 2), true height and width of each image in pixels. None: nothing is padding.
        strides: of the maps.
    """

    def __init__(
        self, maps: Sequence[Tensor], valid: Optional[Tensor], strides: Sequence[int]
    ) -> None:
        super().__init__()
        self.known: dict[str, Extent] = {}  # by the size of the map
        for x, stride in zip(maps, strides) if valid is not None else ():
            self.mark(x, Extent(*((valid + stride - 1) // stride).unbind(1)))

    def mark(self, x: Tensor, extent: Optional[Extent]) -> Tensor:
        """Say which part of a map is image; returns the map."""
        x.extent = extent
        if extent is not None:
            self.known.setdefault(str(tuple(x.shape[2:])), extent)
        return x

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        rule = RULES.get(function)
        if rule is None:
            return function(*args, **(kwargs or {}))
        return rule(self, function, *args, **(kwargs or {}))

    # Rules: each is called with the function and its arguments.

    def element_wise(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Each cell of the result depends on the same cell of the operands."""
        result = function(*args, **kwargs)
        operands = args[0] if args and isinstance(args[0], (tuple, list)) else args
        extent = extent_of(*operands, *kwargs.values())
        if extent is not None and isinstance(result, Tensor) and result.dim() == 4:
            self.mark(result, extent)
        return result

    def conv2d(
        self,
        function: Callable,
        input: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        stride: Union[int, tuple] = 1,
        padding: Union[int, tuple] = 0,
        dilation: Union[int, tuple] = 1,
        groups: int = 1,
    ) -> Tensor:
        options = (stride, padding, dilation)
        extent = extent_of(input)
        if extent is None:
            return function(input, weight, bias, *options, groups)
        result = function(extent.clear(input), weight, bias, *options, groups)
        return self.mark(result, extent.changed(*windows(weight.shape[2:], *options)))

    def conv_transpose2d(
        self,
        function: Callable,
        input: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        stride: Union[int, tuple] = 1,
        padding: Union[int, tuple] = 0,
        output_padding: Union[int, tuple] = 0,
        groups: int = 1,
        dilation: Union[int, tuple] = 1,
    ) -> Tensor:
        options = (stride, padding, output_padding, groups, dilation)
        extent = extent_of(input)
        if extent is None:
            return function(input, weight, bias, *options)
        result = function(extent.clear(input), weight, bias, *options)
        axes = zip(weight.shape[2:], *map(pair, (stride, padding, output_padding, dilation)))
        formula = ((s, d * (k - 1) + more + 1 - s - 2 * p, 1) for k, s, p, more, d in axes)
        return self.mark(result, extent.changed(*formula))

    def max_pool2d(
        self,
        function: Callable,
        input: Tensor,
        kernel_size: Union[int, tuple],
        stride: Union[int, tuple, None] = None,
        padding: Union[int, tuple] = 0,
        dilation: Union[int, tuple] = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        options = (kernel_size, stride or kernel_size, padding, dilation)
        extent = extent_of(input)
        if extent is None or ceil_mode or return_indices:
            return function(input, *options, ceil_mode, return_indices)
        result = function(extent.clear(input, torch.finfo(input.dtype).min), *options)
        return self.mark(result, extent.changed(*windows(*options)))

    def group_norm(
        self,
        function: Callable,
        input: Tensor,
        num_groups: int,
        weight: Optional[Tensor] = None,
        bias: Optional[Tensor] = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Mean and variance over the cells inside each image."""
        extent = extent_of(input)
        if extent is None:
            return function(input, num_groups, weight, bias, eps)
        inside = ~extent.outside(input.shape[2:])[:, :, None]  # (B, 1, 1, H, W)
        x = extent.clear(input).float()
        x = x.unflatten(1, (num_groups, -1))  # (B, groups, C / groups, H, W)
        count = inside.sum((2, 3, 4), keepdim=True).clamp(min=1) * x.shape[2]
        x = x - x.sum((2, 3, 4), keepdim=True) / count
        variance = (x * inside).square().sum((2, 3, 4), keepdim=True) / count
        x = (x * (variance + eps).rsqrt()).flatten(1, 2).to(input.dtype)
        if weight is not None:
            x = x * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
        return self.mark(x, extent)

    def interpolate(
        self,
        function: Callable,
        input: Tensor,
        size: Optional[Sizes] = None,
        scale_factor: Union[float, Sequence[float], None] = None,
        mode: str = 'nearest',
        align_corners: Optional[bool] = None,
        *options: Any,
        **more: Any,
    ) -> Tensor:
        """Nearest by the whole factor of the padded map; bilinear by that of each image."""
        old, new = extent_of(input), None
        factors = [] if scale_factor is None else [int(factor) for factor in pair(scale_factor)]
        if factors and factors == list(pair(scale_factor)):  # a whole size, in a graph a symbol
            size, scale_factor = [n * f for n, f in zip(input.shape[2:], pair(factors))], None
            new = old and old.changed(*((factor, 0, 1) for factor in pair(factors)))
        elif old is not None and size is not None:
            new = self.known.get(str(tuple(size)))
        if new is None:
            return function(input, size, scale_factor, mode, align_corners, *options, **more)
        if mode == 'nearest':
            return self.mark(function(input, size, mode=mode), new)
        rows, columns = (
            resize_weights(*sides, align_corners)
            for sides in zip(old.sides, input.shape[2:], new.sides, size)
        )
        return self.mark(resample(rows, input, columns), new)

    def adaptive_avg_pool2d(
        self, function: Callable, input: Tensor, output_size: Union[int, Sequence[int]]
    ) -> Tensor:
        """Means over equal parts of each image."""
        size, counts = input.shape[2:], pair(output_size)
        extent = extent_of(input)
        sides = extent.sides if extent else [torch.full((1,), n, device=input.device) for n in size]
        rows, columns = map(pool_weights, sides, size, counts)
        result = resample(rows, input, columns)
        if extent is not None:
            result.extent = Extent(*(torch.full_like(side, n) for side, n in zip(sides, counts)))
        return result

    def mean(
        self,
        function: Callable,
        input: Tensor,
        dim: Union[int, Sequence[int], None] = None,
        keepdim: bool = False,
        **options: Any,
    ) -> Tensor:
        """Over both axes of the map: of each image."""
        dims = {d % 4 for d in pair(dim)} if dim is not None else set()
        if extent_of(input) is None or dims != {2, 3}:
            return function(input, *(() if dim is None else (dim, keepdim)), **options)
        result = self.adaptive_avg_pool2d(F.adaptive_avg_pool2d, input, 1)
        return result if keepdim else result.flatten(1)


RULES: dict[Callable, Callable] = {
    **dict.fromkeys(
        named(ELEMENT_WISE + CASTS) + [torch.cat, torch.concat], EachImage.element_wise
    ),
    F.conv2d: EachImage.conv2d,
    F.conv_transpose2d: EachImage.conv_transpose2d,
    F.max_pool2d: EachImage.max_pool2d,
    F.group_norm: EachImage.group_norm,
    F.interpolate: EachImage.interpolate,
    F.adaptive_avg_pool2d: EachImage.adaptive_avg_pool2d,
    **dict.fromkeys((torch.mean, Tensor.mean), EachImage.mean),
}


def extent_of(*operands: Any) -> Optional[Extent]:
    """The extent of the first operand that has one."""
    found = (getattr(x, 'extent', None) for x in operands if isinstance(x, Tensor))
    return next((extent for extent in found if extent is not None), None)


# What the rules compute with.


def windows(
    kernel: Union[int, Sequence[int]],
    stride: Union[int, tuple],
    padding: Union[int, tuple],
    dilation: Union[int, tuple],
) -> list[tuple[int, int, int]]:
    """The number of windows along each axis, as `Extent.changed` takes it."""
    axes = zip(*map(pair, (kernel, stride, padding, dilation)))
    return [(1, 2 * p - d * (k - 1) - 1 + s, s) for k, s, p, d in axes]


def resize_weights(
    old: Tensor,
    old_length: Union[int, torch.SymInt],
    new: Tensor,
    new_length: Union[int, torch.SymInt],
    align_corners: Optional[bool] = False,
) -> Tensor:
    """Weights of bilinear interpolation, (B, new_length, old_length), for each image.

    Args:
        old: (B,), cells of the images.
        old_length: cells of the padded map.
        new: (B,), cells of the resized images.
        new_length: cells of the resized padded map.
        align_corners: as in `F.interpolate`.
    """
    at = torch.arange(new_length, device=old.device, dtype=torch.float32)
    old, new = (side.clamp(min=1).to(torch.float32)[:, None] for side in (old, new))
    if align_corners:
        source = at * (old - 1) / (new - 1).clamp(min=1)
    else:
        source = (at + 0.5) * (old / new) - 0.5
    source = source.clamp(min=0).minimum(old - 1)[..., None]  # (B, new_length, 1)
    cells = torch.arange(old_length, device=old.device, dtype=torch.float32)
    return (1 - (source - cells).abs()).clamp(min=0)


def pool_weights(side: Tensor, length: Union[int, torch.SymInt], count: int) -> Tensor:
    """Weights of adaptive average pooling, (B, count, length): `count` parts of each image.

    Args:
        side: (B,), cells of the images.
        length: cells of the padded map.
        count: number of parts.
    """
    index, side = torch.arange(count, device=side.device), side[:, None]
    start = (index * side // count)[..., None]  # (B, count, 1)
    stop = (((index + 1) * side + count - 1) // count)[..., None]
    at = torch.arange(length, device=side.device)
    inside = ((at >= start) & (at < stop)).to(torch.float32)
    return inside / (stop - start).clamp(min=1)


def resample(rows: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """rows @ x @ columns^T, for each image and channel."""
    rows, columns = rows[:, None].to(x.dtype), columns[:, None].transpose(2, 3).to(x.dtype)
    return rows @ (x @ columns)
