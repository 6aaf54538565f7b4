"""Loading checkpoints of any format into models.

`prepare_state_dict` runs first in every `load_state_dict` of a model (`LoadsCheckpoints`), so that
torch, timm, mmengine's `Pretrained`, `load_from` and `resume` all read the same files:
  - wrappers (`state_dict`, `model`, ...) and prefixes (`module.`, `backbone.`) are removed; of
    several wrappers the first in `WRAPPERS` is taken, and the report says so;
  - the names of another format, recognized by its keys, are mapped to ours;
  - what a backbone does not have is dropped: the classifier, and stages that were not built;
  - the stage norms of SVT, which classification checkpoints do not hold, keep their values, and
    so do PEGs that were added at zero.

A checkpoint of another architecture is an error, wherever it is loaded.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor, nn

from .fit import BODY, LoadReport, compare, objection_to
from .formats import to_ours
from .reading import check_names, contents_of, read_checkpoint, tensors_of, unwrapped
from .rgb import check_rgb_weights, inflated

PEG_KEY = re.compile(r'(more_)?pos_block\.|.*\.attn\.peg\.')


def load_weights(model: 'LoadsCheckpoints', path: Union[str, Path]) -> LoadReport:
    """Load a checkpoint into a model of this package.

    Args:
        model: a backbone or a classifier, of timm's registry, too.
        path: a `.pth` or `.safetensors` file in any of the known formats: a path, name or address,
            see `local_file`.

    Raises:
        ConnectionError: the file cannot be downloaded.
        FileNotFoundError: there is no such file.
        ImportError: a package is missing that downloads or reads the file.
        TypeError: the model is not of this package, such as the detector that a backbone is part
            of.
        ValueError: the file is damaged or empty, or the tensors have another architecture.

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
    checkpoint = read_checkpoint(path)
    try:
        report = prepare_state_dict(model, checkpoint, '')
        model.load_state_dict(checkpoint, strict=False)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None
    if not report.loaded:
        raise ValueError(f'{path} is empty')
    return report


class LoadsCheckpoints(nn.Module):
    """A model whose `load_state_dict` converts checkpoints of every format.

    Arguments are those of `CPVTPyramid`.
    """

    peg_starts_at_zero = False

    def __init__(self, in_channels: int, rgb_weights: Union[str, Sequence[str], None]) -> None:
        super().__init__()
        check_rgb_weights(rgb_weights, in_channels)
        self.in_channels = in_channels
        self.rgb_weights = rgb_weights

    def ignores_key(self, name: str) -> bool:
        """True if published checkpoints hold a tensor that this model leaves out."""
        raise NotImplementedError

    def may_be_missing(self, name: str) -> bool:
        """True if a tensor may be missing in a checkpoint, and keeps its value then."""
        return self.peg_starts_at_zero and bool(PEG_KEY.match(name))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others: Any) -> None:
        if not is_own_quantized_state(self, state_dict, prefix):
            self.log_load_report(prepare_state_dict(self, state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def log_load_report(self, report: LoadReport) -> None:
        """Log what happened to the tensors of a checkpoint."""
        logging.getLogger(__name__).info('%s', report)


def prepare_state_dict(module: LoadsCheckpoints, state_dict: dict, prefix: str) -> LoadReport:
    """Convert a checkpoint to the names and shapes of a model, in place.

    Args:
        module: the model.
        state_dict: the checkpoint, of this model or of a larger one that it is part of.
        prefix: of the model's names in the checkpoint, as in PyTorch's load hooks: '', or the path
            of the model in the larger one and a dot.

    Raises:
        ValueError: the checkpoint is damaged or of another architecture. Nothing is changed.
    """
    check_names(state_dict)
    ours = nn.Module.state_dict(module)
    theirs = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    if not theirs:  # a checkpoint of another part of the larger model
        return compare(ours, {})
    inner, choice = unwrapped(theirs)
    theirs = to_ours(tensors_of(inner))
    if not any(BODY.match(name) for name in theirs):
        raise ValueError(
            f'the checkpoint has no tensor of this backbone, but {contents_of(inner)}. '
            f'Check the file and, in an init_cfg, the prefix'
        )
    ignored = [name for name in theirs if name not in ours and module.ignores_key(name)]
    for name in ignored:
        del theirs[name]
    theirs, how = inflated(theirs, ours, module.rgb_weights)
    report = compare(ours, theirs)._replace(inflated=how, ignored=ignored, choice=choice)
    if objection := objection_to(ours, theirs, report):
        raise ValueError(objection)

    for name in report.kept:
        if module.may_be_missing(name):
            theirs[name] = start_of(name, ours[name], like=next(iter(theirs.values())))
    for name in [name for name in state_dict if name.startswith(prefix)]:
        del state_dict[name]
    state_dict.update({prefix + name: value for name, value in theirs.items()})
    return report


def start_of(name: str, ours: Tensor, like: Tensor) -> Tensor:
    """The value of a stage norm, or of a PEG that starts at zero, that a checkpoint lacks.

    It is the model's or, if the model is on the meta device, the initial one.
    """
    if not ours.is_meta:
        return ours
    is_scale = name.startswith('norm_list.') and name.endswith('.weight')
    return torch.full(ours.shape, float(is_scale), dtype=like.dtype, device=like.device)


def is_own_quantized_state(module: nn.Module, state_dict: dict, prefix: str) -> bool:
    """True if a state dict is that of a quantized copy of this model, which needs no conversion."""
    ours = nn.Module.state_dict(module, prefix=prefix)
    is_quantized = not all(isinstance(value, Tensor) for value in ours.values())
    return is_quantized and ours.keys() <= state_dict.keys()
