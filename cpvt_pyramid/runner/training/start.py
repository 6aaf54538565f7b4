"""The weights with which a training starts."""

from typing import Any

from mmengine.runner import Runner
from torch import Tensor

from ...checkpoints import LoadsCheckpoints
from ...checkpoints.loading import prepare_state_dict
from ...tooling.command import UserError
from ..config.check import is_pretrained
from ..models import FROM_SCRATCH, fetch_checkpoint


def check_weights(runner: Runner) -> None:
    """Check that the checkpoints a training starts from are complete and fit its backbone.

    If `load_from` holds only a backbone, it becomes the `init_cfg` of the model's backbone.
    """
    for name, module in runner.model.named_modules():
        if not isinstance(module, LoadsCheckpoints):
            continue
        name = name.removeprefix('module.')
        init_cfg = getattr(module, 'init_cfg', None)
        if is_pretrained(init_cfg):
            check_init_cfg(module, init_cfg)
        if runner._load_from and not runner._resume:
            check_load_from(runner, name, module)


def check_init_cfg(backbone: LoadsCheckpoints, init_cfg: Any) -> None:
    path = init_cfg['checkpoint']
    tensors = fetch_checkpoint(path, FROM_SCRATCH)['state_dict']
    prefix = init_cfg.get('prefix') or ''
    if prefix and not prefix.endswith('.'):
        prefix += '.'
    check_backbone(backbone, tensors, prefix, path)


def check_load_from(runner: Runner, name: str, backbone: LoadsCheckpoints) -> None:
    """Check a `load_from` against the backbone of this name; see `check_weights`."""
    path = str(runner._load_from)
    tensors = fetch_checkpoint(path)['state_dict']
    tensors = {key.removeprefix('module.'): value for key, value in tensors.items()}
    prefix = f'{name}.'
    if any(key.startswith(prefix) for key in tensors):
        check_backbone(backbone, tensors, prefix, path)
        return
    check_backbone(backbone, tensors, '', path)
    runner.logger.info(f'{path} holds only a backbone: loading it into model.{name}')
    init_cfg: Any = {'type': 'Pretrained', 'checkpoint': path}
    backbone.init_cfg = init_cfg
    runner._load_from = None


def check_backbone(
    backbone: LoadsCheckpoints, tensors: dict[str, Tensor], prefix: str, path: str
) -> None:
    try:
        prepare_state_dict(backbone, dict(tensors), prefix)
    except ValueError as error:
        raise UserError(f'{path}: {error}') from error
