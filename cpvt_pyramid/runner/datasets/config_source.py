"""The text of a config, as a person would write it."""

from keyword import iskeyword
from typing import Any, Optional

from yapf.yapflib import yapf_api  # a requirement of mmengine

from ...tooling.command import UserError, one_line


class Code(str):
    """A piece of Python in a config."""


def text_of_settings(settings: dict[str, Any], comments: Optional[dict[str, str]] = None) -> str:
    """The text of a config with comments above some settings."""
    lines = []
    for key, value in settings.items():
        if comments and key in comments:
            lines.append(f'\n# {comments[key]}')
        lines.append(f'{key} = {source(value)}')
    text = '\n'.join(lines) + '\n'
    return yapf_api.FormatCode(text, style_config='{based_on_style: pep8, column_limit: 100}')[0]


def source(value: Any) -> str:
    """Python source of a setting of dicts, lists, tuples, strings and numbers."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, type):
        raise UserError(f'the base must name types with strings, got {one_line(repr(value))}')
    if isinstance(value, dict):
        if all(isinstance(k, str) and k.isidentifier() and not iskeyword(k) for k in value):
            return f'dict({", ".join(f"{k}={source(v)}" for k, v in value.items())})'
        return f'{{{", ".join(f"{k!r}: {source(v)}" for k, v in value.items())}}}'
    if isinstance(value, (list, tuple)):
        items = ', '.join(map(source, value))
        end = ',' if len(value) == 1 else ''
        return f'[{items}]' if isinstance(value, list) else f'({items}{end})'
    return repr(value)
