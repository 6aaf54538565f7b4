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


def source(value: Any, indent: int, used: int) -> str:
    """Python source of a setting.

    Args:
        value: dicts, lists, tuples, strings, numbers.
        indent: of the lines after the first.
        used: characters before the value on its first line.
    """
    line = inline(value)
    if used + len(line) + 1 <= WIDTH or not isinstance(value, (dict, list, tuple)) or not value:
        return line
    inner = indent + 4
    space = '\n' + ' ' * inner
    if isinstance(value, dict):
        if all(is_name(key) for key in value):
            items = [f'{k}={source(v, inner, inner + len(k) + 1)}' for k, v in value.items()]
            return f'dict({space}{("," + space).join(items)})'
        items = [f'{k!r}: {source(v, inner, inner + len(repr(k)) + 2)}' for k, v in value.items()]
        return f'{{{space}{("," + space).join(items)}}}'
    left, right = '()' if isinstance(value, tuple) else '[]'
    if any(isinstance(item, (dict, list)) for item in value):
        items = [source(item, inner, inner) for item in value]
        return f'{left}{space}{("," + space).join(items)}{right}'
    lines = ['']
    for item in map(inline, value):  # as many as fit on a line
        if lines[-1] and inner + len(lines[-1]) + len(item) + 2 > WIDTH:
            lines.append('')
        lines[-1] += f'{" " if lines[-1] else ""}{item},'
    return f'{left}{space}{space.join(lines).removesuffix(",")}{right}'


def inline(value: Any) -> str:
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, dict):
        if all(is_name(key) for key in value):
            return f'dict({", ".join(f"{k}={inline(v)}" for k, v in value.items())})'
        return f'{{{", ".join(f"{k!r}: {inline(v)}" for k, v in value.items())}}}'
    if isinstance(value, list):
        return f'[{", ".join(map(inline, value))}]'
    if isinstance(value, tuple):
        return f'({", ".join(map(inline, value))}{"," if len(value) == 1 else ""})'
    if isinstance(value, type):
        raise UserError(f'the base must name types with strings, got {one_line(repr(value))}')
    return repr(value)


def is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and not iskeyword(key)
