"""Operations that give each image of a padded batch the result that it has alone, in graphs.

`cpvt_pyramid.masked_map` does the same for eager inference, with a tensor subclass that graphs
cannot hold. In a graph the sizes of the images are tensors, so that resizing and adaptive pooling
are products with matrices of weights (B, out, in) computed from them. The latter have no other form
in ONNX, either.

Shapes: B batch, C channels, H x W map.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..regions import (
    CASTS,
    ELEMENT_WISE,
    WITH_POLES,
    Region,
    by_name,
    conv2d,
    conv_transpose2d,
    extent_of,
    group_norm,
    mark,
    max_pool2d,
    named,
    of_size,
    pair,
    pool_weights,
    resample,
    resize_weights,
    vector_extent,
)

Sizes = Sequence[Union[int, torch.SymInt]]


class EachImage(TorchFunctionMode):
    """Inside this context, functions of maps with an extent give each image its own result.

    Functions that are not in `GRAPH_RULES` return maps without one. A map that is resized to a
    height and width gets the extent of the first map that had this size.

    Args:
        maps: (B, C, H, W) each, where the padding begins.
        valid: (B, 2), true height and width of each image in pixels. None: nothing is padding.
        strides: of the maps.
    """

    def __init__(
        self, maps: Sequence[Tensor], valid: Optional[Tensor], strides: Sequence[int]
    ) -> None:
        super().__init__()
        region = None if valid is None else Region(valid)
        for x, stride in zip(maps, strides) if region is not None else ():
            mark(x, region.at_stride(stride))

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        rule = GRAPH_RULES.get(function, plain_call)
        return rule(function, *args, **(kwargs or {}))


# Rules: each is called with the function and its arguments.


def plain_call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def of_cells(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Each cell of the result depends on the same cell of the operands, which go together."""
    result = function(*args, **kwargs)
    operands = args[0] if args and isinstance(args[0], (tuple, list)) else args
    found = map(extent_of, (*operands, *kwargs.values()))
    extent = next((extent for extent in found if extent is not None), None)
    if extent is not None and isinstance(result, Tensor) and result.dim() == 4:
        mark(result, extent)
    return result


def whole_windows(function: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`max_pool2d` without its other modes."""
    names = 'kernel_size stride padding dilation ceil_mode return_indices'
    options = by_name(names, args, kwargs)
    if extent_of(input) is None or options.get('ceil_mode') or options.get('return_indices'):
        return function(input, *args, **kwargs)
    return max_pool2d(function, input, *args, **kwargs)


def resized_each(
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
        size, scale_factor = [n * f for n, f in zip(input.shape[2:], factors)], None
        new = old and old.changed(*((factor, 0, 1) for factor in factors))
    elif old is not None and size is not None:
        new = of_size(old.region, size)
    if new is None:
        return function(input, size, scale_factor, mode, align_corners, *options, **more)
    if mode == 'nearest':
        return mark(function(input, size, mode=mode), new)
    rows, columns = (
        resize_weights(*sides, mode, align_corners)
        for sides in zip(old.sides, input.shape[2:], new.sides, size)
    )
    return mark(resample(rows, input, columns), new)


def pooled_parts(
    function: Callable, input: Tensor, output_size: Union[int, Sequence[int]]
) -> Tensor:
    """Means over equal parts of each image."""
    size, counts = input.shape[2:], pair(output_size)
    extent = extent_of(input)
    sides = extent.sides if extent else [torch.full((1,), n, device=input.device) for n in size]
    rows, columns = (
        pool_weights(side, n, count, count) for side, n, count in zip(sides, size, counts)
    )
    result = resample(rows, input, columns)
    return mark(result, vector_extent(extent, result)) if extent is not None else result


def mean(
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
    result = pooled_parts(F.adaptive_avg_pool2d, input, 1)
    return result if keepdim else result.flatten(1)


GRAPH_RULES: dict[Callable, Callable] = {
    **dict.fromkeys(named(ELEMENT_WISE + WITH_POLES + CASTS) + [torch.cat, torch.concat], of_cells),
    **dict.fromkeys((F.batch_norm, torch.batch_norm), of_cells),
    F.conv2d: conv2d,
    F.conv_transpose2d: conv_transpose2d,
    F.max_pool2d: whole_windows,
    F.group_norm: group_norm,
    F.interpolate: resized_each,
    F.adaptive_avg_pool2d: pooled_parts,
    **dict.fromkeys((torch.mean, Tensor.mean), mean),
}
