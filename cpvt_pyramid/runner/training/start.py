"""Where a training starts: the checkpoint that it resumes, or weights. And its first loss."""

import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ...checkpoints import LoadsCheckpoints
from ...checkpoints.loading import fit_checkpoint
from ...config.check import is_pretrained
from ...predict.openmmlab.models import FROM_SCRATCH, fetch_checkpoint
from ...tooling.command import UserError, rank


class Start(NamedTuple):
    """Where a training continues."""

    path: Path
    checkpoint: dict

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.checkpoint['meta']['seed']


def find_start(cfg: Config, work_dir: Path, resume: Union[bool, str]) -> Optional[Start]:
    """The checkpoint that a training resumes; None if it begins.

    Args:
        cfg: the config, whose own `resume` and `load_from` count if `resume` is False.
        work_dir: of the training.
        resume: a path; True for the last complete checkpoint in the work dir, if there is one.

    Raises:
        UserError: not a checkpoint of a training; or checkpoints in the work dir, which a training
            that begins would mix with its own.
    """
    if cfg.get('resume') and not resume:
        resume = cfg.get('load_from') or True
    if not resume:
        if any(work_dir.glob('*.pth')):
            raise UserError(
                f'{work_dir} already has checkpoints of a training; continue it with --resume or '
                'choose another --work-dir'
            )
        return None
    path = last_checkpoint(work_dir) if resume is True else Path(resume)
    if path is None:
        if rank() == 0:
            print(f'no complete checkpoint in {work_dir}: training from the start')
        return None
    if not path.is_file():
        raise UserError(f'no checkpoint at {path}')
    checkpoint = read_training(path)
    if checkpoint is None:
        raise UserError(f'{path} is not a complete checkpoint of a training')
    return Start(path, checkpoint)


def read_training(path: Union[str, Path]) -> Optional[dict]:
    """The checkpoint of a training at `path`, or None if it is something else or truncated."""
    try:
        # torch 2.1 takes no Path here.
        checkpoint = torch.load(str(path), map_location='cpu', mmap=True, weights_only=False)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError):
        return None
    is_training = isinstance(checkpoint, dict) and {'meta', 'optimizer'} <= checkpoint.keys()
    return checkpoint if is_training else None


def last_checkpoint(folder: Path) -> Optional[Path]:
    """The last complete checkpoint of a training in `folder`, if there is one.

    mmengine's own file `last_checkpoint` may be truncated or out of date after a kill.
    """
    written = {}
    for path in folder.glob('*.pth'):
        if checkpoint := read_training(path):
            written[checkpoint['meta']['time'], checkpoint['meta']['iter']] = path
    return written[max(written)] if written else None


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
    inner = {k[len(prefix) :]: value for k, value in tensors.items() if k.startswith(prefix)}
    if not inner:  # of another part of the model
        return
    try:
        fit_checkpoint(backbone, inner)
    except ValueError as error:
        raise UserError(f'{path}: {error}') from error


@HOOKS.register_module()
class FirstLossHook(Hook):
    """Ends a training whose first loss is not finite: neither are its weights from then on."""

    def after_train_iter(self, runner: Runner, outputs: dict, **_: Any) -> None:
        if runner.iter > 0:  # reading a loss waits for the GPU
            return
        loss = torch.as_tensor(outputs.get('loss', 0)).item()
        if not math.isfinite(loss):
            raise UserError(
                f'the first loss must be finite, got {loss}: check what the model divides by, such '
                'as data_preprocessor.std and bbox_coder.target_stds, the data, and the weights '
                'that training starts from'
            )
