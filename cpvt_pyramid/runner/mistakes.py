"""Which exceptions of a run are mistakes in its config, and in which setting.

    construction   anything raised while mmengine builds an object from the config
    keyword        a call with an unknown keyword argument that is a key of the config
    misfit         a layer whose input has other channels or sizes than it was built for
    refusal        a `raise` or `assert` of an OpenMMLab package or of this one, or of OpenCV
    file           a file that cannot be read or written
    missing data   a sample without what the pipeline should have added
    suspect        a failing expression that reads a setting; see suspects.py
    loss           another process of the run ended, and has said why
    misuse         anything else in the code of an OpenMMLab package, which works with the right
                   settings and data

These end in one line. All other exceptions are bugs and keep their traceback. A bug can look like
one of these; so the traceback of a run is written to its work dir.
"""

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Optional

from mmengine.config import Config
from torch import nn

from ..tooling.command import Stopped, UserError, contexts, is_disk_full, one_line, rank
from .configs import as_list, dicts_in, is_setting, kind_of
from .suspects import (
    entries_of,
    failing_expression,
    is_raised_by,
    package_of,
    suspects,
    suspects_in_text,
)  # fmt: skip

SPLITS = 'train', 'val', 'test'
BUILDERS = (
    'mmengine.registry.build_functions', 'mmengine.runner.runner',
    'cpvt_pyramid.runner.tool_runner',
)  # fmt: skip
OPENMMLAB = 'mmcv', 'mmdet', 'mmengine', 'mmpretrain', 'mmseg'
REFUSING = 'cpvt_pyramid', *OPENMMLAB
# What OpenMMLab's packages call.
LIBRARIES = sys.stdlib_module_names | {
    'PIL', 'addict', 'cv2', 'matplotlib', 'numpy', 'prettytable', 'pycocotools', 'scipy',
    'terminaltables', 'torch', 'torchvision',
}  # fmt: skip
# Errors of a device, or of a process that was killed.
NO_MISTAKE = re.compile('CUDA|CUBLAS|cuDNN|NCCL|out of memory|DataLoader worker')
MISFITS = IndexError, RuntimeError, ValueError
MISFIT = re.compile(
    r"channels|shapes cannot be multiplied|normalized_shape|running_mean|Kernel size can't be|"
    'expected weight to be at least|more than 1 value per channel|each tensor to be equal size|'
    'value tensor of shape|must be the same as input size|defined either for all|'
    r'expected target dtype|Target \d+ is out of bounds|'
    'index 2 is out of bounds for dimension 0 with size 1$'
)
# Look-ups in a sample.
SAMPLE = re.compile(r'(results|data|img_metas?|\w*metainfo)\[')
NO_DATA = re.compile(r"'(?:InstanceData|PixelData|\w+DataSample)' object has no attribute '(\w+)'")
LOST = re.compile('Connection (closed|reset) by peer|remote process exited')  # gloo, NCCL
# What to do, where a message does not say it.
ADVICE = {
    'The image size in a batch should be the same': 'set test_dataloader.batch_size=1',
    'Expected more than 1 value per channel': 'set train_dataloader.batch_size to at least 2',
    'None is not a callable object': 'there is no class of the name in optimizer.type',
    'persistent_workers option needs': 'set persistent_workers=False with it',
    'the first argument must be callable': 'there is no function of the name in collate_fn.type',
    "object has no attribute 'backward'": 'the model has no loss',
    'does not require grad': 'no loss has a gradient; activation_checkpointing can be the reason',
}


@contextmanager
def config_mistakes(cfg: Config, splits: Sequence[str] = SPLITS) -> Iterator[None]:
    """Inside this context a mistake in the config is a `UserError`.

    Args:
        cfg: the config.
        splits: whose data are read.
    """
    try:
        yield
    except (Stopped, UserError):
        raise
    except Exception as error:
        causes = list(contexts(error))
        if any(not isinstance(e, Exception) or is_disk_full(e) for e in causes):
            raise  # an interrupt, or a full disk
        line = describe(error, read_settings(cfg, splits))
        if line is None:
            raise
        if cfg.get('work_dir') and Path(cfg.work_dir).is_dir():
            name = f'traceback.{rank()}.txt' if rank() else 'traceback.txt'
            path = Path(cfg.work_dir, name)
            path.write_text(''.join(traceback.format_exception(error)))
            line += f' (traceback: {path})'
        raise UserError(line) from error


def read_settings(cfg: Config, splits: Sequence[str]) -> list[tuple[str, dict]]:
    """The dicts of a config, with their paths, without those of the other splits' data."""
    others = {*SPLITS} - {*splits}
    keys = [f'{split}_{part}' for split in others for part in ('dataloader', 'evaluator', 'cfg')]
    cfg = Config({key: value for key, value in cfg.items() if key not in keys})
    return [pair for pair in dicts_in(cfg.to_dict()) if is_setting(pair[0])]


def describe(error: Exception, settings: Sequence[tuple[str, dict]]) -> Optional[str]:
    """One line about a mistake in the config, or None if the error is something else.

    Args:
        error: what was raised.
        settings: the dicts of the config, with their paths.
    """
    if 'in DataLoader worker process' in str(error):
        message = refusal_of_worker(str(error), settings)
        return message and f'while loading data: {message}'
    frames = [step.tb_frame for step in steps_of(error)]
    builds = any(map(is_builder, frames))
    modules = [frame for frame in frames if isinstance(self_of(frame), nn.Module)]
    layers = [self_of(frame) for frame in modules if frame.f_code.co_name == 'forward']
    keyword = re.search("unexpected keyword argument '(.*?)'", str(error))
    keyword_at = [path for path, inner in settings if keyword and keyword[1] in inner]
    # mmengine catches some errors and raises others of the same type.
    origin = [e for e in contexts(error) if type(e) is type(error)][-1]
    steps = list(steps_of(origin))
    if builds:
        where = part_in_construction(origin, list(steps_of(error)), settings)
    elif keyword_at:
        where = keyword_at[0]
    elif layers and isinstance(error, MISFITS) and MISFIT.search(str(error)):
        where = misfit(layers[-1], modules, settings)
    elif is_raised_by(steps[-1]) and package_of(steps[-1]) in REFUSING:
        where = owner_of(steps, settings, modules)
    elif isinstance(error, OSError) and error.filename:
        path = setting_of_file(str(error.filename), settings)
        return ': '.join([*path, error.strerror or complaint(error), str(error.filename)])
    elif missing := missing_data(origin, steps):
        owner = owner_of(steps, settings, modules)
        return f'{owner}: no step of the pipeline adds {missing!r} to the data'
    elif names := suspects(origin, steps, settings, REFUSING):
        where = ' or '.join(names[:3])
    elif type(origin).__module__ == 'cv2' and package_of(steps[-1]) in REFUSING:
        where = owner_of(steps, settings, modules)
    elif isinstance(error, RuntimeError) and LOST.search(str(error)):
        return 'the connection to another process is lost; its output says why'
    elif layers and 'must match the size of tensor' in str(error):
        where = misfit(layers[-1], modules, settings)
    elif is_misused(map(package_of, steps)) and not NO_MISTAKE.search(str(error)):
        where = owner_of(steps, settings, modules)
    else:
        return None
    unset = getattr(self_of(steps[-1].tb_frame), 'train_cfg', '') is None
    if isinstance(origin, AttributeError) and unset:
        where += ', which has no train_cfg'
    return f'{where}: {complaint(origin)}'


def steps_of(error: Exception) -> Iterator[TracebackType]:
    """The traceback of an error, outermost call first."""
    step = error.__traceback__
    while step:
        yield step
        step = step.tb_next


def part_in_construction(
    error: BaseException, steps: Sequence[TracebackType], settings: Sequence[tuple[str, dict]]
) -> str:
    """The setting that an object could not be built from, or else the object's config.

    Args:
        error: what was raised.
        steps: its traceback, outermost call first.
        settings: the dicts of the config, with their paths.
    """
    frames = [step.tb_frame for step in steps]
    last = max(index for index, frame in enumerate(frames) if is_builder(frame))
    built, inside = built_from(frames[last]), steps[last + 1 :]
    where = built and path_of(built, settings)
    names = []
    if built is None and not inside:  # for example, None: a setting that the calling object reads
        outside = [step for step in steps[:last] if package_of(step) != 'mmengine']
        names = suspects(error, outside, settings, REFUSING) if outside else []
    elif built and where == kind_of(built):  # a class that a setting such as constructor names
        names = [str(e) for e in entries_of(settings) if e.value == where and e.key != 'type']
    elif inside and not (where and is_raised_by(steps[-1])):  # whose message says what is wrong
        path = where.partition(' ')[0] if where else ''
        below = [pair for pair in settings if f'{pair[0]}.'.startswith(f'{path}.'.lstrip('.'))]
        names = suspects(error, inside, below, REFUSING)
    return ' or '.join(names[:3]) or where or 'the config'


def is_builder(frame: FrameType) -> bool:
    """Whether a call is one in which mmengine builds an object from a config."""
    name = frame.f_code.co_name.removeprefix('_')
    builds = name.startswith('build_') or name == 'from_cfg'
    return builds and frame.f_globals.get('__name__') in BUILDERS


def is_misused(packages: Iterable[str]) -> bool:
    """Whether an error is one of OpenMMLab's code, or of a library that it calls.

    Args:
        packages: of the calls that led to the error, outermost first.
    """
    own = [package for package in packages if package not in LIBRARIES]
    return bool(own) and own[-1] in OPENMMLAB


def self_of(frame: FrameType) -> Any:
    """The object whose method a call is, or None."""
    return frame.f_locals.get('self')


def setting_of_file(name: str, settings: Sequence[tuple[str, dict]]) -> list[str]:
    """The setting, if there is one, that a file, a folder above it or a file in it is named by."""
    texts = [e for e in entries_of(settings) if isinstance(e.value, str) and e.value.strip('./')]
    found = [e for e in texts if name.startswith(e.value) or e.value.startswith(name)]
    return [str(max(found, key=lambda entry: len(entry.value)))] if found else []


def missing_data(error: BaseException, steps: Sequence[TracebackType]) -> Optional[str]:
    """What a transform or a head looks up in a sample in vain, or None."""
    if isinstance(error, KeyError) and SAMPLE.match(failing_expression(steps[-1])):
        return error.args[0]
    missing = NO_DATA.fullmatch(str(error))
    return missing and missing[1]


def refusal_of_worker(text: str, settings: Sequence[tuple[str, dict]]) -> Optional[str]:
    """What a data worker refuses, of whose traceback only the text arrives."""
    calls = re.findall(r'File "(.*?)", line .*\n +(.*)', text)
    message = ' '.join(re.split(r'\n +\S.*(?=\n)', text)[-1].split())
    if not calls:
        return None
    source = calls[-1][1]
    data = [(path, inner) for path, inner in settings if '.pipeline.' in path]
    packages = [package_of_file(file) for file, _ in calls]
    if names := suspects_in_text(message, [source for _, source in calls], data):
        return f'{" or ".join(names[:3])}: {message}'
    refuses = source.startswith(('raise ', 'assert ')) or message.startswith('cv2.error')
    refuses = refuses and packages[-1] in REFUSING
    return message if refuses or is_misused(packages) else None


def package_of_file(file: str) -> str:
    """The package of a module's file."""
    parts = Path(file).parts
    installed = [i for i, part in enumerate(parts) if part in ('site-packages', 'dist-packages')]
    if installed:
        return parts[installed[-1] + 1].removesuffix('.py')
    if Path(file).is_relative_to(sysconfig.get_path('stdlib')):
        return 'sys'
    return next((package for package in REFUSING if package in parts), '')  # a checkout


def owner_of(
    steps: Sequence[TracebackType], settings: Sequence[tuple[str, dict]], modules: list[FrameType]
) -> str:
    """The innermost object that the config names and whose method was called."""
    kinds = {kind_of(inner) for _, inner in settings}
    for step in reversed(steps):
        owner = self_of(step.tb_frame)
        if isinstance(owner, nn.Module):
            return module_name(owner, modules)
        kind = type(owner).__name__
        if owner is not None and kind in kinds:
            return path_of({**vars(owner), 'type': kind}, settings) or kind
    return 'the config'


def misfit(layer: nn.Module, calls: list[FrameType], settings: Sequence[tuple[str, dict]]) -> str:
    """The layer that does not fit its input, after the setting that its input size is from."""
    name = module_name(layer, calls)
    size = getattr(layer, 'in_channels', getattr(layer, 'in_features', None))
    parts = [path for path, inner in settings if kind_of(inner) and name.startswith(f'{path}.')]
    part = max(parts, key=len, default='')
    for entry in entries_of(settings):
        if entry.path == f'{part}.in_channels' and size in as_list(entry.value):
            name = f'{entry}: {name}'
    return f'{name} does not fit its input'


def module_name(module: nn.Module, calls: list[FrameType]) -> str:
    """The name of a module, for example `model.neck (FPN)`, from the calls that led to it, of which
    the first is the model's."""
    names = {inner: name for name, inner in self_of(calls[0]).named_modules()}
    name = f'model.{names.get(module, "")}'.replace('model.module.', 'model.').rstrip('.')
    return f'{name} ({type(module).__name__})'


def complaint(error: BaseException) -> str:
    """The message of an error, as a sentence."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = one_line(Exception(text.partition(' Please check whether')[0])).rstrip('.')
    if not text:  # an assertion without a message: its source
        text = traceback.extract_tb(error.__traceback__)[-1].line
    if ' ' not in text:
        text = f'{type(error).__name__}: {text}'
    return '; '.join([text, *(advice for start, advice in ADVICE.items() if start in text)])


# The setting


def built_from(builder: FrameType) -> Optional[dict]:
    """The config that a builder was called with, or None if that is no dict."""
    code = builder.f_code
    arguments = [n for n in code.co_varnames[: code.co_argcount] if n not in ('self', 'cls')]
    config = builder.f_locals[arguments[0]] if arguments else None
    return config if isinstance(config, dict) else None


def path_of(setting: dict, settings: Sequence[tuple[str, dict]]) -> Optional[str]:
    """Where among the settings of a config one is, for example `model.backbone (CPVTPyramid)`.

    Builders get copies, often with entries added or removed. The setting is the one of the same
    type with the most entries in common.
    """
    kind = kind_of(setting)
    best, most = None, 0
    for path, candidate in settings:
        common = sum(k in setting and repr(setting[k]) == repr(v) for k, v in candidate.items())
        if path and kind_of(candidate) == kind and common > most:
            best, most = path, common
    return f'{best} ({kind})' if best and kind else best or kind or None
