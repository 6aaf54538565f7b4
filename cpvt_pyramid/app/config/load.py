"""Loading configs and reading what they name."""

import ast
import inspect
import re
import warnings
from argparse import ArgumentParser
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

from mmengine.config import Config, DictAction
from mmengine.runner import Runner
from mmengine.utils import import_modules_from_strings

from ..tooling.command import UserError, one_line, rank
from ..tooling.names import did_you_mean
from .parts import FRAMEWORKS, OPENMMLAB_NEEDED, dicts_in, framework_of, lacks_openmmlab
from .shipped import check_config_file

RUNNER_KEYS = tuple(inspect.signature(Runner).parameters)
# All top-level settings of a config: these, and what mmengine and the tools read besides.
SETTINGS = (
    *RUNNER_KEYS,
    'activation_checkpointing',
    'check_classes',
    'compile',
    'custom_imports',
    'efficient_conv_bn_eval',
    'find_unused_parameters',
    'model_wrapper_cfg',
    'sync_bn',
    'trial',
    'tta_model',
    'tta_pipeline',
)


def load_config(path: Union[str, Path], options: Sequence[str] = ()) -> Config:
    """The config at `path` with `--cfg-options` merged in and its custom imports done."""
    check_config_file(path)
    if Path(path).read_bytes().startswith(BOM_UTF8):
        raise UserError(f'{path} must be UTF-8 without a byte order mark (BOM): save it so')
    try:
        cfg = Config.fromfile(path, import_custom_modules=False)
    except Exception as error:  # a config is a program of the user
        raise UserError(f'config {path}: {type(error).__name__}: {one_line(error)}') from error
    if 'model' not in cfg:
        raise UserError(f'{path} has no model; is it a part of a config?')
    if Path(path).suffix != '.py':
        restore_tuples(cfg)
    merge_options(cfg, options)
    import_custom(cfg, path)
    set_framework(cfg, path)
    return cfg


def restore_tuples(cfg: Config) -> None:
    """Make tuples of the sizes, scales and ranges of a config in JSON or YAML, which have only
    lists: transforms of mm insist on tuples."""
    for _, settings in dicts_in(cfg._cfg_dict):
        for key, value in settings.items():
            if re.search('(size|scales?|range)$', key):
                settings[key] = pairs_as_tuples(value)


def pairs_as_tuples(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    is_pair = len(value) == 2 and all(isinstance(x, (int, float)) for x in value)
    return tuple(value) if is_pair else [pairs_as_tuples(x) for x in value]


def set_framework(cfg: Config, path: Union[str, Path]) -> None:
    """Set the `default_scope` of a config, which may lack it where types are classes, as in the new
    configs of mm; `path` is named in errors.
    """
    cfg.default_scope = cfg.get('default_scope') or framework_of(cfg.model.get('type'))
    if cfg.default_scope not in FRAMEWORKS:
        raise UserError(f'{path} must set default_scope to mmdet or mmseg')


def config_in_checkpoint(checkpoint: dict, path: Union[str, Path]) -> Config:
    """The config that mmengine stores in the checkpoints of a training, with its custom imports
    done; `path` is named in errors."""
    cfg = settings_in_checkpoint(checkpoint, path)
    import_custom(cfg, path)
    set_framework(cfg, path)
    return cfg


def settings_in_checkpoint(checkpoint: dict, path: Union[str, Path]) -> Config:
    """As `config_in_checkpoint`, of which nothing is imported.

    The text is read, not executed: a checkpoint may come from anywhere.
    """
    meta = checkpoint.get('meta')
    text = meta.get('cfg') if isinstance(meta, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f'{path} must be a checkpoint of a training, which has its config inside; run others '
            'with cpvt infer CONFIG CHECKPOINT'
        )
    try:
        lines = DictCalls().visit(ast.parse(text)).body
        cfg = Config({line.targets[0].id: ast.literal_eval(line.value) for line in lines})
    except (AttributeError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f'{path}: the config inside is not readable: {one_line(error)}') from error
    if not isinstance(cfg.get('model'), dict):
        raise UserError(f'{path}: the config inside has no model')
    return cfg


class DictCalls(ast.NodeTransformer):
    """Replaces `dict(key=value)` by `{'key': value}`, which is a literal."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if getattr(node.func, 'id', None) != 'dict' or node.args:
            return node
        keys: list[Optional[ast.expr]] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        return ast.Dict(keys, [keyword.value for keyword in node.keywords])


def import_custom(cfg: Config, path: Union[str, Path]) -> None:
    """Do the custom imports of a config; `path` is named in errors."""
    settings = cfg.get('custom_imports') or {'imports': []}
    try:
        inspect.signature(import_modules_from_strings).bind(**settings)
    except TypeError as error:
        raise UserError(f'custom_imports of {path}: {one_line(error)}') from error
    try:
        import_modules_from_strings(**settings)
    except ImportError as error:
        cause = f' ({one_line(error.__context__)})' if error.__context__ else ''
        line = f'custom_imports of {path}: {one_line(error)}{cause}'
        if lacks_openmmlab(error):
            line += f'; {OPENMMLAB_NEEDED}'
        raise UserError(line) from error


def merge_options(cfg: Config, options: Sequence[str]) -> None:
    """Merge `key=value` settings into a config; warn of those that are new to it."""
    parser = ArgumentParser()
    parser.add_argument('options', nargs='*', action=DictAction)
    values = {}
    for option in options:
        try:
            values.update(parser.parse_args(['--', option]).options)
        except (ValueError, AssertionError, RecursionError) as error:
            raise UserError(f'--cfg-options takes key=value, not {option!r}') from error
    for key in values:
        check_option(key)
    missing = [missing_setting(cfg, key) for key in values]
    try:
        cfg.merge_from_dict(values)
    except (AttributeError, KeyError, TypeError) as error:  # a list index, a key below a number
        raise UserError(f'--cfg-options {" ".join(options)}: {one_line(error)}') from error
    created = dict.fromkeys(filter(None, missing))
    if created and rank() == 0:
        warnings.warn(
            f'--cfg-options creates what the config does not have: {", ".join(created)}',
            stacklevel=2,
        )


def missing_setting(cfg: Config, key: str) -> str:
    """The part of a setting's path that a config does not have, and what may be meant; '' if it has
    the setting. A misspelled one ends a run, or has no effect."""
    value: Any = cfg._cfg_dict
    names = key.split('.')
    for depth, name in enumerate(names):
        if isinstance(value, (list, tuple)) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, dict) and depth:
            meant = did_you_mean(name, value).lstrip('; ')
            return '.'.join(names[: depth + 1]) + (f' ({meant})' if meant else '')
        else:  # one of SETTINGS, see `check_option`; or an error of `merge_from_dict`
            return ''
    return ''


def check_option(key: str) -> None:
    """Check that an option changes a setting: mmengine ignores others. A variable of a config file
    is none; its value is in settings already."""
    name = key.partition('.')[0]
    if name not in SETTINGS:
        raise UserError(
            f'--cfg-options {key}: {name!r} is no setting{did_you_mean(name, SETTINGS)}. Variables '
            'of a config file have no effect: set what uses them, for example '
            'train_dataloader.dataset.data_root'
        )


def work_dir_of(cfg: Config, config: Union[str, Path]) -> Path:
    """The folder for a training: the config's own, or work_dirs/<name of the config file>."""
    return Path(cfg.get('work_dir') or Path('work_dirs', Path(config).stem))
