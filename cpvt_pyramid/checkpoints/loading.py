"""Loading checkpoints of any format, wrapper and prefix into models.

`load_weights` and mmengine's `Pretrained` take a file apart completely:
  - wrappers (`state_dict`, `model`, ...) are removed; of several the first in `WRAPPERS` is taken,
    and the report says so;
  - the backbone is found in a larger model, such as a detector in DDP, by the names of a format;
  - they are converted to ours, and compared with the model's: checkpoints of other architectures
    and damaged ones are refused.

`load_from` and `resume` of mmengine, and timm, call `load_state_dict`: see `hook`.
"""

import copy
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor, nn

from ..columnar import Column
from ..model import CPVTPyramid
from ..names import is_left_out, role_of
from .fit import LoadReport, compare, objection_to
from .formats import Found, backbones_in, check_only_one, to_ours
from .reading import (
    check_names,
    contents_of,
    read_checkpoint,
    tensors_of,
    unwrapped,
    without_wrappers,
)
from .rgb import inflated

BACKBONES = (CPVTPyramid, Column)
Backbone = Union[CPVTPyramid, Column]


def fit_checkpoint(module: Backbone, checkpoint: dict) -> tuple[dict[str, Tensor], LoadReport]:
    """The tensors of a checkpoint under a model's names and in its shapes.

    Args:
        module: the model.
        checkpoint: of this model, in any format and wrapper.

    Returns:
        The tensors, and what is loaded of them.

    Raises:
        ValueError: the checkpoint is damaged or of another architecture, or has several backbones
            that fit.
    """
    check_names(checkpoint)
    ours = nn.Module.state_dict(module)
    inner, choice = unwrapped(checkpoint)
    if has_packed_parameters(ours) and ours.keys() <= inner.keys():  # the model's own
        return inner, compare(ours, inner)._replace(choice=choice)
    tensors = tensors_of(inner)
    own = {without_wrappers(name): name for name in ours}
    fitting = []
    objections = []
    for found in backbones_in(tensors, own):
        try:
            theirs, report = convert(module, tensors, found)
            objection = objection_to(module, ours, theirs, report)
        except ValueError as error:
            objection = str(error)
        if objection:
            objections.append(objection)
        elif any(role_of(name) == 'features' for name in theirs):
            fitting.append((found, theirs, report._replace(choice=choice)))
    if fitting:
        check_only_one([found for found, _, _ in fitting])
        return fitting[0][1:]
    if objections:
        raise ValueError(objections[0])
    raise ValueError(
        f'the checkpoint has no tensor of this backbone, but {contents_of(inner)}. '
        f'Check the file and, in an init_cfg, the prefix'
    )


def convert(
    module: Backbone, tensors: dict[str, Tensor], found: Found
) -> tuple[dict[str, Tensor], LoadReport]:
    """Convert the tensors of a backbone to the names and shapes of a model.

    Returns:
        The tensors, without those that the model leaves out, and what fits of them.

    Raises:
        ValueError: a tensor has a shape that its format does not have.
    """
    ours = nn.Module.state_dict(module)
    own = {without_wrappers(name): name for name in ours}
    theirs = {own.get(name, name): value for name, value in to_ours(tensors, found).items()}
    ignored = [n for n in theirs if n not in ours and is_left_out(n, module, theirs)]
    for name in ignored:
        del theirs[name]
    theirs, how = inflated(theirs, module)
    return theirs, compare(ours, theirs)._replace(inflated=how, ignored=ignored)


def check_backbones(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Check the tensors of each backbone of this package in a larger model, if there are any.

    Raises:
        ValueError: they are damaged or of another architecture.
    """
    for name, part in model.named_modules():
        if isinstance(part, BACKBONES):
            prefix = f'{name}.' if name else ''
            inner = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            if inner:
                fit_checkpoint(part, inner)


def has_packed_parameters(state: dict) -> bool:
    """True if a state dict holds packed parameters, which are no tensors."""
    return not all(isinstance(value, Tensor) for value in state.values())


def load_weights(model: Backbone, path: Union[str, Path], prefix: str = '') -> LoadReport:
    """Load a checkpoint into a model of this package.

    Parameters that a checkpoint of this architecture may lack, such as the stage norms of SVT, keep
    their values. After an error, the model is as it was.

    Args:
        model: a backbone or a classifier, also one from timm's registry.
        path: a `.pth` or `.safetensors` file in any of the known formats: a path, name or address,
            see `local_file`; or a folder, see `read_checkpoint`.
        prefix: what the names of the backbone's tensors begin with, such as `teacher.backbone.`, in
            a file with several backbones. Default: the only backbone is found.

    Raises:
        ConnectionError: the file cannot be downloaded.
        FileNotFoundError: there is no such file.
        ImportError: a package is missing that downloads or reads the file.
        TypeError: the model is not of this package, such as the detector that a backbone is part
            of.
        ValueError: the file is damaged or empty, the tensors have another architecture, or the
            model is on the meta device.

    Examples:
        >>> torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'nano.pth')
        >>> print(load_weights(CPVTPyramid('pcpvt_nano'), 'nano.pth'))
        loaded 160 of 160 tensors, 0 missing, 0 unused
    """
    if not isinstance(model, BACKBONES):
        raise TypeError(
            f'load_weights needs a backbone or a classifier of this package, got a '
            f'{type(model).__name__}; pass the part that is one, such as model.backbone'
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            'the model is on the meta device and has no values to load into; call model.to_empty('
            "device='cpu') first, or build it on a device"
        )
    checkpoint = read_checkpoint(path)
    if not checkpoint:
        raise ValueError(f'{path} is empty')
    try:
        tensors, report = fit_checkpoint(model, tensors_under(checkpoint, prefix))
        load_or_restore(model, tensors)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f'{path}: {" ".join(str(error).split())}') from None
    return report


def tensors_under(checkpoint: dict, prefix: str) -> dict:
    """The tensors of a checkpoint whose names have a prefix, without it.

    Raises:
        ValueError: there are none.
    """
    if not prefix:
        return checkpoint
    inner, _ = unwrapped(checkpoint)
    check_names(inner)
    prefix = prefix.rstrip('.') + '.'
    tensors = {k.removeprefix(prefix): v for k, v in inner.items() if k.startswith(prefix)}
    if not tensors:
        raise ValueError(f'no tensor has the prefix {prefix}, but there are {contents_of(inner)}')
    return tensors


def load_or_restore(model: nn.Module, tensors: dict[str, Any]) -> None:
    """Load tensors that fit; after any error the model is as it was."""
    before = copy.deepcopy(nn.Module.state_dict(model))
    try:
        model.load_state_dict(tensors, strict=False)
    except BaseException:
        with torch.no_grad():
            for name, value in nn.Module.state_dict(model).items():
                if isinstance(value, Tensor):
                    value.copy_(before[name])
        if has_packed_parameters(before):
            model.load_state_dict(before)
        raise
