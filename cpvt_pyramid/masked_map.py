"""Maps of a padded batch that know which of their cells are image.

The backbone zeroes what is outside the images, but the first bias of a neck fills the padding
again, and the next convolution, norm, pooling or resizing mixes it into the images. A `MaskedMap`
carries the region of the images through the operations that `regions.RULES` lists, so that an
image's values, and the gradients that flow back from them, are the same alone and in any batch.

All other operations work as usual, and what they return has lost the region. It stays a `MaskedMap`
as long as the batch lives, because a map that is combined with it has no region either:
`x * x.var()` depends on the padding. `on_region_loss` tells where regions are lost. Not seen are
values that were read into Python numbers, and kernels outside PyTorch's dispatcher.

Shapes: B batch, C channels, H x W image in pixels, h x w map.
"""

import copy
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any, Optional

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .mask import check_valid
from .regions import (
    PIXELS,
    RULES,
    Extent,
    Region,
    cast,
    constant,
    extent_of,
    is_in_place,
    mark,
    overwrite,
)

_action = 'ignore'


class on_region_loss:  # noqa: N801, like torch.set_grad_enabled
    """What to do where a map loses its region, as a function or as a context manager.

    Args:
        action: 'ignore' (the default), 'warn' or 'raise'. Warning and error (RuntimeError) name the
            function.

    Examples:
        >>> batch = padded_batch(torch.rand(2, 3, 64, 96), torch.tensor([[64, 96], [50, 70]]))
        >>> with on_region_loss('raise'):
        ...     y = torch.nn.functional.max_pool2d(batch, 2)  # an error, if it lost the region
    """

    def __init__(self, action: str) -> None:
        global _action
        if action not in ('ignore', 'warn', 'raise'):
            raise ValueError(f"action must be 'ignore', 'warn' or 'raise', got {action!r}")
        if action != 'ignore':
            hooks_keep_regions()  # tried once, and not where functions of maps are disabled
        self.before = _action
        _action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _action
        _action = self.before


def uncompiled(function: Callable) -> Callable:
    """`torch.compiler.disable`, but only once the compiler is imported, which takes seconds."""
    disabled: list[Callable] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled and 'torch._dynamo' in sys.modules:
            disabled.append(torch.compiler.disable(function))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


class MaskedMap(Tensor):
    """A map (B, C, h, w) of a padded batch, or what was computed from one; see `padded_batch`.

    `extent` says which cells belong to each image. It holds for the `state` in which the tensor
    was: it is lost when values change, or autograd's history, as the results of an
    `autograd.Function` get theirs after its forward pass. Then `origin` refers to the region as
    long as it lives.

    BatchNorm in training computes its statistics over the cells of all images. Saved files contain
    plain tensors.
    """

    extent: Optional[Extent] = None
    state: Any = None
    origin: Any = None
    same_as: Any = None  # the map of which this is a view as a whole

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        kwargs = kwargs or {}
        runs_backward = function in INPUTS
        with DisableTorchFunctionSubclass():
            if not runs_backward and all(t in (MaskedMap, Tensor) for t in types):
                return call(function, args, kwargs)
            tensors = tensors_among(args, kwargs)
            if not runs_backward and any(map(cells_of, tensors)):
                report(function)  # which another subclass defines
            origin = next(filter(None, map(origin_of, filter(is_map, tensors))), None)
        with plain_inputs(function, args, kwargs) if runs_backward else nullcontext():
            with DisableTorchFunctionSubclass():
                args, kwargs = each(as_plain, (args, kwargs))
            result = function(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            return each(lambda y: lost_from(origin, y) if type(y) is Tensor else y, result)

    def __deepcopy__(self, memo: dict) -> Tensor:
        with DisableTorchFunctionSubclass():
            y = (self.detach() if self.is_leaf else self).as_subclass(Tensor)
            memo[id(self)] = y = copy.deepcopy(y).requires_grad_(self.requires_grad)
            extent = current_extent(self)
        return y if extent is None else masked(y, extent)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with DisableTorchFunctionSubclass():
            y = self.detach().as_subclass(Tensor).requires_grad_(self.requires_grad)
            return y.__reduce_ex__(protocol)


DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
# They give tensors and arrays in the same memory, whose changes are not counted.
EXPOSES = {DATA, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
# Of functions that run a backward pass, the position of `inputs`.
INPUTS = {Tensor.backward: 4, torch.autograd.backward: 5, torch.autograd.grad: 1}


@contextmanager
def plain_inputs(function: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Let autograd take the maps whose gradients are wanted as plain tensors.

    With the first gradient they are maps again: a backward pass may run code of the forward pass.
    """

    def restore(*_: Any) -> None:
        for x in maps:
            x.__class__ = MaskedMap

    with DisableTorchFunctionSubclass():
        at = INPUTS[function]
        maps = [x for x in tensors_among(args[at : at + 1], kwargs.get('inputs')) if is_map(x)]
        outputs = tensors_among(args[:1], kwargs.get('outputs'), kwargs.get('tensors'))
        hooks = [y.register_hook(restore) for y in outputs if y.requires_grad]
    try:
        for x in maps:
            x.__class__ = Tensor
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()


def as_plain(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.as_subclass(Tensor) if is_map(x) else x


def is_map(x: Any) -> bool:
    return isinstance(x, MaskedMap)


def each(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nested tuples, lists and dicts, of what the function makes of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list):
        return [each(function, x) for x in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [each(function, x) for x in value]
        return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)
    if type(value) is dict:
        return {name: each(function, x) for name, x in value.items()}
    return value


def tensors_among(*values: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    found: list[Tensor] = []
    each(found.append, values)
    return found


def call(function: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of a function, by its rule if it has one."""
    tensors = tensors_among(args, kwargs)
    maps: list[Any] = [x for x in tensors if is_map(x)]
    had_extent = [x for x in maps if current_extent(x) is not None]
    origin = next(filter(None, map(origin_of, maps)), None)
    before = {id(x): changes(x) for x in tensors}
    rule = None if kwargs.get('out') is not None or graph_is_made() else RULES.get(function)
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled() and not any(x.is_inference() for x in tensors):
            # Tensors of inference mode do not count their changes.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        result = function(*args, **kwargs) if rule is None else rule(function, *args, **kwargs)
    if function in EXPOSES:
        maps[0].extent, maps[0].origin = None, origin
    if origin is None:
        return result
    if _action != 'ignore' and had_extent and function == GETS_REQUIRES_GRAD and loses_in_hook():
        report(BackwardHookFunction)
    lost = []

    def settled(y: Tensor) -> Tensor:
        given = before.get(id(y), -1)
        if given != -1 and (
            given == changes(y) if given is not None else not is_in_place(function)
        ):
            return y  # as it was given
        if rule is constant or (rule is cast and not is_map(tensors[0])):
            return y
        if rule is overwrite or (rule is not None and extent_of(y) is not None):
            return wrapped(y)
        lost.append(y)
        return lost_from(origin, y)

    result = each(settled, result)
    if function is Tensor.view_as and args[0] is args[1]:
        result.same_as = args[0]
    lost += [x for x in had_extent if current_extent(x) is None]  # changed in place
    if had_extent and any(y.is_floating_point() or y.is_complex() for y in lost):
        report(function)
    return result


def lost_from(origin: Any, y: Any) -> Any:
    """A tensor as a `MaskedMap` that has lost its region; as it is if there is no such region."""
    if origin is None:
        return y
    y.extent, y.origin = None, origin
    return wrapped(y)


def wrapped(y: Any) -> Any:
    """A tensor with its extent or origin, as a `MaskedMap`.

    The class is assigned because `as_subclass` returns a view, and a ReLU in place on a view costs
    a copy of the gradient.
    """
    if extent_of(y) is not None and y.is_inference():
        extent = y.extent
        with torch.inference_mode(False):
            y = mark(y.clone(), extent)
    if type(y) is Tensor:
        y.__class__ = MaskedMap
    if is_map(y):
        y.state, y.same_as = (changes(y), y.grad_fn), None
    return y


def changes(x: Tensor) -> Optional[int]:
    """How often a tensor was changed in place; None if that is not counted."""
    return None if x.is_inference() else x._version


def current_extent(x: Any) -> Optional[Extent]:
    """The extent of a map, or None if it has none, or was changed since it was set."""
    if x.extent is None:
        return None
    counted, history = x.state
    unchanged = counted == changes(x)
    if unchanged and (x.grad_fn is history or returned_as_given(x)):
        x.state = counted, x.grad_fn
    else:
        x.extent, x.origin = None, weakref.ref(x.extent.region)
        if unchanged:
            report(getattr(type(x.grad_fn), '_forward_cls', x.grad_fn))
    return x.extent


def origin_of(x: Any) -> Any:
    """A weak reference to the region from which a tensor comes, as long as its maps live."""
    if x.extent is not None:
        return weakref.ref(x.extent.region)
    if x.origin is not None and x.origin() is not None:
        return x.origin
    for name in ('extent', 'state', 'origin', 'same_as'):
        vars(x).pop(name, None)
    x.__class__ = Tensor
    return None


def returned_as_given(x: Any) -> bool:
    """True if a map is a view as a whole, by an `autograd.Function` that passes each image's
    gradient on as it is. Hooks, FSDP and DeepSpeed insert such functions."""
    function = getattr(type(x.grad_fn), '_forward_cls', None)
    by = '' if function is None else function.__module__.split('.')[0]
    return x.same_as is not None and by in ('torch', 'deepspeed')


GETS_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def loses_in_hook() -> bool:
    """True while a full backward hook takes maps as inputs or outputs of its module, in a PyTorch
    whose hooks return plain tensors in their place, which calls no function of ours.

    The hook's forward pass reads `requires_grad` of each map.
    """
    frame: Any = sys._getframe()
    while frame and frame.f_code is not BackwardHookFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None and not hooks_keep_regions()


@functools.cache
def hooks_keep_regions() -> bool:
    x = padded_batch(torch.ones(1, 1, 1, 1, requires_grad=True), torch.ones(1, 2))
    with on_region_loss('ignore'):
        (y,) = BackwardHookFunction.apply(x)
        return is_map(y)


def graph_is_made() -> bool:
    """True in `torch.jit.trace`, `make_fx` and export, whose graphs must serve other batches."""
    modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
    return torch.jit.is_tracing() or bool(modes & {'ProxyTorchDispatchMode', 'FakeTensorMode'})


def report(function: Any) -> None:
    """Warn or raise, as `on_region_loss` says."""
    if _action == 'ignore':
        return
    home = getattr(function, '__module__', None) or 'torch'
    name = getattr(function, '__qualname__', None) or getattr(function, '__name__', str(function))
    text = (
        f'{home}.{name} has no rule for maps of a padded batch: its result may depend on the '
        'padding (see cpvt_pyramid.regions.RULES)'
    )
    if _action == 'raise':
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=5)


@uncompiled
def masked_maps(
    maps: Sequence[Tensor], valid: Tensor, size: Sequence[int], strides: Sequence[int]
) -> tuple[Tensor, ...]:
    """Maps (B, C, h, w) of a padded batch as `MaskedMap`s of one region, from the sizes (B, 2) of
    the images, H and W of the batch, and the strides of the maps, in pixels."""
    region = Region(valid.to(maps[0].device), size)
    region.known[str(region.size)] = PIXELS, PIXELS
    return tuple(masked(x, region.at_stride(stride)) for x, stride in zip(maps, strides))


@uncompiled
def masked(x: Tensor, extent: Extent) -> Tensor:
    """`x` itself as a `MaskedMap`, or as it is if it is not a map of this extent."""
    with DisableTorchFunctionSubclass():
        return wrapped(mark(x, extent)) if extent.fits(x) else x


def padded_batch(images: Tensor, valid: Tensor) -> Tensor:
    """A batch of images, padded at the right and bottom, as a `MaskedMap`.

    Args:
        images: (B, C, H, W).
        valid: (B, 2), true height and width of each image in pixels.

    Raises:
        ValueError: the shapes are others.

    Examples:
        >>> batch = padded_batch(torch.rand(2, 3, 64, 96), torch.tensor([[64, 96], [50, 70]]))
        >>> conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        >>> conv(batch).shape  # the image of 50 x 70 pixels as if it were alone
        torch.Size([2, 8, 32, 48])
    """
    if images.dim() != 4:
        raise ValueError(f'images must be a batch (B, C, H, W), got {tuple(images.shape)}')
    check_valid(valid, images.shape[0])
    return masked_maps([images.view_as(images)], valid, images.shape[2:], [1])[0]


def cells_of(x: Any) -> Optional[Extent]:
    """The extent of a map, or None if it has none, or has lost it."""
    if not is_map(x):
        return None
    with DisableTorchFunctionSubclass():
        return current_extent(x)


def split_images(maps: Sequence[Tensor]) -> Optional[list[list[Tensor]]]:
    """For each image its levels (1, C, h, w) without padding, for RoI heads; None if no level is a
    `MaskedMap`. Levels that are none keep their padding.

    RoIAlign reads beyond the image where a box touches its right or bottom edge, is narrower than a
    cell, or is enlarged first. On a map of the image alone it repeats the last cell up to one cell
    outside, and further out it reads zeros. Nothing that the padding of a batch could be filled
    with gives both.
    """
    cells = [cells_of(x) for x in maps]
    if not any(cells):
        return None
    levels = []
    for x, its_cells in zip(maps, cells):
        images = x.as_subclass(Tensor).split(1)
        if its_cells is not None:
            sides = torch.stack(its_cells.sides, 1).tolist()
            images = [image[..., :rows, :columns] for image, (rows, columns) in zip(images, sides)]
        # mmcv's RoIAlign reads raw NCHW memory, whatever the strides.
        levels.append([image.contiguous() for image in images])
    return [list(image) for image in zip(*levels)]


def reduce_for_workers(x: MaskedMap) -> tuple:
    """Maps keep their region on the way from the workers of a data loader."""
    extent = cells_of(x)
    y = x.as_subclass(Tensor).detach()
    if extent is None:
        return Tensor.detach, (y,)
    return rebuilt, (y, extent.region.valid, extent.region.size, extent.rows, extent.columns)


def rebuilt(y: Tensor, valid: Tensor, size: tuple, *formulas: Any) -> Tensor:
    return masked(y, Extent(Region(valid, size), *formulas))


ForkingPickler.register(MaskedMap, reduce_for_workers)
