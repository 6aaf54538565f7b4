"""The text of a config, as a person would write it."""

from keyword import iskeyword
from typing import Any, Optional

from ...tooling.command import UserError, one_line

WIDTH = 100  # of a line


class Code(str):
    """A piece of Python in a config."""


def text_of_settings(settings: dict[str, Any], comments: Optional[dict[str, str]] = None) -> str:
    """The text of a config with comments above some settings."""
    lines = []
    for key, value in settings.items():
        if comments and key in comments:
            lines.append(f'\n# {comments[key]}')
        lines.append(f'{key} = {source(value, 0, len(key) + 3)}')
    return '\n'.join(lines) + '\n'


def source(value: Any, indent: int = 0, used: int = 0) -> str:
    """Python source of a setting of dicts, lists, tuples, strings and numbers.

    Args:
        value: the setting.
        indent: of the lines after the first.
        used: characters before the value on its first line.
    """
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, type):
        raise UserError(f'the base must name types with strings, got {one_line(repr(value))}')
    if isinstance(value, dict) and all(map(is_name, value)):
        left, right, items = 'dict(', ')', [(f'{key}=', item) for key, item in value.items()]
    elif isinstance(value, dict):
        left, right, items = '{', '}', [(f'{key!r}: ', item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        left, right = '[]' if isinstance(value, list) else '()'
        items = [('', item) for item in value]
    else:
        return repr(value)
    flat = [key + source(item, indent, -(10**9)) for key, item in items]
    end = ',' if isinstance(value, tuple) and len(value) == 1 else ''
    line = left + ', '.join(flat) + end + right
    if used + len(line) + 1 <= WIDTH or not items:
        return line
    inner = indent + 4
    lines = ['']
    if isinstance(value, dict) or any(isinstance(item, (dict, list)) for item in value):
        lines = [f'{key}{source(item, inner, inner + len(key))},' for key, item in items]
    else:
        for item in flat:  # as many as fit on a line
            if lines[-1] and inner + len(lines[-1]) + len(item) + 2 > WIDTH:
                lines.append('')
            lines[-1] += f'{" " if lines[-1] else ""}{item},'
    space = '\n' + ' ' * inner
    text = space.join(lines)
    return f'{left}{space}{text if end else text.removesuffix(",")}{right}'


def is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and not iskeyword(key)
