"""What the command-line tools have in common: configs, data sets, checkpoints, users' mistakes."""

import contextlib
import difflib
import inspect
import logging
import os
import re
import signal
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Optional, Union

import mmengine.runner.checkpoint
import torch
from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.model import BaseTTAModel, is_model_wrapper, revert_sync_batchnorm
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import CheckpointLoader, Runner
from mmengine.utils import import_modules_from_strings
from torch import nn

from ..mm import amp  # noqa: F401 (registers a class)
from . import distributed, resume  # noqa: F401 (they register hooks)

# Keys of a config that no argument of mmengine's Runner stands for.
OTHER_KEYS = (
    'activation_checkpointing', 'compile', 'custom_imports', 'efficient_conv_bn_eval',
    'find_unused_parameters', 'model_wrapper_cfg', 'sync_bn', 'tta_model', 'tta_pipeline',
)  # fmt: skip
# How to point a config at data that lie elsewhere or are yet to be made, by the end of data_root.
ADVICE = {
    'data/coco': 'If it is elsewhere: COCO_ROOT=/path/to/coco',
    'data/ade/ADEChallengeData2016': 'If it is elsewhere: ADE_ROOT=/path/to/ADEChallengeData2016',
    'sample/coco': 'It is made by: python tools/demo/sample_dataset.py',
    'sample/ade/ADEChallengeData2016': 'It is made by: python tools/demo/sample_dataset.py',
}
# Exit statuses, as shells give them.
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
# How a process learns its number from what started it.
RANKS = {'pytorch': 'RANK', 'slurm': 'SLURM_PROCID', 'mpi': 'OMPI_COMM_WORLD_RANK'}
# Warnings, mm's and torch's, about what is meant as it is.
CALM = (
    'faster_coco_eval is not', 'The draw is False', '`reduce_zero_label`', '.*avg_non_ignore',
    '`broadcast_buffers`', 'Grad strides do not match',
)  # fmt: skip
# What mmengine logs at length or needlessly: it goes to the log file, not to the terminal.
LISTINGS = re.compile(
    r'\n-{20}|Config:\n|Hooks will be executed|Distributed training is not used|'
    r'"(FileClient|HardDiskBackend)"'
)


class UserError(Exception):
    """A mistake that the user can mend; the message is the one line to show."""


def run_tool(
    name: str, function: Callable[..., Optional[int]], arguments: dict, interrupted: str
) -> int:
    """Call a tool's function and turn what ends it into an exit status and one line on stderr.

    Args:
        name: of the tool, for the line.
        function: what to call; it may return an exit status.
        arguments: keyword arguments of the function.
        interrupted: what to tell a user who interrupts it.
    """
    default = signal.signal(signal.SIGTERM, stop)
    for message in CALM:
        warnings.filterwarnings('ignore', message)
    try:
        return function(**arguments) or 0
    except (UserError, ConnectionError) as error:
        line, status = str(error), 2
    except BaseException as error:
        # mmengine has a bare `except` that makes another error of what stops it.
        causes = list(contexts(error))
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            line, status = f'interrupted; {interrupted}', INTERRUPTED
        elif any(isinstance(cause, SystemExit) and cause.code == TERMINATED for cause in causes):
            line, status = f'terminated; {interrupted}', TERMINATED
        else:
            raise
    finally:
        signal.signal(signal.SIGTERM, default)
    if rank() == 0:
        print(f'{name}: {line}', file=sys.stderr)
    return status


def contexts(error: Optional[BaseException]) -> Iterator[BaseException]:
    """An exception, the one during whose handling it came, and so on."""
    while error is not None:
        yield error
        error = error.__context__


def stop(signum: int, frame: Optional[FrameType]) -> None:
    """Makes SIGTERM unwind the stack, so that a file being written is put away."""
    raise SystemExit(TERMINATED)


class QuietRunner(Runner):
    """mmengine's Runner, with its long listings in the log file alone."""

    def build_logger(self, *args: Any, **options: Any) -> MMLogger:
        logger = super().build_logger(*args, **options)
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(lambda record: not LISTINGS.match(record.getMessage()))
        return logger

    def build_model(self, model: Union[nn.Module, dict]) -> nn.Module:
        with mistakes_in_the_model():
            return super().build_model(model)


@contextlib.contextmanager
def mistakes_in_the_model() -> Iterator[None]:
    """What a model's constructors refuse, such as an unknown arch, is a user's mistake."""
    try:
        yield
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise UserError(f'the model cannot be built: {one_line(error)}') from error


def rank() -> int:
    """The number of this process among those that were started with it."""
    return int(next((os.environ[name] for name in RANKS.values() if name in os.environ), 0))


def join_processes(cfg: Config, launcher: str) -> None:
    """Set a config up for a launcher: none, pytorch, slurm or mpi; on CPUs, connect already."""
    cfg.launcher = launcher
    if launcher == 'none':
        return
    if RANKS[launcher] not in os.environ:
        raise UserError(f'--launcher {launcher} is for processes that {launcher} started')
    cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), {'type': 'TotalBatchHook'}]
    if get_device() != 'cpu':
        return
    # mmengine assumes a GPU for each process wherever there are several.
    if launcher != 'pytorch':
        raise UserError(f'--launcher {launcher} needs GPUs; dist_train.sh does not')
    cfg.model_wrapper_cfg = {
        'type': 'MMDistributedDataParallel',
        'device_ids': None,
        'broadcast_buffers': False,
        'find_unused_parameters': cfg.get('find_unused_parameters', False),
    }
    cfg.sync_bn = None
    desynchronise_batch_norms(cfg.model)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group('gloo')


def leave_processes() -> None:
    """Wait for the other processes and disconnect: one that ends while another still works can
    abort in the teardown of the interpreter."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def desynchronise_batch_norms(config: Any) -> None:
    """Make every SyncBN in a config, for which CPUs have no kernel, a BN."""
    if isinstance(config, dict):
        if config.get('type') in ('SyncBN', 'MMSyncBN'):
            config['type'] = 'BN'
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for value in config:
            desynchronise_batch_norms(value)


def load_config(path: Union[str, Path], options: Sequence[str] = ()) -> Config:
    """The config at `path` with `--cfg-options` merged in and its custom imports done."""
    if not Path(path).is_file():
        raise UserError(f'no config at {path}')
    try:
        cfg = Config.fromfile(path, import_custom_modules=False)
    except Exception as error:  # a config is a program, the user's
        raise UserError(f'config {path}: {type(error).__name__}: {one_line(error)}') from error
    if 'model' not in cfg:
        raise UserError(f'{path} describes no model; is it a part of a config?')
    merge_options(cfg, options)
    if cfg.get('default_scope') not in ('mmdet', 'mmseg'):
        raise UserError(f'{path} sets default_scope to neither mmdet nor mmseg')
    if cfg.get('custom_imports'):
        import_modules_from_strings(**cfg.custom_imports)
    let_checkpoints_load()
    return cfg


def merge_options(cfg: Config, options: Sequence[str]) -> None:
    """Merge `key=value` settings into a config; a new top-level key must be one mmengine reads."""
    parser = ArgumentParser()
    parser.add_argument('options', nargs='*', action=DictAction)
    values = {}
    for option in options:
        try:
            values.update(parser.parse_args(['--', option]).options)
        except (ValueError, AssertionError) as error:
            raise UserError(f'--cfg-options takes key=value, not {option!r}') from error
    known = {*cfg, *inspect.signature(Runner).parameters, *OTHER_KEYS}
    for key in values:
        top = key.split('.')[0]
        if top not in known:
            close = difflib.get_close_matches(top, known, n=1)
            did_you_mean = f'; did you mean {close[0]!r}?' if close else ''
            raise UserError(f'--cfg-options {key}: no config has a key {top!r}{did_you_mean}')
    try:
        cfg.merge_from_dict(values)
    except (KeyError, TypeError) as error:  # an index beyond a list, a key below a number
        raise UserError(f'--cfg-options {" ".join(options)}: {one_line(error)}') from error


def let_checkpoints_load() -> None:
    """Checkpoints hold more than tensors: the log's history, a schedule's state. torch >= 2.6 reads
    what it is told is safe; the maintained mmengine tells it most, the original one nothing.
    """
    torch.serialization.add_safe_globals([OneCycleParamScheduler, Namespace])  # timm's options
    if not hasattr(mmengine.runner.checkpoint, 'get_torch_safe_globals'):
        os.environ.setdefault('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')


def work_dir_of(cfg: Config, config: Union[str, Path]) -> Path:
    """The folder for what a config's training leaves: its own, or work_dirs/<name of the file>."""
    return Path(cfg.get('work_dir') or Path('work_dirs', Path(config).stem))


def make_folder(path: Union[str, Path]) -> Path:
    """Make a folder to write to, or find out that it cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot make the folder {path}: {error.strerror}') from error
    if not os.access(path, os.W_OK):
        raise UserError(f'cannot write to the folder {path}')
    return Path(path)


def check_data(cfg: Config, *splits: str) -> None:
    """See that the files and folders exist which the data sets of these splits name.

    Args:
        cfg: the config.
        splits: of train, val and test.

    Raises:
        UserError: the first that does not, and what should be where.
    """
    layout = {}  # data_root: what belongs in it
    missing = None
    for split in ('train', 'val', 'test'):
        loader = cfg.get(f'{split}_dataloader')
        for dataset in leaves(loader.dataset) if loader else ():
            root = dataset.get('data_root') or ''
            for name in named_paths(dataset):
                layout.setdefault(root, {})[name] = None  # a dict keeps the order
                if split in splits and not missing and not Path(root, name).exists():
                    missing = split, root, Path(root, name)
    if missing:
        split, root, path = missing
        advice = [text for end, text in ADVICE.items() if Path(root).as_posix().endswith(end)]
        raise UserError(
            f'no {split} data at {clean(path)}. Expected in {clean(root)}: '
            + '. '.join([', '.join(layout[root]), *advice])
        )
    for split in splits:
        for metric in as_list(cfg.get(f'{split}_evaluator')):
            path = metric.get('ann_file')
            if path and is_local(path) and not Path(path).exists():
                raise UserError(f'no annotations at {clean(path)}, which {metric.type} reads')


def check_checkpoints(cfg: Config) -> None:
    """See that the checkpoint files exist which a training begins with."""
    for path in (cfg.get('load_from'), *pretrained(cfg.model)):
        if path and is_local(path) and not Path(path).expanduser().is_file():
            raise UserError(f'no checkpoint at {path}, with which the config begins')


def pretrained(config: Any) -> Iterator[str]:
    """The checkpoints in the `init_cfg` of a model and of its parts."""
    if isinstance(config, dict):
        if config.get('type') == 'Pretrained':
            yield config['checkpoint']
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for value in config:
            yield from pretrained(value)


def leaves(dataset: dict) -> Iterator[dict]:
    """The data sets proper inside RepeatDataset, ConcatDataset and the like."""
    inner = as_list(dataset.get('dataset')) + as_list(dataset.get('datasets'))
    for child in inner:
        yield from leaves(child)
    if not inner:
        yield dataset


def named_paths(dataset: dict) -> Iterator[str]:
    """The local paths, relative to its `data_root`, that a data set's config names."""
    prefixes = dataset.get('data_prefix') or {}
    for name in (dataset.get('ann_file'), *prefixes.values()):
        root = dataset.get('data_root') or ''
        if name and not dataset.get('backend_args') and is_local(root) and is_local(name):
            yield name


def is_local(path: str) -> bool:
    return '://' not in path


def as_list(value: Any) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value] if value else []


def clean(path: Union[str, Path]) -> str:
    """The absolute path, without the `..` that configs put in."""
    return os.path.abspath(path)


def read_checkpoint(path: Union[str, Path]) -> dict:
    """The checkpoint at a path or address, its tensors on the CPU."""
    if is_local(str(path)) and not Path(path).expanduser().is_file():
        raise UserError(f'no checkpoint at {path}')
    try:
        checkpoint = CheckpointLoader.load_checkpoint(
            str(path), map_location='cpu', logger='silent'
        )
        return checkpoint if 'state_dict' in checkpoint else {'state_dict': checkpoint}
    except ConnectionError:
        raise
    except Exception as error:  # torch raises whatever the bytes of a torn or foreign file lead to
        raise UserError(f'{path} is not a whole checkpoint: {one_line(error)}') from error


def build_model(cfg: Config, device: Optional[str]) -> nn.Module:
    """The model of a config, to predict with, on a device; None takes a GPU if there is one."""
    init_default_scope(cfg.default_scope)
    config = dict(cfg.model)
    if cfg.get('data_preprocessor'):
        config.setdefault('data_preprocessor', cfg.data_preprocessor)
    with mistakes_in_the_model():
        model = revert_sync_batchnorm(MODELS.build(config)).eval()
    try:
        return model.to(device or get_device())
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'no device {device}: {one_line(error, 100)}') from error


def load_weights(model: nn.Module, checkpoint: dict, path: Union[str, Path]) -> None:
    """Load a checkpoint, read from `path`, that must be of this very model.

    mmengine's own loading leaves what does not fit at its random start, with a warning.
    """
    tensors = {re.sub(r'^module\.', '', k): v for k, v in checkpoint['state_dict'].items()}
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    try:
        missing, unknown = model.load_state_dict(tensors, strict=False)
    except (RuntimeError, ValueError) as error:  # other shapes; hardly a key in common
        raise UserError(f'{path} is of another model: {one_line(error)}') from error
    for what, names in (('missing', missing), ('not in the model', unknown)):
        if names:
            others = f' and {len(names) - 1} more' if len(names) > 1 else ''
            raise UserError(f'{path} is of another model. Tensors {what}: {names[0]}{others}')


def one_line(error: Exception, length: int = 300) -> str:
    """The message of an error without its line breaks, cut to `length`."""
    text = ' '.join(str(error).split())
    return text if len(text) <= length else text[:length] + ' ...'
