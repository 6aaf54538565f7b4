"""Operations that give each image of a padded batch the result that it has alone, in graphs.

`cpvt_pyramid.masked_map` does the same for eager inference, with a tensor subclass that graphs
cannot hold. In a graph the sizes of the images are tensors, so that resizing and adaptive pooling
are products with matrices of weights (B, out, in) computed from them. The latter have no other form
in ONNX, either.

Shapes: B batch, C channels, H x W map.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import regions


class EachImage(TorchFunctionMode):
    """Inside this context, functions of maps with an extent give each image its own result.

    Functions that are not in `GRAPH_RULES` return maps without one. A map that is resized to a
    height and width gets the extent of the first map that had this size.

    Args:
        maps: (B, C, h, w) each, where the padding begins.
        valid: (B, 2), true height and width of each image. None: nothing is padding.
        strides: of the maps.
    """

    def __init__(
        self, maps: Sequence[Tensor], valid: Optional[Tensor], strides: Sequence[int]
    ) -> None:
        super().__init__()
        region = None if valid is None else regions.Region(valid)
        for x, stride in zip(maps, strides) if region is not None else ():
            regions.mark(x, region.at_stride(stride))

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        rule = GRAPH_RULES.get(function)
        return (partial(rule, function) if rule else function)(*args, **(kwargs or {}))


def resized_each(
    function: Callable,
    input: Tensor,
    size: Optional[Sequence[Union[int, torch.SymInt]]] = None,
    scale_factor: Union[float, Sequence[float], None] = None,
    mode: str = 'nearest',
    align_corners: Optional[bool] = None,
    *options: Any,
    **more: Any,
) -> Tensor:
    """Nearest by the whole factor of the padded map; bilinear by that of each image."""
    old, new = regions.extent_of(input), None
    given = () if scale_factor is None else regions.pair(scale_factor)
    factors = tuple(map(int, given))
    if factors and factors == given:  # a whole size, in a graph a symbol
        size, scale_factor = [n * f for n, f in zip(input.shape[2:], factors)], None
        new = old and old.changed(*((factor, 0, 1) for factor in factors))
    elif old is not None and size is not None:
        new = regions.of_size(old.region, size)
    if new is None:
        return function(input, size, scale_factor, mode, align_corners, *options, **more)
    if mode == 'nearest':
        return regions.mark(function(input, size, mode=mode), new)
    rows, columns = (
        regions.resize_weights(*sides, align_corners)
        for sides in zip(old.sides, input.shape[2:], new.sides, size)
    )
    return regions.mark(regions.resample(rows, input, columns), new)


def pooled_parts(
    function: Callable, input: Tensor, output_size: Union[int, Sequence[int]]
) -> Tensor:
    """Means over equal parts of each image."""
    size, counts = input.shape[2:], regions.pair(output_size)
    extent = regions.extent_of(input)
    sides = extent.sides if extent else [torch.full((1,), n, device=input.device) for n in size]
    rows, columns = (regions.pool_weights(*axis) for axis in zip(sides, size, counts))
    result = regions.resample(rows, input, columns)
    return regions.mark(result, extent and regions.vector_extent(extent, result))


# Rules that compute with the numbers of cells, such as those of slices, are not for symbols.
SAME_IN_GRAPHS = (
    regions.batch_norm, regions.cast, regions.conv2d, regions.conv_transpose2d,
    regions.element_wise, regions.element_wise_with_poles, regions.group_norm, regions.max_pool2d,
)  # fmt: skip
GRAPH_RULES = {
    **{function: rule for function, rule in regions.RULES.items() if rule in SAME_IN_GRAPHS},
    **{f: regions.RULES[f] for f in (torch.cat, torch.concat, torch.mean, Tensor.mean)},
    F.interpolate: resized_each,
    F.adaptive_avg_pool2d: pooled_parts,
}
