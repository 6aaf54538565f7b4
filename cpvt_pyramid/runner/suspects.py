"""Which settings of a config an error is about, where the code that raises it names none.

    setting             failing expression              message
    gamma='a'           pt.pow(gamma)                   got (str), but expected one of ...
    score_thr=None      scores > cfg.score_thr          '>' not supported between ... and 'NoneType'
    max_per_img=300     scores.topk(max_per_img)        selected index k out of range

A setting is a suspect if the failing expression, or that of an outer call, reads a variable of its
name and value, and the message is about the value. If there is none, so are the settings of the
object whose method failed that the message is about.
"""

import inspect
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dis import opmap
from itertools import islice
from types import TracebackType
from typing import Any

import torch
from mmengine import registry as registries

from .configs import as_list, class_in_registry, is_real, kind_of

ROOTS = [r for r in vars(registries).values() if isinstance(r, registries.Registry)]
# How messages call the type of a value.
TYPE_NAMES = {
    bool: r'\bbool', int: r'\bint\b', float: r'\bfloat\b|integer',
    str: r'\bstr\b|string|literal|sequence|integer|<U', list: r'\blist\b|sequence',
    tuple: r'\btuple\b|\blist\b|sequence',
}  # fmt: skip
# Settings of a model, of which each of its parts gets an entry.
OF_PARTS = 'train_cfg', 'test_cfg'


@dataclass(frozen=True, eq=False)
class Setting:
    """An entry of a config that is not a dict itself."""

    path: str
    key: str
    value: Any
    owners: tuple[str, ...]  # the classes in `type` of the dicts around it, innermost first

    def __str__(self) -> str:
        return f'{self.path}={self.value!r}'

    def is_held_by(self, name: str, held: Any) -> bool:
        """Whether a variable may hold this setting; `means` may hold target_means."""
        related = f'_{name}'.endswith(f'_{self.key}')
        if name in ('cfg', *OF_PARTS):
            related = related or not {*self.path.split('.')[-2:]}.isdisjoint(OF_PARTS)
        elif not is_numeric(self.value):  # many variables have the same number
            related = related or self.key.endswith(f'_{name}')
        return related and is_same(held, self.value)


def suspects(
    error: BaseException,
    steps: Sequence[TracebackType],
    settings: Sequence[tuple[str, dict]],
    packages: Sequence[str],
) -> list[str]:
    """The settings that an error may be about, for example `model.bbox_head.loss_cls.gamma='a'`.

    Args:
        error: what was raised.
        steps: its traceback, outermost call first.
        settings: the dicts of the config, with their paths.
        packages: which run a config. In their innermost call, the failing expression may be about
            any number or string that it reads.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return []
    entries = entries_of(settings)
    owners = [class_of_self(step) for step in reversed(steps)]
    inside = True
    for step in reversed(steps):
        read = list(read_by(step))
        found = [entry for entry in entries if any(entry.is_held_by(*r) for r in read)]
        if names := most_likely(error, found, owners, named=True, inside=inside):
            return names
        # Dicts of settings.
        held = [v for _, v in read if isinstance(v, Mapping)]
        paths = [f'{path}.' for path, inner in settings if inner and inner in held]
        found = [entry for entry in entries if entry.path.startswith(tuple(paths))]
        if names := most_likely(error, found, owners):
            return names
        # The comprehensions of a function belong to it.
        whole = not step.tb_frame.f_code.co_name.startswith('<')
        inside = inside and not (whole and package_of(step) in packages)
    known = {kind_of(inner) for _, inner in settings} - {''}
    owner = next((name for name in owners if name in known), None)
    theirs = [entry for entry in entries if owner in entry.owners and is_unusual(entry, owner)]
    if names := most_likely(error, theirs, owners):
        return names
    return named_in(error, entries) if is_raised_by(steps[-1]) else []


def suspects_in_text(
    message: str, sources: Sequence[str], settings: Sequence[tuple[str, dict]]
) -> list[str]:
    """The same for an error of another process, of whose calls only the source lines are known."""
    entries = entries_of(settings)
    for source in reversed(sources):
        words = re.findall(r'\w+', source)
        found = [entry for entry in entries if entry.key in words]
        if names := most_likely(Exception(message), found, ()):
            return names
    return named_in(Exception(message), [e for e in entries if isinstance(e.value, str)])


def entries_of(settings: Sequence[tuple[str, dict]]) -> list[Setting]:
    entries, owners = [], {}
    for path, inner in settings:
        outer = path
        while outer and outer not in owners:
            outer = outer.rpartition('.')[0]
        kind = kind_of(inner)
        owners[path] = (kind, *owners.get(outer, ())) if kind else owners.get(outer, ())
        entries += [
            Setting(f'{path}.{key}'.lstrip('.'), key, value, owners[path])
            for key, value in inner.items()
            if not any(isinstance(v, Mapping) for v in [value, *as_list(value)])
        ]
    return entries


def most_likely(
    error: BaseException,
    entries: Sequence[Setting],
    owners: Sequence[str],
    named: bool = False,
    inside: bool = False,
) -> list[str]:
    """Those of some settings that an error is most likely about.

    Args:
        error: what was raised.
        entries: the settings.
        owners: the classes whose methods were called.
        named: whether variables of their names were read.
        inside: whether the message need not be about them.
    """
    if isinstance(error, (TypeError, ZeroDivisionError)) or 'scalar type' in str(error):
        inside = False  # the messages of these always are about a value, or about no setting
    if not isinstance(error, NameError):
        # Messages often have types.
        entries = [entry for entry in entries if entry.key != 'type' or entry.value is None]
    numbers = [entry for entry in entries if is_numeric(entry.value)]
    others = [entry for entry in entries if not is_numeric(entry.value)]
    for group in (
        # Numbers later: a message about two operands names both types.
        [entry for entry in others if is_about(error, entry.value)],
        [entry for entry in numbers if is_about(error, entry.value, by_type=named)],
        [entry for entry in numbers if inside and entry.owners],
        [entry for entry in others if inside and isinstance(entry.value, str)],
    ):
        if group:
            owned = [entry for entry in group if entry.owners[:1] and entry.owners[0] in owners]
            return list(map(str, owned or group))
    return []


def named_in(error: BaseException, entries: Sequence[Setting]) -> list[str]:
    """The settings whose key or quoted value is in a message."""
    words = set(re.findall(r"\w+_\w+|'\w+'", str(error)))
    return [
        str(entry)
        for entry in entries
        if entry.key != 'type' and words & {entry.key, *map(repr, as_list(entry.value))}
    ]


def is_unusual(entry: Setting, owner: str) -> bool:
    """Whether a setting of an object, or below it, can be the reason of an error that names none.

    Names are so only where the class expects no text.
    """
    if entry.value is None or entry.owners[0] != owner and not isinstance(entry.value, str):
        return False
    if not isinstance(entry.value, str):
        return True
    for base in getattr(class_named(entry.owners[0]), '__mro__', ()):
        parameter = inspect.signature(base.__init__).parameters.get(entry.key)
        if parameter:
            hint = parameter.annotation
            known = hint is not parameter.empty or parameter.default is not None
            return known and 'str' not in str(hint) and not isinstance(parameter.default, str)
    return False


def class_named(name: str) -> Any:
    """What a name in `type` stands for, or None."""
    found = (class_in_registry(name, root, None) for root in ROOTS)
    return next(filter(None, found), None)


def read_by(step: TracebackType) -> Iterator[tuple[str, Any]]:
    """The variables, attributes and items that a failing expression reads, by their last name."""
    expression = failing_expression(step)
    # Items, as attributes: x['name'], x.get('name')
    expression = re.sub(r"""(?:\.get\(|\[)['"](\w+)['"]""", r'.\1', expression)
    for stars, chain in re.findall(r'(\*\*)?([^\W\d]\w*(?:\.\w+)*)', expression):
        first, *rest = chain.split('.')
        if first not in step.tb_frame.f_locals:
            continue
        name, held = first, step.tb_frame.f_locals[first]
        yield name, held
        for name in rest:
            with suppress(Exception):  # of a property
                held = held[name] if isinstance(held, Mapping) else getattr(held, name)
                yield name, held
        if stars and isinstance(held, Mapping):
            yield from held.items()


def failing_expression(step: TracebackType) -> str:
    """The source of the expression in which a call failed; its whole line before Python 3.11."""
    code = step.tb_frame.f_code
    position = [step.tb_lineno, step.tb_lineno, None, None]
    # The position of an unpacking is that of its targets.
    if hasattr(code, 'co_positions') and code.co_code[step.tb_lasti] != opmap['UNPACK_SEQUENCE']:
        position = list(next(islice(code.co_positions(), step.tb_lasti // 2, None)))
    start, end, first, last = position
    lines = linecache.getlines(code.co_filename)[(start or 1) - 1 : end or 0]
    if lines and last is not None:
        lines[-1] = lines[-1].encode()[:last].decode(errors='ignore')
        lines[0] = lines[0].encode()[first:].decode(errors='ignore')
    return ''.join(lines)


def is_raised_by(step: TracebackType) -> bool:
    """Whether a step of a traceback is a `raise` or `assert`."""
    return step.tb_frame.f_code.co_code[step.tb_lasti] == opmap['RAISE_VARARGS']


def package_of(step: TracebackType) -> str:
    return step.tb_frame.f_globals.get('__name__', '').partition('.')[0]


def class_of_self(step: TracebackType) -> str:
    return type(step.tb_frame.f_locals.get('self')).__name__


def is_same(held: Any, value: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(held, Mapping):
        return dict(held) == dict(value)
    if isinstance(value, (list, tuple)) and isinstance(held, (list, tuple)):
        return len(held) == len(value) and all(map(is_same, held, value))
    return type(held) is type(value) and held == value


def is_numeric(value: Any) -> bool:
    """Whether a value is a number, but no flag, or a list of numbers."""
    if isinstance(value, (list, tuple)):
        return all(map(is_numeric, value))
    return is_real(value)


def is_about(error: BaseException, value: Any, by_type: bool = True) -> bool:
    """Whether the message of an error names a value, its type, its length, or what is inside.

    Args:
        error: what was raised.
        value: what it may be about.
        by_type: whether the type of a number is enough.
    """
    message = re.sub(r'\[[\d, ]+\]', '', str(error))  # shapes
    message = re.sub(r'(expected|must be) [^:]*, not ', '', message)  # types that it is not
    if isinstance(error, ZeroDivisionError):
        return 0 in as_list(value) or is_numeric(value) and value == 0
    if value is None:
        return 'None' in message
    if isinstance(value, (list, tuple)):
        if f'({len(value)})' in message or any(
            is_about(error, v, not isinstance(v, int)) for v in value
        ):
            return True
    elif is_numeric(value) and (not by_type or value in (0, 1, 2)):  # in many messages
        return by_type and bool(re.search(TYPE_NAMES[type(value)], message))
    text = rf'(?<![\w.-]){re.escape(str(value))}(?![\w.])'
    return bool(re.search(rf'{TYPE_NAMES.get(type(value), text)}|{text}', message))
