"""What is wrong with a data set, in a line for each kind."""

from collections import defaultdict
from typing import Any, NamedTuple, Optional

from ..tooling.command import UserError

SHOWN = 3  # items of a problem that its line names


class Problem(NamedTuple):
    """A kind of defect in a data set, and what has it."""

    kind: str  # for example 'annotations without a bbox'
    items: list[str]  # for example 'annotation 3 of a.jpg'
    is_error: bool = True  # training stops or learns something wrong; else it does without

    @property
    def lines(self) -> list[str]:
        """All that has it."""
        severity = 'error' if self.is_error else 'warning'
        return [f'{severity}: {self.kind}', *(f'    {item}' for item in self.items)]

    def __str__(self) -> str:
        more = f' and {len(self.items) - SHOWN} more' if len(self.items) > SHOWN else ''
        return f'{self.lines[0]}: {", ".join(self.items[:SHOWN])}{more}'


class Checked(NamedTuple):
    """What the check of a data set found."""

    problems: list[Problem]
    images: int  # number of images
    decoded: int  # how many of them were read completely
    good: Optional[dict[str, Any]] = None  # a COCO file without what has errors


class Defects:
    """Collects problems by kind, in the order in which the kinds are first seen.

    An error refuses data, so the check must be certain; otherwise it warns.
    """

    def __init__(self) -> None:
        self._items: dict[tuple[str, bool], list[str]] = defaultdict(list)

    def add(self, kind: str, item: str, is_error: bool = True) -> None:
        self._items[kind, is_error].append(item)

    def warn(self, kind: str, item: str) -> None:
        self.add(kind, item, False)

    def problems(self) -> list[Problem]:
        """Errors, then warnings."""
        found = [Problem(kind, items, error) for (kind, error), items in self._items.items()]
        return sorted(found, key=lambda problem: not problem.is_error)

    def stop(self, skip_bad: bool = False) -> None:
        """Raise a UserError if there are errors, unless what has them is left out."""
        if not skip_bad and any(is_error for _, is_error in self._items):
            stop_with_errors()


def stop_with_errors() -> None:
    raise UserError(
        'the data have the errors above; correct them, or leave out what has errors with '
        'cpvt new-config --skip-bad'
    )
