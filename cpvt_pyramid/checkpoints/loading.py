"""Loading checkpoints of any format into models.

`LoadsCheckpoints` converts names and shapes in every `load_state_dict` of a model, so that torch,
timm, mmengine's `Pretrained`, `load_from` and `resume` all read the same files:
  - wrappers (`state_dict`, `model`, ...) and prefixes (`module.`, `backbone.`) are removed, and
    what lies outside of them (neck and head); of several wrappers the first in `WRAPPERS` is taken,
    and the report says so;
  - the names of another format, recognized by its keys, are mapped to ours;
  - what published checkpoints hold and the model leaves out is dropped: the classifier of a
    backbone, and stages that are not built.

What is missing, unexpected or of another shape then is PyTorch's business, as in any module.
`fit_checkpoint` judges: it refuses checkpoints of another architecture and damaged ones.
"""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .fit import BODY, LoadReport, compare, objection_to
from .formats import to_ours
from .reading import (
    COMPILED,
    check_names,
    contents_of,
    read_checkpoint,
    tensors_of,
    unwrapped,
    without_prefixes,
)
from .rgb import check_rgb_weights, inflated


class LoadsCheckpoints(nn.Module):
    """A model whose `load_state_dict` converts checkpoints of every format.

    Arguments are those of `CPVTPyramid`.
    """

    def __init__(self, in_channels: int, rgb_weights: Union[str, Sequence[str], None]) -> None:
        super().__init__()
        check_rgb_weights(rgb_weights, in_channels)
        self.in_channels = in_channels
        self.rgb_weights = rgb_weights

    def ignores_key(self, name: str) -> bool:
        """True if published checkpoints hold a tensor that this model leaves out."""
        raise NotImplementedError

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list,
        unexpected_keys: list,
        error_msgs: list,
    ) -> None:
        try:
            report = convert_state_dict(self, state_dict, prefix)
        except ValueError as error:
            error_msgs.append(str(error))  # as PyTorch reports other shapes
        else:
            if report:
                self.log_load_report(report)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def log_load_report(self, report: LoadReport) -> None:
        """Log what happened to the tensors of a checkpoint."""
        logging.getLogger(__name__).info('%s', report)


def convert_state_dict(
    module: LoadsCheckpoints, state_dict: dict, prefix: str
) -> Optional[LoadReport]:
    """Convert a checkpoint to the names and shapes of a model, in place.

    Args:
        module: the model.
        state_dict: the checkpoint, of this model or of a larger one that it is part of; or a part
            of one.
        prefix: of the model's names in the checkpoint, as in PyTorch's load hooks: '', or the path
            of the model in the larger one and a dot.

    Returns:
        What is loaded then; None if the checkpoint has nothing under the prefix.

    Raises:
        ValueError: a tensor has a shape that its format does not have. Nothing is changed.
    """
    theirs = {}
    for name, value in state_dict.items():
        if isinstance(name, str) and name.startswith(prefix):
            theirs[name[len(prefix) :]] = value
    if not theirs:
        return None
    ours = nn.Module.state_dict(module)
    inner, choice = unwrapped(theirs)
    inner = {name: value for name, value in inner.items() if isinstance(name, str)}
    if inner.keys().isdisjoint(ours):
        inner = without_prefixes(inner)
    else:  # some names are the model's own, which stay
        inner = {k if k in ours else k.replace(COMPILED, ''): v for k, v in inner.items()}
    tensors = {}
    others = {}
    for name, value in inner.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:  # of a quantized model
            others[name] = value
    tensors, report = convert(module, ours, tensors)
    for name in theirs:
        del state_dict[prefix + name]
    for name, value in (others | tensors).items():
        state_dict[prefix + name] = value
    return report._replace(choice=choice)


def convert(
    module: LoadsCheckpoints, ours: dict[str, Any], theirs: dict[str, Tensor]
) -> tuple[dict[str, Tensor], LoadReport]:
    """Convert tensors of any format to the names and shapes of a model with the state dict `ours`.

    Returns:
        The tensors, without those that the model leaves out, and what fits of them.

    Raises:
        ValueError: a tensor has a shape that its format does not have.
    """
    theirs = to_ours(theirs)
    ignored = [name for name in theirs if name not in ours and module.ignores_key(name)]
    for name in ignored:
        del theirs[name]
    theirs, how = inflated(theirs, ours, module.rgb_weights)
    return theirs, compare(ours, theirs)._replace(inflated=how, ignored=ignored)


def fit_checkpoint(
    module: LoadsCheckpoints, checkpoint: dict
) -> tuple[dict[str, Tensor], LoadReport]:
    """The tensors of a checkpoint under a model's names and in its shapes.

    Args:
        module: the model.
        checkpoint: of this model, in any format and wrapper.

    Returns:
        The tensors, and what is loaded of them.

    Raises:
        ValueError: the checkpoint is damaged or of another architecture.
    """
    check_names(checkpoint)
    ours = nn.Module.state_dict(module)
    inner, choice = unwrapped(checkpoint)
    if has_packed_parameters(ours) and ours.keys() <= inner.keys():  # the model's own
        return inner, compare(ours, inner)._replace(choice=choice)
    theirs, report = convert(module, ours, tensors_of(inner))
    if not any(BODY.match(name) for name in theirs):
        raise ValueError(
            f'the checkpoint has no tensor of this backbone, but {contents_of(inner)}. '
            f'Check the file and, in an init_cfg, the prefix'
        )
    if objection := objection_to(ours, theirs, report):
        raise ValueError(objection)
    return theirs, report._replace(choice=choice)


def check_backbones(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Check the tensors of each backbone of this package in a larger model, if there are any.

    Raises:
        ValueError: they are damaged or of another architecture.
    """
    for name, part in model.named_modules():
        if isinstance(part, LoadsCheckpoints):
            prefix = f'{name}.' if name else ''
            inner = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            if inner:
                fit_checkpoint(part, inner)


def has_packed_parameters(state: dict) -> bool:
    """True if a state dict holds packed parameters, which are no tensors."""
    return not all(isinstance(value, Tensor) for value in state.values())


def load_weights(model: LoadsCheckpoints, path: Union[str, Path]) -> LoadReport:
    """Load a checkpoint into a model of this package.

    What a checkpoint of this architecture may lack, such as the stage norms of SVT, keeps its
    values. After an error the model is as it was.

    Args:
        model: a backbone or a classifier, of timm's registry, too.
        path: a `.pth` or `.safetensors` file in any of the known formats: a path, name or address,
            see `local_file`; or a folder, see `read_checkpoint`.

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
    if not isinstance(model, LoadsCheckpoints):
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
        tensors, report = fit_checkpoint(model, checkpoint)
        load_or_restore(model, tensors)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f'{path}: {" ".join(str(error).split())}') from None
    return report


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
