"""The metadata of an exported model; docs/deployment.md describes the keys."""

import hashlib
import warnings
from importlib.metadata import version
from typing import Any, NamedTuple, Optional

from torch import nn

from .. import __version__
from ..runtime.metadata import FORMAT, check_metadata
from ..tooling.command import UserError
from .base import STRIDE, Exportable

SCORE_THR = 0.3  # what runtimes show by default, as tools/infer.py


class Settings(NamedTuple):
    """How a model is exported."""

    format: str = 'onnx'  # or 'torch' or 'aotinductor'
    size: Optional[tuple[int, int]] = None  # fixed height and width of the images
    half: bool = False  # in float16
    has_valid: bool = True  # the graph takes padded batches
    license: str = 'not stated'  # of the weights, for the metadata

    @property
    def dtype(self) -> str:
        return 'float16' if self.half else 'float32'


def metadata(
    model: Exportable, weights: nn.Module, config: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    """The metadata of an exported model, with the hash of the original's weights and what its
    config says, see `about_config`."""
    about = {
        'format': FORMAT,
        'task': model.task,
        'classes': [],
        'palette': [],
        'mean': list(model.preprocessing.mean),
        'std': list(model.preprocessing.std),
        'stride': STRIDE,
        'resize': None,
        'masks': None,
        'raw': 'scores' in model.output_names and 'labels' not in model.output_names,
        'nms': None,
        'outputs': list(model.output_names),
        'weights_sha256': hash_of(weights),
        'versions': {'cpvt_pyramid': __version__}
        | {name: version(name) for name in ('torch', 'onnx', 'onnxruntime')},
        'score_thr': SCORE_THR,
        **model.details,
        **config,
        'inputs': model.input_names(settings.has_valid),
        'size': settings.size,
        'dtype': settings.dtype,
        'license': settings.license,
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


def about_config(cfg: Any, checkpoint: dict) -> dict[str, Any]:
    """What a config and a checkpoint say about a model: classes, palette, resizing, architecture.
    Warns of a test pipeline that does more than resize."""
    from ..runner.config.load import leaves
    from ..runner.inference.prediction import dataset_meta

    meta = dataset_meta(cfg, checkpoint)
    resize = None
    for step in next(leaves(cfg.test_dataloader.dataset)).pipeline:
        if step.type.endswith('Resize') and step.get('scale') and step.get('keep_ratio'):
            resize = {'short': min(step.scale), 'long': max(step.scale)}
        elif not step.type.rpartition('.')[2].startswith(('Load', 'Pack')):
            warnings.warn(
                f'the test pipeline has a step {dict(step)}, which the file does not describe; '
                'give it images as that step leaves them',
                stacklevel=1,
            )
    backbone = cfg.model.backbone
    return {
        'classes': list(meta['classes']),
        'palette': [[int(v) for v in color] for color in meta['palette']],
        'resize': resize,
        'arch': f'{cfg.model.type}, {backbone.type} {backbone.get("arch", "")}'.strip(),
    }
