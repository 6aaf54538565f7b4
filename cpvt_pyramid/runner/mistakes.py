"""Which exceptions of a run are mistakes in its config, and in which setting.

    construction   anything raised while mmengine builds an object from the config
    keyword        a call with an unknown keyword argument that is a key of the config
    misfit         a layer that gets another number of channels than it was built for
    refusal        a `raise` or `assert` of an OpenMMLab package or of this one
    loss           another process of the run ended, and has said why

These end in one line. All other exceptions are bugs and keep their traceback. A bug can look like
one of these; so the traceback of a run is written to its work dir.
"""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dis import opmap
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Optional

from mmengine.config import Config
from torch import nn

from .command import Stopped, UserError, contexts, is_disk_full, one_line, rank
from .configs import dicts_in, kind_of

BUILDERS = (
    'mmengine.registry.build_functions', 'mmengine.runner.runner',
    'cpvt_pyramid.runner.tool_runner',
)  # fmt: skip
REFUSING = 'cpvt_pyramid', 'mmcv', 'mmdet', 'mmengine', 'mmpretrain', 'mmseg'
MISFIT = re.compile('channels|shapes cannot be multiplied|normalized_shape|running_mean')
LOST = re.compile('Connection (closed|reset) by peer|remote process exited')  # gloo, NCCL
# What to do, where a message does not say it.
ADVICE = {
    'The image size in a batch should be the same': 'set test_dataloader.batch_size=1',
    'None is not a callable object': 'there is no class of the name in optimizer.type',
    'persistent_workers option needs': 'set persistent_workers=False with it',
    'the first argument must be callable': 'there is no function of the name in collate_fn.type',
}


@contextmanager
def config_mistakes(cfg: Config) -> Iterator[None]:
    """Inside this context a mistake in the config is a `UserError`."""
    try:
        yield
    except (Stopped, UserError):
        raise
    except Exception as error:
        causes = list(contexts(error))
        if any(not isinstance(e, Exception) or is_disk_full(e) for e in causes):
            raise  # an interrupt, or a full disk
        line = describe(error, cfg)
        if line is None:
            raise
        if cfg.get('work_dir'):
            name = f'traceback.{rank()}.txt' if rank() else 'traceback.txt'
            path = Path(cfg.work_dir, name)
            path.write_text(''.join(traceback.format_exception(error)))
            line += f' (traceback: {path})'
        raise UserError(line) from error


def describe(error: Exception, cfg: Config) -> Optional[str]:
    """One line about a mistake in the config, or None if the error is something else."""
    frames = [step.tb_frame for step in steps_of(error)]
    builds = [frame for frame in frames if is_builder(frame)]
    modules = [frame for frame in frames if isinstance(self_of(frame), nn.Module)]
    layers = [self_of(frame) for frame in modules if frame.f_code.co_name == 'forward']
    keyword = re.search("unexpected keyword argument '(.*?)'", str(error))
    settings = list(dicts_in(cfg.to_dict()))
    keyword_at = [path for path, inner in settings if keyword and keyword[1] in inner]
    # mmengine catches some errors and raises others of the same type.
    origin = [e for e in contexts(error) if type(e) is type(error)][-1]
    if builds:
        setting = first_dict(builds[-1])
        where = setting and path_of(setting, settings) or 'the config'
    elif keyword_at:
        where = keyword_at[0]
    elif layers and isinstance(error, RuntimeError) and MISFIT.search(str(error)):
        where = f'{module_name(layers[-1], modules)} does not fit its input'
    elif is_refusal(list(steps_of(origin))[-1]):
        refusing = self_of(list(steps_of(origin))[-1].tb_frame)
        if isinstance(refusing, nn.Module):
            where = module_name(refusing, modules)
        else:
            where = 'the config' if refusing is None else type(refusing).__name__
    elif isinstance(error, RuntimeError) and LOST.search(str(error)):
        return 'the connection to another process is lost; its output says why'
    elif message := refusal_of_worker(str(error)):
        return f'while loading data: {message}'
    else:
        return None
    return f'{where}: {complaint(origin)}'


def steps_of(error: Exception) -> Iterator[TracebackType]:
    """The traceback of an error, outermost call first."""
    step = error.__traceback__
    while step:
        yield step
        step = step.tb_next


def is_builder(frame: FrameType) -> bool:
    """Whether a call is one in which mmengine builds an object from a config."""
    name = frame.f_code.co_name.removeprefix('_')
    builds = name.startswith('build_') or name == 'from_cfg'
    return builds and frame.f_globals.get('__name__') in BUILDERS


def self_of(frame: FrameType) -> Any:
    """The object whose method a call is, or None."""
    return frame.f_locals.get('self')


def is_refusal(step: TracebackType) -> bool:
    """Whether a step is a `raise` or `assert` of an OpenMMLab package or of this one."""
    package = step.tb_frame.f_globals.get('__name__', '').partition('.')[0]
    raises = step.tb_frame.f_code.co_code[step.tb_lasti] == opmap['RAISE_VARARGS']
    return raises and package in REFUSING


def refusal_of_worker(text: str) -> Optional[str]:
    """The message of a refusal in a data worker, of whose traceback only the text arrives."""
    calls = re.findall(r'File "(.*?)", line .*\n +(.*)', text)
    if 'in DataLoader worker process' not in text or not calls:
        return None
    file, source = calls[-1]
    ours = any(package in Path(file).parts for package in REFUSING)
    return text.splitlines()[-1] if ours and source.startswith(('raise ', 'assert ')) else None


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


def first_dict(frame: FrameType) -> Optional[dict]:
    """The config that a builder was called with."""
    code = frame.f_code
    arguments = (frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
    return next((value for value in arguments if isinstance(value, dict)), None)


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
