"""What a tool changes in a config and why, as data.

Functions that begin with `plan_` read a config, change nothing, and return changes. `apply` is the
only place that writes into a config after it is loaded. A plan is shown before a run and saved in
its work dir, so that every setting has an answer to "who set this?".
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Optional

from mmengine.config import Config

from ..tooling.files import write_text
from .parts import kind_of

LONGEST = 60  # letters of a change on the terminal; the file has all


class Action(Enum):
    SET = 'set'
    APPEND = 'append'
    WRAP = 'wrap'
    REMOVE = 'remove'
    NOTE = 'note'


class Change(NamedTuple):
    """A change of one setting. `path` is as in --cfg-options."""

    action: Action
    path: str
    value: Any
    reason: str

    def __str__(self) -> str:
        """The change as a line of Python."""
        if self.action is Action.APPEND:
            return f'{self.path} += [{shown(self.value)}]'
        if self.action is Action.REMOVE:
            return f'del {self.path}'
        if self.action is Action.NOTE:
            return f'# {self.path}'
        return f'{self.path} = {shown(self.value)}'


Plan = tuple[Change, ...]


def set_value(path: str, value: Any, reason: str) -> Change:
    """Set a setting, and create the dicts that it is in if there are none."""
    return Change(Action.SET, path, value, reason)


def append(path: str, value: Any, reason: str) -> Change:
    """Append to a list, which may be missing, None or a tuple."""
    return Change(Action.APPEND, path, value, reason)


def wrap(path: str, value: dict, reason: str) -> Change:
    """Put a dict in the place of another one, which goes into it where `value` has `PRESENT`."""
    return Change(Action.WRAP, path, value, reason)


def remove(path: str, reason: str) -> Change:
    return Change(Action.REMOVE, path, None, reason)


def note(path: str, reason: str) -> Change:
    """Say what happens to a setting while the run is built. `apply` does nothing."""
    return Change(Action.NOTE, path, None, reason)


class Present:
    """Stands for the value that a change replaces."""

    def __repr__(self) -> str:
        return '...'


PRESENT = Present()


# Apply


def apply(cfg: Config, plan: Iterable[Change]) -> None:
    """Carry out a plan, in its order."""
    for change in plan:
        if change.action is Action.NOTE:
            continue
        *parents, key = change.path.split('.')
        place = dict_at(cfg, parents)
        if change.action is Action.SET:
            place[key] = change.value
        elif change.action is Action.APPEND:
            place[key] = [*(place.get(key) or []), change.value]
        elif change.action is Action.WRAP:
            present = place[key]
            items = change.value.items()
            place[key] = {k: present if v is PRESENT else v for k, v in items}
        else:
            del place[key]


def dict_at(cfg: Config, keys: Iterable[str]) -> Any:
    """The dict at a path of these keys; it is created if there is none."""
    place: Any = cfg
    for key in keys:
        if isinstance(place, (list, tuple)):
            place = place[int(key)]
            continue
        if place.get(key) is None:
            place[key] = {}
        place = place[key]
    return place


# Show


def shown(value: Any) -> str:
    """A value as Python writes it, but a dict with a type as a call of it."""
    if isinstance(value, Mapping):
        items = {key: shown(inner) for key, inner in value.items() if key != 'type'}
        if kind := kind_of(dict(value)):
            return f'{kind}({", ".join(f"{key}={text}" for key, text in items.items())})'
        return f'{{{", ".join(f"{key!r}: {text}" for key, text in items.items())}}}'
    if isinstance(value, (list, tuple)):
        return f'[{", ".join(map(shown, value))}]'
    return value.__name__ if isinstance(value, type) else repr(value)


def plan_lines(plan: Plan, longest: Optional[int] = None) -> Iterator[str]:
    """A line for each change, with its reason. Longer changes are cut to `longest` letters."""
    changes = [str(change) for change in plan]
    if longest:
        changes = [shorten(text, longest) for text in changes]
    width = max(map(len, changes), default=0)
    for text, change in zip(changes, plan):
        yield f'{text:<{width}}  # {change.reason}'


def shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else f'{text[: longest - 3]}...'


def show_plan(plan: Plan, config: str) -> None:
    """Print a plan of changes to a config file."""
    if not plan:
        print(f'nothing is changed in {config}')
        return
    print(f'changed in {config}:')
    for line in plan_lines(plan, LONGEST):
        print(f'  {line}')


def save_plan(plan: Plan, config: str, file: Path) -> None:
    """Write a plan; a training and a test in one work dir have files of their own."""
    text = ''.join(f'{line}\n' for line in plan_lines(plan))
    write_text(file, f'# Changed in {config}\n{text}')
