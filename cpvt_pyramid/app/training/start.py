"""Where a training starts: at a checkpoint that it resumes, or with weights."""

import pickle
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from mmengine.config import Config
from torch import Tensor, nn

from ...checkpoints.files import describe_file, missing_file
from ...checkpoints.loading import BACKBONES, Backbone, fit_checkpoint
from ..config.check import is_pretrained
from ..config.parts import is_local
from ..predict.openmmlab.loading import FROM_SCRATCH, fetch_checkpoint
from ..tooling.command import UserError, rank
from .resuming import changed_settings, check_fixed


class Start(NamedTuple):
    """Where a training continues."""

    path: Path
    checkpoint: dict


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
    folders = checkpoint_folders(cfg, work_dir)
    if not resume:
        for folder in folders:
            if any(folder.glob('*.pth')):
                raise UserError(
                    f'{folder} already has checkpoints of a training; continue it with --resume or '
                    'choose another --work-dir'
                )
        return None
    path = last_checkpoint(*folders) if resume is True else Path(resume)
    if path is None:
        if rank() == 0:
            print(f'no complete checkpoint in {work_dir}: training from the start')
        return None
    if not path.is_file():
        raise UserError(missing_file(path))
    checkpoint = read_training(path)
    if checkpoint is None:
        what = describe_file(path) or 'is not a complete checkpoint of a training'
        raise UserError(f'{path} {what}')
    if 'message_hub' not in checkpoint:
        raise UserError(
            f'{path} must be of a training by MMEngine to resume it, as of MMDetection 3; start '
            f'from its weights: --cfg-options load_from={path}'
        )
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


def checkpoint_folders(cfg: Config, work_dir: Path) -> list[Path]:
    """The folders with the checkpoints of a training: the work dir, and the one that the
    CheckpointHook makes in its `out_dir`."""
    folders = [work_dir]
    for hook in (cfg.get('default_hooks') or {}).values():
        out_dir = hook.get('out_dir') if isinstance(hook, dict) else None
        if out_dir and is_local(out_dir):
            folders.append(Path(out_dir, work_dir.absolute().name))
    return folders


def last_checkpoint(work_dir: Path, *others: Path) -> Optional[Path]:
    """The last complete checkpoint of a training in a work dir and other folders, if there is one.

    It is that of mmengine's file `last_checkpoint`, also after the folder was moved. After a kill
    that may be truncated or name a deleted file: then it is the one written last, by the file
    system. Neither depends on the local time that a checkpoint names.
    """
    folders = (work_dir, *others)
    pointer = work_dir / 'last_checkpoint'
    if pointer.is_file():
        name = Path(pointer.read_text(errors='replace').strip()).name
        for folder in folders:
            path = folder / name
            if path.is_file() and read_training(path):
                return path
    written = {}
    for path in (path for folder in folders for path in folder.glob('*.pth')):
        if checkpoint := read_training(path):
            written[path.stat().st_mtime_ns, checkpoint['meta']['iter']] = path
    return written[max(written)] if written else None


def resume_from(cfg: Config, start: Optional[Start]) -> None:
    """Set a config to resume a training; None is one that begins.

    Raises:
        UserError: the config changes what the checkpoint cannot go on with, such as the schedule.
    """
    cfg.resume = start is not None
    if start is None:
        return
    try:
        changed = changed_settings(cfg, start.checkpoint, start.path)
    except UserError:
        changed = {}  # the ResumeHook says it
    check_fixed(changed, start.path)
    cfg.load_from = str(start.path)
    # mmengine restores the seed only after it has made the order of the samples.
    own = (cfg.get('randomness') or {}).get('seed')
    seed = start.checkpoint['meta'].get('seed', own)
    if own not in (None, seed) and rank() == 0:
        print(f'the seed is that of the checkpoint, {seed}, and not {own}')
    cfg.randomness = {**(cfg.get('randomness') or {}), 'seed': seed}


# Weights


def check_weights(model: nn.Module, load_from: Optional[str]) -> None:
    """Check that the checkpoints a training starts from are complete and fit its backbones."""
    for name, module in model.named_modules():
        if not isinstance(module, BACKBONES):
            continue
        init_cfg: Any = getattr(module, 'init_cfg', None)
        if is_pretrained(init_cfg):
            prefix = init_cfg.get('prefix') or ''
            if prefix and not prefix.endswith('.'):
                prefix += '.'
            tensors = fetch_checkpoint(init_cfg['checkpoint'], FROM_SCRATCH)['state_dict']
            check_backbone(module, tensors, prefix, init_cfg['checkpoint'])
        if load_from:
            check_load_from(module, f'{name.removeprefix("module.")}.', str(load_from))


def check_load_from(backbone: Backbone, prefix: str, path: str) -> None:
    """Check a `load_from` against the backbone whose parameters have this prefix."""
    tensors = fetch_checkpoint(path)['state_dict']
    tensors = {key.removeprefix('module.'): value for key, value in tensors.items()}
    if any(key.startswith(prefix) for key in tensors):
        check_backbone(backbone, tensors, prefix, path)
        return
    check_backbone(backbone, tensors, '', path)
    raise UserError(
        f'{path} holds only a backbone: instead of load_from, set model.{prefix}init_cfg='
        f"dict(type='Pretrained', checkpoint='{path}')"
    )


def check_backbone(backbone: Backbone, tensors: dict[str, Tensor], prefix: str, path: str) -> None:
    inner = {k[len(prefix) :]: value for k, value in tensors.items() if k.startswith(prefix)}
    if not inner:  # of another part of the model
        return
    try:
        fit_checkpoint(backbone, inner)
    except ValueError as error:
        raise UserError(f'{path}: {error}') from error
