"""Building models from configs, and loading their checkpoints."""

import copy
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Optional, Union
from urllib.error import URLError

import mmengine.runner.checkpoint
import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.model import BaseTTAModel, is_model_wrapper, revert_sync_batchnorm
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import CheckpointLoader
from torch import nn

from ....checkpoints.downloads import SCHEMES
from ....checkpoints.reading import read_checkpoint
from ....tasks.trained import load_whole, weights_of
from ...config.parts import is_local
from ...tooling.command import UserError, one_line


def build_model(cfg: Config, device: Optional[str]) -> nn.Module:
    """The model of a config in evaluation mode; `device=None` takes a GPU if there is one."""
    init_default_scope(cfg.default_scope)
    config = copy.deepcopy(cfg.model)  # into which some constructors write
    if cfg.get('data_preprocessor'):
        config.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = revert_sync_batchnorm(MODELS.build(config)).eval()
    try:
        return model.to(device or get_device())
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'no device {device}: {one_line(error, 100)}') from error


FROM_SCRATCH = (
    ': --cfg-options model.backbone.init_cfg.checkpoint=FILE. Without it, take a base whose '
    'weights are in this package (cpvt://pcpvt_nano), such as trees_retinanet_cpvt_nano, or train '
    'from scratch with model.backbone.init_cfg=None'
)


def fetch_checkpoint(path: Union[str, Path], otherwise: str = '') -> dict:
    """The checkpoint at a path or address, with its tensors on the CPU under `state_dict`.

    No code in a file is executed, unless only mmengine can read the address (`s3://`, ...).

    Args:
        path: what `checkpoints.read_checkpoint` or mmengine takes, or the name of a trained model.
        otherwise: what else the user can do if it cannot be downloaded.
    """
    if is_local(str(path)) or str(path).startswith(SCHEMES):
        try:
            with download_errors(str(path), otherwise):
                checkpoint = read_checkpoint(weights_of(path))
        except (FileNotFoundError, ValueError) as error:
            raise UserError(str(error)) from error
    else:
        try:
            with trusted_checkpoints(), download_errors(str(path), otherwise):
                checkpoint = CheckpointLoader.load_checkpoint(
                    str(path), map_location='cpu', logger='silent'
                )
        except UserError:
            raise
        except Exception as error:  # torch raises many kinds on a truncated or foreign file
            raise UserError(f'{path} is not a complete checkpoint: {one_line(error)}') from error
    if 'state_dict' not in checkpoint:
        checkpoint = {'state_dict': checkpoint}
    tensors = checkpoint['state_dict']
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise UserError(f'{path} holds no tensors by their names')
    return checkpoint


def load_whole_model(model: nn.Module, checkpoint: dict, path: Union[str, Path]) -> None:
    """Load a checkpoint, read from `path`, whose tensors must be exactly those of the model.

    mmengine's own loading only warns about missing tensors and leaves them at their initial values.
    """
    tensors = {re.sub(r'^module\.', '', k): v for k, v in checkpoint['state_dict'].items()}
    inner: Any = model
    while is_model_wrapper(inner) or isinstance(inner, BaseTTAModel):
        inner = inner.module
    try:
        load_whole(inner, tensors, str(path))
    except ValueError as error:
        raise UserError(one_line(error)) from error


@contextmanager
def trusted_checkpoints() -> Iterator[None]:
    """Inside this context torch >= 2.6 loads checkpoints that hold more than tensors.

    These are logged values, states of schedules, and timm's options. The maintained mmengine allows
    most of their types itself; the original one does not, and is left to torch's environment
    variable, set only inside this context.
    """
    variable = 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'
    original = not hasattr(mmengine.runner.checkpoint, 'get_torch_safe_globals')
    with ExitStack() as stack:
        if hasattr(torch.serialization, 'safe_globals'):
            allowed = [OneCycleParamScheduler, Namespace]  # Namespace: timm's training options
            stack.enter_context(torch.serialization.safe_globals(allowed))
        if original and variable not in os.environ:
            os.environ[variable] = '1'
            stack.callback(os.environ.pop, variable, None)
        yield


@contextmanager
def download_errors(what: str, otherwise: str = '') -> Iterator[None]:
    """Report an address that cannot be reached as a user's error; see `fetch_checkpoint`."""
    try:
        yield
    except (URLError, ConnectionError, TimeoutError) as error:
        line = str(error)
        if not line.startswith('cannot download'):  # not from `downloads`
            line = (
                f'cannot download {what} ({type(error).__name__}: {one_line(error)}). Download it '
                f'elsewhere and give the path of the file instead'
            )
        raise UserError(line + otherwise) from error
