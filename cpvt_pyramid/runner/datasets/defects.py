"""What is wrong with a data set, in a line for each kind."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...tooling.command import UserError

SHOWN = 3  # items of a problem that its line names


class Problem(NamedTuple):
    """A kind of defect in a data set, and what has it."""

    kind: str  # for example 'annotations without a bbox'
    items: list[str]  # for example 'annotation 3 of a.jpg'
    is_error: bool = True  # training stops or learns something wrong; else it does without

    @property
    def severity(self) -> str:
        return 'error' if self.is_error else 'warning'

    def __str__(self) -> str:
        more = f' and {len(self.items) - SHOWN} more' if len(self.items) > SHOWN else ''
        return f'{self.severity}: {self.kind}: {", ".join(self.items[:SHOWN])}{more}'


class Checked(NamedTuple):
    """What the check of a data set found."""

    problems: list[Problem]
    write_clean: Callable[[Path], int]  # write what is good to a file; returns its images
    images: int  # number of images
    decoded: int  # how many of them were read completely


class Defects:
    """Collects problems by kind, in the order in which the kinds are first seen.

    A check that refuses data must be certain: only then it reports an error, else a warning.
    """

    def __init__(self) -> None:
        self.errors: dict[str, list[str]] = defaultdict(list)
        self.warnings: dict[str, list[str]] = defaultdict(list)

    def error(self, kind: str, item: str) -> None:
        self.errors[kind].append(item)

    def warn(self, kind: str, item: str) -> None:
        self.warnings[kind].append(item)

    def problems(self) -> list[Problem]:
        return [Problem(*found) for found in self.errors.items()] + [
            Problem(*found, False) for found in self.warnings.items()
        ]

    def report(self) -> None:
        """Print a line for each kind."""
        for problem in self.problems():
            print(problem)

    def stop(self, skip_bad: bool = False) -> None:
        """Raise a UserError if there are errors, unless what has them is left out."""
        if self.errors and not skip_bad:
            stop_with_errors()


def stop_with_errors() -> None:
    raise UserError(
        'the data have the errors above; correct them, or leave out what has errors with --skip-bad'
    )


def report_lines(problems: Sequence[Problem]) -> list[str]:
    """All problems with all of their items."""
    lines = []
    for problem in problems:
        lines += [f'  {problem.severity}: {problem.kind}', *(f'    {i}' for i in problem.items)]
    return lines
