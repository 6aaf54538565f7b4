"""The metadata of an exported model; docs/export.md describes the keys."""

import hashlib
from importlib.metadata import version
from typing import Any

from torch import nn

from ... import __version__
from ..predict.metadata import FORMAT, check_metadata
from ..predictions.kinds import SCORE_THR
from ..tooling.command import UserError
from .base import Exportable, Settings


def metadata(
    model: Exportable, weights: nn.Module, config: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    """The metadata of an exported model, with the hash of the original's weights and what its
    config says, such as its classes."""
    about = {
        'format': FORMAT,
        'task': model.task,
        'classes': [],
        'palette': [],
        'mean': list(model.preprocessing.mean),
        'std': list(model.preprocessing.std),
        'stride': model.preprocessing.divisor,
        'resize': None,
        'masks': None,
        'nms': None,
        'outputs': list(model.output_names),
        'weights_sha256': hash_of(weights),
        'versions': {'cpvt_pyramid': __version__}
        | {name: version(name) for name in ('torch', 'onnx', 'onnxruntime')},
        'score_thr': SCORE_THR,
        **model.details,
        **config,
        'inputs': list(model.input_shapes(settings)),
        'size': settings.size,
        'dtype': settings.dtype,
    }
    try:
        check_metadata(about)
    except ValueError as error:
        raise UserError(f'cannot write metadata: {error}') from error
    return about


def hash_of(model: nn.Module) -> str:
    """SHA-256 of the names and values of all weights, in the order of their names."""
    result = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        result.update(name.encode())
        result.update(x.detach().cpu().contiguous().numpy().tobytes())
    return result.hexdigest()
