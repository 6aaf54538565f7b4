"""What settings must be, where mm or the tools would crash in C++, run forever, or take the value
for something else without a word."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mmengine.config import Config

from ...tooling.command import UserError
from .parts import dicts_in

# Other settings may be None, which leaves them out.
NEVER_NONE = 'classes', 'dataset', 'sampler'


class Rule(NamedTuple):
    """What a setting must be."""

    path: str  # a pattern of the whole path; of more than one, `paths` makes one
    holds: Callable[[Any], bool]
    text: str  # after "must be"


def paths(*patterns: str) -> str:
    """A pattern of all of these."""
    return '|'.join(patterns)


def outside_model(*names: str) -> str:
    """A pattern of keys with these names, but in the model, where they mean other things."""
    return rf'(?!model\.)(.*\.)?({paths(*names)})'


def is_real(value: Any, least: float = -math.inf) -> bool:
    is_bool = isinstance(value, bool)
    return isinstance(value, (int, float)) and not is_bool and value >= least


def is_whole(value: Any, least: int) -> bool:
    return is_real(value, least) and not value % 1 > 0


def is_list(value: Any, of: Any = dict) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(inner, of) for inner in value)


def is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_dict_or_list(value: Any) -> bool:
    return is_dict(value) or is_list(value)


def is_pipeline(value: Any) -> bool:
    return is_list(value, (dict, Callable))


def is_dict_of_paths(value: Any) -> bool:
    return is_dict(value) and is_list([*value.values()], str)


def are_classes(value: Any) -> bool:
    is_file = is_text(value) and not Path(value).is_dir()
    return is_list(value, str) or is_file


def are_names(value: Any) -> bool:
    return is_text(value) or is_list(value, str)


def is_positive_whole(value: Any) -> bool:
    return is_whole(value, 1)


def is_whole_or_never(value: Any) -> bool:
    return is_whole(value, -1)


def are_milestones(value: Any) -> bool:
    return is_list(value, (int, float)) and min(value, default=0) >= 0


def is_not_negative(value: Any) -> bool:
    return is_real(value, 0)


def is_size(value: Any) -> bool:
    return not is_real(value) or value >= 1


def is_loss_name(value: Any) -> bool:
    return is_text(value) and 'loss' in value


RULES = (
    Rule(
        outside_model(
            'auto_scale_lr',
            'batch_sampler',
            'custom_imports',
            'dataset',
            'default_hooks',
            r'default_hooks\.\w+',
            'env_cfg',
            'log_processor',
            'metainfo',
            'model',
            'optim_wrapper',
            'paramwise_cfg',
            'randomness',
            'sampler',
            'visualizer',
            '(train|val|test)_(cfg|dataloader)',
        ),
        is_dict,
        'a dict',
    ),
    Rule(outside_model('custom_hooks', 'datasets', 'vis_backends'), is_list, 'a list of dicts'),
    Rule(
        outside_model('param_scheduler', 'test_evaluator', 'val_evaluator'),
        is_dict_or_list,
        'a dict or a list of dicts',
    ),
    Rule(outside_model('pipeline'), is_pipeline, 'a list of transforms'),
    Rule(outside_model('ann_file', 'data_root', 'load_from', 'work_dir'), is_text, 'a path'),
    Rule(outside_model('data_prefix'), is_dict_of_paths, 'a dict of paths'),
    Rule(outside_model('classes'), are_classes, 'a list of names, or a file'),
    Rule('activation_checkpointing', are_names, 'a name or a list of names'),
    Rule(
        paths(
            r'train_cfg\.(max_epochs|max_iters|val_interval)',
            r'optim_wrapper\.accumulative_counts',
            r'param_scheduler\.(.*\.)?step_size',
        ),
        is_positive_whole,
        'a whole number, at least 1',
    ),
    Rule(
        paths(
            r'train_cfg\.val_begin',
            r'default_hooks\.checkpoint\.(interval|max_keep_ckpts)',
        ),
        is_whole_or_never,
        'a whole number, at least -1',
    ),
    Rule(r'param_scheduler\.(.*\.)?milestones', are_milestones, 'a list of numbers, at least 0'),
    Rule(
        paths(
            r'param_scheduler\.(.*\.)?gamma',
            r'optim_wrapper\.clip_grad\.(clip_value|max_norm)',
        ),
        is_not_negative,
        'a number, at least 0',
    ),
    Rule(r'model\..*\.(mask_size|output_size)', is_size, 'at least 1'),
    Rule(r'.*\.loss_name', is_loss_name, "a name with 'loss' in it, or mmengine only logs it"),
)


def check_values(cfg: Config) -> None:
    """Check a config against `RULES`."""
    for path, settings in dicts_in(cfg.to_dict()):
        for key, value in settings.items():
            if value is None and key not in NEVER_NONE:
                continue
            check_value(f'{path}.{key}'.lstrip('.'), value)


def check_value(path: str, value: Any) -> None:
    for rule in RULES:
        if re.fullmatch(rule.path, path) and not rule.holds(value):
            raise UserError(f'{path} must be {rule.text}, got {value!r}')
