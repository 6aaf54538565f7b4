"""An exception of a run in one line, with the part of the config that was being built or called.

Each object is built from a dict of the config, which is an argument of mmengine's builder in the
traceback. An object that runs is the `self` of a call: a module is found by its name in the model,
any other object by its class and its settings.

Errors of a device and errors in a user's own code keep their traceback.
"""

import re
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from mmengine.config import Config
from torch import nn

from ...tooling.command import (
    ROOT,
    Stopped,
    UserError,
    contexts,
    is_disk_full,
    missing_package,
    one_line,
    rank,
)
from .load import is_setting
from .parts import SPLITS, dicts_in, kind_of

PACKAGE = Path(__file__).parents[2]
OPENMMLAB = 'mmcv', 'mmdet', 'mmengine', 'mmpretrain', 'mmseg'
BUILDERS = (
    'mmengine.registry.build_functions', 'mmengine.runner.runner',
    'cpvt_pyramid.runner.tool_runner',
)  # fmt: skip
# Errors of a device or a process, by their class and message; many are plain RuntimeErrors.
DEVICE = re.compile(
    'MemoryError|Dist[A-Z][a-z]*Error|CUDA|CUBLAS|cuDNN|NCCL|allocate memory|'
    'DataLoader worker .*(killed|exited)'
)


@contextmanager
def explained(cfg: Config, splits: Sequence[str] = SPLITS) -> Iterator[None]:
    """Inside this context an exception is a `UserError` that names a part of the config; `splits`
    are those whose data are read."""
    try:
        yield
    except Exception as error:
        is_clear = isinstance(error, (Stopped, UserError)) and not worker_text(error)
        ended = any(not isinstance(e, Exception) or is_disk_full(e) for e in contexts(error))
        of_device = DEVICE.search(f'{type(error).__name__}: {error}')
        if is_clear or ended or of_device or is_of_user(error) or missing_package(error):
            raise
        path = write_traceback(error, cfg)
        line = ': '.join(filter(None, [part_of(error, cfg, splits), message_of(error)]))
        raise UserError(f'{line} (traceback: {path})') from error


def write_traceback(error: Exception, cfg: Config) -> Path:
    """Write the whole traceback to a file in the work dir, if there is one; returns its path."""
    work_dir = cfg.get('work_dir')
    if isinstance(work_dir, str) and Path(work_dir).is_dir():
        path = Path(work_dir, f'traceback.{rank()}.txt' if rank() else 'traceback.txt')
    else:
        path = Path(tempfile.mkstemp('.txt', 'traceback-')[1])
    path.write_text(''.join(traceback.format_exception(type(error), error, error.__traceback__)))
    return path


def message_of(error: Exception) -> str:
    """The message of an error, with its class where it is no sentence."""
    if text := worker_text(error):  # after its last indented line
        message = re.split(r'\n +.*(?=\n)', text)[-1]
        return f'while loading data: {one_line(Exception(message))}'
    origin = chain_of(error)[-1]
    text = one_line(origin) or traceback.extract_tb(origin.__traceback__)[-1].line or ''
    return text if ' ' in text and type(error) is ValueError else f'{type(error).__name__}: {text}'


# Whose error it is


def is_of_user(error: Exception) -> bool:
    """Whether code that is neither installed nor of this project raised an error, or called the
    library that did, here or in a data worker."""
    files = [frame.f_code.co_filename for frame in frames_of(error)]
    files += re.findall(r'^ *File "(.*?)"', worker_text(error), re.M)
    callers = [is_users for is_users in map(is_users_file, files) if is_users is not None]
    return bool(callers) and callers[-1]


def is_users_file(file: str) -> Optional[bool]:
    """False for this project and OpenMMLab; None for other libraries, which act for a caller."""
    path = Path(file)
    is_ours = path.is_relative_to(PACKAGE) or path.is_relative_to(ROOT / 'tools')
    if is_ours or {*OPENMMLAB} & {*path.parts}:
        return False
    is_installed = {'site-packages', 'dist-packages'} & {*path.parts}
    # Relative: code that was compiled or made at run time.
    if is_installed or not path.is_absolute() or path.is_relative_to(sysconfig.get_path('stdlib')):
        return None
    return True


def chain_of(error: Exception) -> list[BaseException]:
    """The error and those of which it is a copy: mmengine catches some errors and raises others of
    the same type with more text."""
    return [cause for cause in contexts(error) if type(cause) is type(error)]


def frames_of(error: Exception) -> list[FrameType]:
    """The calls that led to an error, outermost first."""
    causes = chain_of(error)
    return [frame for cause in causes for frame, _ in traceback.walk_tb(cause.__traceback__)]


def worker_text(error: Exception) -> str:
    """The traceback of an error in a data worker, which arrives as text; '' for other errors."""
    text = str(error)
    return text if 'in DataLoader worker process' in text else ''


# The part of the config


def part_of(error: Exception, cfg: Config, splits: Sequence[str]) -> str:
    """The innermost part of a config that was being built or called, such as
    `model.backbone (CPVTPyramid)`; '' if there is none."""
    others = tuple(f'{split}_' for split in SPLITS if split not in splits)  # whose data is not read
    settings = [
        (path, inner)
        for path, inner in dicts_in(cfg.to_dict())
        if path and is_setting(path) and not path.startswith(others)
    ]
    part, names, building = '', {}, False
    for frame in frames_of(error):
        owner, found = frame.f_locals.get('self'), None
        builds = re.match('_?(build_|from_cfg$)', frame.f_code.co_name)
        if builds and frame.f_globals.get('__name__') in BUILDERS:  # from its first argument
            building = True
            arguments = [v for k, v in frame.f_locals.items() if k not in ('self', 'cls')]
            found = best_match(arguments[0], settings, part)
        elif isinstance(owner, nn.Module):
            if not building and not names:  # the model, called
                names = {module: name for name, module in owner.named_modules()}
            if owner in names:
                name = re.sub(r'^module(\.|$)', '', names[owner])
                found = f'model.{name}'.rstrip('.') + f' ({type(owner).__name__})'
        elif owner is not None:
            values = {**getattr(owner, '__dict__', {}), 'type': type(owner)}
            found = best_match(values, settings, part)
        part = found or part
    if worker_text(error):  # of the data of a loop, such as train_cfg
        part = re.sub('_cfg.*', '_dataloader', part)
    return part or ('the config' if building else '')


def best_match(value: Any, settings: Sequence[tuple[str, dict]], outer: str = '') -> Optional[str]:
    """The part of a config that an object or the argument of a builder is from, or None.

    Builders get copies, often with entries added or removed. The part is the one of the same type
    with the most entries in common, and of several of those the one inside `outer`.
    """
    kind = kind_of(value) if isinstance(value, dict) else None
    best, most = None, (0, False)
    for path, candidate in settings if kind is not None else ():
        if kind_of(candidate) == kind:
            common = sum(k in value and repr(value[k]) == repr(v) for k, v in candidate.items())
            score = common + bool(kind), path.startswith(outer.partition(' ')[0])
            if score > most:
                best, most = path, score
    return f'{best} ({kind})' if best and kind else best
