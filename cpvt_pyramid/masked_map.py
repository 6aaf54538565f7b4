"""Maps of a padded batch that know which of their cells are image.

The backbone zeroes what is outside the images, but the first bias of a neck fills the padding
again, and the next convolution, norm, pooling or resizing mixes it into the images. A `MaskedMap`
carries the region of the images through these operations, so that an image's values are the same
alone and in any batch. `RULES`, at the end, lists the operations that keep the region. All others
work as usual and return plain tensors.

Values outside the images are arbitrary. Rules that mix cells clear them first.

Shapes: B batch, C channels, H x W image in pixels, h x w map.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, TypeGuard, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .mask import check_valid
from .ops.resize import interpolation_weights


class Region:
    """The images of a padded batch, each in the top left corner.

    Args:
        valid: (B, 2), true height and width of each image in pixels; 0 for none.
        size: H and W, height and width of the batch in pixels.
    """

    def __init__(self, valid: Tensor, size: Sequence[int]) -> None:
        self.valid = valid.long()
        self.size = tuple(size)
        self.masks: dict[int, Tensor] = {}
        self.moved: dict[torch.device, Region] = {}

    def to(self, device: torch.device) -> 'Region':
        """The region on another device, one object for all maps of this region."""
        if device not in self.moved:
            self.moved[device] = Region(self.valid.to(device), self.size)
        return self.moved[device]

    def map_size(self, stride: int) -> tuple[int, int]:
        """h and w of the map at a stride in pixels."""
        return -(-self.size[0] // stride), -(-self.size[1] // stride)

    def sides(self, stride: int) -> Tensor:
        """(2, B), rows and columns of each image in the map at a stride."""
        return (-(-self.valid // stride)).T

    def outside(self, stride: int) -> Tensor:
        """(B, 1, h, w) booleans, True where a cell of the map at a stride begins outside."""
        if stride not in self.masks:
            with torch.inference_mode(False):  # autograd does not save inference tensors
                rows, columns = (
                    torch.arange(length, device=self.valid.device) >= side[:, None]
                    for length, side in zip(self.map_size(stride), self.sides(stride))
                )
                self.masks[stride] = (rows[:, :, None] | columns[:, None])[:, None]
        return self.masks[stride]


class Cells(NamedTuple):
    """Where the cells of a map are.

    Args:
        region: the images of the batch.
        stride: of the map, in pixels.
        pooled: the cells divide the region of each image into equal parts, as adaptive pooling
            does, and `stride` is that of the pooled map.
    """

    region: Region
    stride: int
    pooled: bool = False

    def fit(self, x: Tensor) -> bool:
        valid = self.region.valid
        if x.dim() != 4 or len(x) != len(valid) or x.device != valid.device:
            return False
        return self.pooled or tuple(x.shape[2:]) == self.region.map_size(self.stride)


class MaskedMap(Tensor):
    """A map (B, C, h, w) of a padded batch; see `masked` and `RULES`.

    BatchNorm in training computes its statistics over padding as well, as it always does, and
    SyncBatchNorm in training returns a plain tensor, as all functions with their own backward do.
    """

    cells: Optional[Cells] = None  # None: acts as a plain tensor

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            rule = RULES.get(function)
            if rule is None:
                return function(*args, **(kwargs or {}))
            return rule(function, *args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = x = self.detach().clone().requires_grad_(self.requires_grad)
        return masked(x, self.cells)


def masked(x: Tensor, cells: Optional[Cells]) -> Tensor:
    """`x` itself as a `MaskedMap`, or a plain tensor if it is not a map of these cells.

    The class is assigned because `as_subclass` returns a view, and a ReLU in place on a view
    costs a copy of the gradient.
    """
    if cells is not None and cells.fit(x):
        changed: Any = x  # no longer of its declared type
        changed.__class__, changed.cells = MaskedMap, cells
    return x


@torch.compiler.disable  # dynamo cannot trace the change of class
def masked_maps(
    maps: Sequence[Tensor], valid: Tensor, size: Sequence[int], strides: Sequence[int]
) -> tuple[Tensor, ...]:
    """The maps of a padded batch as `MaskedMap`s of one region.

    Args:
        maps: (B, C, h, w) each.
        valid: (B, 2), true height and width of each image in pixels.
        size: H and W of the batch in pixels.
        strides: of the maps, in pixels.
    """
    region = Region(valid.to(maps[0].device), size)
    return tuple(masked(x, Cells(region, stride)) for x, stride in zip(maps, strides))


def padded_batch(images: Tensor, valid: Tensor) -> Tensor:
    """A batch of images, padded at the right and bottom, as a `MaskedMap`.

    Args:
        images: (B, C, H, W).
        valid: (B, 2), true height and width of each image in pixels.

    Raises:
        ValueError: the shapes are others.
    """
    if images.dim() != 4:
        raise ValueError(f'images must be a batch (B, C, H, W), got {tuple(images.shape)}')
    check_valid(valid, images.shape[0])
    return masked_maps([images.view_as(images)], valid, images.shape[2:], [1])[0]


def cells_of(x: Any) -> Optional[Cells]:
    """The cells of a map, or None if it is not a `MaskedMap` or has changed its shape."""
    cells = x.cells if isinstance(x, MaskedMap) else None
    return cells if cells is not None and cells.fit(x) else None


def clear(x: Tensor, cells: Cells, value: float = 0) -> Tensor:
    """The map with this value outside the images."""
    return x if cells.pooled else x.masked_fill(cells.region.outside(cells.stride), value)


def shared_cells(result: Tensor, operands: Sequence[Any]) -> Optional[Cells]:
    """The cells that a result has from those of its operands that are `MaskedMap`s, if they agree.

    One pooled cell for each image goes with any map of the same region.
    """
    known: set[Cells] = set()
    spread: set[Cells] = set()
    for x in operands:
        if isinstance(x, MaskedMap):
            cells = cells_of(x)
            if cells is None:
                return None
            known.add(cells)
            if cells.pooled and x.shape[2:] == (1, 1):
                spread.add(cells)
    if len({cells.region for cells in known}) != 1:
        return None
    found = (known - spread) or known
    return found.pop() if len(found) == 1 and next(iter(found)).fit(result) else None


# Rules: each is called with the function, the arguments, and MaskedMap's handling turned off.


def element_wise(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Each cell of the result depends on the same cell of the operands."""
    result = function(*args, **kwargs)
    operands = (*args, *kwargs.values())
    if isinstance(result, MaskedMap):  # in place, or nothing to do
        result.cells = shared_cells(result, operands)
        return result
    if not isinstance(result, Tensor) or any(result is x for x in operands):
        return result
    return masked(result, shared_cells(result, operands))


def cast(function: Callable, input: Any, *args: Any, **kwargs: Any) -> Any:
    """The same values, in another dtype or on another device."""
    result = function(input, *args, **kwargs)
    if not isinstance(result, Tensor) or isinstance(result, MaskedMap):
        return result
    cells = cells_of(input)
    if cells is not None and result.device != input.device:
        cells = cells._replace(region=cells.region.to(result.device))
    return masked(result, cells)


def conv2d(
    function: Callable,
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    stride: Union[int, tuple] = 1,
    padding: Union[int, tuple, str] = 0,
    dilation: Union[int, tuple] = 1,
    groups: int = 1,
) -> Tensor:
    """Padding of the batch reads as zeros, like the padding of the convolution."""
    cells = cells_of(input)
    if cells is not None:
        input = clear(input, cells)
        cells = windowed(cells, weight.shape[2:], stride, padding, dilation)
    return masked(function(input, weight, bias, stride, padding, dilation, groups), cells)


def conv_transpose2d(
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
    """Upsampling by the kernel's size keeps the grid: each cell becomes k x k cells."""
    cells = cells_of(input)
    if cells is not None:
        input = clear(input, cells)
        factor, other = pair(stride)
        divides = factor == other and cells.stride % factor == 0 and not cells.pooled
        whole = tuple(weight.shape[2:]) == (factor, factor) and pair(dilation) == (1, 1)
        no_padding = pair(padding) == pair(output_padding) == (0, 0)
        finer = cells._replace(stride=cells.stride // factor)
        cells = finer if divides and whole and no_padding else None
    result = function(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return masked(result, cells)


def max_pool2d(
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
    cells = cells_of(input)
    coarser = cells and windowed(cells, *options)
    if cells is None or coarser is None or cells.pooled or return_indices:
        return function(input, *options, ceil_mode, return_indices)
    result = function(clear(input, cells, torch.finfo(input.dtype).min), *options, ceil_mode)
    if not coarser.fit(result):
        return function(input, *options, ceil_mode)
    return masked(clear(result, coarser), coarser)


def avg_pool2d(
    function: Callable,
    input: Tensor,
    kernel_size: Union[int, tuple],
    stride: Union[int, tuple, None] = None,
    padding: Union[int, tuple] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Optional[int] = None,
) -> Tensor:
    """Padding counts as zeros where `count_include_pad` says so, and else not at all."""
    options = (kernel_size, stride or kernel_size, padding)
    cells = cells_of(input)
    coarser = cells and windowed(cells, *options)
    if cells is None or coarser is None or cells.pooled or ceil_mode:
        return function(input, *options, ceil_mode, count_include_pad, divisor_override)
    result = function(clear(input, cells), *options, False, True, divisor_override)
    if not count_include_pad and divisor_override is None:
        share = function(inside(cells, input.dtype), *options)
        result = result / share.clamp(min=torch.finfo(share.dtype).tiny)
    return masked(result, coarser)


def group_norm(
    function: Callable,
    input: Tensor,
    num_groups: int,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tensor:
    """Mean and variance over the cells inside each image."""
    cells = cells_of(input)
    if cells is None or cells.pooled:
        return masked(function(input, num_groups, weight, bias, eps), cells)
    dtype = torch.promote_types(input.dtype, torch.float32)
    x = clear(input, cells).to(dtype).unflatten(1, (num_groups, -1))  # (B, groups, C/groups, h, w)
    rows, columns = cells.region.sides(cells.stride)
    count = (rows * columns * x.shape[2]).clamp(min=1).view(-1, 1, 1, 1, 1)
    x = x - x.sum((2, 3, 4), keepdim=True) / count
    outside = cells.region.outside(cells.stride)[:, :, None]
    variance = x.masked_fill(outside, 0).square().sum((2, 3, 4), keepdim=True) / count
    x = (x * (variance + eps).rsqrt()).flatten(1, 2)
    if weight is not None:
        x = x * weight.to(dtype).view(-1, 1, 1)
    if bias is not None:
        x = x + bias.to(dtype).view(-1, 1, 1)
    return masked(x.to(input.dtype), cells)


def instance_norm(
    function: Callable,
    input: Tensor,
    running_mean: Optional[Tensor] = None,
    running_var: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """A `group_norm` of one channel a group. Running statistics act on each cell by itself."""
    if use_input_stats and running_mean is None:
        return group_norm(F.group_norm, input, input.shape[1], weight, bias, eps)
    options = (running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return masked(function(input, *options), None if use_input_stats else cells_of(input))


def interpolate(
    function: Callable,
    input: Tensor,
    size: Union[int, Sequence[int], None] = None,
    scale_factor: Union[float, Sequence[float], None] = None,
    mode: str = 'nearest',
    align_corners: Optional[bool] = None,
    recompute_scale_factor: Optional[bool] = None,
    antialias: bool = False,
) -> Tensor:
    """By whole factors. A pooled map is resized to the region of each image."""
    options = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    cells = cells_of(input)
    bilinear = mode == 'bilinear' and not antialias
    if cells is not None and cells.pooled:
        whole = cells._replace(pooled=False)
        map_size = whole.region.map_size(whole.stride)
        if bilinear and size is not None and pair(size) == map_size:
            rows, columns = (
                interpolation_weights(side.float(), length, cell_count, mode, bool(align_corners))
                for side, length, cell_count in zip(
                    whole.region.sides(whole.stride), map_size, input.shape[2:]
                )
            )
            return masked(product(rows, input, columns), whole)
        return function(input, *options)

    resized = cells and resized_cells(cells, input, size, scale_factor)
    if cells is None or resized is None:
        return function(input, *options)
    if mode == 'nearest':
        return masked(function(input, *options), resized)
    old, new = input.shape[2:], resized.region.map_size(resized.stride)
    whole_factor = all(a % b == 0 or b % a == 0 for a, b in zip(old, new))
    if not (bilinear and whole_factor and not align_corners):
        return function(input, *options)
    # Divided by the share of the weights that is inside: the edge of the image is replicated.
    share = function(inside(cells, input.dtype), *options)
    result = function(clear(input, cells), *options)
    result = result / share.clamp(min=torch.finfo(share.dtype).tiny)
    return masked(clear(result, resized), resized)


def adaptive_avg_pool2d(
    function: Callable, input: Tensor, output_size: Union[int, Sequence[Optional[int]]]
) -> Tensor:
    """k x k bins: means over equal parts of each image. For a size, see `grid_factor`."""
    cells, size = cells_of(input), pair(output_size)
    if factor := grid_factor(cells, output_size):
        return avg_pool2d(F.avg_pool2d, input, factor)
    if not by_bins(cells, output_size):
        return function(input, output_size)
    rows, columns = (
        parts / parts.sum(-1, keepdim=True).clamp(min=1)
        for parts in (bins.to(torch.float32) for bins in bins_of(cells, size))
    )
    return masked(product(rows, clear(input, cells), columns), cells._replace(pooled=True))


def adaptive_max_pool2d(
    function: Callable,
    input: Tensor,
    output_size: Union[int, Sequence[Optional[int]]],
    return_indices: bool = False,
) -> Any:
    """k x k bins: maxima over equal parts of each image, 0 if it has no cells. For a size, see
    `grid_factor`."""
    cells, size = cells_of(input), pair(output_size)
    if not return_indices and (factor := grid_factor(cells, output_size)):
        return max_pool2d(F.max_pool2d, input, factor)
    if return_indices or not by_bins(cells, output_size):
        return function(input, output_size, return_indices)
    x = input
    for axis, bins in zip((2, 3), bins_of(cells, size)):
        bins = bins[:, :, None, :, None] if axis == 2 else bins[:, :, None, None]
        least = torch.finfo(x.dtype).min
        maxima = [x.masked_fill(~of_image, least).amax(axis) for of_image in bins.unbind(1)]
        x = torch.stack(maxima, axis)
    empty = (cells.region.valid == 0).any(1).view(-1, 1, 1, 1)
    return masked(x.masked_fill(empty, 0), cells._replace(pooled=True))


def mean(
    function: Callable,
    input: Tensor,
    dim: Union[int, Sequence[int], None] = None,
    keepdim: bool = False,
    **options: Any,
) -> Tensor:
    """Over both axes of the map: of each image. Over the channels: of each cell."""
    dims = {d % 4 for d in ((dim,) if isinstance(dim, int) else dim or ())}
    cells = cells_of(input)
    if cells is not None and not cells.pooled and dims == {2, 3} and not options:
        result = adaptive_avg_pool2d(F.adaptive_avg_pool2d, input, 1)
        return result if keepdim else result.flatten(1)
    result = function(input, *(() if dim is None else (dim, keepdim)), **options)
    return masked(result, cells if dims == {1} else None)


def over_channels(position: int) -> Callable:
    """The rule of functions that keep the region where their `dim` is that of the channels.

    Args:
        position: of `dim` among the arguments after the first.
    """

    def rule(function: Callable, input: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(input, *args, **kwargs)
        dim = kwargs.get('dim', args[position] if len(args) > position else None)
        if dim not in (1, -3):
            return result
        operands = input if isinstance(input, (tuple, list)) else [input]
        parts = [result] if isinstance(result, Tensor) else result
        parts = tuple(masked(part, shared_cells(part, operands)) for part in parts)
        return parts[0] if isinstance(result, Tensor) else parts

    return rule


def channel_slice(function: Callable, input: Tensor, index: Any) -> Tensor:
    """`x[:, start:stop]`."""
    result = function(input, index)
    if isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], slice):
        if index[0] == slice(None):
            return masked(result, cells_of(input))
    return result


# What the rules compute with.


def pair(value: Any) -> tuple:
    """A number for both axes, or one for each."""
    value = tuple(value) if isinstance(value, Sequence) else (value,)
    return value * 2 if len(value) == 1 else value


def inside(cells: Cells, dtype: torch.dtype) -> Tensor:
    """(B, 1, h, w), 1 inside the images."""
    return (~cells.region.outside(cells.stride)).to(dtype)


def windowed(
    cells: Cells,
    kernel_size: Union[int, Sequence[int]],
    stride: Union[int, Sequence[int]],
    padding: Union[int, Sequence[int], str] = 0,
    dilation: Union[int, Sequence[int]] = 1,
) -> Optional[Cells]:
    """The cells after a convolution or pooling, or None if they are not on the pixels' grid:
    windows must be centred on every k-th cell, or tile the map."""
    kernels, strides, dilations = pair(kernel_size), pair(stride), pair(dilation)
    if padding == 'same':
        padding = tuple(d * (k - 1) / 2 for k, d in zip(kernels, dilations))
    paddings = pair(0 if padding == 'valid' else padding)
    if cells.pooled:
        keeps = kernels == strides == (1, 1) and paddings == (0, 0)
        return cells if keeps else None
    centred = all(2 * p == d * (k - 1) for k, p, d in zip(kernels, paddings, dilations))
    centred = centred and all(k % 2 for k in kernels)
    tiled = kernels == strides and paddings == (0, 0) and dilations == (1, 1)
    if strides[0] != strides[1] or not (centred or tiled):
        return None
    return cells._replace(stride=cells.stride * strides[0])


def resized_cells(cells: Cells, x: Tensor, size: Any, scale_factor: Any) -> Optional[Cells]:
    """The cells after resizing by a whole factor, or None if it is not one.

    Nearest-neighbour upsampling by 2 is exact for odd sizes, too: from ceil(n / 2) to n cells.
    """
    old = tuple(x.shape[2:])
    if scale_factor is None:
        new = pair(size)
    else:
        new = tuple(int(n * f) for n, f in zip(old, pair(scale_factor)))
        if any(n * f != m for n, f, m in zip(old, pair(scale_factor), new)):
            return None
    up = max(-(-b // a) for a, b in zip(old, new))
    down = max(-(-a // b) for a, b in zip(old, new))
    if up > 1 and cells.stride % up == 0:
        resized = cells._replace(stride=cells.stride // up)
        exact = up == 2 or all(b == a * up for a, b in zip(old, new))
    else:
        resized = cells._replace(stride=cells.stride * down)
        exact = all(a == b * down for a, b in zip(old, new))
    fits = resized.region.map_size(resized.stride) == new
    return resized if exact and fits else None


def by_bins(cells: Optional[Cells], output_size: Any) -> TypeGuard[Cells]:
    """Whether adaptive pooling is to divide each image: into `k` x `k` bins, or into one.

    A height and width are the size of some map, not a number of bins.
    """
    if cells is None or cells.pooled:
        return False
    return isinstance(output_size, int) or tuple(output_size) == (1, 1)


def grid_factor(cells: Optional[Cells], output_size: Any) -> Optional[int]:
    """The factor by which adaptive pooling to a height and width coarsens the grid, if it does."""
    if cells is None or cells.pooled or by_bins(cells, output_size) or None in output_size:
        return None
    (rows, odd_rows), (columns, odd_columns) = (
        divmod(old, new) for old, new in zip(cells.region.map_size(cells.stride), pair(output_size))
    )
    return rows if rows == columns and not odd_rows and not odd_columns else None


def bins_of(cells: Cells, size: tuple[int, int]) -> list[Tensor]:
    """For rows and columns (B, bins, cells) booleans: adaptive pooling's bins of each image."""
    result = []
    sides, lengths = cells.region.sides(cells.stride), cells.region.map_size(cells.stride)
    for side, length, count in zip(sides, lengths, size):
        index = torch.arange(count, device=side.device)
        start = (index * side[:, None] // count)[..., None]
        stop = (-(-(index + 1) * side[:, None] // count))[..., None]
        at = torch.arange(length, device=side.device)
        result.append((at >= start) & (at < stop))
    return result


def product(rows: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """rows @ x @ columns^T, for each image and channel."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(x.dtype, torch.float32)
        columns = columns.transpose(1, 2)[:, None].to(dtype)
        return (rows[:, None].to(dtype) @ (x.to(dtype) @ columns)).to(x.dtype)


# Functions and methods of one result, by name; those in place end in an underscore.
ELEMENT_WISE = """
    add sub mul div true_divide rsub neg abs pow square sqrt rsqrt exp log reciprocal
    __radd__ __rsub__ __rmul__ __rdiv__ __pow__ __rpow__ __ipow__
    addcmul addcdiv lerp where maximum minimum clamp clamp_min clamp_max clip masked_fill
    relu relu6 leaky_relu prelu rrelu elu celu selu gelu silu mish hardtanh hardswish
    hardsigmoid sigmoid logsigmoid tanh softplus softsign threshold
    dropout feature_dropout dropout2d alpha_dropout batch_norm
""".split()
CASTS = (
    'clone contiguous detach to type type_as float half bfloat16 double cpu cuda pin_memory'.split()
)


def named(names: Sequence[str]) -> list[Callable]:
    """The functions and methods with these names, and those in place."""
    homes = (torch, Tensor, F, torch._C._nn)
    names = [f'{name}{suffix}' for name in names for suffix in ('', '_')]
    return [getattr(home, name) for home in homes for name in names if hasattr(home, name)]


# The functions that keep the region.
RULES: dict[Callable, Callable] = {
    **dict.fromkeys(named(ELEMENT_WISE), element_wise),
    **dict.fromkeys(named(CASTS), cast),
    F.conv2d: conv2d,
    F.conv_transpose2d: conv_transpose2d,
    F.max_pool2d: max_pool2d,
    F.avg_pool2d: avg_pool2d,
    F.adaptive_avg_pool2d: adaptive_avg_pool2d,
    F.adaptive_max_pool2d: adaptive_max_pool2d,
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.interpolate: interpolate,
    **dict.fromkeys((torch.mean, Tensor.mean), mean),
    **dict.fromkeys(named(['softmax', 'log_softmax', 'sum', 'amax', 'amin']), over_channels(0)),
    **dict.fromkeys((torch.cat, torch.concat), over_channels(0)),
    **dict.fromkeys(named(['split', 'chunk']), over_channels(1)),
    F.normalize: over_channels(1),
    Tensor.__getitem__: channel_slice,
}
